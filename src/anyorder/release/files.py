"""The files of a run: its checkpoint and its journal, written by the first rank, on which all ranks agree."""

import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.errors import ArgumentError, CheckpointError, CheckpointWarning
from anyorder.ledger import Ledger, Mark, Units, canonical_bytes
from anyorder.noise import NoiseSource
from anyorder.noise.stream import first_new_row
from anyorder.patterns import Participation
from anyorder.plan.plan import Plan
from anyorder.release.checkpoint import check_ours, load, save_atomic
from anyorder.release.journal import Journal, check_same_plan
from anyorder.release.ranks import Ranks

State = dict[str, Any]


class RunFiles:
    """What a run keeps on disk, and the process that may go on with it. All ranks call the same methods.

    Order of calls: `load`, `begin`, `save` of a run that is new, then `commit` and `save`. So the key is on the disk
    before any noise is used: a restart finds it, and no step is released twice with different noise, whenever a kill
    comes.

    Args:
        path: the checkpoint file; None for a run that keeps nothing.
        ledger_on_disk: whether the ledger has a file of its own beside it.
        start_over: move a run that took steps aside, and begin again with another key.

    Attributes:
        earlier: (fingerprint of the key, steps that count) of each start that was moved aside; after `begin`.
    """

    def __init__(self, path: Path | None, group: Ranks, ledger_on_disk: bool = False, start_over: bool = False) -> None:
        if start_over and path is None:
            raise ArgumentError("start_over=True needs checkpoint=, which says what was begun")
        if ledger_on_disk and (path is None or group.size > 1):
            raise ArgumentError(
                "ledger_on_disk needs checkpoint=, next to which its file is kept, and one process, which writes it"
            )
        self._path, self._group, self._ledger_on_disk = path, group, ledger_on_disk
        self._start_over = start_over
        self.earlier: list[tuple[str, int]] = []
        self._journal: Journal | None = None  # on the first rank
        self._renewals: list[tuple[int, bytes]] = []
        self._doubtful_end: list[int] = []  # n, where steps may be missing and none is left to draw anew
        self._hint = ""
        self._is_saved = False

    def check_open(self) -> None:
        """Refuse, before anything is written, where another object of this process has resumed the run since."""
        if self._journal is not None:
            self._journal.check_open()

    def load(self, place: str, plan: Plan, key: bytes | None) -> State | None:
        """The state that the checkpoint file holds; None where there is no file.

        Args:
            key: the key that the user gave, which must be the saved one.
        Raises: CheckpointError if the file is no checkpoint, or of another plan or key, or its folder is not there.
        """
        return self._group.by_first(place, lambda: self._load(plan, key))

    def _load(self, plan: Plan, key: bytes | None) -> State | None:
        path = self._path
        if path is None:
            return None
        if not Path(os.path.realpath(path)).parent.is_dir():
            raise CheckpointError(
                f"the folder of checkpoint={str(path)!r} is not there; make it, or choose another file"
            )
        if self._start_over:
            self._move_aside(path, plan)
        if not path.exists():
            return None
        state = load(path)
        saved = Plan.from_dict(json.loads(state["plan"]))
        if saved.digest != plan.digest:
            here, there = plan.to_dict(), saved.to_dict()
            changed = [k for k in {**here, **there} if here.get(k) != there.get(k)]
            raise CheckpointError(
                f"{path} belongs to another plan (different: {', '.join(changed)}); resume with that plan, or choose "
                "another checkpoint file"
            )
        if key is not None and key != state["key"]:
            raise CheckpointError(
                f"key= is not the key of the run in {path}, which goes on with its own; leave key= out, or choose "
                "another checkpoint file"
            )
        return state

    def _move_aside(self, path: Path, plan: Plan) -> None:
        """Put away the run of this file, if it took a step or may have taken one.

        How many of its steps count is written into its journal before anything is moved, and the journal is moved last:
        a kill leaves what the next start refuses, or counts.
        """
        told, taken = _told(plan), 0
        journal = Journal.of_any_run(path)
        before = 0 if journal is None else journal.before
        if path.exists():
            try:
                state = self._read(plan)
                taken, key, before = int(state["stream"]["t"]), state["key"], max(before, len(state.get("earlier", [])))
            except _Unreadable:  # how far it came is not known
                taken, key = plan.n, None
            if journal is None and taken and key is not None:
                run_id = NoiseSource(key).derive(plan.digest.encode()).fingerprint()
                journal = Journal.create(path, run_id, told)
                journal.plan = told  # the checkpoint says so, where a kill left a journal that does not yet
                taken = plan.n  # steps after the checkpoint were in the journal that is gone
        if journal is None:
            return
        try:
            check_same_plan(journal, told)
            if len(Journal.earlier(path, told, plan.n)) < before:
                raise CheckpointError(
                    f"{path} was started over {before} time(s), and the journals of the starts before, "
                    f"{journal.path}.1 and so on, are not all there: what they released would not be counted. Put them "
                    "back to start over; or begin in a checkpoint file of another name, and compose all (ao.compose)"
                )
            is_whole = journal.doubt is None and not journal.missing(0)
            steps = max(journal.next_step, journal.ended, taken) if is_whole else plan.n
            journal.end(min(steps, plan.n), told)
            real = Path(os.path.realpath(path))
            journal.move_aside([real, real.with_name(f"{real.name}.ledger")])
        finally:
            journal.close()

    def _read(self, plan: Plan) -> State:
        """The checkpoint that is there. Raises: CheckpointError for what is none of ours."""
        assert self._path is not None
        check_ours(self._path)
        try:
            state = load(self._path)
        except CheckpointError as problem:
            raise _Unreadable from problem
        if Plan.from_dict(json.loads(state["plan"])).digest != plan.digest:
            raise CheckpointError(
                f"{self._path} belongs to another plan: start over with that plan, or choose another checkpoint file"
            )
        return state

    def begin(self, place: str, source: NoiseSource, plan: Plan, state: State | None) -> NoiseSource:
        """Begin the journal, or go on with it; the source of the rows of Z, renewed where it must be.

        Args:
            source: the run's own, without renewals.
            state: what `load` gave.
        Raises: CheckpointError if another run uses the file, the journal does not go with the checkpoint, or steps
            were released after it that this run could not repeat.
        """
        self._run_id, self._key = source.fingerprint(), source.key
        self._is_saved = state is not None
        self.earlier = self._group.by_first(place, lambda: self._earlier(plan, state))
        self._renewals = self._group.by_first(place, lambda: self._begin(plan, state))
        for step, nonce in self._renewals:
            row = first_new_row(plan.strategy, step)
            assert row is not None
            source = source.renewed(row, nonce)
        return source

    def _earlier(self, plan: Plan, state: State | None) -> list[tuple[str, int]]:
        if self._path is None:
            return []
        if state is not None:
            return [(str(run), int(steps)) for run, steps in state.get("earlier", [])]
        found = Journal.earlier(self._path, _told(plan), plan.n)
        if self._run_id in [run for run, _ in found]:
            raise CheckpointError(
                f"the noise of this key was released by an earlier start in {self._path}: leave key= out, which draws "
                "a new one"
            )
        return found

    def ledger(self, participation: Participation, state: State | None) -> Ledger:
        """The ledger of the run, as the checkpoint has it; after `begin`, which keeps other processes away.

        Raises: CheckpointError if it is not the one that the checkpoint was saved with, or is kept otherwise.
        """
        if state is not None and isinstance(state["ledger"], bytes) == self._ledger_on_disk:
            here, there = ("beside it", "within it") if self._ledger_on_disk else ("within it", "beside it")
            raise CheckpointError(
                f"{self._path} was saved with its ledger {there}, and this run would have it {here}: resume with "
                f"ledger_on_disk={not self._ledger_on_disk}"
            )
        if not self._ledger_on_disk:
            return Ledger(participation) if state is None else Ledger.from_bytes(participation, state["ledger"])
        assert self._path is not None
        path = Path(os.path.realpath(self._path))
        path = path.with_name(f"{path.name}.ledger")
        if state is None:
            ledger = Ledger.create(participation, path, self._run_id)
        else:
            ledger = Ledger.resume(participation, path, self._run_id, Mark(**state["ledger"]))
        assert self._journal is not None
        self._journal.on_close = ledger.close  # who has lost the journal would write over what the next one writes
        return ledger

    def kept(self, ledger: Ledger) -> bytes | dict[str, Any]:
        """What the checkpoint keeps of it: the whole record, or where its own file stands, which is on the disk then.

        In this order: the file first, then the checkpoint that vouches for it.
        """
        return ledger.settle()._asdict() if self._ledger_on_disk else ledger.to_bytes()

    def by_step(self, source: NoiseSource, first_row: Callable[[int], int] = int) -> NoiseSource:
        """A source renewed from the same steps on.

        Args:
            first_row: step -> its first row; by default rows are steps.
        """
        for step, nonce in self._renewals:
            source = source.renewed(first_row(step), nonce)
        return source

    def renewed_since(self) -> list[int]:
        """The steps from which on noise was drawn again; n where it would be, and no step is left."""
        return [step for step, _ in self._renewals] + self._doubtful_end

    def _begin(self, plan: Plan, state: State | None) -> list[tuple[int, bytes]]:
        if self._path is None:
            return []
        step = 0 if state is None else state["stream"]["t"]
        known = [] if state is None else [(int(t), bytes(nonce)) for t, nonce in state["renewals"]]
        if state is None:
            journal = Journal.create(self._path, self._run_id, _told(plan))
        else:
            journal = Journal.open(self._path, self._run_id)
        try:
            renewals = self._agreed(journal, known)
            if missing := journal.missing(step):
                raise CheckpointError(
                    f"{journal.path} has steps after the checkpoint, but not step {missing[0]}: what its noise was "
                    "used on is not known; resume from a later checkpoint"
                )
            if state is not None:
                self._check_lost(journal, step, state)
            if journal.doubt is None and journal.next_step < step:
                journal.doubt = "it ends before the checkpoint"
            journal.begin_after(len(self.earlier))
            if journal.doubt is not None:
                renewals = self._renew(journal, plan, max(step, journal.next_step), renewals)
        except BaseException:
            journal.close()
            raise
        self._journal = journal
        return renewals

    def _agreed(self, journal: Journal, known: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """The renewals of checkpoint and journal, of which one may lack the last ones of the other."""
        shorter, longer = sorted((known, journal.renewals), key=len)
        if longer[: len(shorter)] != shorter:
            raise CheckpointError(
                f"the checkpoint {self._path} and its journal are of two copies of the run, each of which went on; "
                "resume with files that belong together"
            )
        return longer

    def _check_lost(self, journal: Journal, step: int, state: State) -> None:
        """What steps taken after the checkpoint need to be repeated."""
        lost = journal.next_step - step
        if lost > 0 and state["ranks"] != self._group.size:
            raise CheckpointError(
                f"{lost} step(s) after the checkpoint were released by {state['ranks']} rank(s), and this run has "
                f"{self._group.size}: its sums are rounded otherwise, so that it could not repeat them. Resume with "
                f"{state['ranks']}, save after these steps, and change the number then"
            )
        here = _machine()
        self._hint = "" if state["machine"] == here else f" (saved on: {state['machine']}; this is: {here})"

    def _renew(
        self, journal: Journal, plan: Plan, step: int, renewals: list[tuple[int, bytes]]
    ) -> list[tuple[int, bytes]]:
        """Draw the rows that first come at `step` from a fresh key, and say so."""
        strategy = plan.strategy
        if step >= strategy.n:
            self._doubtful_end = [strategy.n]  # noise of lazy tables may be left
            return renewals
        where = f"the journal {journal.path} may lack steps: {journal.doubt}"
        if first_new_row(strategy, step) is None:
            raise CheckpointError(
                f"{where}. The noise from step {step} on cannot be drawn again: {strategy.describe()} settles part of "
                "it in the steps before. Resume from the files that the run itself wrote, or start a new run"
            )
        nonce = os.urandom(16)
        journal.renew(step, nonce, renewals)
        message = (
            f"{where}. From step {step} on the noise comes from a fresh key, so that none is used twice. If another "
            "copy of this run goes on too, what both tell of a unit is the composition of two runs"
        )
        if isinstance(plan.participation, SecretOrder) and plan.participation.draws_last:
            message += (
                f", and not of two claims: the draws made before step {step} decide later steps too, in "
                "both copies. No claim holds for both together"
            )
        warnings.warn(message, CheckpointWarning, stacklevel=2)
        return [*renewals, (step, nonce)]

    @property
    def needs_save(self) -> bool:
        """Whether the key is not on the disk yet, and must be before any noise is used."""
        return self._path is not None and not self._is_saved

    def has(self, step: int) -> bool:
        """Whether the noise of a step was used before: what is made now is that step again."""
        return self._journal is not None and step < self._journal.next_step

    def may_have(self, step: int) -> bool:
        """`has`, or what is behind the journal's end, or done by another object, is not known."""
        return self.has(step) or (self._journal is not None and not self._journal.is_settled)

    def commit(self, place: str, step: int, units: Units, own: list[Tensor], population: bytes = b"") -> None:
        """Write down what the step uses its noise on, and who is in it, before anything noised is released.

        Args:
            units: of the step, as the ledger has them: under other names the same sum is another step, since a unit
                could come once more than the ledger knows of.
            own: this rank's part of the un-noised sum, in pieces: how it is cut does not matter.
            population: whom draws were made for, if any were.
        Raises: CheckpointError, on all ranks, if the step used its noise on another sum, or for others, before.
        """
        if self._path is None:
            return
        assert self._is_saved, "the first checkpoint comes before the first step"
        who = population + canonical_bytes(units)
        kinds = ",".join(sorted({str(x.dtype) for x in own})).encode()
        head = b"".join(len(part).to_bytes(8, "little") + part for part in (who, kinds))
        digests = self._group.together(place, lambda: self._digest(head, *(x.cpu().numpy() for x in own)))
        digest = digests[0] if len(digests) == 1 else self._digest(*digests)

        def write() -> None:
            assert self._journal is not None
            self._journal.commit(step, digest, self._hint)

        self._group.by_first(place, write)

    def commit_flush(self, step: int, tables: Sequence[Tensor]) -> None:
        """Write down that the tables are shown before a step, before they are. Of one process.

        Raises: CheckpointError if other tables were shown there, or a lost process has gone on without showing them.
        """
        if self._journal is not None:
            head = repr([(str(x.dtype), *x.shape) for x in tables]).encode()
            self._journal.commit_flush(step, self._digest(b"flush", head, *(x.cpu().numpy() for x in tables)))

    def check_flush(self, step: int) -> None:
        """Raise CheckpointError where tables must not be shown before this step."""
        if self._journal is not None:
            self._journal.check_flush(step)

    def has_flush(self, step: int) -> bool:
        """Whether tables were shown before this step."""
        return self._journal is not None and self._journal.has_flush(step)

    def _digest(self, *parts: Any) -> bytes:
        """Of bytes and arrays that have their elements one behind the other."""
        state = blake2b(digest_size=16, key=self._key, person=b"anyorder sum")
        for part in parts:
            state.update(part)
        return state.digest()

    def save(self, place: str, state: State | None) -> None:
        """Replace the checkpoint file.

        Args:
            state: on the first rank, what the file shall hold.
        """
        assert self._path is not None
        path = self._path

        def write() -> None:
            assert state is not None
            assert self._journal is not None
            self._journal.check_open()
            whole = {**state, "ranks": self._group.size, "renewals": self._renewals, "machine": _machine()}
            if self.earlier:
                whole["earlier"] = self.earlier
            save_atomic(path, whole, self._run_id)

        self._group.by_first(place, write)
        self._is_saved = True

    def close(self) -> None:
        """Let another process resume the run."""
        if self._journal is not None:
            self._journal.close()


class _Unreadable(Exception):
    """A checkpoint that is damaged."""


def _told(plan: Plan) -> bytes:
    """What a journal says of its plan."""
    return bytes.fromhex(plan.digest)[:16]


def _machine() -> str:
    """What sums of floats are rounded by."""
    return f"{_processor()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
