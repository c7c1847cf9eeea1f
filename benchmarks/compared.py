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
    Part("a clipped step, processor time", "Opacus, opake, plain torch", "clipping --only mlp", ""),
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
        lines = [title, "", f"`python -m benchmarks.{part.command} --quick`, {own[0]['date']}.", ""]
        tables.append("\n".join([*lines, *(_by_peer(own) or _by_row(own))]))
    return "\n\n".join(tables)


PEERS = {"plain": "no privacy", "hooks": "Opacus, hooks", "ghost": "Opacus, ghost clipping", "vmap": "torch.func.vmap"}
_PEER = re.compile(r"(.+?)(?:, beside (.+)|; peer: (\w+)(: memory)?)$")


def _by_peer(own: list[dict[str, object]]) -> list[str]:
    """A column for each peer, where every name says what was measured and beside whom; a row, where these are more."""
    cells: dict[tuple[str, str], float] = {}
    for one in own:
        found = _PEER.match(_without_target(str(one["name"])))
        if found is None:
            return []
        what = f"{found[1]}, memory" if found[4] else found[1]
        what = f"{what}, {one['unit']}"
        for who, value in (("anyorder", one["ours"]), (found[2] or found[3], one["peer"])):
            cells[what, who] = float(str(value))
    whats, who = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    common = _common(whats)
    rows, columns = (whats, who) if len(whats) >= len(who) - 1 else (who, whats)

    def cell(row: str, column: str) -> str:
        value = cells.get((row, column) if rows is whats else (column, row))
        return "" if value is None else f"{value:.4g}"

    def told(name: str) -> str:
        return PEERS.get(name, name.removeprefix(common))

    lines = [f"| | {' | '.join(map(told, columns))} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {told(row)} | {' | '.join(cell(row, column) for column in columns)} |" for row in rows]
    return [f"{common.rstrip(' ,')}:", "", *lines] if common else lines


def _common(names: list[str]) -> str:
    """The words that all names begin with, and that stand once above a table of them."""
    ends = [found.end() for found in re.finditer(", ", names[0])]
    same = [end for end in ends if all(name[:end] == names[0][:end] for name in names)]
    return names[0][: max(same, default=0)] if len(names) > 1 else ""


def _by_row(own: list[dict[str, object]]) -> list[str]:
    """A row for each line, with ours and the peer's."""
    units = {str(one["unit"]) for one in own}
    unit = units.pop() if len(units) == 1 else ""
    lines = [f"| {unit} | anyorder | peer |" + ("" if unit else " unit |"), "|---|---|---|" + ("" if unit else "---|")]
    for one in own:
        last = "" if unit else f" {one['unit']} |"
        lines.append(f"| {_plain(str(one['name']))} | {one['ours']:.4g} | {one['peer']:.4g} |{last}")
    return lines


def _without_target(name: str) -> str:
    """Without the project's own targets, which are no fact about others."""
    return re.sub(r" ?\(target [^)]*\)", "", name)


def _plain(name: str) -> str:
    return _without_target(name).replace(", beside ", ", compared with ").replace("|", "\\|")


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
