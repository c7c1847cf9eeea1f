"""A server under random faults, beside a model of what it should be: 1000 of them, from a seed.

Clients die, come late, twice or too early, send NaN, infinities, wrong shapes, unknown names, integers or nothing; the
server is killed (SIGKILL) at any of its calls on files, or finds the disk full there. The model knows who may come, in
a table of its own, and sums by its own arithmetic; noise it has from `ao.Release`. Counted over all histories: rounds
that were lost though their messages were safe, rounds that failed for what somebody sent, histories whose server ends
elsewhere than the model, users over their limit, and records that claim less epsilon than the true histories have.
"""

import json
import os
import random
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import anyorder as ao
from anyorder.accounting import gdp_epsilon
from anyorder.errors import CheckpointError, CheckpointWarning, ParticipationError, TrainingError
from anyorder.federated import Server
from anyorder.federated.server import Round
from anyorder.participation import MinSeparation
from anyorder.release.checkpoint import load
from anyorder.strategy import BandedInverse
from anyorder.workload import prefix_sum
from benchmarks._report import Row

N, GOAL, USERS, SEPARATION, MOST, SIZE = 12, 4, 40, 3, 3, 12
FINE = "fine"
KINDS = ("dies", "late", "twice", "NaN", "infinite", "wrong shape", "unknown name", "integers", "nothing")
CALLS = ("write", "pwrite", "fsync", "replace", "unlink")
_write = os.write


@dataclass
class Counts:
    """What came of some histories."""

    histories: int = 0
    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    failed: int = 0
    differ: int = 0
    over: int = 0
    too_low: int = 0

    def fault(self, kind: str) -> None:
        """One more of a kind."""
        self.faults[kind] = self.faults.get(kind, 0) + 1

    @property
    def total(self) -> int:
        """Faults of all kinds."""
        return sum(self.faults.values())


def rows(quick: bool) -> Iterator[Row]:
    """A row for each count, and one for the faults there were."""
    counts = histories(100 if quick else 1000, seed=0)
    said = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.faults.items()))
    yield Row("faults", counts.total, None, None, f"in {counts.histories} histories of {N} rounds: {said}")
    yield Row("rounds lost that need not be", counts.lost, None, None, f"of {counts.rounds} made; 0 is right")
    yield Row("rounds that failed for what a client sent", counts.failed, None, None, "0 is right")
    yield Row("servers that end elsewhere than the model", counts.differ, None, None, "histories; 0 is right")
    yield Row("users over their limit", counts.over, None, None, "0 is right")
    yield Row("realised epsilons below the truth", counts.too_low, None, None, "histories; 0 is right")


def histories(number: int, seed: int) -> Counts:
    """Histories, until there were as many faults."""
    counts = Counts()
    while counts.total < number:
        with tempfile.TemporaryDirectory() as folder:
            _history(Path(folder), (seed, counts.histories), counts)
        counts.histories += 1
    return counts


# -- what users do -----------------------------------------------------------------------------------------------------


def plan() -> ao.Plan:
    """Each user at most three times, three rounds apart."""
    return ao.Plan(
        participation=MinSeparation(N, SEPARATION, MOST), strategy=BandedInverse([1.0, -0.5, -0.2], N),
        workload=prefix_sum(N), clip_norm=1.0, sigma=0.5, delta=1e-6, batch_size=GOAL, unit="user",
    )  # fmt: skip


def sent(seed: tuple[int, ...], life: int, step: int) -> list[tuple[int, str, np.ndarray]]:
    """(user, kind of message, change) in the order of arrival; half of them faulty, some from users who come early."""
    generator = np.random.default_rng([*seed, life, step])
    users = generator.choice(USERS, 6, replace=False)
    kinds = [FINE if generator.random() < 0.5 else KINDS[generator.integers(len(KINDS))] for _ in users]
    changes = generator.normal(size=(6, SIZE)) * generator.choice([0.01, 0.3, 30.0], (6, 1))
    return [
        (int(user), kind, change) for user, kind, change in zip(users, kinds, changes.astype(np.float32), strict=True)
    ]


def message(kind: str, change: np.ndarray) -> Any:
    """What a client of this kind sends."""
    whole = {"weight": change[: SIZE - 2].reshape(2, -1), "bias": change[SIZE - 2 :]}
    match kind:
        case "NaN" | "infinite":
            return {**whole, "bias": np.array([1.0, np.nan if kind == "NaN" else -np.inf], np.float32)}
        case "wrong shape":
            return {**whole, "bias": change}
        case "unknown name":
            return {**whole, "counter": np.ones(1, np.float32)}
        case "integers":
            return {**whole, "bias": np.array([1, 2])}
        case "nothing":
            return None
        case _:
            return whole


# -- the server, in a process of its own -------------------------------------------------------------------------------


def _server(checkpoint: Path | None, key: bytes) -> Server:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(SIZE // 2 - 1, 2)
    return Server(plan(), model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint=checkpoint, key=key)


def _key(seed: tuple[int, ...]) -> bytes:
    return bytes(random.Random(repr(seed)).randrange(256) for _ in range(32))


def _life(folder: Path, seed: tuple[int, ...], life: int) -> None:
    """A server from its start, or restart, to the last round or its death."""
    descriptor = os.open(folder / "said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(what: str, step: int) -> None:
        _write(descriptor, (json.dumps([life, what, step]) + "\n").encode())

    chance = random.Random(f"{seed} {life}")
    _break(chance.randrange(100), chance.randrange(100), lambda: say("full", -1))
    server = _server(folder / "run", _key(seed))
    say("start", server.step)
    while (step := server.step) < N:
        opened = server.open()
        late = _collect(opened, sent(seed, life, step))
        try:
            _close(server, opened)
        except TrainingError:
            say("failed", step)
        for user, change in late:
            try:
                opened.add(user, change)
                say("failed", step)
            except TrainingError:
                pass  # as it must be
    ids = [list(map(int, users)) for users in server.release.ledger.history()]
    end = {"model": list(server.model.state_dict().values()), "history": ids,
           "realised": server.release.ledger.realised_bounds()}  # fmt: skip
    torch.save(end, folder / "end")


def _collect(opened: Round, events: list[tuple[int, str, np.ndarray]]) -> list[tuple[int, Any]]:
    """Add what comes in time; refused users are refused, and the round goes on. Returns what comes late."""
    late = []
    for user, kind, change in events:
        if kind == "dies":
            continue
        if kind == "late":
            late.append((user, message(FINE, change)))
            continue
        for _ in range(2 if kind == "twice" else 1):
            try:
                opened.add(user, message(kind, change))
            except ParticipationError:
                continue
    return late


def _close(server: Server, opened: Round) -> None:
    """As an operator would: where the disk was full, once more with room."""
    step = server.step
    try:
        opened.close()
    except CheckpointError:
        if server.step == step:
            opened.close()
        else:
            server.save()


def _break(killed: int, full: int, say: Callable[[], None]) -> None:
    """Kill this process at a call on files, and let an earlier or later one find the disk full."""
    left = [killed, full]

    def broken(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            left[1] -= 1
            if left[1] < 0 and name in ("write", "pwrite"):
                left[1] = 10**9
                say()
                raise OSError(28, "No space left on device")
            return real(*arguments, **named)

        return call

    for name in CALLS:
        setattr(os, name, broken(name, getattr(os, name)))


def _fork(act: Callable[[], None]) -> bool:
    """Whether a child process that acts came to the end; False where it was killed, or had no room to start.

    Raises: RuntimeError where it came to another end.
    """
    child = os.fork()
    if not child:
        status = 2
        try:
            warnings.simplefilter("error", CheckpointWarning)
            act()
            status = 0
        except CheckpointError as problem:
            status = 1 if "No space left" in str(problem) else 2
        finally:
            if status == 2:
                traceback.print_exc()
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1, -signal.SIGKILL):
        raise RuntimeError(f"a server ended with {code}")
    return code == 0


# -- the model beside it -----------------------------------------------------------------------------------------------


def _history(folder: Path, seed: tuple[int, ...], counts: Counts) -> None:
    # A run that is killed while its files are made is begun anew, under another key; a key that is given cannot be.
    _server(folder / "run", _key(seed)).close()
    life = 0
    safe = {}  # life -> the round whose messages it left on the disk
    while not _fork(partial(_life, folder, seed, life)):
        if (folder / "run.pending").exists():
            safe[life] = load(folder / "run.pending")["step"]
        counts.fault("server killed")
        life += 1
    said = _said(folder)
    counts.failed += sum(what == "failed" for _, what, _ in said)
    for _ in [what for _, what, _ in said if what == "full"]:
        counts.fault("disk full")
    starts = {born: step for born, what, step in said if what == "start"}
    made_in = [max(born for born, first in starts.items() if first <= step) for step in range(N)]
    counts.rounds += N
    order = list(starts.values())
    counts.lost += sum(before > after for before, after in pairwise(order))
    counts.lost += sum(step >= starts[born] for left, step in safe.items() for born in starts if born > left)
    _compare(torch.load(folder / "end"), seed, made_in, counts)


def _said(folder: Path) -> list[list[Any]]:
    lines = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
    return [json.loads(line) for line in lines]


def _compare(end: dict[str, Any], seed: tuple[int, ...], made_in: list[int], counts: Counts) -> None:
    release = ao.Release(plan(), SIZE, key=_key(seed))
    theta = torch.cat([value.reshape(-1) for value in _server(None, _key(seed)).model.state_dict().values()]).double()
    steps: dict[int, list[int]] = {user: [] for user in range(USERS)}
    history = []
    for step, life in enumerate(made_in):
        users, total = [], np.zeros(SIZE)
        for user, kind, change in sent(seed, life, step):
            allowed = len(steps[user]) < MOST and (not steps[user] or step - steps[user][-1] >= SEPARATION)
            if kind != FINE:
                counts.fault(kind)
            if not allowed and kind not in ("dies", "late"):
                counts.fault("too early")
            if kind in ("dies", "late") or not allowed:
                continue
            users.append(user)
            steps[user].append(step)
            if kind in (FINE, "twice"):
                vector = change.astype(float)
                total += vector * min(1.0, 1.0 / np.linalg.norm(vector))
        history.append(sorted(users))
        theta += torch.from_numpy(release.step(users, total.astype(np.float32))).double()
    own = torch.cat([value.reshape(-1) for value in end["model"]]).double()
    counts.differ += history != end["history"] or not torch.allclose(own, theta, atol=1e-5)
    _judge(end, counts)


def _judge(end: dict[str, Any], counts: Counts) -> None:
    """Limits and epsilon of what the server's record says, by arithmetic of this file."""
    steps: dict[int, list[int]] = {}
    for step, users in enumerate(end["history"]):
        for user in users:
            steps.setdefault(user, []).append(step)
    early = [own for own in steps.values() if len(own) > MOST or min(np.diff(own), default=N) < SEPARATION]
    counts.over += len(early)
    given = plan()
    gram = np.abs(given.strategy.matrix().T @ given.strategy.matrix())
    worst = max(np.sqrt(gram[np.ix_(own, own)].sum()) for own in steps.values())
    truth = gdp_epsilon(float(worst) * given.clip_norm / given.noise_std, given.delta)
    most, separation = end["realised"]
    bound = ao.sensitivity(given.strategy, MinSeparation(N, separation, most)).value
    realised = gdp_epsilon(bound * given.clip_norm / given.noise_std, given.delta)
    counts.too_low += not truth <= realised * (1 + 1e-9) or not truth <= given.epsilon
