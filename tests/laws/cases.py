"""Every strategy, at any n, and every participation: a new one joins all laws with one line here."""

from collections.abc import Callable

import numpy as np

from anyorder.participation import EpochShuffle, FixedOrder, KnownOrder, MinSeparation, Participation, SingleEpoch
from anyorder.strategy import (
    BLT,
    Banded,
    BandedInverse,
    BandedLowRank,
    Dense,
    Independent,
    Rescaled,
    RestartedBLT,
    SquareRoot,
    Strategy,
    ToeplitzBanded,
    Tree,
)
from anyorder.workload import prefix_sum


def _dense(n: int) -> np.ndarray:
    """Lower triangular, well conditioned, with entries of both signs."""
    i, j = np.indices((n, n))
    return np.cos(1 + i + 2 * j) / (1 + abs(i - j)) * (i >= j) + 2 * np.eye(n)


def _low_rank(n: int) -> BandedLowRank:
    bands = np.array([[1.0, 0.0 if t == 0 else -0.4] for t in range(n)])[:, : min(n, 2)]
    column = np.linspace(0.5, 1, n)[:, None]
    return BandedLowRank(bands, 0.1 * column, column[::-1])


def _restarts(n: int) -> tuple[int, ...]:
    return tuple(r for r in (n // 3, n // 3 + 1, 2 * n // 3 + 1) if 0 < r < n)


def _restarted(n: int, epochs: int = 3) -> RestartedBLT:
    """Epochs of their own parameters, the last one shorter where they do not divide n."""
    s = -(-n // epochs)
    k = np.arange(-(-n // s))
    decays, scales = [0.95, 0.5] - 0.1 * k[:, None], [0.2, 0.3] + 0.1 * k[:, None]
    return RestartedBLT(decays, scales, 0.8 - 0.4 * k, 1 - 0.2 * k, n, s)


STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "independent": Independent,
    "dense": lambda n: Dense(_dense(n)),
    "banded": lambda n: Banded(np.tril(_dense(n)) * (np.subtract.outer(range(n), range(n)) < 3)),
    "toeplitz banded": lambda n: ToeplitzBanded([1.0, 0.5, 0.25][:n], n),
    "square root": SquareRoot,
    "banded inverse": lambda n: BandedInverse.from_square_root(prefix_sum(n), min(n, 4)),
    "blt": lambda n: BLT([0.9, 0.4], [0.2, 0.1], n),
    "low rank": _low_rank,
    "rescaled": lambda n: Rescaled(SquareRoot(n), np.linspace(1, 2, n)),
    "restarted": _restarted,
    "restarted twice": lambda n: _restarted(n, 2),
    "tree": Tree,
    "tree online": lambda n: Tree(n, "online"),
    "tree full": lambda n: Tree(n, "full"),
    "tree online regenerated": lambda n: Tree(n, "online", regenerate=True),
    "tree full regenerated": lambda n: Tree(n, "full", regenerate=True),
    "tree restarts": lambda n: Tree(n, restarts=_restarts(n)),
    "tree completed": lambda n: Tree(n, restarts=_restarts(n), completion=True),
    "tree online completed": lambda n: Tree(n, "online", _restarts(n), completion=True),
    "tree online completed regenerated": lambda n: Tree(n, "online", _restarts(n), completion=True, regenerate=True),
    "tree full completed": lambda n: Tree(n, "full", _restarts(n), completion=True),
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
