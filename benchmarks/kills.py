"""Jobs that are killed at every call on their files, from their first start on, and begun again as a user would.

python -m benchmarks.kills               # every front end, every point
python -m benchmarks.kills --quick       # a few points of each
python -m benchmarks.kills --only engine --every 3

kills.c is compiled and loaded before libc; it counts calls that open, write, sync, rename, cut or remove a file in the
folder of a job, and kills the process (SIGKILL) before one, after it, or when half is written. A job is killed there
and started again, to its end; at each fifth point, killed there nine times and started again. Then it must hold that

- of every step one release came out, in all lives together, bit for bit;
- they are those of a run under the same key that nobody killed, up to the step from which noise was drawn from a fresh
  key, where there is one: a record that was torn in the middle has that, and says so;
- the certificate verifies, with its evidence;
- the budget has one entry for each noise key with which a step was released, and one run;
- where each life starts over, the same of each key by itself, and the certificate and the budget count every key, at no
  fewer steps than were released under it;

or that a job was refused where that is said (`REFUSED`), and released nothing more. What this cannot see:

- what a loss of power leaves: after a kill the system still writes what was never synced, so that no fsync that is
  missing, or comes too late, is found here. The order of fsyncs is held by tests/federated/test_kills.py;
- other data after a kill: a job here gives the same sums again. tests/release/test_first_kill.py gives others;
- files that are copied, moved or put back: tests/release/test_files.py.

Linux alone, with a C compiler. The exit status is 1 where something does not hold.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks._report import Row, add_options, show

RESTARTS = 9
STORMS = 5  # one of so many points is killed at again and again
_SHIM = "ANYORDER_KILLS"


# -- what is killed: each begins, or goes on, by the same call, and returns what is left at its end ------------------


@dataclass(frozen=True)
class End:
    """What a job left that is to be checked."""

    certificate: Path | None = None
    evidence: Path | None = None
    budget: Any = None


@cache
def _small_plan(**options: Any) -> Any:
    """Of six units, six steps; made once for all lives."""
    import anyorder as ao

    given = {"dataset_size": 6, "batch_size": 2, "epochs": 2, "epsilon": 8, "delta": 1e-5, "mechanism": "banded"}
    return ao.plan(**{**given, **options})


def _certified(run: Any, folder: Path) -> End:
    certificate, evidence = folder / "run.privacy.json", folder / "run.evidence.json"
    run.certificate().save(certificate)
    run.evidence().save(evidence)
    return End(certificate, evidence)


def _steps(release: Any, save_after: tuple[int, ...] = (2, 4)) -> None:
    import numpy as np

    for t in range(release.steps_taken, release.plan.n):
        total = np.random.default_rng(t).normal(size=release.size).astype(np.float32)
        release.step([2 * (t % 3), 2 * (t % 3) + 1], total)
        if t + 1 in save_after:
            release.save()


def release(folder: Path, **how: Any) -> End:
    """`Release`, saved now and then."""
    import anyorder as ao

    with ao.Release(_small_plan(), 5, checkpoint=folder / "run", **how) as run:
        _steps(run)
        return _certified(run, folder)


def release_ledger_on_disk(folder: Path) -> End:
    """`Release` with its ledger in a file of its own."""
    return release(folder, ledger_on_disk=True)


def release_with_budget(folder: Path) -> End:
    """`Release` that is entered in a budget by its key, and settled at its end."""
    import anyorder as ao

    budget = ao.Budget(folder / "people.budget", 100.0, 1e-4)
    with ao.Release(_small_plan(), 5, checkpoint=folder / "run") as run:
        if not run.steps_taken:
            run.save()  # the key first: the entry is that of the key with which steps are taken
        budget.spend(run.certificate())
        _steps(run)
        end = _certified(run, folder)
        budget.settle(run.certificate())
    return End(end.certificate, end.evidence, budget)


def start_over(folder: Path) -> End:
    """`Release` that each life begins again, with another key, entered in a budget."""
    import anyorder as ao

    people = ao.Budget(folder / "people.budget", 1000.0, 1e-4)
    with ao.Release(_small_plan(), 5, checkpoint=folder / "run", start_over=True) as run:
        if not run.steps_taken:
            run.save()
        people.spend(run.certificate())
        _steps(run)
        end = _certified(run, folder)
    return End(end.certificate, end.evidence, people)


def engine(folder: Path) -> End:
    """`PrivacyEngine`, saved after each epoch."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import anyorder as ao

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    run = ao.PrivacyEngine(_small_plan(), checkpoint=folder / "run")
    data = TensorDataset(torch.arange(18.0).reshape(6, 3), torch.arange(6) % 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimizer, loader = run.make_private(model, optimizer, DataLoader(data, 2, shuffle=True))
    for _ in range(run.epoch, 2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
        run.save()
    end = _certified(run, folder)
    run.close()
    return end


def server(folder: Path) -> End:
    """`federated.Server`, which keeps a round that it has and did not make yet."""
    import numpy as np
    import torch
    from torch import nn

    from anyorder.federated import Server

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plan = _small_plan()
    run = Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint=folder / "run")
    while run.step < plan.n:
        t = run.step
        chance = np.random.default_rng(t)
        users = (2 * (t % 3), 2 * (t % 3) + 1)
        named = {user: run.layout.named(torch.from_numpy(chance.normal(size=run.layout.size) * 0.1)) for user in users}
        run.round(named)
    end = _certified(run, folder)
    run.close()
    return end


def lazy_table(folder: Path) -> End:
    """`sparse.LazyTable`, shown twice."""
    import numpy as np
    import torch
    from torch import nn

    import anyorder as ao

    torch.manual_seed(0)
    layer = nn.Embedding(6, 4, sparse=True)
    with ao.Release(_small_plan(), 5, checkpoint=folder / "run") as run:
        table = ao.sparse.LazyTable(layer, run, lr=0.3)
        for t in range(run.steps_taken, run.plan.n + 1):
            if t in (3, run.plan.n):
                table.flush()
                _watching.show(1000 + t, layer.weight.detach(), run)
            if t == 4:
                run.save()
            if t == run.plan.n:
                break
            chance = np.random.default_rng(t)
            rows = np.sort(chance.permutation(6)[:2])
            table.read(torch.from_numpy(rows))
            values = chance.normal(size=(2, 4)).astype(np.float32)
            total = chance.normal(size=5).astype(np.float32)
            run.step([2 * (t % 3), 2 * (t % 3) + 1], total, [table.rows(rows, values)])
        return _certified(run, folder)


@cache
def _named_plan() -> Any:
    """Of two units by their names."""
    import anyorder as ao
    from anyorder.participation import KnownOrder

    order = KnownOrder([["ann"], ["bob"]])
    return ao.plan(order=order, batch_size=1, epsilon=2, delta=1e-5, mechanism="independent")


def budget(folder: Path) -> End:
    """`Budget` alone: two runs by their words, one of them by the names of its units."""
    import anyorder as ao

    people = ao.Budget(folder / "people.budget", 100.0, 1e-4)
    for i, plan in enumerate((_named_plan(), _small_plan())):
        people.spend(plan, run=ao.Release(plan, 1, key=bytes([i + 1]) * 32).certificate())
    return End(budget=people)


def train(folder: Path) -> End:
    """`anyorder train`, `anyorder train --resume` where the folder has begun, under a budget."""
    from anyorder.app import Settings
    from anyorder.app import train as begin
    from anyorder.app.job import resume

    settings = Settings.of(
        "digits", epsilon=8.0, mechanism="banded", epochs=1, batch_size=480, model="linear", checkpoint_every=2
    )
    return _job(folder, begin, resume, settings)


def fit(folder: Path) -> End:
    """`anyorder fit`, in the same way."""
    from anyorder.app.fit import FitSettings, resume_fit
    from anyorder.app.fit import fit as begin

    table = folder.parent / "people.csv"
    table.write_text("age,job\n" + "30,yes\n70,no\n" * 20)
    bounds = {"features": {"age": [0, 100]}, "target": ["no", "yes"]}
    settings = FitSettings(csv=str(table), target="job", bounds=bounds, batch_size=10, mechanism="banded")
    return _job(folder, begin, resume_fit, settings)


def _job(folder: Path, begin: Callable[..., Any], go_on: Callable[..., Any], settings: Any) -> End:
    import anyorder as ao
    from anyorder.errors import ArgumentError

    os.environ["ANYORDER_CACHE"] = "off"
    people = ao.Budget(folder / "people.budget", 100.0, 1e-4)
    run = folder / "run"
    try:
        begin(settings, run, budget=people.path)
    except ArgumentError as problem:
        if "holds files already" not in str(problem):
            raise
        go_on(run)
    return End(run / "run.privacy.json", run / "secret" / "run.evidence.json", people)


JOBS: dict[str, Callable[[Path], End]] = {
    job.__name__.replace("_", "-"): job
    for job in (
        release,
        release_ledger_on_disk,
        release_with_budget,
        start_over,
        engine,
        server,
        lazy_table,
        budget,
        train,
        fit,
    )
}
WRITES_A_FOLDER = ("train", "fit")  # a life takes a second: in these, fewer points with --quick
REFUSED = {"lazy-table": "cannot be drawn again from step"}  # a torn record looks like a copy, whose rows lack noise


# -- one life --------------------------------------------------------------------------------------------------------


class Watching:
    """What somebody outside sees of all lives of a job: a file that no kill takes back, outside the job's folder."""

    def __init__(self) -> None:
        self._log = -1
        self.run: Any = None  # the last release that was begun

    def begin(self, log: Path, key: bytes) -> None:
        """In the process that is to live: see every release; a fresh key is this one."""
        from anyorder.noise import NoiseSource
        from anyorder.release.release import Release

        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        take, begin = Release.take, Release._begin

        def begun(run: Any, *arguments: Any, **named: Any) -> None:
            begin(run, *arguments, **named)
            self.run = run

        def taken(run: Any, *arguments: Any, **named: Any) -> Any:
            step = run.ledger.step
            private = take(run, *arguments, **named)
            self.show(step, private, run)
            return private

        Release._begin, Release.take = begun, taken  # type: ignore[method-assign]
        NoiseSource.random = classmethod(lambda cls, rounds=8: cls(key, rounds))  # type: ignore[method-assign]

    def show(self, step: int, private: Any, run: Any) -> None:
        """Somebody sees it."""
        parts = [private] if not isinstance(private, list) else private
        digest = blake2b(b"".join(part.numpy().tobytes() for part in parts), digest_size=8).hexdigest()
        os.write(self._log, f"{run._key[0]} {step} {digest}\n".encode())


_watching = Watching()


@dataclass(frozen=True)
class Life:
    """How a life ended.

    Attributes:
        was_killed: before its end.
        calls, points: on files, where it was not.
        refused: the reason, where it was refused.
        fault: what does not hold of what it left.
        renewed: the first step whose noise came from a fresh key, if any did.
        entries: of its budget, by the fingerprint of the key.
        counted: steps that the certificate counts, by key.
        modules: what it imported.
    """

    was_killed: bool = False
    calls: int = 0
    points: int = 0
    refused: str = ""
    fault: str = ""
    renewed: int | None = None
    entries: dict[str, int] | None = None
    counted: dict[str, int] | None = None
    modules: tuple[str, ...] = ()


def live(name: str, place: Path, key: int, point: int = -1) -> Life:
    """A process that does the job, or goes on with it, and is killed at a point (-1: at none).

    Args:
        place: has the job's folder, what was shown, and how the last life ended.
        key: of a run that begins: 32 times this byte.
    """
    said = place / "life"
    said.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        code = 99
        try:
            said.write_text(json.dumps(_lived(name, place, key, point)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return Life(was_killed=True)
    return Life(**json.loads(said.read_text())) if status == 0 else Life(fault=f"a process ended with {status}")


def _lived(name: str, place: Path, key: int, point: int) -> dict[str, Any]:
    """In the process: the job, and what is to be said of its end."""
    from anyorder.errors import AnyorderError
    from anyorder.plan.certificate import verify

    warnings.simplefilter("ignore")
    known = set(sys.modules)
    shim, folder = ctypes.CDLL(None), place / "folder"
    _watching.begin(place / "shown", bytes([key]) * 32)
    shim.kills_arm(os.fsencode(folder), ctypes.c_long(point))
    try:
        end = JOBS[name](folder)
    except AnyorderError as problem:
        return {"refused": str(problem)}
    finally:
        told: dict[str, Any] = {"calls": shim.kills_calls(), "points": shim.kills_points()}
        shim.kills_arm(b"", ctypes.c_long(-1))
    run = _watching.run
    if run is not None and run._files.renewed_since():
        told["renewed"] = run._files.renewed_since()[0]
    if end.certificate is not None:
        verify(end.certificate, evidence=end.evidence)
    if name == "start-over":
        told["counted"] = _counted(run)
    if end.budget is not None:
        told["entries"] = Counter(held.spend.run or held.key for held in end.budget.entries())
    return {**told, "modules": [name for name in sys.modules if name not in known]}


def _counted(run: Any) -> dict[int, int]:
    """{key: steps} of a run and of the starts before it, as its certificate has them."""
    from anyorder.noise import NoiseSource

    digest = run.plan.digest.encode()
    keys = {NoiseSource(bytes([key]) * 32).derive(digest).fingerprint(): key for key in range(1, RESTARTS + 3)}
    shown = run.certificate()
    return {run._key[0]: shown.steps, **{keys[one]: steps for one, steps in shown.earlier}}


# -- many lives ------------------------------------------------------------------------------------------------------


def shown(place: Path) -> dict[int, set[tuple[int, str]]]:
    """{step: {(key, release)}} of all lives."""
    found: dict[int, set[tuple[int, str]]] = defaultdict(set)
    log = place / "shown"
    for line in log.read_text().splitlines() if log.exists() else ():
        key, step, digest = line.split()
        found[int(step)].add((int(key), digest))
    return dict(found)


class Killer:
    """Kills one job at points of its choice, and holds what comes out against a run that nobody killed."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self.kills = self.lives = self.most = self.refused = self.renewed = 0
        self.faults: list[str] = []
        self._whole: dict[int, dict[int, str]] = {}  # by key
        self._number = 0
        for module in live(name, self._place(), 1).modules:  # once, for all lives
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        self.whole, place = self._to_the_end([])
        self._check([], self.whole, place)

    def _place(self) -> Path:
        self._number += 1
        place = self._folder / str(self._number)
        (place / "folder").mkdir(parents=True)
        return place

    def expected(self, key: int) -> dict[int, str]:
        """{step: release} under this key, if nobody kills."""
        if key not in self._whole:
            place = self._place()
            live(self.name, place, key)
            self._whole[key] = {step: digest for step, found in shown(place).items() for _, digest in found}
        return self._whole[key]

    def _to_the_end(self, points: list[int]) -> tuple[Life, Path]:
        place = self._place()
        for key, point in enumerate([*points, -1], start=1):
            self.lives += 1
            end = live(self.name, place, key, point)
            if not end.was_killed:  # fewer calls are left than in the life before
                break
            self.kills += 1
        return end, place

    def kill(self, points: list[int]) -> None:
        """One life for each point, killed there, and one to the end."""
        end, place = self._to_the_end(points)
        self._check(points, end, place)

    def _check(self, points: list[int], end: Life, place: Path) -> None:
        seen = shown(place)
        for found in seen.values():
            self.most = max(self.most, *Counter(key for key, _ in found).values())
        self.refused += bool(end.refused)
        self.renewed += end.renewed is not None
        keys = {key for found in seen.values() for key, _ in found}
        problem = end.fault
        if self.name == "start-over":
            problem = problem or end.refused or self._miscounted(end, seen)
        elif any(len(found) > 1 for found in seen.values()):
            problem = f"several releases of a step: { {step: len(found) for step, found in seen.items()} }"
        elif len(keys) > 1:
            problem = f"steps were released under {len(keys)} keys"
        elif end.refused:
            is_said = self.name in REFUSED and REFUSED[self.name] in end.refused
            problem = "" if is_said else f"refused: {end.refused}"
        else:
            problem = problem or self._differs(end, seen, keys)
        if problem:
            self.faults.append(f"{self.name}, killed at {points}: {problem}")

    def _miscounted(self, end: Life, seen: dict[int, set[tuple[int, str]]]) -> str:
        """What is not counted of all starts, or was released twice under one key."""
        counted, entries = end.counted or {}, end.entries or {}
        until = end.renewed if end.renewed is not None else 10**9
        for step, found in seen.items():
            for key in {key for key, _ in found}:
                released = {digest for own, digest in found if own == key}
                if len(released) > 1 or counted.get(str(key), 0) <= step:
                    return f"step {step} under key {key}: {len(released)} releases, counted are {counted}"
                if step < until and released != {self.expected(key)[step]}:
                    return f"step {step} under key {key} is another than that of the run that nobody killed"
        of_a_copy = int(end.renewed is not None)  # its key is another, as of a copy that went on
        is_whole = len(counted) <= len(entries) <= len(counted) + of_a_copy
        return "" if is_whole and max(entries.values()) == 1 else f"entries {entries} for {counted}"

    def _differs(self, end: Life, seen: dict[int, set[tuple[int, str]]], keys: set[int]) -> str:
        """What is otherwise than in a run that nobody killed."""
        until = min([10**9 if end.renewed is None else end.renewed])
        for key in keys:
            whole = self.expected(key)
            if seen.keys() != whole.keys():
                return f"steps {sorted(seen)} were released, of {sorted(whole)}"
            if any(seen[t] != {(key, whole[t])} for t in whole if t % 1000 < until):
                return "the sums that were released are others than those of the run that nobody killed"
        if end.entries is None:
            return ""
        if self.name == "budget":
            return "" if end.entries == self.whole.entries else f"entries {end.entries}"
        extra = 0 if end.renewed is None else 1  # its key is another, as of a copy that went on
        counts = list(end.entries.values())
        return "" if 1 <= len(counts) <= 1 + extra and max(counts) == 1 else f"entries {end.entries}"


def rows(name: str, every: int, faults: list[str]) -> Iterator[Row]:
    """One job: its calls on files, kills, and what came of them.

    Args:
        every: so many points apart; 0 for a few.
    """
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(name, Path(os.path.realpath(folder)))
        apart = every or killer.whole.points // (1 if name in WRITES_A_FOLDER else 3)
        restarts = RESTARTS if every else 2
        for place, point in enumerate(range(apart // 2, killer.whole.points, apart)):
            killer.kill([point])
            if place % STORMS == 0:
                killer.kill([point] * restarts)
        counted = (
            ("calls on files", killer.whole.calls, "calls"),
            ("points of them", killer.whole.points, "points"),
            ("lives", killer.lives, "lives"),
            ("of them killed", killer.kills, "kills"),
            ("releases of one step under one key, at most", killer.most, "releases"),
            ("went on with fresh noise behind a torn record", killer.renewed, "runs"),
            ("refused", killer.refused, "runs"),
            ("faults", len(killer.faults), "runs"),
        )
        for what, number, unit in counted:
            yield Row(f"{name}: {what}", float(number), None, None, unit)
        faults += killer.faults


def main() -> int:
    """The command; first the one that loads the shim, then the one that is loaded with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, JOBS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th point alone")
    chosen = parser.parse_args()
    if _SHIM not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            shim, source = Path(folder) / "kills.so", Path(__file__).with_suffix(".c")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
            loaded = {**os.environ, _SHIM: "1", "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
            return subprocess.run([sys.executable, "-m", "benchmarks.kills", *sys.argv[1:]], env=loaded).returncode
    del os.environ["LD_PRELOAD"]
    for plan in (_named_plan, _small_plan):
        plan()
    faults: list[str] = []
    every = 0 if chosen.quick else chosen.every
    show((row for name in chosen.only or JOBS for row in rows(name, every, faults)), chosen.json)
    for fault in faults[:20]:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
