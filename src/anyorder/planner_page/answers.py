"""The table of mechanisms, by the functions that `ao.plan` and `anyorder plan --compare` use.

An answer comes in pieces, each a JSON object: first all that is quick, then what takes longer. Every number is that of
a `Plan`; what does not depend on epsilon is kept in memory from one question to the next:

    error = sigma * error of the plan at sigma 1          known orders, whose C does not depend on the claim
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from anyorder import checks
from anyorder.errors import ArgumentError, MissingDependencyError
from anyorder.optimize import choose
from anyorder.optimize.candidates import Candidate, rows_touched
from anyorder.participation import PoissonSampling
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan, plan_at_sigma, with_budget
from anyorder.planner_page.settings import Settings
from anyorder.run.planning import poisson_claim
from anyorder.strategy import Independent
from anyorder.strategy.registry import in_words

__all__ = ["SAMPLED", "Piece", "Unit", "answer", "bound_of", "sampled", "sampled_claim", "unit_rows"]

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
        error, last: noise in the iterates, root mean square over steps and in the last, in clip norms.
        ratio: error over the certified lower bound of all mechanisms.
        cost: rows of the model's size that a step makes or reads.
    """

    name: str
    plan: Plan
    error: float
    last: float
    ratio: float
    cost: float


def answer(asked: Settings) -> Iterator[Piece]:
    """The pieces of the table: "plan", and for secret orders "row" for each further mechanism.

    A row is "exact" where `ao.plan(mechanism=name)` gives the very same: others are fitted anew when asked for by name.

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


def unit_rows(asked: Settings) -> tuple[Unit, ...]:
    """All mechanisms that the memory allows, in a known order: that of `ao.plan` first. Kept in memory."""
    return _units(*_fits_of(asked))


def sampled(asked: Settings, noises: Sequence[float]) -> Iterator[Piece]:
    """What an accountant for Poisson sampling would print: "sampled" for each noise multiplier, in order.

    After them "row": DP-SGD whose batches are drawn by secret coins, at the epsilon that was asked for.

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
    """`anyorder.run.planning.poisson_claim`, kept in memory."""
    return poisson_claim(noise, batch_size, dataset_size, steps, delta)


# -- known orders ----------------------------------------------------------------------------------------------------


def _fits_of(asked: Settings) -> tuple[int, int, int, str, int | None, float]:
    """All of the settings that fits depend on."""
    return asked.dataset_size, asked.batch_size, asked.epochs, asked.order, asked.memory, asked.momentum


@lru_cache(maxsize=256)
def _base(
    dataset_size: int, batch_size: int, epochs: int, order: str, memory: int | None, momentum: float, delta: float
) -> Plan:
    """Independent noise at sigma 1."""
    given = Settings(
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


def _known(asked: Settings) -> Piece:
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


def _secret(asked: Settings) -> Iterator[Piece]:
    """The plan of `ao.plan`, then the mechanisms that are estimated to be next, and independent noise."""
    yield {"kind": "progress", "text": "fitting mechanisms to the secret claim: up to some minutes, once"}
    best = plan(epsilon=asked.epsilon, **asked.arguments())
    yield _piece(asked, best, [_row(in_words(best.strategy), best, best=True)], None)
    found = choose(best.workload, best.participation, asked.memory, epsilon=asked.epsilon, delta=asked.delta)
    others = [one for one in found[:_CALIBRATED] if one.strategy != best.strategy]
    others += [one for one in found[_CALIBRATED:] if type(one.strategy) is Independent]
    for one in others:
        yield {"kind": "progress", "text": f"finding the claim of {one.name}"}
        calibrated = with_budget(replace(best, strategy=one.strategy), epsilon=asked.epsilon)
        yield {"kind": "row", "row": _row(one.name, calibrated, best=False)}


def _row(name: str, chosen: Plan, *, best: bool, reference: bool = False) -> Piece:
    own = chosen.epsilon if type(chosen.participation) is PoissonSampling else None
    return {
        "name": name, "mechanism": chosen.strategy.describe(), "best": best, "reference": reference,
        "error": chosen.noise_error(), "last": float(chosen.noise_profile()[-1]), "ratio": None,
        "vectors": chosen.strategy.state_rows, "cost": rows_touched(chosen.strategy),
        "noise_multiplier": chosen.noise_multiplier, "epsilon": chosen.epsilon, "known_epsilon": chosen.known_epsilon,
        "sampled_epsilon": own, "exact": best or type(chosen.strategy) is Independent,
    }  # fmt: skip


def _piece(asked: Settings, chosen: Plan, rows: list[Piece], bound: float | None) -> Piece:
    return {
        "kind": "plan", "steps": chosen.n, "order": chosen.participation.describe(),
        "needs": str(chosen.participation.needs), "secret": chosen.participation.secret, "epsilon": chosen.epsilon,
        "delta": chosen.delta, "batch_size": asked.batch_size, "lower_bound": bound, "rows": rows,
    }  # fmt: skip
