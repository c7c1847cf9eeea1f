"""What a threshold on noisy counts chooses, from public numbers: to be known before a run."""

import warnings
from math import sqrt
from typing import NamedTuple

from scipy.special import ndtr, ndtri

from anyorder import checks
from anyorder.accounting.selection import Counts
from anyorder.errors import ArgumentError, PlanError, SelectionWarning
from anyorder.plan.plan import Plan

__all__ = ["Chances", "chances", "threshold_for", "warn_of_chances"]


class Chances(NamedTuple):
    """How likely rows are to be chosen in a step.

    Attributes:
        untouched: probability of a row that nobody touches.
        rows_by_chance: mean number of rows of the tables that come so, were none touched.
        touched: probability of a row that the given units touch.
    """

    untouched: float
    rows_by_chance: float
    touched: float


def chances(plan: Plan, *, num_rows: int, units: float, rows_of_unit: int) -> Chances:
    """What a step of a plan with `Counts` chooses.

        untouched = Phi(-threshold / s),    rows_by_chance = untouched num_rows,    s = plan.selection_std
        touched = Phi((units min(1, count_norm / sqrt(rows_of_unit)) - threshold) / s)

    It spends no privacy: it looks at no data. Give it numbers that are public, or guesses.

    Args:
        num_rows: of all tables of the model together.
        units: of one batch that touch the row.
        rows_of_unit: distinct rows, of all tables, that each of them touches in a step.
    Raises: ArgumentError; PlanError for a plan without `Counts`.

    Example:
        >>> counts = ao.sparse.Counts(threshold=8.0, sigma=2.0)
        >>> plan = ao.plan(dataset_size=40, batch_size=4, epochs=1, noise_multiplier=1, delta=1e-5,
        ...                mechanism=ao.mechanism(selection=counts))
        >>> found = ao.sparse.chances(plan, num_rows=5000, units=25, rows_of_unit=6)
        >>> f"{found.rows_by_chance:.2f} rows come by chance, such a row with probability {found.touched:.2f}"
        '0.16 rows come by chance, such a row with probability 0.87'
    """
    rule, std = _counted(plan)
    rows = checks.integer("num_rows", num_rows, low=1)
    count = checks.real("units", units, low=0.0) * min(
        1.0, rule.count_norm / sqrt(checks.integer("rows_of_unit", rows_of_unit, low=1))
    )
    p = float(ndtr(-rule.threshold / std))
    return Chances(p, p * rows, float(ndtr((count - rule.threshold) / std)))


def threshold_for(plan: Plan, *, num_rows: int, rows_by_chance: float) -> float:
    """The threshold at which about so many rows that nobody touched are chosen in a step.

        threshold = -s Phi^-1(rows_by_chance / num_rows),    s = plan.selection_std

    Neither the noise nor epsilon depends on the threshold, so a plan may be made with any, and given this one:
    `replace(plan, selection=replace(plan.selection, threshold=..))`, with `dataclasses.replace`.

    Args:
        plan: with `Counts`; its threshold does not matter.
        num_rows: of all tables of the model together.
        rows_by_chance: mean number of them, between 0 and num_rows.
    Raises: ArgumentError; PlanError for a plan without `Counts`.

    Example:
        >>> counts = ao.sparse.Counts(threshold=0.0, sigma=2.0)
        >>> plan = ao.plan(dataset_size=40, batch_size=4, epochs=1, noise_multiplier=1, delta=1e-5,
        ...                mechanism=ao.mechanism(selection=counts))
        >>> round(ao.sparse.threshold_for(plan, num_rows=10**6, rows_by_chance=30), 3)
        8.026
    """
    _, std = _counted(plan)
    rows = checks.integer("num_rows", num_rows, low=1)
    wanted = checks.real("rows_by_chance", rows_by_chance)
    if not 0 < wanted < rows:
        raise ArgumentError(f"rows_by_chance must lie strictly between 0 and num_rows={rows}, got {rows_by_chance!r}")
    return float(-std * ndtri(wanted / rows))


def warn_of_chances(plan: Plan) -> None:
    """Warn (`SelectionWarning`) of a threshold that cannot tell touched rows from others, by public numbers alone."""
    if type(plan.selection) is not Counts:
        return
    rule, std = _counted(plan)
    share, most = float(ndtr(-rule.threshold / std)), plan.batch_size * min(1.0, rule.count_norm)
    advice = "; see ao.sparse.threshold_for and ao.sparse.chances"
    if share > 0.5:
        warnings.warn(
            f"threshold={rule.threshold:g} with noise of std {std:.3g} chooses {share:.0%} of all rows by chance at "
            f"every step: take one above 0, a few std{advice}",
            SelectionWarning,
            stacklevel=2,
        )
    elif rule.threshold > most:
        warnings.warn(
            f"threshold={rule.threshold:g} is more than a batch of {plan.batch_size} can count on a row, which is "
            f"{most:g} if every unit touches that row and no other: what is chosen comes by the noise alone, if any "
            f"does. Take a lower threshold, or larger batches{advice}",
            SelectionWarning,
            stacklevel=2,
        )


def _counted(plan: Plan) -> tuple[Counts, float]:
    rule, std = plan.selection, plan.selection_std
    if type(rule) is not Counts or std is None:
        raise PlanError(f"chances of rows need a plan with ao.mechanism(selection=ao.sparse.Counts(..)), got {rule!r}")
    return rule, std
