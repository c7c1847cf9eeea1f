"""What the planner's page asks and what it is answered, by the functions that `ao.plan` uses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from anyorder import checks
from anyorder.accounting.risk import RATES
from anyorder.app.planning import poisson_claim
from anyorder.errors import AnyorderError, ArgumentError, MissingDependencyError
from anyorder.optimize import choose
from anyorder.optimize.candidates import Candidate, kind_in, rows_touched
from anyorder.participation.registry import WORDS, order_word
from anyorder.plan.options import SGD, Limits
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan, plan_at_sigma, with_budget
from anyorder.strategy import Independent
from anyorder.strategy.registry import in_words

# ----------------------------------------------------------------------------------------------------
# What a page asks: the inputs of a plan in JSON, checked as `ao.plan` checks them, and bounded in cost.


MAX_STEPS = 4096
"""Steps of a plan that the page answers; `anyorder plan` has no such limit."""
MAX_SECRET_STEPS = 2048
"""The same for secret orders whose claims are found by mixtures, which take minutes."""
MAX_CELLS = 144

ORDERS = tuple(word for word, (row, _) in WORDS.items() if row.is_on_page)
MECHANISMS = ("auto", "independent", "tree", "blt")
KNOWN = tuple(word for word, (row, _) in WORDS.items() if row.meaning)
"""Orders without secret draws."""
_QUICK = tuple(word for word, (row, _) in WORDS.items() if row.is_quick)
"""Orders without mixtures: of long plans, and of sweeps."""


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """The inputs of a page: options of `ao.plan`.

    Attributes:
        memory: vectors of the model's size that the mechanism may keep; None for any number.
    """

    dataset_size: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    order: str = "shuffled"
    memory: int | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        size = checks.integer("dataset_size", self.dataset_size, low=1, high=10**12)
        checks.integer("batch_size", self.batch_size, low=1, high=size)
        checks.integer("epochs", self.epochs, low=1)
        object.__setattr__(self, "epsilon", checks.positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", checks.probability("delta", self.delta))
        object.__setattr__(self, "order", order_word(self.order))
        checks.choice("order", self.order, ORDERS)
        if self.memory is not None:
            checks.integer("memory", self.memory, low=0)
        object.__setattr__(self, "momentum", checks.real("momentum", self.momentum, low=0.0))
        most = MAX_STEPS if self.order in _QUICK else MAX_SECRET_STEPS
        if self.steps > most:
            raise ArgumentError(
                f"batch_size must be so large, or epochs so few, that a plan of order {self.order!r} has at most "
                f"{most} steps on this page, got {self.steps}; `anyorder plan` plans longer runs"
            )

    @property
    def steps(self) -> int:
        """Of the whole run: epochs * ceil(dataset_size / batch_size)."""
        return self.epochs * -(-self.dataset_size // self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """Expected batch over data set."""
        return self.batch_size / self.dataset_size

    def arguments(self) -> dict[str, Any]:
        """Of `ao.plan`, without the budget."""
        return {
            "dataset_size": self.dataset_size, "batch_size": self.batch_size, "epochs": self.epochs,
            "delta": self.delta, "order": self.order, "optimizer": SGD(momentum=self.momentum),
            "limits": Limits(memory=self.memory),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sheet of settings: every batch size with every number of epochs.

    Attributes:
        base: the other inputs; its batch_size and epochs stand for nothing.
        batch_sizes, epoch_counts: of the sheet.
        mechanism: of `MECHANISMS`.
        measure: "noise" (noise to batch at the epsilon of base) or "epsilon" (at `ratio`).
        ratio: noise to batch, see `anyorder.app.planner_page.answers`.
    """

    base: PlanQuestion
    batch_sizes: tuple[int, ...]
    epoch_counts: tuple[int, ...]
    mechanism: str = "blt"
    measure: str = "noise"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        checks.choice("mechanism", self.mechanism, MECHANISMS)
        checks.choice("measure", self.measure, ("noise", "epsilon"))
        object.__setattr__(self, "ratio", checks.positive("ratio", self.ratio))
        for name, values in (("batch_sizes", self.batch_sizes), ("epoch_counts", self.epoch_counts)):
            for value in values:
                checks.integer(name, value, low=1)
        if not 0 < len(self.batch_sizes) * len(self.epoch_counts) <= MAX_CELLS:
            raise ArgumentError(
                f"batch_sizes and epoch_counts must make from 1 to {MAX_CELLS} cells, got "
                f"{len(self.batch_sizes)} x {len(self.epoch_counts)}"
            )
        if self.base.order not in _QUICK:
            raise ArgumentError(
                f"order must be one of {', '.join(_QUICK)} in a sweep, got {self.base.order!r}: the claims of other "
                "secret orders take minutes for each cell; plan them one at a time"
            )


def settings_of(data: Any) -> PlanQuestion:
    """The settings in a JSON object. Raises ArgumentError, whose message names the input."""
    return PlanQuestion(**_named(data, PlanQuestion, {"dataset_size", "batch_size", "epochs", "epsilon", "delta"}))


def sweep_of(data: Any) -> Sweep:
    """The sweep in a JSON object: that of `settings_of` under "base", and the others. Raises ArgumentError."""
    values = _named(data, Sweep, {"base", "batch_sizes", "epoch_counts"})
    base = values["base"]
    if isinstance(base, dict):  # one step an epoch: the cells have their own sizes, which are checked one by one
        base = {**base, "batch_size": base.get("dataset_size"), "epochs": 1}
    values["base"] = settings_of(base)
    for name in ("batch_sizes", "epoch_counts"):
        if not isinstance(values[name], list):
            raise ArgumentError(f"{name} must be a list of whole numbers, got {values[name]!r:.80}")
        values[name] = tuple(values[name])
    return Sweep(**values)


def _named(data: Any, kind: type, needed: set[str]) -> dict[str, Any]:
    known = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(data, dict) or not needed <= data.keys() <= known:
        listed = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ArgumentError(
            f"a question must be an object with {sorted(needed)}, and others of {sorted(known)}, got {listed!s:.200}"
        )
    return dict(data)


def field_of(message: str) -> str | None:
    """The input that a refusal is about: its first word, where that is the name of one."""
    word = message.replace(":", " ").replace(",", " ").split(" ", 1)[0]
    names = {*PlanQuestion.__dataclass_fields__, *Sweep.__dataclass_fields__}
    return {"batch_sizes": "batch_size", "epoch_counts": "epochs"}.get(word, word) if word in names else None


# ----------------------------------------------------------------------------------------------------
# The table of mechanisms, by the functions that `ao.plan` and `anyorder plan --compare` use.
#
# An answer comes in pieces, each a JSON object: first all that is quick, then what takes longer. Every number is that
# of a `Plan`; what does not depend on epsilon is kept in memory from one question to the next:
#
#     error = sigma * error of the plan at sigma 1          known orders, whose C does not depend on the claim


Piece = dict[str, Any]

SAMPLED = "DP-SGD, secret Poisson sampling"
"""The row for comparison in tables of known orders."""
_CALIBRATED = 3  # mechanisms of a secret order whose claims are found: each takes long
_MAX_NOISES = 64


@dataclass(frozen=True)
class Unit:
    """A mechanism in a known order at sigma 1: what of a row does not depend on epsilon.

    Attributes:
        name: kind and size, as `ao.plan(mechanism=..)` takes it.
        plan: at sigma 1.
        error, last: noise in the weights, root mean square over steps and in the last, in clip norms.
        ratio: error over the certified lower bound of all mechanisms.
        cost: rows of the model's size that a step makes or reads.
    """

    name: str
    plan: Plan
    error: float
    last: float
    ratio: float
    cost: float


def answer(asked: PlanQuestion) -> Iterator[Piece]:
    """The pieces of the table: "plan", and for secret orders "row" for each further mechanism.

    A row is "exact" where `ao.plan(mechanism=name)` gives the same. Others are fitted again when asked for by name.

    Raises: what `ao.plan` raises.
    Cost: known orders: that of the fits (seconds for 1000 steps, kept in memory and on disk), then milliseconds.
        Poisson sampling: about a second. Other secret orders: up to minutes, as mechanisms are fitted to their claim.
    """
    if asked.order == "poisson":
        chosen = plan(epsilon=asked.epsilon, **asked.arguments())
        yield _piece(asked, chosen, [_row(in_words(chosen.strategy), chosen, best=True)], None)
    elif _base(*_fits_of(asked), asked.delta).participation.secret:
        yield from _secret(asked)
    else:
        yield _known(asked)


def first(asked: PlanQuestion) -> Iterator[Piece]:
    """At once, before any fit: a "plan" that is "rough", of independent noise, and nothing that secret draws may save.

    It holds as it stands. Nothing comes for orders in which a unit may be in more steps than there are epochs, as
    Poisson sampling: what holds without their secret is no bound of use.
    """
    base = _base(*_fits_of(asked), asked.delta)
    secret = base.participation.secret
    if secret and (base.known_mu or 0.0) ** 2 > 1.001 * asked.epochs:
        return
    known = replace(asked, order="shuffled") if secret else asked  # once in each epoch, whatever the draws
    chosen = with_budget(_base(*_fits_of(known), asked.delta), epsilon=asked.epsilon)
    piece = _piece(asked, chosen, [_row("independent", chosen, best=False)], None)
    yield {**piece, "order": base.participation.describe(), "secret": secret,
           "needs": str(base.participation.needs), "rough": True}  # fmt: skip


def unit_rows(asked: PlanQuestion) -> tuple[Unit, ...]:
    """All mechanisms that the memory allows, in a known order: that of `ao.plan` first. Kept in memory."""
    return _units(*_fits_of(asked))


def sampled(asked: PlanQuestion, noises: Sequence[float]) -> Iterator[Piece]:
    """What an accountant for Poisson sampling would print: "sampled" for each noise multiplier, in order.

    After them "row": DP-SGD whose batches are drawn in secret, at the epsilon that was asked for.

    Raises: ArgumentError. Where dp-accounting is not installed, one "note" says so.
    Cost: 0.2 s for each noise, a second for the row.
    """
    if not isinstance(noises, (list, tuple)) or len(noises) > _MAX_NOISES:
        raise ArgumentError(f"noises must be a list of at most {_MAX_NOISES} noise multipliers, got {noises!r:.80}")
    values = [checks.positive("noises", value) for value in noises]
    try:
        for noise in values:
            claim = sampled_claim(noise, asked.batch_size, asked.dataset_size, asked.steps, asked.delta)
            yield {"kind": "sampled", "noise_multiplier": noise, "epsilon": claim}
        chosen = plan(epsilon=asked.epsilon, **{**asked.arguments(), "order": "poisson"})
    except MissingDependencyError as problem:
        yield {"kind": "note", "text": str(problem)}
        return
    row = _row(SAMPLED, chosen, best=False, reference=True)
    yield {"kind": "row", "row": {**row, "sampled_epsilon": chosen.epsilon}}


@lru_cache(maxsize=4096)
def sampled_claim(noise: float, batch_size: int, dataset_size: int, steps: int, delta: float) -> float:
    """`anyorder.app.planning.poisson_claim`, kept in memory."""
    return poisson_claim(noise, batch_size, dataset_size, steps, delta)


# -- known orders ----------------------------------------------------------------------------------------------------


def _fits_of(asked: PlanQuestion) -> tuple[int, int, int, str, int | None, float]:
    """All of the settings that fits depend on."""
    return asked.dataset_size, asked.batch_size, asked.epochs, asked.order, asked.memory, asked.momentum


@lru_cache(maxsize=256)
def _base(
    dataset_size: int, batch_size: int, epochs: int, order: str, memory: int | None, momentum: float, delta: float
) -> Plan:
    """Independent noise at sigma 1."""
    given = PlanQuestion(
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, order=order, memory=memory, momentum=momentum,
        epsilon=1.0, delta=delta,
    )  # fmt: skip
    return plan_at_sigma(1.0, mechanism="independent", **given.arguments())


@lru_cache(maxsize=64)
def _units(
    dataset_size: int, batch_size: int, epochs: int, order: str, memory: int | None, momentum: float
) -> tuple[Unit, ...]:
    base = _base(dataset_size, batch_size, epochs, order, memory, momentum, 1e-5)  # delta moves no fit
    found = choose(base.workload, base.participation, memory)
    return tuple(_unit(base, candidate) for candidate in found)


def _unit(base: Plan, candidate: Candidate) -> Unit:
    at_one = replace(base, strategy=candidate.strategy)
    assert candidate.ratio is not None  # of known orders
    profile = at_one.noise_profile()
    return Unit(
        candidate.name, at_one, at_one.noise_error(), float(profile[-1]), candidate.ratio, candidate.cost
    )  # fmt: skip


def _known(asked: PlanQuestion) -> Piece:
    units = unit_rows(asked)
    chosen = with_budget(replace(units[0].plan, delta=asked.delta), epsilon=asked.epsilon)
    sigma, epsilon = chosen.sigma, chosen.epsilon  # of all C in a known order: Gaussian DP with mu = f / sigma
    rows: list[Piece] = [
        {
            "name": unit.name, "mechanism": unit.plan.strategy.describe(), "best": unit is units[0], "reference": False,
            "error": sigma * unit.error, "last": sigma * unit.last, "ratio": unit.ratio,
            "vectors": unit.plan.strategy.state_rows, "cost": unit.cost,
            "noise_multiplier": sigma * unit.plan.noise_multiplier, "epsilon": epsilon,
            "known_epsilon": None, "sampled_epsilon": None,
            "exact": unit.name != "dense" or unit is units[0],  # which by its name is solved to a smaller gap
        }
        for unit in units
    ]  # fmt: skip
    return _piece(asked, chosen, rows, bound_of(units) * chosen.sigma)


def bound_of(units: Sequence[Unit]) -> float:
    """The certified lower bound of the error at sigma 1, of all mechanisms without sampling."""
    worst = max(units, key=lambda unit: unit.ratio)
    return worst.error / worst.ratio


# -- secret orders ---------------------------------------------------------------------------------------------------


def _secret(asked: PlanQuestion) -> Iterator[Piece]:
    """The plan of `ao.plan`, then the mechanisms that are estimated to be next, and independent noise."""
    yield {"kind": "progress", "text": f"order {asked.order}: fitting mechanisms to its secret draws, minutes at first"}
    best = plan(epsilon=asked.epsilon, **asked.arguments())
    yield _piece(asked, best, [_row(in_words(best.strategy), best, best=True)], None)
    found = choose(best.workload, best.participation, asked.memory, epsilon=asked.epsilon, delta=asked.delta)
    others = [one for one in found[:_CALIBRATED] if one.strategy != best.strategy]
    others += [one for one in found[_CALIBRATED:] if type(one.strategy) is Independent]
    for i, one in enumerate(others, 1):
        text = f"order {asked.order}: mechanism {i} of {len(others)}, {one.name}"
        yield {"kind": "progress", "text": text}
        calibrated = with_budget(replace(best, strategy=one.strategy), epsilon=asked.epsilon)
        yield {"kind": "row", "row": _row(one.name, calibrated, best=False)}


def _row(name: str, chosen: Plan, *, best: bool, reference: bool = False) -> Piece:
    own = chosen.epsilon if chosen.participation.draw_probability is not None else None
    return {
        "name": name, "mechanism": chosen.strategy.describe(), "best": best, "reference": reference,
        "error": chosen.noise_error(), "last": float(chosen.noise_profile()[-1]), "ratio": None,
        "vectors": chosen.strategy.state_rows, "cost": rows_touched(chosen.strategy),
        "noise_multiplier": chosen.noise_multiplier, "epsilon": chosen.epsilon, "known_epsilon": chosen.known_epsilon,
        "sampled_epsilon": own, "exact": best or type(chosen.strategy) is Independent,
    }  # fmt: skip


def _piece(asked: PlanQuestion, chosen: Plan, rows: list[Piece], bound: float | None) -> Piece:
    return {
        "kind": "plan", "steps": chosen.n, "order": chosen.participation.describe(),
        "needs": str(chosen.participation.needs), "secret": chosen.participation.secret, "epsilon": chosen.epsilon,
        "delta": chosen.delta, "batch_size": asked.batch_size, "lower_bound": bound, "rows": rows,
        "attacks": attacks_on(chosen),
    }  # fmt: skip


def attacks_on(chosen: Plan) -> list[list[float]]:
    """[FPR, TPR at most] of the strongest attacker, in the rows of a table."""
    return [list(pair) for pair in zip(RATES, chosen.reach.tprs, strict=True)]


# ----------------------------------------------------------------------------------------------------
# A whole sweep: what batch size and epochs do to the noise at an epsilon, or to epsilon at a noise.
#
# Noise is measured against the batch, as the model sees it: the noise multiplier that independent noise would need for
# the same error in the iterates, over the batch size,
#
#     ratio = error / (batch_size * error of independent noise with noise multiplier 1)
#
# For DP-SGD's independent noise that is noise_multiplier / batch_size. Runs of one ratio and one number of steps, at
# one learning rate, have the same noise in their iterates.


class _Cell(NamedTuple):
    plan: Plan  # at sigma 1, in a known order
    error: float
    white: float  # error of independent noise with noise multiplier 1


def cells(asked: Sweep) -> Iterator[Piece]:
    """A "cell" for every batch size and number of epochs, the shortest runs first.

    A cell has "batch_size", "epochs", "steps", and either "refused", or "name" of the mechanism, "error" of the
    iterates, "ratio", "noise_multiplier" and "epsilon".

    Cost: known orders: milliseconds for independent noise; others take a fit for each cell at first, a second or more,
        kept on disk. Poisson: seconds for each cell of "noise", 0.2 s for each of "epsilon".
    """
    places = [(batch, epochs) for batch in asked.batch_sizes for epochs in asked.epoch_counts]
    for batch, epochs in sorted(places, key=lambda place: place[1] / place[0]):
        cell = {"kind": "cell", "batch_size": batch, "epochs": epochs}
        try:
            settings = replace(asked.base, batch_size=batch, epochs=epochs)
            yield {**cell, "steps": settings.steps, **_values(settings, asked)}
        except AnyorderError as problem:
            yield {**cell, "refused": str(problem)}


def _values(settings: PlanQuestion, asked: Sweep) -> dict[str, Any]:
    if settings.order == "poisson":
        return _sampled(settings, asked)
    unit = _sweep_unit(
        settings.dataset_size, settings.batch_size, settings.epochs, settings.order, settings.memory,
        settings.momentum, asked.mechanism,
    )  # fmt: skip
    base = replace(unit.plan, delta=settings.delta)
    if asked.measure == "noise":
        found = with_budget(base, epsilon=settings.epsilon)
    else:
        found = with_budget(base, sigma=asked.ratio * settings.batch_size * unit.white / unit.error)
    error = found.sigma * unit.error
    return {
        "name": in_words(found.strategy), "error": error, "ratio": error / (settings.batch_size * unit.white),
        "noise_multiplier": found.sigma * unit.plan.noise_multiplier, "epsilon": found.epsilon,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _sweep_unit(
    dataset_size: int, batch_size: int, epochs: int, order: str, memory: int | None, momentum: float, mechanism: str
) -> _Cell:
    settings = PlanQuestion(
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, order=order, memory=memory, momentum=momentum,
        epsilon=1.0, delta=1e-5,  # neither moves a fit
    )  # fmt: skip
    if mechanism in ("auto", "blt"):  # as `ao.plan` chooses, from fits that the table shares
        found = [one.plan for one in unit_rows(settings) if mechanism in ("auto", kind_in(one.name))]
    else:
        found = []
    at_one = found[0] if found else plan_at_sigma(1.0, mechanism=mechanism, **settings.arguments())
    white = plan(noise_multiplier=1.0, mechanism="independent", **settings.arguments())
    return _Cell(at_one, at_one.noise_error(), white.noise_error() / white.noise_multiplier)


def _sampled(settings: PlanQuestion, asked: Sweep) -> dict[str, Any]:
    if asked.measure == "noise":
        found = _poisson(settings)
        noise, epsilon, white = found.noise_multiplier, found.epsilon, found.noise_error() / found.noise_multiplier
    else:
        noise = asked.ratio * settings.batch_size
        epsilon = poisson_claim(noise, settings.batch_size, settings.dataset_size, settings.steps, settings.delta)
        one = plan(noise_multiplier=1.0, mechanism="independent", **{**settings.arguments(), "order": "fixed"})
        white = one.noise_error() / one.noise_multiplier
    return {
        "name": "independent", "error": noise * white, "ratio": noise / settings.batch_size, "noise_multiplier": noise,
        "epsilon": epsilon,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def _poisson(settings: PlanQuestion) -> Plan:
    return plan(epsilon=settings.epsilon, **settings.arguments())


# ----------------------------------------------------------------------------------------------------
# The questions of a page by name, with their refusals: what the process behind it answers.


KINDS = ("plan", "sampled", "sweep")


def pieces(kind: str, asked: Any) -> Iterator[Piece]:
    """The answer to a question that came from outside, and at its end "end", or "error" where it is refused.

    An "error" has the "message" of `ao.plan` as it is, and the "field" that it is about, if it names one.

    Args:
        kind: of `KINDS`: `answer`, `sampled` (of "settings" and "noises"), `cells`.
        asked: what JSON made of the question.
    """
    try:
        yield from _answered(kind, asked)
    except AnyorderError as problem:
        yield {"kind": "error", "message": str(problem), "field": field_of(str(problem))}
        return
    yield {"kind": "end"}


def _answered(kind: str, asked: Any) -> Iterator[Piece]:
    match kind:
        case "plan":
            settings = settings_of(asked)
            yield from first(settings)
            yield from answer(settings)
        case "sampled":
            if not isinstance(asked, dict) or asked.keys() != {"settings", "noises"}:
                raise ArgumentError(f"a question must be an object with settings and noises, got {asked!r:.80}")
            yield from sampled(settings_of(asked["settings"]), asked["noises"])
        case "sweep":
            yield from cells(sweep_of(asked))
        case _:
            raise ArgumentError(f"a question must be one of {', '.join(KINDS)}, got {kind!r:.80}")
