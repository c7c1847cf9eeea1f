"""The orders that there are, one row each: the closed set that all claims are proven for.

An order is one file: its words and options, its pattern, what facts of a loader say that it is this one, what it
refuses, what it needs; and for a secret one its draws, the mechanisms that fit, and its amplified curve. Plans, checks
of loaders, the ledger, samplers, audits, the command line and the planner page ask the order, and list these rows.
"""

from typing import Literal

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.participation.balls_in_bins import BallsInBins
from anyorder.participation.cyclic_poisson import CyclicPoisson
from anyorder.participation.epoch_shuffle import EpochShuffle
from anyorder.participation.fixed_order import FixedOrder
from anyorder.participation.known_order import KnownOrder
from anyorder.participation.min_separation import MinSeparation
from anyorder.participation.min_separation_sampling import MinSeparationSampling
from anyorder.participation.poisson import PoissonSampling
from anyorder.participation.random_allocation import RandomAllocation
from anyorder.participation.single_epoch import SingleEpoch
from anyorder.participation.truncated_poisson import TruncatedPoisson
from anyorder.patterns import Asked, LoaderFacts, Participation, Word, check_order, close

__all__ = [  # what `anyorder.participation` offers
    "BallsInBins",
    "CyclicPoisson",
    "EpochShuffle",
    "FixedOrder",
    "KnownOrder",
    "MinSeparation",
    "MinSeparationSampling",
    "PoissonSampling",
    "RandomAllocation",
    "SingleEpoch",
    "TruncatedPoisson",
    "covers",
]

ORDERS: tuple[type[Participation], ...] = (
    SingleEpoch,
    EpochShuffle,
    FixedOrder,
    MinSeparation,
    KnownOrder,
    PoissonSampling,
    CyclicPoisson,
    TruncatedPoisson,
    BallsInBins,
    RandomAllocation,
    MinSeparationSampling,
)
"""All of them, by exact type, in the order in which they are listed."""

close(ORDERS)

WORDS: dict[str, tuple[Word, type[Participation]]] = {
    word.word: (word, order) for order in ORDERS for word in order.words
}
"""By the words that ask for them."""

OrderWord = Literal[
    "shuffled", "fixed", "sequential", "poisson", "cyclic-poisson", "truncated-poisson", "balls-in-bins",
    "random-allocation", "min-separation-sampling",
]  # fmt: skip
"""The words, for type checkers."""


def covers(planned: Participation, actual: Participation) -> bool:
    """True if the patterns of `actual`, within the planned steps, are known to be among those of `planned`.

    A known order covers whatever the ledger lets pass, step by step, so it is not judged here.
    """
    check_order(planned)
    check_order(actual)
    return planned.covers(actual)


def recognised(facts: LoaderFacts) -> Participation | None:
    """The order that a loader has, by what its samplers say; None where it is none of these. No two take it."""
    for cls in ORDERS:
        found = cls.recognise(facts)
        if found is not None:
            return found
    return None


def order_word(order: str) -> str:
    """The word as it is listed; "balls_in_bins" is "balls-in-bins". Raises: ArgumentError."""
    word = order.replace("_", "-") if isinstance(order, str) else order
    if isinstance(word, str) and (word == "any" or "," in word):
        raise ArgumentError(
            f"order must be one order in words here, got {order!r}: several are compared by ao.compare([..], ..) "
            "or `anyorder plan --order any`"
        )
    checks.choice("order", word, set(WORDS))
    return word


def words_with(option: str) -> tuple[str, ...]:
    """The words that an option comes with."""
    return tuple(word.word for word, _ in WORDS.values() if option in word.options)


def order_in_words(
    word: str,
    dataset_size: int,
    batch_size: int,
    epochs: int,
    drop_last: bool = False,
    cycle: int | None = None,
    most: int | None = None,
) -> Participation:
    """The order of so many passes over so many examples in batches of this size, expected where they are drawn.

    Args:
        word: of `WORDS`.
        dataset_size, batch_size, epochs: checked, batch_size at most dataset_size.
        drop_last: whether an epoch has floor, and not ceil, of dataset_size / batch_size steps.
        cycle: groups of cyclic sampling, 1 by default for truncated sampling; the least distance of two steps of a unit
            for sampling with separation.
        most: units of a truncated batch; by default batch_size + 3 sqrt(batch_size), rounded up.
    Raises: ArgumentError.
    """
    for name, value in (("cycle", cycle), ("max_batch_size", most)):
        if value is not None and word not in words_with(name):
            told = ", ".join(map(repr, words_with(name)))
            raise ArgumentError(f"{name} must come with order {told}, got order={word!r}")
    if word not in WORDS:
        raise ArgumentError(f"order must be one of {', '.join(WORDS)}, got {word!r}")
    steps = dataset_size // batch_size if drop_last else -(-dataset_size // batch_size)
    return WORDS[word][1].asked(Asked(dataset_size, batch_size, epochs, steps, cycle, most))
