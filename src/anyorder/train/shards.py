"""Who owns what: every rank adds up, noises and keeps its own coordinates of the vector of all parameters."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from anyorder.release.ranks import Range
from anyorder.train.distributed import Group
from anyorder.train.fsdp import is_sharded, rows_of, shard_of

__all__ = ["Shards"]


class Shards:
    """The coordinates of all trainable parameters, flattened one behind the other, dealt out to the ranks.

    A parameter that every rank has whole is summed, noised and divided by one rank for each coordinate, and then
    gathered: nobody makes a number that another rank makes too, and all ranks get the same bits. These coordinates
    are dealt out evenly. Of a parameter sharded by FSDP2, each rank owns the rows that it has, and keeps them.

    A rank's own vector holds its range of the whole parameters' coordinates first, then its rows, in their order. It is
    kept in pieces, one behind the other: one for each parameter where a process is alone, so that nothing is copied;
    else one.

    Args:
        parameters: in the order of the coordinates.

    Attributes:
        size: number of coordinates.
        ranges: this rank's coordinates, in the order of its own vector.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group) -> None:
        self.group = group
        self._whole = {name: p for name, p in parameters.items() if not is_sharded(p)}
        self._sharded = {name: p for name, p in parameters.items() if is_sharded(p)}
        sizes = {name: p.numel() for name, p in parameters.items()}
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.size = sum(sizes.values())
        self._alone = group.size == 1 and not self._sharded
        self._whole_size = sum(p.numel() for p in self._whole.values())
        most = -(-self._whole_size // group.size)
        self._cuts = [min(rank * most, self._whole_size) for rank in range(group.size + 1)]
        low, high = self._cuts[group.rank : group.rank + 2]
        self.ranges = _joined([
            *_overlap(low, high, [(starts[name], p.numel()) for name, p in self._whole.items()]),
            *((starts[name] + i, starts[name] + j) for name, (i, j) in self._own_rows(group.rank).items()),
        ])  # fmt: skip
        if not self.size:  # a model of tables alone
            self.ranges = [(0, 0)]

    def _own_rows(self, rank: int) -> dict[str, Range]:
        """The coordinates of a rank's rows within each sharded parameter."""
        ranges = {name: rows_of(p, rank, self.group.size) for name, p in self._sharded.items()}
        widths = {name: math.prod(p.shape[1:]) for name, p in self._sharded.items()}
        return {name: (low * widths[name], high * widths[name]) for name, (low, high) in ranges.items()}

    def sum_of_own(self, sums: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's coordinates of the sum over ranks of `sums`, each of which covers all coordinates.

        Returns: flat pieces of one dtype, the widest of the sums; they may be the sums themselves.
        """
        if self._alone:
            flat = [sums[name].reshape(-1) for name in self._whole]
            if not flat:
                return []
            widest = functools.reduce(torch.promote_types, {x.dtype for x in flat})
            return [x.to(widest) for x in flat]
        whole = [torch.cat([sums[name].reshape(-1) for name in self._whole])] if self._whole else []
        parts = []
        for rank, (low, high) in enumerate(pairwise(self._cuts)):
            pieces = [vector[low:high] for vector in whole]
            pieces += [sums[name].reshape(-1)[i:j] for name, (i, j) in self._own_rows(rank).items()]
            parts.append(torch.cat(pieces) if self._sharded else pieces[0])
        return [self.group.sum_of_parts(parts)]

    def gradients(self, pieces: list[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its gradient, cut out of the ranks' own vectors; of sharded ones, the own shard."""
        if self._alone:
            for p, part in zip(self._whole.values(), pieces, strict=True):
                yield p, part.view(p.shape).to(p.dtype)
            return
        (own,) = pieces
        low, high = self._cuts[self.group.rank : self.group.rank + 2]
        if self._whole:
            whole = self.group.concatenated(own[: high - low], self._whole_size)
            parts = torch.split(whole, [p.numel() for p in self._whole.values()])
            for p, part in zip(self._whole.values(), parts, strict=True):
                yield p, part.view(p.shape).to(p.dtype)
        start = high - low
        for name, (i, j) in self._own_rows(self.group.rank).items():
            p = self._sharded[name]
            yield p, shard_of(p, own[start : start + j - i].to(p.dtype))
            start += j - i


def _overlap(low: int, high: int, runs: Iterable[tuple[int, int]]) -> Iterator[Range]:
    """The coordinates behind places low, .., high - 1 of the concatenation of runs (first coordinate, length)."""
    place = 0
    for start, length in runs:
        i, j = max(low - place, 0), min(high - place, length)
        if i < j:
            yield start + i, start + j
        place += length


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The ranges that are not empty, neighbours joined."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        elif start < stop:
            result.append((start, stop))
    return result
