"""Which parts of a plan fit together: relations of neighbours, exact integers, selections of rows."""

from anyorder.accounting.selection import Selection, check_selection
from anyorder.errors import PlanError
from anyorder.noise.discrete import check_combination
from anyorder.participation import Participation, PoissonSampling
from anyorder.strategy import Combination, Independent, Strategy

__all__ = ["check_exact", "check_neighbours", "check_selected", "moves_others"]


def check_neighbours(neighbours: str, order: Participation, chosen: Strategy) -> None:
    if order.secret:
        if type(order) is not PoissonSampling:
            raise PlanError(f"plans are not accounted for {order.describe()}")
        if type(chosen) is not Independent:
            raise PlanError(f"PoissonSampling is accounted for independent noise only, got {chosen!r}")
        if neighbours != "add-or-remove":
            raise PlanError(f"PoissonSampling is accounted for add-or-remove neighbours only, got {neighbours!r}")
    elif neighbours == "add-or-remove" and order.absence_moves_others:
        raise moves_others(type(order).__name__)


def moves_others(order: str) -> PlanError:
    """The error for add-or-remove neighbours in an order in which a unit's absence moves others."""
    return PlanError(
        f"neighbours 'add-or-remove' do not fit {order}: without one unit, a loader would put others into other "
        "batches; use 'zero-out' (its gradients replaced by zero) or 'replace-one'"
    )


def check_exact(neighbours: str, chosen: Strategy) -> None:
    """On a grid, a unit must change nothing but its own integers, and noise must be computable to any precision."""
    check_combination(chosen)
    if neighbours == "add-or-remove":
        raise PlanError(
            "exact integers (grid, secure) need neighbours 'zero-out' or 'replace-one', got 'add-or-remove' (which "
            "Poisson sampling implies): a batch with one unit less has another shape, in which the floating-point "
            "gradients of the other units may differ in their last bits, and so their integers too"
        )


def check_selected(selection: Selection | None, chosen: Strategy, secure: bool, on_device: tuple[str, ...]) -> None:
    """Noise must be made for the chosen rows alone, in floating point, from sums that are made here."""
    check_selection(selection)
    if selection is None:
        return
    if not isinstance(chosen, Combination) or chosen.state_rows:
        raise PlanError(
            "a selection needs a strategy that makes the noise of the chosen rows alone and keeps nothing between "
            f"steps: Independent, BandedInverse or Tree(.., regenerate=True), got {chosen!r}; or train the whole table "
            "lazily, without a selection"
        )
    if secure:
        raise PlanError("exact integers (grid, secure) are not made for a selection of rows: plan without one of them")
    if on_device:
        raise PlanError(f"a selection needs the units' own rows, and on_device={on_device!r} leaves them on devices")
