"""The workload A: the lower-triangular matrix that the optimizer applies to the gradients.

The iterate after step t is theta_0 - (A G)[t] (with weight decay: what theta_t would be without gradients, minus
that), so the error that matters is the noise in the rows of A G.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from anyorder import checks
from anyorder.errors import ArgumentError, PlanError
from anyorder.workload.base import Workload, nonnegative, pack, unpack
from anyorder.workload.course import Course, Stage
from anyorder.workload.from_torch import from_optimizer
from anyorder.workload.given import GivenWorkload
from anyorder.workload.schedules import cosine, linear_cooldown, step_decay, warmup_stable_decay

__all__ = [
    "Stage",
    "Workload",
    "cosine",
    "custom",
    "from_optimizer",
    "linear_cooldown",
    "momentum",
    "prefix_sum",
    "stages",
    "step_decay",
    "warmup_stable_decay",
    "weighted",
]

_KINDS = (Workload, GivenWorkload, Course)


def check_kind(workload: object) -> None:
    """Raise PlanError unless it is one of the kinds of this module itself."""
    if type(workload) not in _KINDS:
        raise PlanError(
            f"workload must be a Workload, a Custom or stages, got {type(workload).__name__}: give the matrix to "
            "custom(matrix)"
        )


def prefix_sum(n: int) -> Workload:
    """The workload of plain SGD: A[t, s] = 1 for s <= t."""
    return Workload(n)


def momentum(n: int, momentum: float, learning_rates: ArrayLike | None = None) -> Workload:
    """The workload of SGD with heavy-ball momentum and a known schedule; see `Workload`."""
    return Workload(n, momentum=momentum, learning_rates=learning_rates)


def custom(matrix: ArrayLike) -> GivenWorkload:
    """Any lower-triangular (n, n) matrix as a workload."""
    return GivenWorkload(matrix)


def stages(of: Iterable[Stage]) -> Course:
    """The workload of stages that follow each other, each with its momentum, rate, schedule and parameters.

        course = ao.workload.stages([
            ao.workload.Stage(steps=10, rate=0.1, only_last=True),                # a mean, which the rest reads
            ao.workload.Stage(steps=90, momentum=0.9, own_parameters=True),
        ])
        plan = ao.plan(optimizer=course, ...)
        optimizer.param_groups[0].update(course.settings(step))                   # before each step

    Raises: ArgumentError for what is no stage, and for none.
    """
    return Course(tuple(of))


def weighted(workload: Workload, weights: ArrayLike) -> Workload:
    """The same workload with its rows multiplied by (n,) weights: which of the weights during training matter, and how
    much.

    Weights (0, .., 0, 1): the last alone, as where nobody sees those before it.

    The mean-square error becomes || diag(weights) A K ||_F^2 / n, times sens^2.
    """
    own = workload.given_weights if type(workload) is Course else workload.weights
    weights = nonnegative("weights", own * np.asarray(weights, dtype=np.float64), workload.n)
    if type(workload) is Course:
        return Course(workload.stages, weights=weights)
    return from_dict({**workload.to_dict(), "weights": pack(weights)})


def from_dict(data: dict[str, Any]) -> Workload:
    """The workload that `Workload.to_dict` described."""
    kind = checks.choice("workload kind", data.get("kind", ""), {"custom", "momentum", "stages"})
    weights = unpack(data.get("weights"))
    if kind == "stages":
        found = [Stage.from_dict(one) for one in data["stages"]]
        if sum(one.steps for one in found) != data["n"]:  # before any array is made: a reader bounds n alone
            raise ArgumentError(f"n must be the number of steps of all stages, got {data['n']!r}")
        return Course(found, weights=weights)
    if kind == "custom":
        n = checks.integer("n", data["n"], low=1)
        entries = np.zeros((n, n))
        packed = unpack(data["entries"])
        entries[np.tril_indices(n)] = 1.0 if packed is None else packed
        return GivenWorkload(entries, weights=weights)
    options = {key: value for key, value in data.items() if key not in ("kind", "learning_rates", "weights")}
    return Workload(learning_rates=unpack(data["learning_rates"]), weights=weights, **options)
