"""What attacks show of the guarantees of this package, and of other libraries.

    python -m benchmarks.audit                    every part
    python -m benchmarks.audit --quick            few runs, small sizes
    python -m benchmarks.audit --only peers       one part; may be repeated

A part is a module of `benchmarks/audits` with `rows(quick) -> Iterator[Row]`; its first lines say what its rows mean.
"""

from benchmarks._report import run_parts

PARTS = ("power", "null", "faults", "amplified", "peers", "secrets", "scripts", "risk")


def main() -> None:
    """Attack and print."""
    run_parts(__doc__ or "", "audits", PARTS)


if __name__ == "__main__":
    main()
