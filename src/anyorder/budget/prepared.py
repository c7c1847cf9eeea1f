"""The plans of a search, all of them made before its first run, with the noise that keeps the target of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nextafter, sqrt
from typing import Any

from anyorder._closed import final
from anyorder._sealed import canonical
from anyorder.accounting import compose, gdp_mu
from anyorder.accounting.curves import NEIGHBOURS, Curve, Gaussian
from anyorder.budget.bounds import calibrate_search
from anyorder.budget.found import ScoreNoise, SearchClaim
from anyorder.budget.laws import Law
from anyorder.budget.space import PLAN_NAMES, Settings, Space, plan_settings
from anyorder.errors import AnyorderError, ArgumentError, PlanError
from anyorder.plan import Plan
from anyorder.planner import plan, with_budget

__all__ = ["Prepared", "prepare"]

_NOISE = {"epsilon", "delta", "noise_multiplier", "sigma"}
_ATTEMPTS = 64


@final
@dataclass(frozen=True)
class Prepared:
    """What is fixed, and public, before the first run.

    Attributes:
        claim: of the whole search.
        plans: the canonical text of a plan's settings -> the plan.
    """

    claim: SearchClaim
    plans: dict[str, Plan]

    def plan(self, settings: Settings) -> Plan:
        """That of a run with these settings."""
        return self.plans[canonical(plan_settings(settings))]

    def named(self, fingerprint: str) -> "Prepared":
        """With plans that say which search they are candidates of, wherever their runs' certificates are taken."""
        named = {text: replace(plan, candidate_of=fingerprint) for text, plan in self.plans.items()}
        return replace(self, plans=named)


def prepare(
    space: Space, given: Mapping[str, Any], law: Law, epsilon: float, delta: float, score: tuple[float, float] | None
) -> Prepared:
    """Make every plan that a run may have, with equal noise against its sensitivity, so that the search keeps epsilon.

        mu_run^2 + mu_score^2 = mu^2,   mu_score^2 = share mu^2,   mu the most for which search_epsilon <= epsilon

    **One curve for all runs.** A run draws its settings s by coins and shows them with its outcome, so for neighbours
    D and D' its hockey-stick divergence is sum_s p(s) delta_s(eps), which is at most that of a curve that no delta_s
    exceeds. Of Gaussian curves that is the one with the largest mu. For other curves the largest at each epsilon may be
    that of no mechanism at all, so they must be equal.

    Args:
        given: keywords of `anyorder.plan` that all runs share.
        score: (sensitivity, share) of a score of private data.
    Raises: ArgumentError; PlanError for settings that make no plan, and for plans that have no curve in common.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"plan must be keywords of ao.plan, {{name: value}}, got {type(given).__name__}")
    if strange := sorted(set(given) - PLAN_NAMES):
        raise ArgumentError(f"plan must be keywords of ao.plan, which has no {', '.join(map(repr, strange[:3]))}")
    if noise := sorted(set(given) & _NOISE):
        raise ArgumentError(
            f"plan must not have {noise[0]!r}: epsilon= and delta= of the search say the noise of all runs"
        )
    bases = {}
    for own in space.plans():
        if both := sorted(set(own) & set(given)):
            raise ArgumentError(f"{both[0]!r} must be in plan= or in the space, not in both")
        text = canonical(own)
        if text not in bases:
            bases[text] = _base(given, own, delta)
    relations = {(base.neighbours, base.unit) for base in bases.values()}
    if len(relations) != 1:
        raise PlanError(
            f"all plans of a search must be about one relation of neighbours and one unit, got {sorted(relations)}: a "
            "claim is about one of each. Do not search over what changes them, such as order 'poisson' beside others"
        )
    noisy = _Noisy(list(bases.values()), delta, score)
    claim, sigma = noisy.calibrated(law, epsilon)
    return Prepared(claim, {text: with_budget(base, sigma=sigma) for text, base in bases.items()})


def _base(given: Mapping[str, Any], own: Settings, delta: float) -> Plan:
    try:
        return plan(**given, **own, delta=delta, sigma=1.0)
    except AnyorderError as problem:
        raise PlanError(f"the settings {own!r} make no plan, so nothing was run: {problem}") from problem


@final
@dataclass(frozen=True)
class _Noisy:
    """Plans as a function of sigma, which they share."""

    bases: Sequence[Plan]
    delta: float
    score: tuple[float, float] | None

    def calibrated(self, law: Law, epsilon: float) -> tuple[SearchClaim, float]:
        """(the claim, sigma): the least noise whose claim, recomputed from the plans themselves, is at most epsilon."""
        plain = all(type(base.curve) is Gaussian and base.selection is None for base in self.bases)
        if plain:
            mu = calibrate_search(law, epsilon, self.delta)
            factor = NEIGHBOURS[self.bases[0].neighbours]
            sigma = nextafter(factor / (mu * sqrt(1 - (self.score[1] if self.score else 0.0))), inf)
        else:
            sigma = 1 / calibrate_search(law, epsilon, self.delta, lambda mu: self.at(1 / mu)[0])
        for attempt in range(_ATTEMPTS):  # the roundings of the parts, each up, may be above by some last digits
            curve, noise = self.at(sigma)
            claim = SearchClaim(law, curve, self.delta, noise)
            if claim.epsilon <= epsilon:
                return claim, sigma
            sigma *= 1 + 2.0 ** (attempt - 50)
        raise PlanError(f"no noise was found that keeps epsilon {epsilon:g} for this search")

    def at(self, sigma: float) -> tuple[Curve, ScoreNoise | None]:
        """(the curve of any one run with its score; the noise of the score)."""
        run = _common([with_budget(base, sigma=sigma).curve for base in self.bases])
        if self.score is None:
            return run, None
        sensitivity, share = self.score
        mu = run.mu if run.mu is not None else gdp_mu(run.epsilon(self.delta), self.delta)
        noise = ScoreNoise(sensitivity, nextafter(sensitivity / (mu * sqrt(share / (1 - share))), inf))
        return compose(run, Gaussian(noise.mu, neighbours=run.neighbours, unit=run.unit)), noise


def _common(curves: list[Curve]) -> Curve:
    """One that bounds all."""
    gaussian = [curve for curve in curves if type(curve) is Gaussian]
    if len(gaussian) == len(curves):
        return max(gaussian, key=lambda curve: curve.mu)
    if any(curve != curves[0] for curve in curves):
        raise PlanError(
            "the plans of a search must all be Gaussian, or all have the same curve, and these differ: search over "
            "batch_size, epochs and the like in orders without secret sampling (order='shuffled'), and with secret "
            "sampling over what leaves its coins alone, such as clip_norm and learning rates"
        )
    return curves[0]
