"""What a plan trusts to the clients' own devices, instead of the program that carries it out."""

from typing import Any

from anyorder.errors import ArgumentError, PlanError
from anyorder.participation import MinSeparation, Participation, SingleEpoch

__all__ = ["check_on_device", "trusted_text"]

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
    names there; and the coins of `PoissonSampling` must be tossed by who keeps them secret.

    Raises: ArgumentError for words that are none; PlanError for an order that no counter and timer can keep.
    """
    if not isinstance(given, (tuple, list)) or not all(isinstance(word, str) for word in given):
        raise ArgumentError(f"on_device must be a tuple of words, such as ('clipping',), got {given!r}")
    words = tuple(given)
    if len(set(words)) != len(words) or not set(words) <= _TEXTS.keys():
        raise ArgumentError(f"on_device must have each of {', '.join(map(repr, _TEXTS))} once at most, got {words!r}")
    if "record" in words and type(order) not in (SingleEpoch, MinSeparation):
        raise PlanError(
            f"on_device=('record',) needs SingleEpoch or MinSeparation, got {type(order).__name__}: a device has a "
            "counter and a timer, which tell how often it took part and how long ago, and nothing of epochs, planned "
            f"names or coins. Plan with participation=MinSeparation({order.n}, b=.., k=..), or let the server keep the "
            "record"
        )
    return tuple(word for word in _TEXTS if word in words)


def trusted_text(on_device: tuple[str, ...]) -> str:
    """The words in a sentence, for people."""
    return "; and ".join(_TEXTS[word] for word in on_device)
