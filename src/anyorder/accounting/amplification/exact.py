"""Loss distributions of secret orders where they are known: cyclic and truncated Poisson, bins of orthogonal means.

sigma = noise std / clip norm throughout. Every epsilon and delta here is at or above the true one; the grids behind
them are redrawn for each sigma, so that they fall in sigma up to about 1e-3 of themselves.

**Cyclic Poisson.** The columns of one group's steps do not overlap, so that the steps of a unit are ceil(n / cycle)
sampled Gaussians of deviation sigma / max_t |C e_t| [Choquette-Choo et al. 2023]; directions may depend on what came.

**Truncated Poisson** [dp-accounting, `TruncatedSubsampledGaussianDpEvent`; arXiv 2508.15089]. Batches of at most B of
the N units of a group. Let r be the number of others that were drawn, r ~ Bin(N - 1, q).

    r < B    nobody is cut: the Gaussian sampled with q, of sensitivity 1.
    r >= B   the batch is a uniform B of the others, V, or with probability p the unit and a uniform B - 1 of them, U;
             p = P(unit stays | r >= B), and neither law depends on r. Take U as V less a uniform member v: then

                 with the unit     (1 - p) N(U + v) + p N(U + x)
                 without it        (1 - p) N(U + v) + p N(U)

             Seen from U + v its two parts are the vectors x - v and -v, of norm at most 2 and 1; the pair of +2 and
             -2 with probability p in both dominates ("replace-one" at half of sigma; loose, but what is known).

To tell which case it is can only help: the mixture of both pairs, joint convexity. It rests on these: the choice of
who stays is uniform and secret, as the coins are; N counts all units of the group and is public; without the unit its
place is kept, with zero for its gradient (zero-out). A group's size may be one more than another's, and neither is
always worse: the larger delta of both is taken. With coins that are known a unit moves the sums by its own gradients
alone, so that mu = sqrt(steps) / sigma holds too.

**Orthogonal means.** See `lognormals`; k epochs of allocation anew are k such ratios, composed.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.accounting.amplification.lognormals import LARGEST, Ratio, mean_of_lognormals
from anyorder.accounting.amplification.mixture import check_fits, reach
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon
from anyorder.accounting.poisson import step_interval
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation.sampled import BallsInBins, CyclicPoisson, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Strategy

__all__ = [
    "cyclic_parts", "diagonal_kinds", "diagonal_losses", "epochs_delta", "epochs_epsilon", "group_sizes", "pld_delta",
    "pld_epsilon", "ratio_of", "rough_truncated", "truncated_losses",
]  # fmt: skip

Floats = NDArray[np.float64]
Known = TruncatedPoisson | BallsInBins | RandomAllocation

_DOWN, _UP = 1 - 2.0**-50, 1 + 2e-10  # roundings of a deviation, and of an inverted loss distribution
_POINTS = 5e5  # of a grid of losses
_COARSE = 8.0  # times the interval of a grid, where it need not be near
_FINE = 40  # points in a deviation of one epoch's loss


def cyclic_parts(strategy: Strategy, rule: CyclicPoisson | TruncatedPoisson, sigma: float) -> tuple[float, float, int]:
    """(deviation over sensitivity, probability, steps) of the sampled Gaussians that a unit meets.

    Args:
        strategy: C; its columns that are `cycle` steps apart or more do not overlap.
        sigma: noise std / clip norm, above 0.
    Returns: sigma / max column norm, rounded down; q; ceil(n / cycle).
    Raises: PlanError for another C; ArgumentError.
    """
    sigma = _check.positive("sigma", sigma)
    check_fits(strategy, rule)
    largest = math.sqrt(float(strategy.column_norms_squared().max())) * (1 + 2.0**-48)
    return sigma / largest, rule.sampling_probability, -(-rule.n // rule.cycle)


def pld_epsilon(strategy: Strategy, participation: Known, sigma: float, delta: float) -> float:
    """The epsilon at delta, both directions, at or above the true one, of an order whose loss distribution is known.

    Args:
        strategy: C that `check_fits` takes; columns that do not overlap, for balls in bins and allocation.
        participation: TruncatedPoisson (zero-out), BallsInBins or RandomAllocation (add-or-remove).
        sigma: noise std / clip norm, above 0.
        delta: strictly between 0 and 1.
    Returns: never above that of known batches; that one where a ratio's logarithm has a variance above 200.
    Cost: truncated Poisson up to some seconds; 2 to 4 s for bins up to b = 1000 of equal norms, whatever k.
    Raises: ArgumentError; PlanError; MissingDependencyError without dp-accounting, but for one epoch.
    """
    sigma, delta = _check.positive("sigma", sigma), _check.probability("delta", delta)
    check_fits(strategy, participation)
    match participation:
        case TruncatedPoisson():
            return _truncated_epsilon(strategy, participation, sigma, delta)
        case BallsInBins() | RandomAllocation():
            return epochs_epsilon(_diagonals(strategy, participation), sigma, delta)
        case _:
            assert_never(participation)


def pld_delta(strategy: Strategy, participation: Known, sigma: float, epsilon: float) -> float:
    """The delta at epsilon >= 0, at or above the true one; see `pld_epsilon`."""
    sigma, epsilon = _check.positive("sigma", sigma), _check.real("epsilon", epsilon, low=0.0)
    check_fits(strategy, participation)
    match participation:
        case TruncatedPoisson():
            return _truncated_delta(strategy, participation, sigma, epsilon)
        case BallsInBins() | RandomAllocation():
            return epochs_delta(_diagonals(strategy, participation), sigma, epsilon)
        case _:
            assert_never(participation)


def epochs_epsilon(diagonals: ArrayLike, sigma: float, delta: float) -> float:
    """Epsilon at delta of one draw of a bin in each epoch, where the means of an epoch's bins are orthogonal.

    Args:
        diagonals: (k, b) squared norms of the means m_j of each epoch: (1, b) for balls in bins; ones for C = I.
        sigma, delta: as in `pld_epsilon`.
    """
    found = _ratios(diagonals, sigma)
    known = gdp_epsilon(found.mu, delta)
    if known == 0 or not found.ratios:
        return known
    if found.epochs == 1:
        ratio = found.ratios[0][0]
        return min(known, _inverted(lambda epsilon: max(ratio.remove(epsilon), ratio.add(epsilon)), delta, known))
    losses, rounding = _epochs(found)
    if delta <= 2 * rounding:
        return known
    return min(known, float(losses.get_epsilon_for_delta(delta - rounding)) * _UP)


def epochs_delta(diagonals: ArrayLike, sigma: float, epsilon: float) -> float:
    """Delta at epsilon of one draw of a bin in each epoch; see `epochs_epsilon`."""
    found = _ratios(diagonals, sigma)
    known = gdp_delta(found.mu, epsilon)
    if known == 0 or not found.ratios:
        return known
    if found.epochs == 1:
        ratio = found.ratios[0][0]
        return min(known, max(ratio.remove(epsilon), ratio.add(epsilon)))
    losses, rounding = _epochs(found)
    return min(known, max(0.0, float(losses.get_delta_for_epsilon(epsilon))) * _UP + rounding)


def diagonal_losses(pld: Any, diagonal: ArrayLike, sigma: float, h: float) -> Any:
    """The pessimistic loss distribution of dp-accounting, both directions, of bins of orthogonal means.

    Args:
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        diagonal: (b,) squared norms of the means.
        h: interval of its grid.
    Raises: ArgumentError where a squared norm is above 200 sigma^2: the Gaussian of the largest says as much.
    """
    variances = _check.array("diagonal", diagonal, ndim=1) / sigma**2
    if variances.min() < 0 or variances.max() > LARGEST:
        raise ArgumentError(
            f"diagonal / sigma^2 must lie in [0, {LARGEST:g}], got {variances.min():g} to {variances.max():g}; with so "
            "little noise secrecy hides next to nothing: take the bound for known batches"
        )
    return ratio_of(tuple(variances)).losses(pld, h)


class _Ratios:
    """What epochs of bins come to: the mu of known batches, and the ratio of each kind of epoch with their number."""

    def __init__(self, mu: float, ratios: Sequence[tuple[Ratio, int]], largest: float) -> None:
        self.mu, self.ratios, self.largest = mu, ratios, largest
        self.epochs = sum(count for _, count in ratios)


def _ratios(diagonals: ArrayLike, sigma: float) -> _Ratios:
    variances = _check.array("diagonals", diagonals, ndim=2) / _check.positive("sigma", sigma) ** 2
    if variances.min() < 0:
        raise ArgumentError(f"diagonals must not be negative, got {variances.min():g}")
    largest = float(variances.max())
    mu = math.sqrt(float(variances.max(axis=1).sum())) / _DOWN
    if not 0 < largest <= LARGEST:
        return _Ratios(mu, [], largest)
    return _Ratios(mu, [(ratio_of(kind), count) for kind, count in _kinds(variances)], largest)


@lru_cache(maxsize=16)
def ratio_of(variances: tuple[float, ...]) -> Ratio:
    """The mean of lognormals of these variances."""
    return mean_of_lognormals(np.array(variances))


def _epochs(found: _Ratios) -> tuple[Any, float]:
    """(loss distribution of all epochs together, what its transforms may take from delta)."""
    pld = _check.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for epochs of bins"
    )
    deviations = [(ratio.deviation(), count) for ratio, count in found.ratios]
    whole = math.sqrt(sum(count * deviation**2 for deviation, count in deviations))
    far = found.largest / 2 + 10 * math.sqrt(found.largest)  # of one epoch's loss
    span = 2 * far + 10 * whole + whole**2
    h = max(whole / math.sqrt(found.epochs) / _FINE, span / _POINTS)
    parts = [ratio.losses(pld, h).self_compose(count) for ratio, count in found.ratios]
    rounding = (found.epochs + 16 * (2 * len(parts) - 1)) * 2.0**-53
    return reduce(lambda one, other: one.compose(other), parts), rounding


def _inverted(delta_at: Any, delta: float, known: float) -> float:
    """The least epsilon, to 1e-9 of it, at which a curve is at most delta; `known` holds."""
    if delta_at(0.0) <= delta:
        return 0.0
    outside, inside = 0.0, known
    while inside - outside > 1e-9 * inside:
        middle = (outside + inside) / 2
        outside, inside = (outside, middle) if delta_at(middle) <= delta else (middle, inside)
    return inside


def _diagonals(strategy: Strategy, participation: BallsInBins | RandomAllocation) -> Floats:
    """(k or 1, b) squared norms of the means of bins, of a C whose columns do not overlap."""
    if reach(strategy) != 1:
        raise PlanError(
            f"the loss distribution is known for a C whose columns do not overlap, such as Independent, got "
            f"{strategy!r}: take the deterministic bound, or Monte Carlo"
        )
    squares = strategy.column_norms_squared().reshape(participation.k, participation.b)
    return squares if type(participation) is RandomAllocation else squares.sum(axis=0, keepdims=True)


def rough_truncated(strategy: Strategy, rule: TruncatedPoisson, sigma: float, delta: float) -> float:
    """About `pld_epsilon`, on a coarse grid, for searches over sigma."""
    return _truncated_epsilon(strategy, rule, sigma, delta, coarse=_COARSE)


def _truncated_epsilon(
    strategy: Strategy, rule: TruncatedPoisson, sigma: float, delta: float, coarse: float = 1.0
) -> float:
    mu, rounding, losses = _truncated_parts(strategy, rule, sigma, coarse)
    known = gdp_epsilon(mu, delta)
    if delta <= 2 * rounding or not 0 < known < math.inf:
        return known
    found = losses()
    if any(one is None for one in found):
        return known
    return min(known, max(float(one.get_epsilon_for_delta(delta - rounding)) for one in found) * _UP)


def _truncated_delta(strategy: Strategy, rule: TruncatedPoisson, sigma: float, epsilon: float) -> float:
    mu, rounding, losses = _truncated_parts(strategy, rule, sigma)
    known = gdp_delta(mu, epsilon)
    if known <= rounding:
        return known
    found = losses()
    if any(one is None for one in found):
        return known
    return min(known, max(max(0.0, float(one.get_delta_for_epsilon(epsilon))) for one in found) * _UP + rounding)


def _truncated_parts(
    strategy: Strategy, rule: TruncatedPoisson, sigma: float, coarse: float = 1.0
) -> tuple[float, float, Callable[[], list[Any]]]:
    """(mu of known batches, what transforms may take from delta, the loss distribution of each size of group)."""
    each, q, steps = cyclic_parts(strategy, rule, sigma)

    def losses() -> list[Any]:
        return [_truncated(each, q, steps, rule.batch_size, size, coarse) for size in group_sizes(rule)]

    return math.sqrt(steps) / each / _DOWN, (2 * steps + 16) * 2.0**-53, losses


def group_sizes(rule: TruncatedPoisson) -> set[int]:
    """Of its groups: they differ by one at most."""
    return {rule.dataset_size // rule.cycle, -(-rule.dataset_size // rule.cycle)}


@lru_cache(maxsize=4)
def _truncated(sigma: float, q: float, steps: int, batch_size: int, size: int, coarse: float = 1.0) -> Any:
    """The loss distribution of all steps for a group of `size` units; None where its grid cannot tell."""
    pld = _check.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for truncated batches"
    )
    h = coarse * max(step_interval(sigma, q, steps), step_interval(sigma / 2, q, steps, quick=False))
    if h > 100:  # losses in the millions
        return None
    return _truncated_steps(pld, sigma, q, steps, batch_size, size, h)


def truncated_losses(pld: Any, strategy: Strategy, rule: TruncatedPoisson, sigma: float, size: int, h: float) -> Any:
    """The pessimistic loss distribution of dp-accounting of all steps, on the grid h, for a group of `size` units."""
    each, q, steps = cyclic_parts(strategy, rule, sigma)
    return _truncated_steps(pld, each, q, steps, rule.batch_size, size, h)


def _truncated_steps(pld: Any, sigma: float, q: float, steps: int, batch_size: int, size: int, h: float) -> Any:
    from dp_accounting.privacy_accountant import NeighboringRelation

    one = pld.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=size,
        sampling_probability=q,
        truncated_batch_size=batch_size,
        noise_multiplier=sigma,
        value_discretization_interval=h,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )
    return one.self_compose(steps)


def diagonal_kinds(
    strategy: Strategy, participation: BallsInBins | RandomAllocation
) -> list[tuple[tuple[float, ...], int]]:
    """(squared norms of the means of bins, epochs of this kind), of a C whose columns are disjoint."""
    return _kinds(_diagonals(strategy, participation))


def _kinds(rows: Floats) -> list[tuple[tuple[float, ...], int]]:
    return list(Counter(tuple(row) for row in np.sort(rows, axis=1).tolist()).items())
