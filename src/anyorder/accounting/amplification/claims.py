"""How an amplified epsilon was found: a closed union, `Method = Pld | Deterministic | MonteCarlo`.

A plan's file says its method, so that whoever reads it can find the same number again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import ceil, exp, inf, nextafter, sqrt
from typing import Any, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from anyorder import checks, patterns, strategy
from anyorder.accounting.amplification.bins import bins_delta, bins_epsilon, bins_losses
from anyorder.accounting.amplification.exact import (
    LARGEST,
    diagonal_kinds,
    diagonal_losses,
    group_sizes,
    pld_delta,
    pld_epsilon,
    truncated_losses,
)
from anyorder.accounting.amplification.mixture import absolute_columns, bins_gram, check_fits, reach
from anyorder.accounting.amplification.monte_carlo import MonteCarlo, SampledInterval, mc_delta, mc_epsilon, mc_interval
from anyorder.accounting.gaussian import NEIGHBOURS, gdp_delta, gdp_epsilon
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, PlanError
from anyorder.formats import canonical, check_names, quoted
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.strategy import Strategy
from anyorder.strategy.sensitivity import known_sensitivity


@final
@dataclass(frozen=True)
class Pld:
    """The privacy loss distribution of the pair itself, on a grid, rounded to the safe side: as tight as the grid."""


@final
@dataclass(frozen=True)
class Deterministic:
    """A proven upper bound that is computed without any chance."""


Method = Pld | Deterministic | MonteCarlo
"""All there are."""


def check_method(method: Any) -> Method:
    """The method, if it is one. Raises: ArgumentError."""
    if type(method) not in (Pld, Deterministic, MonteCarlo):
        raise ArgumentError(f"method must be Pld, Deterministic or MonteCarlo, got {type(method).__name__}")
    found: Method = method
    return found


def describe(method: Method) -> str:
    """In a phrase, for the card."""
    match method:
        case Pld():
            return "by its privacy loss distribution"
        case Deterministic():
            return "by a bound that is computed without chance"
        case MonteCarlo():
            failure = "a hundredth of delta" if method.failure is None else f"{method.failure:g}"
            salted = f", salt {method.salt}" if method.salt else ""
            return (
                f"by {method.samples} samples that anybody can draw again{salted}; too small with probability "
                f"{failure} at most, which is taken off delta"
            )
        case _:
            assert_never(method)


def to_dict(method: Method) -> dict[str, Any]:
    """JSON values."""
    match method:
        case Pld():
            return {"kind": "pld"}
        case Deterministic():
            return {"kind": "bound"}
        case MonteCarlo():
            return {"kind": "monte_carlo", "samples": method.samples, "failure": method.failure, "salt": method.salt}
        case _:
            assert_never(method)


def from_dict(data: Any) -> Method:
    """The method that `to_dict` described. Raises: CertificateError for what it never writes."""
    kind = data.get("kind") if isinstance(data, dict) else None
    match kind:
        case "pld":
            check_names("method", data, {"kind"})
            return Pld()
        case "bound":
            check_names("method", data, {"kind"})
            return Deterministic()
        case "monte_carlo":
            check_names("method", data, {"kind", "samples", "failure", "salt"})
            return MonteCarlo(data["samples"], data["failure"], data["salt"])
        case _:
            raise CertificateError(f"a method must be of kind pld, bound or monte_carlo, got {quoted(kind)}")


# ----------------------------------------------------------------------------------------------------
# Epsilon and delta of a secret order by each method, for the pair with one unit and without it.


Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]

Secret = TruncatedPoisson | BallsInBins | RandomAllocation | MinSeparationSampling
"""The orders with a curve of this kind; Poisson and cyclic Poisson sampling have `Sampled`."""


def default_method(strategy: Strategy, participation: Secret) -> Method:
    """The method of a plan that names none, that is "auto".

    The loss distribution itself where it is known: truncated Poisson sampling, and bins whose columns do not overlap;
    else the deterministic bound; and, for
    sampling with separation, that of known batches.
    """
    match participation:
        case TruncatedPoisson():
            return Pld()
        case BallsInBins() | RandomAllocation():
            return Pld() if reach(strategy) == 1 else Deterministic()
        case MinSeparationSampling():
            return Deterministic()
        case _:
            assert_never(participation)


def check_method_fits(method: Method, strategy: Strategy, participation: Secret) -> None:
    """Raise PlanError where the order is not accounted by this method."""
    match method, participation:
        case (Pld(), TruncatedPoisson()) | (Deterministic() | MonteCarlo(), BallsInBins()):
            return
        case Deterministic(), RandomAllocation():
            return
        case Pld(), BallsInBins() | RandomAllocation():
            if reach(strategy) > 1:
                raise PlanError(
                    f"method 'pld' is for a C whose columns do not overlap, such as independent noise, got "
                    f"{strategy!r}: take 'bound' or 'monte_carlo'"
                )
        case MonteCarlo(), RandomAllocation():
            raise PlanError(
                "no samples are drawn for RandomAllocation, whose epochs are mechanisms beside each other, with bounds "
                "that compose: take method 'bound'"
            )
        case Deterministic() | MonteCarlo(), MinSeparationSampling():  # the bound is that of known batches
            return
        case Pld(), MinSeparationSampling():
            raise PlanError("no loss distribution is known of MinSeparationSampling: take method 'monte_carlo'")
        case Deterministic() | MonteCarlo(), TruncatedPoisson():
            raise PlanError("TruncatedPoisson is accounted by its loss distribution: take method 'pld'")
        case _:
            raise PlanError(f"{type(participation).__name__} is not accounted by {type(method).__name__}")


def pair_epsilon(
    strategy: Strategy, participation: Secret, sigma: float, delta: float, method: Method, progress: Progress | None
) -> float:
    """Epsilon at delta, the larger of both directions, at or above the true one; infinite where the method has none."""
    match method:
        case Pld():
            return pld_epsilon(strategy, _known(participation), sigma, delta)
        case Deterministic():
            return _bound_epsilon(strategy, participation, sigma, delta)
        case MonteCarlo():
            return mc_epsilon(strategy, participation, sigma, delta, method, progress)
        case _:
            assert_never(method)


def pair_delta(
    strategy: Strategy, participation: Secret, sigma: float, epsilon: float, method: Method, progress: Progress | None
) -> float:
    """Delta at epsilon, the larger of both directions, at or above the true one; 1 where the method has none."""
    match method:
        case Pld():
            return pld_delta(strategy, _known(participation), sigma, epsilon)
        case Deterministic():
            return _bound_delta(strategy, participation, sigma, epsilon)
        case MonteCarlo():
            return mc_delta(strategy, participation, sigma, epsilon, method, progress)
        case _:
            assert_never(method)


def _known(participation: Secret) -> TruncatedPoisson | BallsInBins | RandomAllocation:
    """An order whose loss distribution is known, as `check_method_fits` saw to."""
    if type(participation) is MinSeparationSampling:
        raise PlanError("no loss distribution is known of MinSeparationSampling")
    return participation


def _bound_epsilon(strategy: Strategy, participation: Secret, sigma: float, delta: float) -> float:
    """Infinite where nothing is known but what known batches give."""
    match participation:
        case BallsInBins():
            return bins_epsilon(bins_gram(strategy, participation), sigma, delta)
        case RandomAllocation():
            losses, lost = _epoch_losses(strategy, participation, sigma)
            return inf if delta <= 2 * lost else float(losses.get_epsilon_for_delta(delta - lost)) * _UP
        case MinSeparationSampling() | TruncatedPoisson():
            return inf
        case _:
            assert_never(participation)


def _bound_delta(strategy: Strategy, participation: Secret, sigma: float, epsilon: float) -> float:
    """1 where nothing is known but what known batches give."""
    match participation:
        case BallsInBins():
            return bins_delta(bins_gram(strategy, participation), sigma, epsilon)
        case RandomAllocation():
            losses, lost = _epoch_losses(strategy, participation, sigma)
            return min(1.0, max(0.0, float(losses.get_delta_for_epsilon(epsilon))) * _UP + lost)
        case MinSeparationSampling() | TruncatedPoisson():
            return 1.0
        case _:
            assert_never(participation)


@lru_cache(maxsize=2)
def _epoch_losses(strategy: Strategy, participation: RandomAllocation, sigma: float) -> tuple[Any, float]:
    """The loss distribution of all epochs, which do not overlap, composed; and what transforms may take from delta."""
    pld = checks.optional(
        "dp_accounting.pld.privacy_loss_distribution", extra="amplified", purpose="accounting for epochs of bins"
    )
    grams = epoch_grams(strategy, participation)
    largest = max(float(gram.max()) for gram, _ in grams)
    interval = min(max(sqrt(largest) / sigma / 400, 1e-4), 0.1)  # pessimistic, however coarse
    parts = [bins_losses(pld, gram, sigma, interval).self_compose(times) for gram, times in grams]
    return reduce(lambda one, other: one.compose(other), parts), 64 * participation.k * 2.0**-53


def epoch_grams(strategy: Strategy, participation: RandomAllocation) -> list[tuple[Floats, int]]:
    """(Gram matrix of an epoch's columns of |C|, epochs that have it)."""
    k, b = participation.k, participation.b
    grams: dict[bytes, tuple[Floats, int]] = {}
    for epoch in range(k):
        columns = absolute_columns(strategy, np.arange(epoch * b, (epoch + 1) * b))
        gram = columns.T @ columns
        known, times = grams.get(gram.tobytes(), (gram, 0))
        grams[gram.tobytes()] = known, times + 1
    return list(grams.values())


_UP = 1 + 2e-10


# ----------------------------------------------------------------------------------------------------
# The curve of a release whose batches are drawn by secret coins, with any noise that its order is accounted with.


def known_mu(strategy: Strategy, participation: Secret, noise_multiplier: float, neighbours: str) -> float:
    """The mu against those who know the coins, rounded up; no secrecy is left in it."""
    sens = known_sensitivity(strategy, participation).value
    return nextafter(NEIGHBOURS[neighbours] * sens / noise_multiplier * (1 + 2.0**-50), inf)


def check_relation(neighbours: str, participation: Secret, method: Method | None) -> None:
    """Raise PlanError where the relation is not what the order is accounted for by this method."""
    if neighbours == "replace-one" and type(method) is MonteCarlo:
        raise PlanError(
            "samples hold for one delta only, and 'replace-one' needs the curve at another: take method 'bound', or "
            "neighbours 'zero-out' or 'add-or-remove'"
        )
    if neighbours == "add-or-remove" and type(participation) is TruncatedPoisson:
        raise PlanError(
            "TruncatedPoisson is accounted for zero-out neighbours (a unit's gradients replaced by zero): batches are "
            "cut to their size, so that without one unit others would be in its place; got 'add-or-remove'"
        )


@final
@dataclass(frozen=True)
class Amplified:
    """The curve of C G + noise over batches that are drawn by the coins of a secret order.

    Its pair is that of `anyorder.accounting.amplification.mixture`. Never above that of those who know the coins.
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
    participation: Secret
    noise_multiplier: float
    method: Method = field(default_factory=Deterministic)
    unit: str = field(default="example", kw_only=True)
    neighbours: str = field(default="zero-out", kw_only=True)
    mu: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", checks.positive("noise_multiplier", self.noise_multiplier))
        if type(self.participation) not in get_args(Secret):
            raise ArgumentError(f"participation must be an order with a curve of its own, got {self.participation!r}")
        check_fits(self.strategy, self.participation)
        check_method_fits(check_method(self.method), self.strategy, self.participation)
        checks.choice("neighbours", self.neighbours, NEIGHBOURS)
        checks.word("unit", self.unit)
        check_relation(self.neighbours, self.participation, self.method)

    @property
    def known_mu(self) -> float:
        """The mu against those who know the coins, rounded up."""
        return known_mu(self.strategy, self.participation, self.noise_multiplier, self.neighbours)

    @property
    def words(self) -> str:
        """All that it is, in a text: by which the parts of a composition are put in one order."""
        return canonical(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "strategy": self.strategy.to_dict(), "participation": self.participation.to_dict(),
            "noise_multiplier": self.noise_multiplier, "method": to_dict(self.method), "unit": self.unit,
            "neighbours": self.neighbours,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Amplified":
        """The curve that `to_dict` described. Raises: CertificateError, ArgumentError, PlanError for any other."""
        names = {"strategy", "participation", "noise_multiplier", "method", "unit", "neighbours"}
        check_names("an amplified curve", data, names)
        order: Any = patterns.from_dict(data["participation"])
        return cls(
            strategy.from_dict(data["strategy"]), order, data["noise_multiplier"],
            from_dict(data["method"]), unit=data["unit"], neighbours=data["neighbours"],
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


def _pair(curve: Amplified) -> tuple[Strategy, Secret, float]:
    return curve.strategy, curve.participation, curve.noise_multiplier


def _group_epsilon(curve: Amplified, delta: float, high: float) -> float:
    """The smallest epsilon, up to `high`, of two steps from one unit to none and to another."""
    low = 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _found_delta(curve, middle, _Quiet(None)) <= delta else (middle, high)
    return high


# ----------------------------------------------------------------------------------------------------
# Secret orders as parts of a composition: their pessimistic loss distributions, on the grid of all parts.


_LOUDEST = 60.0  # mu^2 of a bin, above which nothing is won by bins
_FINE = 100.0  # points of the grid of bins in the mu of a bin: each takes a sum over the law


def variants_of(curve: Amplified) -> tuple[int, ...]:
    """The cases of which the worst counts: the sizes of groups of truncated sampling; else a single one, 0."""
    match curve.participation:
        case TruncatedPoisson():
            return tuple(sorted(group_sizes(curve.participation)))
        case BallsInBins() | RandomAllocation() | MinSeparationSampling():
            return (0,)
        case _:
            assert_never(curve.participation)


def transforms_of(curve: Amplified) -> int:
    """Mechanisms that its own loss distribution is composed of, beyond one."""
    match curve.participation:
        case TruncatedPoisson():
            return 2 * -(-curve.participation.n // curve.participation.cycle)
        case RandomAllocation():
            return 64 * curve.participation.k
        case BallsInBins() | MinSeparationSampling():
            return 0
        case _:
            assert_never(curve.participation)


def curve_losses(curve: Amplified, size: int, pld: Any, h: float) -> Any:
    """The loss distribution of dp-accounting, both directions, at or above the true one in every delta.

    Bins are put on every so many points of the grid, which is no less pessimistic.

    Args:
        size: of `variants_of`.
        pld: the module dp_accounting.pld.privacy_loss_distribution.
        h: interval of the grid.
    Returns: None where there is none, and known batches say as much: sampling with separation, "replace-one", whose
        two steps of a unit have another curve, and noise that is too little for bins to hide anything.
    """
    strategy, order, sigma = curve.strategy, curve.participation, curve.noise_multiplier
    if curve.neighbours == "replace-one":
        return None
    match curve.method, order:
        case Pld(), TruncatedPoisson():
            return truncated_losses(pld, strategy, order, sigma, size, h)
        case Pld(), BallsInBins() | RandomAllocation():
            kinds = diagonal_kinds(strategy, order)
            if not all(0 < max(kind) / sigma**2 <= LARGEST for kind, _ in kinds):
                return None
            return _joined([diagonal_losses(pld, kind, sigma, h).self_compose(count) for kind, count in kinds])
        case Deterministic(), BallsInBins() | RandomAllocation():
            grams = _grams(strategy, order)
            mu = sqrt(max(float(gram.max()) for gram, _ in grams)) / sigma
            if not 1e-6 < mu * mu < _LOUDEST:
                return None
            every = max(1, ceil(min(mu / _FINE, 0.1) / h))
            return _joined([bins_losses(pld, gram, sigma, h, every).self_compose(count) for gram, count in grams])
        case Deterministic(), MinSeparationSampling():
            return None
        case MonteCarlo(), _:
            raise ArgumentError("samples hold for one delta of one release, and have no loss distribution")
        case _:
            raise ArgumentError(f"no loss distribution is known of {order.describe()} by {curve.method!r}")


def _grams(strategy: Strategy, order: BallsInBins | RandomAllocation) -> list[tuple[NDArray[np.float64], int]]:
    """(Gram matrix of a draw of bins, draws that have it)."""
    match order:
        case BallsInBins():
            return [(bins_gram(strategy, order), 1)]
        case RandomAllocation():
            return epoch_grams(strategy, order)
        case _:
            assert_never(order)


def _joined(found: list[Any]) -> Any:
    return reduce(lambda one, other: one.compose(other), found)
