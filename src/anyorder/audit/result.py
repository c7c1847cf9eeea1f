"""What an audit found, beside what was claimed."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Sampled
from anyorder.audit import bounds
from anyorder.audit.bounds import Method, epsilon_lower_bound, mu_estimate, p_value
from anyorder.checks import final, frozen
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_down, rounded_up

__all__ = ["REFUTED", "Audited", "Stated"]

REFUTED = 1e-6
"""A claim is refuted where what was seen has at most this probability if the claim is true."""


@final
@dataclass(frozen=True)
class Stated:
    """A claim of one point, as most programs print it: no curve and no mu follow from it.

    Attributes:
        stated_epsilon: the epsilon that is claimed.
        stated_delta: at this delta.
        neighbours: what the draws of its audit decided, as of a curve.
    """

    stated_epsilon: float
    stated_delta: float
    neighbours: str = "zero-out"
    mu: None = field(default=None, init=False, repr=False)


@final
@dataclass(frozen=True, kw_only=True)
class Audited:
    """Scores of canaries, who of them was included, and the claim that they are held against.

    The verdict is `refuted()`: whether the result would have probability below 10^-6 were the claim true. The lower
    bounds are printed next to it and are no verdict: a bound of confidence 95 % lies above a true and tight claim in up
    to one run of twenty. What the verdict rests on, `method` says: one run refutes little where nothing is known of the
    scores ("f_dp": half the noise at epsilon 8 stays unseen by 1000 canaries), and much where they are independent,
    as those of orthogonal canaries are.

    An attack that is to be repeated on the same release must not know the draws: `to_dict` leaves them out.

    Attributes:
        scores: (count,) of one run.
        included: (count,) bool, the draws.
        noise_std: claimed standard deviation of a score; None where scores are no Gaussians (secret sampling).
        mus: (count,) the claimed mu of each canary's own steps; None where there is none.
        curve: the claim; `Stated` where it is no more than epsilon at delta.
        delta: of the claim.
        epsilon: the claimed epsilon at delta.
        informed: whether what the units of the data add was taken away before the scores were made. Then scores, and
            all that follows from them, tell it to anyone who has what the run released, or a model that it trained.
        run_discarded: whether of the run nothing is left but this: neither what it released nor what it trained.
            What is said of an informed audit may be shown only then.
        independent: whether scores are independent of each other, as they are where canaries are orthogonal, the noise
            is white across coordinates, and what everybody else adds was taken away. Where it was not, data that agree
            with few draws by chance would refute a true claim.
    """

    scores: NDArray[np.float64] = field(repr=False)
    included: NDArray[np.bool_] = field(repr=False)
    noise_std: float | None
    mus: NDArray[np.float64] | None = field(repr=False)
    curve: Curve | Stated
    delta: float
    epsilon: float
    independent: bool = False
    informed: bool = False
    run_discarded: bool = False

    def __post_init__(self) -> None:
        scores = checks.array("scores", self.scores, ndim=1)
        included = np.asarray(self.included)
        if included.dtype != np.bool_ or included.shape != scores.shape:
            raise ArgumentError(
                f"included must be one bool for each of {len(scores)} scores, got {included.dtype} of shape "
                f"{included.shape}"
            )
        checks.probability("delta", self.delta)
        checks.real("epsilon", self.epsilon, low=0.0)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "included", frozen(included))
        if self.noise_std is not None:
            checks.positive("noise_std", self.noise_std)
        if self.mus is not None:
            mus = checks.array("mus", self.mus, ndim=1)
            if mus.shape != scores.shape:
                raise ArgumentError(f"mus must be one number for each of {len(scores)} scores, got {len(mus)}")
            object.__setattr__(self, "mus", mus)

    def lower_bound(self, method: Method | None = None, confidence: float = 0.95) -> float:
        """A lower bound on the true epsilon at `delta`; see `anyorder.audit.epsilon_lower_bound`.

        Args:
            method: None for "f_dp"; for a claim that is only `Stated`, of who knows what mechanism, "one_run".
            confidence: strictly between 0 and 1.
        """
        chosen = method or self.lower_bound_method
        return float(epsilon_lower_bound(self.scores, self.included, self.delta, confidence, chosen))

    @property
    def lower_bound_method(self) -> Method:
        """The method of `lower_bound` where none is named."""
        return "one_run" if isinstance(self.curve, Stated) else "f_dp"

    def mu_estimate(self, confidence: float = 0.95) -> tuple[float, float]:
        """An interval for mu by the Gaussian law of scores: an estimate; see `anyorder.audit.mu_estimate`.

        Raises: ArgumentError under secret sampling, where scores have no such law.
        """
        if self._sampled:
            raise ArgumentError(
                "mu_estimate needs scores that are normal, and under secret sampling they are log likelihood ratios, "
                "which are not: use lower_bound or p_value"
            )
        low, high = mu_estimate(self.scores, self.included, confidence)
        return float(low), float(high)

    @property
    def _sampled(self) -> bool:
        return isinstance(self.curve, (BoundedRange, Sampled, Amplified, Composed))

    @property
    def methods(self) -> tuple[Method, ...]:
        """All that `p_value` rests on: `method`; and where that is "clopper_pearson" also "f_dp".

        "clopper_pearson" takes half of the canaries to choose its threshold, and "f_dp" takes them all but does not
        know that they are independent: which one sees more depends on the claim and on how many canaries there are.
        """
        return ("clopper_pearson", "f_dp") if self.method == "clopper_pearson" else (self.method,)

    @property
    def method(self) -> Method:
        """Return what `p_value` rests on: "f_dp"; for independent scores "clopper_pearson", for normal ones "gaussian".

        Normal are those with a `noise_std`, and a claim with a mu; a loss, or a log likelihood ratio, is not.
        """
        if not self.independent:
            return "f_dp"
        return "clopper_pearson" if self.curve.mu is None or self.noise_std is None else "gaussian"

    def p_value(self, method: Method | None = None) -> float:
        """At most the probability of a result at least as strong, if the claim is true; see `anyorder.audit.p_value`.

        Of two methods together it is twice the smaller p (Bonferroni): under a true claim each alone is at most a with
        probability a at most, so either is at most a / 2 with probability a at most, however they depend on each other.

        Args:
            method: None for all of `self.methods`; 1 where that is "gaussian" and there are not both kinds of canaries,
                or fewer than three, or nothing that tells the noise.
        """
        tests = self.methods if method is None else (method,)
        if method is None and self.method == "gaussian" and t_statistic(self) is None:
            return 1.0
        claim = (self.epsilon, self.delta) if isinstance(self.curve, Stated) else self.curve
        found = [float(p_value(self.scores, self.included, claim, method=test)) for test in tests]
        return min(1.0, len(found) * min(found))

    def refuted(self, significance: float = REFUTED) -> bool:
        """True if the claim is refuted: `p_value() < significance`."""
        return self.p_value() < checks.probability("significance", significance)

    @property
    def alike(self) -> str | None:
        """Words for draws that all came out alike: scores of one kind refute no claim. None where they did not."""
        if self.included.any() and not self.included.all():
            return None
        here, there = ("in", "out") if self.included.all() else ("out", "in")
        return (
            f"nothing was tested by scores: all draws came out alike, {counted(len(self.scores), 'canary')} {here} and "
            f"none {there}; audit again, with more canaries or with draws that are fair"
        )

    def to_dict(self, *, secrets: bool = False) -> dict[str, Any]:
        """JSON values: the claim and what the audit says of it.

        Args:
            secrets: with scores, draws and the mu of each canary's steps.
        Raises: ArgumentError without `secrets`, where the audit is informed and its run was not discarded: see `plant`.
        """
        if not secrets:
            check_public(self)
        t = t_statistic(self)
        known = self.mus is not None and t is not None and math.isfinite(t) and not self._sampled
        low, high = self.mu_estimate() if known else (None, None)
        result: dict[str, Any] = {
            "canaries": len(self.scores),
            "delta": self.delta,
            "epsilon": self.epsilon,
            "mu": self.curve.mu,
            "lower_bound": self.lower_bound(),
            "lower_bound_method": self.lower_bound_method,
            "mu_low": low,
            "mu_high": high,
            "method": ", ".join(self.methods),
            "p_value": self.p_value(),
            "refuted": self.refuted(),
            "informed": self.informed,
        }
        if secrets:
            result["scores"], result["included"] = self.scores.tolist(), self.included.tolist()
            result["noise_std"] = self.noise_std
            result["mus"] = None if self.mus is None else self.mus.tolist()
        return result

    def __repr__(self) -> str:
        return (
            f"Audited({len(self.scores)} canaries, claimed_epsilon={rounded_up(self.epsilon, 6)}, "
            f"delta={rounded_up(self.delta, 6)}, independent={self.independent}, informed={self.informed})"
        )

    def __str__(self) -> str:
        """Claim, bound and verdict; of what is as secret as the data the claim alone. Cost: that of `p_value`."""
        claimed = f"claimed_epsilon: {rounded_up(self.epsilon)} at delta {rounded_up(self.delta, 6)}"
        if self.informed and not self.run_discarded:
            return f"{claimed}\nseen: as secret as the data, see to_dict"
        p = self.p_value()
        alike = "" if self.alike is None else f"\n{self.alike}"
        return (
            f"{claimed}\n"
            f"seen: epsilon at least {rounded_down(self.lower_bound())} ({self.lower_bound_method}, 95 %), by "
            f"{counted(len(self.scores), 'canary')}\n"
            f"verdict: {'REFUTED' if p < REFUTED else 'not refuted'} at {REFUTED:g}, p-value {p:.2g} "
            f"({', '.join(self.methods)}){alike}"
        )


def t_statistic(audited: Audited) -> float | None:
    """That of the Gaussian law: infinite for canaries that stand out of no noise, None where nothing tells the noise.

    Where it is not finite there is no interval of mu; where it is infinite every claim is refuted.
    """
    return bounds.statistic(audited.scores, audited.included)


def check_public(audited: Audited) -> None:
    """Raises: ArgumentError if what is said of an audit, together with its run, tells what the units added."""
    if audited.informed and not audited.run_discarded:
        raise ArgumentError(
            "an informed audit tells what the units added to anyone who has its release, or a model trained by it: its "
            "result is as secret as the data; take to_dict(secrets=True) and keep it as such, plant(.., "
            "informed=False), or audit_training, which trains a copy and throws it away"
        )
