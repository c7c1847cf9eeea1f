"""What a loader's samplers say of how its units come, read without drawing from anything.

Loaders are read by `anyorder.sampling.read_loader`, as plans and engines do. These refuse an order that no plan can be
made for; here such an order is described, and bounded where it can be.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from anyorder.checks import is_of
from anyorder.errors import ArgumentError, LoaderError
from anyorder.patterns import Participation

if TYPE_CHECKING:  # they need torch
    from anyorder.sampling.read_loader import IndexedBatches, ListedBatches, Order, Stream, TossedBatches

Indices = NDArray[np.int64]

_LEFT = "batches that are left over at an epoch's end may be joined with the next epoch's, where an example comes again"


@dataclass(frozen=True)
class Stretch:
    """How a loader is used.

    Attributes:
        epochs: passes; None where `steps` are given.
        steps: optimizer steps in all; None for whole epochs.
        accumulate: batches of the loader that make a step.
        unit: whose privacy; see `anyorder.sampling.read_loader.Unit`.
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
    return _of_loader(loader, run)


def _of_loader(loader: Any, run: Stretch) -> Arrivals:
    from anyorder.sampling.read_loader import (
        IndexedBatches,
        ListedBatches,
        SecretBatches,
        TossedBatches,
        UnknownBatches,
        read_loader,
    )

    match read_loader(loader):
        case IndexedBatches() as read:
            return _of_stream(loader, run, read)
        case ListedBatches() as read:
            return _of_fixed(loader, run, read)
        case TossedBatches(sampler=None) as read:
            return _of_opacus(loader, run, read)
        case TossedBatches() as read:
            return _of_draws(loader, run, read.probability, read.steps, read.total, 1, read.members, is_fresh=False)
        case SecretBatches() as read:
            return _of_secret(loader, run, read.sampler)
        case UnknownBatches() as read:
            return _unnamed(loader, run, read.order, read.because)


def _planned(
    loader: Any, run: Stretch, facts: dict[str, Any], indices: Indices | None = None, names: Indices | None = None
) -> Participation | None:
    """The order as `ao.plan(loader=..)` has it; None where it refuses the loader.

    Args:
        indices: that may come, or all.
        names: of each of them, the number of its unit; None where all differ.
    """
    from anyorder.sampling.read_loader import check_loader, participation_of, planned_order

    try:
        check_loader(loader)
        order = planned_order(loader, run.accumulate)
        units = None
        if run.unit is not None and order.known_beforehand:
            units = _units_of_steps(order, run, facts, indices, names)
        elif run.unit is not None:
            return None
        return participation_of(order, run.accumulate, facts["steps"], facts["epochs"], units)
    except LoaderError:
        return None


def _units_of_steps(
    order: "Order", run: Stretch, facts: dict[str, Any], indices: Indices | None, names: Indices | None
) -> list[Any]:
    """The numbers of the units of each step of a run whose order is known beforehand."""
    assert order.members is not None
    found = np.sort(order.members) if indices is None else indices
    names = np.arange(len(found)) if names is None else names
    by_index = np.argsort(found, kind="stable")
    per_epoch = -(-order.steps // run.accumulate)
    steps: list[list[int]] = [[] for _ in range(facts["epochs"] * per_epoch)]
    for epoch in range(facts["epochs"]):
        for i, batch in enumerate(order.batches(epoch, 0)):
            places = by_index[np.searchsorted(found[by_index], batch)]
            steps[epoch * per_epoch + i // run.accumulate] += names[places].tolist()
    return steps[: facts["steps"]]


# -- from the order of indices to that of units ----------------------------------------------------------------------


def _of_stream(loader: Any, run: Stretch, read: "IndexedBatches") -> Arrivals:
    stream, size, batches = read.stream, read.size, read.steps
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
    participation = _planned(loader, run, facts, stream.members, names)
    weight *= joined  # (m_1 + .. + m_j)^2 <= j (m_1^2 + .. + m_j^2)
    visits = AtMost(epochs * weight * world**2, shuffles=drawn if whole else None)
    because = _with(_why(epochs, weight * world**2, copies, world), _LEFT if joined > 1 else "")
    return Arrivals(stream.order, visits, _with(because, stream.caveat), participation=participation, **facts)


def _of_fixed(loader: Any, run: Stretch, read: "ListedBatches") -> Arrivals:
    sizes = [len(batch) for batch in read.batches]
    indices = np.concatenate(read.batches)
    step_of = np.repeat(np.arange(len(sizes)) // run.accumulate, sizes)
    facts = {
        "batches": len(sizes), "batch_size": max(sizes), "dataset_size": size_of(loader.dataset),
        **_span(run, len(sizes)),
    }  # fmt: skip
    return _of_places(loader, run, indices, step_of, read.order, facts, read.is_public)


def _of_places(
    loader: Any, run: Stretch, indices: Indices, step_of: Indices, order: str, facts: dict[str, Any], is_public: bool
) -> Arrivals:
    """The same indices in the same steps of each epoch."""
    names = names_of(loader, run.unit, indices)
    if isinstance(names, str):
        return _unknown(order, names, facts)
    found = _of_known(run, names, step_of, order, facts, is_public)
    return replace(found, participation=_planned(loader, run, facts, indices, names))


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
    because = _with(_why(epochs, weight * joined * world**2, copies, world), _LEFT if joined > 1 else "")
    return Arrivals(order, visits, because, **facts)


def _of_draws(
    loader: Any, run: Stretch, q: float, batches: int, size: int, ranks: int, members: Indices | None, *,
    empty: float = 0.0, is_fresh: bool = True,
) -> Arrivals:  # fmt: skip
    """Args: is_fresh: whether each epoch surely has draws of its own: a DataLoader tells no batch sampler the epoch."""
    span = _span(run, batches)
    order = f"Poisson sampling with probability {q:.6g}"
    period = None
    if not is_fresh and (span["epochs"] or 0) > 1:
        order += " (the same draws in each epoch, unless set_epoch is called before it)"
        period = -(-batches // run.accumulate)
    facts = {"batches": batches, "batch_size": max(1, round(q * size)), "dataset_size": size, **span}
    names = names_of(loader, run.unit, members)
    if isinstance(names, str):
        return _unknown(order, names, facts)
    if period is not None and run.joined(batches) > 1:
        return _unknown(order, f"the draws may come again, in other steps: {_LEFT}", facts)
    draws = (1 if names is None else int(np.bincount(names).max())) * _extra_ranks(ranks) * run.accumulate
    secret = "it holds while the seed of the draws is secret"
    if draws == 1:
        because = f"each example is in each step by a draw of its own, as the accountant assumes; {secret}"
        if period is not None:
            because = f"each example is in each step of an epoch by a draw, and by the same one in all epochs; {secret}"
        visits: Visits = SampledVisits(q, span["steps"], empty=min(1.0, empty * span["steps"]), period=period)
        return Arrivals(order, visits, because, participation=_planned(loader, run, facts), **facts)
    because = (
        f"a unit has {draws} draws in each step, where the accountant assumes one (examples of one unit, batches that "
        "are accumulated, or ranks that all draw from the whole data set); the draws are taken as public"
    )
    return Arrivals(order, DrawnVisits(draws, q, span["steps"], period), because, **facts)


def _of_secret(loader: Any, run: Stretch, sampler: Any) -> Arrivals:
    """Loaders of this package by secret draws: which order they draw is said; Poisson sampling alone is judged here."""
    rule, members = sampler.rule, sampler.members
    each = len(sampler._owned) == len(members) and sampler._accumulate == 1
    if rule.draw_probability is not None and each and run.accumulate == 1:
        return _of_draws(loader, run, rule.draw_probability, sampler.steps, len(members), 1, members, is_fresh=False)
    facts = {
        "batches": sampler.steps, "batch_size": sampler.batch_size, "dataset_size": len(members),
        **_span(run, sampler.steps),
    }  # fmt: skip
    because = (
        "its claim is that of its plan, with the plan's own noise: ao.accounting.amplified_epsilon, while nobody "
        "knows the batches; no accountant for Poisson sampling is one for it"
    )
    return _unknown(sampler.phrase, because, facts)


def _of_opacus(loader: Any, run: Stretch, read: "TossedBatches") -> Arrivals:
    """Opacus's own Poisson samplers, and what it does with a batch that is empty."""
    q, alone = read.probability, read.total // read.ranks - 1
    replaced = read.ranks > 1 or getattr(loader.collate_fn, "rand_on_empty", False)
    empty = read.ranks * math.exp(alone * math.log1p(-q)) if replaced and q < 1 else 0.0
    return _of_draws(loader, run, q, read.steps, read.total, read.ranks, None, empty=empty)


def _of_list(batches: Any, run: Stretch) -> Arrivals:
    """Batches in a list, that every epoch reads again."""
    from anyorder.sampling.read_loader import extract_units

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


def _share(stream: "Stream", total: int | None) -> float:
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
