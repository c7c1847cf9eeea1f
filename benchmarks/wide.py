"""Wide tables, noised only where it is needed: speed and memory beside others, lazy against dense, real sparsity.

    python -m benchmarks.wide                   every part
    python -m benchmarks.wide --quick           few steps, small sizes
    python -m benchmarks.wide --only speed      one part; may be repeated

A part is a module of `benchmarks/wides` with `rows(quick) -> Iterator[Row]`; its first lines say what its rows mean.
"""

from benchmarks._report import run_parts

PARTS = ("speed", "lazy", "sparse", "selectors", "zhang")


def main() -> None:
    """Measure and print."""
    run_parts(__doc__ or "", "wides", PARTS)


if __name__ == "__main__":
    main()
