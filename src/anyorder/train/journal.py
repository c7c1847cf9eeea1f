"""The journal of a run on several ranks: the first rank has the file, and all agree before a step is released."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from anyorder.errors import CheckpointError
from anyorder.train.checkpoint import Journal
from anyorder.train.distributed import Group

__all__ = ["SharedJournal"]


class SharedJournal:
    """A `Journal` of the sums of which every rank has its own part. All ranks call the same methods.

    Args:
        key: the run's, for digests that say nothing without it.
        run_id: see `Journal`.
    """

    def __init__(self, group: Group, key: bytes, run_id: str) -> None:
        self._group, self._key, self._run_id = group, key, run_id
        self._journal: Journal | None = None
        self._active = False

    def create(self, place: str, folder: Path) -> None:
        """Begin the journal, if there is none yet: before the first checkpoint is written."""
        if not self._active:
            self._group.by_first(place, lambda: self._take(Journal.create(folder, self._run_id)))
            self._active = True

    def open(self, place: str, folder: Path, step: int, ranks: int) -> None:
        """Go on with the journal of a checkpoint that was written before step `step` by so many ranks.

        Raises: CheckpointError if steps were released after the checkpoint by another number of ranks.
        """

        def begin() -> None:
            journal = Journal.open(folder, self._run_id)
            lost = journal.steps_from(step)
            if lost and ranks != self._group.size:
                journal.close()
                raise CheckpointError(
                    f"{lost} step(s) after the checkpoint were released by {ranks} rank(s), and this run has "
                    f"{self._group.size}: its sums are rounded otherwise, so that it could not repeat them. Resume "
                    f"with {ranks}, save after these steps, and change the number then"
                )
            self._take(journal)

        self._group.by_first(place, begin)
        self._active = True

    def _take(self, journal: Journal) -> None:
        self._journal = journal

    def commit(self, place: str, step: int, own: list[Tensor]) -> None:
        """Write down what the step uses its noise on, before anything noised is released.

        Args:
            own: this rank's part of the un-noised sum, in pieces: how it is cut does not matter.
        Raises: CheckpointError, on all ranks, if the step used its noise on another sum before.
        """
        if not self._active:
            return
        digests = self._group.together(place, lambda: self._digest(*(x.cpu().numpy() for x in own)))
        digest = digests[0] if len(digests) == 1 else self._digest(*digests)

        def write() -> None:
            assert self._journal is not None
            self._journal.commit(step, digest)

        self._group.by_first(place, write)

    def _digest(self, *parts: Any) -> bytes:
        """Of bytes and arrays that have their elements one behind the other."""
        state = blake2b(digest_size=16, key=self._key, person=b"anyorder sum")
        for part in parts:
            state.update(part)
        return state.digest()

    def close(self) -> None:
        """Let another process resume the run."""
        if self._journal is not None:
            self._journal.close()
