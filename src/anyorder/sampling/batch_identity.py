"""Which batch goes into the model: recognised by the memory of its tensors, not by when it was handed out.

A step names the units of the batch that the model is called on. What a loader hands out is noted here (`add`), and
what the model is given is looked up (`find`): it is a batch whose memory it shares, row for row; else the one batch
that waits, and where several wait it is refused. So a loop that prefetches, swaps or drops batches has none of them
clipped by the units of another.
"""

import weakref
from collections.abc import Iterable, Iterator
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.errors import ArgumentError, TrainingError
from anyorder.ledger import Units
from anyorder.sampling.batch_classes import named_parts
from anyorder.sampling.shapes import RowShapes

_LOOKS = 3  # batches whose copies are compared with the originals: what a loop does to one, it does to all
_DEEP = 4  # containers within containers that are searched for tensors
_ADVICE = (
    "Use each batch before the next is fetched: a DataLoader with num_workers= and pin_memory= runs ahead by itself, "
    "and Lightning does not fetch ahead where the data set has a __len__. Or call loader.use(batch), with the batch as "
    "the loader gave it, right before model(..)"
)


class Batch:
    """One batch that the loader handed out.

    Attributes:
        units: one id for each example, in the batch's order.
        padding: rows behind those of the examples, which fill the batch up and count for nothing.
        position: its number, counted over all epochs.
        iteration: the number of the iteration that gave it.
        rows: that the model is called on, those of the padding too.
        shapes: the public shapes of the rows; None: all have that of the batch.
        empty: (rows,) those that are made up and count for nothing; None: there are none.
        single_rows: lists in the batch with one value for each row.
        used: whether a backward pass has used it.
        passes: of the model over it, and of which step they are.
    """

    def __init__(
        self,
        units: Units,
        position: int,
        iteration: int,
        padding: int = 0,
        shapes: RowShapes | None = None,
        empty: NDArray[np.bool_] | None = None,
        single_rows: Iterable[list[Any]] = (),
    ) -> None:
        self.units, self.position, self.iteration, self.padding = units, position, iteration, padding
        self.shapes, self.empty, self.single_rows = shapes, empty, single_rows
        self.rows, self.used = len(units) + padding, False
        self.passes: tuple[int, Any] | None = None


class _KnownTensor:
    """One tensor of a batch: its memory is remembered, and is its own for as long as the tensor lives."""

    def __init__(self, tensor: Tensor, batch: Batch) -> None:
        self.tensor = weakref.ref(tensor)
        self.batch = batch
        self.start, self.end = _span(tensor)

    def shares(self, own: Tensor, device: torch.device, span: tuple[int, int]) -> bool:
        """Whether another tensor, of this device and memory, shares memory with this one, which has not moved."""
        overlap = span[0] < self.end and self.start < span[1]
        return overlap and own.device == device and _span(own) == (self.start, self.end)


class BatchIdentity:
    """The batches that were handed out, by the memory of their tensors and in their order.

    What is given to the model belongs to the batch whose memory it shares: the tensors themselves, or views of them.
    Tensors that share none (copies on a device, features computed in the loop) are taken for those of the one batch
    that is waiting: handed out, and not yet given to the model. Where several wait, nothing tells which one is meant.
    """

    def __init__(self) -> None:
        self._known: list[_KnownTensor] = []
        self._waiting: list[Batch] = []
        self._called: Batch | None = None
        self._left: set[int] = set()
        self._last: tuple[Any, Batch] | None = None  # held, so that copies can be compared with it
        self._handed: set[int] = set()  # ids of its tensors
        self._looks = _LOOKS

    def add(self, batch: Any, handed: Batch) -> None:
        """The batch goes to the user now. Batches of iterations that were left early wait no longer."""
        if self._waiting:
            self._waiting = [h for h in self._waiting if h.iteration not in self._left and h is not self._called]
        self._left.clear()
        flat = type(batch) in (tuple, list) and set(map(type, batch)) == {Tensor}  # as most batches are
        tensors = batch if flat else list(_tensors_in(batch))
        again = set(map(id, tensors))  # a list of batches hands the same tensors out in each epoch
        before, self._known = self._known, []
        for known in before:
            if (own := known.tensor()) is not None and not (known.batch.used and id(own) in again):
                self._known.append(known)
        self._known += map(_KnownTensor, tensors, repeat(handed))
        self._waiting.append(handed)
        self._last, self._handed = (batch, handed), again

    def leave(self, iteration: int) -> None:
        """The iteration was ended by the user, before its last batch."""
        self._left.add(iteration)

    def use(self, batch: Any) -> None:
        """The next tensors that share no memory with any batch are computed from this one.

        Raises: TrainingError if it is not a batch of this loader (or a part of one).
        """
        found = self._last[1] if self._last is not None and self._last[0] is batch else None
        for tensor in _tensors_in(batch):
            found = found or next((k.batch for k in reversed(self._known) if k.tensor() is tensor), None)
        if found is None:
            raise TrainingError(
                "use() must be given a batch as the loader gave it, or one of its tensors, before it is copied "
                "or changed"
            )
        self._waiting = [found]

    def find(self, tensors: Iterable[Tensor], known: Batch | None = None) -> Batch:
        """The batch that these tensors belong to, which is then called.

        Args:
            known: the batch that they were computed of, where that was followed.

        Raises:
            TrainingError: no batch waits, several do, the tensors are of several batches, or of another than the one
                that waits, the batch was used already, or its rows are not in their order.
            ArgumentError: they have another number of rows.
        """
        given = list(tensors)
        waits = known is not None and self._waiting == [known] and not known.used
        as_handed = waits and self._handed.issuperset(map(id, given))
        owners = [] if as_handed else list(filter(None, map(self._owners, given)))
        batch = (self._recognised(owners) if owners else None) or self.newest()
        if known is not None and known is not batch:
            raise TrainingError(
                "the model was given what was computed of another batch than the one that is next: its rows would be "
                "clipped as those of other units. Make all passes over a batch before the next batch is fetched, or "
                "call loader.use(batch), with the batch as the loader gave it, right before model(..)"
            )
        _check_rows(given, batch.rows)
        in_order = True
        for places in owners:
            in_order &= places.get(batch, True)
        if not in_order and any(tensor.shape[:1] != (batch.rows,) for tensor in given):
            raise ArgumentError(
                "a tensor that the model was given has the examples in another dimension than the first: give each "
                "tensor one row for each example, and transpose it in forward"
            )
        if not in_order or (self._looks and self._shuffled(given, batch)):
            raise TrainingError(
                "the model was given rows of the batch in another order, or some rows in the place of others; its "
                "rows are matched to units by their order: give it the batch as the loader did"
            )
        self._called = batch
        return batch

    def mark_used(self, batch: Batch) -> None:
        """A backward pass has used the batch; it is held no longer."""
        batch.used = True
        if batch in self._waiting:  # with those before it, which were left out
            self._waiting = self._waiting[self._waiting.index(batch) + 1 :]
        if self._called is None or self._called.used:
            self._called = batch
        if self._last is not None and self._last[1] is batch:
            self._last, self._handed = None, set()

    def _owners(self, tensor: Tensor) -> dict[Batch, bool]:
        """The batches whose memory a tensor shares, and whether it has their rows in order; only such, if any has."""
        found: dict[Batch, bool] = {}
        span = _span(tensor)
        for known in self._known:
            if known.start >= 0 and not (span[0] < known.end and known.start < span[1]):
                continue
            own, batch = known.tensor(), known.batch
            if own is tensor:
                found[batch] = True
            elif own is not None and known.shares(own, tensor.device, span):
                found[batch] = found.get(batch, False) or _lines_up(tensor, own, batch.rows)
        if len(found) > 1 and any(found.values()):
            return {batch: True for batch, lines_up in found.items() if lines_up}
        return found

    def _recognised(self, owners: list[dict[Batch, bool]]) -> Batch | None:
        """The one batch that all tensors with an owner belong to; None if there is none, or more than one."""
        common = set(owners[0]).intersection(*owners[1:])
        if len(common) == 1 and not (batch := next(iter(common))).used:
            return batch
        if not common:
            raise TrainingError("the model was given tensors of two batches at once; call it on one batch at a time")
        unused = [batch for batch in common if not batch.used]
        if not unused:
            raise TrainingError(
                "this batch was already used by a backward pass: each unit is clipped once a step. Iterate over the "
                "loader again for each epoch (itertools.cycle and list(loader) give the first one's batches again); "
                "for several passes over a batch, add their losses and call backward once; to look at what the model "
                "says of it now, call model.eval() before"
            )
        return unused[0] if len(unused) == 1 else None

    def _shuffled(self, given: list[Tensor], batch: Batch) -> bool:
        """Whether tensors in new memory hold the batch's rows in another order. Where each row is a unit it may.

        In the first batches whose units have several rows; and only where all rows differ, so that it is the order
        that is seen, and not what is in the rows.
        """
        if self._last is None or self._last[1] is not batch:
            return False
        units = batch.units if isinstance(batch.units, list) else batch.units.tolist()
        if len(set(units)) == len(units):
            return False
        self._looks -= 1
        own = list(_tensors_in(self._last[0]))
        return any(_same_rows_elsewhere(x, y) for x in given for y in own)

    def newest(self) -> Batch:
        """The one batch that waits, or the last that was called; see `find`."""
        if len(self._waiting) == 1:
            return self._waiting[0]
        if self._waiting:
            raise TrainingError(
                "several batches were taken from the loader and not used, and what the model was given shares "
                "memory with none "
                f"of them: it cannot be told whose units its rows are. {_ADVICE}"
            )
        if self._called is None:
            raise TrainingError(
                "the model was called in training mode before the private loader gave a batch; iterate over the loader "
                "that make_private returned, or use model.eval() or torch.no_grad() for other inputs"
            )
        if self._called.used:
            raise TrainingError(
                "the last batch of the loader was already used by a backward pass: each unit is clipped once a "
                "step, over all passes together. Add the losses and call backward once, or fetch the next batch from "
                "the loader. In a generator's step leave the generated tensors attached to the generator; for other "
                "inputs call model.eval() before and model.train() after"
            )
        return self._called


def _check_rows(tensors: list[Tensor], rows: int) -> None:
    sizes = set()
    for tensor in tensors:
        if tensor.is_nested:
            raise ArgumentError(
                "the model was given a nested tensor, which has no rows: give it the padded tensor and a mask, or the "
                "lengths as a tensor"
            )
        sizes.add(tensor.shape[:1])
    size = next(iter(sizes.pop()), None) if len(sizes) == 1 else None
    # Tensors that disagree are the clipping engine's to refuse.
    if size is not None and size != rows:
        # Without numbers: under secret sampling, how many examples a batch has is secret.
        raise ArgumentError(
            "the model must be called on the whole batch, one row for each of its examples, in dimension 0: leave no "
            "example out; call it for each view alone, not on torch.cat([a, b]); transpose to (time, batch, ..) in "
            "forward, or take batch_first=True"
        )


def _tensors_in(value: Any, depth: int = _DEEP) -> Iterator[Tensor]:
    """The tensors in a batch: in containers, and in the attributes of objects."""
    if issubclass(type(value), Tensor):
        yield value
        return
    parts = list(value.values()) if type(value) is MappingProxyType else [part for _, part in named_parts(value)]
    if depth:
        for part in parts:
            yield from _tensors_in(part, depth - 1)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one behind its last; (-1, -1) where it has no memory to compare."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return -1, -1
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    reach = 0
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (size - 1) * step
    return start, start + (reach + 1) * tensor.element_size()


def _lines_up(tensor: Tensor, own: Tensor, rows: int) -> bool:
    """Whether row i of a tensor lies in row i of the batch's own; also where the own one has no rows to compare."""
    dimensions = [d for d in range(own.dim()) if own.shape[d] == rows]
    if not dimensions:
        return True
    if not tensor.dim() or tensor.shape[0] != rows:
        return False
    step, unit = tensor.stride(0) * tensor.element_size(), own.element_size()
    offset = (tensor.data_ptr() - own.data_ptr()) // unit
    return any((rows == 1 or step == own.stride(d) * unit) and _index_along(d, offset, own) == 0 for d in dimensions)


def _index_along(dimension: int, offset: int, own: Tensor) -> int | None:
    """The index along a dimension of the element that lies `offset` elements behind the first; None if none does."""
    found = 0
    for d in sorted(range(own.dim()), key=own.stride, reverse=True):
        if own.shape[d] == 1 or not own.stride(d):
            continue
        index, offset = divmod(offset, own.stride(d))
        if not 0 <= index < own.shape[d]:
            return None
        found = index if d == dimension else found
    return found if offset == 0 else None


def _same_rows_elsewhere(tensor: Tensor, own: Tensor) -> bool:
    """Whether two tensors have the same rows, all distinct, in different orders."""
    if tensor.shape != own.shape or tensor.dtype != own.dtype or tensor.layout != torch.strided or not tensor.numel():
        return False
    a, b = _row_hashes(tensor), _row_hashes(own)
    first, second = a.sort().values, b.sort().values
    return not torch.equal(a, b) and torch.equal(first, second) and bool((first[1:] != first[:-1]).all())


def _row_hashes(tensor: Tensor) -> Tensor:
    """(rows,) int64 on the CPU: the bytes of each row times fixed odd numbers, modulo 2^64."""
    rows = tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8)
    words = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8)).view(torch.int64)
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=torch.Generator().manual_seed(0)) * 2 + 1
    return (words * factors.to(words.device)).sum(1).cpu()
