"""What an accountant says of a run, beside what its order allows: `ao.check`."""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

from anyorder import _check
from anyorder._closed import final
from anyorder._words import counted, rounded_up
from anyorder.accounting import gdp_mu, poisson_epsilon
from anyorder.audit.checking.arrivals import Arrivals, Run, read_arrivals
from anyorder.audit.checking.visits import AtMost, Coins, Draws, Unknown, Visits, epsilon_at_least, epsilon_of
from anyorder.errors import ArgumentError
from anyorder.participation import Participation
from anyorder.planner import plan

__all__ = ["Finding", "check", "judge"]

_ACCOUNTANTS = ("prv", "rdp")
_LOUDEST = 1e4  # noise multiplier that is looked up to
_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))  # Opacus's, of its RDP accountant


@final
@dataclass(frozen=True)
class Finding:
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
        claimed = "nothing: an epoch has no length"
        if not math.isnan(self.claimed):  # as others print it; what is proven is not shown smaller than it is
            own = self.claimed == self.true
            claimed = f"epsilon = {rounded_up(self.claimed) if own else format(self.claimed, '.4g')}"
        true = f"epsilon <= {rounded_up(self.true)}" if self.true < math.inf else "no finite epsilon follows"
        q = "" if self.sampling_probability is None else f", q = {self.sampling_probability:.4g}"
        run = [f"noise multiplier {self.noise_multiplier:g}", f"delta {self.delta:g}"]
        run += [counted(self.steps, "step")] if self.steps is not None else []
        run += [counted(self.epochs, "epoch")] if self.epochs is not None else []
        rows = [
            ("order", self.order),
            ("run", ", ".join(run)),
            ("claimed", f"{claimed} ({self.accountant}{q})"),
            ("true", f"{true} ({self.neighbours} neighbours)"),
            ("because", self.because),
            ("verdict", {"holds": "the claim holds", "false": "the claim is FALSE",
                         "not proven": "the claim is NOT PROVEN"}[self.verdict]),
        ]  # fmt: skip
        if not self.holds and self.at_least > 0:
            rows.append(("attacked", f"no epsilon below {self.at_least:.4g} holds in this order"))
        return rows + [("advice", line) for line in self.advice]

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
            "batch_size", "dataset_size", "accountant", "verdict", "holds",
        )  # fmt: skip
        participation = None if self.participation is None else self.participation.describe()
        others = {name: getattr(self, name) for name in names}
        return {**numbers, **others, "advice": list(self.advice), "participation": participation}


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
) -> Finding:
    """The order that a loader really has, the epsilon that an accountant prints for it, and the one that holds.

        print(ao.check(loader, noise_multiplier=1.0, epochs=3, delta=1e-5))

    Noise is independent and Gaussian, each example's gradient is clipped (DP-SGD). The accountant takes
    q = 1 / len(loader), as Opacus does, for Poisson sampling. What holds follows from the order: with at most k steps
    of one example each, mu = sqrt(k) / sigma, exact Gaussian DP; see `anyorder.audit.checking.visits` for all others.

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
        MissingDependencyError without dp-accounting, unless `engine` is given and the order has no secret coins.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ArgumentError(f"loader must be what a loop gets its batches from, got {type(loader).__name__}")
    delta = _check.probability("delta", delta)
    _check.choice("accountant", accountant, _ACCOUNTANTS)
    accumulate = _check.integer("accumulate", accumulate, low=1)
    history = _history(engine)
    if epochs is None and steps is None and history:
        steps = sum(count for _, _, count in history)
    if (epochs is None) == (steps is None):
        raise ArgumentError(
            f"exactly one of epochs and steps must be given, got epochs={epochs!r}, steps={steps!r}; an engine that "
            "has stepped knows its own"
        )
    run = Run(
        None if epochs is None else _check.integer("epochs", epochs, low=1),
        None if steps is None else _check.integer("steps", steps, low=1), accumulate, unit,
    )  # fmt: skip
    sigma = _noise(noise_multiplier, optimizer, history)
    found = read_arrivals(loader, run)
    if isinstance(found.visits, AtMost):
        found = replace(found, because=found.because + _provisos(loader, run))
    if batch_size is not None:
        batch_size = _check.integer("batch_size", batch_size, low=1)
    claimed, q, by = _claim(found, sigma, delta, accountant, engine, history, accumulate, batch_size)
    return judge(
        found, claimed, sigma, delta, q=q, accountant=by, mechanism=mechanism, joined=accumulate, batch_size=batch_size
    )


def judge(
    found: Arrivals, claimed: float, sigma: float, delta: float, *, q: float | None, accountant: str,
    mechanism: str | None = None, joined: int = 1, batch_size: int | None = None, loudest: float | None = None,
) -> Finding:  # fmt: skip
    """The claim beside what follows from the arrivals; noise between `sigma` and `loudest` in each step."""
    true = epsilon_of(found.visits, sigma, delta)
    at_least = min(true, epsilon_at_least(found.visits, loudest or sigma, delta))
    holds = claimed >= true * (1 - 1e-12)
    needed = sigma if holds else _needed(found.visits, claimed, sigma, delta)
    neighbours = "add-or-remove" if isinstance(found.visits, Coins) else "zero-out"
    because = found.because
    if isinstance(found.visits, AtMost):
        because += "; add-or-remove neighbours say nothing here: one example's absence would move all others"
    size = batch_size or found.batch_size
    advice = () if holds else _advice(found, claimed, sigma, delta, needed, mechanism, (size or 1) * joined)
    return Finding(
        claimed=claimed, true=true, at_least=at_least, order=found.order, because=because, advice=advice,
        neighbours=neighbours, participation=found.participation, noise_multiplier=sigma, delta=delta,
        sampling_probability=q, steps=found.steps, epochs=found.epochs, batch_size=size,
        dataset_size=found.dataset_size, accountant=accountant, noise_needed=needed,
    )  # fmt: skip


def _provisos(loader: Any, run: Run) -> str:
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
        return _check.positive("noise_multiplier", given)
    if history:
        return _check.positive("the engine's noise_multiplier", min(sigma for sigma, _, _ in history))
    own = getattr(optimizer, "noise_multiplier", None)
    if own is None:
        raise ArgumentError(
            "noise_multiplier must be given, or an optimizer that has one (Opacus's), or an engine that has stepped"
        )
    return _check.positive("the optimizer's noise_multiplier", own)


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


def printed(accountant: str, sigma: float, q: float, steps: int, delta: float) -> float:
    """The epsilon of Poisson sampling by "prv" or "rdp"; the second is Opacus's of that name to three digits."""
    if accountant == "prv":
        return poisson_epsilon(sigma, q, steps, delta)
    dp_accounting = _check.optional("dp_accounting", extra="amplified", purpose="accounting for Poisson sampling")
    rdp = _check.optional("dp_accounting.rdp", extra="amplified", purpose="accounting for Poisson sampling")
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
    low, high = sigma, 2 * sigma
    while epsilon_of(visits, high, delta) > claimed:
        low, high = high, 2 * high
        if high > _LOUDEST:
            return math.inf
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(visits, middle, delta) > claimed else (low, middle)
    return high


def _advice(
    found: Arrivals, claimed: float, sigma: float, delta: float, needed: float, mechanism: str | None, size: int
) -> tuple[str, ...]:
    if isinstance(found.visits, (Unknown, Draws)) or found.participation is None or math.isnan(claimed):
        lines = [
            "use shuffle=True or sampler=anyorder.FixedOrderSampler(dataset), which let an example come once an epoch; "
            "or plan for a rule that the ledger enforces step by step, such as participation=MinSeparation(n, b, k)",
        ]
        if isinstance(found.visits, Unknown):
            lines.append("anyorder check SCRIPT.py tells who really comes, of this loader in one run")
    else:
        lines = [
            f"ao.plan(loader=loader, epochs={found.epochs}, epsilon={claimed:.4g}, delta={delta:g}): correlated noise "
            "at the epsilon that was claimed" + _gain(found.participation, claimed, delta, mechanism, size),
        ]
        if "shuffled anew" in found.order and (found.epochs or 0) > 1:
            lines.append("sampler=anyorder.FixedOrderSampler(dataset) keeps one shuffle, which costs less noise")
    if needed < math.inf:
        lines.append(f"with independent noise the claim needs noise multiplier {needed:.4g}, not {sigma:g}")
    return tuple(lines)


def _gain(order: Participation, claimed: float, delta: float, mechanism: str | None, size: int) -> str:
    """What correlated noise gives, in words."""
    if mechanism is None or not claimed > 0:
        return ""
    budget: dict[str, Any] = {"participation": order, "batch_size": size, "epsilon": claimed, "delta": delta}
    chosen, alone = plan(mechanism=mechanism, **budget), plan(mechanism="independent", **budget)
    ratio = alone.noise_error() / chosen.noise_error()
    return (
        f"; {chosen.strategy.describe()} has {ratio:.3g} times less noise in the iterates than independent noise there"
    )
