"""What a loader's samplers say of how its units come, read without drawing from anything.

Samplers are known by their exact class: a subclass may do anything. `anyorder.sampling.find_participation` refuses an
order that no plan can be made for; here such an order is described, and bounded where it can be.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.audit.observations import (
    AtMost,
    DrawnVisits,
    SampledVisits,
    Shuffles,
    Unknown,
    Visits,
    fullest,
    names_of,
    numbers,
    size_of,
    weights_of,
)
from anyorder.errors import ArgumentError, LoaderError
from anyorder.participation import (
    EpochShuffle,
    FixedOrder,
    KnownOrder,
    MinSeparation,
    Participation,
    PoissonSampling,
    SingleEpoch,
)

# ----------------------------------------------------------------------------------------------------
# Samplers of single indices, known by their exact class: what they give in an epoch, without drawing it.


Indices = NDArray[np.int64]

_ANEW = "shuffled anew in each epoch"
_PUBLIC = "if the weights do not depend on the data (weights of classes do: labels are data)"


@dataclass(frozen=True)
class Stream:
    """What a sampler of single indices gives in an epoch, on all ranks together.

    Attributes:
        order: in words.
        size: indices in an epoch, of this rank.
        ranks: over how many the indices are dealt out in turn.
        fixed: () -> the indices of every epoch; None for another order.
        members: indices that may come, None for all of the data set.
        is_public: whether the order, if fixed, is known to all who know the data set's.
        copies: places that an index may have in an epoch.
        together: places of one index that may fall into a step of so many places.
        places: () -> by place of a shuffle, which name stands there: those that stand twice by padding.
        chances: () -> of each index, the probability of one draw; None where nothing is drawn with replacement.
        is_uniform: whether an index's place is drawn uniformly.
        is_fresh: whether it surely is so in each epoch anew.
        caveat: what else must be so.
    """

    order: str
    size: int
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
    from torch import Tensor
    from torch.utils.data import (
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    from anyorder.sampling import EpochShuffleSampler, FixedOrderSampler

    kind = type(sampler)
    if kind is SequentialSampler:
        size = len(sampler)
        return Stream("sequential, the same in each epoch", size, fixed=lambda: np.arange(size))
    if kind is FixedOrderSampler:
        return Stream("shuffled once, the same order in each epoch", len(sampler), fixed=sampler.order, is_public=False)
    if kind in (list, tuple, range, np.ndarray, Tensor):
        return Stream("a list, the same in each epoch", len(sampler), fixed=lambda: np.asarray(sampler, np.int64))
    if kind is EpochShuffleSampler:
        return Stream(_ANEW, len(sampler))
    if kind is RandomSampler or is_of(sampler, "accelerate.data_loader", "SeedableRandomSampler"):
        return _random(sampler)
    if kind is SubsetRandomSampler:
        subset = np.asarray(sampler.indices, np.int64)
        return Stream(f"a subset of {len(subset)}, {_ANEW}", len(subset), members=subset)
    if kind is DistributedSampler:
        return _distributed(sampler)
    if kind is WeightedRandomSampler:
        return _weighted(sampler)
    return None


def _random(sampler: Any) -> Stream:
    total, size = len(sampler.data_source), len(sampler)
    if sampler.replacement:
        return Stream(
            f"drawn with replacement, {size} of {total} in an epoch", size, chances=lambda: np.full(total, 1 / total)
        )
    if size <= total:
        words = _ANEW if size == total else f"{size} of {total} without replacement, drawn anew in each epoch"
        return Stream(words, size)

    def together(step: int) -> int:
        if total % step == 0:
            return 1
        return step // total if step % total == 0 else min((step - 1) // total + 2, -(-size // total))

    words = f"shuffles one after another, {size} examples of {total} in an epoch"
    return Stream(words, size, copies=-(-size // total), together=together, is_uniform=False)


def _weighted(sampler: Any) -> Stream:
    weights, size = sampler.weights.numpy().astype(np.float64), len(sampler)
    if sampler.replacement:
        return Stream(
            f"drawn by weights, with replacement, {size} in an epoch", size, chances=lambda: weights / weights.sum(),
            caveat=_PUBLIC,
        )  # fmt: skip
    return Stream(
        f"drawn by weights, without replacement, {size} of {len(weights)} in an epoch", size, is_uniform=False,
        caveat=_PUBLIC,
    )  # fmt: skip


def _distributed(sampler: Any) -> Stream:
    size, ranks, total = len(sampler.dataset), sampler.num_replicas, sampler.total_size
    places = (lambda: np.arange(total) % size) if total > size else None
    padding = "" if total <= size else f", {total - size} example(s) twice to fill up {ranks} ranks"
    if not sampler.shuffle:
        words = f"dealt out to {ranks} ranks in turn, the same in each epoch{padding}"
        return Stream(words, len(sampler), ranks, fixed=lambda: np.arange(total) % size)
    words = (
        f"dealt out to {ranks} ranks, {_ANEW} if set_epoch is called before it (else one shuffle, the same in each "
        f"epoch){padding}"
    )
    copies = -(-total // size)
    return Stream(
        words, len(sampler), ranks, copies=copies, together=lambda step: copies, places=places,
        is_uniform=total <= size, is_fresh=False,
    )  # fmt: skip


def is_of(found: Any, module: str, name: str) -> bool:
    """Whether it is of exactly this class; a class whose module was never imported has no objects."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and type(found) is kind


_LEFT = "batches that are left over at an epoch's end may be joined with the next epoch's, where an example comes again"


@dataclass(frozen=True)
class Stretch:
    """How a loader is used.

    Attributes:
        epochs: passes; None where `steps` are given.
        steps: optimizer steps in all; None for whole epochs.
        accumulate: batches of the loader that make a step.
        unit: whose privacy; see `anyorder.sampling.Unit`.
        is_split: whether each epoch's last step is known to be of what is left of its batches. Else these may be
            dropped, or joined with batches of the next epoch, in which an example comes again.
    """

    epochs: int | None
    steps: int | None = None
    accumulate: int = 1
    unit: Any = None
    is_split: bool = False

    def joined(self, batches: int) -> int:
        """Epochs that may have batches in one step."""
        if self.is_split or batches % self.accumulate == 0:
            return 1
        return (self.accumulate - 2) // batches + 2

    def least_steps(self, batches: int) -> tuple[int, int]:
        """(steps, epochs): in so many epochs there are at least so many steps."""
        per_epoch = -(-batches // self.accumulate)
        if self.joined(batches) == 1:
            return per_epoch, 1
        return (batches // self.accumulate, 1) if batches >= self.accumulate else (batches, self.accumulate)


@dataclass(frozen=True)
class Arrivals:
    """Who comes when.

    Attributes:
        order: in words.
        visits: how often a unit comes.
        because: why, in words.
        steps: optimizer steps of the run; None where an epoch has no length.
        epochs: passes, the last perhaps in part.
        batches: of an epoch, on this rank: the loader's length.
        batch_size: examples in a full batch, on all ranks; the expected size under Poisson sampling; None if unknown.
        dataset_size: examples that take part; None if unknown.
        participation: as a plan would name it, if one can be made.
    """

    order: str
    visits: Visits
    because: str
    steps: int | None = None
    epochs: int | None = None
    batches: int | None = None
    batch_size: int | None = None
    dataset_size: int | None = None
    participation: Participation | None = None


def read_arrivals(loader: Any, run: Stretch) -> Arrivals:
    """The order of a loader, and how often a unit comes in it; nothing is drawn, and no sampler is iterated.

    With `run.unit` the data set is read once, for who owns which example, and the states of torch's, NumPy's and
    Python's generators and of the loader's own are put back.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(loader, (list, tuple)):
        return _of_list(loader, run)
    loader = _inner(loader)
    if not isinstance(loader, DataLoader):
        return _unknown(
            f"that of a {type(loader).__name__}", "it is no DataLoader, and only its author knows who is in a batch"
        )
    if isinstance(loader.dataset, IterableDataset):
        size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
        batches = -(-size // loader.batch_size) if size is not None and loader.batch_size else None
        found = _unknown(
            "a stream (IterableDataset)", "a stream may give any example at any time, and any number of times"
        )
        return replace(found, batches=batches, batch_size=loader.batch_size, dataset_size=size, **_span(run, batches))
    if type(loader).__iter__ is not DataLoader.__iter__:
        return _unnamed(loader, run, f"that of {type(loader).__name__}", "its own __iter__ may do anything")
    if loader.num_workers and not loader.in_order:
        return _unnamed(
            loader, run, "as workers finish (in_order=False)", "the order depends on how long examples take to load"
        )
    return _of_loader(loader, run)


def _of_loader(loader: Any, run: Stretch) -> Arrivals:
    from torch.utils.data import BatchSampler

    from anyorder.sampling import PoissonBatchSampler, UnitOrderSampler
    from anyorder.sampling.samplers import SecretBatchSampler

    batcher = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    kind = type(batcher)
    if is_of(batcher, "opacus.utils.batch_memory_manager", "BatchSplittingSampler"):
        batcher = batcher.sampler
        kind = type(batcher)
    if kind is PoissonBatchSampler:
        q = batcher.sampling_probability
        return _of_coins(loader, run, q, batcher.steps, batcher.size, 1, batcher.indices, 0.0)
    if kind is SecretBatchSampler:
        return _of_secret(loader, run, batcher)
    if is_of(batcher, "opacus.utils.uniform_sampler", "UniformWithReplacementSampler"):
        return _of_opacus(loader, run, batcher, batcher.num_samples, 1)
    if is_of(batcher, "opacus.utils.uniform_sampler", "DistributedUniformWithReplacementSampler"):
        return _of_opacus(loader, run, batcher, batcher.total_size, batcher.num_replicas)
    if kind is UnitOrderSampler:
        return _of_fixed(loader, run, list(batcher.batches(0, 0)), "by units, the same order in each epoch", False)
    if kind in (list, tuple):
        listed = [np.asarray(batch) for batch in batcher]
        return _of_fixed(loader, run, listed, "a list of batches, the same in each epoch", True)
    if kind is BatchSampler:
        stream, size, drop_last = read_stream(batcher.sampler), batcher.batch_size, batcher.drop_last
    elif loader.batch_size is None:
        stream, size, drop_last = read_stream(batcher), 1, False
        if stream is not None:
            caveat = "if no example stands in two of the batches that the data set holds"
            stream = replace(stream, order=f"batches that the data set holds, {stream.order}", caveat=caveat)
    else:
        stream = None
    if stream is None:
        named = batcher.sampler if kind is BatchSampler else batcher
        return _unnamed(
            loader, run, f"that of {type(named).__name__}", "nothing is known of this class but what a run shows of it"
        )
    batches = stream.size // size if drop_last else -(-stream.size // size)
    if batches == 0:
        raise LoaderError(
            f"an epoch must have a batch, got {stream.size} examples for batch_size={size} and drop_last={drop_last}"
        )
    return _ofread_stream(loader, run, stream, size, batches)


# -- from the order of indices to that of units ----------------------------------------------------------------------


def _ofread_stream(loader: Any, run: Stretch, stream: Stream, size: int, batches: int) -> Arrivals:
    per_step = size * run.accumulate * stream.ranks  # places of the order that one step takes
    used = min(stream.size, batches * size) * stream.ranks
    span = _span(run, batches)
    total = size_of(loader.dataset)
    facts = {"batches": batches, "batch_size": size * stream.ranks, "dataset_size": total, **span}
    if stream.fixed is not None:
        indices = stream.fixed()[:used]
        step_of = np.arange(used) // (size * stream.ranks) // run.accumulate
        return _of_places(loader, run, indices, step_of, stream.order, facts, stream.is_public)
    names = names_of(loader, run.unit, stream.members)
    if isinstance(names, str):
        return _unknown(stream.order, names, facts)
    steps, epochs = span["steps"], span["epochs"]
    copies = 1 if names is None else int(np.bincount(names).max())
    if stream.chances is not None:
        chances = stream.chances()
        chance = float(chances.max() if names is None else np.bincount(names, chances).max())
        visits: Visits = DrawnVisits(per_step * _extra_ranks(stream.ranks), min(1.0, chance * (1 + 1e-12)), steps)
        because = (
            f"one of {per_step} draws of a step hits a unit with probability {chance:.4g} at most, so that it comes "
            "a random number of times in a step; the draws are taken as public"
        )
        return Arrivals(stream.order, visits, _with(because, stream.caveat), **facts)
    if stream.places is not None and copies == 1:
        weight = float(weights_of(stream.places()[:used], np.arange(used) // per_step).max())
    else:
        weight = float(fullest(copies * stream.copies, min(per_step, copies * stream.together(per_step))))
    world, joined = _extra_ranks(stream.ranks), run.joined(batches)
    per_epoch = -(-batches // run.accumulate)
    whole = 0 if not stream.is_uniform or max(copies, world, joined) > 1 else steps // per_epoch
    whole = whole if stream.is_fresh else min(whole, 1)
    drawn = Shuffles(whole, per_epoch, used / (stream.size * stream.ranks) * _share(stream, total))
    participation = _shuffled(epochs, steps, batches, run) if weight * world == 1 else None
    weight *= joined  # (m_1 + .. + m_j)^2 <= j (m_1^2 + .. + m_j^2)
    visits = AtMost(epochs * weight * world**2, shuffles=drawn if whole else None)
    because = _with(_why(epochs, weight * world**2, copies, world), _LEFT if joined > 1 else "")
    return Arrivals(stream.order, visits, _with(because, stream.caveat), participation=participation, **facts)


def _of_fixed(loader: Any, run: Stretch, batches: list[Any], order: str, is_public: bool) -> Arrivals:
    if not batches:
        raise LoaderError("an epoch must have a batch, got none")
    sizes = [len(batch) for batch in batches]
    indices = np.concatenate([np.asarray(batch, np.int64) for batch in batches])
    step_of = np.repeat(np.arange(len(batches)) // run.accumulate, sizes)
    facts = {
        "batches": len(batches), "batch_size": max(sizes), "dataset_size": size_of(loader.dataset),
        **_span(run, len(batches)),
    }  # fmt: skip
    return _of_places(loader, run, indices, step_of, order, facts, is_public)


def _of_places(
    loader: Any, run: Stretch, indices: Indices, step_of: Indices, order: str, facts: dict[str, Any], is_public: bool
) -> Arrivals:
    """The same indices in the same steps of each epoch."""
    names = names_of(loader, run.unit, indices)
    if isinstance(names, str):
        return _unknown(order, names, facts)
    return _of_known(run, names, step_of, order, facts, is_public)


def _of_known(
    run: Stretch, names: Indices | None, step_of: Indices, order: str, facts: dict[str, Any], is_public: bool
) -> Arrivals:
    """Names, None where all differ, in steps that are the same in each epoch."""
    steps, epochs, batches = facts["steps"], facts["epochs"], facts["batches"]
    per_epoch = -(-batches // run.accumulate)
    world = _extra_ranks(1)
    if names is None:
        weight, copies, is_reached = 1.0, 1, True
    else:
        weight, copies = float(weights_of(names, step_of).max()), int(np.bincount(names).max())
        early = step_of < steps - (epochs - 1) * per_epoch  # the steps that the last epoch has too
        is_reached = bool(weights_of(names[early], step_of[early]).max() == weight)
    joined = run.joined(batches)
    visits = AtMost(epochs * weight * joined * world**2, is_reached=is_reached and is_public and joined == 1)
    if weight * world == 1:
        participation: Participation | None = (
            SingleEpoch(steps) if epochs == 1 else FixedOrder(steps, epochs, per_epoch)
        )
    elif world == 1 and run.unit is not None and names is not None:
        rows = [names[step_of == j] for j in range(per_epoch)]
        participation = KnownOrder([rows[t % per_epoch] for t in range(steps)])
    else:
        participation = None
    because = _with(_why(epochs, weight * joined * world**2, copies, world), _LEFT if joined > 1 else "")
    return Arrivals(order, visits, because, participation=participation, **facts)


def _of_coins(
    loader: Any, run: Stretch, q: float, batches: int, size: int, ranks: int, members: Indices | None, empty: float
) -> Arrivals:
    span = _span(run, batches)
    order = f"Poisson sampling with probability {q:.6g}"
    facts = {"batches": batches, "batch_size": max(1, round(q * size)), "dataset_size": size, **span}
    names = names_of(loader, run.unit, members)
    if isinstance(names, str):
        return _unknown(order, names, facts)
    coins = (1 if names is None else int(np.bincount(names).max())) * _extra_ranks(ranks) * run.accumulate
    secret = "it holds while the seed of the coins is secret"
    if coins == 1:
        because = f"each example is in each step by a coin of its own, as the accountant assumes; {secret}"
        visits: Visits = SampledVisits(q, span["steps"], empty=min(1.0, empty * span["steps"]))
        return Arrivals(order, visits, because, participation=PoissonSampling(span["steps"], q), **facts)
    because = (
        f"a unit has {coins} coins in each step, where the accountant assumes one (examples of one unit, batches that "
        "are accumulated, or ranks that all draw from the whole data set); the coins are taken as public"
    )
    return Arrivals(order, DrawnVisits(coins, q, span["steps"]), because, **facts)


def _of_secret(loader: Any, run: Stretch, sampler: Any) -> Arrivals:
    """Loaders of this package by secret coins: which order they draw is said; Poisson sampling alone is judged here."""
    rule, members = sampler.rule, sampler.members
    each = len(sampler._owned) == len(members) and sampler._accumulate == 1
    if type(rule) is PoissonSampling and each and run.accumulate == 1:
        return _of_coins(loader, run, rule.sampling_probability, sampler.steps, len(members), 1, members, 0.0)
    facts = {
        "batches": sampler.steps, "batch_size": sampler.batch_size, "dataset_size": len(members),
        **_span(run, sampler.steps),
    }  # fmt: skip
    because = (
        "its claim is that of its plan, with the plan's own noise: ao.accounting.amplified_epsilon, while nobody "
        "knows the batches; no accountant for Poisson sampling is one for it"
    )
    return _unknown(sampler.phrase, because, facts)


def _of_opacus(loader: Any, run: Stretch, sampler: Any, size: int, ranks: int) -> Arrivals:
    """Opacus's own Poisson samplers, and what it does with a batch that is empty."""
    alone = size // ranks - 1
    replaced = ranks > 1 or getattr(loader.collate_fn, "rand_on_empty", False)
    empty = ranks * math.exp(alone * math.log1p(-sampler.sample_rate)) if replaced and sampler.sample_rate < 1 else 0.0
    return _of_coins(loader, run, sampler.sample_rate, len(sampler), size, ranks, None, empty)


def _of_list(batches: Any, run: Stretch) -> Arrivals:
    """Batches in a list, that every epoch reads again."""
    from anyorder.sampling.loader import extract_units

    if not batches:
        raise LoaderError("an epoch must have a batch, got an empty list")
    sizes = [size for batch in batches if (size := _examples(batch)) is not None]
    facts: dict[str, Any] = {"batches": len(batches), **_span(run, len(batches))}
    if len(sizes) == len(batches):
        facts |= {"batch_size": max(sizes), "dataset_size": sum(sizes)}
    step_of = np.arange(len(batches)) // run.accumulate
    order = "a list of batches, the same in each epoch"
    if run.unit is None:
        found = _of_known(run, None, step_of, order, facts, True)
        return replace(found, because=_with(found.because, "if no example stands in two places of the list"))
    units = [np.asarray(extract_units(batch, run.unit)) for batch in batches]
    step_of = np.repeat(step_of, [len(ids) for ids in units])
    return _of_known(run, numbers(np.concatenate(units)), step_of, order, facts, True)


# -- names and counts ------------------------------------------------------------------------------------------------


def _span(run: Stretch, batches: int | None) -> dict[str, Any]:
    """Steps and epochs of a run."""
    if batches is None:
        return {"steps": run.steps, "epochs": run.epochs}
    per_epoch = -(-batches // run.accumulate)
    if run.steps is not None:
        least, epochs = run.least_steps(batches)
        return {"steps": run.steps, "epochs": -(-run.steps * epochs // least)}
    if run.epochs is None:
        raise ArgumentError("exactly one of epochs and steps must be given, got neither")
    return {"steps": run.epochs * per_epoch, "epochs": run.epochs}


def _shuffled(epochs: int, steps: int, batches: int, run: Stretch) -> Participation:
    per_epoch = -(-batches // run.accumulate)
    if epochs == 1:
        return SingleEpoch(steps)
    return EpochShuffle(epochs, per_epoch) if steps == epochs * per_epoch else MinSeparation(steps, 1, epochs)


def _why(epochs: int, weight: float, copies: int, world: int) -> str:
    times = "one epoch" if epochs == 1 else f"{epochs} epochs"
    if weight == 1:
        return f"each example once in an epoch, {times}: mu = sqrt({epochs}) / sigma"
    more = f" and all {world} ranks read the whole data set" if world > 1 else ""
    parts = f"a unit stands {copies} times in an epoch" if copies > 1 else "a unit may come again within an epoch"
    return (
        f"{parts}{more}; its squared counts in the steps of {times} sum up to {epochs * weight:g} at most: "
        f"mu = sqrt({epochs * weight:g}) / sigma"
    )


def _share(stream: Stream, total: int | None) -> float:
    """Of the examples that may come, how many do in an epoch."""
    may = len(stream.members) if stream.members is not None else total
    return min(1.0, stream.size * stream.ranks / may) if may else 1.0


def _with(because: str, caveat: str) -> str:
    return f"{because}; {caveat}" if caveat else because


def _unknown(order: str, because: str, facts: dict[str, Any] | None = None) -> Arrivals:
    return Arrivals(order, Unknown(), because, **(facts or {}))


def _unnamed(loader: Any, run: Stretch, order: str, because: str) -> Arrivals:
    """A loader whose units are not known, with the sizes that it tells."""
    batcher = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        batches = len(batcher)
    except (TypeError, NotImplementedError):  # an endless sampler, perhaps beneath a BatchSampler, which has a length
        batches = None
    size = getattr(batcher, "batch_size", None)
    facts = {"batches": batches, "batch_size": size, "dataset_size": size_of(loader.dataset), **_span(run, batches)}
    return _unknown(order, because, facts)


def _inner(loader: Any) -> Any:
    """The DataLoader whose batches, in its order, a wrapper of `accelerate` hands on."""
    if is_of(loader, "accelerate.data_loader", "DataLoaderShard") and not getattr(loader, "skip_batches", 0):
        return loader.base_dataloader
    return loader


def _extra_ranks(ranks: int) -> int:
    """How many processes would all hand out the whole data set; 1 where the order is dealt out, or there is one."""
    import torch

    if ranks > 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return int(torch.distributed.get_world_size())


def _examples(batch: Any) -> int | None:
    """How many examples a batch has: the length of its first tensor or array."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None
