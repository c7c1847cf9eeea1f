"""The record of who took part, on disk, beside a plain SQLite table: 13 million participations of 10^6 users.

round ..      processor time to check a round of 6500 users, record it, and append it; ms, the mean over all rounds
resume ..     seconds until a new process knows who may take part, everything checked; of SQLite, `PRAGMA quick_check`
memory ..     largest resident size of the process that wrote, or of the one that resumed, with Python and NumPy, MB
file ..       bytes of the file for each participation

In memory, without a peer: a step of 32 and of 512 units by how many were seen (0 .. N - 1; spread over 2^62; names),
the bytes that the record keeps for each of these beside the history, and the tree of their receipts.

SQLite: one table (user, step) without row ids, primary key (user, step), write-ahead log; one query for the cohort's
last steps and counts, and one transaction, a round. It keeps no hash of the history. The ratio is SQLite / ours.
"""

import json
import resource
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import anyorder as ao
from anyorder.ledger import Ledger, Mark, replay
from anyorder.participation import MinSeparation
from anyorder.plan.certificate import Evidence
from benchmarks._report import Row

COHORT = 6500
RUN = "0123456789abcdef"
TARGETS = {"round": 10.0, "resume": 10.0, "memory": 1000.0}


class Size(NamedTuple):
    """Of a federation."""

    users: int
    rounds: int

    @property
    def apart(self) -> int:
        """Rounds until all had their turn."""
        return self.users // COHORT


class Cost(NamedTuple):
    """Of the process that wrote, or of the one that resumed."""

    seconds: float
    memory: float
    bytes: int
    mark: Mark | None


def cohorts(size: Size, named: bool) -> Iterator[Any]:
    """The users of each round: each in its turn, after a shuffle; fresh objects, as messages bring them."""
    order = np.random.default_rng(0).permutation(size.users)[: COHORT * size.apart].reshape(size.apart, COHORT)
    for t in range(size.rounds):
        ids = order[t % size.apart]
        yield [f"device-{i:08x}" for i in ids.tolist()] if named else ids


def rule(size: Size) -> MinSeparation:
    """As the cohorts keep it, with one round after them."""
    return MinSeparation(size.rounds + 1, b=size.apart)


def ours(path: Path, size: Size, named: bool) -> Cost:
    """Check, record, append."""
    ledger, spent = Ledger.create(rule(size), path, RUN), 0.0
    for t, units in enumerate(cohorts(size, named)):
        begin = time.process_time()
        ledger.record(t, ledger.check(t, units))
        spent += time.process_time() - begin
    mark = ledger.settle()
    return Cost(spent, _memory(), path.stat().st_size, mark)


def ours_resumed(path: Path, size: Size, named: bool, mark: Mark) -> Cost:
    """A process that goes on: the wall's clock, since it waits for the disk too."""
    begin = time.perf_counter()
    ledger = Ledger.resume(rule(size), path, RUN, mark)
    spent = time.perf_counter() - begin
    most, nearest = ledger.realised_bounds()
    assert (ledger.step, most, nearest) == (size.rounds, -(-size.rounds // size.apart), size.apart)
    return Cost(spent, _memory(), path.stat().st_size, None)


def sqlite(path: Path, size: Size, named: bool) -> Cost:
    """The same with a table."""
    table, allowed, spent = _opened(path), rule(size), 0.0
    kind = "TEXT" if named else "INTEGER"
    table.execute(f"CREATE TABLE took (user {kind}, step INTEGER, PRIMARY KEY (user, step)) WITHOUT ROWID")
    for t, units in enumerate(cohorts(size, named)):
        begin = time.process_time()
        users = units if named else units.tolist()
        for last, count in table.execute(
            "SELECT max(step), count(*) FROM took WHERE user IN (SELECT value FROM json_each(?)) GROUP BY user",
            (json.dumps(users),),
        ):
            if count >= allowed.max_participations or t - last < allowed.b:
                raise ValueError("too early or too often")
        with table:
            table.executemany("INSERT INTO took VALUES (?, ?)", ((user, t) for user in users))
        spent += time.process_time() - begin
    table.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    table.close()
    return Cost(spent, _memory(), path.stat().st_size, None)


def sqlite_resumed(path: Path, size: Size, named: bool, mark: None) -> Cost:
    """A table is there when it is opened; whether it is whole, it says if asked."""
    begin = time.perf_counter()
    table = _opened(path)
    assert table.execute("PRAGMA quick_check").fetchone() == ("ok",)
    spent = time.perf_counter() - begin
    table.close()
    return Cost(spent, _memory(), path.stat().st_size, None)


def _opened(path: Path) -> sqlite3.Connection:
    table = sqlite3.connect(path)
    table.execute("PRAGMA journal_mode=WAL")
    table.execute("PRAGMA synchronous=NORMAL")
    return table


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(work: Any, *given: Any) -> Cost:
    """What `work` gives in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *given).result()


def rows(quick: bool) -> Iterator[Row]:
    """Integers, then names."""
    size = Size(100_000, 60) if quick else Size(1_000_000, 2000)
    amount = f"{size.users} users, {size.rounds * COHORT / 1e6:.3g} million participations"
    for named in (False, True):
        of = f"{'names' if named else 'integers'}, {amount}"
        with tempfile.TemporaryDirectory() as folder:
            here, there = Path(folder, "run.ledger"), Path(folder, "run.sqlite")
            wrote, theirs = alone(ours, here, size, named), alone(sqlite, there, size, named)
            back = alone(ours_resumed, here, size, named, wrote.mark)
            their_back = alone(sqlite_resumed, there, size, named, None)
        per_round = 1e3 / size.rounds
        yield _row("round", of, wrote.seconds * per_round, theirs.seconds * per_round, "ms")
        yield _row("resume", of, back.seconds, their_back.seconds, "s")
        yield _row("memory", f"to write, {of}", wrote.memory, theirs.memory, "MB")
        yield _row("memory", f"to resume, {of}", back.memory, their_back.memory, "MB")
        each = 1 / (size.rounds * COHORT)
        yield _row("file", of, wrote.bytes * each, theirs.bytes * each, "bytes")

    for units in (1000, 100_000) if quick else (1000, 100_000, 1_000_000):
        for kind in ("small numbers", "spread", "names"):
            yield from _in_memory(units, kind)
    yield from _receipts(20_000 if quick else 1_000_000)


def _in_memory(units: int, kind: str) -> Iterator[Row]:
    """Microseconds a step, and bytes a unit."""
    random, made = np.random.default_rng(0), np.arange(units)
    ids = np.unique(random.integers(0, 1 << 62, units)) if kind == "spread" else made
    known: Any = [f"device-{i:08x}" for i in made.tolist()] if kind == "names" else ids
    ledger = Ledger(MinSeparation(10_000, b=1))
    ledger._is_string = kind == "names"
    tracemalloc.start()
    for start in range(0, len(ids), COHORT):
        ledger._seen.add(-1, known[start : start + COHORT])
    kept = tracemalloc.get_traced_memory()[0] / len(ids)
    tracemalloc.stop()
    for batch in (32, 512):
        times = []
        for _ in range(300):
            places = np.unique(random.integers(0, len(ids), batch))
            step = [known[i] for i in places] if kind == "names" else known[places]
            begin = time.perf_counter()
            ledger.record(ledger.step, ledger.check(ledger.step, step))
            times.append(time.perf_counter() - begin)
        yield Row(f"a step of {batch} among {units}, {kind}", 1e6 * median(times), None, None, "us")
    yield Row(f"kept for each of {units}, {kind}", kept, None, None, "bytes")


def _receipts(units: int) -> Iterator[Row]:
    """Seconds of processor time for the tree, then for one receipt and for a thousand."""
    plan = ao.plan(
        batch_size=COHORT, order=MinSeparation(units // COHORT + 1, 1), epsilon=8, delta=1e-8, mechanism="independent"
    )
    history = [np.arange(start, min(start + COHORT, units)) for start in range(0, units, COHORT)]
    evidence = Evidence(plan, replay(plan.participation, history), "f" * 32, bytes(32))
    for name, work in (
        ("certificate", lambda: evidence.certificate), ("first receipt", lambda: evidence.receipt(0)),
        ("another receipt", lambda: evidence.receipt(1)), ("1000 receipts", lambda: evidence.receipts(range(1000))),
    ):  # fmt: skip
        begin = time.process_time()
        work()
        yield Row(f"{name}, {units} units", time.process_time() - begin, None, None, "s")


def _row(what: str, of: str, mine: float, theirs: float, unit: str) -> Row:
    name = f"{what}: {of}"
    if what in TARGETS:
        name = f"{name} (target {TARGETS[what]:g}: {'met' if mine <= TARGETS[what] else 'MISSED'})"
    return Row(name, mine, theirs, theirs / mine, unit)
