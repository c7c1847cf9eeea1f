"""What a plan costs for the neighbours of a budget, where that follows from the plan itself.

A plan releases sums with noise; for each relation the same noise covers how far one unit moves them.

    budget        plan             why
    the same      the same
    zero-out      replace-one      zero is one of the vectors that may replace a unit's: mu is that of zero-out, half
    replace-one   zero-out         from one vector to zero, and to the other: the sums move twice as far, mu doubles
    zero-out      add-or-remove    a unit that adds zero to the sums leaves them as one that is not there: the same mu,
                                   and under secret coins the same law of the output
    replace-one   add-or-remove    as from zero-out, where no coin is secret; else no bound is stated here

A plan for zero-out or replace-one says nothing of add-or-remove: what its run shows (how often units came, which steps
were full) may tell whether a unit was there at all. A curve without a plan is for its own relation alone: what made it
may be no sum.
"""

from dataclasses import replace

from anyorder.accounting.curves import Curve
from anyorder.errors import AnyorderError, BudgetError
from anyorder.plan import Plan

__all__ = ["check_relation", "plan_for"]

_FOLLOWS = {
    ("zero-out", "replace-one"), ("replace-one", "zero-out"),
    ("zero-out", "add-or-remove"), ("replace-one", "add-or-remove"),
}  # fmt: skip


def plan_for(plan: Plan, neighbours: str) -> Plan:
    """The plan whose curve holds for these neighbours: of the same release, read for another relation.

    A plan with secret coins for add-or-remove is returned as it is for zero-out, where its curve holds.
    Raises: BudgetError where none follows.
    """
    if plan.neighbours == neighbours:
        return plan
    if (neighbours, plan.neighbours) in _FOLLOWS and not (plan.amplified and neighbours != "zero-out"):
        if plan.amplified and plan.neighbours == "add-or-remove":
            return plan
        try:
            return replace(plan, neighbours=neighbours)
        except AnyorderError as problem:
            raise BudgetError(
                f"the plan is for {plan.neighbours} neighbours, the budget for {neighbours}: {problem}"
            ) from problem
    raise _other("plan", plan.neighbours, neighbours)


def check_relation(curve: Curve, unit: str, neighbours: str) -> None:
    """Raise BudgetError unless a curve without a plan is for this unit and these neighbours."""
    check_unit(curve.unit, unit)
    if curve.neighbours != neighbours:
        raise _other("curve", curve.neighbours, neighbours)


def check_unit(found: str, unit: str) -> None:
    """Raise BudgetError unless this is what the budget protects."""
    if found != unit:
        raise BudgetError(
            f"the budget is for one {unit!r}, and this is for one {found!r}: no sum of both is a bound for either. "
            f"Plan with unit={unit!r}, or keep a budget for each"
        )


def _other(what: str, found: str, neighbours: str) -> BudgetError:
    return BudgetError(
        f"the budget is for {neighbours} neighbours, and this {what} for {found}, from which nothing follows for them: "
        f"plan for {neighbours}, or make the budget with neighbours='zero-out', which takes plans for all three"
    )
