"""Front ends of this package with faults planted: p-values of what an audit of their releases says.

Ours is the p-value: of an honest run not small, of every fault below 1e-6; beside it the test that says so clearest,
and the seconds of run and audit. Without --quick it is the worst of five trials: of honest runs the least p, of faults
the largest. An excuse is shown in words, with 1 in the place of p.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from anyorder.audit.faults import cases
from anyorder.audit.faults.judge import Case
from benchmarks._report import Row

FRONT_ENDS = Path(__file__).parents[2] / "tests" / "audit" / "front_ends.py"


def rows(quick: bool) -> Iterator[Row]:
    """A row for each front end and fault; `Case.check` stops at a fault that is not found."""
    spec = importlib.util.spec_from_file_location("front_ends", FRONT_ENDS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for room in module.FRONT_ENDS.values():
        for front_end in room:
            for case in cases(front_end):
                yield _row(case, 1 if quick else 5)


def _row(case: Case, seeds: int) -> Row:
    if case.excuse is not None:
        return Row(case.name, 1.0, None, None, f"excused: {case.excuse}")
    verdicts = [case.check(seed) for seed in range(seeds)]
    worst = (min if case.fault is None else max)(verdicts, key=lambda verdict: verdict.p_value)
    seconds = sum(verdict.seconds for verdict in verdicts) / seeds
    return Row(case.name, worst.p_value, None, None, f"p, by {worst.strongest!r}, {seconds:.2f} s")
