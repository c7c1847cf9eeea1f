"""The one reader of loaders and samplers: what `ao.plan`, the engine and `ao.check` know of who comes when.

Samplers are known by their exact class: a subclass may do anything. Nothing is drawn and no sampler iterated to read a
loader. What is read is described however the order is; `refusal` says why no plan can be made of it, if none can.
Behind that: the names of examples under torch's wrappers of data sets, whose they are, and orders as participations.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from anyorder import checks
from anyorder._draws import words as words_of
from anyorder.checks import is_of
from anyorder.errors import ArgumentError, LoaderError
from anyorder.ledger import Units, as_units
from anyorder.noise import NoiseSource
from anyorder.participation import PoissonSampling
from anyorder.participation.registry import recognised
from anyorder.patterns import LoaderFacts, Participation
from anyorder.sampling.batch_classes import fields_of
from anyorder.sampling.draws import alone, held_generators, user_dataset
from anyorder.sampling.samplers import (
    EpochShuffleSampler,
    FixedOrderSampler,
    PoissonBatchSampler,
    PoissonRates,
    SecretBatchSampler,
    key_of,
)
from anyorder.sampling.unit_order import UnitOrderSampler

Indices = NDArray[np.int64]

Unit = str | int | Callable[[Any], Any] | None
"""Whose privacy: None for each example its own; else where a batch keeps the id of each example's unit."""

Keyed = FixedOrderSampler | EpochShuffleSampler
Kind = Literal["fixed", "shuffled", "poisson", "secret", "unknown"]
Drawn = tuple[Callable[[int], Indices], Keyed | None]
"""(epoch) -> its indices; and what has the key that they are drawn from, if there is one."""

_EXPLICIT = "or pass order= to ao.plan, which the ledger then enforces step by step"
_BY_UNITS = (
    "let its batches name their units: ao.plan(order=.., batch_size=.., unit='user') and "
    "make_private(.., unit=<where a batch keeps the ids>)"
)
_ANEW = "shuffled again in each epoch"
_PUBLIC = "if the weights do not depend on the data (weights of classes do: labels are data)"
_RATED = (
    "plan with ao.plan(loader=loader, order='poisson', epochs=.., ..): each example is then in each step by a secret "
    "draw of its own, at a rate in proportion to its weight"
)
_TOLD = "PoissonRates is for a plan with ao.plan(loader=loader, order='poisson', epochs=.., ..)"
_UNCOLLATED = "batch_size=None hands out single examples without a batch dimension; set a batch_size"

# ----------------------------------------------------------------------------------------------------
# Samplers of single indices.


@dataclass(frozen=True)
class Stream:
    """What a sampler of single indices gives in an epoch, on all ranks together.

    Attributes:
        kind: "fixed": the same in every epoch; "shuffled": each index at most once; "unknown": drawn otherwise.
        order: in words.
        size: indices in an epoch, of this rank.
        total: examples that it picks from.
        phrase: the order as checkpoints keep it.
        draw: (seed) -> the indices of any epoch, of this rank; None where `refusal` says why they are not known.
        refusal: why no plan can be made of it; "" where one can.
        ranks: over how many the indices are dealt out in turn.
        fixed: () -> the indices of every epoch; None for another order.
        members: indices that may come, None for all of the examples.
        is_public: whether the order, if fixed, is known to all who know the data set's.
        copies: places that an index may have in an epoch.
        together: places of one index that may fall into a step of so many places.
        places: () -> by place of a shuffle, which name stands there: those that stand twice by padding.
        chances: () -> of each index, the probability of one draw; None where nothing is drawn with replacement.
        is_uniform: whether an index's place is drawn uniformly.
        is_fresh: whether it surely is so in each epoch anew.
        caveat: what else must be so.
    """

    kind: Kind
    order: str
    size: int
    total: int
    phrase: str = ""
    draw: Callable[[int | bytes], Drawn] | None = None
    refusal: str = ""
    ranks: int = 1
    fixed: Callable[[], Indices] | None = None
    members: Indices | None = None
    is_public: bool = True
    copies: int = 1
    together: Callable[[int], int] = lambda size: 1
    places: Callable[[], Indices] | None = None
    chances: Callable[[], NDArray[np.float64]] | None = None
    is_uniform: bool = True
    is_fresh: bool = True
    caveat: str = ""


def read_stream(sampler: Any) -> Stream | None:
    """What a sampler gives, by its exact class; None for one that is not known."""
    kind = type(sampler)
    if kind is SequentialSampler:
        size = len(sampler)
        return Stream(
            "fixed", "sequential, the same in each epoch", size, size, "sequential",
            lambda seed: (lambda epoch: np.arange(size), None), fixed=lambda: np.arange(size),
        )  # fmt: skip
    if kind is FixedOrderSampler:
        size, words = len(sampler), "shuffled once, the same order in each epoch"
        return Stream(
            "fixed", words, size, size, words, lambda seed: (sampler.order, sampler), fixed=sampler.order,
            is_public=False,
        )  # fmt: skip
    if kind in (list, tuple, range, np.ndarray, torch.Tensor):
        return _of_list(sampler)
    if kind is EpochShuffleSampler:
        size = len(sampler)
        return Stream("shuffled", _ANEW, size, size, _ANEW, lambda seed: (sampler.order, sampler))
    if kind is RandomSampler:
        return _of_random(sampler)
    if is_of(sampler, "accelerate.data_loader", "SeedableRandomSampler"):
        return _of_random(sampler, by_epoch=True)
    if kind is SubsetRandomSampler:
        return _of_subset(sampler)
    if kind is DistributedSampler:
        return _of_distributed(sampler)
    if kind is WeightedRandomSampler:
        return _of_weighted(sampler)
    return None


def _of_list(sampler: Any) -> Stream | None:
    try:
        indices = np.asarray(sampler, np.int64)
    except (ValueError, TypeError):  # of something else than indices
        return None
    if indices.ndim != 1:
        return None
    return Stream(
        "fixed", "a list, the same in each epoch", len(indices), len(indices), f"that of {type(sampler).__name__}",
        lambda seed: (lambda epoch: indices, None), _not_distinct(indices, "a list of indices"),
        fixed=lambda: indices, members=indices,
    )  # fmt: skip


def _not_distinct(indices: Indices, of: str) -> str:
    if indices.size and len(np.unique(indices)) == indices.size and indices.min() >= 0:
        return ""
    return (
        f"the indices of {of} must be distinct, none negative, at least one; an index that stands twice takes part "
        "twice an epoch"
    )


def _of_random(sampler: RandomSampler, by_epoch: bool = False) -> Stream:
    """Args: by_epoch: whether the sampler is a function of its epoch, and not of torch's generator."""
    total, size = len(sampler.data_source), len(sampler)
    refusal = ""
    if sampler.replacement or size > total:
        refusal = (
            f"RandomSampler with replacement={sampler.replacement} and num_samples={size} of {total} may draw an "
            f"example more than once an epoch; use shuffle=True, {_EXPLICIT}"
        )
    if sampler.replacement:
        words = f"drawn with replacement, {size} of {total} in an epoch"
        return Stream(
            "unknown", words, size, total, refusal=refusal, chances=lambda: np.full(total, 1 / total)
        )  # fmt: skip

    def draw(seed: int | bytes) -> Drawn:
        if by_epoch:
            return _by_epoch(sampler), None
        shuffler = EpochShuffleSampler(total, seed)
        return lambda epoch: shuffler.order(epoch)[:size], shuffler

    if size <= total:
        words = _ANEW if size == total else f"{size} of {total} without replacement, drawn again in each epoch"
        return Stream("shuffled", words, size, total, f"that of {type(sampler).__name__}" if by_epoch else _ANEW, draw)

    def together(step: int) -> int:
        if total % step == 0:
            return 1
        return step // total if step % total == 0 else min((step - 1) // total + 2, -(-size // total))

    words = f"shuffles one after another, {size} examples of {total} in an epoch"
    return Stream(
        "unknown", words, size, total, refusal=refusal, copies=-(-size // total), together=together, is_uniform=False
    )


def _by_epoch(sampler: Any) -> Callable[[int], Indices]:
    """The indices of a sampler that is a function of the epoch that it is told."""

    def indices(epoch: int) -> Indices:
        sampler.set_epoch(epoch)
        return np.fromiter(sampler, np.int64, len(sampler))

    return indices


def _of_subset(sampler: SubsetRandomSampler) -> Stream:
    subset = np.asarray(sampler.indices, np.int64)

    def draw(seed: int | bytes) -> Drawn:
        shuffler = EpochShuffleSampler(subset.size, seed)
        return lambda epoch: subset[shuffler.order(epoch)], shuffler

    words = f"a subset of {len(subset)}, {_ANEW}"
    refusal = _not_distinct(subset, "SubsetRandomSampler")
    return Stream("shuffled", words, len(subset), len(subset), words, draw, refusal, members=subset)


def _of_distributed(sampler: DistributedSampler[Any]) -> Stream:
    size, ranks, total = len(sampler.dataset), sampler.num_replicas, sampler.total_size  # type: ignore[arg-type]
    places = (lambda: np.arange(total) % size) if total > size else None
    padding = "" if total <= size else f", {total - size} example(s) twice to fill up {ranks} ranks"
    refusal = ""
    if total > size:
        refusal = (
            f"DistributedSampler repeats {total - size} example(s) to deal {size} out to {ranks} ranks; "
            f"give the sampler drop_last=True, {_EXPLICIT}"
        )
    # Phrases are without the number of ranks: a checkpoint may be resumed on another one.
    phrase = f"distributed, {_ANEW if sampler.shuffle else 'sequential'}"
    if not sampler.shuffle:
        words = f"dealt out to {ranks} ranks in turn, the same in each epoch{padding}"
        return Stream(
            "fixed", words, len(sampler), size, phrase, lambda seed: (_by_epoch(sampler), None), refusal, ranks,
            fixed=lambda: np.arange(total) % size,
        )  # fmt: skip
    words = (
        f"dealt out to {ranks} ranks, {_ANEW} if set_epoch is called before it (else one shuffle, the same in each "
        f"epoch){padding}"
    )
    copies = -(-total // size)
    return Stream(
        "shuffled", words, len(sampler), size, phrase, lambda seed: (_by_epoch(sampler), None), refusal, ranks,
        copies=copies, together=lambda step: copies, places=places, is_uniform=total <= size, is_fresh=False,
    )  # fmt: skip


def _of_weighted(sampler: WeightedRandomSampler) -> Stream:
    weights, size = sampler.weights.numpy().astype(np.float64), len(sampler)
    total = len(weights)
    if sampler.replacement:
        words = f"drawn by weights, with replacement, {size} in an epoch"
        refusal = (
            "WeightedRandomSampler with replacement may draw an example several times in a step, and no proof bounds "
            f"how often. If the weights are public, {_RATED}. Counts of classes are not public: give a rate to each "
            "class by a rule of yours, with anyorder.sampling.PoissonRates. Or use shuffle=True and weight the loss, "
            "by weights of at most 1: what larger ones add is clipped"
        )
        return Stream(
            "unknown", words, size, total, refusal=refusal, chances=lambda: weights / weights.sum(), caveat=_PUBLIC,
        )  # fmt: skip
    refusal = ""
    if size > np.count_nonzero(weights):
        refusal = (
            f"WeightedRandomSampler without replacement must draw at most as many examples as have a weight above 0, "
            f"got num_samples={size}"
        )
    words = f"drawn by weights, without replacement, {size} of {total}, again in each epoch"

    def draw(seed: int | bytes) -> Drawn:
        source = NoiseSource(key_of(seed)).derive(b"weighted")

        def indices(epoch: int) -> Indices:
            """In the order of exponential times at these rates, which is that of draws by weight one after another."""
            uniform = ((words_of(source, epoch, total) >> np.uint64(12)) + 0.5) * 2.0**-52
            with np.errstate(divide="ignore"):
                return np.argsort(-np.log(uniform) / weights, kind="stable")[:size]

        return indices, None

    return Stream(
        "shuffled", words, size, total, words, draw, refusal, is_uniform=False, caveat=_PUBLIC
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# Loaders: what gives their batches.


@dataclass(frozen=True)
class IndexedBatches:
    """A sampler's indices, cut into batches by number: `steps` of them in an epoch, on this rank."""

    stream: Stream
    size: int
    drop_last: bool
    refusal: str = ""

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.stream.size // self.size if self.drop_last else -(-self.stream.size // self.size)


@dataclass(frozen=True)
class ListedBatches:
    """The same batches in every epoch."""

    batches: list[Indices]
    order: str
    phrase: str
    size: int
    is_public: bool
    refusal: str = ""


@dataclass(frozen=True)
class TossedBatches:
    """Poisson sampling: each example in each batch by a random draw of its own, on each of `ranks` ranks.

    Attributes:
        sampler: of this package; None for Opacus's.
        members: that may come; None for all.
    """

    probability: float
    steps: int
    total: int
    sampler: Any = None
    ranks: int = 1
    members: Indices | None = None
    refusal: str = ""


@dataclass(frozen=True)
class SecretBatches:
    """The batches of a plan's secret order."""

    sampler: SecretBatchSampler
    refusal: str = ""


@dataclass(frozen=True)
class UnknownBatches:
    """Of these nothing is known but what a run shows."""

    order: str
    because: str
    refusal: str


Reading = IndexedBatches | ListedBatches | TossedBatches | SecretBatches | UnknownBatches


def read_loader(loader: DataLoader[Any]) -> Reading:
    """What gives the batches of a DataLoader of a data set with indices.

    Raises: LoaderError for an epoch without a batch.
    """
    if not is_plain(loader):
        return UnknownBatches(
            f"that of {type(loader).__name__}", "its own __iter__ may do anything", _not_plain(loader)
        )  # fmt: skip
    if loader.num_workers and not loader.in_order:
        because = "the order depends on how long examples take to load"
        return UnknownBatches("as workers finish (in_order=False)", because, _NOT_IN_ORDER)
    batcher = _batcher(loader)
    if is_of(batcher, "opacus.utils.batch_memory_manager", "BatchSplittingSampler"):
        found = read_batcher(loader, batcher.sampler)
        return replace(found, refusal=found.refusal or _not_known("batch sampler", batcher))
    return read_batcher(loader, batcher)


def read_batcher(loader: DataLoader[Any], batcher: Any) -> Reading:
    """What a batch sampler gives, by its exact class."""
    kind = type(batcher)
    if kind is PoissonBatchSampler:
        q = batcher.sampling_probability
        refusal = _not_distinct(batcher.indices, "PoissonBatchSampler")
        return TossedBatches(q, batcher.steps, batcher.size, batcher, members=batcher.indices, refusal=refusal)
    if kind is SecretBatchSampler:
        if batcher.rule.draw_probability is not None:
            return SecretBatches(batcher)
        told = f"the batches are those of a plan already: {batcher.phrase}; give its order as order="
        return SecretBatches(batcher, told)
    if is_of(batcher, "opacus.utils.uniform_sampler", "UniformWithReplacementSampler"):
        q, steps, total = batcher.sample_rate, len(batcher), batcher.num_samples
        return TossedBatches(q, steps, total, refusal=_not_known("batch sampler", batcher))
    if is_of(batcher, "opacus.utils.uniform_sampler", "DistributedUniformWithReplacementSampler"):
        q, steps, total, ranks = batcher.sample_rate, len(batcher), batcher.total_size, batcher.num_replicas
        return TossedBatches(q, steps, total, ranks=ranks, refusal=_not_known("batch sampler", batcher))
    if kind is UnitOrderSampler:
        words = "by units, the same order in each epoch"
        listed = [np.asarray(batch, np.int64) for batch in batcher.batches(0, 0)]
        return ListedBatches(listed, words, words, batcher.batch_size, is_public=False)
    if kind in (list, tuple) and (listed_batches := _listed(batcher)) is not None:
        return listed_batches
    if kind is BatchSampler and type(batcher.sampler) is PoissonRates:
        because = "make_private draws it, by the run's key"
        return UnknownBatches("Poisson sampling at rates of examples", because, _TOLD)
    if kind is BatchSampler:
        stream, size, drop_last, refusal = read_stream(batcher.sampler), batcher.batch_size, batcher.drop_last, ""
    elif loader.batch_size is None and loader.batch_sampler is None:
        stream, size, drop_last, refusal = read_stream(batcher), 1, False, _UNCOLLATED
        if stream is not None:
            caveat = "if no example stands in two of the batches that the data set holds"
            stream = replace(stream, order=f"batches that the data set holds, {stream.order}", caveat=caveat)
    else:
        stream, size, drop_last, refusal = None, 1, False, ""
    if stream is None:
        because = "nothing is known of this class but what a run shows of it"
        if kind is BatchSampler:
            return UnknownBatches(
                f"that of {type(batcher.sampler).__name__}", because, _not_known("sampler", batcher.sampler)
            )
        return UnknownBatches(f"that of {kind.__name__}", because, refusal or _not_known("batch sampler", batcher))
    read = IndexedBatches(stream, size, drop_last, refusal or stream.refusal)
    if read.steps == 0:
        raise LoaderError(
            f"an epoch must have a batch, got {stream.size} examples for batch_size={size} and drop_last={drop_last}"
        )
    return read


def _listed(batcher: Any) -> ListedBatches | None:
    """A list of batches, each a list of indices; None for a list of anything else."""
    try:
        batches = [np.asarray(batch, np.int64) for batch in batcher]
    except (ValueError, TypeError):
        return None
    if any(batch.ndim != 1 for batch in batches):
        return None
    if not batches:
        raise LoaderError("an epoch must have a batch, got none")
    refusal = _not_distinct(np.concatenate(batches), "a list of batches")
    words, phrase = "a list of batches, the same in each epoch", f"that of {type(batcher).__name__}"
    return ListedBatches(batches, words, phrase, max(map(len, batches)), True, refusal)


def _not_known(what: str, found: Any) -> str:
    use = (
        "use shuffle=True, a torch sampler without replacement or anyorder.FixedOrderSampler; or pass its indices as a "
        "list, sampler=list(..), the same in all epochs"
        if what == "sampler"
        else "use batch_size= and shuffle=; or pass its batches as a list, batch_sampler=list(..), the same every epoch"
    )
    return (
        f"the order of the {what} {type(found).__name__} is not known; {use}; or state what it obeys, which the ledger "
        "then enforces: ao.plan(order=ao.participation.EpochShuffle(epochs, batches of an epoch), ..) where each "
        "example comes once an epoch at most, MinSeparation(steps, b=steps apart, k=times at most) where one comes "
        "back within an epoch, as in balanced classes. What it orders by, such as lengths or scores, must be public"
    )


_NOT_IN_ORDER = "in_order=False hands batches out as workers finish them; a planned order needs in_order=True"


def _not_plain(loader: Any) -> str:
    if type(loader).__module__.split(".")[0] == "accelerate":
        return (
            f"the loader is accelerate's {type(loader).__name__}, which fetches batches ahead and copies them: call "
            "make_private on model, optimizer and loader as they were before accelerator.prepare, and prepare what it "
            "returns"
        )
    return (
        f"{type(loader).__name__} overrides how a DataLoader iterates, so its batches need not be those of its "
        "sampler; "
        f"use a plain DataLoader with a collate_fn, or {_BY_UNITS}"
    )


def _batcher(loader: DataLoader[Any]) -> Any:
    """What gives lists of indices: the batch sampler, or with batch_size=None a sampler that yields lists."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@dataclass(frozen=True)
class Rates:
    """Poisson sampling in which each example has a rate of its own.

    Attributes:
        rates: (dataset_size,) of each example, in each step.
        most: which none is above; the claim is for it.
        batch_size: examples that a step is stated to have in expectation.
        steps: of an epoch.
    """

    rates: NDArray[np.float64]
    most: float
    batch_size: int
    steps: int


def read_rates(loader: DataLoader[Any]) -> Rates | None:
    """The rates that a loader's sampler names by weights or by themselves; None for other samplers.

    Weights w of torch's `WeightedRandomSampler` with replacement are read as rates batch_size w / sum(w): each example
    is expected as often as there. They are public.

    Raises: LoaderError for rates that are none.
    """
    batcher = _batcher(loader)
    if type(batcher) is not BatchSampler:
        return None
    sampler, size = batcher.sampler, batcher.batch_size
    if type(sampler) is PoissonRates:
        rates, most = sampler.rates, sampler.most
    elif type(sampler) is WeightedRandomSampler:
        if not sampler.replacement:
            raise LoaderError(
                "WeightedRandomSampler without replacement gives each example once an epoch at most, and secret draws "
                "do not: use replacement=True, or plan with ao.plan(loader=loader, ..) for its own order"
            )
        weights = sampler.weights.numpy().astype(np.float64)
        if not (np.isfinite(weights).all() and weights.min() >= 0 < weights.max()):
            raise LoaderError("weights of examples must be finite numbers from 0 on, one of them above 0")
        rates = size * weights / weights.sum()
        most = float(rates.max())
        if most > 1:
            raise LoaderError(
                f"an example cannot be in a step more than once on average, and the largest weight asks for {most:.4g} "
                f"times in batches of {size}: use smaller batches or weights that are closer together"
            )
    else:
        return None
    if len(rates) != len(loader.dataset):  # type: ignore[arg-type]
        raise LoaderError(
            f"each example of the data set must have a rate, got {len(rates)} for {len(loader.dataset)} examples"  # type: ignore[arg-type]
        )
    if len(batcher) == 0:
        raise LoaderError(f"an epoch must have a batch, got {len(sampler)} examples for batch_size={size}")
    return Rates(rates, most, size, len(batcher))


def check_loader(loader: Any) -> None:
    """Raise LoaderError unless the batches of a loader are those of its sampler, in that order."""
    if not isinstance(loader, DataLoader):
        raise LoaderError(
            f"loader must be a torch DataLoader, whose sampler tells the order, got {type(loader).__name__}. Wrap the "
            f"data in one, or, where make_private has run before, give it the loader of then; or {_BY_UNITS}"
        )
    if not is_plain(loader):
        raise LoaderError(_not_plain(loader))
    if loader.num_workers and not loader.in_order:
        raise LoaderError(_NOT_IN_ORDER)
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        first = _batcher(loader)
        if not isinstance(first, (BatchSampler, PoissonBatchSampler, SecretBatchSampler)):
            raise LoaderError(_UNCOLLATED)


_ITERATES = "__iter__", "_get_iterator", "_index_sampler", "_auto_collation"


def is_plain(loader: Any) -> bool:
    """Whether it is a DataLoader whose batches are those of its sampler."""
    return isinstance(loader, DataLoader) and all(
        getattr(type(loader), name) is getattr(DataLoader, name) and name not in vars(loader) for name in _ITERATES
    )


# ----------------------------------------------------------------------------------------------------
# The batches of any epoch, as the engine draws them.


@dataclass(frozen=True)
class Order:
    """The batches of any epoch.

    Attributes:
        kind: "fixed": the same in every epoch; "shuffled": each example at most once in an epoch; "poisson"; "secret":
            another order of secret draws; "unknown".
        phrase: the order in words, as checkpoints keep it.
        batches: (epoch, start) -> the index lists of the epoch from batch `start` on; those of this rank.
        steps: batches in one epoch.
        batch_size: examples in a full batch on this rank; the expected size under Poisson sampling.
        dataset_size: examples that take part, on all ranks.
        members: (m,) indices that may come, on any rank; None where the order is unknown.
        ranks: over how many the examples are dealt out.
        keyed: has the key that the order is drawn from, if there is one.
        repeatable: whether `batches` is a function of its arguments.
        is_stated: whether the shuffles are drawn from a key of the loader's own, and not from the run's.
        probability: of each example in each step, under Poisson sampling.
        arrays: `batches` as int64 arrays, of an order that has them.
    """

    kind: Kind
    phrase: str
    batches: Callable[[int, int], Iterator[list[int]]]
    steps: int
    batch_size: int
    dataset_size: int
    members: Indices | None = None
    ranks: int = 1
    keyed: Keyed | None = None
    repeatable: bool = True
    is_stated: bool = False
    probability: float | None = None
    arrays: Callable[[int, int], Iterator[Indices]] | None = None

    @property
    def known_beforehand(self) -> bool:
        """Whether every batch of every epoch can be told before the run, on a single rank."""
        return self.ranks == 1 and (self.kind == "fixed" or self.is_stated)


def check_ranks(order: Order) -> None:
    """Raise LoaderError unless each of several processes hands out its own part of the data set."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return  # a plan for ranks may be made by one process
    world = torch.distributed.get_world_size()
    if order.ranks == 1 < world:
        raise LoaderError(
            f"each of the {world} ranks would give out the whole data set, every example {world} times an epoch; use "
            f"a DistributedSampler, {_EXPLICIT}"
        )
    if order.ranks != world:
        raise LoaderError(
            f"the DistributedSampler deals the examples out to {order.ranks} ranks, and {world} take part; leave its "
            "num_replicas and rank to the process group"
        )


def read_order(loader: DataLoader[Any], seed: int | bytes) -> Order:
    """The order of a checked loader with a known sampler; `seed` is for those that shuffle with torch's generator.

    Raises: LoaderError if the order is not known, or an example may come twice in an epoch.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise LoaderError(
            "the order of an IterableDataset is not known beforehand; name its units with unit= in make_private, and "
            "pass order= and unit='user' (what you call one of them) to ao.plan; the ledger then enforces it step "
            "by step"
        )
    read = read_batcher(loader, _batcher(loader))
    if isinstance(read, SecretBatches):  # whose members are known, whatever a plan says of it
        return _secret_order(read.sampler)
    if read.refusal:
        raise LoaderError(read.refusal)
    match read:
        case TossedBatches():
            q, sampler = read.probability, read.sampler
            phrase, expected = f"Poisson sampling with probability {q:g}", max(1, round(q * read.total))
            return Order(
                "poisson", phrase, sampler.batches, read.steps, expected, read.total, read.members, probability=q
            )  # fmt: skip
        case ListedBatches():
            rows = [batch.tolist() for batch in read.batches]
            members = np.unique(np.concatenate(read.batches))
            return Order(
                "fixed", read.phrase, lambda epoch, start: (list(row) for row in rows[start:]), len(rows), read.size,
                len(members), members,
            )  # fmt: skip
        case IndexedBatches():
            return _indexed_order(loader, read, seed)
        case UnknownBatches():
            raise AssertionError("an unknown order has a refusal")


def _secret_order(sampler: SecretBatchSampler) -> Order:
    rule, members = sampler.rule, sampler.members
    probability = rule.draw_probability
    return Order(
        "secret" if probability is None else "poisson", sampler.phrase, sampler.batches, sampler.steps,
        sampler.batch_size, len(members), members, probability=probability,
    )  # fmt: skip


def _indexed_order(loader: DataLoader[Any], read: IndexedBatches, seed: int | bytes) -> Order:
    stream, size, steps = read.stream, read.size, read.steps
    assert stream.draw is not None
    indices, keyed = stream.draw(seed)

    def arrays(epoch: int, start: int) -> Iterator[Indices]:
        chosen = indices(epoch)
        return (chosen[i * size : (i + 1) * size] for i in range(start, steps))

    def batches(epoch: int, start: int) -> Iterator[list[int]]:
        return map(np.ndarray.tolist, arrays(epoch, start))

    members = np.arange(stream.total) if stream.members is None else stream.members
    is_stated = type(getattr(_batcher(loader), "sampler", None)) is EpochShuffleSampler
    return Order(
        stream.kind, stream.phrase, batches, steps, size, len(members), members, stream.ranks, keyed,
        is_stated=is_stated, arrays=arrays,
    )  # fmt: skip


def take_order(loader: DataLoader[Any], seed: int | bytes) -> Order:
    """As `read_order`; an order that is not known is taken as it comes, told the epoch where it wants to know."""
    try:
        return read_order(loader, seed)
    except LoaderError:
        batcher = _batcher(loader)
    inner = getattr(batcher, "sampler", None)
    told: list[Any] = [part for part in (batcher, inner) if hasattr(part, "set_epoch")]

    def batches(epoch: int, start: int) -> Iterator[list[int]]:
        for part in told:
            part.set_epoch(epoch)
        return (list(batch) for batch in islice(iter(batcher), start, None))

    phrase = f"that of {type(batcher if inner is None else inner).__name__}"
    if not hasattr(batcher, "__len__") or not len(batcher):
        raise LoaderError(f"an epoch must have a known number of batches, at least one; the order is {phrase}")
    size = getattr(batcher, "batch_size", None) or 1
    dataset_size = len(loader.dataset)  # type: ignore[arg-type]
    return Order("unknown", phrase, batches, len(batcher), size, dataset_size, repeatable=bool(told))


# ----------------------------------------------------------------------------------------------------
# Where examples come from: torch's wrappers of data sets seen through, so that an example has one name.


class Origins:
    """Names of the examples of a data set: their indices in the data sets that `Subset` and `ConcatDataset` wrap.

    An example of a data set that is no wrapper has its index. Under wrappers the same example has the same name however
    often it is listed; where several data sets lie beneath, the names of the second follow those of the first.

    Not seen: what a data set or a collate_fn of one's own does with an index, and equal examples in two data sets.

    Raises: LoaderError for a `StackDataset` that joins one example to several others.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.is_kept = False
        self._kept: dict[int, Indices] = {}  # of each `Subset`, by its id: what it listed when that was kept
        self._first: dict[int, int] = {}  # of each data set beneath, by its id: the name of its example 0
        self._size = 0
        self._find_bases(dataset)
        self._is_wrapper = isinstance(dataset, (Subset, ConcatDataset))

    def keep(self) -> None:
        """Have the names be those of now, until this is called again, whatever a `Subset` comes to list."""
        self.is_kept, waiting = True, [self._dataset]
        while waiting:
            one = waiting.pop()
            if _is_subset(one):
                self._kept[id(one)] = np.array(one.indices, np.int64)
                waiting.append(one.dataset)
            elif isinstance(one, ConcatDataset):
                waiting += one.datasets

    def names(self, indices: Indices) -> Indices:
        """(m,) int64: the names of the examples of these indices."""
        return self._names(self._dataset, indices) if self._is_wrapper else indices

    def check_distinct(self, indices: Indices) -> None:
        """Raise LoaderError if two of these indices are the same example."""
        if not _is_wrapper(self._dataset):
            return
        names = self.names(indices)
        if len(np.unique(names)) < len(names):
            raise LoaderError(
                "the data set lists an example more than once (a Subset with repeated indices, or a ConcatDataset of "
                "parts that overlap), so that it would take part more than once an epoch; list each once, or pass "
                "order= to ao.plan, which the ledger then enforces step by step"
            )

    def _find_bases(self, dataset: Any) -> None:
        if _is_subset(dataset):
            self._find_bases(dataset.dataset)
        elif isinstance(dataset, ConcatDataset):
            for part in dataset.datasets:
                self._find_bases(part)
        elif id(dataset) not in self._first:
            if isinstance(dataset, StackDataset):
                _check_stack(dataset)
            self._first[id(dataset)] = self._size
            self._size += len(dataset) if hasattr(dataset, "__len__") else 1 << 40

    def _names(self, dataset: Any, indices: Indices) -> Indices:
        if _is_subset(dataset):
            listed = self._kept.get(id(dataset), dataset.indices)
            return self._names(dataset.dataset, _picked(listed, indices, dataset.dataset))
        if isinstance(dataset, ConcatDataset):
            ends = np.asarray(dataset.cumulative_sizes, np.int64)
            part_of = np.searchsorted(ends, indices, side="right")
            names = np.empty_like(indices)
            for part in np.unique(part_of).tolist():
                chosen = part_of == part
                start = ends[part - 1] if part else 0
                names[chosen] = self._names(dataset.datasets[part], indices[chosen] - start)
            return names
        return indices + self._first[id(dataset)]


def _is_subset(dataset: Any) -> bool:
    return isinstance(dataset, Subset) and len(dataset) == len(dataset.indices)


def _is_wrapper(dataset: Any) -> bool:
    return _is_subset(dataset) or isinstance(dataset, ConcatDataset)


def _picked(listed: Any, indices: Indices, inner: Any) -> Indices:
    """`listed[indices]`, looked up now: the list may be another one in the next epoch."""
    if 8 * len(indices) > len(listed):
        picked = np.asarray(listed, np.int64)[indices]
    else:
        picked = np.array([int(listed[i]) for i in indices.tolist()], np.int64)
    return np.where(picked < 0, picked + len(inner), picked) if picked.min(initial=0) < 0 else picked


def _check_stack(dataset: StackDataset[Any]) -> None:
    """Refuse a stack in which an example of one of its parts stands in several places."""
    parts = list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    if not any(map(_is_wrapper, parts)):
        return
    joined = Origins(ConcatDataset(parts))
    names = joined.names(np.arange(sum(map(len, parts)))).reshape(len(parts), -1)
    places = np.broadcast_to(np.arange(names.shape[1]), names.shape)
    pairs = np.unique(np.stack([names.ravel(), places.ravel()]), axis=1)
    if len(np.unique(pairs[0])) < pairs.shape[1]:
        raise LoaderError(
            "the StackDataset joins one example of a part to several of another, so that it would take part more than "
            "once an epoch; use each once, or name the units with unit= in make_private and pass order= to "
            "ao.plan"
        )


def settled(dataset: Any) -> Any:
    """The data set, of which each `Subset` goes on listing what it lists now, whatever becomes of the caller's list."""
    if not (_is_wrapper(dataset) or isinstance(dataset, StackDataset)):
        return dataset
    own = copy.copy(dataset)
    if _is_subset(dataset):
        own.dataset, own.indices = settled(dataset.dataset), list(dataset.indices)
    elif isinstance(dataset.datasets, dict):
        own.datasets = {name: settled(part) for name, part in dataset.datasets.items()}
    else:
        own.datasets = type(dataset.datasets)(map(settled, dataset.datasets))
    return own


def _has_stack(dataset: Any) -> bool:
    if _is_subset(dataset):
        return _has_stack(dataset.dataset)
    return isinstance(dataset, StackDataset) or (_is_wrapper(dataset) and any(map(_has_stack, dataset.datasets)))


def data_of(loader: DataLoader[Any]) -> Any:
    """The user's data set, also of a loader that `PrivateLoader` has made."""
    return user_dataset(loader.dataset)


# ----------------------------------------------------------------------------------------------------
# Whose examples they are: what batches say, and a data set read once.


def extract_units(batch: Any, unit: Unit) -> Units:
    """The ids of the units of a batch, example by example: (m,) int64, or a list of strings.

    Raises: LoaderError if they are not where `unit` says, or are not integers or strings in one dimension.
    """
    if callable(unit):
        ids = unit(batch)
    else:
        if not isinstance(unit, (str, int)):
            raise LoaderError(
                f"unit must say where the id of each example's unit is in a batch: a field of a dict, a position in a "
                f"tuple, or a callable: batch -> ids; got {type(unit).__name__}"
            )
        if unit not in (found := fields_of(batch)):
            raise LoaderError(
                f"unit={unit!r} is not in the batch, a {type(batch).__name__} with the fields {list(found)}; name a "
                "field of a dict, a position in a tuple, or pass a callable: batch -> ids"
            )
        ids = found[unit]
    try:
        return as_units(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except (ArgumentError, TypeError) as problem:
        raise LoaderError(f"unit={unit!r} must give the id of each example in the batch: {problem}") from problem


_AT_ONCE = 256


def read_owners(loader: DataLoader[Any], members: Indices, unit: Unit, at_once: int = _AT_ONCE) -> Units:
    """The id of each member's unit, in their order.

    Args:
        loader: whose data set, collation and workers are used.
        members: indices, each read once.
        unit: where a batch keeps the ids.
        at_once: examples in a batch.
    """
    chunks = [members[i : i + at_once].tolist() for i in range(0, len(members), at_once)]
    # Nothing is trained on what is read here, and who watches a training is told so. What is drawn is not used.
    with torch.no_grad(), alone(0, held_generators(loader.dataset, loader.collate_fn)):
        found = [
            _of_all(extract_units(batch, unit), len(chunk))
            for chunk, batch in zip(chunks, rebuild(loader, chunks), strict=True)
        ]
    if any(isinstance(units, list) for units in found):
        return [unit for units in found for unit in units]
    return np.concatenate(found)


def _of_all(units: Units, examples: int) -> Units:
    if len(units) != examples:
        raise LoaderError(f"unit= must give one id for each of the {examples} examples of a batch, got {len(units)}")
    return units


def rebuild(loader: DataLoader[Any], batches: Any, **others: Any) -> DataLoader[Any]:
    """A DataLoader with the same settings, other batches (None for a stream, which has its own), its own generator.

    Args:
        others: settings that are not the same.
    """
    place: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if batches is not None:
        # With batch_size=None the data set is asked for a list of indices at once, and the sampler yields the lists.
        place = {"batch_size": None, "sampler": batches} if loader.batch_sampler is None else {"batch_sampler": batches}
    same = (
        "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
        "prefetch_factor", "persistent_workers", "pin_memory_device",
    )  # fmt: skip
    settings = {name: getattr(loader, name) for name in same} | place | {"generator": torch.Generator()} | others
    if _has_stack(settings["dataset"]):  # whose places are looked at once
        settings["dataset"] = settled(settings["dataset"])
    return DataLoader(**settings)


# ----------------------------------------------------------------------------------------------------
# The participation that a loader's order amounts to.


@dataclass(frozen=True)
class Found:
    """What a loader's order says about participation.

    Attributes:
        participation: who takes part when, if every batch is one step.
        batch_size: examples in a full batch, over all ranks together; the expected size under Poisson sampling.
        dataset_size: examples that take part.
        steps_per_epoch: batches in one epoch.
        order: the order found, in words.
    """

    participation: Participation
    batch_size: int
    dataset_size: int
    steps_per_epoch: int
    order: str


def find_participation(loader: Any, epochs: int, *, unit: Unit = None, accumulate: int = 1) -> Found:
    """The participation of the examples of a loader that is run through `epochs` times.

    Each batch is a step. With `accumulate`, so many batches are, fewer in the last step of an epoch where the epoch is
    not divided by it; the numbers of `Found` are still those of batches.

        sequential, FixedOrderSampler, DistributedSampler(shuffle=False)                             FixedOrder
        shuffle=True, RandomSampler, SubsetRandomSampler, EpochShuffleSampler, DistributedSampler    EpochShuffle
        any of these for one epoch                                                                   SingleEpoch
        a list of indices or of batches, each index once                                             FixedOrder
        PoissonBatchSampler                                                                          PoissonSampling

    With `unit` it is that of the units, a `KnownOrder`: the data set is read once, for who owns which example. The
    order must then be known beforehand: sequential, FixedOrderSampler, EpochShuffleSampler, UnitOrderSampler. How many
    examples each unit has, and so its steps, is public in that claim.

    A step under a DistributedSampler is one batch on all ranks together; all ranks must use one seed.

    Examples are told apart through `Subset` and `ConcatDataset`: one that such a data set lists twice comes twice.

    Raises: LoaderError for an order that is not known, or in which an example may come twice in an epoch, or a unit in
        two of the batches that make a step.
    """
    epochs = checks.integer("epochs", epochs, low=1)
    accumulate = checks.integer("accumulate", accumulate, low=1)
    check_loader(loader)
    order = planned_order(loader, accumulate)
    per_epoch = -(-order.steps // accumulate)
    units = None if unit is None else _units_of_steps(order, epochs, accumulate, loader, unit)
    participation = participation_of(order, accumulate, epochs * per_epoch, epochs, units)
    return Found(participation, order.batch_size * order.ranks, order.dataset_size, order.steps, order.phrase)


def find_rates(loader: Any, epochs: int) -> Found | None:
    """Poisson sampling of the examples of a loader whose sampler weights them; None for other loaders.

    Raises: LoaderError for weights that cannot be rates.
    """
    check_loader(loader)
    found = read_rates(loader)
    if found is None:
        return None
    rule = PoissonSampling(checks.integer("epochs", epochs, low=1) * found.steps, found.most)
    order = "Poisson sampling, each example at a rate of its own"
    return Found(rule, found.batch_size, len(found.rates), found.steps, order)


def planned_order(loader: DataLoader[Any], accumulate: int) -> Order:
    """The order of a checked loader, if a plan can be made of it. Raises: LoaderError."""
    order = read_order(loader, 0)
    if order.kind == "secret":
        raise LoaderError(f"the batches are those of a plan already: {order.phrase}; give its order as order=")
    if order.kind == "poisson" and accumulate != 1:
        raise LoaderError(f"batches of Poisson sampling are steps each: accumulate must be 1, got {accumulate}")
    check_ranks(order)
    assert order.members is not None
    Origins(loader.dataset).check_distinct(order.members)
    return order


def participation_of(
    order: Order, accumulate: int, steps: int, epochs: int, units: Sequence[Any] | None = None
) -> Participation:
    """The participation of a `planned_order` that is run for so many steps, in so many epochs.

    Args:
        units: those of each step, where they are asked for by name.
    """
    if units is not None:
        check_known_beforehand(order)
    found = recognised(
        LoaderFacts(
            steps, epochs, -(-order.steps // accumulate), is_once=units is None and order.kind in ("fixed", "shuffled"),
            is_fixed=order.kind == "fixed", probability=order.probability if units is None else None, units=units,
        )
    )  # fmt: skip
    if found is None:
        raise LoaderError(f"this order is none that claims are proven for: {order.phrase}")
    return found


def check_known_beforehand(order: Order) -> None:
    """Raise LoaderError unless the steps of units can be told before the run."""
    if not order.known_beforehand:
        raise LoaderError(
            f"the steps of units must be known beforehand, and this order is {order.phrase}"
            f"{f', dealt out to {order.ranks} ranks' if order.ranks > 1 else ''}; use batch_sampler="
            "anyorder.sampling.UnitOrderSampler(ids, batch_size), sampler=anyorder.FixedOrderSampler(data, seed) or "
            "anyorder.sampling.EpochShuffleSampler(data, seed), or pass order= to ao.plan (for example "
            "MinSeparation), which the ledger then enforces step by step"
        )


def _units_of_steps(order: Order, epochs: int, accumulate: int, loader: DataLoader[Any], unit: Unit) -> list[Any]:
    """Which units are in which step of all epochs."""
    check_known_beforehand(order)
    assert order.members is not None
    members = np.sort(order.members)
    ids = np.asarray(read_owners(loader, members, unit, order.batch_size))
    per_epoch = -(-order.steps // accumulate)
    steps: list[list[Any]] = [[] for _ in range(epochs * per_epoch)]
    for epoch in range(epochs):
        for i, batch in enumerate(order.batches(epoch, 0)):
            came = ids[np.searchsorted(members, batch)].tolist()
            if i % accumulate == 0:
                seen: set[Any] = set()
            if not seen.isdisjoint(came):
                raise LoaderError(
                    f"a unit is in two of the {accumulate} batches that make a step, and would be clipped in each: "
                    "keep the examples of a unit in one batch, with batch_sampler="
                    "anyorder.sampling.UnitOrderSampler(ids, batch_size), or make the loader with the batch size of a "
                    "step, and bound memory by make_private(chunk_size=..)"
                )
            seen.update(came)
            steps[epoch * per_epoch + i // accumulate] += came
    return steps
