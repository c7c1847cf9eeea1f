"""Lower bounds of privacy from an attack: which canaries were in, and how they scored.

A higher score always means "included". Every method is named by what it assumes:

    one_run          (epsilon, delta)-DP, any mechanism; fair independent draws            [Steinke et al. 2023]
    f_dp             f-DP, any mechanism; fair independent draws; an epsilon is that of the largest mu-GDP refuted
                                                                                           [Mahloujifar et al. 2024]
    gaussian         scores are normal, one standard deviation, independent: an estimate   [t statistic]
    clopper_pearson  pairs (score, included) are independent: many runs, one canary each   [Clopper & Pearson 1934]

A bound lies above the true value with probability 1 - confidence at most, where what it assumes holds. Whether a claim
is refuted is the matter of `p_value`, at a significance such as 1e-6: one in twenty of the claims that are true and
tight may lie under a bound at confidence 0.95.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln, log_ndtr, ndtri_exp

from anyorder import checks
from anyorder._numerics import crossing
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Gaussian, Sampled
from anyorder.accounting.gaussian import gdp_mu
from anyorder.audit import f_dp, many_runs, one_run
from anyorder.audit.f_dp import Claim
from anyorder.errors import ArgumentError

# ----------------------------------------------------------------------------------------------------
# Aligned scores as two normals with one standard deviation: the t statistic, and the exact interval of mu.
#
#     included ~ N(a + mu s, s^2),   others ~ N(a, s^2),   independent; a and s unknown
#     T = (mean included - mean others) / (S sqrt(1/n1 + 1/n0)) ~ noncentral t,  n1 + n0 - 2 degrees of freedom,
#                                                                  noncentrality mu sqrt(n1 n0 / (n1 + n0))
#
# An estimate: it is exact under this law, which the whitened scores of a Gaussian mechanism have, and says nothing
# elsewhere. The tails of the noncentral t are integrated here, in logs: those of SciPy lose all digits where they are
# small.


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_NOTHING = 1e-14  # spread, in the largest score: that of rounding
_GAP = 1e-6  # between the means, in the largest score: with such a spread, a mu of 10^8 or more
_DROP = 60.0  # of the log of the integrand, at the ends of the interval


def log_tail(t: float, df: int, shift: float) -> float:
    """Ln P[T > t] of the noncentral t with noncentrality `shift`; P[T < t] is that of -t and -shift.

        P[T > t] = E[Phi(shift - t S)],   df S^2 ~ chi^2 with df degrees of freedom

    The integrand is log-concave in S: Gauss-Legendre between the two points where it is e^-60 of its largest value,
    in pieces as narrow as the density of S and as the step of Phi. Relative error of P below 1e-11 for |t| <= 1e5 and
    df <= 1e5 (checked against the regularised beta function at shift 0 and against scipy where that is accurate).

    Cost: some 100 microseconds to 1 ms.
    """
    constant = math.log(2) + df / 2 * math.log(df / 2) - float(gammaln(df / 2))

    def log_integrand(s: NDArray[np.float64]) -> NDArray[np.float64]:
        power = (df - 1) * np.log(s) if df > 1 else 0.0
        return power - df / 2 * s * s + log_ndtr(shift - t * s)  # type: ignore[no-any-return]

    top, start, end = _support(log_integrand)
    pieces = np.linspace(start, end, 48)
    if t != 0:
        pieces = np.concatenate([pieces, np.clip((shift + np.linspace(-40, 40, 41)) / t, start, end)])
    pieces = np.unique(pieces)
    half = np.diff(pieces)[:, None] / 2
    s = pieces[:-1, None] + half * (1 + _NODES)
    total = float(np.sum(half * _WEIGHTS * np.exp(log_integrand(s) - top)))
    return min(0.0, constant + top + math.log(total))


def _support(log_integrand: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> tuple[float, float, float]:
    """(largest value, start, end) of a log-concave function on (0, inf): it is 60 below the largest outside."""
    low, high = -50.0, 50.0  # of ln s
    for _ in range(24):  # by thirds would be slower: a grid of 17, and the two intervals beside its best
        grid = np.linspace(low, high, 17)
        best = int(np.argmax(log_integrand(np.exp(grid))))
        low, high = grid[max(0, best - 1)], grid[min(16, best + 1)]
        if high - low < 1e-9:
            break
    mode = math.exp((low + high) / 2)
    top = float(log_integrand(np.array([mode]))[0])

    def edge(inside: float, outside: float) -> float:
        for _ in range(12):
            grid = np.linspace(inside, outside, 17)
            below = log_integrand(grid) < top - _DROP
            if not below.any():
                return outside
            first = int(below.argmax())
            inside, outside = float(grid[max(0, first - 1)]), float(grid[first])
            if abs(outside - inside) < 0.01 * abs(outside - mode):
                break
        return outside

    far = 2 * mode
    while float(log_integrand(np.array([far]))[0]) > top - _DROP:
        far *= 2
    return top, edge(mode, mode * 1e-30), edge(mode, far)


def _statistic(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> tuple[float, int, float]:
    """(t, degrees of freedom, noncentrality for mu = 1); t is infinite for a gap and no noise."""
    n1 = int(included.sum())
    n0 = len(scores) - n1
    if n1 == 0 or n0 == 0 or n1 + n0 < 3:
        raise ArgumentError(
            f"included must hold canaries of both kinds, three or more together, for the Gaussian law, got {n1} in and "
            f"{n0} out: use method='one_run' or 'f_dp', which do not need both"
        )
    scaled = scores / max(float(np.abs(scores).max()), 1e-300)
    inside, outside = scaled[included], scaled[~included]
    gap = float(inside.mean() - outside.mean())
    squares = float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum())
    df = n1 + n0 - 2
    weight = math.sqrt(n1 * n0 / (n1 + n0))
    spread = math.sqrt(squares / df)
    if spread <= _NOTHING and gap > _GAP:
        return math.inf, df, weight
    if spread <= _NOTHING:
        raise ArgumentError(
            "scores must spread among the included or the others for the Gaussian law, got equal ones: nothing tells "
            "the noise; use method='one_run' or 'f_dp'"
        )
    return gap / spread * weight, df, weight


def statistic(scores: NDArray[np.float64], included: NDArray[np.bool_]) -> float | None:
    """The t found: infinite where canaries stand out of no noise at all, None where nothing tells the noise."""
    try:
        return _statistic(scores, included)[0]
    except ArgumentError:
        return None


def chance(scores: NDArray[np.float64], included: NDArray[np.bool_], mu: float) -> float:
    """P[T >= the t found] under the law with this mu: a one-sided p-value, rounded up; uniform where the law holds."""
    t, df, weight = _statistic(scores, included)
    if math.isinf(t):
        return math.ulp(0.0)
    return min(1.0, max(math.exp(log_tail(t, df, mu * weight)) * (1 + 1e-9), math.ulp(0.0)))


def limits(scores: NDArray[np.float64], included: NDArray[np.bool_], below: float, above: float) -> tuple[float, float]:
    """(low, high): mu is under low with probability `below` and over high with probability `above`, exactly.

    low solves P[T > t | low] = below, high P[T < t | high] = above; both are rounded outwards, by 1e-9 of them.
    """
    t, df, weight = _statistic(scores, included)
    if math.isinf(t):
        raise ArgumentError(
            "scores must spread among the included or the others for an interval of mu, got canaries that stand out of "
            "no noise at all: mu is infinite; p_value refutes every claim"
        )
    low = _solved(lambda shift: log_tail(t, df, shift), math.log(below), t)
    high = -_solved(lambda shift: log_tail(-t, df, shift), math.log(above), -t)
    return low / weight, high / weight


def _solved(log_p: Callable[[float], float], aim: float, near: float) -> float:
    """The shift, rounded down, at which a probability that rises in it is e^aim; nearly linear as a normal quantile."""

    def excess(shift: float) -> float:
        return float(ndtri_exp(max(log_p(shift), -1e15)) - ndtri_exp(aim))

    step = 1.0 + 0.01 * abs(near)
    low, high = near - step, near + step
    while excess(low) > 0:
        low, step = low - step, 2 * step
    while excess(high) < 0:
        high, step = high + step, 2 * step
    return crossing(excess, low, high, absolute=1e-12, relative=1e-12) - 1e-9 * (1 + abs(near))


Method = Literal["clopper_pearson", "f_dp", "gaussian", "one_run"]
METHODS: tuple[Method, ...] = get_args(Method)
"""The words of `method`."""


def epsilon_lower_bound(
    scores: ArrayLike,
    included: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    method: Method = "one_run",
    *,
    guesses: int | None = None,
    threshold: float | None = None,
) -> float:
    """A lower bound of epsilon at delta, from one attack.

    What is random, and so what "probability" is of: the draws and the mechanism's noise. Above the true epsilon with
    probability 1 - confidence at most, where what the method assumes holds:

        one_run          each canary was in or out by a fair draw of its own, and scores come from the release alone.
                         Of the mechanism nothing is asked; canaries may disturb each other. `one_run.chance`
        f_dp             the same draws; the mechanism's epsilon at delta is that of the least mu for which it is
                         mu-GDP, as for every Gaussian mechanism. (Of any mechanism it refutes mu-GDP; that
                         (epsilon, delta)-DP fails as well follows only for those.) `f_dp.chance`
        gaussian         scores of included canaries are N(a + mu s, s^2), of others N(a, s^2), independent: an estimate
                         under this law. Draws may be any. `gaussian_law.limits`
        clopper_pearson  the pairs (score, included) are independent: one canary in each of many runs, or canaries whose
                         scores have nothing to do with each other. Draws may be any. `many_runs.largest_epsilon`

    Args:
        scores: (m,) finite; higher for "included". Equal scores are taken in an order that no draw had a hand in.
        included: (m,) bools or 0/1. All may be in, or out, but for "gaussian".
        delta: from 0 to below 1; above 0 for "f_dp" and "gaussian", whose mechanisms have no epsilon at 0.
        confidence: strictly between 0 and 1.
        method: the word of one of the four.
        guesses: for "one_run" and "f_dp": how many of the m draws are guessed, half of them in, half of them out; fixed
            before the scores were seen. None: the shares 0.15 and 0.5 of m, both tried, each at half of
            1 - confidence.
        threshold: for "clopper_pearson": a score from which on a canary is guessed in, fixed before the scores were
            seen. None: the even-numbered pairs choose it, and only the odd-numbered ones test.
    Returns: epsilon, not negative and finite, rounded down; 0 where nothing can be told.
    Cost: under a second for m = 10 000; O(m) memory.
    Raises: ArgumentError.

    Example:
        >>> scores, included = [3.0] * 40 + [0.0] * 40, [True] * 40 + [False] * 40
        >>> round(epsilon_lower_bound(scores, included, delta=0.0, guesses=80), 3)
        3.266
    """
    scores, included = _pairs(scores, included)
    delta = _below_one("delta", delta)
    significance = 1 - checks.probability("confidence", confidence)
    m = len(scores)
    match _method(method, guesses, threshold):
        case "one_run":
            return one_run.largest_epsilon(m, one_run.right_guesses(scores, included, guesses), delta, significance)
        case "f_dp":
            _above_zero(delta, method)
            mu = f_dp.largest_mu(m, one_run.right_guesses(scores, included, guesses), significance)
            return f_dp.epsilon_below(mu, delta)
        case "gaussian":
            _above_zero(delta, method)
            low, _ = limits(scores, included, significance, significance)
            return f_dp.epsilon_below(low, delta)
        case "clopper_pearson":
            return many_runs.largest_epsilon(scores, included, delta, significance, _finite(threshold))
        case _:
            raise AssertionError(method)


def p_value(
    scores: ArrayLike,
    included: ArrayLike,
    claim: Claim,
    method: Method = "f_dp",
    *,
    guesses: int | None = None,
    threshold: float | None = None,
) -> float:
    """The probability, at most, of scores that tell as much of the draws or more, if the claim is true.

    Under a true claim, and where what the method assumes holds (see `epsilon_lower_bound`), P[p <= a] <= a for every a.
    By "clopper_pearson" and "f_dp" the whole curve is tested, by "one_run" 200 pairs (epsilon, delta(epsilon)) of it,
    at no cost: each bounds the same probability, and so "f_dp" takes the least of both. By "gaussian" p is
    P[T >= the t found] for the claim's mu, exact.

    How small it can be: by "one_run" and "f_dp" not as small as m draws suggest, for a mechanism that keeps the claim
    may give away all draws at once with a small probability; an f-DP p-value below 1e-6 needs a small mu. By "gaussian"
    and "clopper_pearson", where scores have nothing to do with each other, it falls exponentially in m.

    Args:
        claim: a `Curve`, or (epsilon, delta), for a draw that puts one canary in or leaves it out. (That of a curve for
            "replace-one" is true as well, and twice as lax.) By "gaussian" a `Gaussian`, or a pair with delta above 0,
            which is read as that of its mu.
        scores, included, method, guesses, threshold: as in `epsilon_lower_bound`. Several numbers of guesses: the
            least p times their number.
    Returns: p in (0, 1], rounded up.
    Cost: as `epsilon_lower_bound`; curves of sampling add some seconds, of `accounting`.
    Raises: ArgumentError; MissingDependencyError for curves of sampling without dp-accounting.

    Example:
        >>> from anyorder.accounting import Gaussian
        >>> scores, included = [3.0] * 40 + [0.0] * 40, [True] * 40 + [False] * 40
        >>> p_value(scores, included, (1.0, 0.0), method="one_run", guesses=80) < 1e-10
        True
        >>> p_value(scores, included, Gaussian(8.0))
        1.0
    """
    scores, included = _pairs(scores, included)
    claim = _checked(claim)
    m = len(scores)
    match _method(method, guesses, threshold):
        case "one_run":
            counts = one_run.right_guesses(scores, included, guesses)
            return one_run.chances(m, counts, f_dp.pairs_of(claim))
        case "f_dp":
            counts = one_run.right_guesses(scores, included, guesses)
            by_pairs = one_run.chances(m, counts, f_dp.pairs_of(claim))
            return min(f_dp.chances(f_dp.errors_of(claim), m, counts), by_pairs)
        case "gaussian":
            return chance(scores, included, _mu_of(claim))
        case "clopper_pearson":
            return many_runs.chance(scores, included, f_dp.errors_of(claim), _finite(threshold))
        case _:
            raise AssertionError(method)


def mu_estimate(scores: ArrayLike, included: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """(low, high) of mu, by the Gaussian law of aligned scores: an estimate, exact under that law and no other.

        included ~ N(a + mu s, s^2),  others ~ N(a, s^2),  independent, a and s unknown; see `gaussian_law`

    Each end misses mu with probability (1 - confidence) / 2, exactly. Negative where included canaries score lower.

    Args:
        scores, included: as in `epsilon_lower_bound`; both kinds, three or more together.
        confidence: strictly between 0 and 1.
    Cost: some milliseconds; O(m).
    Raises: ArgumentError.

    Example:
        >>> low, high = mu_estimate([4.0, 5.0, 6.0, 0.0, 1.0, 2.0], [1, 1, 1, 0, 0, 0])
        >>> round(low, 2), round(high, 2)
        (0.86, 7.06)
    """
    scores, included = _pairs(scores, included)
    tail = (1 - checks.probability("confidence", confidence)) / 2
    return limits(scores, included, tail, tail)


def _pairs(scores: ArrayLike, included: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    given = checks.plain(scores)
    found = checks.array("scores", np.asarray(given) if hasattr(given, "__array__") else given, ndim=1)
    drawn = np.asarray(checks.plain(included))
    if drawn.shape != found.shape:
        raise ArgumentError(
            f"included must say of each score whether its canary was in, got shape {drawn.shape} "
            f"for {len(found)} scores"
        )
    if drawn.dtype.kind not in "biuf" or not ((drawn == 0) | (drawn == 1)).all():
        raise ArgumentError(f"included must be bools, or 0 and 1, got other values of type {drawn.dtype}")
    return found, drawn.astype(np.bool_)


def _method(method: str, guesses: int | None, threshold: float | None) -> str:
    checks.choice("method", method, METHODS)
    if guesses is not None and method not in ("one_run", "f_dp"):
        raise ArgumentError(f"guesses must be left out for method {method!r}, which guesses all, got {guesses!r}")
    if threshold is not None and method != "clopper_pearson":
        raise ArgumentError(f"threshold must be left out for method {method!r}, which has none, got {threshold!r}")
    return method


def _finite(threshold: float | None) -> float | None:
    return None if threshold is None else checks.real("threshold", threshold)


def _below_one(name: str, value: float) -> float:
    result = checks.real(name, value, low=0.0)
    if result >= 1:
        raise ArgumentError(f"{name} must lie from 0 to below 1, got {value!r}")
    return result


def _above_zero(delta: float, method: str) -> None:
    if delta == 0:
        raise ArgumentError(
            f"delta must be above 0 for method {method!r}, got 0: no Gaussian mechanism has an epsilon there; "
            "use method='one_run' or 'clopper_pearson'"
        )


def _checked(claim: Any) -> Claim:
    if type(claim) in (Gaussian, BoundedRange, Sampled, Amplified, Composed):
        return claim  # type: ignore[no-any-return]
    if not isinstance(claim, (tuple, list)) or len(claim) != 2:
        raise ArgumentError(f"claim must be a privacy curve or a pair (epsilon, delta), got {type(claim).__name__}")
    return checks.real("epsilon", claim[0], low=0.0), _below_one("delta", claim[1])


def _mu_of(claim: Claim) -> float:
    """The mu of a claim, rounded up."""
    match claim:
        case Gaussian():
            return claim.mu
        case (epsilon, delta):
            _above_zero(delta, "gaussian")
            return gdp_mu(epsilon, delta) * (1 + 1e-9)
        case _:
            raise ArgumentError(
                "claim must be a Gaussian curve or (epsilon, delta) for method 'gaussian', got "
                f"{type(claim).__name__}: use method='f_dp' or 'clopper_pearson'"
            )
