"""What an accountant says of a run, compared with what its order allows: `ao.check`, and `watch` for whole scripts."""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder._numerics import bisect, doubled
from anyorder.accounting import gdp_mu
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.audit.arrivals import Arrivals, Stretch, read_arrivals
from anyorder.audit.observations import (
    KEPT,
    AtMost,
    DrawnVisits,
    Epoch,
    Observed,
    SampledVisits,
    UnitGroup,
    Unknown,
    Visits,
    epsilon_at_least,
    epsilon_of,
)
from anyorder.audit.private_steps import NOT_PRIVATE, REWRITTEN, SEEDED, ObservedStep, OpacusSteps, WeightTally
from anyorder.checks import final, is_of
from anyorder.errors import ArgumentError
from anyorder.formats import html_table
from anyorder.formatting import counted, rounded_down, rounded_up
from anyorder.patterns import Participation
from anyorder.plan.options import careful_delta
from anyorder.plan.plan import CANDIDATE, Plan
from anyorder.plan.planner import plan

_ACCOUNTANTS = ("prv", "rdp")
_LOUDEST = 1e4  # noise multiplier that is looked up to
CLAIM, WHAT_IF, NOTHING, UNSURE = "claim", "what if", "no private training", "not established"  # outcomes
_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))  # Opacus's, of its RDP accountant


@final
@dataclass(frozen=True)
class CheckResult:
    """What `check` found of a run with independent Gaussian noise.

    Attributes:
        claimed: the epsilon that an accountant prints which takes the batches for Poisson samples, or that the given
            engine prints; NaN where none can print any, for an epoch has no length.
        true: the smallest epsilon that follows from the order, for `neighbours`; infinity where none does.
        at_least: an attack shows that no epsilon below this one holds; 0 where none is known.
        order: the order that was found, in words.
        because: why `true` is what it is.
        advice: what to do.
        neighbours: the relation that `true` is for: "zero-out" (the example is there and its gradient is 0), which is
            the one that an order with batches of a fixed size has, or "add-or-remove".
        participation: the order as a plan would have it; None where no plan can be made from the loader alone.
        noise_multiplier, delta: of the run.
        sampling_probability: what the accountant takes for the probability of an example in a step; None for none.
        steps, epochs: of the run.
        batch_size, dataset_size: examples in a full batch, and in all; None where they are not known.
        accountant: what made `claimed`.
        noise_needed: the noise multiplier that would make `claimed` true in this order; infinity for none.
        outcome: "claim" (an engine or an accountant of the program claims `claimed`), "what if" (nobody claims it: an
            accountant would print it for this order and this noise) or "no private training" (no clipping and no noise
            were seen: `true` is infinite).
        observed: what was seen of clipping and noise, in words; "" where no training was watched.
    """

    claimed: float
    true: float
    at_least: float
    order: str
    because: str
    advice: tuple[str, ...]
    neighbours: str
    participation: Participation | None = field(repr=False)
    noise_multiplier: float
    delta: float
    sampling_probability: float | None
    steps: int | None
    epochs: int | None
    batch_size: int | None
    dataset_size: int | None
    accountant: str
    noise_needed: float
    outcome: str = WHAT_IF
    observed: str = ""

    @property
    def holds(self) -> bool:
        """Whether the claim follows from the order: claimed >= true, up to the rounding of floats."""
        return self.claimed >= self.true * (1 - 1e-12)

    @property
    def verdict(self) -> str:
        """One of "holds", "false" (an attack has more) and "not proven" (it follows from nothing that is known)."""
        if self.holds:
            return "holds"
        return "false" if self.claimed < self.at_least else "not proven"

    def facts(self) -> list[tuple[str, str]]:
        """(name, text), for a card."""
        q = "" if self.sampling_probability is None else f", q = {self.sampling_probability:.4g}"
        run = [f"noise multiplier {self.noise_multiplier:g}", f"delta {rounded_up(self.delta, 6)}"]
        run = [] if self.outcome == NOTHING else run
        run += [counted(self.steps, "step")] if self.steps is not None else []
        run += [counted(self.epochs, "epoch")] if self.epochs is not None else []
        rows = [("order", self.order), ("run", ", ".join(run))]
        if self.observed:
            rows.append(("observed", self.observed))
        if self.outcome != NOTHING:
            true = f"epsilon <= {rounded_up(self.true)}" if self.true < math.inf else "no finite epsilon follows"
            is_claim = self.outcome in (CLAIM, UNSURE)
            rows += [
                (
                    "claimed" if is_claim else "printed",
                    f"{self._claim()} ({self.accountant}{q})",
                ),
                ("true" if is_claim else "this order", f"{true} ({self.neighbours} neighbours)"),
            ]
        rows += [("because", self.because), ("verdict", self.words)]
        if not self.holds and self.at_least > 0:
            rows.append(("attacked", f"no epsilon below {rounded_down(self.at_least)} holds in this order"))
        return rows + [("advice", line) for line in self.advice]

    @property
    def words(self) -> str:
        """The verdict in one sentence."""
        if self.outcome == NOTHING:
            return "no private training was seen: epsilon is infinite"
        if self.outcome == UNSURE:
            return "not established: what was seen neither supports the claim nor refutes it"
        if self.outcome == CLAIM:
            return {
                "holds": "the claim holds", "false": "the claim is FALSE", "not proven": "the claim is NOT PROVEN",
            }[self.verdict]  # fmt: skip
        told = {"holds": "would hold", "false": "would be false", "not proven": "would not be proven"}[self.verdict]
        return f"what if: with such noise the printed epsilon {told} in this order. Nothing is claimed or certified"

    def _claim(self) -> str:
        """The epsilon as others print it; what is proven is not shown smaller than it is."""
        if math.isnan(self.claimed):
            return "nothing"
        return f"epsilon = {rounded_up(self.claimed) if self.claimed == self.true else format(self.claimed, '.4g')}"

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>9}  {text}" for name, text in self.facts())

    def to_dict(self) -> dict[str, Any]:
        """JSON values; an infinite or missing number is None."""
        numbers = {
            name: getattr(self, name) if math.isfinite(getattr(self, name)) else None
            for name in ("claimed", "true", "at_least", "noise_needed")
        }
        names = (
            "order", "because", "neighbours", "noise_multiplier", "delta", "sampling_probability", "steps", "epochs",
            "batch_size", "dataset_size", "accountant", "outcome", "observed",
        )  # fmt: skip
        participation = None if self.participation is None else self.participation.describe()
        others = {name: getattr(self, name) for name in names}
        if self.outcome != CLAIM:  # machines read nothing of a claim either
            judged = {"verdict": self.outcome, "holds": False, "would_hold": self.holds}
        else:
            judged = {"verdict": self.verdict, "holds": self.holds}
        return {**numbers, **others, **judged, "advice": list(self.advice), "participation": participation}


def check(
    loader: Any,
    *,
    delta: float,
    noise_multiplier: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    accumulate: int = 1,
    unit: Any = None,
    accountant: str = "prv",
    engine: Any = None,
    optimizer: Any = None,
    mechanism: str | None = None,
) -> CheckResult:
    """Find the order of a loader, the epsilon that an accountant reports for it, and the valid one.

        print(ao.check(loader, noise_multiplier=1.0, epochs=3, delta=1e-5))

    Noise is independent and Gaussian, each example's gradient is clipped (DP-SGD). The accountant takes
    q = 1 / len(loader), as Opacus does, for Poisson sampling. What holds follows from the order: with at most k steps
    of one example each, mu = sqrt(k) / sigma, exact Gaussian DP; see `anyorder.audit.observations` for all others.

    Nothing of the run is changed: no batch is loaded, no sampler iterated, nothing drawn. With `unit` the data set's
    examples are read, and the states of the generators of torch, NumPy, Python and of the loader put back; what
    a data set of one's own does when it is read is not undone.

    Args:
        loader: a DataLoader, Opacus's `DPDataLoader` and what `BatchMemoryManager` gives among them, or a list of
            batches. Any other is told to have an unknown order.
        delta: strictly between 0 and 1.
        noise_multiplier: noise std over clip norm; or it comes from `engine` or `optimizer`.
        epochs: passes over the loader. Or
        steps: optimizer steps in all, for loops that count them. With an `engine` that has stepped, neither is needed.
        batch_size: examples in a step, where the loader cannot tell; for an infinite loader or a stream, it and the
            data set's length give q.
        accumulate: batches of the loader that are joined in a step.
        unit: None for each example its own; else where a batch keeps the id of each example's unit.
        accountant: "prv" (privacy loss distributions, of this package) or "rdp" (at Opacus's orders).
        engine: an Opacus `PrivacyEngine`, whose own accountant makes the claim.
        optimizer: an Opacus `DPOptimizer`, for its noise multiplier.
        mechanism: such as "auto": the advice tells what this mechanism would give at the claimed epsilon.
    Returns: a Finding.
    Cost: under a second; with `mechanism` that of a fit.
    Raises: ArgumentError for numbers that are missing or break their rule; LoaderError for a loader without a batch;
        MissingDependencyError without dp-accounting, unless `engine` is given and the order has no secret draws.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ArgumentError(f"loader must be what a loop gets its batches from, got {type(loader).__name__}")
    delta = checks.probability("delta", delta)
    checks.choice("accountant", accountant, _ACCOUNTANTS)
    accumulate = checks.integer("accumulate", accumulate, low=1)
    history = _history(engine)
    if epochs is None and steps is None and history:
        steps = sum(count for _, _, count in history)
    if (epochs is None) == (steps is None):
        raise ArgumentError(
            f"exactly one of epochs and steps must be given, got epochs={epochs!r}, steps={steps!r}; an engine that "
            "has stepped knows its own"
        )
    run = Stretch(
        None if epochs is None else checks.integer("epochs", epochs, low=1),
        None if steps is None else checks.integer("steps", steps, low=1), accumulate, unit,
    )  # fmt: skip
    sigma = _noise(noise_multiplier, optimizer, history)
    found = read_arrivals(loader, run)
    if isinstance(found.visits, AtMost):
        found = replace(found, because=found.because + _provisos(loader, run))
    if batch_size is not None:
        batch_size = checks.integer("batch_size", batch_size, low=1)
    claimed, q, by = _claim(found, sigma, delta, accountant, engine, history, accumulate, batch_size)
    result = judge(
        found, claimed, sigma, delta, q=q, accountant=by, mechanism=mechanism, joined=accumulate, batch_size=batch_size
    )
    if engine is None:
        return result
    return replace(result, outcome=CLAIM, observed="nothing: clipping and noise are taken to be as the engine says")


def judge(
    found: Arrivals, claimed: float, sigma: float, delta: float, *, q: float | None, accountant: str,
    mechanism: str | None = None, joined: int = 1, batch_size: int | None = None, loudest: float | None = None,
) -> CheckResult:  # fmt: skip
    """The claim beside what follows from the arrivals; noise between `sigma` and `loudest` in each step."""
    true = epsilon_of(found.visits, sigma, delta)
    at_least = min(true, epsilon_at_least(found.visits, loudest or sigma, delta))
    holds = claimed >= true * (1 - 1e-12)
    needed = sigma if holds else _needed(found.visits, claimed, sigma, delta)
    neighbours = "add-or-remove" if isinstance(found.visits, SampledVisits) else "zero-out"
    because = found.because
    if isinstance(found.visits, AtMost):
        because += "; add-or-remove neighbours say nothing here: one example's absence would move all others"
    size = batch_size or found.batch_size
    advice = () if holds else _advice(found, claimed, sigma, delta, needed, mechanism, (size or 1) * joined)
    return CheckResult(
        claimed=claimed, true=true, at_least=at_least, order=found.order, because=because, advice=advice,
        neighbours=neighbours, participation=found.participation, noise_multiplier=sigma, delta=delta,
        sampling_probability=q, steps=found.steps, epochs=found.epochs, batch_size=size,
        dataset_size=found.dataset_size, accountant=accountant, noise_needed=needed,
    )  # fmt: skip


def _provisos(loader: Any, run: Stretch) -> str:
    """What is taken for granted of a run that is not seen."""
    from torch.utils.data import DataLoader, default_collate

    words = "" if run.steps is None else "; if every epoch is whole, and none broken off"
    if not isinstance(loader, DataLoader):
        return words
    own = not type(loader.dataset).__module__.startswith("torch.utils.data")
    if own or (loader.batch_size is not None and loader.collate_fn is not default_collate):
        words += "; if the data set and what joins its examples to batches give each example once, under one index"
    return words


# -- the claim -------------------------------------------------------------------------------------------------------


def _history(engine: Any) -> list[tuple[float, float, int]]:
    """(noise multiplier, sampling probability, steps) of what an Opacus engine has accounted for."""
    if engine is None:
        return []
    history = getattr(getattr(engine, "accountant", None), "history", None)
    if history is None:
        raise ArgumentError(f"engine must have an accountant with a history, as Opacus's, got {type(engine).__name__}")
    return [(float(sigma), float(q), int(steps)) for sigma, q, steps in history]


def _noise(given: float | None, optimizer: Any, history: list[tuple[float, float, int]]) -> float:
    """The least noise multiplier of the run."""
    if given is not None:
        return checks.positive("noise_multiplier", given)
    if history:
        return checks.positive("the engine's noise_multiplier", min(sigma for sigma, _, _ in history))
    own = getattr(optimizer, "noise_multiplier", None)
    if own is None:
        raise ArgumentError(
            "noise_multiplier must be given, or an optimizer that has one (Opacus's), or an engine that has stepped"
        )
    return checks.positive("the optimizer's noise_multiplier", own)


def _claim(
    found: Arrivals, sigma: float, delta: float, accountant: str, engine: Any,
    history: list[tuple[float, float, int]], accumulate: int, batch_size: int | None,
) -> tuple[float, float | None, str]:  # fmt: skip
    """What is printed, the sampling probability in it, and by whom."""
    by = f"{accountant} accountant for Poisson sampling" if engine is None else "the engine's own accountant"
    if history:
        return float(engine.accountant.get_epsilon(delta)), history[-1][1], by
    q = None
    if found.batches:
        q = min(1.0, accumulate / found.batches)
    elif found.dataset_size and (batch_size or found.batch_size):
        q = min(1.0, accumulate * (batch_size or found.batch_size or 0) / found.dataset_size)
    if q is None or found.steps is None:
        return math.nan, q, by
    if engine is not None:
        own = copy.copy(engine.accountant)
        own.history = [(sigma, q, found.steps)]
        return float(own.get_epsilon(delta)), q, by
    return printed(accountant, sigma, q, found.steps, delta), q, by


@lru_cache(maxsize=64)  # an audit asks for the same again
def printed(accountant: str, sigma: float, q: float, steps: int, delta: float) -> float:
    """The epsilon of Poisson sampling by "prv" or "rdp"; the second is Opacus's of that name to three digits."""
    if accountant == "prv":
        return poisson_epsilon(sigma, q, steps, delta)
    dp_accounting = checks.optional("dp_accounting", extra="amplified", purpose="accounting for Poisson sampling")
    rdp = checks.optional("dp_accounting.rdp", extra="amplified", purpose="accounting for Poisson sampling")
    own = rdp.RdpAccountant(_ORDERS)
    own.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    return float(own.get_epsilon(delta))


# -- what to do ------------------------------------------------------------------------------------------------------


def _needed(visits: Visits, claimed: float, sigma: float, delta: float) -> float:
    """The noise multiplier with which the claim would hold in this order."""
    if isinstance(visits, Unknown) or not claimed > 0:  # NaN neither
        return math.inf
    if isinstance(visits, AtMost):
        return math.sqrt(visits.weight) / gdp_mu(claimed, delta)

    def holds(sigma: float) -> bool:
        return not epsilon_of(visits, sigma, delta) > claimed

    low, high = doubled(holds, sigma, 2 * sigma, most=_LOUDEST)
    return bisect(holds, inside=high, outside=low, relative=1e-3)


def _advice(
    found: Arrivals, claimed: float, sigma: float, delta: float, needed: float, mechanism: str | None, size: int
) -> tuple[str, ...]:
    if isinstance(found.visits, (Unknown, DrawnVisits)) or found.participation is None or math.isnan(claimed):
        lines = [
            "use shuffle=True or sampler=anyorder.FixedOrderSampler(dataset), which let an example come once an epoch; "
            "or plan for a rule that the ledger enforces step by step, such as order=MinSeparation(n, b, k)",
        ]
        if isinstance(found.visits, Unknown):
            lines.append("anyorder check SCRIPT.py tells who really comes, of this loader in one run")
    else:
        lines = [
            f"ao.plan(loader=loader, epochs={found.epochs}, epsilon={claimed:.4g}, delta={delta:g}): correlated noise "
            "at this epsilon" + _gain(found.participation, claimed, delta, mechanism, size),
        ]
        if "shuffled again" in found.order and (found.epochs or 0) > 1:
            lines.append("sampler=anyorder.FixedOrderSampler(dataset) keeps one shuffle, which costs less noise")
    if needed < math.inf:
        lines.append(f"with independent noise this epsilon needs noise multiplier {rounded_up(needed)}, not {sigma:g}")
    return tuple(lines)


def _gain(order: Participation, claimed: float, delta: float, mechanism: str | None, size: int) -> str:
    """What correlated noise gives, in words."""
    if mechanism is None or not claimed > 0:
        return ""
    budget: dict[str, Any] = {"order": order, "batch_size": size, "epsilon": claimed, "delta": delta}
    chosen, alone = plan(mechanism=mechanism, **budget), plan(mechanism="independent", **budget)
    ratio = alone.noise_error() / chosen.noise_error()
    return (
        f"; {chosen.strategy.describe()} has {ratio:.3g} times less noise in the weights than independent noise there"
    )


# ----------------------------------------------------------------------------------------------------
# A training that an engine of this package made private, and that is watched: its plan's claim, beside what was seen.
#
# The engine's ledger refuses each step that the plan's order does not cover, and nothing un-noised is ever in a
# gradient, so that the claim holds of whatever the loop does with the engine. Watching looks for what is beside it:
# steps that it did not take, other optimizers on the same data, other engines, a noise key that stands in the script.
# What a script prints of its data, or trains by hand without an optimizer, is not seen.


_BY = "the plan of the script's own engine"
_UNSURE = (
    "take the mean over all examples of a loss that each example has alone, leave the generators of torch as they are, "
    "or train with anyorder's PrivacyEngine, which proves or refuses each loss"
)
_VERIFY = "anyorder verify run.privacy.json recomputes the claim of the certificate; --evidence checks who took part"


@dataclass(frozen=True)
class Planned:
    """What `make_private` of this package's engine has bound.

    Attributes:
        engine: the `PrivacyEngine`.
        dataset: of its loader, whatever part of it the loader takes.
        begun: steps that a resumed run had taken before.
        tells: whether it refuses gradients that are not finite, and so tells of them.
    """

    engine: Any
    dataset: Any
    begun: int
    tells: bool

    @property
    def plan(self) -> Plan:
        """The claim."""
        plan: Plan = self.engine.plan
        return plan

    @property
    def steps(self) -> int:
        """Taken since."""
        return int(self.engine.step) - self.begun


def planned(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Planned, Any]:
    """(what was bound, its optimizer), of a call `engine.make_private(*args, **kwargs)` that has returned."""
    names = dict(zip(("model", "optimizer", "loader"), args, strict=False)) | kwargs
    dataset = base_of(getattr(names["loader"], "dataset", None))
    return Planned(engine, dataset, int(engine.step), names.get("non_finite") == "refuse"), names["optimizer"]


def base_of(dataset: Any) -> Any:
    """The data set that a part, of a part, is of."""
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def judge_planned(bound: list[Planned], seen: Observed, delta: float | None, doubt: str, aside: str) -> CheckResult:
    """The plan's claim of one data set, which holds if nothing beside the engine was seen.

    Args:
        bound: the engines of this data set, one or more.
        delta: None for the plan's own.
        doubt: why nothing can be said, where the watching itself met something; empty else.
        aside: what changed weights beside the engine's steps, whatever data it is of; empty for nothing.
    """
    one = bound[-1]
    plan = one.plan
    delta = plan.delta if delta is None else delta
    claimed = plan.curve.epsilon(delta)
    problem = doubt or _beside(bound, seen) or aside
    told = (
        f"the engine carries out a plan for {plan.participation.describe()}: its ledger refuses every step that this "
        f"does not cover. Of {counted(plan.n, 'planned step')} {one.begun + one.steps} were taken, and nothing was "
        "seen beside the engine"
    )
    if not problem and not seen.is_named:
        told += "; who was in them is by the ledger alone, for watching could not tell"
    if plan.unit != "example":
        told += f"; who counts as one {plan.unit} is what the script says"
    return CheckResult(
        claimed=claimed, true=math.inf if problem else claimed, at_least=0.0, order=one.engine.order,
        because=problem or told, advice=() if problem else (_VERIFY,), neighbours=plan.neighbours,
        participation=plan.participation, noise_multiplier=plan.noise_multiplier, delta=delta,
        sampling_probability=None, steps=seen.steps, epochs=seen.epochs, batch_size=plan.batch_size,
        dataset_size=plan.dataset_size, accountant=_BY, noise_needed=plan.noise_multiplier, outcome=CLAIM,
        observed=f"the engine clipped and added noise in {one.steps} of {counted(seen.steps, 'step')}",
    )  # fmt: skip


def _beside(bound: list[Planned], seen: Observed) -> str:
    """Why the plan's claim does not speak for what was seen; empty where it does."""
    one, rule = bound[-1], bound[-1].plan.participation
    if len(bound) > 1:
        return f"{len(bound)} engines trained on it, and the plan of each claims its own run alone: use a budget"
    if seen.doubt:
        return seen.doubt
    if one.steps != seen.steps or seen.reused:
        return (
            f"the engine took {counted(one.steps, 'step')}, and {seen.steps} were seen on this data"
            + (", some with batches of the step before" if seen.reused else "")
            + ": what was learnt beside the engine has no noise"
        )
    if one.engine.is_keyed:
        return "the script gives the engine its noise key: whoever reads it takes the noise off. Leave key= out"
    if one.plan.candidate_of is not None:
        return f"the plan is of {CANDIDATE}"
    if one.tells:
        return 'non_finite="refuse" tells of gradients that are not finite, which no noise covers'
    apart = seen.separation
    if seen.is_named and (
        seen.most > rule.max_participations or (apart is not None and apart < rule.min_separation) or seen.together > 1
    ):
        told = "" if rule.secret else f": {seen.describe()}"  # how often units appeared by secret draws is as secret
        return f"units were seen oftener or nearer than the plan's order lets them come{told}"
    return ""


# ----------------------------------------------------------------------------------------------------
# Who really comes when: a training that is watched, and what its samplers and its accountant say of it.
#
# Nothing is drawn, reordered or kept back: the hooks copy the indices that torch's loaders hand out anyway, and count
# the steps of optimizers. What is kept is a few numbers for each example.


Indices = NDArray[np.int64]

OTHERS = (
    "another optimizer, or another engine, stepped after batches of this data had come: if it changed a model by them, "
    "no noise of the plan covers that"
)
_UNSEEN = "an optimizer that adds no noise stepped before any loader had handed out a batch: on which data is unknown"
_KNOWN_DRAWS = (
    "the batches are drawn by a generator whose seed the script sets: whoever knows the seed knows the batches, and "
    "nothing is gained by drawing them"
)


@dataclass(frozen=True)
class Watched:
    """A finding, what was seen, and what the script itself asked its accountant for.

    Attributes:
        data: the class of the data set.
        finding: claimed and true.
        seen: who came when.
        printed: (delta, epsilon) of each `get_epsilon` of the script.
    """

    data: str
    finding: CheckResult
    seen: Observed
    printed: tuple[tuple[float, float], ...] = ()

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>9}  {text}" for name, text in self.facts())

    def facts(self) -> list[tuple[str, str]]:
        """(name, text), for a card."""
        order, *others = self.finding.facts()
        told = [("printed", f"epsilon = {e:.4g} at delta {d:g}, by the script") for d, e in self.printed[-1:]]
        return [("data", self.data), order, ("seen", self.seen.describe()), *told, *others]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "data": self.data, **self.finding.to_dict(), "seen": self.seen.to_dict(),
            "printed": [list(pair) for pair in self.printed],
        }  # fmt: skip


class Watch:
    """What `watch` has seen so far."""

    def __init__(self, unit: Any, private: OpacusSteps) -> None:
        self.unit = unit
        self.private = private
        self.failure = ""  # of a hook: then nothing finite is said
        self._groups: dict[int, UnitGroup] = {}
        self._epochs: WeakKeyDictionary[Any, Epoch] = WeakKeyDictionary()
        self._starting: list[Epoch] = []
        self._engines: dict[int, Any] = {}
        self._accountants: dict[int, Any] = {}  # that the script asked, those of engines among them
        self._printed: dict[int, list[tuple[float, float]]] = {}
        self._is_judging = False
        self._found: WeakKeyDictionary[Any, ObservedStep] = WeakKeyDictionary()  # of a step that is under way
        self._rows = self._examples = self._largest = 0  # clipped, and handed out
        self._planned: list[Planned] = []  # by engines of this package
        self._own: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # their optimizers
        self._weights = WeightTally()
        self._is_unseen = False  # an optimizer without noise has stepped before any batch came

    def findings(
        self, *, delta: float | None = None, noise_multiplier: float | None = None, accountant: str = "prv"
    ) -> list[Watched]:
        """One for each data set that was trained on.

        Args:
            delta: None for the one that the script asked its accountant for; else 1e-5, or a tenth of one over the
                number of examples where that is smaller.
            noise_multiplier: for "what if", where no private training was seen; None to say that none was.
            accountant: "prv" or "rdp", where there is no engine.
        """
        groups = [g for g in self._groups.values() if g.steps or (self.failure and g.batches)]
        if (self.failure or self._accountants) and not groups:
            groups = list(self._groups.values()) or [UnitGroup(None)]
        self._is_judging = True
        try:
            return [self._judge(g, len(groups) == 1, delta, noise_multiplier, accountant) for g in groups]
        finally:
            self._is_judging = False

    # -- called by the hooks ----------------------------------------------------------------------------------------

    def begin(self, loader: Any) -> Epoch | None:
        """A pass over a loader; None where this package reads rows to tell whether they are those of before."""
        from anyorder.sampling.row_digests import gives_digests

        if gives_digests(loader):
            return None
        group, naming, data = self._group(loader)
        if loader not in group.known:
            group.known[loader] = None
            try:
                kept = copy.copy(loader)  # its samplers and data set, not its workers
                vars(kept).update(_iterator=None, dataset=data)
                group.known[loader] = kept
            except Exception as problem:  # a class of the script's own may refuse; it is told, and the script goes on
                group.doubt = group.doubt or _watching_told(problem)
        batcher = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        try:
            length = len(batcher) if group.is_named else None
        except Exception:  # a sampler of the script's own may raise anything: its epochs have no length
            length = None
        epoch = Epoch(group, length, naming, group.known[loader])
        self._starting.append(epoch)
        return epoch

    def begun(self, iterator: Any, epoch: Epoch | None) -> None:
        """The iterator of that pass is made."""
        if epoch is None:
            return
        self._starting.remove(epoch)
        if iterator is not None:
            self._epochs[iterator] = epoch

    def drawn(self, iterator: Any, index: Any) -> None:
        """The sampler gave the indices of a batch."""
        epoch = self._starting[-1] if self._starting else self._epochs.get(iterator)
        if epoch is not None:
            epoch.waiting.append(copy.copy(index))

    def handed(self, iterator: Any, data: Any) -> None:
        """The batch reached the loop; without gradients it is not trained on."""
        import torch

        epoch = self._epochs.get(iterator)
        if epoch is None:
            return
        is_trained = torch.is_grad_enabled()
        if is_trained and not epoch.is_trained:
            epoch.group.train(epoch)
        epoch.is_trained |= is_trained
        names = epoch.hand_out(data, self.unit)
        if is_trained and names is not None:
            self._examples, self._largest = self._examples + len(names), max(self._largest, len(names))
        epoch.group.deliver(names, data, is_trained)
        if is_trained and self.private:
            self.private.rows.batch(data, None if names is None else len(names))

    def ended(self, iterator: Any) -> None:
        """The loop was told that the pass is over."""
        epoch = self._epochs.get(iterator)
        if epoch is not None and epoch.is_trained:
            epoch.group.is_exhausted = True

    def stepping(self, optimizer: Any, *_: Any) -> None:
        """An optimizer is about to change a model: its gradients are those that it applies."""
        self._found[optimizer] = self.private.step(optimizer)
        if optimizer in self._own or optimizer in self.private:
            self._weights.stepping(optimizer)

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has changed a model."""
        found = self._found.pop(optimizer, ObservedStep(missing=NOT_PRIVATE))
        self._rows += found.rows
        groups = list(self._groups.values())
        if optimizer in self._own or optimizer in self.private:
            self._weights.stepped(optimizer)
        if optimizer not in self._own:
            self._is_unseen |= bool(found.missing) and not any(group.batches for group in groups)
            for group in groups:
                group.is_mixed |= group.batches > 0
        if self.private and optimizer not in self.private:
            for group in groups:
                group.is_beside |= group.batches > 0
            if not any(group.fresh for group in groups):  # the batch is counted in the private step that it was in
                return
        new = [group.has_new(optimizer) for group in groups]
        is_unexplained = not any(group.batches for group in groups)
        for group, is_new in zip(groups, new, strict=True):
            group.step(optimizer, any(new) and not is_new, is_unexplained, found)

    def careful(self, hook: Callable[..., Any], *args: Any) -> Any:
        """What a hook gives, or None where it fails.

        What is watched belongs to the script: samplers, keys, data sets and optimizers of its own may raise anything
        when they are asked, and a training must not end for being watched. So no failure of a hook goes on to the
        script. It is not lost either: from then on nothing finite is said of the run, and the finding has the words.
        """
        try:
            return hook(*args)
        except Exception as problem:
            self.failure = self.failure or _watching_told(problem)
            return None

    def made_private(self, engine: Any) -> None:
        """Opacus has made a training private."""
        self._engines[id(engine)] = engine
        self._accountants[id(engine.accountant)] = engine.accountant

    def planned(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An engine of this package has made a training private."""
        bound, optimizer = planned(engine, args, kwargs)
        self._planned.append(bound)
        self._own[optimizer] = True

    def asked(self, accountant: Any, delta: float, epsilon: float) -> None:
        """The script asked for its epsilon, an engine of Opacus or its accountant."""
        if not self._is_judging:
            self._accountants[id(accountant)] = accountant
            pairs, pair = self._printed.setdefault(id(accountant), []), (float(delta), float(epsilon))
            if pair not in pairs[-1:]:  # an engine asks its accountant, whose epsilon may ask for the privacy spent
                pairs.append(pair)

    # -- the judgement ----------------------------------------------------------------------------------------------

    def _group(self, loader: Any) -> tuple[UnitGroup, Callable[[Indices], Indices] | None, Any]:
        """All that is of the same data, who the indices of this loader are, and the script's own data set."""
        from torch.utils.data import IterableDataset

        from anyorder.sampling.read_loader import Origins, data_of

        dataset = data_of(loader)
        base = base_of(dataset)
        group = self._groups.setdefault(id(base), UnitGroup(base))
        if isinstance(base, IterableDataset):
            return group, None, dataset
        try:
            origins = Origins(dataset)
        except Exception:  # a data set of the script's own may raise anything: nobody is named then
            return group, None, dataset

        def naming(indices: Indices) -> Indices:
            if indices.min(initial=0) < 0:  # from the end, as lists and tensors count
                indices = np.where(indices < 0, indices + len(dataset), indices)
            return origins.names(indices)

        return group, naming, dataset

    def _judge(
        self, group: UnitGroup, is_only: bool, delta: float | None, noise: float | None, accountant: str
    ) -> Watched:
        seen = group.seen()
        bound = [one for one in self._planned if one.dataset is group.dataset]
        name = "data that no DataLoader handed out" if group.dataset is None else type(group.dataset).__name__
        if bound:
            delta = None if delta is None else checks.probability("delta", delta)
            doubt = self.failure or (OTHERS if group.is_mixed or self._engines else "")
            finding = judge_planned(bound, seen, delta, doubt, self._aside())
            shown = replace(seen, is_secret=any(one.plan.participation.secret for one in bound))
            return Watched(name, finding, shown)
        own = self._claimants(group, is_only)
        asked = tuple(pair for one in own for pair in self._printed.get(id(one), ()))
        if delta is None:
            delta = asked[-1][0] if asked else careful_delta(1e-5, length_of(group.dataset))
        delta = checks.probability("delta", delta)
        noise = None if noise is None else checks.positive("noise_multiplier", noise)
        joined = max(1, round(seen.batches / max(1, seen.steps)))
        found = _combined(self._read(group, seen, joined), seen)
        if self.failure:
            found = _doubted(found, self.failure)
        claims = [_epsilon_of(one, delta, self._printed.get(id(one), [])) for one in own]
        if any(map(math.isfinite, claims)):
            finding = self._judge_claim(group, seen, found, own, max(claims), delta)
        elif noise is None and not group.private.private:
            finding = self._nothing(group, found, delta)
        else:
            finding = self._what_if(group, seen, found, joined, delta, noise, accountant)
        shown = replace(seen, is_secret=isinstance(found.visits, (SampledVisits, DrawnVisits)))
        return Watched(name, finding, shown, asked)

    def _claimants(self, group: UnitGroup, is_only: bool) -> list[Any]:
        """The accountants that speak for this data: of engines that were given it, or the only ones there are."""
        own = [e.accountant for e in self._engines.values() if _same_data(e, group.dataset)]
        if not own and (is_only or group.private.private):
            own = list(self._accountants.values())
        return [one for one in own if one.history or self._printed.get(id(one))]

    def _judge_claim(
        self, group: UnitGroup, seen: Observed, found: Arrivals, own: list[Any], claimed: float, delta: float
    ) -> CheckResult:
        """An accountant's claim: it holds where each step was private as it says, in the order that was seen."""
        history = [entry for one in own for entry in one.history]
        by, q = "the script's own accountant", float(history[-1][1]) if history else None
        if len(own) > 1:
            by = f"the largest claim of {len(own)} accountants of the script, each of its own training alone"
        if history:
            found = _accounted(found, sum(int(steps) for _, _, steps in history), seen.steps)
        least, most = (_as_said(used, history) for used in (group.private.least, group.private.most))
        if not group.private.private:  # the noise that it says, for the words alone: nothing follows
            least = most = next((float(sigma) for sigma, _, _ in history if sigma > 0), 1.0)
        missing = self._unobserved(group)
        generators = [g for loader in group.loaders if (g := getattr(loader, "generator", None)) is not None]
        if isinstance(found.visits, (SampledVisits, DrawnVisits)) and any(
            self.private.is_known(one, True) for one in generators
        ):
            missing = missing or _KNOWN_DRAWS
        finding = judge(found, claimed, least, delta, q=q, accountant=by, loudest=most)
        finding = replace(finding, outcome=CLAIM, observed=group.private.describe())
        if not missing and self.private.doubt:  # then no noise is enough, also where the order alone refutes the claim
            outcome, because = UNSURE, self.private.doubt
            if not finding.holds:
                outcome, because = CLAIM, f"{because}; {finding.because}"
            return replace(
                finding, outcome=outcome, true=math.inf, because=because, noise_needed=math.inf, advice=(_UNSURE,)
            )
        if not missing:
            return finding
        advice = () if group.private.private else ("step the optimizer that make_private returned, and no other",)
        return replace(
            finding, true=math.inf, because=f"{missing}; {finding.because}", noise_needed=math.inf,
            at_least=finding.at_least if group.private.private else 0.0, advice=advice,
        )  # fmt: skip

    def _unobserved(self, group: UnitGroup) -> str:
        """Why the noise does not speak for all that was learnt from this data; "" where it does."""
        tally = group.private
        if not tally.steps:
            return "no optimizer's step after a batch of this data was seen"
        if tally.private < tally.steps:
            return f"{tally.steps - tally.private} of {counted(tally.steps, 'step')} had no privacy: {tally.missing}"
        if group.is_beside:
            return "an optimizer that adds no noise stepped too, after batches of this data had come"
        if self._aside():
            return self._aside()
        if self.private.is_quiet:
            return "the noise of all steps together is smaller than the optimizers say"
        if not self._examples * 0.9 - 2 * self._largest <= self._rows <= self._examples and group.is_named:
            return (
                "the optimizer clipped fewer or more gradients than examples were handed out: what it clipped was not "
                "one gradient for each example"
            )
        return SEEDED if tally.is_seeded else ""

    def _aside(self) -> str:
        """What changed weights beside the steps that are judged; "" for nothing."""
        return _UNSEEN if self._is_unseen else REWRITTEN if self._weights.is_rewritten else ""

    def _nothing(self, group: UnitGroup, found: Arrivals, delta: float) -> CheckResult:
        """No clipping and no noise were seen, and nobody claims an epsilon."""
        tally = group.private
        told = f"{counted(tally.steps, 'step')}, none with clipping and noise: {tally.missing or NOT_PRIVATE}"
        advice = (
            "to train privately, see the tutorial of anyorder, or Opacus's make_private",
            "to ask what noise would give in this order: anyorder check --noise-multiplier 1 SCRIPT",
        )
        return CheckResult(
            claimed=math.nan, true=math.inf, at_least=0.0, order=found.order, because=self.failure or told,
            advice=advice, neighbours="zero-out", participation=None, noise_multiplier=0.0, delta=delta,
            sampling_probability=None, steps=found.steps, epochs=found.epochs, batch_size=found.batch_size,
            dataset_size=found.dataset_size, accountant="", noise_needed=math.inf, outcome=NOTHING,
            observed=tally.describe(),
        )  # fmt: skip

    def _what_if(
        self, group: UnitGroup, seen: Observed, found: Arrivals, joined: int, delta: float, noise: float | None,
        accountant: str,
    ) -> CheckResult:  # fmt: skip
        """Nobody claims an epsilon: what an accountant would print of this order, for the noise seen or asked about."""
        tally, q = group.private, min(1.0, joined / found.batches) if found.batches else None
        sigma = noise if noise is not None else tally.least
        claimed = math.nan if q is None else printed(accountant, sigma, q, seen.steps, delta)
        finding = judge(found, claimed, sigma, delta, q=q, accountant=f"{accountant} accountant would print")
        missing = "" if tally.private and not self._unobserved(group) else "the script itself has no such noise; "
        return replace(finding, because=missing + finding.because, observed=tally.describe())

    def _read(self, group: UnitGroup, seen: Observed, joined: int) -> Arrivals:
        """What the samplers say, of a run of as many steps."""
        try:
            found = self._said(group, seen, joined)
        except Exception as problem:  # samplers and data sets of the script's own may raise anything when asked
            found = Arrivals("that of a loader that cannot be read", Unknown(), _watching_told(problem))
        return replace(found, steps=seen.steps, epochs=seen.epochs)

    def _said(self, group: UnitGroup, seen: Observed, joined: int) -> Arrivals:
        read = []
        for loader in group.loaders:
            split = is_of(loader.batch_sampler, "opacus.utils.batch_memory_manager", "BatchSplittingSampler")
            accumulate = 1 if split else joined  # such a loader's parts are of one step
            one = read_arrivals(loader, Stretch(None, seen.steps, accumulate))
            # steps that straddle epochs are fewer, and so are those of epochs whose last batches are dropped
            is_split = one.batches is not None and seen.steps == seen.epochs * -(-one.batches // accumulate)
            one = read_arrivals(loader, Stretch(None, seen.steps, accumulate, is_split=is_split))
            if isinstance(one.visits, AtMost) and (one.epochs or 0) < seen.epochs:  # epochs that were broken off
                one = read_arrivals(loader, Stretch(seen.epochs, None, accumulate, is_split=is_split))
            read.append(one)
        if not read:
            return Arrivals("that of a loader that cannot be read", Unknown(), "the loader cannot be copied")
        if len({(one.order, one.batches) for one in read}) == 1:
            found = read[0]
        else:
            words = "; then ".join(dict.fromkeys(one.order for one in read))
            found = Arrivals(words, Unknown(), "several loaders of other orders", batches=read[0].batches)
        if self.unit is not None and not isinstance(found.visits, Unknown):
            found = replace(found, visits=Unknown(), because="units are named by batches")
        return found


def _combined(said: Arrivals, seen: Observed) -> Arrivals:
    """What the samplers say, and where they say nothing, or less than was seen, what was seen."""
    if seen.doubt:
        return _doubted(said, seen.doubt)
    if not seen.is_named:
        if seen.reused and not isinstance(said.visits, Unknown):
            return _doubted(said, KEPT)  # how often each of them was used is not known by its units
        return said
    if seen.weight == 0:
        return _doubted(said, "nobody was seen in any step")
    watched: Visits = AtMost(seen.weight)
    most = rounded_up(seen.weight, 6)
    because = (
        f"in the order that was seen, squared counts of a unit in its steps sum up to {most} at most: mu = "
        f"sqrt({most}) / sigma. It holds for this run, if the order does not depend on the data; nothing "
        "promises it for another one"
    )
    if seen.reused:
        because += "; a step for which no batch was fetched is taken to be of the batch of the step before"
    because += "; no data set or collate function of the script's own may give an example under two indices"
    match said.visits:
        case SampledVisits() | DrawnVisits():
            if seen.is_redrawn:
                words = "the same batches came again, so that nothing was drawn again (a seed that is set again?)"
            elif seen.reused:
                words = "batches were used in several steps, so that not each step had draws of its own"
            else:
                return said
            return replace(said, visits=watched, because=f"{words}; {because}", participation=None)
        case AtMost() if seen.reused:
            return replace(said, visits=watched, because=because, participation=None)
        case AtMost(weight=weight) if weight >= seen.weight:
            words = said.order
            visits = said.visits
            if seen.is_repeated and "again" in words:
                words = (
                    f"one shuffle, the same in each epoch, as was seen (a sampler that is not told the epoch?): {words}"
                )
                if visits.shuffles is not None:
                    visits = replace(visits, shuffles=replace(visits.shuffles, epochs=min(1, visits.shuffles.epochs)))
            return replace(said, order=words, visits=visits)
        case AtMost():
            return replace(
                said,
                visits=watched,
                because=f"a unit came more often than its sampler says; {because}",
                participation=None,
            )
        case Unknown():
            return replace(said, visits=watched, because=because)


def _epsilon_of(accountant: Any, delta: float, asked: list[tuple[float, float]]) -> float:
    """What an accountant of the script claims at the end; infinity where it has no number."""
    try:
        claimed = float(accountant.get_epsilon(delta)) if accountant.history else asked[-1][1]
    except Exception:  # for a noise multiplier of 0 some of them raise
        return math.inf
    return math.inf if math.isnan(claimed) else claimed


def _as_said(sigma: float, history: list[tuple[float, float, int]]) -> float:
    """A noise multiplier as used, without the rounding of (sigma * clip norm) / clip norm, part of it in float32."""
    return next((float(said) for said, _, _ in history if math.isclose(said, sigma, rel_tol=1e-7)), sigma)


def _accounted(found: Arrivals, accounted: int, steps: int) -> Arrivals:
    """Unknown where the accountants have other steps than were seen."""
    if accounted == steps:
        return found
    return _doubted(
        found,
        f"the script's accountant has {counted(accounted, 'step')} and {steps} were seen: who was in others is unknown",
    )


def _doubted(found: Arrivals, because: str) -> Arrivals:
    return replace(found, visits=Unknown(), because=because, participation=None)


def length_of(dataset: Any) -> int | None:
    """Examples, where a data set of the script's own tells."""
    try:
        return len(dataset)
    except Exception:  # it may raise anything
        return None


def _watching_told(problem: Exception) -> str:
    """Without its text, which may have data in it."""
    return f"who was there could not be told: watching met {type(problem).__name__} in the script's own classes"


def _same_data(engine: Any, dataset: Any) -> bool:
    return base_of(engine.dataset) is dataset


@contextmanager
def watch(*, unit: Any = None) -> Iterator[Watch]:
    """Watch every torch loader and optimizer that is used inside the block.

        with ao.audit.watch() as seen:
            train()
        for one in seen.findings(delta=1e-5):
            print(one)

    Of each batch it is noted whose it was, when it was given to the loop; batches under `torch.no_grad` are not
    trained on. They are in the optimizer's next step. Loops that fetch a batch before they step with the one before are
    seen one step off. Opacus's `make_private`, its accountants and the clipping and noise of each step are noted where
    opacus is imported before the block (see `anyorder.audit.private_steps`);
    `PrivacyEngine.make_private` of this package too (import anyorder.training.engine), whose plan then makes the claim.

    Args:
        unit: where a batch keeps the ids of its units; None for examples, by their index.
    Cost: some 100 microseconds for a batch of 64, 1 ms for one of 1024, and 24 bytes for each example. Under Opacus
        gradients are clipped twice, and the sums and the noise of a step are kept until it is made.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from anyorder.audit.loss_rows import LossRows

    rows = LossRows(lambda hook, *args: seen.careful(hook, *args))
    seen = Watch(unit, OpacusSteps(torch.initial_seed, rows))

    def begin(original: Callable[..., Any], loader: Any) -> Any:
        epoch = seen.careful(seen.begin, loader)
        iterator = None
        try:
            iterator = original(loader)
        finally:
            seen.careful(seen.begun, iterator, epoch)
        return iterator

    def draw(original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        seen.careful(seen.drawn, iterator, index)
        return index

    def hand(original: Callable[..., Any], iterator: Any) -> Any:
        try:
            data = original(iterator)
        except StopIteration:
            seen.careful(seen.ended, iterator)
            raise
        seen.careful(seen.handed, iterator, data)
        return data

    def make(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        seen.careful(seen.made_private, engine)
        return result

    def bind(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        seen.careful(seen.planned, engine, args, kwargs)
        return result

    def ask(original: Callable[..., Any], accountant: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(accountant, *args, **kwargs)
        delta = args[0] if args else kwargs["delta"]
        seen.careful(seen.asked, accountant, delta, found[0] if isinstance(found, tuple) else found)
        return found

    def reseed(original: Callable[..., Any]) -> Any:
        seed = original()
        seen.private.reseeded(seed)
        return seed

    def set_seed(original: Callable[..., Any], seed: int) -> Any:
        seen.careful(seen.private.seeded, seed)
        return original(seed)

    def go_back(original: Callable[..., Any], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if seen.private:
            seen.careful(rows.backward, tensors, grad_tensors)
        return original(tensors, grad_tensors, *args, **kwargs)

    def hook_on(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rows.hooked()
        return original(tensor, *args, **kwargs)

    loaders = torch.utils.data.dataloader
    hooks: list[tuple[Any, str, Callable[..., Any]]] = [
        (loaders.DataLoader, "__iter__", begin), (loaders._BaseDataLoaderIter, "_next_index", draw),
        (loaders._BaseDataLoaderIter, "__next__", hand), (torch, "seed", reseed), (torch.random, "seed", reseed),
        (torch, "manual_seed", set_seed), (torch.random, "manual_seed", set_seed),
        (torch.autograd, "backward", go_back), (torch.Tensor, "register_hook", hook_on),
    ]  # fmt: skip
    if (own := sys.modules.get("anyorder.training.engine")) is not None:
        hooks.append((own.PrivacyEngine, "make_private", bind))
    if (opacus := sys.modules.get("opacus")) is not None:
        accountants = opacus.accountants
        kinds = (accountants.RDPAccountant, accountants.PRVAccountant, accountants.GaussianAccountant)
        hooks += [(opacus.PrivacyEngine, "make_private", make), (accountants.RDPAccountant, "get_privacy_spent", ask)]
        hooks += [(kind, "get_epsilon", ask) for kind in kinds]
        hooks += seen.private.hooks(opacus, seen.careful)
    with ExitStack() as stack:
        for owner, name, hook in hooks:
            stack.enter_context(_replaced(owner, name, hook))
        before = register_optimizer_step_pre_hook(lambda *args: seen.careful(seen.stepping, *args))
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda *args: seen.careful(seen.stepped, *args))
        stack.callback(after.remove)
        stack.callback(rows.leave)
        yield seen


@contextmanager
def _replaced(owner: Any, name: str, hook: Callable[..., Any]) -> Iterator[None]:
    """A method, or a module's function, that calls the hook with the original first."""
    original = owner.__dict__[name]

    def method(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    method.__name__, method.__doc__ = name, original.__doc__
    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
