"""A run in a folder: begun once, resumed by its own key, entered once in the budget of its data set.

`train`, `federate` and `fit` are the same in this: `begin` or `go_on`, then make what holds the noise key, then
`enter`, then the first step. An entry of a budget belongs to a noise key: the word under which it stands is the
fingerprint of the noise. So whoever goes on with the run, after a kill at any moment, pays nothing again; and a copy of
the folder without its secret files has no key, so that a run in it would be another run, under another entry. Where the
copy says that the run began, nothing runs in it: see `folder.has_begun`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from anyorder.app import folder
from anyorder.budget.file import Budget
from anyorder.errors import BudgetError, CheckpointError
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan

__all__ = ["begin", "enter", "go_on", "word_of"]

T = TypeVar("T")


@contextmanager
def begin(
    output: str | Path | None, name: str, plan: Plan, metrics: dict[str, Any], budget: str | Path | None
) -> Iterator[Path]:
    """A folder for a new run, with plan and settings in it, held while the run goes on.

    Args:
        output, name: see `folder.fresh`.
        metrics: what metrics.json says before the first step: the settings, for `go_on`.
        budget: file of the budget, which must be there; it is asked before anything is written, and charged by `enter`.
    Raises: BudgetError if the plan does not fit; ArgumentError as `folder.fresh`.
    """
    found = None if budget is None else Budget(budget)
    if found is not None:
        found.check(plan)
    with folder.fresh(output, name) as path:
        folder.hide_secrets(path)
        (path / folder.BUDGET).unlink(missing_ok=True)  # of a run that was killed before it had a key
        if found is not None:
            record = {"budget": str(found.path), "id": found.id, "plan": plan.public().digest}
            folder.write_json(path / folder.BUDGET, record)
        plan.save(path / folder.PLAN)
        folder.write_json(path / folder.METRICS, metrics)
        yield path


@contextmanager
def go_on(
    path: Path, kind: str, read: Callable[[dict[str, Any]], T], *, start_over: bool = False
) -> Iterator[tuple[T, Plan]]:
    """(what `read` makes of metrics.json, the plan) of the run in a folder, held while the run goes on.

    Args:
        kind: of run, for messages.
        read: raises KeyError, TypeError, ValueError for the metrics of something else.
        start_over: begin the run again where its journal says what was released; the code that makes the engine says
    so too. Raises: CheckpointError if there is none that can be resumed; ArgumentError if it is going on.
    """
    found = folder.read_json(path / folder.METRICS)
    try:
        settings = read(found)
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a {kind}: {problem}") from problem
    with folder.held(path):
        found_steps = start_over and folder.can_start_over(path)
        if not (path / folder.CHECKPOINT).exists() and folder.has_begun(path) and not found_steps:
            raise CheckpointError(
                f"{path} holds no {folder.CHECKPOINT}, and the run took steps, or was about to: start a new one; or, "
                "if it is one of train, and its journal is there, begin again with --start-over, which counts both"
            )
        yield settings, Plan.load(path / folder.PLAN, large=True)


def enter(path: Path, plan: Plan, save: Callable[[], None], certificate: Callable[[], Certificate]) -> None:
    """Bring the key to the disk, say that the run began, and enter it in its budget. After this it may take a step.

    Called by each session of a run, the first one and those that go on: what was done before is not done again. In
    this order, so that after a kill at any moment the entry is that of the key with which steps will be taken.

    Args:
        path: the folder, held by this process.
        save, certificate: of what holds the key, before its first step where there is no checkpoint yet.
    Raises: BudgetError if the plan does not fit, or the budget is not there, is another, or says that the run is over:
        then the run takes no step.
    """
    if not (path / folder.CHECKPOINT).exists():
        save()
    record = path / folder.BUDGET
    kept = folder.read_json(record) if record.exists() else None
    own = None if kept is None else certificate()
    if kept is not None and own is not None and kept.get("run") != own.key_fingerprint:
        kept["run"] = own.key_fingerprint  # of a new run, or of one that was started over with another key
        folder.write_json(record, kept)
    folder.say_begun(path)
    if kept is None or own is None:
        return
    found = Budget(str(kept["budget"]))
    if found.id != kept["id"]:
        raise BudgetError(
            f"{found.path} is not the budget in which this run was entered: put that one back, or say where it is in "
            f"{record}"
        )
    found.spend(plan, path.name, run=own)


def word_of(certificate: Path, budget: Budget) -> str | None:
    """The word under which the run of this certificate was entered; None where its folder does not say so.

    Args:
        certificate: the file, where its run left it.
    """
    record = certificate.parent / folder.BUDGET
    if certificate.name != folder.CERTIFICATE or not record.exists():
        return None
    kept = folder.read_json(record)
    return str(kept["run"]) if kept.get("id") == budget.id and "run" in kept else None
