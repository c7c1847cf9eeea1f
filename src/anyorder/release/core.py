"""A plan carried out, whatever made the sums: the one place where a sum becomes a release."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from anyorder import _check
from anyorder.certificate import Certificate, Evidence
from anyorder.errors import ArgumentError, CheckpointError, PlanError, StepsExhaustedError, TrainingError
from anyorder.ledger import Units
from anyorder.noise import NoiseSource
from anyorder.plan import Plan
from anyorder.release.clip_norm import ClipNorm
from anyorder.release.coins import Coins
from anyorder.release.files import RunFiles
from anyorder.release.noise import SharedNoise
from anyorder.release.ranks import Coordinates, OneProcess
from anyorder.release.schedules import Fixed, Schedule
from anyorder.release.totals import Rows, copy_of, like, piece_of

__all__ = ["Release"]

Observer = Callable[[int, Any], object]

Guest = Callable[[int, list[Tensor], float], list[Tensor]]
"""(step, a total in pieces, what the noised total will be divided by) -> new pieces, with what it adds."""

_OWN = {"plan", "key", "stream", "clip_norm", "ledger", "extra", "ranks", "renewals", "machine", "coins"}


class Release:
    """Carries one plan out: you bring the sum of each step, and get it back private.

    Step t, given the units in it and the sum of what they add, returns

        ( total + noise_std * (K Z)[t] ) / plan.batch_size

    It keeps the ledger, the journal, the noise, the checkpoint and the certificate. What it refuses changes nothing:
    the same call with what it asks for goes on as if the refused one had not been.

    Guarantee: the sequence of what `step` returns is (plan.epsilon, plan.delta)-DP for one unit under the plan's
    neighbouring relation, each total a function of what was returned before and of nothing else that is secret,
    provided that **you** keep three promises (with `plan.on_device`, your users' devices some of them):

    - every unit's part of `total` is one vector of L2 norm at most `clip_norm`, whatever the other units are, and
      `total` is the sum of the parts of the units that you name: all of them, each named;
    - a part that is not finite is replaced by zero (which is in the ball) before it is added, and nothing tells of it;
    - what else you show, store or decide by is a function of what was returned, or does not depend on the units.

    `anyorder.bounded_sum(vectors, units, clip_norm)` makes totals that keep the first two. Two releases on the same
    units are two mechanisms: their curves compose.

    A total with NaN or infinities breaks the promises, and nothing that could then be done is private: to pass it on
    shows where they are; zero in their place, of the coordinate or of all, would let one unit take away what all
    others add, which no noise here covers. So it is refused, with nothing changed. That error tells of the data, one
    bit of it, and no noise covers it: it is a fault of the program that made the total, to be mended and not shown.

    With `checkpoint`, every step is written to a journal beside that file before it is released. A process that
    resumes from an older checkpoint must give the steps that were lost the same units and the same totals, bit for
    bit; another total, or other units, for a step whose noise was used are refused. Under secret sampling (a plan for
    `PoissonSampling`) the batches are those that `sample` draws, and no others: an amplified claim does not hold for
    batches that somebody chose.

    Args:
        plan: what to run.
        size: elements of a total.
        key: 32 bytes for reproducible tests. In use, leave it out: the key then comes from the operating system, and
            a release whose key is known has no privacy.
        checkpoint: file for `save`; where it exists, the release goes on from there. Its folder must exist.
        ledger_on_disk: keep the record in `<checkpoint>.ledger`, which grows by each step, and not in the checkpoint,
            which then stays small however long the run; for many units over many steps. See `anyorder.ledger.disk`.

    Attributes:
        plan, size: as given.
        ledger: who took part in which step; `ledger.step` is the next step.
        extra: what the checkpoint's `save(extra=..)` was given; empty for a new release.
        unreturned: (step, private) of a step that was taken, and whose observer raised; else None.

    Raises: ArgumentError, PlanError; CheckpointError if the file is of another plan, key or program, or in use.

    Example:
        >>> plan = ao.plan(dataset_size=4, batch_size=2, epochs=1, epsilon=1, delta=1e-6)
        >>> release = ao.Release(plan, 3)
        >>> release.step([0, 1], ao.bounded_sum(np.eye(3)[:2], [0, 1], plan.clip_norm)).shape
        (3,)
    """

    resumed: dict[str, Any] | None  # for a front end, whose half of the state is in it
    _coins: Coins | None = None
    _guest: Guest | None = None

    def __init__(
        self, plan: Plan, size: int, *, key: bytes | None = None, checkpoint: str | Path | None = None,
        ledger_on_disk: bool = False,
    ) -> None:  # fmt: skip
        coordinates = OneProcess(_check.integer("size", size, low=1))
        self._begin(
            plan, coordinates, Fixed(), key=key, checkpoint=checkpoint, place="Release", ledger_on_disk=ledger_on_disk
        )
        try:
            self._coins = Coins.of(plan, self.coins())
            self._go_on(self.resumed)
        except BaseException:
            self._files.close()
            raise
        self.resumed = None

    def _go_on(self, state: dict[str, Any] | None) -> None:
        """Take over what no front end has in its checkpoint."""
        if state is None:
            return
        if not state.keys() <= _OWN:
            raise CheckpointError(
                f"{self._path} is the checkpoint of another front end, which has more in it than a Release would keep; "
                "resume with that one, or choose another file"
            )
        if self._coins is not None:
            self._coins.load_state_dict(state["coins"])

    @classmethod
    def of_ranks(cls, plan: Plan, coordinates: Coordinates, schedule: Schedule, **files: Any) -> Self:
        """For front ends in this package: several ranks, a clip norm that may move, totals in pieces (`take`).

        Args:
            coordinates: the vector and this rank's part of it; its group is who carries the plan out together.
            schedule: of clip norms.
            files: key, checkpoint, ledger_on_disk; and place, what the ranks are doing, for messages.
        """
        release = cls.__new__(cls)
        release._begin(plan, coordinates, schedule, **files)
        return release

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
        self.unreturned: tuple[int, Any] | None = None
        self._closed = False
        self._free_now = threading.Lock()

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, units: Iterable[Any] | None, total: Any) -> Any:
        """The private mean of the next step.

        Args:
            units: ids of all units whose parts are in `total`, integers or strings, in any order. A unit may be named
                twice, and is one unit. A step of nobody is a step. Where the plan's record is on devices, None.
            total: the un-noised sum: a NumPy array or a torch tensor of `size` elements in any shape, float32 or
                float64; it is not written. For a plan with a grid int64, in grid steps.
        Returns: like `total`, a fresh array; for a plan with a grid float64.
        Raises: ParticipationError, StepsExhaustedError, ArgumentError, TrainingError, CheckpointError; with nothing
            changed. What an observer raises comes after the step: see `on_release`.
        Cost: the noise of a step, a copy of the total; with a checkpoint a hash of it and a write to the disk.
        """
        with self._one_at_a_time():
            piece = piece_of(total, self.size, self.plan.grid)
            return self._step(units, [piece], lambda made: like(made[0], total))

    def step_rows(self, units: Iterable[Any] | None, rows: ArrayLike, values: Any) -> Any:
        """The next step of a (num_rows, width) table of which only some rows are released, at the cost of these rows.

        `size` is num_rows * width. Rows that are not named are not released in this step; what `step` would have
        returned for the others is what comes back, bit for bit.

        Privacy: **which rows are named must not depend on the units**: the same for neighbours, as a fixed part of the
        table, or chosen by what was returned before. The rows that a batch touches are not: they tell of it. What a
        unit has in other rows must be left out, which can only shorten its vector.

        Args:
            units, Returns, Raises: as for `step`.
            rows: (k,) distinct row numbers.
            values: (k, width) sums, float32 or float64.
        Raises: ArgumentError for a strategy with a state (its noise in a row needs all steps before, in that row) or a
            plan with a grid.
        """
        with self._one_at_a_time():
            asked = Rows.of(rows, values, self.size, self.plan)
            return self._step(units, asked, lambda made: like(made[0], values))

    def sample(self, num_units: int) -> NDArray[np.int64]:
        """The units of the next step under secret sampling, ascending numbers below `num_units`, perhaps none.

        Each unit is drawn by a coin of its own, which comes from the key and the step; asked again, the answer is the
        same. `step` then takes these units and no others. Keep them secret: the claim rests on it.

        Args:
            num_units: size of the population, the same in all steps: one that follows the coins would undo them.
        Raises: PlanError where the plan is not one for secret sampling; ArgumentError for another population.
        """
        self.check(None)
        if self._coins is None:
            raise PlanError(
                f"sample() draws secret coins, and the plan is for {self.plan.participation.describe()}: give step() "
                "the units as they come"
            )
        return self._coins.draw(self.ledger.step, num_units)

    def _step(self, units: Iterable[Any] | None, own: list[Tensor] | Rows, give: Callable[[list[Tensor]], Any]) -> Any:
        unnamed = "record" in self.plan.on_device
        if units is None and not unnamed:
            raise ArgumentError("units must name whose parts are in the total, got None; a step of nobody has []")
        ids = self.check([] if units is None else units)
        pieces = [own.values] if isinstance(own, Rows) else own
        if not len(ids) and not unnamed and any(bool(piece.any()) for piece in pieces):
            raise ArgumentError("a total of nobody must be zero: name all units whose parts are in it")
        t = self.ledger.step
        private = give(self.take(ids, own))
        self.tell(t, lambda: private)
        return private

    def check(self, units: Iterable[Any] | None) -> Units:
        """Raise unless these units may take the next step. Changes nothing.

        Args:
            units: None where they are not known yet.
        Returns: the units, distinct and sorted.
        """
        if self._closed:
            raise TrainingError("this release was closed: another process may have resumed its run")
        self._files.check_process()
        self._files.check_open()
        step = self.ledger.step
        if step >= self._n:
            raise StepsExhaustedError(f"all {self._n} planned steps are used; a longer run needs its own plan")
        self._noise.check(step)
        self.clip.check_step(step)
        if units is None:
            return []
        ids = self._checked(step, units)
        if self._coins is not None:
            self._coins.check(step, ids)
        return ids

    def _checked(self, step: int, units: Iterable[Any]) -> Units:
        ids = self.ledger.check(step, units)
        if len(ids) and "record" in self.plan.on_device:
            raise ArgumentError(
                "units must be None or empty: the plan leaves the record to the users' devices, so that ids are not "
                "learnt here, and got some. Leave them out, or plan without on_device='record' and let the ledger guard"
            )
        return ids

    def take(self, units: Iterable[Any], own: list[Tensor] | Rows, place: str = "Release.step") -> list[Tensor]:
        """The step itself, after `check`: journal, noise, constant, ledger.

        A ledger on disk has the step written before the journal commits it, where it does not count: so nothing that
        comes after the commit can fail for want of room. See `anyorder.ledger.disk` for what a crash leaves.

        Args:
            units: what `check` returned.
            own: this rank's part of the total in pieces, which are overwritten.
        Returns: the private pieces: `own` itself, or new ones on a grid.
        """
        step = self.ledger.step
        population = b"" if self._coins is None else self._coins.population
        ids = self._checked(step, units)
        if isinstance(own, Rows) and self._guest is not None:
            raise TrainingError("canaries are added to whole totals: an audited run takes step(), not step_rows()")
        self.ledger.prepare(step, ids)
        if isinstance(own, Rows):
            self._files.commit(place, step, ids, own.parts(), population)
            private = [self._noise.add_to_rows(own.rows, own.values, self.clip.divisor)]
        else:
            own = self.clip.planned(own)
            if self._guest is not None:
                own = self._guest(step, own, self.clip.divisor)
            self._files.commit(place, step, ids, own, population)
            private = self._noise.add_to(own, self.clip.divisor)
        self.ledger.record(step, ids)
        return private

    def admit(self, guest: Guest) -> None:
        """Let a guest add to every total before it is noised: for `anyorder.audit.plant`, which says what it may add.

        Raises: TrainingError after the first step, for a second guest, among several ranks, or with a checkpoint: what
            the guest adds would have to be the same, bit for bit, after a resume.
        """
        self.check(None)
        problem = None
        if self.ledger.step:
            problem = "after its first step: what was released before knows nothing of them"
        elif self._guest is not None:
            problem = "a second time"
        elif self._group.size > 1:
            problem = "among several ranks, each of which has a part of the total: audit in one process"
        elif self._path is not None:
            problem = "with a checkpoint: a resumed run would have to add the same ones; audit without checkpoint="
        if problem is not None:
            raise TrainingError(f"canaries cannot be planted in a run {problem}")
        self._guest = guest

    def on_release(self, callback: Observer) -> Callable[[], None]:
        """Call `callback(step, private)` after every step from now on: for audits and logs.

        It sees what is released and nothing else: a copy of what `step` returns (of an engine: all private gradients
        one behind the other, of this rank's coordinates where there are several). One that raises changes nothing: the
        step was taken before and is in the ledger, all other observers are called, the error goes up to the caller of
        `step`, and `unreturned` has what `step` would have returned.

        Returns: a function that ends it.
        """
        if not callable(callback):
            raise ArgumentError(f"callback must be a function of (step, private), got {type(callback).__name__}")
        self._observers.append(callback)
        return lambda: self._observers.remove(callback)

    def tell(self, step: int, private: Callable[[], Any]) -> None:
        """Tell the observers of a step that was taken."""
        self.unreturned = None
        if not self._observers:
            return
        released = private()
        self.unreturned = step, released
        problems = []
        for observer in tuple(self._observers):
            try:
                observer(step, copy_of(released))
            except Exception as problem:
                problem.add_note(f"(an observer's; step {step} was taken, and `unreturned` has its result)")
                problems.append(problem)
        if len(problems) > 1:
            raise ExceptionGroup(f"{len(problems)} observers of step {step} failed", problems)
        if problems:
            raise problems[0]
        self.unreturned = None

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._free_now.acquire(blocking=False):
            raise TrainingError(
                "a step is being taken already, by another thread or around this observer: one at a time"
            )
        try:
            yield
        finally:
            self._free_now.release()

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
        """Where secret coins come from: rows are steps, and renewed where steps are."""
        return self._files.coins(self.derived(b"sampling"))

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
        self._files.save(place, {**state, **coins, **front_end})

    def check_save(self) -> None:
        """Raise CheckpointError where nothing can be saved."""
        self._files.check_process()
        if self._path is None:
            raise CheckpointError("this run has no file: give checkpoint=")
        if self._closed:
            raise CheckpointError("this run was closed: another process may have resumed it")
        self._files.check_open()
        self._noise.check(self.ledger.step)

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
