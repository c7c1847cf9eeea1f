"""Laws of the number K of runs of a search: public, stated by their mean; what is drawn from them is secret.

A search makes K independent runs and shows the best. How much it tells is in the generating function of K alone,

    phi(x) = E[x^K],        weight(w) = phi'(1 - w) = E[K (1 - w)^(K - 1)],

for a run whose chance to be beaten by another is w is shown with weight(w) times the probability it has by itself.
`anyorder.budget.bounds` turns it into epsilon.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from decimal import Context, Decimal
from typing import Any, ClassVar, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder import _check
from anyorder._closed import final
from anyorder._words import counted
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

__all__ = ["Fixed", "Geometric", "Law", "Logarithmic", "NegativeBinomial", "Poisson", "from_dict"]

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
        _set(self, runs=_check.integer("runs", self.runs, low=1, high=_MOST_RUNS))

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
        """What `from_dict` reads."""
        return {"kind": self.kind, "runs": self.runs}

    def describe(self) -> str:
        """In a phrase, for cards."""
        return f"{counted(self.runs, 'run')}, all of which may be shown"


@final
@dataclass(frozen=True)
class NegativeBinomial:
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
        _set(self, eta=_check.real("eta", self.eta, low=-1.0, high=100.0), mean=_mean(self.mean, low=1.01))
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
        low, high = math.log(_LEAST_GAMMA), -1e-9
        while True:
            middle = (low + high) / 2
            if middle in (low, high):
                return math.exp(low)
            if _mean_of(self.eta, middle) >= self.mean:
                low = middle
            else:
                high = middle

    def pgf(self, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return _negative_binomial_pgf(self.eta, self.gamma, x)

    def draw(self, source: NoiseSource, row: int = 0) -> int:
        """One K, with exactly these chances, from the words of a row of the source: keep it as secret as the data."""
        return _draw(lambda digits: _negative_binomial_chances(self.eta, self.gamma, digits), source, row)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {"kind": self.kind, "eta": self.eta, "mean": self.mean}

    def describe(self) -> str:
        """In a phrase, for cards."""
        return f"a secret number of runs, negative binomial (eta {self.eta:g}), {self.mean:g} on average"


@final
@dataclass(frozen=True)
class Geometric:
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

    def pgf(self, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return _negative_binomial_pgf(self.eta, self.gamma, x)

    def draw(self, source: NoiseSource, row: int = 0) -> int:
        """One K, with exactly these chances, from the words of a row of the source: keep it as secret as the data."""
        return _draw(lambda digits: _negative_binomial_chances(self.eta, self.gamma, digits), source, row)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """In a phrase, for cards."""
        return f"a secret number of runs, geometric, {self.mean:g} on average"


@final
@dataclass(frozen=True)
class Logarithmic:
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

    def pgf(self, x: float) -> float:
        """E[x^K] for x in [0, 1]."""
        return _negative_binomial_pgf(self.eta, self.gamma, x)

    def draw(self, source: NoiseSource, row: int = 0) -> int:
        """One K, with exactly these chances, from the words of a row of the source: keep it as secret as the data."""
        return _draw(lambda digits: _negative_binomial_chances(self.eta, self.gamma, digits), source, row)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """In a phrase, for cards."""
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
        """What `from_dict` reads."""
        return {"kind": self.kind, "mean": self.mean}

    def describe(self) -> str:
        """In a phrase, for cards."""
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
    return _check.real("mean", value, low=low, high=float(_MOST_RUNS))


def _inside(name: str, value: float) -> float:
    return _check.real(name, value, low=0.0, high=1.0)


def _set(law: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(law, name, value)
