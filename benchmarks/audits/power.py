"""What one run shows of a mechanism: scores that know C beside plain products, at a true epsilon of 8.

Ours is the whitened score, the peer's the plain sum over a canary's steps; 1000 canaries, delta 1e-5, one run each.

- *share of mu*: mean over noise of a score, from its exact weights, over the mu of what is released. For the tree
  estimators that lose information also the mu that the plan claims over that.
- *measured*: (mean of included - mean of others) / std of one run, over the same mu.
- *bound*: the lower bound of epsilon at confidence 0.95, the mean over runs; and in how many runs the whitened one is
  not below the plain one. A single bound moves by a unit or two.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import anyorder as ao
from anyorder.audit import Canaries, epsilon_lower_bound, plant, scores
from anyorder.audit.canaries import as_released, visible, worst_steps
from anyorder.participation import EpochShuffle, FixedOrder
from anyorder.patterns import Participation
from anyorder.strategy import BandedInverse, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.low_rank import BandedLowRank
from anyorder.strategy.rescaled import Rescaled
from anyorder.workload import prefix_sum
from benchmarks._report import Row, judged

EPSILON, DELTA, COUNT = 8.0, 1e-5, 1000

Floats = NDArray[np.float64]


class Case(NamedTuple):
    """A strategy, or the words of one, for an order."""

    name: str
    order: Callable[[int], Participation]
    mechanism: Callable[[int], Strategy | str]


def _fixed(n: int) -> Participation:
    return FixedOrder(n, 4, n // 4)


def _shuffled(n: int) -> Participation:
    return EpochShuffle(4, n // 4)


def _bisr(bands: int) -> Callable[[int], Strategy]:
    return lambda n: BandedInverse.from_square_root(prefix_sum(n), min(bands, n))


def _dense(n: int) -> Strategy:
    return ao.optimize.fit("dense", prefix_sum(n), _fixed(n))


def _rescaled(n: int) -> Strategy:
    return Rescaled(SquareRoot(n), np.linspace(1, 2, n))


CASES = (
    Case("tree, full", _fixed, lambda n: Tree(n, "full")),
    Case("tree, online", _fixed, lambda n: Tree(n, "online")),
    Case("tree, vanilla", _fixed, lambda n: Tree(n, "vanilla")),
    Case("blt, 2 buffers", _fixed, lambda n: "blt, 2 buffers"),
    Case("banded, 16 bands", _fixed, lambda n: "banded, 16 bands"),
    Case("banded toeplitz, 16 bands", _fixed, lambda n: ToeplitzBanded.from_square_root(prefix_sum(n), 16)),
    Case("BISR, 4 bands", _fixed, _bisr(4)),
    Case("BISR, 64 bands", _fixed, _bisr(64)),
    Case("square root", _fixed, SquareRoot),
    Case("dense", _fixed, _dense),
    Case("banded low rank", _fixed, lambda n: BandedLowRank.approximate(_dense(n), num_bands=8, rank=4)),
    Case("restarted blt", _shuffled, lambda n: "restarted blt, 2 buffers"),
    Case("square root, rescaled", _fixed, _rescaled),
)


def rows(quick: bool) -> Iterator[Row]:
    """Shares of mu and bounds, for every correlated strategy; then the shares of 1000 steps in 10 epochs."""
    for n in (64,) if quick else (64, 256):
        for case in CASES:
            yield from _case(case, n, runs=4 if quick else 20)
    n, pattern = 1000, [*range(0, 1000, 100)]
    for name, strategy in (
        ("BISR, 4 bands", _bisr(4)(n)),
        ("BISR, 64 bands", _bisr(64)(n)),
        ("square root", SquareRoot(n)),
    ):
        whitened, plain = _shares(strategy, pattern)
        yield Row(f"{name}: share of mu, 1000 steps, 10 epochs", whitened, plain, whitened / plain, "of mu")


def _case(case: Case, n: int, runs: int) -> Iterator[Row]:
    order = case.order(n)
    plan = ao.plan(order=order, batch_size=1, epsilon=EPSILON, delta=DELTA, mechanism=case.mechanism(n))
    steps = worst_steps(plan.strategy, order)
    whitened, plain = _shares(plan.strategy, steps)
    label = f"{case.name}, {n} steps"
    yield Row(judged(f"{label}: share of mu", 0.95, whitened), whitened, plain, whitened / plain, "of mu")
    mu = visible(as_released(plan.strategy), [steps])[0] / plan.noise_multiplier
    if as_released(plan.strategy) is not plan.strategy:
        claimed = visible(plan.strategy, [steps])[0] / plan.noise_multiplier
        yield Row(f"{label}: mu released (ours), claimed (peer)", mu, claimed, claimed / mu, "mu")
    found = [_run(plan, steps, seed) for seed in range(runs)]
    measured, bare = (float(np.mean([_mu(run[i], run[2]) for run in found])) / mu for i in (0, 1))
    yield Row(f"{label}: share of mu, measured", measured, bare, measured / bare, "of mu")
    for method in ("f_dp", "one_run"):
        bounds = np.array(
            [[epsilon_lower_bound(run[i], run[2], DELTA, method=method) for i in (0, 1)] for run in found]
        )
        ours, peer = bounds.mean(axis=0).tolist()
        ratio = ours / peer if peer else float("inf")
        above = int((bounds[:, 0] >= bounds[:, 1]).sum())
        yield Row(
            judged(f"{label}: bound, {method} ({above} of {runs} runs)", 1.0, ratio), ours, peer, ratio, "epsilon"
        )


def _shares(strategy: Strategy, steps: Sequence[int]) -> tuple[float, float]:
    """Mean over noise of the whitened and of the plain score, over the most that any score of the release can have."""
    n, K = strategy.n, strategy.noising_matrix()
    pi = np.isin(np.arange(n), [*steps])
    best = np.sqrt(pi @ np.linalg.solve(K @ K.T, pi.astype(np.float64)))
    single = Canaries(n, n, n, 0)  # canary t is +-1 in coordinate t: its score is the weight of row t
    signs = single.dot(np.ones(n))

    def share(whiten: bool) -> float:
        weights = signs * scores(np.eye(n), as_released(strategy), [*steps], single, whiten=whiten)
        return float(weights[pi].sum() / np.linalg.norm(weights @ K) / best)

    return share(True), share(False)


def _run(plan: ao.Plan, steps: tuple[int, ...], seed: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Whitened scores, plain scores, and the coins of one run of nobody."""
    canaries = Canaries(COUNT, COUNT, COUNT, seed)
    release = ao.Release(plan, COUNT, key=bytes([seed]) * 32)
    planted = plant(release, canaries, steps, key=bytes([seed + 100]) * 32, totals=True)
    for _ in range(plan.n):
        release.step([], np.zeros(COUNT))
    result = planted.result()
    plain = scores(planted.released, plan.strategy, steps, canaries, whiten=False)
    return result.scores, plain, result.included


def _mu(found: Floats, included: NDArray[np.bool_]) -> float:
    spread = np.sqrt((found[included].var() + found[~included].var()) / 2)
    return float((found[included].mean() - found[~included].mean()) / spread)
