"""Faults planted one at a time, and whether the tests of their module see them.

python -m benchmarks.faults                    # all
python -m benchmarks.faults --quick            # each sixth
python -m benchmarks.faults --only ledger      # those with the word in their name
python -m benchmarks.faults --check            # only whether each snippet is found once

faults.toml has the list: a name, a snippet of the source that is found exactly once, what stands in its place, and the
tests that must fail. The file is found by the snippet, so that nothing changes here where a file moves. A fault is
planted in a copy of the tree; tests that fail there without a fault are left out. One that runs past its time is
killed too, for a test that does not end is seen.

Each run is a fork of one process that has imported torch and nothing of the package.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import add_options

ROOT = Path(__file__).parents[1]
AT_ONCE = 2
LIMIT = 240.0  # seconds of one fault, beside three times what its tests take without one
COPIED = ("src", "tests", "docs", "benchmarks", "examples", "conftest.py", "pyproject.toml", "README.md", "mkdocs.yml")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """What is changed, and who should notice."""

    name: str
    find: str
    put: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a run of some tests ended."""

    failed: tuple[str, ...]
    seconds: float
    timed_out: bool
    code: int
    end: str = ""


def faults() -> list[Fault]:
    """All of the list."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["fault"]
    found = [Fault(row["name"], row["find"], row["put"], tuple(row["tests"].split())) for row in rows]
    twice = [name for name, count in Counter(fault.name for fault in found).items() if count > 1]
    assert not twice, f"two faults of one name: {twice}"
    return found


def place(fault: Fault, texts: dict[Path, str]) -> Path | str:
    """The file that has the snippet, or what is wrong with it."""
    counts = {path: text.count(fault.find) for path, text in texts.items() if fault.find in text}
    missing = [name for name in fault.tests if not (ROOT / name).exists()]
    if missing:
        return f"no such tests: {', '.join(missing)}"
    if sum(counts.values()) != 1:
        return f"its snippet is there {sum(counts.values())} times"
    return next(iter(counts))


class Slot:
    """A copy of the tree in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns(".git", "results"))
            elif source.exists():
                shutil.copy2(source, folder / name)

    def start(self, tests: tuple[str, ...], options: list[str], fault: Fault | None, where: Path | None) -> "Run":
        """Plant and begin."""
        if fault is not None and where is not None:
            own = self.root / where.relative_to(ROOT)
            text = own.read_text()
            own.write_text(text.replace(fault.find, fault.put))
            for stale in own.parent.glob(f"__pycache__/{own.stem}.*.pyc"):
                stale.unlink()
        return Run(self, tests, options, where)

    def clean(self, where: Path | None) -> None:
        """Take the fault out again."""
        if where is not None:
            shutil.copy2(where, self.root / where.relative_to(ROOT))


class Run:
    """Tests that run in a process of their own."""

    def __init__(self, slot: Slot, tests: tuple[str, ...], options: list[str], where: Path | None) -> None:
        self._slot, self._where = slot, where
        self._log = slot.root / "log"
        self._began = time.monotonic()
        sys.stdout.flush()
        self._child = os.fork()
        if self._child == 0:
            code = 99
            try:
                code = _tests_in(slot.root, self._log, [*tests, *options])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def ended(self, limit: float) -> Outcome | None:
        """How it ended; None while it runs."""
        child, status = os.waitpid(self._child, os.WNOHANG)
        seconds = time.monotonic() - self._began
        if child == 0:
            if seconds <= limit:
                return None
            os.killpg(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
        self._slot.clean(self._where)
        code = os.waitstatus_to_exitcode(status) if child else -signal.SIGKILL
        text = self._log.read_text(errors="replace")
        return Outcome(tuple(dict.fromkeys(_FAILED.findall(text))), seconds, not child, code, text[-2000:])


def _tests_in(root: Path, log: Path, arguments: list[str]) -> int:
    """In the forked process: pytest on the copy."""
    os.setsid()
    os.nice(5)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
    here = str(ROOT)
    sys.path[:] = [str(root / "src"), *(path for path in sys.path if path and not path.startswith(here))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("benchmarks", "anyorder")]:
        del sys.modules[name]
    import pytest

    return int(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE"]))


def _told(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    killed = outcome.timed_out or outcome.code == 1 or (outcome.code != 0 and bool(outcome.failed))
    result = "killed" if killed else "survived" if outcome.code == 0 else "tests do not run"
    by = "time" if outcome.timed_out else next(iter(outcome.failed), "")
    return {"name": fault.name, "result": result, "by": by, "seconds": round(outcome.seconds, 1)}


def run(chosen: list[Fault], places: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Plant each, two at a time; first the tests of each without a fault, once for those that share them."""
    with tempfile.TemporaryDirectory() as folder:
        free = [Slot(Path(folder) / str(i)) for i in range(AT_ONCE)]
        plain: dict[tuple[str, ...], Outcome] = {}
        waiting: list[tuple[tuple[str, ...], Fault | None]] = []
        for tests in dict.fromkeys(fault.tests for fault in chosen):
            waiting += [(tests, None), *((tests, fault) for fault in chosen if fault.tests == tests)]
        running: list[tuple[Slot, Run, tuple[str, ...], Fault | None]] = []
        while waiting or running:
            ready = next((one for one in waiting if one[1] is None or one[0] in plain), None)
            if free and ready is not None:
                waiting.remove(ready)
                tests, fault = ready
                slot = free.pop()
                leave = [f"--deselect={name}" for name in plain[tests].failed] if fault is not None else []
                where = None if fault is None else places[fault.name]
                options = ["-x", *leave] if fault is not None else []
                running.append((slot, slot.start(tests, options, fault, where), tests, fault))
                continue
            time.sleep(0.1)
            for entry in list(running):
                slot, process, tests, fault = entry
                limit = 1200.0 if fault is None else LIMIT + 3 * plain[tests].seconds
                outcome = process.ended(limit)
                if outcome is None:
                    continue
                running.remove(entry)
                free.append(slot)
                if fault is None:
                    plain[tests] = outcome
                    if outcome.failed or outcome.code not in (0, 1):
                        told = outcome.failed or (outcome.end,)
                        print(f"without a fault, code {outcome.code}:", *told, sep="\n  ", file=sys.stderr)
                else:
                    yield _told(fault, outcome)


def main() -> int:
    """1 where one survived, 2 where a snippet is not found once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--only", action="append", default=[], help="faults with this word in their name")
    parser.add_argument("--check", action="store_true", help="only look whether each snippet is found once")
    given = parser.parse_args()
    chosen = [fault for fault in faults() if not given.only or any(word in fault.name for word in given.only)]
    chosen = chosen[::6] if given.quick else chosen
    texts = {path: path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))}
    found = {fault.name: place(fault, texts) for fault in chosen}
    lost = {name: what for name, what in found.items() if isinstance(what, str)}
    for name, what in lost.items():
        _show({"name": name, "result": what, "by": "", "seconds": 0.0}, given.json)
    if given.check:
        return 2 if lost else 0
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    places = {name: where for name, where in found.items() if isinstance(where, Path)}
    counts: Counter[str] = Counter()
    for told in run([fault for fault in chosen if fault.name in places], places):
        counts[told["result"]] += 1
        _show(told, given.json)
    if not given.json:
        print(", ".join(f"{count} {what}" for what, count in counts.items()), f"; {len(lost)} not planted")
    return 2 if lost else int(counts["survived"] + counts["tests do not run"] > 0)


def _show(told: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(told), flush=True)
    else:
        print(f"{told['result']:<10} {told['seconds']:6.1f} s  {told['name']:<60} {told['by']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
