"""Lower bounds of privacy from an attack: which canaries were in, and how they scored.

A higher score always means "included". Every method is named by what it assumes:

    one_run          (epsilon, delta)-DP, any mechanism; fair independent coins            [Steinke et al. 2023]
    f_dp             f-DP, any mechanism; fair independent coins; an epsilon is that of the largest mu-GDP refuted
                                                                                           [Mahloujifar et al. 2024]
    gaussian         scores are normal, one standard deviation, independent: an estimate   [t statistic]
    clopper_pearson  pairs (score, included) are independent: many runs, one canary each   [Clopper & Pearson 1934]

A bound lies above the true value with probability 1 - confidence at most, where what it assumes holds. Whether a claim
is refuted is the matter of `p_value`, at a significance such as 1e-6: one in twenty of the claims that are true and
tight may lie under a bound at confidence 0.95.
"""

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder.accounting.curves import Amplified, BoundedRange, Composed, Gaussian, Sampled
from anyorder.accounting.gaussian import gdp_mu
from anyorder.audit import f_dp, gaussian_law, many_runs, one_run
from anyorder.audit.f_dp import Claim
from anyorder.errors import ArgumentError

__all__ = ["METHODS", "Method", "epsilon_lower_bound", "mu_estimate", "p_value"]

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

    What is random, and so what "probability" is of: the coins and the mechanism's noise. Above the true epsilon with
    probability 1 - confidence at most, where what the method assumes holds:

        one_run          each canary was in or out by a fair coin of its own, and scores come from the release alone.
                         Of the mechanism nothing is asked; canaries may disturb each other. `one_run.chance`
        f_dp             the same coins; the mechanism's epsilon at delta is that of the least mu for which it is
                         mu-GDP, as for every Gaussian mechanism. (Of any mechanism it refutes mu-GDP; that
                         (epsilon, delta)-DP fails as well follows only for those.) `f_dp.chance`
        gaussian         scores of included canaries are N(a + mu s, s^2), of others N(a, s^2), independent: an estimate
                         under this law. Coins may be any. `gaussian_law.limits`
        clopper_pearson  the pairs (score, included) are independent: one canary in each of many runs, or canaries whose
                         scores have nothing to do with each other. Coins may be any. `many_runs.largest_epsilon`

    Args:
        scores: (m,) finite; higher for "included". Equal scores are taken in an order that no coin had a hand in.
        included: (m,) bools or 0/1. All may be in, or out, but for "gaussian".
        delta: from 0 to below 1; above 0 for "f_dp" and "gaussian", whose mechanisms have no epsilon at 0.
        confidence: strictly between 0 and 1.
        method: the word of one of the four.
        guesses: for "one_run" and "f_dp": how many of the m coins are guessed, half of them in, half of them out; fixed
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
    significance = 1 - _check.probability("confidence", confidence)
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
            low, _ = gaussian_law.limits(scores, included, significance, significance)
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
    """The probability, at most, of scores that tell as much of the coins or more, if the claim is true.

    Under a true claim, and where what the method assumes holds (see `epsilon_lower_bound`), P[p <= a] <= a for every a.
    By "clopper_pearson" and "f_dp" the whole curve is tested, by "one_run" 200 pairs (epsilon, delta(epsilon)) of it,
    at no cost: each bounds the same probability, and so "f_dp" takes the least of both. By "gaussian" p is
    P[T >= the t found] for the claim's mu, exact.

    How small it can be: by "one_run" and "f_dp" not as small as m coins suggest, for a mechanism that keeps the claim
    may give away all coins at once with a small probability; an f-DP p-value below 1e-6 needs a small mu. By "gaussian"
    and "clopper_pearson", where scores have nothing to do with each other, it falls exponentially in m.

    Args:
        claim: a `Curve`, or (epsilon, delta), for a coin that puts one canary in or leaves it out. (That of a curve for
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
            return gaussian_law.chance(scores, included, _mu_of(claim))
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
    tail = (1 - _check.probability("confidence", confidence)) / 2
    return gaussian_law.limits(scores, included, tail, tail)


def _pairs(scores: ArrayLike, included: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    given = _check.plain(scores)
    found = _check.array("scores", np.asarray(given) if hasattr(given, "__array__") else given, ndim=1)
    coins = np.asarray(_check.plain(included))
    if coins.shape != found.shape:
        raise ArgumentError(
            f"included must say of each score whether its canary was in, got shape {coins.shape} "
            f"for {len(found)} scores"
        )
    if coins.dtype.kind not in "biuf" or not ((coins == 0) | (coins == 1)).all():
        raise ArgumentError(f"included must be bools, or 0 and 1, got other values of type {coins.dtype}")
    return found, coins.astype(np.bool_)


def _method(method: str, guesses: int | None, threshold: float | None) -> str:
    _check.choice("method", method, METHODS)
    if guesses is not None and method not in ("one_run", "f_dp"):
        raise ArgumentError(f"guesses must be left out for method {method!r}, which guesses all, got {guesses!r}")
    if threshold is not None and method != "clopper_pearson":
        raise ArgumentError(f"threshold must be left out for method {method!r}, which has none, got {threshold!r}")
    return method


def _finite(threshold: float | None) -> float | None:
    return None if threshold is None else _check.real("threshold", threshold)


def _below_one(name: str, value: float) -> float:
    result = _check.real(name, value, low=0.0)
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
    return _check.real("epsilon", claim[0], low=0.0), _below_one("delta", claim[1])


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
