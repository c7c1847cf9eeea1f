"""The noise of a plan beside that of other mechanisms with the same promise: quick enough for a file of a stranger.

A function of the plan alone. What would take long is left out, by counts and never by a clock.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting import gdp_mu
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.errors import CertificateError, PlanError
from anyorder.formats import bounded
from anyorder.participation import KnownOrder, Participation, PoissonSampling
from anyorder.plan.cost import check_plan
from anyorder.plan.plan import Plan
from anyorder.strategy import Independent, Strategy, Tree
from anyorder.strategy.error import row_variances
from anyorder.strategy.registry import Structure, kind_of
from anyorder.strategy.sensitivity import known_sensitivity, sensitivity
from anyorder.workload import prefix_sum

__all__ = ["Profile", "draws_noise", "noise_beside", "sampled_noise"]

Floats = NDArray[np.float64]

_MOST_STEPS = 1 << 15
_MOST_DENSE = 1536  # steps of what is made as a matrix
_MOST_STATE = 1 << 26  # steps times the square of the state
_LEAST_SIGMA, _MOST_SIGMA = 0.3, 1e5
_POINTS, _GRID = 1 << 13, 1 << 15  # of one step, and of the sum of all


@dataclass(frozen=True)
class Profile:
    """The noise of one mechanism.

    Attributes:
        name: for people.
        std: (n,) of one coordinate of each prefix sum of gradients, in clip norms.
    """

    name: str
    std: Floats

    @property
    def mean(self) -> float:
        """Root mean square over steps."""
        return float(np.sqrt(np.square(self.std).mean()))


def draws_noise(plan: Plan) -> bool:
    """Whether the noise of each step takes little enough time."""
    kind, n = kind_of(plan.strategy).structure, plan.n
    if kind in (Structure.DENSE, Structure.LOW_RANK, Structure.RESCALED):
        return n <= _MOST_DENSE
    return n <= _MOST_STEPS and n * plan.strategy.state_rows**2 <= _MOST_STATE


def noise_beside(plan: Plan) -> list[Profile]:
    """This plan, independent noise and the binary tree in its order, and DP-SGD with secret Poisson sampling.

    All at the plan's epsilon and delta, unit, neighbours, clip norm, steps and (expected) batch size. In an order by
    secret coins the others are as if its batches were known, so that what the secret gains shows. The last is there
    where the number of units is public, and neighbours are not "replace-one"; see `sampled_noise`.

    Returns: in the order above; this plan alone where it selects rows, as its budget is then for two releases.
    Cost: below half a second for 1000 steps.
    Raises: PlanError where the noise would take long, see `draws_noise`.
    """
    if not draws_noise(plan):
        raise PlanError(f"the noise of {plan.strategy.describe()} takes long for {plan.n} steps, and is not drawn here")
    found = [Profile("this run", plan.noise_profile(sums=True))]
    if plan.selection is not None or plan.epsilon == 0:
        return found
    alike = " if batches were known" if plan.participation.secret else ", same order"
    for name, strategy in (("independent noise", Independent(plan.n)), ("binary tree", Tree(plan.n, "full"))):
        if type(strategy) is type(plan.strategy) and not plan.participation.secret:
            continue
        std = _known_noise(plan, strategy)
        if std is not None:
            found.append(Profile(name + alike, std))
    rows = type(plan.participation) is KnownOrder and plan.unit != "example"  # what a loader counts, not its units
    q = None if plan.dataset_size is None or rows else plan.batch_size / plan.dataset_size
    own = type(plan.participation) is PoissonSampling
    if q is not None and q < 1 and not own and plan.neighbours != "replace-one":
        sigma = sampled_noise(q, plan.n, plan.epsilon, plan.delta)
        if sigma is not None:
            found.append(Profile("DP-SGD, secret Poisson sampling", sigma * np.sqrt(np.arange(1, plan.n + 1))))
    return found


def _known_noise(plan: Plan, strategy: Strategy) -> Floats | None:
    """The noise of a mechanism at the plan's promise, in its order with nothing secret; None where it takes long.

    Also of a file of one's own, so that it is the same report whoever makes it.
    """
    order: Participation = plan.participation
    try:
        with bounded(True):
            if not order.secret:
                check_plan({**plan.to_dict(), "strategy": strategy.to_dict()})
            sens = known_sensitivity(strategy, order) if order.secret else sensitivity(strategy, order)
    except CertificateError:
        return None
    multiplier = NEIGHBOURS[plan.neighbours] * sens.value / gdp_mu(plan.epsilon, plan.delta)
    return np.asarray(multiplier * np.sqrt(row_variances(strategy, prefix_sum(plan.n))))


def sampled_noise(q: float, n: int, epsilon: float, delta: float) -> float | None:
    """The noise multiplier that n steps of DP-SGD need with secret Poisson sampling, for a picture and not for a claim.

    The law of the privacy loss of a step on a grid, to the power of n by a Fourier transform [Koskela et al. 2020], in
    both directions of neighbours: within a percent of what `anyorder.accounting.poisson_epsilon`, which rounds to the
    safe side, asks for, in a fraction of its time.

    Args:
        q: sampling probability, between 0 and 1.
        n: steps.
        epsilon, delta: the promise.
    Returns: None where noise between 0.3 and 10^5 clip norms does not meet it.
    Cost: about 0.3 s.
    """
    low, high = _LEAST_SIGMA, 1.0
    while _sampled_delta(q, n, high, epsilon) > delta:
        low, high = high, 2 * high
        if high > _MOST_SIGMA:
            return None
    if low == _LEAST_SIGMA and _sampled_delta(q, n, low, epsilon) <= delta:
        return None
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _sampled_delta(q, n, middle, epsilon) <= delta else (middle, high)
    return high


def _sampled_delta(q: float, n: int, sigma: float, epsilon: float) -> float:
    """About the delta at which n sampled steps keep epsilon: the larger of the two directions."""
    x = np.linspace(-10 * sigma, 1 + 10 * sigma, _POINTS)
    without = np.exp(-np.square(x / sigma) / 2)
    beside = np.exp(-np.square((x - 1) / sigma) / 2)
    without, beside = without / without.sum(), beside / beside.sum()
    loss = np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2)))
    ways = ((loss, (1 - q) * without + q * beside), (-loss, without))
    return max(_composed_delta(losses, chances, n, epsilon) for losses, chances in ways)


def _composed_delta(losses: Floats, chances: Floats, n: int, epsilon: float) -> float:
    mean = float(chances @ losses)
    spread = math.sqrt(max(float(chances @ np.square(losses - mean)), 1e-18))
    span = 12 * math.sqrt(n) * spread + float(np.abs(losses).max())  # on both sides of the mean of the sum
    width = 2 * span / _GRID
    place = (losses - mean) / width
    below = np.floor(place).astype(np.int64)
    part = place - below
    one = np.bincount(below % _GRID, chances * (1 - part), _GRID)
    one += np.bincount((below + 1) % _GRID, chances * part, _GRID)
    total = np.fft.irfft(np.fft.rfft(one) ** n, _GRID)
    sums = n * mean + width * np.fft.fftfreq(_GRID, 1 / _GRID)
    beyond = sums > epsilon
    return float(total[beyond] @ -np.expm1(epsilon - sums[beyond]))
