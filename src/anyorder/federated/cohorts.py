"""Cohorts: whom a round asks among those who are there and allowed, who answers, and who comes too late."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from anyorder import _check
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

__all__ = ["Cohort", "choose_cohort", "cohort_size"]

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Cohort:
    """Who did what in a round, as places among the users.

    Attributes:
        added: whose messages the server takes: the first `report_goal` who answer; ascending.
        late: who answers after that; turned away, and not recorded.
        dead: who was asked and never answers.
    """

    added: Places
    late: Places
    dead: Places


def cohort_size(report_goal: int, over_selection: float) -> int:
    """Devices that are asked in a round: the report goal times `over_selection`, rounded up."""
    goal = _check.integer("report_goal", report_goal, low=1)
    over = _check.real("over_selection", over_selection, low=1.0)
    return ceil(goal * over - 1e-9)  # 10 * 1.1 is 11 and a rounding error


def choose_cohort(
    source: NoiseSource,
    round: int,
    candidates: NDArray[np.bool_],
    report_goal: int,
    *,
    over_selection: float = 1.3,
    drop_out: float = 0.0,
) -> Cohort:
    """Ask `report_goal * over_selection` of the candidates; the first `report_goal` who answer are added.

    The choice is public: it comes from the source and the round alone, never from data, and no amplification is
    claimed for it. Where fewer candidates are there, or answer, the round is made with them: the sum is divided by the
    report goal all the same, which is a constant of the plan.

    Args:
        source: of the choice; not that of the noise.
        candidates: (num_users,) bool, who is there and eligible.
        report_goal: the plan's batch_size.
        over_selection: at least 1; how many are asked for each one that is wanted.
        drop_out: probability that a device which was asked never answers, in [0, 1).
    Returns: the cohort; added, late and dead are disjoint and all among the candidates.
    """
    candidates = np.asarray(candidates)
    if candidates.dtype != np.bool_ or candidates.ndim != 1:
        raise ArgumentError(f"candidates must be (num_users,) bool, got {candidates.dtype} of shape {candidates.shape}")
    if _check.real("drop_out", drop_out, low=0.0) >= 1:
        raise ArgumentError(f"drop_out must be below 1, or nobody ever answers, got {drop_out!r}")
    places = np.flatnonzero(candidates)
    asked = _in_order(source.derive(b"asked"), round, len(candidates), places)
    asked = asked[: cohort_size(report_goal, over_selection)]
    coins = source.derive(b"dead").words(round, 0, len(candidates)) * 2.0**-32
    dead = coins[asked] < drop_out
    answers = _in_order(source.derive(b"answers"), round, len(candidates), asked[~dead])
    return Cohort(np.sort(answers[:report_goal]), np.sort(answers[report_goal:]), np.sort(asked[dead]))


def _in_order(source: NoiseSource, round: int, size: int, places: Places) -> Places:
    """The places in the order of 64-bit words, each place's own, whoever else is there; ties by place."""
    words = source.words(round, 0, 2 * size).view(np.uint64)
    places = np.sort(places)
    return places[np.argsort(words[places], kind="stable")]
