"""A training that an engine of this package made private, and that is watched: its plan's claim, beside what was seen.

The engine's ledger refuses each step that the plan's order does not cover, and nothing un-noised is ever in a gradient,
so that the claim holds of whatever the loop does with the engine. Watching looks for what is beside it: steps that it
did not take, other optimizers on the same data, other engines, a noise key that stands in the script. What a script
prints of its data, or trains by hand without an optimizer, is not seen.
"""

import math
from dataclasses import dataclass
from typing import Any

from anyorder._words import counted
from anyorder.audit.checking.finding import Finding
from anyorder.audit.checking.seen import Seen
from anyorder.plan import CANDIDATE, Plan

__all__ = ["Planned", "base_of", "judge_planned", "planned"]

_BY = "the plan of the script's own engine"
_VERIFY = "anyorder verify run.privacy.json recomputes the claim of the certificate; --evidence checks who took part"


@dataclass(frozen=True)
class Planned:
    """What `make_private` of this package's engine has bound.

    Attributes:
        engine: the `PrivacyEngine`.
        dataset: of its loader, whatever part of it the loader takes.
        begun: steps that a resumed run had taken before.
        tells: whether it refuses gradients that are not finite, and so tells of them.
    """

    engine: Any
    dataset: Any
    begun: int
    tells: bool

    @property
    def plan(self) -> Plan:
        """The claim."""
        plan: Plan = self.engine.plan
        return plan

    @property
    def steps(self) -> int:
        """Taken since."""
        return int(self.engine.step) - self.begun


def planned(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Planned, Any]:
    """(what was bound, its optimizer), of a call `engine.make_private(*args, **kwargs)` that has returned."""
    names = dict(zip(("model", "optimizer", "loader"), args, strict=False)) | kwargs
    dataset = base_of(getattr(names["loader"], "dataset", None))
    return Planned(engine, dataset, int(engine.step), names.get("non_finite") == "refuse"), names["optimizer"]


def base_of(dataset: Any) -> Any:
    """The data set that a part, of a part, is of."""
    from torch.utils.data import Subset

    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def judge_planned(bound: list[Planned], seen: Seen, delta: float | None, doubt: str) -> Finding:
    """The plan's claim of one data set, which holds if nothing beside the engine was seen.

    Args:
        bound: the engines of this data set, one or more.
        delta: None for the plan's own.
        doubt: why nothing can be said, where the watching itself met something; empty else.
    """
    one = bound[-1]
    plan = one.plan
    delta = plan.delta if delta is None else delta
    claimed = plan.curve.epsilon(delta)
    problem = doubt or _beside(bound, seen)
    told = (
        f"the engine carries out a plan for {plan.participation.describe()}: its ledger refuses every step that this "
        f"does not cover. Of {counted(plan.n, 'planned step')} {one.begun + one.steps} were taken, and nothing was "
        "seen beside the engine"
    )
    if not problem and not seen.is_named:
        told += "; who was in them is by the ledger alone, for watching could not tell"
    if plan.unit != "example":
        told += f"; who counts as one {plan.unit} is what the script says"
    return Finding(
        claimed=claimed, true=math.inf if problem else claimed, at_least=0.0, order=one.engine.order,
        because=problem or told, advice=() if problem else (_VERIFY,), neighbours=plan.neighbours,
        participation=plan.participation, noise_multiplier=plan.noise_multiplier, delta=delta,
        sampling_probability=None, steps=seen.steps, epochs=seen.epochs, batch_size=plan.batch_size,
        dataset_size=plan.dataset_size, accountant=_BY, noise_needed=plan.noise_multiplier,
    )  # fmt: skip


def _beside(bound: list[Planned], seen: Seen) -> str:
    """Why the plan's claim does not speak for what was seen; empty where it does."""
    one, rule = bound[-1], bound[-1].plan.participation
    if len(bound) > 1:
        return f"{len(bound)} engines trained on it, and the plan of each claims its own run alone: use a budget"
    if seen.doubt:
        return seen.doubt
    if one.steps != seen.steps or seen.reused:
        return (
            f"the engine took {counted(one.steps, 'step')}, and {seen.steps} were seen on this data"
            + (", some with batches of the step before" if seen.reused else "")
            + ": what was learnt beside the engine has no noise"
        )
    if one.engine.is_keyed:
        return "the script gives the engine its noise key: whoever reads it takes the noise off. Leave key= out"
    if one.plan.candidate_of is not None:
        return f"the plan is of {CANDIDATE}"
    if one.tells:
        return 'non_finite="refuse" tells of gradients that are not finite, which no noise covers'
    apart = seen.separation
    if seen.is_named and (
        seen.most > rule.max_participations or (apart is not None and apart < rule.min_separation) or seen.together > 1
    ):
        told = "" if rule.secret else f": {seen.describe()}"  # how often units came by secret coins is as secret
        return f"units were seen oftener or nearer than the plan's order lets them come{told}"
    return ""
