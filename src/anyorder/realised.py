"""What a run turned out to cost, from how often units came and how far apart: for its certificate, beside the plan's.

The plan's epsilon is that of the worst steps that its participation allows. Afterwards it is known that no unit took
part more than k times, nor twice within less than b steps. With the noise as planned,

    mu = mu_plan min(1, sens(C, S) / sens(C, participation)),     S = MinSeparation(n, b, k)

**Why it may be claimed.** Let pi say who is in which step, of the steps that were taken. Under `zero-out` and
`replace-one` neighbours, pi is the same for both. Let it, and the step after which the run ended, be chosen without
looking at what was released: by a calendar, by coins, by who is at hand. Then a run is one draw of pi, the same for
neighbours, and after it a Gaussian matrix mechanism whose steps are those of pi, and whose noise was fixed beforehand:
mu-GDP with mu = f clip_norm sens(C, pi) / noise_std for this pi, whatever else might have been drawn. Every unit's
steps in pi are a pattern of S, and float32 coefficients move sens(C, S) by no larger share than that of the plan, which
allows no fewer participations. So mu above is at least that of pi. And it is a function of pi alone: to show it shows
nothing in which neighbours differ.

A selection of rows (`Plan.selection`) in k steps counts beside the release: mu^2 is the sum of both.

**Where it may not.** Where what was released decided who came, or when to stop, the smaller number is no claim: a run
that ends when its releases happen to say much about somebody has lost more than its length tells. The plan's epsilon
holds there too; to stop early costs it nothing. Under `add-or-remove`, pi differs between neighbours by the very unit,
so that k and b would tell of it. Under secret sampling the batches are secret, and the claim rests on that. Where the
record is on users' devices, nobody has pi. In all of these `realised_claim` is None.
"""

from dataclasses import dataclass
from math import inf, nextafter, sqrt
from typing import Any

from anyorder._closed import final
from anyorder._limits import bounded
from anyorder._sealed import check_names, quoted
from anyorder._words import counted, rounded_up
from anyorder.accounting import compose_mus
from anyorder.accounting.curves import NEIGHBOURS, Gaussian
from anyorder.accounting.selection import step_mu
from anyorder.errors import CertificateError
from anyorder.participation import MinSeparation, Participation
from anyorder.plan import Plan, close
from anyorder.sensitivity import sensitivity
from anyorder.sensitivity.cost import check_plan

__all__ = ["Realised", "is_claimable", "read_realised", "realised_claim"]

_NAMES = ("max_participations", "min_separation", "mu", "epsilon")


@final
@dataclass(frozen=True)
class Realised:
    """What holds of those who took part, if neither they nor the end of the run were chosen by what was released.

    Attributes:
        max_participations: k, the most steps of a unit.
        min_separation: b, the smallest distance between two steps of one; n where none came twice.
        mu: Gaussian DP parameter, at most the plan's.
        epsilon: at the plan's delta, at most the plan's.
    """

    max_participations: int
    min_separation: int
    mu: float
    epsilon: float

    def to_dict(self) -> dict[str, Any]:
        """As a certificate has it."""
        return {name: getattr(self, name) for name in _NAMES}

    def says_nobody(self, steps: int) -> bool:
        """Whether nobody took part in a run of so many steps: it follows, and is implausible; see `describe`."""
        return steps > 0 and self.max_participations == 0

    def describe(self, steps: int) -> str:
        """In a phrase, for the card of a run of so many steps.

        Where nobody took part no number is said: a run does not train on nobody, and who edits k in a file to 0 has one
        that agrees with itself.
        """
        k, b = self.max_participations, self.min_separation
        if self.says_nobody(steps):
            return (
                f"nobody took part in any of {counted(steps, 'step')}, it says: implausible, and unchecked without the "
                "evidence. Rest on the planned epsilon"
            )
        apart = f", at least {counted(b, 'step')} apart" if k > 1 else ""
        return f"epsilon <= {rounded_up(self.epsilon)} of who took part: at most {counted(k, 'time')}{apart}"


def is_claimable(plan: Plan) -> bool:
    """Whether who took part is the same for neighbours, and known here."""
    same = plan.neighbours in ("zero-out", "replace-one") and not plan.participation.secret
    return same and "record" not in plan.on_device


def realised_claim(plan: Plan, max_participations: int, min_separation: int) -> Realised | None:
    """The claim for units that came at most k times, at least b steps apart; None where there is none.

    Args:
        plan: that was run.
        max_participations, min_separation: k and b, as `Ledger.realised_bounds` has them.
    Returns: None also where it would take so long to check that a stranger could not verify the certificate for it.
    Guarantee: mu is never below that of the true steps, and never above the plan's.
    """
    k, b = max_participations, min_separation
    if not is_claimable(plan) or plan.mu is None:
        return None
    if k == 0:
        return Realised(0, b, 0.0, 0.0)
    mu = plan.mu
    if k < plan.participation.max_participations or b > plan.participation.min_separation:
        order = MinSeparation(plan.n, b, k)
        if _is_dear(plan, order) and not _is_dear(plan, plan.participation):
            return None
        check_plan(_described(plan, order))
        share = sensitivity(plan.strategy, order).value / plan.sensitivity.value
        if plan.selection is None:
            mu = min(mu, nextafter(mu * nextafter(share, inf), inf))
        else:
            mu = min(mu, _of_both(plan, nextafter(share, inf), k))
    curve = Gaussian(mu, neighbours=plan.neighbours, unit=plan.unit)
    return Realised(k, b, mu, min(curve.epsilon(plan.delta), plan.epsilon))


def _of_both(plan: Plan, share: float, k: int) -> float:
    """The mu of a selection in k steps and of the release of this share of the plan's sensitivity."""
    released = NEIGHBOURS[plan.neighbours] / plan.sigma * share
    selected = step_mu(plan.selection, plan.neighbours, plan.selection_std) * sqrt(k)
    return nextafter(compose_mus(nextafter(released, inf), nextafter(selected, inf)), inf)


def _is_dear(plan: Plan, order: Participation) -> bool:
    """Whether a file of a stranger would be given less time than the plan's claims take, in this order."""
    try:
        with bounded(True):
            check_plan(_described(plan, order))
    except CertificateError:
        return True
    return False


def _described(plan: Plan, order: Participation) -> dict[str, Any]:
    return {**plan.to_dict(), "participation": order.to_dict()}


def read_realised(plan: Plan, steps: int, data: Any) -> Realised:
    """What a certificate claims, recomputed. Raises: CertificateError if it does not follow.

    Args:
        steps: that were taken.
    """
    check_names("realised", data, set(_NAMES))
    k, b = data["max_participations"], data["min_separation"]
    rule, n = plan.participation, plan.n
    if not is_claimable(plan):
        raise CertificateError(
            "the certificate has a realised epsilon, which cannot be claimed where neighbours differ in who took part, "
            "nor where the record is secret or on devices"
        )
    if type(k) is not int or not 0 <= k <= min(steps, rule.max_participations):
        raise CertificateError(
            f"max_participations must be an integer from 0 to {min(steps, rule.max_participations)}, got {quoted(k)}"
        )
    low, high = (rule.min_separation, (steps - 1) // (k - 1)) if k > 1 else (n, n)
    if type(b) is not int or not low <= b <= high:
        raise CertificateError(
            f"min_separation must be an integer from {low} to {high}, where units came {k} times, got {quoted(b)}"
        )
    found = realised_claim(plan, k, b)
    if found is None:
        raise CertificateError("the certificate's realised epsilon is one that this package does not write")
    for name, value in (("mu", found.mu), ("epsilon", found.epsilon)):
        if not close(data[name], value):
            raise CertificateError(
                f"the certificate claims a realised {name} = {quoted(data[name])}; recomputed it is {value!r}"
            )
    return found
