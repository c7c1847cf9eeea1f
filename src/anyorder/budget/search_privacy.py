"""Laws of the number K of runs of a search: public, stated by their mean; what is drawn from them is secret.

A search makes K independent runs and shows the best. How much it tells is in the generating function of K alone,

    phi(x) = E[x^K],        weight(w) = phi'(1 - w) = E[K (1 - w)^(K - 1)],

for a run whose chance to be beaten by another is w is shown with weight(w) times the probability it has by itself.

**Epsilon.** Let Q be the law of one run's output, Q' that on neighbouring data, delta(.) the privacy profile of one
run, and w(y) the chance under Q of an output better than y; ties are decided at random. The best of k runs is at y with
k Q(dy) (1 - w)^(k-1), so the search shows

    A(dy) = Q(dy) weight(w(y)),   and for a neighbour   A'(dy) = Q'(dy) weight(w'(y)).

weight falls in w, and w' is at most G(w), the least of e^t w + delta(t), 1 - e^-t (1 - w - delta(t)) and 1. So with
x = e^eps dQ'/dQ,

    delta_search(eps) <= int Q(dy) B(x),     B(x) = max over w of (weight(w) - x weight(G(w)))_+

B is convex and piecewise linear on the concave hull of the points (weight(G(w)), weight(w)), 0 <= w <= 1, and (0, 0).
With its corners (c_k, h_k) and slopes s_k, each piece is a hockey stick:

    delta_search(eps) <= sum over k of (h_k - h_(k-1)) delta(eps - ln s_k)                                          (1)

At negative arguments delta(t) = 1 - e^t (1 - delta(-t)). An empty search is as likely under both laws, and adds
nothing. (1) is nearly tight: let a Gaussian run rank its outputs below some a first, those above some b second, and the
rest last.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, ClassVar, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import checks
from anyorder._numerics import bisect, doubled
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled, compose
from anyorder.accounting.gaussian import rdp_epsilon
from anyorder.checks import final
from anyorder.errors import ArgumentError
from anyorder.formatting import counted
from anyorder.noise import NoiseSource

Floats = NDArray[np.float64]

_MOST_RUNS = 10**6
_LEAST_GAMMA = 1e-9  # below it a law asks for a thousand million runs now and then
_LEAST_ETA = 1e-100  # nearer to 0 all chances are those of 0 to a hundred digits, and floats have no room
_WORDS = 4  # of a draw at a time: 128 bits


@final
@dataclass(frozen=True)
class Fixed:
    """K = runs, always: nothing about K is secret, every run may be shown, and the search is their composition.

    Attributes:
        runs: 1 or more.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "fixed"

    runs: int

    def __post_init__(self) -> None:
        _set(self, runs=checks.integer("runs", self.runs, low=1, high=_MOST_RUNS))

    @property
    def mean(self) -> float:
        """E[K]."""
        return float(self.runs)

    def pgf(self, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return _inside("x", x) ** self.runs

    def draw(self, source: NoiseSource, row: int = 0) -> int:
        """K, which here is no secret."""
        return self.runs

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads."""
        return {"kind": self.kind, "runs": self.runs}

    def describe(self) -> str:
        """Return a phrase for cards."""
        return f"{counted(self.runs, 'run')}, all of which may be shown"


class _OfEtaAndGamma:
    """What the laws of one family share, which differ in eta."""

    def pgf(self: Any, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return _negative_binomial_pgf(self.eta, self.gamma, x)

    def draw(self: Any, source: NoiseSource, row: int = 0) -> int:
        """One K, with exactly these chances, from the words of a row of the source: keep it as secret as the data."""
        return _draw(lambda digits: _negative_binomial_chances(self.eta, self.gamma, digits), source, row)


@final
@dataclass(frozen=True)
class NegativeBinomial(_OfEtaAndGamma):
    """The truncated negative binomial law of K >= 1, the law D(eta, gamma) of [Papernot, Steinke 2022, Def. 1].

        P(K = k) = (1 - gamma)^k / (gamma^-eta - 1) prod_{l < k} (l + eta) / (l + 1)       k = 1, 2, ..
        phi(x) = ((1 - (1 - gamma) x)^-eta - 1) / (gamma^-eta - 1)
        weight(w) = E[K] (gamma / (gamma + (1 - gamma) w))^(eta + 1)
        E[K] = eta (1 - gamma) / (gamma (1 - gamma^eta))

    eta = 1 is geometric; in the limit eta = 0 it is logarithmic. A small eta costs less epsilon for the same mean, and
    has heavier tails: K is often 1, and now and then very large.

    Attributes:
        eta: above -1, at most 100; 0, or at least 1e-100 in size.
        mean: E[K], from 1.01 to 10^6; gamma follows from it, and is at least 1e-9.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "negative-binomial"

    eta: float
    mean: float

    def __post_init__(self) -> None:
        _set(self, eta=checks.real("eta", self.eta, low=-1.0, high=100.0), mean=_mean(self.mean, low=1.01))
        if 0 < abs(self.eta) < _LEAST_ETA:
            raise ArgumentError(f"eta must be 0, or at least {_LEAST_ETA:g} in size, got {self.eta!r}: take 0")
        if self.eta == -1:
            raise ArgumentError("eta must be above -1, got -1.0")
        if _mean_of(self.eta, math.log(_LEAST_GAMMA)) < self.mean:
            raise ArgumentError(
                f"eta={self.eta:g} with mean={self.mean:g} has tails so heavy that K may well be over 10^9: "
                "take a larger eta or a smaller mean"
            )

    @property
    def gamma(self) -> float:
        """The law's other number, in (0, 1): the largest at which the mean is not below the one asked for."""
        least = math.log(_LEAST_GAMMA)
        return math.exp(bisect(lambda at: _mean_of(self.eta, at) >= self.mean, inside=least, outside=-1e-9))

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads."""
        return {"kind": self.kind, "eta": self.eta, "mean": self.mean}

    def describe(self) -> str:
        """Return a phrase for cards."""
        return f"a secret number of runs, negative binomial (eta {self.eta:g}), {self.mean:g} on average"


@final
@dataclass(frozen=True)
class Geometric(_OfEtaAndGamma):
    """P(K = k) = gamma (1 - gamma)^(k - 1), gamma = 1 / mean: `NegativeBinomial` of eta = 1.

    Attributes:
        mean: E[K], from 1.01 to 10^6.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "geometric"
    eta: ClassVar[float] = 1.0

    mean: float

    def __post_init__(self) -> None:
        _set(self, mean=_mean(self.mean, low=1.01))

    @property
    def gamma(self) -> float:
        """1 / mean."""
        return 1 / self.mean

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """Return a phrase for cards."""
        return f"a secret number of runs, geometric, {self.mean:g} on average"


@final
@dataclass(frozen=True)
class Logarithmic(_OfEtaAndGamma):
    """P(K = k) = (1 - gamma)^k / (k ln(1 / gamma)): `NegativeBinomial` in the limit eta = 0.

    Attributes:
        mean: E[K] = (1 / gamma - 1) / ln(1 / gamma), from 1.01 to 10^6.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "logarithmic"
    eta: ClassVar[float] = 0.0

    mean: float

    def __post_init__(self) -> None:
        _set(self, mean=_mean(self.mean, low=1.01))

    @property
    def gamma(self) -> float:
        """The law's number, in (0, 1): the largest at which the mean is not below the one asked for."""
        return NegativeBinomial(0.0, self.mean).gamma

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """Return a phrase for cards."""
        return f"a secret number of runs, logarithmic, {self.mean:g} on average"


@final
@dataclass(frozen=True)
class Poisson:
    """P(K = k) = e^-mean mean^k / k!, k = 0, 1, ..; phi(x) = e^(-mean (1 - x)); weight(w) = mean e^(-mean w).

    K may be 0: then nothing is shown, "no result", with the same chance e^-mean whatever the data.

    Attributes:
        mean: E[K], from 0.01 to 10^6.
    Raises: ArgumentError.
    """

    kind: ClassVar[str] = "poisson"

    mean: float

    def __post_init__(self) -> None:
        _set(self, mean=_mean(self.mean, low=0.01))

    def pgf(self, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return math.exp(-self.mean * (1 - _inside("x", x)))

    def draw(self, source: NoiseSource, row: int = 0) -> int:
        """One K, with exactly these chances, from the words of a row of the source: keep it as secret as the data."""
        return _draw(lambda digits: _poisson_chances(self.mean, digits), source, row)

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """Return a phrase for cards."""
        return f"a secret number of runs, Poisson, {self.mean:g} on average"


Law = Fixed | Geometric | NegativeBinomial | Logarithmic | Poisson
"""All there are; each has `mean`, `pgf(x)`, `draw(source)`, `to_dict()`, `describe()`."""
Secret = Geometric | NegativeBinomial | Logarithmic | Poisson
"""Those that hide K."""


def from_dict(data: Any) -> Law:
    """The law that `to_dict` wrote. Raises: ArgumentError for anything else."""
    kinds = {law.kind: law for law in (Fixed, Geometric, NegativeBinomial, Logarithmic, Poisson)}
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ArgumentError(
            f"a law must be a dict with a kind out of {', '.join(sorted(kinds))}, got {ascii(data)[:80]}"
        )
    law = kinds[kind]
    given = {name: value for name, value in data.items() if name != "kind"}
    names = [field.name for field in fields(law)]
    if given.keys() != set(names):
        named = ", ".join(names)
        raise ArgumentError(f"a law of kind {kind!r} must have {named} and nothing else, got {ascii(data)[:80]}")
    result: Law = law(**given)
    return result


def weight(law: Secret, w: ArrayLike) -> tuple[Floats, Floats]:
    """(phi'(1 - w), its derivative in w), for w >= 0: falling and convex, also beyond w = 1, where it goes on."""
    w = np.asarray(w, np.float64)
    match law:
        case Geometric() | NegativeBinomial() | Logarithmic():
            eta, gamma = law.eta, law.gamma
            base = gamma + (1 - gamma) * w
            value = _mean_of(eta, math.log(gamma)) * (gamma / base) ** (eta + 1)
            return value, -value * (eta + 1) * (1 - gamma) / base
        case Poisson():
            value = law.mean * np.exp(-law.mean * w)
            return value, -law.mean * value
        case _:
            assert_never(law)


def _mean_of(eta: float, log_gamma: float) -> float:
    """E[K] of the truncated negative binomial law."""
    odds = math.expm1(-log_gamma)  # (1 - gamma) / gamma
    return odds * (eta / -math.expm1(eta * log_gamma) if eta else -1 / log_gamma)


def _negative_binomial_pgf(eta: float, gamma: float, x: float) -> float:
    log_base, log_gamma = math.log1p(-(1 - gamma) * _inside("x", x)), math.log(gamma)
    if eta == 0:
        return log_base / log_gamma
    return math.expm1(-eta * log_base) / math.expm1(-eta * log_gamma)


def _negative_binomial_chances(eta: float, gamma: float, digits: int) -> Iterator[tuple[int, Decimal]]:
    """(k, P(K = k)) to so many digits."""
    c = Context(prec=digits)
    one, shape, g = Decimal(1), Decimal(eta), Decimal(gamma)
    rest = c.subtract(one, g)
    if eta:
        lost = max(0, -math.floor(math.log10(abs(eta * math.log(gamma)))))  # digits, where gamma^-eta is nearly 1
        fine = Context(prec=digits + lost)
        power = fine.exp(fine.minus(fine.multiply(shape, fine.ln(g))))  # a bare minus would round to 28 digits
        first = c.divide(c.multiply(shape, rest), fine.subtract(power, one))
    else:
        first = c.divide(rest, c.minus(c.ln(g)))
    k, chance = 1, first
    while True:
        yield k, chance
        chance = c.divide(c.multiply(c.multiply(chance, rest), c.add(shape, Decimal(k))), Decimal(k + 1))
        k += 1


def _poisson_chances(mean: float, digits: int) -> Iterator[tuple[int, Decimal]]:
    c = Context(prec=digits, Emin=-(10**9), Emax=10**9)
    k, chance = 0, c.exp(Decimal(-mean))
    while True:
        yield k, chance
        k += 1
        chance = c.divide(c.multiply(chance, Decimal(mean)), Decimal(k))


def _draw(chances: Any, source: NoiseSource, row: int) -> int:
    """The k at which the sum of the chances passes a uniform number, whose bits are read until they decide.

    The number u is known to lie in an interval of 2^-bits, and the sums are known to 10^-(digits - 10) each, far
    closer: where a sum might lie on either side of u, more bits and more digits are taken. So every k has its own
    chance to the last bit, as if u were real.
    """
    blocks = 1
    while True:
        bits = 32 * _WORDS * blocks
        digits = int(bits * 0.302) + 30
        number = int.from_bytes(source.words(row, 0, _WORDS * blocks).astype(">u4").tobytes(), "big")
        c = Context(prec=digits)
        low = c.divide(Decimal(number), Decimal(2**bits))
        high = c.divide(Decimal(number + 1), Decimal(2**bits))
        slack = c.power(Decimal(10), Decimal(10 - digits))
        total = Decimal(0)
        for k, chance in chances(digits):
            total = c.add(total, chance)
            if c.add(high, slack) <= total:
                return int(k)
            if c.subtract(low, slack) < total or (chance < slack and 2 * total > 1):
                break  # u may lie on either side
        blocks += 1


def _mean(value: float, *, low: float) -> float:
    return checks.real("mean", value, low=low, high=float(_MOST_RUNS))


def _inside(name: str, value: float) -> float:
    return checks.real(name, value, low=0.0, high=1.0)


def _set(law: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(law, name, value)


# ----------------------------------------------------------------------------------------------------
# Epsilon of a search by Rényi divergences, the bound that papers print [Papernot, Steinke 2022, Theorems 2 and 6].
#
# With r(a) the Rényi divergence of order a of one run, any orders a, b > 1, and D(eta, gamma) the law of K,
#
#     r_search(a) <= r(a) + ln(E K) / (a - 1) + (1 + eta) ((1 - 1/b) r(b) + ln(1 / gamma) / b)      negative binomial
#     r_search(a) <= r(a) + ln(E K) / (a - 1) + E K delta(ln(a / (a - 1)))                          Poisson
#
# delta(.) is the privacy profile of one run. r_search is that of what is shown: an empty search of Poisson's law,
# which is as likely whatever the data, adds nothing to delta at any epsilon >= 0, and is left out. The last
# term for Poisson: w' <= e^t w + delta(t), see above, at e^t = a / (a - 1).


_RENYI_UP = 1 + 1e-9
_ORDERS = 1 + np.geomspace(1e-3, 2e4, 240)  # of formulas
_FEW = np.concatenate([[1.1, 1.25, 1.5, 1.75], np.arange(2.0, 33.0), 2.0 ** np.arange(5.5, 9.0, 0.5)])  # of sums


def renyi_divergences(curve: Curve, orders: Floats) -> Floats:
    """The Rényi divergence of one run at each order, at or above the true one.

    Args:
        curve: a Gaussian's are a mu^2 / 2, draws' of bounded range a e0^2 / 8 each, sampled sums' those of
            dp-accounting; sampled sums with draws from the same sample are taken without the sampling.
        orders: (m,), above 1.
    Returns: (m,), infinite where none is known.
    """
    match curve:
        case Gaussian():
            return orders * (curve.mu * curve.mu / 2 * _RENYI_UP)
        case BoundedRange():
            return orders * (curve.draws * curve.e0 * curve.e0 / 8 * _RENYI_UP)
        case Sampled():
            if curve.draws:
                return orders * (curve.n * (1 / curve.sigma**2 / 2 + curve.draws * curve.e0**2 / 8) * _RENYI_UP)
            return _sampled(curve, orders)
        case Amplified():  # the sampling is not counted
            return orders * (curve.known_mu * curve.known_mu / 2 * _RENYI_UP)
        case Composed():
            total = np.zeros(len(orders))
            for part in curve.parts:
                total = total + renyi_divergences(part, orders)
            return total * _RENYI_UP
        case _:
            assert_never(curve)


def renyi_search_epsilon(law: Secret, curve: Curve, delta: float) -> float:
    """The epsilon of a whole search by Rényi divergences; see the formulas above, and `search_epsilon`."""
    orders = _ORDERS if type(curve) is Gaussian else _FEW
    divergences = renyi_divergences(curve, orders)
    match law:
        case Geometric() | NegativeBinomial() | Logarithmic():
            beaten = (1 - 1 / orders) * divergences - math.log(law.gamma) / orders
            extra = np.full(len(orders), (1 + law.eta) * float(beaten.min()))
        case Poisson():
            points = -np.log1p(-1 / orders)  # ln(a / (a - 1)); a smaller epsilon has a larger delta
            extra = law.mean * np.array([curve.delta(max(0.0, float(at) * (1 - 1e-12))) for at in points])
        case _:
            assert_never(law)
    # the logarithm of the mean may be below 0: a Poisson search that shows little
    total = divergences + extra * _RENYI_UP + (math.log(law.mean) + 1e-12) / (orders - 1)
    held = np.isfinite(total)
    if not held.any():
        return math.inf
    return rdp_epsilon((orders[held], np.maximum(total[held], 0.0)), checks.probability("delta", delta))


def _sampled(curve: Sampled, orders: Floats) -> Floats:
    rdp = checks.optional("dp_accounting.rdp", extra="amplified", purpose="accounting for Poisson sampling")
    event = checks.optional("dp_accounting.dp_event", extra="amplified", purpose="accounting for Poisson sampling")
    accountant = rdp.RdpAccountant(orders)
    step = event.PoissonSampledDpEvent(curve.sampling_probability, event.GaussianDpEvent(curve.sigma))
    accountant.compose(step, curve.n)
    return np.asarray(accountant.rdp, np.float64) * _RENYI_UP


# ----------------------------------------------------------------------------------------------------
# Epsilon of a search that makes K runs, K from a public law, and shows the best: from the privacy profile of one run.


_BOUNDS = ("least", "profile", "renyi")
_PROFILE_UP = 1 + 1e-12  # a hundred times the rounding of a weight
_LARGEST = 690.0  # epsilon whose exponential is a number
_CELLS = 2000  # of the chances w by their size, and as many evenly
_TOLERANCE = 1e-6  # of epsilon, of a calibration; the issue of a table of the profile is 1e-5
_KNOTS = {True: (1200, 200), False: (240, 40)}  # of a profile that is a formula, or a sum over a loss distribution


def search_epsilon(law: Law, curve: Curve, delta: float, bound: str = "least") -> float:
    """The epsilon of a whole search, at or above the smallest that holds at delta.

    The search draws K from the law, makes K independent runs, each of settings drawn afresh from one public
    distribution, and shows the best: its output and settings, not K, and nothing of the others. Every run has this
    curve, whatever its settings. The order of "best" is that of a score which is part of the run's output, or a
    function of it and of public data; ties are broken at random, or by which came first. `Fixed` shows every run, and
    is the composition of the runs; any score may then choose among them.

    Valid for every mechanism with this curve, both directions of neighbours. The top of this file names
    a mechanism that comes near. Neighbours and unit are those of the curve.

    Args:
        law: of the number of runs.
        curve: of one run, with its score where that is noisy: compose(run.curve, score_curve).
        delta: strictly between 0 and 1.
        bound: "profile", of the privacy profile; "renyi", of Rényi divergences, as papers print it; or "least", the
            smaller of these two. `Fixed` has its composition alone.
    Returns: epsilon, infinity where none is found, as may be above 690.
    Cost: 0.1 s for a Gaussian curve; for others, up to 300 times that of curve.delta.
    Raises: ArgumentError.

    Example:
        >>> from anyorder.budget import Geometric
        >>> round(search_epsilon(Geometric(50), Gaussian(1.0), 1e-6), 3), round(Gaussian(1.0).epsilon(1e-6), 3)
        (8.253, 4.887)
    """
    delta = checks.probability("delta", delta)
    checks.choice("bound", bound, _BOUNDS)
    _check_whole(curve)
    if isinstance(law, Fixed):
        return repeated(curve, law.runs).epsilon(delta)
    if curve.mu == 0:
        return 0.0
    return _bounded(law, curve, delta, bound)


@lru_cache(maxsize=256)  # one that is resumed, shown or verified asks for the same
def _bounded(law: Secret, curve: Curve, delta: float, bound: str) -> float:
    by_profile = _profile(law, curve, delta).epsilon(delta) if bound != "renyi" else math.inf
    by_renyi = renyi_search_epsilon(law, curve, delta) if bound != "profile" else math.inf
    return min(by_profile, by_renyi)


def _check_whole(curve: Curve) -> None:
    """Raise ArgumentError for what holds for one delta alone: a search asks for the run's whole curve."""
    if type(curve) is Amplified and type(curve.method) is MonteCarlo:
        raise ArgumentError(
            "curve must not be found by samples, which hold for one delta of one release, and a search needs the whole "
            "curve of a run: plan with ao.order(.., method='bound')"
        )


def calibrate_search(
    law: Law, epsilon: float, delta: float, make_curve: Callable[[float], Curve] = Gaussian
) -> float:  # fmt: skip
    """The largest mu of one run for which the whole search keeps (epsilon, delta).

    Args:
        law: of the number of runs.
        epsilon: above 0, of the search.
        delta: strictly between 0 and 1.
        make_curve: mu -> the curve of one run, which tells more where mu is larger; Gaussian(mu) unless given. For
            sampled sums: lambda mu: Sampled(1 / mu, q, n).
    Returns: mu: search_epsilon(law, make_curve(mu), delta) is at most epsilon, and within 1e-4 of it.
    Cost: that of about fifteen calls of `search_epsilon`.
    Raises: ArgumentError where no mu from 1e-9 to 10^6 keeps epsilon, or even the largest does.

    Example:
        >>> from anyorder.budget import Geometric
        >>> mu = calibrate_search(Geometric(50), 8.0, 1e-6)
        >>> round(mu, 3), round(search_epsilon(Geometric(50), Gaussian(mu), 1e-6), 3)
        (0.971, 8.0)
    """
    epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)

    def over(log_mu: float) -> float:
        """The logarithm of how far over epsilon the search is, cut."""
        found = search_epsilon(law, make_curve(math.exp(log_mu)), delta)
        return math.log(min(max(found / epsilon, 1e-3), 1e3))

    inside, outside = math.log(1e-9), math.log(1e6)
    start = math.log(epsilon / 10)
    inside_over = outside_over = math.nan
    step = 0.5
    at = min(max(start, inside), outside)
    while True:  # to both sides until the target lies between
        here = over(at)
        if here <= 0:
            inside, inside_over = at, here
        else:
            outside, outside_over = at, here
        if not math.isnan(inside_over) and not math.isnan(outside_over):
            break
        if at in (math.log(1e-9), math.log(1e6)):
            raise ArgumentError(f"no mu from 1e-9 to 1e6 gives epsilon={epsilon:g} at delta={delta:g} with {law!r}")
        at = min(at + step, math.log(1e6)) if here <= 0 else max(at - step, math.log(1e-9))
        step *= 2
    return math.exp(_last_inside(over, inside, outside, inside_over, outside_over))


def _last_inside(
    over: Callable[[float], float], inside: float, outside: float, low: float, high: float
) -> float:  # fmt: skip
    """A point where `over` is not above 0 but within the tolerance of it, by the rule of false position, halved."""
    for turn in range(100):
        if low > -_TOLERANCE or abs(outside - inside) < 1e-12:
            break
        share = 0.5 if turn % 3 == 2 else min(max((-low - _TOLERANCE / 2) / (high - low), 1e-3), 1 - 1e-3)
        at = inside + share * (outside - inside)
        here = over(at)
        if here <= 0:
            inside, low = at, here
        else:
            outside, high = at, here
    return inside


@final
@dataclass(frozen=True)
class _Profile:
    """delta_search(eps) <= sum of rises delta(eps - shifts), delta(.) of one run by a table."""

    rises: Floats
    shifts: Floats
    knots: Floats
    deltas: Floats

    def delta(self, epsilon: float) -> float:
        return min(1.0, float(self.rises @ self._one(epsilon - self.shifts)) * (1 + 1e-9))

    def epsilon(self, delta: float) -> float:
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = doubled(lambda epsilon: self.delta(epsilon) <= delta, 0.0, 1.0, most=1e6)
        return bisect(lambda epsilon: self.delta(epsilon) <= delta, inside=high, outside=low, relative=1e-10)

    def _one(self, at: Floats) -> Floats:
        """Of one run: convex in e^eps, so a chord between knots is above; below 0 by the other direction."""
        size = np.minimum(np.abs(at), _LARGEST)
        found = np.interp(np.exp(size), np.exp(self.knots), self.deltas)  # beyond the last knot: that of the last
        return np.where(at >= 0, found, np.minimum(1.0, 1 - np.exp(np.minimum(at, 0.0)) * (1 - found) + 1e-15))


def _profile(law: Secret, curve: Curve, delta: float) -> _Profile:
    """The bound, with a table of the run's profile that is fine where a search's delta is near this one."""
    knots, deltas = _table(curve, delta / float(weight(law, 0.0)[0]))
    kept, own = _points(law, *_most(knots, deltas), float(knots[-1]))
    corners = _hull(kept, own)
    rises, runs = np.diff(corners[:, 1]), np.diff(corners[:, 0])
    with np.errstate(divide="ignore"):
        slopes = np.log(rises) - np.log(runs)
    return _Profile(rises, slopes + 1e-12 * (1 + np.abs(slopes)), knots, deltas)


def _table(curve: Curve, level: float) -> tuple[Floats, Floats]:
    """(epsilons from 0 on, delta at each), fine up to delta = level / 20, and on to level / 10^4."""
    many, few = _KNOTS[isinstance(curve, Gaussian)]
    near, far = (min(curve.epsilon(min(max(level * share, 1e-300), 0.5)), _LARGEST) for share in (0.05, 1e-4))
    near, far = max(near, 1e-9), max(far, near, 1e-9)
    knots = np.linspace(0.0, near, many + 1)
    if far > near:
        knots = np.concatenate([knots, np.linspace(near, far, few + 1)[1:]])
    return knots, np.minimum.accumulate([curve.delta(float(knot)) for knot in knots])


def _most(knots: Floats, deltas: Floats) -> tuple[Floats, Floats]:
    """(slopes, heights) of lines in w, falling in slope: a set of chance w under Q has no more under Q' than any.

    Of the set itself, w' <= e^t w + delta(t); of what is not in it, 1 - w <= e^t (1 - w') + delta(t); and w' <= 1.
    """
    slopes = np.concatenate([np.exp(knots[::-1]), np.exp(-knots[1:]), [0.0]])
    heights = np.concatenate([deltas[::-1], 1 - np.exp(-knots[1:]) * (1 - deltas[1:]), [1.0]])
    return slopes * _PROFILE_UP, heights * _PROFILE_UP


def _points(law: Secret, slopes: Floats, heights: Floats, far: float) -> tuple[Floats, Floats]:
    """(weight(G(w)) rounded down, weight(w) rounded up) at points whose hull is above those of all w in [0, 1].

    In a cell of w, weight is below its chord, for it is convex. G is below any of the lines; weight of a line is convex
    in w, and above its tangent at the middle. Both being lines, what a cell holds is below the chord of its ends.
    """
    top, falls = weight(law, 0.0)
    scale = float(-top / falls)  # w over which the weight falls
    first = max(0.01 * scale * math.exp(-far), 1e-300)
    edges = np.unique(
        np.concatenate([np.geomspace(first, 1.0, _CELLS), np.linspace(0.0, min(1.0, 40 * scale), _CELLS)])
    )
    low, high = edges[:-1], edges[1:]
    middle = (low + high) / 2
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # which line is taken does not matter
        crossings = (heights[1:] - heights[:-1]) / (slopes[:-1] - slopes[1:])
    lines = np.searchsorted(np.maximum.accumulate(np.nan_to_num(crossings)), middle)
    slope, height = slopes[lines], heights[lines]
    at, tangent = weight(law, np.minimum(slope * middle + height, 1e9))
    tangent = tangent * slope
    kept_low, kept_high = at + tangent * (low - middle), at + tangent * (high - middle)
    least = weight(law, np.minimum(slope * high + height, 1.0))[0]
    flat = ~(kept_high >= 0.8 * least)  # a coarse cell, or w' = 1: the least of the cell
    kept_low, kept_high = np.where(flat, least, kept_low), np.where(flat, least, kept_high)
    kept = np.concatenate([kept_low, kept_high]) / _PROFILE_UP
    own = np.concatenate([weight(law, low)[0], weight(law, high)[0]]) * _PROFILE_UP
    return kept, own


def _hull(x: Floats, y: Floats) -> Floats:
    """(corners, 2): the concave hull of (0, 0) and the points, up to the highest of them."""
    order = np.lexsort((-y, x))
    corners = [(0.0, 0.0)]
    for at, height in zip(x[order].tolist(), y[order].tolist(), strict=True):
        if height <= corners[-1][1]:
            continue
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (at - x0) > (height - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((at, height))
    return np.array(corners)


def repeated(curve: Curve, runs: int) -> Curve:
    """The composition of so many of a curve."""
    found, power = None, curve
    while runs:
        if runs & 1:
            found = power if found is None else compose(found, power)
        runs >>= 1
        if runs:
            power = compose(power, power)
    assert found is not None
    return found
