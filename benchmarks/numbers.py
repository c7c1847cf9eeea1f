"""Numbers in README, docs/index.md and the guides, and where each comes from.

    python -m benchmarks.numbers                  numbers without a source, and stale ones; exit code 1 if any
    python -m benchmarks.numbers --list           pages, and how many numbers of each have which source
    python -m benchmarks.numbers --keep "COMMAND" run the command and keep what it prints, with processor and date
    python -m benchmarks.numbers --refresh        take the digests of the results files as they are now
    python -m benchmarks.numbers --prune          drop the entries whose numbers are no longer on their page

A measured number is a decimal fraction, or a number before "times", "%" or a unit of time, in prose, a table or a
block of text. Python and console blocks are run by the tests; a number that such a block of
the same page has, up to rounding, has its source there. Every other number needs an entry in benchmarks/numbers.toml.
An entry is found by its page, its numbers and, with `near`, a few words of the same paragraph or table, so that
sentences may move. It has one source:

    command = "python -m .."                 benchmarks/results/printed.jsonl holds what it printed, with these numbers
    results = "benchmarks/results/x.jsonl"   a file that [results] names, with command, processor, date and digest
    written = "docs/accuracy.md"             a page or part of one that a command writes from a results file
    given = "why"                            no measurement: a setting, arithmetic, or what others published
    once = "python -m .., .."                measured once by this command, which takes long or fetches other packages,
                                             and in no file: these may only become fewer

`at` limits the source to lines with these words. `derived = true`: computed from the results file, not looked up in it;
a test holds the page to the file.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._report import processor

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "numbers.toml"
RESULTS = ROOT / "benchmarks" / "results"
PRINTED = RESULTS / "printed.jsonl"
MOST_ONCE = 43
WRITTEN = {"accuracy", "compared", "experiments", "joint", "references", "scripts"}
"""Pages of docs that commands write from results files, and reports of one experiment each: no guides."""
GROWING = ("printed.jsonl", "again.jsonl", "scripts.jsonl")
"""Files whose lines have their own machine and date."""
KINDS = ("command", "results", "written", "given", "once")
_NUMBER = re.compile(r"(?<![\w.-])(\d+\.\d+(?!\.?\d)|\d+(?= (?:times|%|ms|ns|seconds?|minutes?|hours?)\b| ?%))")
_NO_TEXT = re.compile(
    r"`[^`]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->|arXiv [\d.]+|"
    r"(?:Python|version|Flower|NVFlare|Opacus|glibc|GCC|Theorem|Definition|Lemma|Proposition|Section|section) [\d.]+"
)
_VALUE = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Found:
    """A number of a page, and the paragraph or table that it stands in."""

    page: str
    number: str
    around: str


def guides() -> list[str]:
    """README and every page of docs for users, but for reports of experiments and the reference of functions."""
    pages = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in WRITTEN]
    pages += [*sorted((ROOT / "docs" / "tutorials").glob("*.md")), *sorted((ROOT / "docs" / "extend").glob("*.md"))]
    return ["README.md", *(path.relative_to(ROOT).as_posix() for path in pages)]


def _split(text: str) -> tuple[list[list[str]], str]:
    """Paragraphs and tables of what is not run, and all that is run, of a page: what a block prints counts as run."""
    parts: list[list[str]] = [[]]
    run: list[str] = []
    language: str | None = None
    runs = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            language = line.strip("` ") or "block" if language is None else None
            runs = runs if language in (None, "text") else language.startswith(("python", "console"))
        elif line.startswith(("<!-- invisible-code-block: python", "-->")):
            language, runs = (None, False) if line == "-->" else ("python", True)
        elif language and runs:
            run.append(line)
        elif line.strip():
            parts[-1].append(line)
            runs = runs and line.startswith("<!--")
        else:
            parts.append([])
    return parts, "\n".join(run)


def found(page: str, text: str) -> Iterator[Found]:
    """The measured numbers of a page that no block of it prints."""
    parts, run = _split(text)
    printed = _values(run)
    for lines in parts:
        words = _NO_TEXT.sub(" ", "\n".join(lines))
        for number in _NUMBER.findall(words):
            if not ("." in number and _among(number, printed)):
                yield Found(page, number, "\n".join(lines))


def _values(text: str) -> list[float]:
    return [float(value) for value in _VALUE.findall(text)]


def _among(number: str, values: list[float]) -> bool:
    """Whether one of the values, or a share for a percentage, is the number up to rounding."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-9) + 1e-12
    wanted = float(number)
    return any(abs(value - wanted) <= half or abs(value * 100 - wanted) <= half for value in values)


@cache
def table(path: Path) -> dict[str, Any]:
    """What is on file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def entries() -> list[dict[str, Any]]:
    """One a source."""
    return list(table(TABLE)["line"])


def printed() -> dict[str, dict[str, Any]]:
    """What commands printed, by command."""
    lines = PRINTED.read_text(encoding="utf-8").splitlines() if PRINTED.exists() else []
    return {row["command"]: row for row in map(json.loads, lines)}


def fits(one: Found, entry: dict[str, Any]) -> bool:
    """Whether the entry is of this number."""
    words = entry.get("near", "").lower()
    return one.page == entry["page"] and one.number in entry["numbers"] and words in one.around.lower()


def faults(texts: dict[str, str], known: list[dict[str, Any]]) -> list[str]:
    """What has no source, what is no longer on its page, and what is stale.

    Args:
        texts: by page.
    """
    told = []
    seen: set[tuple[int, str]] = set()
    for page, text in texts.items():
        for one in found(page, text):
            its = [i for i, entry in enumerate(known) if fits(one, entry)]
            seen |= {(i, one.number) for i in its}
            if not its:
                first = next(line for line in one.around.splitlines() if one.number in line).strip()
                told.append(f"{page}: no source for {one.number} in: {first[:100]}")
    for i, entry in enumerate(known):
        gone = [number for number in entry["numbers"] if (i, number) not in seen]
        if entry["page"] in texts and gone:
            told.append(f"{entry['page']}: no longer has {', '.join(gone)} {entry.get('near', '')}: --prune drops them")
        told.extend(stale(entry))
    once = sum("once" in entry for entry in known)
    return told + ([f"{once} entries are in no file, and {MOST_ONCE} may be"] if once > MOST_ONCE else [])


def stale(entry: dict[str, Any]) -> Iterator[str]:
    """That a source is missing, or has other numbers now."""
    place = f"{entry['page']}, {entry['numbers'][0]} {entry.get('near', '')}".strip()
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        yield f"{place}: needs one source, has {kinds}"
        return
    (kind,) = kinds
    if kind in ("given", "once"):
        return
    source = entry[kind]
    if kind == "command":
        text = printed().get(source, {}).get("output")
        if text is None:
            yield f'{place}: nothing is kept of {source}: python -m benchmarks.numbers --keep "{source}"'
            return
    else:
        text = (ROOT / source).read_text(encoding="utf-8")
    if entry.get("derived"):
        return
    lines = [line for line in text.splitlines() if entry.get("at", "") in line]
    values = _values("\n".join(lines))
    gone = [number for number in entry["numbers"] if not _among(number, values)]
    if gone:
        yield f"{place}: {', '.join(gone)} not in {source} {entry.get('at', '')}"


def unsound() -> list[str]:
    """Results files without command, processor or date, and those that are others than the numbers were read from."""
    known = table(TABLE)["results"]
    told = [f"{path.name}: no entry in [results]" for path in sorted(RESULTS.iterdir()) if path.name not in known]
    for name, row in known.items():
        told += [f"{name}: no {word} in [results]" for word in ("command", "processors", "dates") if not row.get(word)]
        if name not in GROWING and row.get("digest") != digest((RESULTS / name).read_bytes()):
            told.append(f"{name}: is another file than [results] says: compare the numbers, then --refresh")
    for command, row in printed().items():
        if row["digest"] != digest(row["output"].encode()):
            told.append(f"printed.jsonl: the output of {command} is not what it printed")
        told += [f"printed.jsonl: {command} has no {word}" for word in ("processor", "date") if not row[word]]
    return told


def digest(content: bytes) -> str:
    """The first digits of its SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def output(command: str) -> str:
    """What it prints, on one thread."""
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def keep(command: str) -> dict[str, Any]:
    """Run it and put what it printed in the place of what it printed before."""
    start = time.perf_counter()
    text = output(command)
    row = {
        "command": command, "date": date.today().isoformat(), "processor": processor(), "cores": os.cpu_count(),
        "seconds": round(time.perf_counter() - start, 1), "digest": digest(text.encode()), "output": text,
    }  # fmt: skip
    rows = printed() | {command: row}
    PRINTED.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)), encoding="utf-8")
    return row


def refresh() -> None:
    """Put today's digests into the table: to be done by whoever has compared the numbers."""
    text = TABLE.read_text(encoding="utf-8")
    for name, row in table(TABLE)["results"].items():
        if name not in GROWING:
            text = text.replace(f'digest = "{row["digest"]}"', f'digest = "{digest((RESULTS / name).read_bytes())}"')
    TABLE.write_text(text, encoding="utf-8")


def prune(texts: dict[str, str], known: list[dict[str, Any]]) -> None:
    """Drop what is no longer on a page from the table; comments and the order of the rest stay."""
    present = [one for page, text in texts.items() for one in found(page, text)]
    head, *blocks = re.split(r"(?m)^(?=\[\[line\]\])", TABLE.read_text(encoding="utf-8"))
    kept = []
    for block, entry in zip(blocks, known, strict=True):
        left = [
            number for number in entry["numbers"] if any(fits(one, entry) and one.number == number for one in present)
        ]
        if left:
            kept.append(re.sub(r"(?m)^numbers = .*$", f"numbers = {json.dumps(left)}", block))
    TABLE.write_text(head + "".join(kept), encoding="utf-8")


def texts() -> dict[str, str]:
    """Of all guides, by page: without what a command writes (benchmarks/cli_page.py), which a test compares."""
    written = re.compile(r"<!-- \w[^>]*written by `.*?<!-- end of what is written by a command -->", re.DOTALL)
    return {page: written.sub("", (ROOT / page).read_text(encoding="utf-8")) for page in guides()}


def main() -> None:
    """Say what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.numbers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", metavar="COMMAND", help="run it and keep what it prints")
    for flag in ("--refresh", "--prune", "--list"):
        parser.add_argument(flag, action="store_true")
    asked = parser.parse_args()
    if asked.keep:
        print(keep(asked.keep)["output"])
        return
    if asked.refresh:
        refresh()
    if asked.prune:
        prune(texts(), entries())
    if asked.refresh or asked.prune:
        table.cache_clear()
    if asked.list:
        for page, text in texts().items():
            kinds = Counter(
                next((kind for entry in entries() if fits(one, entry) for kind in KINDS if kind in entry), "none")
                for one in found(page, text)
            )
            print(f"{page}: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items())) or 'no numbers'}")
    told = faults(texts(), entries()) + unsound()
    print("\n".join(told) or "each number has its source")
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
