"""The loaders of public training scripts, made again from their own text, each asked with `ao.check`.

Rows: ours: the epsilon that holds for the order (`inf`: none follows from the loader; what was seen is then in the
name); peer: the epsilon that an accountant for Poisson sampling prints (privacy loss distributions); ratio: printed
over held: 1 or more where the print can be relied on. `python -m benchmarks.audits.scripts --write` computes the
table of docs/check_scripts.md again.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import anyorder as ao
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.poisson import calibrate_poisson
from anyorder.audit.loader_check import CheckResult
from anyorder.audit.observations import weights_of
from benchmarks._report import Row
from benchmarks.audits.scripts_data import SCRIPTS, Script

_QUICK_STEPS = 2000
_PAGE = Path(__file__).parents[2] / "docs" / "check_scripts.md"
_BEGIN, _END = "<!-- table -->", "<!-- end of table -->"


def sigma_of(script: Script) -> float:
    """The noise multiplier of a script; for a target, what its accountant would give, to three digits."""
    if script.sigma is not None:
        return script.sigma
    assert script.target is not None
    assert script.epochs is not None
    q = script.accumulate / script.batches
    steps = script.epochs * -(-script.batches // script.accumulate)
    return round(calibrate_poisson(script.target, script.delta, q, steps) + 5e-4, 3)


def found(script: Script) -> CheckResult:
    """The finding."""
    size = {"batch_size": 4} if script.steps is not None else {}
    return ao.check(
        script.make(script.batches), noise_multiplier=sigma_of(script), epochs=script.epochs, steps=script.steps,
        accumulate=script.accumulate, delta=script.delta, **size,
    )  # fmt: skip


def seen(script: Script) -> float:
    """The epsilon of the order that the loader gave in one run of its samplers; NaN where these name nobody."""
    loader = script.make(script.batches)
    batcher = getattr(loader, "batch_sampler", None)
    if batcher is None or script.pattern.startswith("a stream") or "neighbours" in script.pattern:
        return math.nan
    torch.manual_seed(0)
    names, steps, t = [], [], 0
    per_epoch = None if script.epochs is None else -(-script.batches // script.accumulate)
    for _ in range(script.epochs or 1):
        for i, batch in enumerate(batcher):
            if script.steps is not None and i == script.steps:
                break
            names.append(batch)
            steps.append(np.full(len(batch), t + i // script.accumulate))
        t += per_epoch or 0
    weight = weights_of(np.concatenate(names).astype(np.int64), np.concatenate(steps)).max()
    return gdp_epsilon(math.sqrt(weight) / sigma_of(script), script.delta)


def rows(quick: bool) -> Iterator[Row]:
    """One for each script; quickly: runs of a few steps, which say nothing of the scripts."""
    for script in SCRIPTS:
        if quick:
            most = max(1, _QUICK_STEPS // max(1, script.batches))
            script = replace(
                script, epochs=None if script.epochs is None else min(script.epochs, most),
                steps=None if script.steps is None else min(script.steps, _QUICK_STEPS),
                sigma=script.sigma or 1.0,
            )  # fmt: skip
        one = found(script)
        order = "" if math.isfinite(one.true) else f", seen: {seen(script):.4g}"
        name = f"{script.repository} {script.path}: {one.order}{order}"
        yield Row(name, one.true, one.claimed, one.claimed / one.true, "epsilon")


def page() -> Iterator[str]:
    """The lines of the summary, and then the table in Markdown."""
    lines, verdicts, private, ratios = [], Counter[str](), Counter[str](), []
    for script in SCRIPTS:
        one = found(script)
        verdicts[one.verdict] += 1
        private[one.verdict] += script.is_private
        if math.isfinite(one.true) and one.claimed > 0.005 and not one.holds:
            ratios.append(one.true / one.claimed)
        true = f"{one.true:.4g}"
        if math.isinf(one.true):
            other = seen(script)
            true = "none" if math.isnan(other) else f"none (seen {other:.4g})"
        length = f"{one.steps} steps" if script.epochs is None else str(script.epochs)
        claimed = "–" if math.isnan(one.claimed) else f"{one.claimed:.3g}"
        told = script.pattern + (f" ({script.ours})" if script.ours else "")
        told += f"; sigma {sigma_of(script):g}" if script.is_private else ""
        name = f"{script.repository}, {script.path}" if script.is_private else f"{script.repository}, {script.path} *"
        lines.append(f"| {name} | {told} | {length} | {claimed} | {true} | {one.verdict} |")
    yield (
        f"Of {len(SCRIPTS)} loaders the epsilon is valid for {verdicts['holds']}. It is false for {verdicts['false']} "
        f"and not proven for {verdicts['not proven']}. Of the {private.total()} whose scripts claim privacy, it is "
        f"valid for {private['holds']}."
    )
    yield f"The largest true epsilon over a claimed one is {max(ratios):.3g}."
    yield ""
    yield "| script | its loader | epochs | claimed | true | |"
    yield "|---|---|---|---|---|---|"
    yield from lines


def main() -> None:
    """Print the table, or keep the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/check_scripts.md")
    parser.add_argument("--check", action="store_true", help="fail where docs/check_scripts.md has another one")
    chosen = parser.parse_args()
    table = "\n".join(page())
    if not (chosen.write or chosen.check):
        print(table)
        return
    text = _PAGE.read_text()
    head, rest = text.split(_BEGIN)
    renewed = f"{head}{_BEGIN}\n\n{table}\n\n{_END}{rest.split(_END)[1]}"
    if chosen.check and renewed != text:
        sys.exit(f"{_PAGE} is not what is found now: python -m benchmarks.audits.scripts --write")
    _PAGE.write_text(renewed)


if __name__ == "__main__":
    main()
