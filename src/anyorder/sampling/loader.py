"""Loaders: reads the participation off a DataLoader, and hands out its batches with the units in them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from anyorder import checks
from anyorder.errors import ArgumentError, LoaderError
from anyorder.ledger import Units, as_units
from anyorder.noise import NoiseSource
from anyorder.sampling.handed import HandedBatch, HandedOut
from anyorder.sampling.origins import Origins
from anyorder.sampling.read_loader import Order, check_loader, is_plain, take_order
from anyorder.sampling.samplers import key_of
from anyorder.sampling.secret_batches import PaddedBatch

__all__ = ["PrivateLoader", "Unit", "extract_units", "rebuild"]

Unit = str | int | Callable[[Any], Any] | None
"""Whose privacy: None for each example its own; else where a batch keeps the id of each example's unit."""


class PrivateLoader:
    """The user's DataLoader, which names the units of every batch that it hands out, and recognises it when it is used.

    Batches are those of the loader, untouched, with its workers, collation and pinning. A shuffled order
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
    ) -> None:
        self._unit, self._on_batch = unit, on_batch
        self._user_loader: Any = loader
        self._loader: Any = loader
        self._batches: _Batches | None = None  # None for a stream
        self._origins: Origins | None = None
        self._handed = HandedOut()
        self._position = 0
        self._used = 0
        self._seed = seed
        self._iteration = 0  # tells an iteration that was left from the one that replaced it
        self._left = 0  # the last iteration that was left
        if unit is not None and isinstance(loader, Iterable) and not is_plain(loader):
            return  # the batches name their units themselves, so that their order need not be known
        check_loader(loader)
        if not isinstance(loader.dataset, IterableDataset):
            self._batches = _Batches(take_order(loader, seed))
            self._origins = Origins(loader.dataset) if unit is None else None
        elif unit is None:
            raise LoaderError(
                "an IterableDataset has no indices that could tell examples apart; pass unit= with the place of an id "
                "of each example in the batch (a field of a dict, a position in a tuple, or a callable)"
            )
        self._loader = rebuild(loader, self._batches)

    @property
    def dataset(self) -> Any:
        """The user's data set; None for an iterable that has none."""
        return getattr(self._user_loader, "dataset", None)

    @property
    def sampler(self) -> Any:
        """The user's sampler; None for an iterable that has none."""
        return getattr(self._user_loader, "sampler", None)

    @property
    def batch_size(self) -> int | None:
        """The user's batch size; None under a batch sampler."""
        return getattr(self._user_loader, "batch_size", None)

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
            batch: as the loader handed it out, or one of its tensors.
        Raises: TrainingError if it is not a batch of this loader.
        """
        self._handed.use(batch)

    def batch_of(self, tensors: Iterable[torch.Tensor]) -> HandedBatch:
        """The batch that the model's inputs belong to; see `HandedOut.find`."""
        return self._handed.find(tensors)

    def newest(self) -> HandedBatch:
        """The batch that waits to be used. Raises TrainingError if there is none, or more than one."""
        return self._handed.newest()

    def mark_used(self, batch: HandedBatch) -> None:
        """The batch was trained on. A run that is resumed goes on behind it."""
        self._handed.mark_used(batch)
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
        mine, batches = self._iteration, self._batches
        if batches is not None:
            self._position = self._used = batches.position
        position = self._position
        if isinstance(self._loader, DataLoader) and self._loader.generator is not None:
            # What a DataLoader draws for its workers must not come from torch's global generator: a resumed run begins
            # an epoch in the middle, and dropout would see other numbers.
            self._loader.generator.manual_seed(_draw(self._seed, position // (self.batches_per_epoch or 1)))
        iterator = iter(self._loader)
        sent = None
        if batches is not None:
            sent = batches.sent
            batches.go(batches.epoch + 1, 0)  # for the next iteration; this one has begun
        finished = False
        try:
            for batch in iterator:
                units, padding = self._units(batch, sent)
                handed = HandedBatch(units, position, mine, padding)
                if self._on_batch is not None:
                    self._on_batch(handed.units, position)
                position += 1
                self._position = position
                self._handed.add(batch, handed)
                yield batch
            finished = True
        finally:
            if not finished:
                self._handed.leave(mine)
                self._left = mine
            if batches is not None and mine == self._iteration:
                if not finished:
                    batches.go(*divmod(self._used, batches.order.steps))
                self._position = self._used = batches.position

    def _units(self, batch: Any, sent: deque[list[int]] | None) -> tuple[Units, int]:
        """One id for each example, and how many rows behind them fill the batch up."""
        if sent is None:
            return extract_units(batch, self._unit), 0
        listed = sent.popleft()
        padding = listed.padding if isinstance(listed, PaddedBatch) else 0
        if self._origins is None:
            units = extract_units(batch, self._unit)
            if padding and len(units) != len(listed):
                raise LoaderError("unit= must give one id for each example of a batch, which is filled up to its size")
            return units[: len(units) - padding], padding
        indices = as_units(listed[: len(listed) - padding])
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
                "there; the ledger refuses units that come too early"
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
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the saved loader was, in its order. A stream must have been positioned by the user.

        Raises: LoaderError if this loader's order or length is not the saved one.
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
        self.seek(state["position"])


class _Batches:
    """A batch sampler that begins where it is told, and remembers what it gave.

    A DataLoader hands batches out in the order in which it took their indices, with any number of workers; so the
    units of the next batch are the first in `sent`, and neither data set nor workers need be touched.

    Attributes:
        epoch, start: where the next iteration begins.
        sent: index lists of the current iteration whose batches are still to come.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.epoch = self.start = 0
        self.sent: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.sent = deque()
        return self._noted(self.order.batches(self.epoch, self.start), self.sent)

    @staticmethod
    def _noted(batches: Iterator[list[int]], sent: deque[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            sent.append(batch)
            yield batch

    def __len__(self) -> int:
        return self.order.steps - self.start

    @property
    def position(self) -> int:
        """The batch where the next iteration begins, counted over all epochs."""
        return self.epoch * self.order.steps + self.start

    def go(self, epoch: int, start: int) -> None:
        """Choose where the next iteration begins."""
        self.epoch, self.start = epoch, start


def rebuild(loader: DataLoader[Any], batches: Any, collate_fn: Any = None) -> DataLoader[Any]:
    """A DataLoader with the same settings, other batches (None for a stream, which has its own), its own generator."""
    place: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is not None:
        # With batch_size=None the data set is asked for a list of indices at once, and the sampler yields the lists.
        place = {"batch_size": None, "sampler": batches} if loader.batch_sampler is None else {"batch_sampler": batches}
    return DataLoader(
        loader.dataset,
        **place,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn if collate_fn is None else collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
    )


def _draw(seed: int | bytes, epoch: int) -> int:
    """A seed for torch, a function of the loader's seed and the epoch."""
    return int(NoiseSource(key_of(seed)).derive(b"workers").words(epoch, 0, 1)[0])


def extract_units(batch: Any, unit: Unit) -> Units:
    """The ids of the units of a batch, example by example: (m,) int64, or a list of strings.

    Raises: LoaderError if they are not where `unit` says, or are not integers or strings in one dimension.
    """
    if callable(unit):
        ids = unit(batch)
    else:
        fields = batch if isinstance(batch, Mapping) else {}
        if isinstance(batch, (tuple, list)):
            fields = dict(enumerate(batch))
        if unit not in fields:
            raise LoaderError(
                f"unit={unit!r} is not in the batch, a {type(batch).__name__} with the fields {list(fields)}; name a "
                "field of a dict, a position in a tuple, or pass a callable: batch -> ids"
            )
        ids = fields[unit]
    try:
        return as_units(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except (ArgumentError, TypeError) as problem:
        raise LoaderError(f"unit={unit!r} must give the id of each example in the batch: {problem}") from problem
