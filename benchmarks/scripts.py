"""Public training scripts made private: fetched, changed by a few lines, and run on made-up data, beside Opacus.

python -m benchmarks.scripts                 # all cases of benchmarks/corpus: plain, private, with Opacus
python -m benchmarks.scripts --only mnist    # one of them; may be repeated
python -m benchmarks.scripts --quick         # the private run alone
python -m benchmarks.scripts --check         # exit code 1 where a case does not do what its file says
python -m benchmarks.scripts --write         # keep what was found, and write docs/scripts.md; alone with --page

A case is a module with these names:

    REPOSITORY, COMMIT, SCRIPT    whose script it is; its folder is copied, or the folder COPIED of the repository
    ARGS                          what it is run with
    NEEDS                         packages beyond the test environment, each as pip takes it; they are put into folders
                                  of their own, without what they depend on
    HERE                          edits of every run: what makes the script run on one processor in seconds
    EDITS                         edits that make it private
    OPACUS                        edits that make it private with Opacus, or why there are none
    MODEL                         "untouched", or "changed: how" for edits to the model's own code
    RESULT, WHY                   "runs" or "refused"; why that is right, or wrong
    stand_in(folder)              puts made-up data where the script, run in `folder`, looks for it

An edit is (anchor, lines) or (file, anchor, lines): the one line with the anchor in it becomes these lines, indented as
it was. A line `...` of them stands for the script's own line.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from benchmarks._peers import FOLDER, sources
from benchmarks._report import processor

HERE = Path(__file__).parent
KEPT = HERE / "results" / "scripts.jsonl"
PAGE = HERE.parent / "docs" / "scripts.md"
BEGIN, END = "<!-- table: python -m benchmarks.scripts --write -->", "<!-- end of table -->"
WAYS = ("plain", "ours", "opacus")
LONG = 0.05
"""Seconds of a plain step from which what is added to each step, whatever its size, counts little."""
LIMIT = 300
"""Seconds for a run."""
VERSIONS = ("torch", "opacus")


def names() -> list[str]:
    """Of all cases."""
    return sorted(path.stem for path in (HERE / "corpus").glob("[!_]*.py"))


def case(name: str) -> ModuleType:
    """The module of a case."""
    return import_module(f"benchmarks.corpus.{name}")


def edited(text: str, anchor: str, lines: str) -> str:
    """A script with one line replaced. Raises: ValueError where the anchor is not in exactly one line."""
    before = text.splitlines()
    places = [i for i, line in enumerate(before) if anchor in line]
    if len(places) != 1:
        raise ValueError(f"the anchor {anchor!r} must be in one line of the script, it is in {len(places)}")
    own = before[places[0]]
    indent = own[: len(own) - len(own.lstrip())]
    new = textwrap.dedent(lines).strip("\n").splitlines()
    after = [own if line.strip() == "..." else indent + line if line else "" for line in new]
    return "\n".join([*before[: places[0]], *after, *before[places[0] + 1 :]]) + "\n"


def edits(found: ModuleType, way: str) -> list[tuple[str, ...]]:
    """What is done to the script for a run of this kind."""
    own = {"plain": (), "ours": found.EDITS, "opacus": getattr(found, "OPACUS", ())}[way]
    return [*getattr(found, "HERE", ()), *own]


def package(needed: str) -> Path:
    """A folder with a package that the test environment lacks. Raises: CalledProcessError where it cannot be had."""
    folder = FOLDER / "scripts" / needed
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", made, needed]
            subprocess.run(command, check=True, stdout=sys.stderr)
            shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def run(name: str, way: str) -> dict[str, Any]:
    """One run: what it did, or the last line of its error."""
    found = case(name)
    row: dict[str, Any] = {"script": name, "way": way}
    if way == "opacus" and isinstance(found.OPACUS, str):
        return row | {"error": found.OPACUS}
    try:
        source = sources(found.REPOSITORY, found.COMMIT)
        paths = [str(package(needed)) for needed in getattr(found, "NEEDS", ())]
    except subprocess.CalledProcessError as missing:
        return row | {"error": f"could not be had here: {' '.join(map(str, missing.cmd[-2:]))}"}
    script = Path(found.SCRIPT)
    copied = Path(getattr(found, "COPIED", script.parent))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "repository"
        shutil.copytree(source / copied, root / copied, ignore=shutil.ignore_patterns(".git"))
        folder = root / script.parent
        for *file, anchor, lines in edits(found, way):
            path = root / file[0] if file else root / script
            path.write_text(edited(path.read_text(), anchor, lines))
        if hasattr(found, "stand_in"):
            found.stand_in(folder)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*paths, str(HERE.parent / "src"), str(root)]),
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "agg",
        }
        out = Path(temporary) / "found.json"
        command = [sys.executable, str(HERE / "corpus" / "_inside.py"), way, str(out), script.name, *found.ARGS]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, timeout=LIMIT, check=False, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return row | {"error": f"stopped after {LIMIT} seconds"}
        row |= json.loads(out.read_text()) if out.exists() else {}
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        row["error"] = error_of(done.stdout)
    return row


def error_of(told: str) -> str:
    """The line of an exception, the last one: progress bars may come behind it."""
    lines = [line for line in told.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (named or lines or ["no message"])[-1]


def outcome(row: dict[str, Any]) -> str:
    """Whether a private run made private steps."""
    return "refused" if row.get("error") else "runs" if row.get("private_steps") else "made no private step"


def measured(name: str, ways: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Runs of a case, each with its machine, date and versions."""
    versions = {one: metadata.version(one) for one in (*VERSIONS, *getattr(case(name), "VERSIONS", ()))}
    for way in ways:
        of_run = {"processor": processor(), "date": datetime.now(UTC).date().isoformat(), "versions": versions}
        yield run(name, way) | of_run


def kept() -> list[dict[str, Any]]:
    """What is on file."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def keep(new: list[dict[str, Any]]) -> None:
    """Put new runs into the place of older ones, in the order of names."""
    all_of_them = {(row["script"], row["way"]): row for row in [*kept(), *new]}
    order = sorted(all_of_them, key=lambda key: (key[0], WAYS.index(key[1])))
    KEPT.write_text("".join(json.dumps(all_of_them[key]) + "\n" for key in order))


def page(rows: list[dict[str, Any]]) -> str:
    """The table, a line a case, and how many do what above it."""
    found = {(row["script"], row["way"]): row for row in rows}
    lines, counts = [], {"runs": 0, "refused": 0, "untouched": 0, "opacus": 0, "tried": 0}
    for name in sorted({row["script"] for row in rows}):
        this, (plain, ours, opacus) = case(name), (found.get((name, way), {}) for way in WAYS)
        private = outcome(ours)
        counts[private] = counts.get(private, 0) + 1
        counts["untouched"] += private == "runs" and this.MODEL == "untouched"
        counts["tried"] += "steps" in opacus
        counts["opacus"] += bool(opacus.get("steps")) and "error" not in opacus
        more = sum(
            len([x for x in textwrap.dedent(e[-1]).split("\n") if x.strip() not in ("", "...")]) for e in this.EDITS
        )
        link = f"[{this.SCRIPT}]({this.REPOSITORY}/blob/{this.COMMIT}/{this.SCRIPT})"
        of_opacus = _short(opacus["error"]) if "error" in opacus else "runs" if opacus.get("steps") else "-"
        words = ours.get("isolation", {}).get("loss", "-") if private == "runs" else "-"
        lines.append(
            f"| {'/'.join(this.REPOSITORY.rsplit('/', 2)[1:])}, {link} | {private} | {more} | {this.MODEL} | {words} | "
            f"{_ratio(ours, plain, 'step_seconds')} | {_ratio(ours, plain, 'peak_mib')} | {of_opacus} | "
            f"{_ratio(opacus, plain, 'step_seconds')} | {_ratio(opacus, plain, 'peak_mib')} | {this.WHY} |"
        )
    head = "| script | private | lines | model | loss | time | memory | Opacus | its time | its memory | why |"
    told = (
        f"{len(lines)} scripts: {counts['runs']} run privately, {counts['untouched']} of them with the model "
        f"untouched, and {len(lines) - counts['runs']} do not. Opacus was tried on {counts['tried']} of them, "
        f"and runs on {counts['opacus']}."
    )
    told += _medians([(found.get((name, "ours"), {}), found.get((name, "plain"), {})) for name in names()])
    return "\n".join([told, "", head, "|" + "---|" * head.count(" | ") + "---|", *lines])


def _medians(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Half of the private runs take no more than these multiples of the plain ones."""
    both = [(own, plain) for own, plain in pairs if outcome(own) == "runs" and own["step_seconds"]]
    both = [(own, plain) for own, plain in both if plain.get("step_seconds")]
    times = [(plain["step_seconds"], own["step_seconds"] / plain["step_seconds"]) for own, plain in both]
    long = [ratio for plain, ratio in times if plain >= LONG]
    if not long:
        return ""
    memory = median(own["peak_mib"] / plain["peak_mib"] for own, plain in both)
    return (
        f" The median private step takes {median(ratio for _, ratio in times):.2g} plain ones, {median(long):.2g} "
        f"where a plain one takes {1e3 * LONG:.0f} ms or more, and {memory:.3g} times the memory."
    )


def _ratio(row: dict[str, Any], plain: dict[str, Any], key: str) -> str:
    if row.get("error") or not row.get(key) or not plain.get(key):
        return "-"
    return f"{row[key] / plain[key]:.2g}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + ".."


def write_page() -> None:
    """From what is on file."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(kept())}\n\n{END}{rest.split(END)[1]}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=names(), metavar="NAME", help="this case; may be repeated")
    parser.add_argument("--quick", action="store_true", help="the private run alone")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--write", action="store_true", help="keep what is found, and write the page")
    parser.add_argument("--page", action="store_true", help="write the page of what is on file, and run nothing")
    parser.add_argument("--check", action="store_true", help="fail where a case does not do what its file says")
    asked = parser.parse_args()
    wrong = 0
    for name in () if asked.page else asked.only or names():
        rows = list(measured(name, ("ours",) if asked.quick else WAYS))
        for row in rows:
            told = (
                row.get("error") or f"{row['steps']} steps, {row['step_seconds'] or 0:.4f} s, {row['peak_mib']:.0f} MiB"
            )
            print(json.dumps(row) if asked.json else f"{name:28} {row['way']:7} {told}", flush=True)
        ours = next(row for row in rows if row["way"] == "ours")
        if outcome(ours) != case(name).RESULT:
            wrong += 1
            print(f"{name}: {outcome(ours)}, but its file says {case(name).RESULT!r}", file=sys.stderr)
        if asked.write:
            keep(rows)
    if asked.write or asked.page:
        write_page()
    return int(bool(asked.check and wrong))


if __name__ == "__main__":
    sys.exit(main())
