"""What a round is about to release, kept until its checkpoint is written: so that no kill loses a round."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from anyorder._sealed import sync_folder
from anyorder.errors import CheckpointError
from anyorder.ledger import Units, as_units
from anyorder.release.checkpoint import load, save_atomic

__all__ = ["Pending", "PendingRound"]


@dataclass(frozen=True)
class PendingRound:
    """A round whose messages are all in.

    Attributes:
        step: its number.
        users: who is in it.
        total: the un-noised sum, one piece: as secret as the data.
    """

    step: int
    users: Units
    total: Tensor


class Pending:
    """The file `<checkpoint>.pending`, which holds at most one round.

    It is written before the journal is told of the round, and removed once a checkpoint has the round's result. A
    server that finds it makes that very round from it, on the same sum, so that the noise of a round never comes to
    stand on two sums, and clients that have gone need not come back.

    Args:
        checkpoint: the run's file; None for a run that keeps nothing.
        run_id: of the run: up to 32 letters and digits. A file of another run is refused.

    Attributes:
        step: of the round in the file; None if there is none, or it was not read yet.
    """

    def __init__(self, checkpoint: Path | None, run_id: str) -> None:
        target = None if checkpoint is None else Path(os.path.realpath(checkpoint))
        self._path = None if target is None else target.with_name(target.name + ".pending")
        self._run_id = run_id
        self.step: int | None = None

    def write(self, pending: PendingRound) -> None:
        """Put the round on the disk. Raises: CheckpointError; nothing of the round has been used yet."""
        if self._path is None:
            return
        state = {"run": self._run_id, "step": pending.step, "users": pending.users, "total": pending.total}
        save_atomic(self._path, state, self._run_id)
        self.step = pending.step

    def read(self) -> PendingRound | None:
        """The round that was left, if one was. Raises: CheckpointError for a file that is altered, or another run's."""
        if self._path is None or not self._path.exists():
            return None
        state: dict[str, Any] = load(self._path)
        if state.get("run") != self._run_id:
            raise CheckpointError(
                f"{self._path} holds a round of another run, whose checkpoint is gone. What is in it is as secret as "
                "the data: put its checkpoint back, or remove it"
            )
        users = state["users"]
        ids = as_units(users if isinstance(users, list) else users.numpy().astype(np.int64))
        self.step = state["step"]
        return PendingRound(state["step"], ids, state["total"])

    def remove(self) -> None:
        """The round is in a checkpoint, or given up. Raises: CheckpointError if the file cannot be removed."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
            sync_folder(self._path.parent)
            self.step = None
        except OSError as problem:
            raise CheckpointError(
                f"{self._path} cannot be removed: {problem}. It holds what no noise covers; remove it, and save again"
            ) from problem
