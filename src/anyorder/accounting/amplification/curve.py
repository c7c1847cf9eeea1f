"""The curve of a release whose batches are drawn by secret coins, with any noise that its order is accounted with."""

from dataclasses import dataclass, field
from math import inf, nextafter
from typing import Any, assert_never

from anyorder import _check, participation, strategy
from anyorder._closed import final
from anyorder._sealed import canonical, check_names
from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.methods import Deterministic, Method, Pld, check_method
from anyorder.accounting.amplification.mixture import check_fits
from anyorder.accounting.gaussian import gdp_delta, gdp_epsilon
from anyorder.errors import ArgumentError, PlanError
from anyorder.participation.sampled import BallsInBins, MinSeparationSampling, RandomAllocation, TruncatedPoisson
from anyorder.sensitivity import known_sensitivity
from anyorder.strategy import Strategy

__all__ = ["RELATIONS", "Amplified", "Secret", "check_relation", "default_method", "known_mu"]

Secret = TruncatedPoisson | BallsInBins | RandomAllocation | MinSeparationSampling
"""The orders with a curve of this kind; Poisson and cyclic Poisson sampling have `Sampled`."""

RELATIONS = {"zero-out": 1.0, "replace-one": 2.0, "add-or-remove": 1.0}
"""Relation -> how far a unit moves the release, in sensitivities, for those who know the coins."""


def known_mu(strategy: Strategy, participation: Secret, noise_multiplier: float, neighbours: str) -> float:
    """The mu against those who know the coins, rounded up; no secrecy is left in it."""
    sens = known_sensitivity(strategy, participation).value
    return nextafter(RELATIONS[neighbours] * sens / noise_multiplier * (1 + 2.0**-50), inf)


def check_relation(neighbours: str, participation: Secret) -> None:
    """Raise PlanError where the relation is not what the order is accounted for."""
    if neighbours == "add-or-remove" and type(participation) is TruncatedPoisson:
        raise PlanError(
            "TruncatedPoisson is accounted for zero-out neighbours (a unit's gradients replaced by zero): batches are "
            "cut to their size, so that without one unit others would be in its place; got 'add-or-remove'"
        )


def default_method(participation: Secret) -> Method:
    """The method of a plan that names none."""
    match participation:
        case TruncatedPoisson():
            return Pld()
        case BallsInBins() | RandomAllocation() | MinSeparationSampling():
            return Deterministic()
        case _:
            assert_never(participation)


@final
@dataclass(frozen=True)
class Amplified:
    """The curve of C G + noise over batches that are drawn by the coins of a secret order.

    Its pair is that of `anyorder.accounting.amplification.mixture`. Never above that of those who know the coins.

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
        object.__setattr__(self, "noise_multiplier", _check.positive("noise_multiplier", self.noise_multiplier))
        if type(self.participation) not in (TruncatedPoisson, BallsInBins, RandomAllocation, MinSeparationSampling):
            raise ArgumentError(f"participation must be an order with a curve of its own, got {self.participation!r}")
        check_method(self.method)
        check_fits(self.strategy, self.participation)
        _check.choice("neighbours", self.neighbours, RELATIONS)
        _check.word("unit", self.unit)
        check_relation(self.neighbours, self.participation)

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
            "noise_multiplier": self.noise_multiplier, "method": methods.to_dict(self.method), "unit": self.unit,
            "neighbours": self.neighbours,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Amplified":
        """The curve that `to_dict` described. Raises: CertificateError, ArgumentError, PlanError for any other."""
        names = {"strategy", "participation", "noise_multiplier", "method", "unit", "neighbours"}
        check_names("an amplified curve", data, names)
        order: Any = participation.from_dict(data["participation"])
        return cls(
            strategy.from_dict(data["strategy"]), order, data["noise_multiplier"],
            methods.from_dict(data["method"]), unit=data["unit"], neighbours=data["neighbours"],
        )  # fmt: skip

    def epsilon(self, delta: float) -> float:
        """An epsilon that holds at delta, at or above the smallest."""
        return gdp_epsilon(self.known_mu, _check.probability("delta", delta))

    def delta(self, epsilon: float) -> float:
        """A delta that holds at epsilon, at or above the smallest."""
        return gdp_delta(self.known_mu, _check.real("epsilon", epsilon, low=0.0))
