"""The tables of docs/experiments.md, between their marks."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experiments.md"


def put(mark: str, lines: Iterable[str], page: Path = PAGE) -> None:
    """Replace what stands between a mark and the next end."""
    text = page.read_text(encoding="utf-8")
    head, found, rest = text.partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not (found and end):
        raise SystemExit(f"{page} has no place for the table: lines <!-- {mark} --> and <!-- end -->")
    body = "\n".join(lines)
    page.write_text(f"{head}{found}\n{body}\n\n{end}{tail}", encoding="utf-8")


def ways(lines: list[dict[str, Any]], titles: dict[str, str], zero: float) -> Iterator[str]:
    """Of each way the best run with seed 0: what was chosen, its loss and how far below zeros, and what it took."""
    yield "| | rate | rows chosen by | test loss | below the zero table | CPU ms a step | MB | epsilon |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, title in titles.items():
        runs = [line for line in lines if line["way"] == name and line["seed"] == 0]
        if not runs:
            continue
        best = min(runs, key=lambda line: float(line["loss"]))
        chosen = f"{best['amount']:g}" if best["amount"] else ""
        numbers = (f"{best['loss']:.4f}", f"{zero - best['loss']:+.4f}", f"{1000 * best['step_seconds']:.1f}")
        epsilon = "" if best["epsilon"] is None else f"{best['epsilon']:.4g}"
        memory = f"{best['bytes'] / 2**20:.0f}"
        yield f"| {' | '.join((title, format(best['lr'], 'g'), chosen, *numbers, memory, epsilon))} |"
