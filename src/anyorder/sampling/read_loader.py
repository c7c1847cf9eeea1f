"""The one reader of loaders and samplers: what `ao.plan`, the engine and `ao.check` know of who comes when.

Samplers are known by their exact class: a subclass may do anything. Nothing is drawn and no sampler iterated to read a
loader. What is read is described however the order is; `refusal` says why no plan can be made of it, if none can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from anyorder._draws import words as words_of
from anyorder.checks import is_of
from anyorder.errors import LoaderError
from anyorder.noise import NoiseSource
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
