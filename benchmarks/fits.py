"""Fits to an amplified claim beside fits to the order whose bins are known: the table of docs/compared.md.

python -m benchmarks.factorize --only fits              a minute; losses are estimates, the same for all rows
python -m benchmarks.factorize --only fits --write      the same, put into the page
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from anyorder import workload as W
from anyorder.optimize import fit
from anyorder.optimize.amplified import Judge
from anyorder.participation import BallsInBins, FixedOrder
from anyorder.strategy import Independent, Strategy
from benchmarks._report import Row

PAGE = Path(__file__).resolve().parents[1] / "docs" / "compared.md"
DELTA = 1e-5
EPSILONS = (1.0, 8.0)
SHAPE = (10, 100)
KINDS: dict[str, tuple[str, dict[str, int]]] = {
    "banded Toeplitz, 16 bands": ("toeplitz", {"bands": 16}),
    "banded Toeplitz, 32 bands": ("toeplitz", {"bands": 32}),
    "banded Toeplitz, 100 bands": ("toeplitz", {"bands": 100}),
    "banded inverse, 32 bands": ("banded_inverse", {"bands": 32}),
    "BLT, 1 buffer": ("blt", {"buffers": 1}),
    "BLT, 2 buffers": ("blt", {"buffers": 2}),
}


def rows(quick: bool) -> Iterator[Row]:
    """The estimated error of each fit to the claim, beside that of the fit to known bins."""
    k, b = (4, 20) if quick else SHAPE
    for epsilon in EPSILONS:
        yield Row(f"independent, epsilon {epsilon:g}", *_losses(k, b, epsilon, None), 1.0, "estimated error")
        for name in KINDS:
            if KINDS[name][1].get("bands", 1) <= b:
                ours, known = _losses(k, b, epsilon, name)
                yield Row(f"{name}, epsilon {epsilon:g}; peer: fit to known bins", ours, known, known / ours, "error")


@cache
def _losses(k: int, b: int, epsilon: float, name: str | None) -> tuple[float, float]:
    n = k * b
    work, bins = W.prefix_sum(n), BallsInBins(k, b)
    judge = Judge(work, bins, "mean", epsilon, DELTA)
    if name is None:
        alone = judge(Independent(n)).loss
        return alone, alone
    kind, sizes = KINDS[name]
    options: dict[str, Any] = dict(sizes)
    known: Strategy = fit(kind, work, FixedOrder(n, k, b), **options)
    return judge(fit(kind, work, bins, epsilon=epsilon, delta=DELTA, **options)).loss, judge(known).loss


def write() -> None:
    """The table, on its page."""
    lines = [
        "| C | epsilon 1: fitted to the claim | to the fixed order | epsilon 8: to the claim | to the fixed order |",
        "|---|---|---|---|---|",
    ]
    for name in (None, *KINDS):
        cells = [loss for epsilon in EPSILONS for loss in _losses(*SHAPE, epsilon, name)]
        lines.append(f"| {name or 'independent (DP-SGD)'} | " + " | ".join(f"{loss:#.3g}" for loss in cells) + " |")
    text = PAGE.read_text(encoding="utf-8")
    mark = r"(<!-- fits -->\n).*?(\n<!-- end of fits -->)"
    assert re.search(mark, text, re.DOTALL), "the page has no place for the table"
    put = "\n" + "\n".join(lines) + "\n"
    PAGE.write_text(re.sub(mark, lambda m: m[1] + put + m[2], text, flags=re.DOTALL), encoding="utf-8")
