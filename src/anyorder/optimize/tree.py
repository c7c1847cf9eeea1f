"""Choose the tree: where to restart, whether to complete, for a workload and a participation."""

from collections.abc import Iterator

from anyorder import checks, error
from anyorder.errors import PlanError
from anyorder.optimize.patterns import epoch
from anyorder.patterns import Participation
from anyorder.strategy import Tree
from anyorder.workload import Workload

__all__ = ["fit_tree", "restart_steps"]


def fit_tree(
    workload: Workload,
    participation: Participation,
    *,
    objective: str = "mean",
    estimator: str = "full",
    restart_every: int | None = None,
    completion: str = "auto",
) -> Tree:
    """The binary tree of least error, sensitivity included, among restart schedules and completion on or off.

    Args:
        workload: what the optimizer applies.
        participation: who takes part when; restarts fall on its epochs where it has epochs.
        objective: "mean", "max" or "last" error.
        estimator: "vanilla", "online" or "full"; full is never worse.
        restart_every: a fresh tree every so many epochs; 0 for never; None chooses.
        completion: "on", "off", or "auto", which completes where that lowers the error.
    Returns: the best `Tree`.
    Cost: one error and one sensitivity for each of about 2 log2(epochs) candidates.
    """
    checks.choice("objective", objective, _OBJECTIVES)
    checks.choice("completion", completion, {"auto", "on", "off"})
    loss = _OBJECTIVES[objective]
    candidates = _candidates(participation, estimator, restart_every, completion)
    return min(candidates, key=lambda tree: loss(tree, workload, participation))


_OBJECTIVES = {"mean": error.rmse, "max": error.max_error, "last": error.last_error}


def restart_steps(participation: Participation, every: int) -> tuple[int, ...]:
    """The steps at which a fresh tree begins, one every `every` epochs; none for every = 0."""
    checks.integer("restart_every", every, low=0)
    if every == 0:
        return ()
    steps = epoch(participation.pattern)
    if steps is None:
        raise PlanError(
            f"restart_every needs a participation with epochs (EpochShuffle, FixedOrder), got {participation!r}; "
            "give restarts to strategy.Tree by step"
        )
    return tuple(range(every * steps, participation.n, every * steps))


def _candidates(
    participation: Participation, estimator: str, restart_every: int | None, completion: str
) -> Iterator[Tree]:
    schedules = _schedules(participation) if restart_every is None else [restart_every]
    completions = {"on": [True], "off": [False], "auto": [False, True]}[completion]
    for restarts in dict.fromkeys(restart_steps(participation, every) for every in schedules):
        for complete in completions if restarts else [False]:
            yield Tree(participation.n, estimator=estimator, restarts=restarts, completion=complete)


def _schedules(participation: Participation) -> list[int]:
    if epoch(participation.pattern) is None:
        return [0]
    k = participation.max_participations
    return [0, *(2**i for i in range(k.bit_length()) if 2**i < k)]
