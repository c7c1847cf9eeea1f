"""Which parts of a plan fit together: neighbours, secret draws, exact integers, selections of rows."""

from typing import Any

from anyorder.accounting.amplification.claims import check_method_fits, check_relation, default_method
from anyorder.accounting.amplification.methods import Method, check_method
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SecretOrder
from anyorder.accounting.selection import Selection, check_selection, refuse_selection
from anyorder.errors import ArgumentError, PlanError
from anyorder.noise.discrete import check_combination
from anyorder.patterns import Participation, check_order
from anyorder.strategy import Strategy
from anyorder.strategy.base import Combination


def check_neighbours(neighbours: str, order: Participation, chosen: Strategy) -> None:
    """The order and its mechanism are accounted for these neighbours."""
    check_order(order)
    if order.secret:
        check_fits(chosen, order)
    order.check_neighbours(neighbours)


def checked_method(method: Any, order: Participation, chosen: Strategy, neighbours: str) -> Method | None:
    """The method of a plan's claim: as given, or the order's own; None where there is but one way to account for it."""
    if isinstance(order, AmplifiedOrder):
        found = default_method(chosen, order) if method is None else check_method(method)
        check_method_fits(found, chosen, order)
        check_relation(neighbours, order, found)
        return found
    if method is not None:
        raise PlanError(
            f"method is how the claim of balls in bins, random allocation, truncated Poisson sampling or "
            f"sampling with separation is found, and must be None for {order.describe()}, got {method!r}"
        )
    return None


def check_secret(order: Participation, secure: bool, selection: Selection | None) -> None:
    """What orders by secret draws do not go with, beside those that are accounted with selections."""
    if not isinstance(order, SecretOrder) or order.takes_selection:
        return
    if secure:
        raise PlanError(
            f"exact integers (grid, secure) are not made where draws are secret, got {order.describe()}: plan without "
            "secure, or for another order"
        )
    refuse_selection(selection, order.describe())


def check_exact(neighbours: str, chosen: Strategy) -> None:
    """On a grid, a unit must change nothing but its own integers, and noise must be computable to any precision."""
    check_combination(chosen)
    if neighbours == "add-or-remove":
        raise PlanError(
            "exact integers (grid, secure) need neighbours 'zero-out' or 'replace-one', got 'add-or-remove' (which "
            "secret sampling implies): a batch with one unit less has another shape, in which the floating-point "
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


# ----------------------------------------------------------------------------------------------------
# What a plan trusts to the clients' own devices, instead of the program that carries it out.


_TEXTS = {
    "clipping": "each device to clip its own message, of which the server sees sums alone",
    "record": "each device to count and time its own messages: the server learns no ids, and no file shows who took "
    "part; someone with two devices is two",
}


def check_on_device(given: Any, order: Participation) -> tuple[str, ...]:
    """What is trusted to devices, in the order in which it is written down.

    A device knows its own past: how often it took part, and how long ago it last did. So it can keep `SingleEpoch` and
    `MinSeparation`, which are about these two alone, whatever the rounds are called. Where an epoch ends, or which
    rounds are a multiple of b after its first, is a matter of the server's counting; the units of a `KnownOrder` have
    names there; and the draws of `PoissonSampling` must be made by who keeps them secret.

    Raises: ArgumentError for words that are none; PlanError for an order that no counter and timer can keep.
    """
    if not isinstance(given, (tuple, list)) or not all(isinstance(word, str) for word in given):
        raise ArgumentError(f"on_device must be a tuple of words, such as ('clipping',), got {given!r}")
    words = tuple(given)
    if len(set(words)) != len(words) or not set(words) <= _TEXTS.keys():
        raise ArgumentError(f"on_device must have each of {', '.join(map(repr, _TEXTS))} once at most, got {words!r}")
    if "record" in words and not order.device_can_keep:
        raise PlanError(
            f"on_device=('record',) needs SingleEpoch or MinSeparation, got {type(order).__name__}: a device has a "
            "counter and a timer, which tell how often it took part and how long ago, and nothing of epochs, planned "
            f"names or draws. Plan with order=MinSeparation({order.n}, b=.., k=..), or let the server keep the "
            "record"
        )
    return tuple(word for word in _TEXTS if word in words)


def trusted_text(on_device: tuple[str, ...]) -> str:
    """The words in a sentence, for people."""
    return "; and ".join(_TEXTS[word] for word in on_device)
