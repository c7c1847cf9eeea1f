"""A run as it stands: its plan, key, ledger, noise, tables and files, and what is shown and kept of it."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from anyorder.errors import ArgumentError, CheckpointError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.plan import Plan
from anyorder.release.clip_norm import ClipNorm
from anyorder.release.coins import Coins
from anyorder.release.files import RunFiles
from anyorder.release.noise import SharedNoise, TableNoise
from anyorder.release.observers import Observer
from anyorder.release.ranks import Coordinates
from anyorder.release.schedules import Schedule
from anyorder.release.tables import Tables

__all__ = ["Run"]


class Run:
    """What `Release` takes steps of; it takes none itself. See there."""

    resumed: dict[str, Any] | None  # for a front end, whose half of the state is in it
    _coins: Coins | None = None

    def _begin(
        self,
        plan: Plan,
        coordinates: Coordinates,
        schedule: Schedule,
        *,
        key: bytes | None,
        checkpoint: str | Path | None,
        place: str,
        ledger_on_disk: bool = False,
    ) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"plan must be an anyorder Plan (see anyorder.plan), got {type(plan).__name__}")
        given = None if key is None else NoiseSource(key).key
        self.plan, self.size, self._n = plan, coordinates.size, plan.n
        self.clip, self._group = ClipNorm(plan, schedule), coordinates.group
        self._path = None if checkpoint is None else Path(checkpoint)
        self._files = RunFiles(self._path, self._group, ledger_on_disk)
        state = self._files.load(place, plan, given)
        if state is not None:
            self.clip.check(state["clip_norm"])
        fresh = given or NoiseSource.random().key
        self._key = self._group.from_first(fresh) if state is None else state["key"]
        # A key is bound to its plan: under another plan the same 32 bytes give unrelated noise.
        own = NoiseSource(self._key).derive(plan.digest.encode())
        self._source = self._files.begin(place, own, plan, state)
        try:
            self._noise = SharedNoise(plan.strategy, self._source, plan.noise_std, coordinates, plan.grid)
            self.ledger = self._files.ledger(plan.participation, state)
            saved = None if state is None else state.get("tables", [])
            self._tables = Tables(plan, self.size, self._group.size, self._files, saved)
            if state is not None:
                self._noise.load_state_dict({
                    **state["stream"], "state": [values.numpy() for values in state["stream"]["state"]]
                })  # fmt: skip
                self.clip.load_state_dict(state.get("clip_norm"))
        except BaseException:
            self._files.close()
            raise
        self.resumed = state
        self.extra: dict[str, Any] = {} if state is None else state["extra"]
        record = self._source.derive(b"record").key
        self._evidence = Evidence(plan, self.ledger, self._source.fingerprint(), record)
        self._observers: list[Observer] = []
        self.of_tables: list[Any] = []
        self._begun = False
        self.unreturned: tuple[int, Any] | None = None
        self._closed = False
        self._free_now = threading.Lock()

    def check_usable(self) -> None:
        """Raise where this object does not stand for the run (any more)."""
        self._files.check_process()
        if self._closed:
            raise TrainingError("this release was closed: another process may have resumed its run")
        self._files.check_open()

    # -- what is shown and kept --------------------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """Number of steps taken."""
        return self.ledger.step

    @property
    def repeats(self) -> bool:
        """Whether the next step was released before, by a process that went on from this checkpoint or an older one."""
        return self._files.has(self.ledger.step)

    @property
    def may_have_committed(self) -> bool:
        """Whether the journal may have the next step: then its noise is for the sum that it was committed with alone.

        Also after a commit that was broken off, of which nobody knows how far it came, and where the run has gone on
        in another object.
        """
        return self._files.may_have(self.ledger.step)

    @property
    def clip_norm(self) -> float:
        """The norm that a unit's part of the next total may have. It is public."""
        return self.clip.current

    def derived(self, label: bytes) -> NoiseSource:
        """A source of the run's own for another purpose, such as the order of examples. Renewals do not touch it."""
        return self._source.own.derive(label)

    def coins(self) -> NoiseSource:
        """Where secret coins come from."""
        return self.by_step(b"sampling")

    def by_step(self, label: bytes) -> NoiseSource:
        """`derived`, for what is drawn in every step: rows are steps, and renewed where steps are."""
        return self._files.by_step(self.derived(label))

    def lazy_source(self, first_row: Callable[[int], int]) -> NoiseSource:
        """Where the jumps of lazy tables come from; elements are coordinates.

        Args:
            first_row: step -> the first row that jumps over it or later steps have: renewed where the step is, as
                `anyorder.noise.lazy.Jumps.first_row` gives it.
        """
        return self._files.by_step(self.derived(b"lazy tables"), first_row)

    def noise_rows(self) -> NoiseSource:
        """The rows of Z of the run's own noise, for lazy tables that make it by value; elements are coordinates."""
        return self._source

    @property
    def std(self) -> float:
        """Standard deviation of the noise as it is made: the plan's, rounded up to float32."""
        return self._noise.std

    @property
    def is_closed(self) -> bool:
        """Whether another process may have resumed the run."""
        return self._closed

    def table_noise(self, first: int, size: int) -> TableNoise:
        """The noise of the run itself at these coordinates, step by step, for rows of them."""
        return TableNoise(self.plan.strategy, self._source, self.plan.noise_std, first, size)

    def certificate(self) -> Certificate:
        """The claim of this run, for everybody: `save` it, and check it with `anyorder verify`. It names nobody.

        With what was `realised`: how often units came at most, how far apart, and the epsilon of that.
        """
        return replace(self._evidence.certificate, realised=self._evidence.realised)

    def evidence(self) -> Evidence:
        """Who took part in which step: what backs the certificate. As secret as the data."""
        return self._evidence

    def save(self, extra: dict[str, Any] | None = None) -> None:
        """Write the checkpoint: one file, replaced atomically.

        The file holds the noise key: whoever has it can remove the noise. Steps after the last save are repeated when
        the run is resumed, and must come out bit for bit as they were: save often.

        Args:
            extra: arrays, tensors and plain values of your own, found in `extra` after a resume; arrays as tensors.
        Raises: CheckpointError; the file of the last save is intact.
        """
        self.save_all("Release.save()", {}, extra)

    def save_all(self, place: str, front_end: dict[str, Any], extra: dict[str, Any] | None) -> None:
        """`save`, with what a front end adds. All ranks call it, and the first one writes."""
        self.check_save()
        coins = {} if self._coins is None else {"coins": self._coins.state_dict()}
        state = {
            "plan": json.dumps(self.plan.to_dict()),
            "key": self._key,
            "stream": self._noise.state_dict(),
            "clip_norm": self.clip.state_dict(),
            "ledger": self._files.kept(self.ledger),
            "extra": extra or {},
        }
        self._files.save(place, {**state, **coins, **self._tables.state(), **front_end})

    @property
    def needs_save(self) -> bool:
        """Whether the first checkpoint is still to be written: it must be before any noise is used."""
        return self._files.needs_save

    def check_save(self) -> None:
        """Raise CheckpointError where nothing can be saved."""
        self._files.check_process()
        if self._path is None:
            raise CheckpointError("this run has no file: give checkpoint=")
        if self._closed:
            raise CheckpointError("this run was closed: another process may have resumed it")
        self._files.check_open()
        self._noise.check(self.ledger.step)
        self._tables.check_settled(self.ledger.step)

    def close(self) -> None:
        """Let another process resume this run. The end of the process does the same."""
        self._files.check_process()
        self.ledger.close()
        self._files.close()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
