"""A run under a budget: its plan is entered before its first step, and once, however often it is resumed.

The folder of a run has `budget.json`: the budget's file, its id, the plan's digest, and a word drawn for the run, under
which the budget was charged. The word is written before the budget is, so that a run that was killed between the two
asks again under the same word.
"""

import secrets
from pathlib import Path
from typing import Any

from anyorder.budget import Budget
from anyorder.errors import BudgetError
from anyorder.plan.plan import Plan
from anyorder.run import folder

__all__ = ["charge", "charge_again", "word_of"]


def charge(path: Path, budget: str | Path | None, plan: Plan) -> None:
    """Enter the plan of a run in this folder, which is about to begin. Nothing for a run without a budget.

    Args:
        path: the folder, held by this process.
        budget: file of the budget, which must be there.
    Raises: BudgetError if the plan does not fit, or cannot be brought to the disk: then the run must not begin.
    """
    if budget is None:
        return
    found = Budget(budget)
    digest = plan.public().digest
    record = path / folder.BUDGET
    word = secrets.token_hex(16)
    if record.exists():  # of a run that was killed before its first checkpoint, and took no step
        before = folder.read_json(record)
        if (before.get("id"), before.get("plan")) == (found.id, digest):
            word = str(before.get("run"))
    found.check(plan, run=word)
    folder.write_json(record, {"budget": str(found.path), "id": found.id, "plan": digest, "run": word})
    found.spend(plan, path.name, run=word)


def charge_again(path: Path, plan: Plan) -> None:
    """Make sure that the run in this folder, which goes on, has its entry; a run without a budget has none.

    Raises: BudgetError if its budget is not there, is another, or says that the run is over.
    """
    record = path / folder.BUDGET
    if not record.exists():
        return
    kept: dict[str, Any] = folder.read_json(record)
    found = Budget(str(kept["budget"]))
    if found.id != kept["id"]:
        raise BudgetError(
            f"{found.path} is not the budget in which this run was entered: put that one back, or say where it is in "
            f"{record}"
        )
    found.spend(plan, path.name, run=str(kept["run"]))


def word_of(certificate: Path, budget: Budget) -> str | None:
    """The word under which the run of this certificate was entered; None where its folder does not say so.

    Args:
        certificate: the file, where its run left it.
    """
    record = certificate.parent / folder.BUDGET
    if certificate.name != folder.CERTIFICATE or not record.exists():
        return None
    kept = folder.read_json(record)
    return str(kept["run"]) if kept.get("id") == budget.id else None
