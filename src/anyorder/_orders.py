"""Orders in words, and the public order whose steps those of a secret one are, for fits."""

from math import ceil, sqrt

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    MinSeparation,
    MinSeparationSampling,
    Participation,
    PoissonSampling,
    RandomAllocation,
    SingleEpoch,
    TruncatedPoisson,
)

__all__ = ["CYCLIC", "ORDERS", "known_order", "order_in_words", "order_word"]

ORDERS = (
    "shuffled", "sequential", "fixed", "poisson", "cyclic-poisson", "truncated-poisson", "balls-in-bins",
    "random-allocation", "min-separation-sampling",
)  # fmt: skip
CYCLIC = ("cyclic-poisson", "truncated-poisson", "min-separation-sampling")


def order_word(order: str) -> str:
    """The word as it is listed; "balls_in_bins" is "balls-in-bins". Raises: ArgumentError."""
    word = order.replace("_", "-") if isinstance(order, str) else order
    if isinstance(word, str) and (word == "any" or "," in word):
        raise ArgumentError(
            f"order must be one order in words here, got {order!r}: several are compared by ao.compare([..], ..) "
            "or `anyorder plan --order any`"
        )
    checks.choice("order", word, set(ORDERS))
    return word


def order_in_words(
    word: str,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    drop_last: bool = False,
    cycle: int | None = None,
    most: int | None = None,
) -> Participation:
    """The order of so many passes over so many examples in batches of this size, expected where coins draw them.

        steps in an epoch   s = ceil(dataset_size / batch_size)
        poisson             q = batch_size / dataset_size;  cyclic: q cycle, of the units of a group
        truncated           the same, cut to `most` units a step
        separation          p / (1 + (b - 1) p) = batch_size / dataset_size, b = cycle

    Args:
        word: of `ORDERS`.
        dataset_size, batch_size, epochs: checked, batch_size at most dataset_size.
        cycle: groups of cyclic sampling, 1 by default for truncated sampling; the least distance of two steps of a unit
            for sampling with separation.
        most: units of a truncated batch; by default batch_size + 3 sqrt(batch_size), rounded up.
    Raises: ArgumentError.
    """
    steps = dataset_size // batch_size if drop_last else -(-dataset_size // batch_size)
    n, share = epochs * steps, batch_size / dataset_size
    if cycle is not None and word not in CYCLIC:
        raise ArgumentError(f"cycle must come with order {', '.join(map(repr, CYCLIC))}, got order={word!r}")
    if most is not None and word != "truncated-poisson":
        raise ArgumentError(f"max_batch_size must come with order 'truncated-poisson', got order={word!r}")
    match word:
        case "poisson":
            return PoissonSampling(n, share)
        case "cyclic-poisson":
            groups = _cycle(cycle, word, share)
            return CyclicPoisson(n, groups, min(1.0, share * groups))
        case "truncated-poisson":
            groups = _cycle(1 if cycle is None else cycle, word, share)
            most = ceil(batch_size + 3 * sqrt(batch_size)) if most is None else most
            most = checks.integer("max_batch_size", most, low=1)
            return TruncatedPoisson(n, min(1.0, share * groups), min(most, dataset_size), dataset_size, groups)
        case "balls-in-bins":
            return BallsInBins(epochs, steps)
        case "random-allocation":
            return RandomAllocation(epochs, steps)
        case "min-separation-sampling":
            b = _cycle(cycle, word, share)
            return MinSeparationSampling(n, b, min(1.0, share / (1 - (b - 1) * share)))
        case "shuffled" | "sequential" | "fixed":
            if epochs == 1:
                return SingleEpoch(steps)
            return EpochShuffle(epochs, steps) if word == "shuffled" else FixedOrder(n, epochs, steps)
        case _:
            raise ArgumentError(f"order must be one of {', '.join(ORDERS)}, got {word!r}")


def _cycle(cycle: int | None, word: str, share: float) -> int:
    if cycle is None:
        raise ArgumentError(
            f"mechanism must have bands with order {word!r}, such as 'banded toeplitz, 8 bands', or be 'independent', "
            "where no cycle is given in Python: other mechanisms are not accounted for this order without one"
        )
    most = int(1 / share * (1 + 1e-12))
    return checks.integer("cycle", cycle, low=1, high=most)


def known_order(order: Participation) -> Participation:
    """The order of the same steps without coins: what a mechanism is fitted for, and others are themselves."""
    match order:
        case BallsInBins():
            return SingleEpoch(order.n) if order.k == 1 else FixedOrder(order.n, order.k, order.b)
        case RandomAllocation():
            return SingleEpoch(order.n) if order.k == 1 else EpochShuffle(order.k, order.b)
        case CyclicPoisson() | TruncatedPoisson() | PoissonSampling():
            cycle = 1 if type(order) is PoissonSampling else order.cycle
            rounds = -(-order.n // cycle)
            return SingleEpoch(order.n) if rounds == 1 else FixedOrder(order.n, rounds, cycle)
        case MinSeparationSampling():
            return SingleEpoch(order.n) if order.b >= order.n else MinSeparation(order.n, order.b)
        case _:
            return order
