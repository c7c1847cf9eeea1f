"""The dated comparison with other packages: each row of docs/compared.md is a command of this repository.

`python -m benchmarks.compared` runs all of them at small sizes, `--only PART` one, and writes the page. What they gave
is kept in benchmarks/results/compared.jsonl.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
KEPT = HERE / "results" / "compared.jsonl"
PAGE = HERE.parents[0] / "docs" / "compared.md"
BEGIN, END = "<!-- rows: python -m benchmarks.compared -->", "<!-- end of rows -->"


class Part(NamedTuple):
    """One command: what it asks, of whom; `most` rows of it whose names match are shown."""

    question: str
    peer: str
    command: str
    pattern: str


PARTS = (
    Part("epsilon that is printed for an ordinary loader; ours is valid", "Opacus", "train --only opacus", "prv"),
    Part("noise, time an element", "jax_privacy, opake", "noise --only peers", "beside"),
    Part("noise, time an element", "torch.normal", "noise --only torch", "beside torch"),
    Part("a clipped step, time", "Opacus, opake, plain torch", "clipping --only mlp", ""),
    Part("error and time of a fitted mechanism", "jax_privacy", "factorize --only race", ""),
    Part("a round of a federation, time", "Flower, pfl", "federated --only speed", ""),
    Part("wrappers of Flower: what the claim becomes", "Flower", "federated --only flower_wrappers", ""),
)


def measured(part: Part, today: str) -> Iterator[dict[str, object]]:
    """What the command gives now. Raises: CalledProcessError."""
    command = [sys.executable, "-m", f"benchmarks.{part.command.split()[0]}", *part.command.split()[1:]]
    lines = subprocess.run([*command, "--quick", "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return kept_lines(part, lines, today)


def kept_lines(part: Part, lines: str, today: str) -> Iterator[dict[str, object]]:
    """Those of a command's lines that have a peer's number beside ours, and are asked for."""
    for line in lines.splitlines():
        found = json.loads(line)
        if None not in (found["ours"], found["peer"]) and re.search(part.pattern, found["name"]):
            yield {"command": part.command, "date": today, **found}


def page(found: list[dict[str, object]]) -> str:
    """The tables, one a command."""
    tables = []
    for part in PARTS:
        own = [one for one in found if one["command"] == part.command]
        if not own:
            continue
        title = f"### {part.question[0].upper()}{part.question[1:]}, compared with {part.peer}"
        names = [_plain(str(one["name"])) for one in own]
        common = _common(names)
        units = {str(one["unit"]) for one in own}
        unit = units.pop() if len(units) == 1 else ""
        sizes = f" {common.rstrip(' ,:;')}." if common else ""
        lines = [
            title,
            "",
            f"`python -m benchmarks.{part.command} --quick`, {own[0]['date']}.{sizes}",
            "",
            f"| {unit} | anyorder | peer |" + ("" if unit else " unit |"),
            "|---|---|---|" + ("" if unit else "---|"),
        ]
        for name, one in zip(names, own, strict=True):
            last = "" if unit else f" {one['unit']} |"
            lines.append(f"| {name[len(common) :]} | {one['ours']:.4g} | {one['peer']:.4g} |{last}")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _plain(name: str) -> str:
    """Without the project's own targets, which are no fact about others."""
    return re.sub(r" ?\(target [^)]*\)", "", name).replace(", beside ", ", compared with ").replace("|", "\\|")


def _common(names: list[str]) -> str:
    """The words that all names begin with, and that stand once above a table of them."""
    first = names[0]
    ends = [
        found.end()
        for found in re.finditer(r"[,:;] ", first)
        if all(name[: found.end()] == first[: found.end()] for name in names)
    ]
    return first[: max(ends, default=0)] if len(names) > 1 else ""


def kept() -> list[dict[str, object]]:
    """All rows on file."""
    return [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []


def write(found: list[dict[str, object]]) -> None:
    """To the file and the page."""
    KEPT.write_text("".join(json.dumps(one) + "\n" for one in found))
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{page(found)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[part.command for part in PARTS], action="append")
    parser.add_argument("--page", action="store_true", help="write the page of what is on file, and run nothing")
    asked = parser.parse_args()
    if asked.page:
        write(kept())
        return
    today = datetime.now(UTC).date().isoformat()
    for part in PARTS:
        if asked.only is None or part.command in asked.only:
            print(part.command, file=sys.stderr)
            new = list(measured(part, today))
            others = [one for one in kept() if one["command"] != part.command]
            write([*others, *new])


if __name__ == "__main__":
    main()
