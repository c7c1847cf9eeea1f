"""Numbers in README, docs/index.md and the guides, and where each comes from.

    python -m benchmarks.numbers            list measured numbers without a source, and stale ones; exit code 1 if any
    python -m benchmarks.numbers --refresh  take the digests of the results files as they are now

benchmarks/numbers.toml has a table for each line with such a number: file, a fragment of the line, the numbers in it,
and one source:

    page = "docs/accuracy.md", row = "tree, .."  each number is one of that row, rounded; a command makes the page
    results = "benchmarks/results/x.jsonl"    the file that has it; its digest is kept, and must be today's
    command = "python -m ..."                 a command that CI runs prints it
    given = "why"                             no measurement: a setting, or what others published
    unkept = "why"                            measured, and in no file: these may only become fewer

A measured number is a decimal fraction, or a number before "times", "%" or a unit of time, in prose or a table: what is
between backquotes or in a block of code is run by doctests, and links are no text.
"""

import argparse
import hashlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "numbers.toml"
FILES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/choosing.md", "docs/checkpoints.md")
MOST_UNKEPT = 7
_NUMBER = re.compile(r"(?<![\w.-])(\d+\.\d+(?!\.?\d)|\d+(?= (?:times|%|ms|ns|seconds?|minutes?|hours?)\b| %))")
_NO_TEXT = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|(?:Python|version) [\d.]+")


def found(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each line with measured numbers, and these."""
    in_code = False
    for line in text.splitlines():
        if line.startswith(("```", "<!-- invisible-code-block", "-->")):
            in_code = not in_code
        elif not in_code and not line.startswith("<!--"):
            numbers = _NUMBER.findall(_NO_TEXT.sub(" ", line))
            if numbers:
                yield line, numbers


def entries() -> list[dict[str, Any]]:
    """The tables on file."""
    return list(tomllib.loads(TABLE.read_text(encoding="utf-8")).get("line", []))


def faults(texts: dict[str, str], known: list[dict[str, Any]]) -> list[str]:
    """What has no source, what has another number than its table, and what is stale.

    Args:
        texts: by file name.
    """
    told, used = [], set()
    for file, text in texts.items():
        for line, numbers in found(text):
            rows = [i for i, one in enumerate(known) if one["file"] == file and one["fragment"] in line]
            used |= set(rows)
            if len(rows) != 1:
                told.append(f"{file}: {len(rows)} sources for {', '.join(numbers)} in: {line.strip()[:100]}")
            elif known[rows[0]]["numbers"] != numbers:
                wanted = known[rows[0]]["numbers"]
                told.append(f"{file}: {numbers}, and its source is of {wanted}: {line.strip()[:100]}")
            else:
                told.extend(stale(known[rows[0]]))
    told += [f"no such line in {one['file']}: {one['fragment']}" for i, one in enumerate(known) if i not in used]
    unkept = sum("unkept" in one for one in known)
    return told + ([f"{unkept} lines are kept nowhere, and {MOST_UNKEPT} may be"] if unkept > MOST_UNKEPT else [])


def stale(one: dict[str, Any]) -> Iterator[str]:
    """That a source has other numbers now."""
    place = f"{one['file']}, {one['fragment']!r}"
    kinds = [kind for kind in ("page", "results", "command", "given", "unkept") if kind in one]
    if len(kinds) != 1:
        yield f"{place}: needs one source, has {kinds}"
    if "page" in one:
        rows = [line for line in (ROOT / one["page"]).read_text().splitlines() if line.startswith(f"| {one['row']} |")]
        have = [] if len(rows) != 1 else [float(x) for x in re.findall(r"\d+\.\d+", rows[0])]
        for number in one["numbers"]:
            digits = len(number.partition(".")[2])
            if not any(abs(x - float(number)) <= 0.5 * 10**-digits + 1e-9 for x in have):
                yield f"{place}: {number} is not in the row {one['row']!r} of {one['page']}"
    if "results" in one and one.get("digest") != digest(one["results"]):
        yield f"{place}: {one['results']} is another file than the one that the numbers were read from"


def digest(file: str) -> str:
    """The first digits of its SHA-256."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]


def refresh() -> None:
    """Put today's digests into the table: to be done by whoever has compared the numbers."""
    text = TABLE.read_text(encoding="utf-8")
    for one in entries():
        if "results" in one:
            text = text.replace(f'digest = "{one["digest"]}"', f'digest = "{digest(one["results"])}"')
    TABLE.write_text(text, encoding="utf-8")


def main() -> None:
    """Say what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numbers", description=__doc__.splitlines()[0])
    parser.add_argument("--refresh", action="store_true", help="take the digests of the results files as they are now")
    if parser.parse_args().refresh:
        refresh()
    told = faults({file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}, entries())
    print("\n".join(told) or "each number has its source")
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
