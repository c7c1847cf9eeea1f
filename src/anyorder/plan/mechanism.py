"""The mechanism of a plan: from words or a strategy, within a memory and a cost, fitted to the order and its claim."""

import contextlib
import re
from typing import Any, NamedTuple

from anyorder import checks
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.errors import ArgumentError, PlanError
from anyorder.optimize import choose
from anyorder.optimize.amplified import NoAmplifiedFitError, best_cycle
from anyorder.optimize.candidates import MAX_COST, fit_named, rows_touched
from anyorder.patterns import Participation
from anyorder.strategy import Independent, Strategy, Tree
from anyorder.strategy.base import Combination
from anyorder.workload import Workload


class Allowed(NamedTuple):
    """What a mechanism may keep and take; None for what was not asked."""

    state: int | None
    cost: float | None

    @property
    def chosen_cost(self) -> float:
        return MAX_COST if self.cost is None else self.cost


def strategy_of(
    mechanism: str | Strategy, work: Workload, order: Participation, secure: bool, selected: bool, objective: str,
    limits: Allowed, tree: dict[str, Any], claim: dict[str, Any],
) -> Strategy:  # fmt: skip
    if tree and mechanism != "tree":
        raise ArgumentError(f"{', '.join(tree)} must come with mechanism 'tree' only, got {mechanism!r}")
    if isinstance(mechanism, Strategy):
        if objective != "mean":
            raise ArgumentError(f"objective must not be given together with a Strategy, which is fitted: {mechanism!r}")
        return _within(mechanism, limits, selected)
    if type(mechanism) is not str:
        raise ArgumentError(f"mechanism must be a text or a Strategy, got {mechanism!r}")
    checks.choice("objective", objective, {"mean", "max", "last"})
    if order.draw_probability is not None:
        if mechanism not in ("auto", "independent", "poisson"):
            raise PlanError(
                f"secret sampling (order 'poisson') is for mechanism 'poisson' only: mechanism {mechanism!r} has no "
                "amplified accounting; use order 'shuffled', or 'independent'"
            )
        return Independent(order.n)
    if mechanism == "poisson":
        raise PlanError(f"mechanism 'poisson' needs secret sampling (order='poisson'), got {order.describe()}")
    if order.secret and mechanism in ("auto", "independent"):
        return _secret_auto(work, order, limits, objective, claim) if mechanism == "auto" else Independent(order.n)
    if mechanism == "auto" and selected:
        # Errors are those of a row that every step releases. One that few steps release has no later noise that takes
        # back the earlier, and the larger noise of each step.
        return Independent(order.n)
    if mechanism == "auto":
        known = choose(work, order, limits.state, objective, max_cost=limits.chosen_cost)
        return next(one.strategy for one in known if not secure or isinstance(one.strategy, Combination))
    found = _fit_named(mechanism, work, order, objective, limits, tree, claim)
    if type(found) is Tree and (selected or limits.state == 0):
        found = Tree(found.n, found.estimator, found.restarts, found.completion, regenerate=True)
    return _within(found, limits, selected)


def _fit_named(
    mechanism: str, work: Workload, order: Participation, objective: str, limits: Allowed, tree: dict[str, Any],
    claim: dict[str, Any],
) -> Strategy:  # fmt: skip
    """Fitted to the amplified claim where the order has one and the kind such a fit, else to steps without draws."""
    budget: dict[str, Any] = {"max_state": limits.state, "max_cost": limits.chosen_cost, "objective": objective}
    if order.secret and claim["epsilon"] is not None and not tree:
        with contextlib.suppress(NoAmplifiedFitError):
            return fit_named(mechanism, work, order, **budget, **claim)
    return fit_named(mechanism, work, order.without_draws(), **budget, **tree)


def with_best_cycle(
    rule: Participation, work: Workload, epsilon: float | None, delta: float, objective: str,
    max_cost: float | None,
) -> Participation:  # fmt: skip
    """Of cyclic and truncated sampling that were planned without groups, with as many as suit the claim."""
    assert isinstance(rule, SecretOrder)  # of those with `cycle_is_chosen`
    if epsilon is None:
        raise ArgumentError(
            "epsilon must be given with order 'cyclic-poisson' and mechanism 'auto', by which the cycle is chosen; or "
            "take a mechanism with bands, such as 'banded toeplitz, 8 bands', or a cycle"
        )
    cycle = best_cycle(work, rule.rate, epsilon, delta, objective, most=MAX_COST if max_cost is None else max_cost)
    return rule.with_cycle(cycle)


def _secret_auto(
    work: Workload, order: Participation, limits: Allowed, objective: str, claim: dict[str, Any]
) -> Strategy:
    """The mechanism of least error at the amplified claim; without an epsilon, for the order's steps without draws."""
    if claim["epsilon"] is not None:
        return choose(work, order, limits.state, objective, max_cost=limits.chosen_cost, **claim)[0].strategy
    found = choose(work, order.without_draws(), limits.state, objective, max_cost=limits.chosen_cost)
    for one in found:
        try:
            check_fits(one.strategy, order)
        except PlanError:  # accounted for other orders
            continue
        return one.strategy
    return Independent(order.n)


def _within(found: Strategy, limits: Allowed, selected: bool) -> Strategy:
    """The strategy, if it keeps to what was asked of it."""
    if selected and found.state_rows:
        raise _keeps(f"{found.describe()} keeps {found.state_rows} vectors")
    if limits.state is not None and found.state_rows > limits.state:
        raise PlanError(
            f"memory allows the mechanism {limits.state} vectors of the model's size, but {found.describe()} "
            f"keeps {found.state_rows}; give more, or mechanism 'auto'"
        )
    if limits.cost is not None and rows_touched(found) > limits.cost:
        raise PlanError(
            f"max_cost allows {limits.cost:g} rows a step, but {found.describe()} takes {rows_touched(found):.3g}; "
            "give more, or mechanism 'auto'"
        )
    return found


def _keeps(got: str) -> PlanError:
    return PlanError(
        "a selection needs noise that is made for the chosen rows alone, without a state between steps: mechanism "
        f"'independent' (or 'auto'), 'banded inverse' or 'tree', got {got}"
    )


_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kMGT]i?)?B")
_UNITS = {None: 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
          "ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip


def vectors(memory: int | str | None, model_size: int | None, secure: bool) -> int | None:
    """Vectors of the model's size that the memory holds."""
    if memory is None:
        if model_size is not None:
            raise ArgumentError("model_size must come with memory in bytes, such as '2 GB', which it turns to vectors")
        return None
    if secure:
        raise ArgumentError("memory must not be given with secure: exact integers keep no vectors; see print(plan)")
    if not isinstance(memory, str):
        if model_size is not None:
            raise ArgumentError(f"model_size must come with memory in bytes, such as '2 GB', got memory={memory!r}")
        return checks.integer("memory", memory, low=0)
    found = _BYTES.fullmatch(memory)
    if found is None:
        raise ArgumentError(f"memory must be a number of vectors, or bytes such as '512 MB' or '2 GiB', got {memory!r}")
    if model_size is None:
        raise ArgumentError(f"model_size must be given with memory in bytes, got memory={memory!r}")
    return int(float(found[1]) * _UNITS[found[2]] / (4 * checks.integer("model_size", model_size, low=1)))
