"""A device's own record: a counter and a timer on its disk, for plans that leave who took part to the devices.

    may(r)    count < k,  r - last_round >= b,  and  now - last_time >= hours,  by what the file says
    take(r)   the same, then count + 1, r and now are on the disk, and only then does it return

**What a crash leaves.** The new state takes the place of the old one in one act (`anyorder.durable`). Killed before it,
the device has the old state and sent nothing: the round is still open to it. Killed after it, at any point up to the
sending, the device has spent the round: the message is lost, and none is ever sent twice. A device that does not know
its past says nothing: a file that cannot be read, was altered, is of another plan, or tells of a time that is still to
come (the clock was set back) is refused.

**What the claim then rests on.** Sensitivity counts rounds, and the device knows them by what the server tells. A
server that calls two rounds by numbers far apart, when they are near, makes it send too soon: for the separation in
rounds, as for the noise, the server is trusted. The counter needs nobody, and the timer only the device's clock: they
bound what any server can have, k messages in all and one in so many hours. From hours alone no separation in rounds
follows; how many rounds fit into them is known afterwards, and to the server alone. Whoever deletes the file, sets the
clock forward, or owns two devices, goes past them: nothing here can tell.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from anyorder import checks, durable
from anyorder.checks import final
from anyorder.errors import ArgumentError, CheckpointError, ParticipationError
from anyorder.formats import canonical
from anyorder.plan.plan import Plan, check_on_device

__all__ = ["DeviceRecord"]

_FORMAT = "anyorder-device/1"
_MOST = 1 << 12  # bytes of a file


@dataclass(frozen=True)
class _DeviceState:
    count: int = 0
    last_round: int = -1
    last_time: float = 0.0


@final
class DeviceRecord:
    """When this device took part, and whether it may again.

    Args:
        path: a file of this plan's own, which is made at the first round. Next to it stands `<path>.lock`.
        rule: the plan, for `SingleEpoch` or `MinSeparation`; or (min_sep, max_participations, hours) of it.
        hours: the least time between two messages, where `rule` is a plan; 0 for none.
        clock: seconds since some fixed time, for tests.
    """

    def __init__(
        self, path: str | Path, rule: Plan | tuple[int, int, float], *, hours: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._path, self._clock = Path(os.path.realpath(path)), clock
        self._n: int | None = None
        if isinstance(rule, Plan):
            check_on_device(("record",), rule.participation)
            self._n, separation = rule.n, rule.participation.min_separation
            most, claim = rule.participation.max_participations, rule.public().digest
        elif isinstance(rule, tuple) and len(rule) == 3:
            if hours:
                raise ArgumentError("hours must be given once: with a plan, or in (min_sep, max_participations, hours)")
            separation, most, hours = rule
            claim = "no plan"
        else:
            raise ArgumentError(
                f"rule must be a Plan, or (min_sep, max_participations, hours), got {type(rule).__name__}"
            )
        self._separation = checks.integer("min_sep", separation, low=1)
        self._most = checks.integer("max_participations", most, low=1)
        self._hours = checks.real("hours", hours, low=0.0)
        self._claim = {"claim": claim, "min_sep": self._separation, "most": self._most, "hours": self._hours}

    def may(self, round: int) -> bool:
        """True if the device may take part in this round of the server's. Changes nothing.

        Raises: CheckpointError if the file does not say: it cannot be read, was altered, or is of another plan.
        """
        round = checks.integer("round", round, low=0)
        return self._problem(self._read(), round, self._now()) is None

    def take(self, round: int) -> None:
        """Spend the round: call it before the message leaves. What returns is on the disk.

        Raises: ParticipationError if the device may not; CheckpointError as `may`, and if the disk does not take it:
            then nothing may be sent.
        """
        round = checks.integer("round", round, low=0)
        with self._alone():
            state, now = self._read(), self._now()
            problem = self._problem(state, round, now)
            if problem is not None:
                raise ParticipationError(f"this device may not take part in round {round}: {problem}. Send nothing")
            self._write(_DeviceState(state.count + 1, round, now))

    def _problem(self, state: _DeviceState, round: int, now: float) -> str | None:
        if self._n is not None and round >= self._n:
            return f"the plan has rounds 0 to {self._n - 1}"
        if state.count >= self._most:
            return f"it took part {state.count} times, and the plan lets it {self._most} times"
        if not state.count:
            return None
        if round - state.last_round < self._separation:
            return f"it was in round {state.last_round}, and may come back {self._separation} rounds later"
        if now < state.last_time:
            return "its clock is behind its own last message: it was set back"
        if now - state.last_time < 3600 * self._hours:
            return f"its last message is less than {self._hours:g} hours ago"
        return None

    def _now(self) -> float:
        now = float(self._clock())
        if not math.isfinite(now):
            raise CheckpointError("the device's clock tells no time; nothing may be sent without it")
        return now

    # -- the file ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time, over reading and writing; the lock ends with its process."""
        try:
            descriptor = durable.lock_file(self._path.with_name(f"{self._path.name}.lock"), wait=True)
        except OSError as problem:
            raise CheckpointError(f"the record {self._path} cannot be locked: {problem}. Send nothing") from problem
        try:
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> _DeviceState:
        try:
            with open(self._path, "rb") as file:
                text = file.read(_MOST)
        except FileNotFoundError:
            return _DeviceState()
        except OSError as problem:
            raise CheckpointError(f"the record {self._path} cannot be read: {problem}. Send nothing") from problem
        try:
            data = json.loads(text)
            seal = data.pop("sha256")
            state = _DeviceState(**data.pop("state"))
            whole = seal == _seal({**data, "state": asdict(state)}) and data.pop("format") == _FORMAT
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise CheckpointError(f"the record {self._path} was altered, or is none. Send nothing") from problem
        if not whole:
            raise CheckpointError(f"the record {self._path} was altered: its checksum differs. Send nothing")
        if data != self._claim:
            raise CheckpointError(
                f"the record {self._path} is of another plan or other limits, which it would forget; give each plan a "
                "file of its own. Send nothing"
            )
        return state

    def _write(self, state: _DeviceState) -> None:
        data: dict[str, Any] = {"format": _FORMAT, **self._claim, "state": asdict(state)}
        text = json.dumps({**data, "sha256": _seal(data)}).encode()
        try:
            durable.replace(self._path, text, secret=True)
        except OSError as problem:
            raise CheckpointError(f"the record {self._path} cannot be written: {problem}. Send nothing") from problem


def _seal(data: dict[str, Any]) -> str:
    return sha256(canonical(data).encode()).hexdigest()
