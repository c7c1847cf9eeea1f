"""What every benchmark shares: its options, a timer, and one way to print."""

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement: ours and the peer's (None where there is none), and peer / ours: above 1, ours is faster."""

    name: str
    ours: float | None
    peer: float | None
    ratio: float | None
    unit: str


def options(description: str, *, only: Iterable[str] = ()) -> argparse.Namespace:
    """`--quick` (small sizes), `--json` (one object a line), and, where there are parts, `--only`."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, only)
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser, only: Iterable[str] = ()) -> None:
    """The same, to a parser with options of its own."""
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    if parts := list(only):
        parser.add_argument("--only", choices=parts, action="append", help="this part; may be repeated")


def run_parts(description: str, package: str, parts: Iterable[str]) -> None:
    """The command of a benchmark in parts: modules of a package here, each with `rows(quick) -> Iterator[Row]`."""
    chosen = options(description, only=parts)
    for part in chosen.only or parts:
        show(import_module(f"benchmarks.{package}.{part}").rows(chosen.quick), chosen.json)


def processor() -> str:
    """The processor that a number was seen on: its results may depend on it."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs after one to warm up: what the machine does when nothing disturbs it."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def judged(name: str, target: float, ratio: float) -> str:
    """The name of a row, with its target, a least ratio, and whether it is met."""
    return f"{name} (target {target:g}: {'met' if ratio >= target else 'MISSED'})"


def show(rows: Iterable[Row], as_json: bool) -> None:
    """Print each row when it is measured."""
    if not as_json:
        print(f"{'':<72}{'ours':>10}{'peer':>10}{'ratio':>10}  unit")
    for row in rows:
        if as_json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        else:
            ours, peer, ratio = (
                "-" if number is None else f"{number:.3g}" for number in (row.ours, row.peer, row.ratio)
            )
            print(f"{row.name:<72}{ours:>10}{peer:>10}{ratio:>10}  {row.unit}", flush=True)
