"""The claim of a secret order: epsilon and delta by a method, the curve `Amplified`, and its part in a composition."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, inf, nextafter
from typing import Any, assert_never

from anyorder import checks, patterns
from anyorder._numerics import bisect
from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.exact import pld_delta, pld_epsilon
from anyorder.accounting.amplification.methods import Deterministic, Method, MonteCarlo, Pld, check_method
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.amplification.monte_carlo import SampledInterval, mc_delta, mc_epsilon, mc_interval
from anyorder.accounting.amplification.secret_order import AmplifiedOrder
from anyorder.accounting.gaussian import NEIGHBOURS, gdp_delta, gdp_epsilon
from anyorder.accounting.risk import TradeOff
from anyorder.checks import final
from anyorder.errors import ArgumentError, PlanError
from anyorder.formats import canonical, check_names
from anyorder.strategy import Strategy
from anyorder.strategy.registry import from_dict as strategy_from_dict
from anyorder.strategy.registry import known_sensitivity

# ----------------------------------------------------------------------------------------------------
# Epsilon and delta of a secret order by each method, for the pair with one unit and without it.


Progress = Callable[[int, int], None]


def default_method(strategy: Strategy, participation: AmplifiedOrder) -> Method:
    """The method of a plan that names none, that is "auto".

    The loss distribution itself where it is known: truncated Poisson sampling, and bins whose columns do not overlap;
    else the deterministic bound; and, for sampling with separation, that of known batches.
    """
    return participation.default_method(strategy)


def check_method_fits(method: Method, strategy: Strategy, participation: AmplifiedOrder) -> None:
    """Raise PlanError where the order is not accounted by this method."""
    participation.check_method(method, strategy)


def pair_epsilon(
    strategy: Strategy,
    participation: AmplifiedOrder,
    sigma: float,
    delta: float,
    method: Method,
    progress: Progress | None,
) -> float:
    """Epsilon at delta, the larger of both directions, at or above the true one; infinite where the method has none."""
    match method:
        case Pld():
            return pld_epsilon(strategy, participation, sigma, delta)
        case Deterministic():
            return participation.bound_epsilon(strategy, sigma, delta)
        case MonteCarlo():
            return mc_epsilon(strategy, participation, sigma, delta, method, progress)
        case _:
            assert_never(method)


def pair_delta(
    strategy: Strategy,
    participation: AmplifiedOrder,
    sigma: float,
    epsilon: float,
    method: Method,
    progress: Progress | None,
) -> float:
    """Delta at epsilon, the larger of both directions, at or above the true one; 1 where the method has none."""
    match method:
        case Pld():
            return pld_delta(strategy, participation, sigma, epsilon)
        case Deterministic():
            return participation.bound_delta(strategy, sigma, epsilon)
        case MonteCarlo():
            return mc_delta(strategy, participation, sigma, epsilon, method, progress)
        case _:
            assert_never(method)


# ----------------------------------------------------------------------------------------------------
# The curve of a release whose batches are drawn in secret, with any noise that its order is accounted with.


def known_mu(strategy: Strategy, participation: AmplifiedOrder, noise_multiplier: float, neighbours: str) -> float:
    """The mu against those who know the draws, rounded up; no secrecy is left in it."""
    sens = known_sensitivity(strategy, participation).value
    return nextafter(NEIGHBOURS[neighbours] * sens / noise_multiplier * (1 + 2.0**-50), inf)


def check_relation(neighbours: str, participation: AmplifiedOrder, method: Method | None) -> None:
    """Raise PlanError where the relation is not what the order is accounted for by this method."""
    if neighbours == "replace-one" and type(method) is MonteCarlo:
        raise PlanError(
            "samples hold for one delta only, and 'replace-one' needs the curve at another: take method 'bound', or "
            "neighbours 'zero-out' or 'add-or-remove'"
        )
    participation.check_neighbours(neighbours)


@final
@dataclass(frozen=True)
class Amplified(TradeOff):
    """The curve of C G + noise over batches that a secret order draws.

    Its pair is that of `anyorder.accounting.amplification.mixture`. Never above that of those who know the draws.
    "replace-one" is two such steps, from the unit to none and from none to the other:

        delta_replace(eps) <= delta(eps / 2) (1 + e^(eps / 2))

    Attributes:
        strategy: C; `noise_multiplier` covers the rounding of its coefficients.
        participation: the order.
        noise_multiplier: sigma, noise std over clip norm, above 0.
        method: how epsilon and delta are found.
        unit: what is protected, in a word.
        neighbours: "zero-out" or "add-or-remove", which have one pair where a unit's absence moves no other.
        mu: None: the curve is not that of a Gaussian.
    Raises: ArgumentError; PlanError where the order is not accounted with this C, or for these neighbours.
    """

    strategy: Strategy
    participation: AmplifiedOrder
    noise_multiplier: float
    method: Method = field(default_factory=Deterministic)
    unit: str = field(default="example", kw_only=True)
    neighbours: str = field(default="zero-out", kw_only=True)
    mu: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", checks.positive("noise_multiplier", self.noise_multiplier))
        if not isinstance(self.participation, AmplifiedOrder):
            raise ArgumentError(f"participation must be an order with a curve of its own, got {self.participation!r}")
        check_fits(self.strategy, self.participation)  # by exact type: a class of one's own is refused
        check_method_fits(check_method(self.method), self.strategy, self.participation)
        checks.choice("neighbours", self.neighbours, NEIGHBOURS)
        checks.word("unit", self.unit)
        check_relation(self.neighbours, self.participation, self.method)

    @property
    def known_mu(self) -> float:
        """The mu against those who know the draws, rounded up."""
        return known_mu(self.strategy, self.participation, self.noise_multiplier, self.neighbours)

    @property
    def words(self) -> str:
        """All that it is, in a text: by which the parts of a composition are put in one order."""
        return canonical(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "strategy": self.strategy.to_dict(), "participation": self.participation.to_dict(),
            "noise_multiplier": self.noise_multiplier, "method": methods.to_dict(self.method), "unit": self.unit,
            "neighbours": self.neighbours,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Amplified":
        """The curve that `to_dict` described. Raises: CertificateError, ArgumentError, PlanError for any other."""
        names = {"strategy", "participation", "noise_multiplier", "method", "unit", "neighbours"}
        check_names("an amplified curve", data, names)
        order: Any = patterns.from_dict(data["participation"])
        return cls(
            strategy_from_dict(data["strategy"]), order, data["noise_multiplier"],
            methods.from_dict(data["method"]), unit=data["unit"], neighbours=data["neighbours"],
        )  # fmt: skip

    def epsilon(self, delta: float, progress: Progress | None = None) -> float:
        """An epsilon that holds at delta, at or above the smallest.

        Args:
            progress: called with what was done of what is to be done, by samples; never by another method.
        """
        return _epsilon(self, checks.probability("delta", delta), progress or _watch.get())

    def delta(self, epsilon: float, progress: Progress | None = None) -> float:
        """A delta that holds at epsilon, at or above the smallest."""
        return _delta(self, checks.real("epsilon", epsilon, low=0.0), progress)

    @property
    def _whole(self) -> "Amplified":
        """Of samples, which hold for one point alone, the curve by the order's own method; of others itself."""
        own = default_method(self.strategy, self.participation)
        return replace(self, method=own) if type(self.method) is MonteCarlo else self


_watch: ContextVar[Progress | None] = ContextVar("who is told how far samples are", default=None)


@contextmanager
def watched(progress: Progress) -> Iterator[None]:
    """Within, `progress` is called with what samples are done and to be done, whoever asks for their number."""
    token = _watch.set(progress)
    try:
        yield
    finally:
        _watch.reset(token)


def fresh_interval(curve: Amplified, delta: float, salt: int) -> SampledInterval | None:
    """Both limits of epsilon by samples of another salt, each wrong with probability 1e-3; None where none are drawn.

    A claim by samples below the lower limit is refuted: its own samples were chosen, or chance was against it.
    """
    if type(curve.method) is not MonteCarlo:
        return None
    settings = MonteCarlo(curve.method.samples, None, salt)
    return mc_interval(*_pair(curve), delta, settings, _watch.get())


@dataclass(frozen=True)
class _Quiet:
    """A progress bar that makes no difference to a cached number."""

    tell: Progress | None

    def __eq__(self, other: object) -> bool:
        return type(other) is _Quiet

    def __hash__(self) -> int:
        return 0


def _epsilon(curve: Amplified, delta: float, progress: Progress | None) -> float:
    return _found_epsilon(curve, delta, _Quiet(progress))


def _delta(curve: Amplified, epsilon: float, progress: Progress | None) -> float:
    return _found_delta(curve, epsilon, _Quiet(progress))


@lru_cache(maxsize=64)  # samples take seconds, and claims ask for the same number again
def _found_epsilon(curve: Amplified, delta: float, progress: _Quiet) -> float:
    known = gdp_epsilon(curve.known_mu, delta)
    if known == 0:
        return known
    if curve.neighbours == "replace-one":
        return min(known, _group_epsilon(curve, delta, known))
    return min(known, pair_epsilon(*_pair(curve), delta, curve.method, progress.tell))


@lru_cache(maxsize=1024)
def _found_delta(curve: Amplified, epsilon: float, progress: _Quiet) -> float:
    known = gdp_delta(curve.known_mu, epsilon)
    if known == 0:
        return known
    if curve.neighbours == "replace-one":
        half = pair_delta(*_pair(curve), epsilon / 2, curve.method, progress.tell)
        return min(known, nextafter(half * (1 + exp(min(epsilon / 2, 700.0))) * (1 + 2.0**-50), inf))
    return min(known, pair_delta(*_pair(curve), epsilon, curve.method, progress.tell))


def _pair(curve: Amplified) -> tuple[Strategy, AmplifiedOrder, float]:
    return curve.strategy, curve.participation, curve.noise_multiplier


def _group_epsilon(curve: Amplified, delta: float, high: float) -> float:
    """The smallest epsilon, up to `high`, of two steps from one unit to none and to another."""

    def holds(epsilon: float) -> bool:
        return _found_delta(curve, epsilon, _Quiet(None)) <= delta

    return bisect(holds, inside=high, outside=0.0, relative=1e-6)


# ----------------------------------------------------------------------------------------------------
# Secret orders as parts of a composition: their pessimistic loss distributions, on the grid of all parts.


def variants_of(curve: Amplified) -> tuple[int, ...]:
    """The cases of which the worst counts: the sizes of groups of truncated sampling; else a single one, 0."""
    return curve.participation.variants


def transforms_of(curve: Amplified) -> int:
    """Mechanisms that its own loss distribution is composed of, beyond one."""
    return curve.participation.transforms


def curve_losses(curve: Amplified, size: int, pld: Any, h: float) -> Any:
    """The loss distribution of dp-accounting, both directions, at or above the true one in every delta.

    Args:
        size: of `variants_of`.
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        h: interval of the grid.
    Returns: None where there is none, and known batches say as much: sampling with separation, "replace-one", whose
        two steps of a unit have another curve, and noise that is too little for bins to hide anything.
    """
    if curve.neighbours == "replace-one":
        return None
    if type(curve.method) is MonteCarlo:
        raise ArgumentError("samples hold for one delta of one release, and have no loss distribution")
    return curve.participation.losses(curve.method, curve.strategy, curve.noise_multiplier, size, pld, h)
