"""A random tenth of the recorded claims that are cheap enough, made again: what moved, and on which processors.

    python -m benchmarks.again [--quick] [--json] [--seconds 60] [--seed 0] [--share 0.1] [--list]

The records are the lines of reproductions/results, by figure, but for those that rest on stored runs or on training. A
figure is cheap if its claims took no more than --seconds together when kept; --quick takes those of 5 seconds.
Records of other kinds (benchmarks/results) are not made again. A number has moved if it differs by more than 1e-9 of
its size.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np
from reproductions.__main__ import PAPERS
from reproductions._claims import Kept, Run, found, results

from benchmarks._report import processor

_NEAR = 1e-9


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
    return {"processor": processor(), "blas": f"{blas['name']} {blas['version']}", "numpy": np.__version__}


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
            "paper": paper, "figure": name, "claim": row.claim.statement, "kept": row.date, "moved": text,
        })  # fmt: skip
    return told


def main() -> None:
    """Run a tenth, and say what moved."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.again", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="figures of 5 seconds and less")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--seconds", type=float, default=60.0, help="that a figure may have taken")
    parser.add_argument("--seed", type=int, help="of the choice; by itself the day")
    parser.add_argument("--share", type=float, default=0.1, help="of the figures that are cheap enough")
    parser.add_argument("--list", action="store_true", help="print what is cheap enough, and run nothing")
    asked = parser.parse_args()
    places = cheap(5.0 if asked.quick else asked.seconds)
    if asked.list:
        print("\n".join(f"{paper} {figure}: {len(rows)} claims" for (paper, figure), rows in places.items()))
        return
    seed = int(time.time() // 86400) if asked.seed is None else asked.seed
    print(json.dumps({**machine(), "seed": seed, "cheap": len(places)}), flush=True)
    rows = []
    for place in chosen(list(places), asked.share, seed):
        for row in again(place, places[place]):
            rows.append(row)
            shown = f"{row['paper']} {row['figure']}: {row['claim']}: {row['moved'] or 'the same'}"
            print(json.dumps(row) if asked.json else shown, flush=True)
    count = sum(bool(row["moved"]) for row in rows)
    print(f"{count} of {len(rows)} claims moved", file=sys.stderr)
    sys.exit(bool(count))


if __name__ == "__main__":
    main()
