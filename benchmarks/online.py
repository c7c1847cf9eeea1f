"""Convex learners in one pass, tuning and budgets: regret beside the theory, real streams and speed beside others.

    python -m benchmarks.online                     every part
    python -m benchmarks.online --quick             small sizes, few repetitions
    python -m benchmarks.online --only regret       one part; may be repeated
    python -m benchmarks.online --only regret --write       and its tables go on its page under docs/

A part is a module of `benchmarks/onlines` with `rows(quick) -> Iterator[Row]`; its first lines say what its rows mean.
With `--write`, `tables() -> Iterator[(page, mark, lines)]` is asked after all its rows: Markdown lines for
between the lines `<!-- mark -->` and `<!-- end -->` of docs/PAGE.
"""

import argparse
from importlib import import_module

from benchmarks._report import add_options, show
from benchmarks.wides.page import PAGE, put

PARTS = ("regret", "streams", "speed", "tuning", "budget")


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__ or "")
    add_options(parser, PARTS)
    parser.add_argument("--write", action="store_true", help="put the tables on the pages; of whole measurements")
    chosen = parser.parse_args()
    if chosen.write and chosen.quick:
        parser.error("--write is for whole measurements: not with --quick")
    for part in chosen.only or PARTS:
        module = import_module(f"benchmarks.onlines.{part}")
        show(module.rows(chosen.quick), chosen.json)
        if chosen.write:
            for page, mark, lines in module.tables():
                put(mark, lines, PAGE.parent / page)


if __name__ == "__main__":
    main()
