"""Privacy curves: epsilon(delta) and delta(epsilon) of a plan, and of several mechanisms on the same units together.

A closed union, `Curve = Gaussian | Sampled | Composed`. Nothing else asks how a plan got its privacy.
"""

import math
from dataclasses import dataclass, field
from typing import assert_never, overload

from anyorder import _check
from anyorder._closed import final
from anyorder.accounting.gaussian import compose_mus, gdp_delta, gdp_epsilon
from anyorder.accounting.poisson import Part, check_sampled, mixed_delta, mixed_epsilon
from anyorder.errors import ArgumentError

__all__ = ["NEIGHBOURS", "Composed", "Curve", "Gaussian", "Sampled", "compose"]

NEIGHBOURS = {"zero-out": 1.0, "replace-one": 2.0, "add-or-remove": 1.0}
"""Neighbouring relation -> how far one unit moves a sum, in sensitivities."""


@final
@dataclass(frozen=True)
class Gaussian:
    """The curve of mu-GDP: as hard to attack as telling N(0, 1) from N(mu, 1). Exact in both directions.

        delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)            [Dong, Roth, Su 2022, Cor. 2.13]

    Attributes:
        mu: not negative, unitless: sensitivity / noise_std; 0 for what says nothing about any unit.
        neighbours: the relation that mu is for: "zero-out", "replace-one" or "add-or-remove".
        unit: what is protected, in a word, as in `Plan`.
    Raises: ArgumentError.

    Example:
        >>> round(Gaussian(1.0).epsilon(1e-5), 3), round(Gaussian(1.0).delta(1.0), 6)
        (4.377, 0.126937)
    """

    mu: float
    neighbours: str = field(default="zero-out", kw_only=True)
    unit: str = field(default="example", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", _check.real("mu", self.mu, low=0.0))
        _check.choice("neighbours", self.neighbours, NEIGHBOURS)
        _check.word("unit", self.unit)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that holds at delta, rounded up; see `gdp_epsilon`."""
        return gdp_epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        """The smallest delta that holds at epsilon, rounded up; see `gdp_delta`."""
        return gdp_delta(self.mu, epsilon)


@final
@dataclass(frozen=True)
class Sampled:
    """The curve of n sums with independent noise over batches that take each unit by a secret, independent coin.

    Neighbours are add-or-remove: the privacy loss distribution of the sampled Gaussian; see `poisson_epsilon`.

    Attributes:
        sigma: noise std over clip norm, above 0.
        sampling_probability: above 0, at most 1.
        n: steps, from 1 to 1 000 000.
        unit: what is protected, in a word.
        mu: None: the curve is not that of a Gaussian.
    Cost: up to some seconds and 0.5 GB for each call.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """

    sigma: float
    sampling_probability: float
    n: int
    unit: str = field(default="example", kw_only=True)
    mu: None = field(default=None, init=False, repr=False)
    neighbours: str = field(default="add-or-remove", init=False, repr=False)

    def __post_init__(self) -> None:
        _set(self, *check_sampled(self.sigma, self.sampling_probability, self.n))
        _check.word("unit", self.unit)

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta, at or above the smallest; see `poisson_epsilon`."""
        return mixed_epsilon([(self.sigma, self.sampling_probability, self.n)], _check.probability("delta", delta))

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon, at or above the smallest, and never below 1e-16 a step where sampled."""
        return mixed_delta([(self.sigma, self.sampling_probability, self.n)], _check.real("epsilon", epsilon, low=0.0))


@final
@dataclass(frozen=True)
class Composed:
    """The curve of mechanisms of both kinds on the same units; made by `compose`, which says what it rests on.

    Privacy loss distributions are convolved, rounded to the safe side; never above the same without sampling.

    Attributes:
        parts: two or more, at most one of them a `Gaussian`, in one order for the same set of mechanisms.
        mu: None: the curve is not that of a Gaussian.
    Cost: up to some seconds and 0.5 GB for each part and call.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """

    parts: "tuple[Gaussian | Sampled, ...]"
    mu: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if type(self.parts) is not tuple or _normal(self.parts) != self.parts or len(self.parts) < 2:
            raise ArgumentError(f"parts must be as compose(*curves) makes them: call that, got {self.parts!r}")

    @property
    def neighbours(self) -> str:
        """The relation of all parts."""
        return self.parts[0].neighbours

    @property
    def unit(self) -> str:
        """What all parts protect."""
        return self.parts[0].unit

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta, at or above the smallest."""
        return mixed_epsilon([_part(part) for part in self.parts], _check.probability("delta", delta))

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon, at or above the smallest."""
        return mixed_delta([_part(part) for part in self.parts], _check.real("epsilon", epsilon, low=0.0))


Curve = Gaussian | Sampled | Composed
"""All there are; each has `epsilon(delta)`, `delta(epsilon)`, `neighbours`, `unit`, and `mu` or None."""
"""How private something is: epsilon at every delta, and delta at every epsilon."""


@overload
def compose(*parts: Curve) -> Curve: ...
@overload
def compose(*parts: float) -> float: ...
def compose(*parts: Curve | float) -> Curve | float:
    """The curve of several mechanisms on the same units together.

        Gaussian(mu_1), Gaussian(mu_2), ..   ->  Gaussian(sqrt(mu_1^2 + mu_2^2 + ..))    [Dong, Roth, Su 2022, Cor. 3.3]
        any others                           ->  Composed: privacy loss distributions convolved

    Adaptive: each mechanism may be chosen after the releases of those before it, and so may its input, but not its
    curve, which is fixed beforehand. Each has noise and coins of its own. All are about one relation of neighbours
    and one unit of privacy: of two that differ (zero-out here, add-or-remove there) no curve of both follows, and
    they are refused. So: select, then release; a noisy count beside a training; several plans on the same people.

        compose(plan_a.curve, plan_b.curve).epsilon(1e-5)

    What is *inside* one mechanism does not count twice: `Adaptive` clip norms are a coordinate of the vector that is
    released, paid for by the plan itself.

    Args:
        parts: curves, at least one; every mechanism that one unit can enter. Or numbers, for `compose_mus`.
    Returns: a curve, never below the true one.
    Raises: ArgumentError where relation or unit differ, or numbers stand beside curves.

    Example:
        >>> compose(Gaussian(3.0), Gaussian(4.0))
        Gaussian(mu=5.0, neighbours='zero-out', unit='example')
    """
    curves = [part for part in parts if isinstance(part, Curve)]
    if not curves:
        return compose_mus(*parts)  # type: ignore[arg-type]
    if len(curves) < len(parts):
        raise ArgumentError(f"parts must all be curves, a mu as Gaussian(mu), or all numbers, got {parts!r}")
    found = _normal(tuple(part for curve in curves for part in (curve.parts if type(curve) is Composed else (curve,))))
    return found[0] if len(found) == 1 else Composed(found)


def _normal(parts: "tuple[Gaussian | Sampled, ...]") -> "tuple[Gaussian | Sampled, ...]":
    """The parts with equals merged, in one order."""
    for part in parts:
        if type(part) not in (Gaussian, Sampled):
            raise ArgumentError(f"parts must be of Gaussian and Sampled, got {type(part).__name__}")
    kinds = {(part.neighbours, part.unit) for part in parts}
    if len(kinds) != 1:
        told = ", ".join(f"{relation!r} for a {unit!r}" for relation, unit in sorted(kinds))
        raise ArgumentError(
            f"parts must agree in neighbours and unit, got {told}: plan all of them for one relation and one unit "
            "(plan(neighbours=.., unit=..), Gaussian(mu, neighbours=.., unit=..))"
        )
    [(neighbours, unit)] = kinds
    mu = compose_mus(*(part.mu for part in parts if type(part) is Gaussian))
    steps: dict[tuple[float, float], int] = {}
    for part in parts:
        if type(part) is Sampled:
            coins = (part.sigma, part.sampling_probability)
            steps[coins] = steps.get(coins, 0) + part.n
    sampled = tuple(Sampled(sigma, q, n, unit=unit) for (sigma, q), n in sorted(steps.items()))
    if mu == 0 and sampled:
        return sampled
    return (Gaussian(mu, neighbours=neighbours, unit=unit), *sampled)


def _part(curve: "Gaussian | Sampled") -> Part:
    """(noise multiplier, sampling probability, steps); noise is rounded down, and no more than matters."""
    match curve:
        case Gaussian():
            return min(math.nextafter(1 / curve.mu, 0.0), _QUIETEST), 1.0, 1
        case Sampled():
            return min(curve.sigma, _QUIETEST), curve.sampling_probability, curve.n
        case _:
            assert_never(curve)


_QUIETEST = 1e9  # a mu of 1e-9 moves no epsilon that a composition can tell


def _set(curve: Sampled, sigma: float, q: float, n: int) -> None:
    for name, value in (("sigma", sigma), ("sampling_probability", q), ("n", n)):
        object.__setattr__(curve, name, value)
