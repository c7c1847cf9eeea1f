"""Parameters of which a model reads rows and nothing else: their clipped sums are sparse, and cost what was read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from anyorder import checks
from anyorder.clipping.arithmetic import squares_of
from anyorder.clipping.base import Table, count_of
from anyorder.clipping.batch import UnitMap
from anyorder.clipping.norms import RowsRead, Settled, Weights
from anyorder.clipping.uses import EmbeddingUse
from anyorder.errors import ArgumentError

__all__ = ["NO_TABLES", "Tables", "settle_lookups"]

_MOST_ROWS = 2**40  # times the units of a batch, a row and a unit are one int64


@dataclass(frozen=True)
class Tables:
    """The parameters of a model that are read as tables.

    Attributes:
        by_name: how each is read, by the parameter's name.
        count_norm: None, or the L2 bound on what a unit adds to the counts of rows, over all tables together.
    """

    by_name: Mapping[str, Table] = field(default_factory=lambda: MappingProxyType({}))
    count_norm: float | None = None

    @classmethod
    def of(cls, module: nn.Module, tables: Mapping[str, Table], count_norm: float | None) -> "Tables":
        """Raises: ArgumentError for a name, a shape or a norm that does not fit the module."""
        if count_norm is not None:
            count_norm = checks.positive("count_norm", count_norm)
            if not tables:
                raise ArgumentError("count_norm bounds the counts of rows, and there are no tables; leave it out")
        parameters = dict(module.named_parameters())
        for name, table in tables.items():
            p = parameters.get(name)
            if p is None or not p.requires_grad:
                raise ArgumentError(f"tables must be trainable parameters of the model, by name; got {name!r}")
            checks.integer("num_rows", table.num_rows, low=1, high=_MOST_ROWS)
            if p.dim() != 2 or p.shape[1] != table.width or p.shape[0] not in (0, table.num_rows):
                raise ArgumentError(
                    f"the table {name} has {table.num_rows} rows of {table.width} numbers, and its parameter must have "
                    f"the same shape, or no rows; got shape {tuple(p.shape)}"
                )
            if p.dtype != table.dtype:
                raise ArgumentError(f"the table {name} is {table.dtype}, and its parameter {p.dtype}")
        return cls(MappingProxyType(dict(tables)), count_norm)

    def nothing(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(V, D), the sum of nobody."""
        table = self.by_name[name]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return _sparse(none, torch.zeros(0, table.width, dtype=dtype, device=device), (table.num_rows, table.width))

    def counts(self, settled: Mapping[str, Settled], units: int, device: torch.device) -> dict[str, Tensor]:
        """{count_of(table): (V,) sparse float64}, how many units read each row, weighted; nothing without count_norm.

            sum over units u that read the row of  min(1, count_norm / sqrt(m_u)),    m_u: rows that u reads, in all

        Guarantee: what a unit adds, all tables together, is a function of its own ids alone and has norm at most
            count_norm in exact arithmetic: it has m_u entries, each at most count_norm / sqrt(m_u). That does not rest
            on the gradient, so that a unit whose gradient is NaN or infinite is counted like any other.
        """
        if self.count_norm is None:
            return {}
        none = torch.zeros(0, dtype=torch.int64, device=device)
        nothing = RowsRead(none, none, none)
        read = {name: settled[name].rows or nothing if name in settled else nothing for name in self.by_name}
        number = torch.zeros(units, dtype=torch.float64, device=device)
        for rows in read.values():
            number += torch.bincount(rows.owner, minlength=units)
        # Just under count_norm, for the rounding of root and quotient. No rows: infinity, and so 1, of nothing.
        weights = (self.count_norm * (1 - 1e-12) / number.sqrt()).clamp(max=1.0)
        result = {}
        for name, rows in read.items():
            values = weights.new_zeros(len(rows.distinct)).index_add_(0, rows.place, weights[rows.owner])
            result[count_of(name)] = _sparse(rows.distinct, values, (self.by_name[name].num_rows,))
        return result


NO_TABLES = Tables()


def settle_lookups(uses: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """Norms and sparse sum of the gradient that all lookups in one table have together.

    A unit's gradient has the rows that its examples read, without those of padding: these are added up and kept, so
    that the norm is that of what is summed.
    """
    if len(uses) == 1 and units.classes is None and units.index.device.type == "cpu":
        once = _each_once(uses[0], units)
        if once is not None:
            return once
    shape, count = uses[0].shape, max(1, units.count)
    reads = [_reads(use, units) for use in uses]
    keys = [torch.add(owner, ids, alpha=count) for ids, owner, _ in reads]  # by row, then by unit
    found, pair = torch.unique(torch.cat(keys) if len(keys) > 1 else keys[0], return_inverse=True)
    rows = reads[0][2].new_zeros(len(found), shape[1])
    for (_, _, g), own in zip(reads, pair.split([len(own) for own in keys]), strict=True):
        rows.index_add_(0, own, g)
    owner = found % count
    distinct, place = torch.unique_consecutive(found // count, return_inverse=True)
    return _settled(rows, RowsRead(owner, place, distinct), shape, units)


def _each_once(use: EmbeddingUse, units: UnitMap) -> Settled | None:
    """The same where no unit reads a row twice, as most batches come: nothing is to add. Else None.

    Each example is a unit; so in the order in which rows were read the units ascend, those of each row too.
    """
    ids, owner, rows = _reads(use, units)
    flat, unit = ids.numpy(), owner.numpy()
    if not len(flat):
        return None
    order = flat.argsort(kind="stable")
    ranked, by = flat[order], unit[order]
    same = ranked[1:] == ranked[:-1]
    if (same & (by[1:] == by[:-1])).any():
        return None
    first = np.empty(len(flat), bool)
    first[0] = True
    np.logical_not(same, out=first[1:])
    place = np.empty(len(flat), np.int64)
    place[order] = first.cumsum() - 1
    read = RowsRead(owner, torch.from_numpy(place), torch.from_numpy(ranked[first]))
    return _settled(rows, read, use.shape, units)


def _settled(rows: Tensor, read: RowsRead, shape: Sequence[int], units: UnitMap) -> Settled:
    """From the rows (K, D) of the pairs of `read`."""
    owner, place, distinct = read.owner, read.place, read.distinct
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device).index_add_(0, owner, squares_of(rows))

    def total(weights: Weights) -> Tensor:
        summed = weights.add_rows(rows, owner, place, to=rows.new_zeros(len(distinct), rows.shape[1]))
        return _sparse(distinct, summed, shape)

    return Settled(squares, total, rows=read)


def _reads(use: EmbeddingUse, units: UnitMap) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) ids, (n,) units and (n, D) what came back, of all that was read but padding."""
    ids, g = use.ids.flatten(), use.output_gradients.to(use.dtype).flatten(0, 1)
    owner = units.index if len(ids) == len(units.index) else units.index.repeat_interleave(use.ids.shape[1])
    if use.padding is None:
        return ids.long(), owner, g
    read = (ids != use.padding).nonzero()[:, 0]
    return ids[read].long(), owner[read], g[read]


def _sparse(ids: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A coalesced tensor of rows at ascending ids."""
    return torch.sparse_coo_tensor(ids[None], values, tuple(shape), is_coalesced=True, check_invariants=False)
