"""A random tenth of the recorded numbers that are cheap enough, made again: what moved, and on which processors.

    python -m benchmarks.again [--quick] [--json] [--seconds 60] [--seed 0] [--share 0.1] [--list] [--keep]

Records are the lines of reproductions/results, by figure, but for those that rest on stored runs or on training, and
the lines of benchmarks/results whose command remakes one line alone: `REMADE`. The other files are listed with the
command that makes the whole of them. A record is cheap if it took no more than --seconds when kept; --quick takes those
of 5 seconds. A number has moved if it differs by more than 1e-9 of its size, one of a clock by more than three times.
--keep adds what came out to benchmarks/results/again.jsonl: on which processors each record was seen, and how it was.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reproductions.__main__ import PAPERS
from reproductions._claims import Kept, Run, found, results

from anyorder.accounting.amplification.bins import bins_epsilon
from benchmarks import bins, numbers
from benchmarks._report import processor
from benchmarks.onlines import regret

_NEAR = 1e-9
_CLOCKS = 3.0  # how many times longer or shorter a time may be
_TIMES = ("s", "ms", "ns/element", "ns", "share", "k examples/s", "MB")
SIGHTINGS = numbers.RESULTS / "again.jsonl"


class Record(NamedTuple):
    """A line of benchmarks/results that one call makes again."""

    file: str
    name: str
    kept: Any
    make: Callable[[], Any]
    seconds: float
    processor: str


def _outputs(path: Path) -> Iterator[Record]:
    for row in _lines(path):
        yield Record(
            path.name, row["command"], _told(row["output"]),
            lambda command=row["command"]: _told(numbers.output(command)), row["seconds"], row["processor"],
        )  # fmt: skip


def _told(output: str) -> list[Any]:
    """Rows of JSON, a time as `Clock`; else every number of the text."""
    found: list[Any] = []
    for line in output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            timed = row.get("unit") in _TIMES
            found.append({name: Clock(x) if timed and isinstance(x, float) else x for name, x in row.items()})
        else:
            found.append([float(x) for x in numbers._VALUE.findall(line)])
    return found


class Clock(float):
    """A number that a clock gave."""


def _regrets(path: Path) -> Iterator[Record]:
    for row in _lines(path):
        one = regret.Setting(**{name: row[name] for name in regret.Setting._fields})
        yield Record(path.name, str(tuple(one)), row, lambda one=one: regret.measured(one), one.n * one.d / 4e3, "")


def _bounds(path: Path) -> Iterator[Record]:
    for row in _lines(path):

        def make(case: int = row["case"]) -> float:
            setting, gram = bins._setting(case)
            return float(bins_epsilon(gram, setting["sigma"], bins.DELTA))

        yield Record(path.name, f"case {row['case']}", row["bound"], make, row["s"], "")


REMADE: dict[str, Callable[[Path], Iterator[Record]]] = {
    "printed.jsonl": _outputs,
    "regret.jsonl": _regrets,
    "bins_bounds.jsonl": _bounds,
}
"""Files whose lines are made again one by one."""


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def records(seconds: float) -> list[Record]:
    """Lines of benchmarks/results that can be made again in so many seconds each."""
    return [
        record for name, each in REMADE.items() for record in each(numbers.RESULTS / name) if record.seconds <= seconds
    ]


def whole() -> list[str]:
    """The other files, and what makes them."""
    known = numbers.table(numbers.TABLE)["results"]
    return [f"{name}: as a whole, by {row['command']}" for name, row in known.items() if name not in REMADE]


def cheap(seconds: float) -> dict[tuple[str, str], list[Kept]]:
    """What is kept of each figure that can be made again in so many seconds, by paper and figure."""
    rows: dict[tuple[str, str], list[Kept]] = defaultdict(list)
    for paper in PAPERS:
        for row in results(paper):
            rows[paper, row.figure].append(row)
    trains = {(paper, figure.name) for paper, module in PAPERS.items() for figure in module.FIGURES if figure.trains}
    return {
        place: kept
        for place, kept in rows.items()
        if place not in trains
        and sum(row.seconds for row in kept) <= seconds
        and not any(row.claim.stored or row.claim.measured for row in kept)
    }


def chosen(places: list[Any], share: float, seed: int) -> list[Any]:
    """A random share of them, one at least, in their order."""
    count = max(1, round(share * len(places)))
    picked = random.Random(seed).sample(range(len(places)), min(count, len(places)))
    return [places[i] for i in sorted(picked)]


def moved(before: Any, now: Any) -> str | None:
    """Where two records differ first, or None."""
    if isinstance(before, Clock) or isinstance(now, Clock):
        low, high = sorted((abs(before), abs(now)))
        return None if high <= _CLOCKS * low + 1e-3 else f"{before:.3g} -> {now:.3g}"
    if isinstance(before, int | float) and isinstance(now, int | float):
        near = math.isclose(before, now, rel_tol=_NEAR, abs_tol=1e-12) or before == now
        return None if near else f"{before} -> {now}"
    if isinstance(before, dict) and isinstance(now, dict):
        if before.keys() != now.keys():
            return f"{sorted(before)} -> {sorted(now)}"
        parts = [(str(name), moved(before[name], now[name])) for name in before]
    elif isinstance(before, list | tuple) and isinstance(now, list | tuple):
        if len(before) != len(now):
            return f"{len(before)} numbers -> {len(now)}"
        parts = [(f"[{i}]", moved(a, b)) for i, (a, b) in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else f"{before!r} -> {now!r}"
    told = next(((name, text) for name, text in parts if text is not None), None)
    if told is None:
        return None
    return f"{told[0]}{'' if told[1].startswith('[') else ': '}{told[1]}"


def machine() -> dict[str, str]:
    """The processor, and the kernels that numbers went through."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    kernel = os.environ.get("OPENBLAS_CORETYPE")
    name = processor() + (f", kernel {kernel}" if kernel else "")
    return {"processor": name, "blas": f"{blas['name']} {blas['version']}", "numpy": np.__version__}


def again(place: tuple[str, str], kept: list[Kept]) -> list[dict[str, Any]]:
    """Each claim of a figure with what moved."""
    paper, name = place
    figure = next(one for one in PAPERS[paper].FIGURES if one.name == name)
    seeds = max((row.claim.seeds for row in kept), key=len) or Run().seeds
    now = {(row.claim.place, row.claim.statement): row for row in found(paper, figure, Run(seeds=seeds))}
    told = []
    for row in kept:
        made = now.get((row.claim.place, row.claim.statement))
        if made is None:
            text = "is no longer made"
        else:
            value = json.loads(json.dumps(made.claim.value))  # as it is kept
            text = moved(row.claim.value, value) or moved(row.claim.verdict, made.claim.verdict) or ""
        told.append({
            "file": f"{paper}.jsonl", "figure": name, "claim": row.claim.statement,
            "kept": row.versions.get("processor", ""), "moved": text,
        })  # fmt: skip
    return told


def remade(record: Record) -> dict[str, Any]:
    """A line of benchmarks/results with what moved."""
    text = moved(record.kept, record.make()) or ""
    return {"file": record.file, "claim": record.name, "kept": record.processor, "moved": text}


def seen() -> dict[tuple[str, str], set[str]]:
    """On which processors each record came out the same, by file and name."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in _lines(SIGHTINGS):
        if not row["moved"]:
            found[row["file"], row["claim"]].add(row["processor"])
    return found


def main() -> None:
    """Run a tenth, and say what moved."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.again", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="records of 5 seconds and less")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a record may have taken")
    parser.add_argument("--seed", type=int, help="of the choice; by itself the day")
    parser.add_argument("--share", type=float, default=0.1, help="of the records that are cheap enough")
    parser.add_argument("--list", action="store_true", help="print what is cheap enough, and run nothing")
    parser.add_argument("--keep", action="store_true", help="add what came out to benchmarks/results/again.jsonl")
    asked = parser.parse_args()
    seconds = 5.0 if asked.quick else asked.seconds
    places, lines = cheap(seconds), records(seconds)
    if asked.list:
        print("\n".join([*listed(places, lines), *whole()]))
        return
    seed = int(time.time() // 86400) if asked.seed is None else asked.seed
    here = machine()
    print(json.dumps({**here, "seed": seed, "cheap": len(places) + len(lines)}), flush=True)
    before, count, total = seen(), 0, 0
    for row in rows(places, lines, asked.share, seed):
        count, total = count + bool(row["moved"]), total + 1
        if asked.keep:
            with SIGHTINGS.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps({**row, **here, "date": date.today().isoformat()}) + "\n")
        others = before[row["file"], row["claim"]] - {here["processor"]}
        where = f" (also on {', '.join(sorted(others))})" if others else ""
        text = f"{row['file']}: {row['claim']}: {row['moved'] or 'the same'}{where}"
        print(json.dumps(row) if asked.json else text, flush=True)
    print(f"{count} of {total} records moved", file=sys.stderr)
    sys.exit(bool(count))


def listed(places: dict[tuple[str, str], list[Kept]], lines: list[Record]) -> list[str]:
    """What can be made again, by figure and by file."""
    found = [f"{paper} {figure}: {len(kept)} claims" for (paper, figure), kept in places.items()]
    return found + [f"{name}: {sum(one.file == name for one in lines)} lines, one by one" for name in REMADE]


def rows(
    places: dict[tuple[str, str], list[Kept]], lines: list[Record], share: float, seed: int
) -> Iterator[dict[str, Any]]:
    """What moved, of a random share of both."""
    for place in chosen(list(places), share, seed):
        yield from again(place, places[place])
    for record in chosen(lines, share, seed):
        yield remade(record)


if __name__ == "__main__":
    main()
