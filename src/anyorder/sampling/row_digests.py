"""Whether the rows of a data set are those of before: after a resume, in the next epoch, on another rank.

Examples without a key of their own are told apart by their index, and the claim counts how often an index comes. It is
about people only while row i is the same person's. So a run keeps a keyed digest of what `dataset[i]` gives, beside
the index, in its checkpoint, and compares:

    a resume         every digest that was kept, before any gradient
    an epoch         those of a sample, at its begin
    another rank     those of a sample, which is the same on all ranks

An example is read for this under generators that are set for it alone, so that its augmentation is the same at every
reading; in a worker process where the loader has some, since a data set may open files where it is first read. Of a
run with a checkpoint all rows are kept, or as many as `_SECONDS` read at its begin, and more with each epoch. A digest
is keyed by the run: without the key nobody can try a guess against it, and it lies only where the key lies.

A data set that gives in each stage of a run what was made of its rows says what these are (`InStages`): they are read.

What cannot be told: rows beyond those that were kept; a data set whose `dataset[i]` is another thing at each reading,
which is named, and for which a key of each example (`unit=`) is the way.
"""

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

from anyorder.checks import final
from anyorder.errors import CheckpointError, LoaderError
from anyorder.noise import NoiseSource
from anyorder.sampling.draws import (
    BatchIndices,
    FetchPlace,
    SeededDataset,
    SeededWorker,
    Seeds,
    alone,
    fetches_many,
    held_generators,
)

Integers = NDArray[np.int64]

_SAMPLE = 32
_SECONDS = 2.0
_SHARE = 0.03  # of the time of an epoch, for rows that are not kept yet
_CHUNK = 256  # examples that are asked for at once
_DEEP = 16  # objects within objects that are followed
_KEYS = "name the units with unit= in make_private, by a key that stays with each example, and pass order= to ao.plan"


class Noted(NamedTuple):
    """Rows, by the names of their examples: (m,) int64 each, the digests as eight bytes."""

    names: Integers
    digests: Integers

    def changed(self, now: "Noted", nothing: int | None = None) -> tuple[int, int]:
        """How many of the rows that both have differ, and how many both have; a row of `nothing` now does not."""
        _, here, there = np.intersect1d(self.names, now.names, assume_unique=True, return_indices=True)
        before, after = self.digests[here], now.digests[there]
        return int(np.count_nonzero((before != after) & (after != nothing))), len(here)


class InStages:
    """A data set whose `dataset[i]` is made of row i alone and of what was released, anew in each stage of a run.

    Attributes:
        rows: a data set of the rows, by the same indices, which stays: it is compared in the place of the examples.
    """

    rows: Dataset[Any]


class ExampleDigests:
    """The rows of a loader's data set, read to tell whether they are those of before.

    Args:
        loader: the user's, of a data set with indices.
        indices: that may come; None where that is not known, and all are taken.
        names: indices -> names of the examples, distinct.
        key: 32 bytes of the run's own.
    """

    def __init__(
        self, loader: DataLoader[Any], indices: Integers | None, names: Callable[[Integers], Integers], key: bytes
    ) -> None:
        source = NoiseSource(key)
        self._loader, self._names, self._indices = loader, names, indices
        dataset: Any = loader.dataset
        self._dataset = dataset.rows if isinstance(dataset, InStages) else dataset
        self._seeds, self._key = Seeds(source.derive(b"draws").key), source.derive(b"digests").key
        self._salt = np.uint64(int.from_bytes(source.derive(b"sample").key[:8], "little"))
        self._noted: Noted | None = None
        self._is_stable = True  # whether a row is the same whenever it is read
        self._rest: Integers | None = None  # indices of rows that are not noted yet
        self._is_kept = False  # whether in a checkpoint
        self._epoch_began: float | None = None

    # -- what is compared --------------------------------------------------------------------------------------------

    def sample(self) -> Noted:
        """The digests of a few rows, which ranks with the same names choose alike.

        Warns: UserWarning for a data set that gives another example when it is asked again; then it is of no row.
        """
        if self._noted is None:
            chosen = self._in_turn()[:_SAMPLE]
            self._noted = self._stable(chosen)
        return Noted(self._noted.names[:_SAMPLE], self._noted.digests[:_SAMPLE])

    def note(self, seconds: float | None = None) -> None:
        """Keep the digests of all rows, or of as many more as are read within the time, for a checkpoint.

        Args:
            seconds: None for those of a run's begin.
        """
        self.sample()
        assert self._noted is not None
        self._is_kept, kept = True, self._noted
        if not self._is_stable:
            return
        if self._rest is None:
            rest = self._in_turn()
            self._rest = rest[~np.isin(self._names(rest), kept.names)]
        if len(self._rest):
            until = time.monotonic() + (_SECONDS if seconds is None else seconds)
            digests, is_read = self._tried(self._rest, self._loader.num_workers, until)
            more = Noted(self._names(self._rest[: len(is_read)][is_read]), digests[is_read])
            self._noted = Noted(*(np.concatenate(pair) for pair in zip(kept, more, strict=True)))
            self._rest = self._rest[len(is_read) :]

    def begin_epoch(self, is_first: bool) -> None:
        """Compare the sample with that of the run's begin, in all epochs but the first, and keep more of the rows.

        Raises: LoaderError.
        """
        if not self._reads_at_ease:
            return
        before, now, began = self.sample(), time.monotonic(), self._epoch_began
        self._epoch_began = now
        if is_first:
            return
        if self._changed(before)[0]:
            raise LoaderError(
                "the rows of the data set are not those of the epoch before: dataset[i] is another example now. The "
                "claim counts how often an example appears by its index. Keep the data set as it is and let the loader "
                f"shuffle; or {_KEYS}"
            )
        if self._is_kept and began is not None:
            self.note(_SHARE * (now - began))

    def check_resumed(self, saved: Mapping[str, Any]) -> None:
        """Compare all rows that a checkpoint has with those of now, and keep what it has.

        A row that is None now is one whose person withdrew: with `like=` it adds zero to all sums, so that nobody's
        count grows. What it was is kept, and nobody else can come in its place.

        Raises: CheckpointError, whose `changed` says how many of how many: for the owner of the data, not for logs.
        """
        before = Noted(*(np.asarray(saved[part], np.int64) for part in Noted._fields))
        changed, compared = self._changed(before)
        if changed:
            problem = CheckpointError(
                "the rows of the data set are not those with which this run began: dataset[i] is another example than "
                "it was. The claim counts how often an example appears by its index, and would not hold. Resume with "
                "the data set as it was, in its order (the error's `changed` says how many rows differ, to you alone); "
                "or begin a new run with a plan of its own, whose epsilon adds to this one's: ao.compose, ao.Budget"
            )
            problem.changed = changed, compared
            raise problem
        self._noted, self._is_kept = before, True

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """What `check_resumed` wants; None before anything was noted."""
        if self._noted is None:
            return None
        return {name: torch.from_numpy(part.copy()) for name, part in self._noted._asdict().items()}

    # -- how rows are read -------------------------------------------------------------------------------------------

    def _all(self) -> tuple[Integers, Integers]:
        """The indices that may come, and their names, each once."""
        size = len(self._loader.dataset)  # type: ignore[arg-type]
        indices = np.arange(size) if self._indices is None else self._indices
        names = self._names(indices)
        if (np.diff(names) > 0).all():
            return indices, names
        names, first = np.unique(names, return_index=True)
        return indices[first], names

    def _in_turn(self) -> Integers:
        """The indices in the order in which they are read: by a keyed hash of their names, so alike on all ranks."""
        indices, names = self._all()
        words = names.astype(np.uint64) + self._salt
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
            words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
        return indices[np.argsort(words ^ (words >> np.uint64(31)), kind="stable")]

    def _changed(self, before: Noted) -> tuple[int, int]:
        """How many of these rows are others now, of how many. One that is None now is one whose person withdrew."""
        return before.changed(self._found(before), int(_as_integers(digest_of(None, self._key))[0]))

    def _found(self, before: Noted) -> Noted:
        """The rows of these names, as they are now."""
        indices, names = self._all()
        indices = indices[np.isin(names, before.names)]
        return self._read(indices, self._loader.num_workers if len(indices) > _SAMPLE else 1)

    def _stable(self, indices: Integers) -> Noted:
        """Rows that are the same when they are read again, in another order; none if one of them is not."""
        digests, is_read = self._tried(np.concatenate([indices, indices[::-1]]), 1)
        first, again = digests[: len(indices)], digests[: len(indices) - 1 : -1]
        good = is_read[: len(indices)] & is_read[: len(indices) - 1 : -1]
        if np.array_equal(first[good], again[good]):
            return Noted(self._names(indices[good]), first[good])
        self._is_stable = False
        kind = type(self._dataset)
        warnings.warn(
            f"dataset[i] of {kind.__module__}.{kind.__qualname__} is not the same when it is read again under the same "
            "seeds: it draws from a generator that cannot be found, or depends on what was read before. If it depends "
            "on other examples, the claim does not hold; and whether the rows are the same after a resume cannot be "
            f"told. Draw from torch, numpy or random, keep no state in the data set; or {_KEYS}",
            UserWarning,
            stacklevel=2,
        )
        return Noted(indices[:0], first[:0])

    def _tried(self, indices: Integers, workers: int, until: float = np.inf) -> tuple[Integers, NDArray[np.bool_]]:
        """(digests, whether it could be read) of these rows, or of the first ones by that time.

        What a row raises comes again where the loop reads that row, if ever: a sampler of one's own may leave it out.
        """
        try:
            found = self._read(indices, workers, until).digests
            return found, np.ones(len(found), bool)
        except Exception:
            made: list[Integers | None] = []
        here = not self._loader.num_workers
        with alone(self._seeds.at("rows"), held_generators(self._dataset)) if here else nullcontext():
            reader = iter(self._reader(indices, min(workers, self._loader.num_workers), 1))
            while len(made) < len(indices) and time.monotonic() <= until:
                try:
                    made.append(next(reader))
                except Exception:  # of this row alone: the reader goes on behind it
                    made.append(None)
        digests = [np.zeros(1, np.int64) if one is None else one for one in made]
        return np.concatenate([np.empty(0, np.int64), *digests]), np.array([one is not None for one in made], bool)

    def _read(self, indices: Integers, workers: int, until: float = np.inf) -> Noted:
        """The digests of these rows, or of the first ones by that time."""
        digests: list[Integers] = []
        dataset = self._dataset
        with alone(self._seeds.at("rows"), held_generators(dataset)) if not self._loader.num_workers else nullcontext():
            if type(dataset) is TensorDataset:
                found: Iterable[Integers] = (
                    _of_tensors(dataset, chunk, self._key) for chunk in _chunks(indices, _CHUNK)
                )
            else:
                found = self._reader(indices, min(workers, self._loader.num_workers))
            for chunk in found:
                digests.append(chunk)
                if time.monotonic() > until:
                    break
        joined = np.concatenate([np.empty(0, np.int64), *digests])
        return Noted(self._names(indices[: len(joined)]), joined)

    def _reader(self, indices: Integers, workers: int, size: int | None = None) -> DataLoader[Any]:
        """A loader of digests, by the user's own workers."""
        loader, dataset = self._loader, self._dataset
        one = loader.batch_sampler is None or fetches_many(dataset)  # what comes is of all indices together
        chunks = [BatchIndices(chunk.tolist(), 0) for chunk in _chunks(indices, 1 if one else size or _CHUNK)]
        place: dict[str, Any] = {"batch_sampler": chunks}
        if loader.batch_sampler is None:
            place = {"batch_size": None, "sampler": chunks}
        of_workers: dict[str, Any] = {}
        if workers:
            of_workers = {"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context}
        return DataLoader(
            SeededDataset(dataset, self._seeds, FetchPlace()), collate_fn=_Digesting(self._key, one),
            num_workers=workers, worker_init_fn=SeededWorker(loader.worker_init_fn), generator=torch.Generator(),
            **place, **of_workers,
        )  # fmt: skip

    @property
    def _reads_at_ease(self) -> bool:
        """Whether reading a few rows costs little: where workers are spawned, they import all for seconds."""
        if not self._loader.num_workers:
            return True
        context = self._loader.multiprocessing_context or torch.multiprocessing.get_context()
        return context.get_start_method() == "fork" and not self._loader.persistent_workers


def check_same_rows(told: list[Noted]) -> None:
    """Raise LoaderError where ranks have other examples under the same names."""
    if any(told[0].changed(other)[0] for other in told[1:]):
        raise LoaderError(
            "the ranks' data sets are not the same: dataset[i] is another example on another rank, so that one person "
            "may be in a step twice and in an epoch several times. Load the same data in the same order on all ranks, "
            f"without a shuffle of each rank's own; or {_KEYS}"
        )


def _chunks(indices: Integers, size: int) -> Iterator[Integers]:
    return (indices[i : i + size] for i in range(0, len(indices), size))


def gives_digests(loader: Any) -> bool:
    """Whether a loader reads rows for their digests alone: nothing of the rows themselves reaches a loop."""
    return type(loader) is DataLoader and type(loader.collate_fn) is _Digesting


# ----------------------------------------------------------------------------------------------------
# Digests of examples.


@final
class _Digesting:
    """A collation that makes digests of examples: of each of a list, or of all that came as one."""

    def __init__(self, key: bytes, one: bool) -> None:
        self._key, self._one = key, one

    def __call__(self, examples: Any) -> Integers:
        given = [examples] if self._one else examples
        return _as_integers(b"".join(digest_of(example, self._key) for example in given))


def digest_of(example: Any, key: bytes) -> bytes:
    """Eight bytes that differ where examples do, but for one pair in 2^64.

    Guarantee: the same in every process, for tensors, arrays, numbers, texts, images, and containers and objects of
    them. What has no content that can be read, as a function, counts by its name.
    """
    state = blake2b(digest_size=8, key=key)
    _feed(state.update, example, key, _DEEP)
    return state.digest()


def _feed(update: Callable[[bytes], object], value: Any, key: bytes, depth: int) -> None:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        plain = plain if plain.layout == torch.strided and not plain.is_quantized else plain.to_dense()
        update(_head_of(value.dtype, value.shape))
        update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        update(f"array {value.dtype.str} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, (str, bytes, bytearray)):
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        update(f"{kind.__name__} {len(raw)} ".encode() + raw)
    elif value is None or isinstance(value, (int, float, complex)):
        update(f"{kind.__name__} {value!r} ".encode())
    elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        update(f"code {value.__module__}.{value.__qualname__} ".encode())
    elif not depth:
        update(b"deep ")
    elif isinstance(value, (set, frozenset)):
        update(f"set {len(value)} ".encode() + b"".join(sorted(digest_of(part, key) for part in value)))
    elif isinstance(value, (list, tuple, dict, OrderedDict)):
        parts = [part for item in value.items() for part in item] if isinstance(value, dict) else value
        update(f"{kind.__name__} {len(value)} ".encode())
        for part in parts:
            _feed(update, part, key, depth - 1)
    else:
        update(f"object {kind.__module__}.{kind.__qualname__} ".encode())
        for part in _content(value):
            _feed(update, part, key, depth - 1)


def _content(value: Any) -> tuple[Any, ...]:
    """What an object of another class holds: as images say it, and else as it would be pickled."""
    if isinstance(value, np.ndarray):
        return value.shape, value.tolist()
    if callable(getattr(value, "tobytes", None)):
        return getattr(value, "mode", None), getattr(value, "size", None), value.tobytes()
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # a file, a lock: nothing that could be read
        return ()
    return (made,) if isinstance(made, str) else (*made[1:3], *map(list, filter(None, made[3:5])))


def _head_of(dtype: torch.dtype, shape: Iterable[int]) -> bytes:
    return f"tensor {dtype} {tuple(shape)} ".encode()


def _of_tensors(dataset: TensorDataset, indices: Integers, key: bytes) -> Integers:
    """`digest_of` of many examples of a data set of tensors, without a tensor for each of their parts."""
    chosen, columns = torch.from_numpy(indices), []
    for tensor in dataset.tensors:
        rows = tensor.detach()[chosen.to(tensor.device)].cpu().contiguous()
        raw, size = rows.reshape(-1).view(torch.uint8).numpy().tobytes(), rows[0].numel() * rows.element_size()
        columns.append((_head_of(rows.dtype, rows.shape[1:]), raw, size))
    head = f"tuple {len(columns)} ".encode()

    def content(i: int) -> bytes:
        return head + b"".join(top + raw[i * size : (i + 1) * size] for top, raw, size in columns)

    return digests_of(map(content, range(len(indices))), key)


def digests_of(contents: Iterable[bytes], key: bytes) -> Integers:
    """The digests of rows that are bytes."""
    return _as_integers(b"".join(blake2b(content, digest_size=8, key=key).digest() for content in contents))


def _as_integers(digests: bytes) -> Integers:
    return np.frombuffer(digests, "<i8").astype(np.int64)
