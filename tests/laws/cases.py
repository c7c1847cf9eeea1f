"""Every strategy, at any n, from the registry; every participation: a new one joins all laws with one line here."""

from collections.abc import Callable

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, Participation, SingleEpoch
from anyorder.strategy import Strategy
from anyorder.strategy.kinds import KINDS

STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    name: make for kind in KINDS for name, make in kind.examples.items()
}

PARTICIPATIONS: dict[str, Callable[[int], Participation]] = {
    "single epoch": SingleEpoch,
    "fixed order": lambda n: FixedOrder(n, k=-(-n // 3), b=3),
    "two epochs": lambda n: FixedOrder(n, k=2, b=-(-n // 2)),
    "one shuffled epoch": lambda n: EpochShuffle(1, n),
    "epochs of two steps": lambda n: EpochShuffle(n // 2, 2) if n % 2 == 0 else EpochShuffle(n, 1),
    "two shuffled epochs": lambda n: EpochShuffle(2, n // 2) if n % 2 == 0 else EpochShuffle(1, n),
    "any steps": lambda n: MinSeparation(n, b=1),
    "three steps": lambda n: MinSeparation(n, b=1, k=3),
    "separated": lambda n: MinSeparation(n, b=3),
    "separated twice": lambda n: MinSeparation(n, b=2, k=2),
    "known order": lambda n: KnownOrder([[t % 4, 10 + t * t % 7] for t in range(n)]),
    "empty steps": lambda n: KnownOrder([[t] if t == (n - 1) // 2 else [] for t in range(n)]),
}
