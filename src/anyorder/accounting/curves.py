"""Privacy curves: epsilon(delta) and delta(epsilon) of a plan, and of several mechanisms on the same units together.

A closed union, `Curve = Gaussian | BoundedRange | Sampled | Amplified | Composed`. Nothing else asks how a plan got its
privacy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol, assert_never, overload

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified, curve_losses, transforms_of, variants_of
from anyorder.accounting.amplification.methods import Method, MonteCarlo
from anyorder.accounting.amplification.secret_order import AmplifiedOrder, SampledOrder, SecretOrder
from anyorder.accounting.bounded_range import Pair, RangeDraws
from anyorder.accounting.gaussian import NEIGHBOURS, compose_mus, gdp_delta, gdp_epsilon
from anyorder.accounting.poisson import Part, PoissonParts, check_sampled, mixed_delta, mixed_epsilon
from anyorder.accounting.risk import TradeOff
from anyorder.accounting.selection import Counts, Selection, Top, Uniform, over_sigma, refuse_selection
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.patterns import Participation, check_order
from anyorder.strategy import Strategy

__all__ = [
    "NEIGHBOURS",
    "Amplified",
    "BoundedRange",
    "Composed",
    "Curve",
    "Gaussian",
    "Sampled",
    "compose",
    "sampled_curve",
]


@final
@dataclass(frozen=True)
class Gaussian(TradeOff):
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
        object.__setattr__(self, "mu", checks.real("mu", self.mu, low=0.0))
        checks.choice("neighbours", self.neighbours, NEIGHBOURS)
        checks.word("unit", self.unit)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that holds at delta, rounded up; see `gdp_epsilon`."""
        return gdp_epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        """The smallest delta that holds at epsilon, rounded up; see `gdp_delta`."""
        return gdp_delta(self.mu, epsilon)


class _OfLosses(TradeOff):
    """A curve that is found by its privacy loss distribution."""

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta, at or above the smallest; see `poisson_epsilon`."""
        return mixed_epsilon((_part(self),), checks.probability("delta", delta))  # type: ignore[arg-type]

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon, at or above the smallest, and never below 1e-16 a step where sampled."""
        return mixed_delta([_part(self)], checks.real("epsilon", epsilon, low=0.0))  # type: ignore[arg-type]


@final
@dataclass(frozen=True)
class Sampled(_OfLosses):
    """The curve of n sums with independent noise over batches that take each unit by a secret, independent random draw.

    The privacy loss distribution of the sampled Gaussian; see `poisson_epsilon`. Of "add-or-remove" and "zero-out" it
    is one and the same: a unit that adds zero wherever its draws put it leaves the sums, and all other units' draws, as
    if it were not there. Which of the two a plan may claim is up to who else would move without the unit.

    Attributes:
        sigma: noise std over clip norm, above 0.
        sampling_probability: above 0, at most 1.
        n: steps, from 1 to 1 000 000.
        unit: what is protected, in a word.
        neighbours: "add-or-remove" or "zero-out".
        e0, draws: in each step, before its sum, so many draws of range e0 from the same batch: the
            two are joined first and amplified as a pair; see `anyorder.accounting.bounded_range`. 0 and 0 for none.
        mu: None: the curve is not that of a Gaussian.
    Cost: up to some seconds and 0.5 GB for each call.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """

    sigma: float
    sampling_probability: float
    n: int
    unit: str = field(default="example", kw_only=True)
    e0: float = field(default=0.0, kw_only=True)
    draws: int = field(default=0, kw_only=True)
    neighbours: str = field(default="add-or-remove", kw_only=True)
    mu: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        sigma, q, n = check_sampled(self.sigma, self.sampling_probability, self.n)
        e0, draws = checks.real("e0", self.e0, low=0.0), checks.integer("draws", self.draws, low=0, high=_MAX_DRAWS)
        _set(self, sigma=sigma, sampling_probability=q, n=n, e0=e0, draws=draws)
        if (self.e0 > 0) != (self.draws > 0):
            raise ArgumentError(f"e0 and draws must be given together, got e0={self.e0!r}, draws={self.draws!r}")
        checks.choice("neighbours", self.neighbours, {"add-or-remove", "zero-out"})
        checks.word("unit", self.unit)


@final
@dataclass(frozen=True)
class BoundedRange(_OfLosses):
    """The curve of draws of bounded range, as of the exponential mechanism; they may depend on each other.

        the least of   zero-concentrated DP of draws e0^2 / 8                         [Cesar, Rogers 2021]
                       the loss distribution of delta(x) = (1 - e^((x - e0) / 2))^2 / (1 - e^-e0), convolved
                       mu-GDP of mu = sqrt(draws) 2 Phi^-1(1 / (1 + e^(-e0 / 2)))

    `anyorder.accounting.bounded_range` says what a range is, and why these hold.

    Attributes:
        e0: the range of a draw, above 0, for the relation of neighbours, unitless.
        draws: those that one unit can enter, 1 or more: of k largest scores k, in each of its steps.
        neighbours: the relation that e0 is for.
        unit: what is protected, in a word.
        mu: None: the curve is not that of a Gaussian.
    Cost: up to some seconds and 0.5 GB for each call.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """

    e0: float
    draws: int
    neighbours: str = field(default="zero-out", kw_only=True)
    unit: str = field(default="example", kw_only=True)
    mu: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _set(self, e0=checks.positive("e0", self.e0), draws=checks.integer("draws", self.draws, low=1, high=_MAX_DRAWS))
        checks.choice("neighbours", self.neighbours, NEIGHBOURS)
        checks.word("unit", self.unit)


@final
@dataclass(frozen=True)
class Composed(TradeOff):
    """The curve of mechanisms of several kinds on the same units; made by `compose`, which says what it rests on.

    Privacy loss distributions are convolved, rounded to the safe side; never above the same without sampling.

    Attributes:
        parts: two or more, at most one of them a `Gaussian`, in one order for the same set of mechanisms.
        mu: None: the curve is not that of a Gaussian.
    Cost: up to some seconds and 0.5 GB for each part and call.
    Raises: ArgumentError; MissingDependencyError without dp-accounting.
    """

    parts: "tuple[Single, ...]"
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
        """Return the unit that all parts protect."""
        return self.parts[0].unit

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta, at or above the smallest."""
        delta = checks.probability("delta", delta)
        return max(mixed_epsilon(parts, delta) for parts in _variants(self.parts))

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon, at or above the smallest."""
        epsilon = checks.real("epsilon", epsilon, low=0.0)
        return max(mixed_delta(parts, epsilon) for parts in _variants(self.parts))


Single = Gaussian | BoundedRange | Sampled | Amplified
Curve = Gaussian | BoundedRange | Sampled | Amplified | Composed
"""All there are; each has `epsilon(delta)`, `delta(epsilon)`, `neighbours`, `unit`, and `mu` or None."""
"""How private something is: epsilon at every delta, and delta at every epsilon."""


def sampled_curve(strategy: Strategy, participation: SampledOrder, sigma: float, unit: str = "example") -> Sampled:
    """The curve of Poisson sampling, and of cyclic Poisson sampling of a C whose columns do not overlap within a group.

    There a unit's steps are ceil(n / cycle) sampled Gaussian mechanisms next to each other, each of the norm of its
    column of C at most [Choquette-Choo et al. 2023].

    Args:
        strategy: that `check_fits` let pass.
        sigma: noise std over clip norm.
    Returns: the curve for the order's own neighbours.
    """
    parts = participation.sampled_parts(strategy, sigma)
    return Sampled(*parts, unit=unit, neighbours=participation.neighbours)


class _HasCurve(Protocol):
    """A plan, a certificate, a fitted estimator of one plan: what tells the curve of its mechanism."""

    @property
    def curve(self) -> Curve:
        """Of the mechanism as planned."""


@overload
def compose(*parts: Curve | _HasCurve) -> Curve: ...
@overload
def compose(*parts: float) -> float: ...
def compose(*parts: Curve | _HasCurve | float) -> Curve | float:
    """Compose mechanisms on the same units: return their privacy curve together.

        Gaussian(mu_1), Gaussian(mu_2), ..   ->  Gaussian(sqrt(mu_1^2 + mu_2^2 + ..))    [Dong, Roth, Su 2022, Cor. 3.3]
        any others                           ->  Composed: privacy loss distributions convolved

    `Amplified` curves by "pld" and "bound" are convolved as they are; sampling with separation, and "replace-one",
    count as for known batches; curves by samples are refused, as they hold for one delta.

    Adaptive: each mechanism may be chosen after the releases of those before it, and so may its input, but not its
    curve, which is fixed beforehand. Each has noise and draws of its own. All are about one relation of neighbours
    and one unit of privacy: of two that differ (zero-out here, add-or-remove there) no curve of both follows, and
    they are refused. So: select, then release; a noisy count and a training; several plans on the same people.

        compose(plan_a, plan_b).epsilon(1e-5)

    What is *inside* one mechanism does not count twice: `Adaptive` clip norms are a coordinate of the vector that is
    released, paid for by the plan itself.

    Args:
        parts: curves, or plans and certificates, whose `curve` counts; at least one, and every mechanism that one unit
            can enter. Or numbers, for `compose_mus`.
    Returns: a curve, never below the true one.
    Raises: ArgumentError where relation or unit differ, or numbers stand next to curves.

    Example:
        >>> compose(Gaussian(3.0), Gaussian(4.0))
        Gaussian(mu=5.0, neighbours='zero-out', unit='example')
    """
    told = [part if isinstance(part, Curve) else getattr(part, "curve", part) for part in parts]
    curves = [part for part in told if isinstance(part, Curve)]
    if not curves:
        return compose_mus(*parts)  # type: ignore[arg-type]
    if len(curves) < len(parts):
        raise ArgumentError(f"parts must all be curves, a mu as Gaussian(mu), or all numbers, got {parts!r}")
    found = _normal(tuple(part for curve in curves for part in (curve.parts if type(curve) is Composed else (curve,))))
    return found[0] if len(found) == 1 else Composed(found)


def _normal(parts: "tuple[Single, ...]") -> "tuple[Single, ...]":
    """The parts with equals merged, in one order."""
    for part in parts:
        if type(part) not in (Gaussian, BoundedRange, Sampled, Amplified):
            raise ArgumentError(
                f"parts must be of Gaussian, BoundedRange, Sampled and Amplified, got {type(part).__name__}"
            )
    kinds = {(part.neighbours, part.unit) for part in parts}
    if len(kinds) != 1:
        told = ", ".join(f"{relation!r} for a {unit!r}" for relation, unit in sorted(kinds))
        raise ArgumentError(
            f"parts must agree in neighbours and unit, got {told}: plan all of them for one relation and one unit "
            "(plan(neighbours=.., unit=..), Gaussian(mu, neighbours=.., unit=..))"
        )
    [(neighbours, unit)] = kinds
    mu = compose_mus(*(part.mu for part in parts if type(part) is Gaussian))
    draws: dict[float, int] = {}
    steps: dict[tuple[float, float, float, int], int] = {}
    for part in parts:
        if type(part) is BoundedRange:
            draws[part.e0] = draws.get(part.e0, 0) + part.draws
        if type(part) is Sampled:
            one = (part.sigma, part.sampling_probability, part.e0, part.draws)
            steps[one] = steps.get(one, 0) + part.n
    ranges = tuple(BoundedRange(e0, k, neighbours=neighbours, unit=unit) for e0, k in sorted(draws.items()))
    sampled = tuple(
        Sampled(s, q, n, neighbours=neighbours, unit=unit, e0=e0, draws=k) for (s, q, e0, k), n in sorted(steps.items())
    )
    amplified = tuple(sorted((part for part in parts if type(part) is Amplified), key=lambda one: one.words))
    quiet = mu == 0 and (ranges or sampled or amplified)
    found: tuple[Single, ...] = (*ranges, *sampled, *amplified)
    found = found if quiet else (Gaussian(mu, neighbours=neighbours, unit=unit), *found)
    if len(found) > 1 and any(type(part.method) is MonteCarlo for part in amplified):
        raise ArgumentError(
            "parts must not be found by samples, which hold for one delta of one release: a sum needs the whole curve. "
            "Plan with ao.order(.., method='bound'), which composes, or take replace(curve, method=Deterministic())"
        )
    return found


def _variants(parts: "tuple[Single, ...]") -> Iterator[tuple[Part, ...]]:
    """What is composed, in all cases of which the worst counts: a unit's groups in truncated samplings have sizes."""
    sizes = [variants_of(part) if type(part) is Amplified else (0,) for part in parts]
    for chosen in product(*sizes):
        yield tuple(map(_part, parts, chosen))


def _losses(of: "tuple[Amplified, int]", pld: Any, interval: float) -> Any:
    return curve_losses(*of, pld, interval)


def _part(curve: "Single", size: int = 0) -> Part:
    """What is composed; the noise is rounded down, and no more than matters."""
    match curve:
        case Gaussian():
            return min(math.nextafter(1 / curve.mu, 0.0), _QUIETEST), 1.0, 1
        case BoundedRange():
            return RangeDraws(max(curve.e0, _NARROWEST), curve.draws)
        case Sampled():
            sigma, q = min(curve.sigma, _QUIETEST), curve.sampling_probability
            if curve.draws:
                return Pair(sigma, q, curve.n, max(curve.e0, _NARROWEST), curve.draws)
            return sigma, q, curve.n
        case Amplified():
            return PoissonParts(max(curve.known_mu, 1 / _QUIETEST), transforms_of(curve), (curve, size), _losses)
        case _:
            assert_never(curve)


_QUIETEST = 1e9  # a mu of 1e-9 moves no epsilon that a composition can tell
_NARROWEST = 1e-20  # as many draws as there may be are quieter than that
_MAX_DRAWS = 2**53


def _set(curve: "Single", **values: float) -> None:
    for name, value in values.items():
        object.__setattr__(curve, name, value)


# -- the curve of a plan ----------------------------------------------------------------------------------------------


def plan_curve(
    sigma: float, strategy: Strategy, participation: Participation, neighbours: str, unit: str,
    selection: Selection | None = None, method: Method | None = None,
) -> Curve:  # fmt: skip
    """The curve of a plan: of its release, and of its selection.

    Args:
        sigma: of the release: noise against its whole sensitivity, or, where draws are secret, against the clip norm.
        strategy: C, of which secret orders but Poisson sampling take more than its sensitivity.
        selection: with a sigma of its own, if it needs one.
        method: of an amplified curve, see `Amplified`.
    Raises: PlanError for a selection in a secret order other than Poisson sampling.
    """
    check_order(participation)
    if isinstance(participation, SecretOrder) and not participation.takes_selection:
        refuse_selection(selection, participation.describe())
    match participation:
        case SampledOrder():
            return _sampled(sigma, selection, strategy, participation, neighbours, unit)
        case AmplifiedOrder():
            assert method is not None  # as it is in plans
            return Amplified(strategy, participation, sigma, method, unit=unit, neighbours=neighbours)
        case _ if not participation.secret:
            return _unamplified(sigma, selection, participation, neighbours, unit)
        case _:
            raise PlanError(f"no curve is known for the order {type(participation).__name__}")


def _unamplified(
    sigma: float, selection: Selection | None, participation: Participation, neighbours: str, unit: str
) -> Curve:
    mu = NEIGHBOURS[neighbours] / sigma
    match selection:
        case None | Uniform():
            chosen = 0.0
        case Counts():  # its noise grows with a unit's steps, so that they all together cost this
            chosen = over_sigma(selection, neighbours)
        case Top():
            e0, rows = selection.e0(neighbours), selection.rows
            draws = BoundedRange(e0, rows * participation.max_participations, neighbours=neighbours, unit=unit)
            return compose(Gaussian(mu, neighbours=neighbours, unit=unit), draws)
        case _:
            assert_never(selection)
    return Gaussian(compose_mus(mu, chosen) if chosen else mu, neighbours=neighbours, unit=unit)


def _sampled(
    sigma: float, selection: Selection | None, strategy: Strategy, participation: SampledOrder, neighbours: str,
    unit: str,
) -> Curve:  # fmt: skip
    match selection:
        case None | Uniform():
            pass
        case Counts():
            chosen = over_sigma(selection, neighbours)
            sigma = math.nextafter(1 / compose_mus(math.nextafter(1 / sigma, math.inf), chosen), 0.0)
        case Top():
            parts = participation.sampled_parts(strategy, sigma)
            return Sampled(*parts, unit=unit, e0=selection.e0(neighbours), draws=selection.rows)
        case _:
            assert_never(selection)
    return sampled_curve(strategy, participation, sigma, unit)
