"""The private loader: hands out a DataLoader's batches in its order, names the units in them, and knows them again."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import repeat
from operator import is_
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from anyorder import checks
from anyorder.errors import ArgumentError, LoaderError, TrainingError
from anyorder.ledger import Units, as_units, numbered
from anyorder.noise import NoiseSource
from anyorder.sampling.batch_classes import named_parts
from anyorder.sampling.draws import (
    BatchIndices,
    FetchPlace,
    Seeds,
    alone,
    collation_may_draw,
    fetches_many,
    hands_on,
    held_generators,
    may_draw,
    process_generators,
    reads_only,
    seeded_parts,
)
from anyorder.sampling.read_loader import (
    Indices,
    Order,
    Origins,
    Unit,
    check_loader,
    extract_units,
    is_plain,
    rebuild,
    take_order,
)
from anyorder.sampling.row_digests import ExampleDigests
from anyorder.sampling.samplers import PaddedBatch, SecretBatchSampler, key_of
from anyorder.sampling.shapes import (
    Collated,
    CollatedAlone,
    Joining,
    PublicShapes,
    RowShapes,
    Stacked,
    inner,
    is_rowwise,
    named_tensors,
    versions_of,
)

# -- which batch goes into the model -----------------------------------------------------------------------------------

# It is recognised by the memory of its tensors, not by when it was handed out.
#
# A step names the units of the batch that the model is called on. What a loader hands out is noted here (`add`), and
# what the model is given is looked up (`find`): it is a batch whose memory it shares, row for row; else the one batch
# that waits, and where several wait it is refused. So a loop that prefetches, swaps or drops batches has none of them
# clipped by the units of another.

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
        passes: (step, passes of the model over it in that step); None before the first, and once they were back.
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
    """One tensor of a batch, which is not kept alive, and the addresses that it had when it was handed out."""

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
        """The batches whose memory a tensor shares, and whether it has their rows in order: if of some, these alone."""
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


# -- the loader --------------------------------------------------------------------------------------------------------

_END = object()
_TOLD = {"dataset", "sampler", "batch_size", "batch_sampler", "drop_last", "num_workers", "collate_fn", "pin_memory"}


_UNEQUAL = ("stack expects each tensor to be equal size", "should be of equal size", "resize storage")
"""What torch says where it cannot stack examples."""
_ONE_SHAPE = (
    "the examples of a batch differ in shape, or in fields: give all the same in the data set; or state the public "
    "lengths that they are padded to, make_private(.., pad_to=(64, 128)), and a made-up example, like=(x, y): one that "
    "does not fit to it then adds zero"
)


def _as_it_is(batch: Any, rows: int = 0, handed: Batch | None = None) -> Any:
    del rows, handed
    return batch


def _made_up(loader: DataLoader[Any], like: Any, shapes: PublicShapes | None) -> Any:
    """The batch of a made-up example. Raises: ArgumentError where the loader makes none of it."""
    try:
        with alone(0, held_generators(loader.collate_fn)):
            made = loader.collate_fn([like])
        Joining(shapes, 1).join([made])
    except Exception as problem:
        raise ArgumentError(
            f"like must be an example as the data set gives them, which collate_fn makes a batch of: {problem}"
        ) from problem
    return made


class PrivateLoader:
    """The user's DataLoader, which names the units of every batch that it hands out, and recognises it when it is used.

    Batches are those of the loader, with its workers and pinning; `collate_fn` is called on each example alone, see
    `shapes`. A shuffled order
    (`shuffle=True`) is drawn from `seed` instead of torch's generator, so that it is a pure function of seed and epoch
    and a resumed run finds its place without loading what it skips. Samplers with a `set_epoch` are told the epoch.

    Each `iter()` begins the next epoch; after `seek` or `load_state_dict` the first one may begin within an epoch. An
    iteration that is left early is continued by the next, behind the last batch that was marked as used.

    Args:
        loader: a torch DataLoader. A sampler that `find_participation` refuses is taken as it is: the ledger judges.
            With `unit`, any iterable of batches.
        unit: None: units are the examples, named by their indices in the data sets that wrappers wrap. A string,
            an integer: the field of a dict batch, the position in a tuple batch, where the units' ids are. A callable:
            batch -> ids. Ids are integers or strings, one for each example.
        on_batch: called with (units, position) before a batch is handed out: one id for each example, in the batch's
            order; position counts batches over all epochs. What it raises reaches the user, and the batch does not.
        seed: an integer >= 0 or bytes, for shuffled orders.
        shapes: to which examples are padded. None: those of a batch must have one shape, or LoaderError is raised where
            the batch is made. Batches that a stream, a data set or an iterable makes itself are taken to be padded by
            rule: they must have one shape, and `shapes` pads them on to the largest.
        like: a made-up example, as the data set gives them: those that do not fit to it are empty rows.
    Raises: LoaderError if the loader cannot be followed: `in_order=False`, or without `unit` no DataLoader, one with an
        `__iter__` of its own, or a stream.
    """

    def __init__(
        self,
        loader: Any,
        *,
        unit: Unit = None,
        on_batch: Callable[[Units, int], None] | None = None,
        seed: int | bytes,
        shapes: PublicShapes | None = None,
        like: Any = None,
    ) -> None:
        self._unit, self._on_batch = unit, on_batch
        self._shapes, self._collates, self._stacks = shapes, False, False
        self._made: Any = None  # the shapes of batches that are not collated here
        self._user_loader: Any = loader
        self._loader: Any = loader
        self._batches: _ResumedBatches | None = None  # None for a stream
        self._origins: Origins | None = None
        self.identity = BatchIdentity()
        # What a batch of so many rows is handed out as, and what it was.
        self.show: Callable[[Any, int, Batch], Any] = _as_it_is
        self.shown: Callable[[Any], Any] = _as_it_is
        self.asks: Callable[[bool], object] = bool  # whether functions of torch are asked, as they are in the loop
        self.run: Callable[[], object] = dict  # the run that batches are of; None once the collector takes it away
        self._position = self._used = 0
        self._rows: TensorDataset | None = None  # whose rows are taken at once, without a DataLoader's iterator
        self._seed = seed
        self._seeds, self._place = Seeds(NoiseSource(key_of(seed)).derive(b"draws").key), FetchPlace()
        self._draws_here = True  # whether this process draws what batches are made of
        self._iteration = 0  # tells an iteration that was left from the one that replaced it
        self._left = 0  # the last iteration that was left
        if unit is not None and isinstance(loader, Iterable) and not is_plain(loader):
            return  # the batches name their units themselves, so that their order need not be known
        check_loader(loader)
        if not isinstance(loader.dataset, IterableDataset):
            self._batches = _ResumedBatches(take_order(loader, seed))
            self._origins = Origins(loader.dataset) if unit is None else None
        elif unit is None:
            raise LoaderError(
                "an IterableDataset has no indices that could tell examples apart; pass unit= with the place of an id "
                "of each example in the batch (a field of a dict, a position in a tuple, or a callable)"
            )
        seeded = seeded_parts(loader, self._seeds, self._place)
        self._draws_here = bool(seeded) and not loader.num_workers
        if self._batches is not None:
            self._batches.is_told = bool(seeded)
        self._collates = loader.batch_sampler is not None
        is_torchs = inner(loader.collate_fn) is torch.utils.data.default_collate
        self._stacks = self._collates and like is None and is_torchs and self._is_rowwise(loader.collate_fn)
        if self._collates and not self._stacks:
            own = None if like is None else _made_up(loader, like, self._shapes)
            seeded["collate_fn"] = CollatedAlone(seeded.get("collate_fn", loader.collate_fn), self._shapes, own)
        elif self._stacks:
            pins = loader.pin_memory and torch.accelerator.is_available()
            here = type(loader.dataset) is TensorDataset and not loader.num_workers and not pins
            self._rows = loader.dataset if here else None
            collate = seeded.get("collate_fn", loader.collate_fn)
            seeded["collate_fn"], self._take = Stacked(collate), Stacked(collate, self._rows)
        self._loader = rebuild(loader, self._batches, **seeded)

    def _is_rowwise(self, collate: Any) -> bool:
        """Whether the user's function may be called on a batch."""
        return self._shapes is None and is_rowwise(inner(collate))

    @cached_property
    def rows(self) -> ExampleDigests | None:
        """What tells whether the data set's rows are those of before; None where units have keys of their own."""
        if self._origins is None or self._batches is None:
            return None
        return ExampleDigests(self._user_loader, self._batches.order.members, self._origins.names, key_of(self._seed))

    def __getattr__(self, name: str) -> Any:
        """What the user's loader says of itself (`dataset`, `num_workers`, ..); None for an iterable that does not."""
        if name not in _TOLD:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self._user_loader, name, None)

    @property
    def reads_by_row(self) -> bool:
        """Whether example i is known to be row i of the data set, and to draw nothing. By the types of its parts."""
        return self._batches is not None and not may_draw(self._user_loader.dataset)

    @property
    def collates_by_row(self) -> bool:
        """Whether a row of a batch is known to be made of one example: each is collated alone, or rows are stacked."""
        if self._collates:
            return self._batches is None or not fetches_many(self._user_loader.dataset)
        return self.reads_by_row and self._is_rowwise(self._user_loader.collate_fn)

    @property
    def batches_per_epoch(self) -> int | None:
        """Batches in a whole epoch; None for a stream."""
        return None if self._batches is None else self._batches.order.steps

    @property
    def position(self) -> int:
        """The batch behind the last one used, counted over all epochs: where a resumed run goes on."""
        return self._used

    def use(self, batch: Any) -> None:
        """Say which batch the model is called on next, where it cannot be told: copies of one of several batches.

            for batch in loader:
                if left_out(batch):
                    continue
                loader.use(batch)
                outputs = model(batch["x"].to(device))

        What shares memory with a batch is recognised without this, and so is a copy of the only batch that waits.

        Args:
            batch: as the loader gave it, or one of its tensors.
        Raises: TrainingError if it is not a batch of this loader.
        """
        self.identity.use(self.shown(batch))

    def mark_used(self, batch: Batch) -> None:
        """The batch was trained on. A run that is resumed goes on behind it."""
        self.identity.mark_used(batch)
        self._used = batch.position + 1
        batches = self._batches
        if batches is not None and self._left == batch.iteration == self._iteration:
            batches.go(*divmod(self._used, batches.order.steps))
            self._position = self._used

    def __len__(self) -> int:
        """Batches of the epoch; in one that is begun in the middle, those from there on."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._iteration += 1
        self._made = None  # the next epoch may be of another public shape, as one of features that are prepared is
        mine, batches = self._iteration, self._batches
        if batches is not None:
            self._position = self._used = batches.position
        position = self._position
        self._note_what_workers_have()
        if self.rows is not None and position % (self.batches_per_epoch or 1) == 0:
            self.rows.begin_epoch(position == 0)
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            # What a DataLoader draws for its workers must not come from torch's global generator: a resumed run begins
            # an epoch in the middle, and dropout would see other numbers.
            self._loader.generator.manual_seed(_draw(self._seed, position // (self.batches_per_epoch or 1)))
        self._place.start = position
        finished, is_ending = False, sys.is_finalizing  # where the process ends in a loop, functions are gone by then
        try:
            self.asks(False)
            with self._drawing("iteration", position) if self._draws_here else nullcontext():
                unseen = getattr(DataLoader.__iter__, "__globals__", {}).get("__name__") == DataLoader.__module__
                at_once = self._rows is not None and unseen  # else somebody looks on
                if batches is not None:
                    batches.as_they_are = at_once
                iterator = map(self._take, self._loader.batch_sampler) if at_once else iter(self._loader)
            sent, (held, begun) = None, ((), []) if self._rows is None else versions_of(self._rows)
            if batches is not None:
                sent = batches.sent
                batches.go(batches.epoch + 1, 0)  # for the next iteration; this one has begun
            while True:
                try:
                    draws = self._draws_here and (position == self._place.start or self._may_draw())
                    self._place.is_still = self._draws_here and not draws
                    with self._drawing("batch", position) if draws else nullcontext():
                        given = next(iterator, _END)
                    self._place.is_still = False
                except RuntimeError as problem:
                    if self._stacks and any(words in str(problem) for words in _UNEQUAL):
                        raise LoaderError(_ONE_SHAPE) from None  # torch's own says which, and how large
                    raise
                if given is _END:
                    break
                now, versions = ((), []) if self._rows is None else versions_of(self._rows)
                if versions != begun or not all(map(is_, now, held)):
                    raise LoaderError(
                        "the tensors of the data set were exchanged or written within an epoch, so that an example may "
                        "be in two of its steps; change them between epochs, or give the data set a __getitem__"
                    )
                batch, numbers, empty, single_rows = given, None, None, []
                if type(given) is Collated:
                    batch, numbers, empty, single_rows = given.whole(), given.numbers, given.empty, given.single_rows()
                units, padding = self._units(batch, sent)
                if not self._collates or (numbers is None and batch is not given):
                    batch = self._of_one_shape(batch, units)
                shapes = None
                if numbers is not None and self._shapes is not None:
                    shapes = self._shapes_of(batch, numbers, units, padding)
                handed = Batch(units, position, mine, padding, shapes, empty, single_rows)
                if self._on_batch is not None:
                    self._on_batch(handed.units, position)
                position += 1
                self._position = position
                self.identity.add(batch, handed)
                shown = self.show(batch, len(units) + padding, handed)
                self.asks(True)
                yield shown
                self.asks(False)
            finished = True
        finally:
            if not is_ending():
                if self.run() is not None:  # else the collector takes both away
                    self.asks(True)
                if not finished:
                    self.identity.leave(mine)
                    self._left = mine
                if batches is not None and mine == self._iteration:
                    if not finished:
                        batches.go(*divmod(self._used, batches.order.steps))
                    self._position = self._used = batches.position

    def _note_what_workers_have(self) -> None:
        """Workers read the data set as it was when they were started: names are of that one, whatever becomes of it."""
        loader, origins = self._user_loader, self._origins
        if origins is not None and loader.num_workers and not (loader.persistent_workers and origins.is_kept):
            origins.keep()

    def _may_draw(self) -> bool:
        """Whether a batch of an iteration that has begun may draw; an order that is known draws at its beginning."""
        if self._batches is None or self._batches.order.kind == "unknown" or not reads_only(self._user_loader.dataset):
            return True
        collate = self._user_loader.collate_fn
        return not hands_on(collate) and collation_may_draw(collate)

    def _drawing(self, *address: Any) -> AbstractContextManager[None]:
        """What this process draws for batches leaves the generators as the user had them."""
        loader = self._user_loader
        owners = (loader.dataset, loader.collate_fn) if is_plain(loader) else (loader,)
        held = held_generators(*owners)
        self._place.generators = [*process_generators(), *held]
        return alone(self._seeds.at(*address), held)

    def _of_one_shape(self, batch: Any, units: Units) -> Any:
        """A batch that others made, padded to the largest shape, or of the shape of those before it."""
        if self._shapes is not None:
            return Joining(self._shapes).join([batch])
        made = [(name, tensor.shape[1:]) for name, tensor in named_tensors(batch)]
        if made == self._made or len(set(units)) < 2:  # a batch of one unit has the shape of its own
            return batch
        before, self._made = self._made, self._made or made
        if before is not None:
            raise LoaderError(
                "batches that a stream, an iterable or a data set makes itself must all have one shape: what pads them "
                "by the longest of a batch lets one example show in the rows of others. Pad them all alike, or state "
                "make_private(.., pad_to=..), which pads them on; or let a DataLoader with a batch_size collate them"
            )
        return batch

    def _shapes_of(self, batch: Any, numbers: Indices, units: Units, padding: int) -> RowShapes:
        assert self._shapes is not None
        if not self._position:
            self._shapes.warn_of_zeros(batch)
        found = RowShapes.of(batch, numbers, self._shapes)
        if self._unit is None:
            return found
        groups = numbered(units)
        return found.of_units(np.append(groups, len(groups) + np.arange(padding)))

    def _units(self, batch: Any, sent: deque[Any] | None) -> tuple[Units, int]:
        """One id for each example, and how many rows behind them fill the batch up."""
        if sent is None:
            return extract_units(batch, self._unit), 0
        listed = sent.popleft()
        padding = listed.padding if isinstance(listed, PaddedBatch) else 0
        if self._origins is None:
            units = extract_units(batch, self._unit)
            if padding and len(units) != len(listed):
                raise LoaderError("unit= must give one id for each example of a batch, which is filled up to its size")
            units = units[: len(units) - padding]
            sampler = getattr(self._user_loader, "batch_sampler", None)
            if isinstance(sampler, SecretBatchSampler) and not sampler.names(units, listed[: len(listed) - padding]):
                raise LoaderError(
                    "a batch names other units than those that were drawn: the data set, or what collates it, must "
                    "give each example the same id whenever it is read"
                )
            return units, padding
        indices = listed.copy() if type(listed) is np.ndarray else as_units(listed[: len(listed) - padding])
        if not isinstance(indices, list) and indices.min(initial=0) < 0:
            raise LoaderError(f"the sampler gave index {indices.min()}: a negative index is an example's second name")
        return (indices if isinstance(indices, list) else self._origins.names(indices)), padding

    def seek(self, position: int) -> None:
        """Let the next iteration begin at the batch of this number, counted over all epochs.

        Raises: LoaderError for a stream, and for a sampler whose epochs cannot be called up again.
        """
        position = checks.integer("position", position, low=0)
        if position == self._position == 0:
            return
        batches = self._batches
        if batches is None:
            raise LoaderError(
                f"a stream cannot be moved to batch {position}: only its source can. Let the IterableDataset begin "
                "there; the ledger refuses units that appear too early"
            )
        if position and not batches.order.repeatable:
            raise LoaderError(
                f"batch {position} cannot be called up again: the order, {batches.order.phrase}, is not a function of "
                "the epoch. Give the sampler a set_epoch(epoch) that determines the order, or use shuffle=True or "
                "anyorder.FixedOrderSampler"
            )
        self._iteration += 1
        self._position = self._used = position
        batches.go(*divmod(position, batches.order.steps))

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on: for checkpoints."""
        state: dict[str, Any] = {"position": self.position}
        if self._batches is not None:
            order = self._batches.order
            state |= {"order": order.phrase, "steps_per_epoch": order.steps, "dataset_size": order.dataset_size}
            state["key"] = None if order.keyed is None else order.keyed.key
        if self.rows is not None:
            state["rows"] = self.rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved loader was, in its order. A stream must have been positioned by the user.

        Raises: LoaderError if this loader's order or length is not the saved one; CheckpointError for other rows.
        """
        found = self.state_dict()
        for name in ("order", "steps_per_epoch", "dataset_size"):
            if found.get(name) != state.get(name):
                raise LoaderError(
                    f"this loader is not the one of the checkpoint: {name} was {state.get(name)!r} and is "
                    f"{found.get(name)!r}; resume with the same data set, batch size and sampler"
                )
        if self._batches is None:
            self._position = self._used = checks.integer("position", state["position"], low=0)
            return
        keyed = self._batches.order.keyed
        if keyed is not None:
            keyed.key = state["key"]
        if self.rows is not None and state.get("rows") is not None:
            self.rows.check_resumed(state["rows"])
        self.seek(state["position"])


class _ResumedBatches:
    """A batch sampler that begins where it is told, and remembers what it gave.

    A DataLoader hands batches out in the order in which it took their indices, with any number of workers; so the
    units of the next batch are the first in `sent`, and neither data set nor workers need be touched.

    Attributes:
        epoch, start: where the next iteration begins.
        is_told: whether a batch's position goes with its indices, for draws that have it in their address.
        as_they_are: whether arrays of indices may be given, and not lists alone.
        sent: indices of the current iteration whose batches are still to come.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = self.start = 0
        self.is_told = self.as_they_are = False
        self.sent: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.sent = deque()
        batches: Callable[[int, int], Iterator[Any]] = self.order.arrays or self.order.batches
        return self._noted(batches(self.epoch, self.start), self.sent, self.position)

    def _noted(self, batches: Iterator[Any], sent: deque[Any], position: int) -> Iterator[Any]:
        for place, batch in enumerate(batches, position):
            if self.as_they_are and type(batch) is list:
                batch = as_units(batch)  # the numbers by which rows are read are those that name units
            sent.append(batch)
            given = batch if self.as_they_are or self.order.arrays is None else batch.tolist()
            yield BatchIndices(given, place) if self.is_told else given

    def __len__(self) -> int:
        return self.order.steps - self.start

    @property
    def position(self) -> int:
        """The batch where the next iteration begins, counted over all epochs."""
        return self.epoch * self.order.steps + self.start

    def go(self, epoch: int, start: int) -> None:
        """Choose where the next iteration begins."""
        self.epoch, self.start = epoch, start


def _draw(seed: int | bytes, epoch: int) -> int:
    """A seed for torch, a function of the loader's seed and the epoch."""
    return int(NoiseSource(key_of(seed)).derive(b"workers").words(epoch, 0, 1)[0])
