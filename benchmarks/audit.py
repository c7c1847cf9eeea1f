"""What attacks show of the guarantees of this package, and of other libraries.

    python -m benchmarks.audit                    every part
    python -m benchmarks.audit --quick            few runs, small sizes
    python -m benchmarks.audit --only peers       one part; may be repeated

A part is a module of `benchmarks/audits` with `rows(quick) -> Iterator[Row]`; its first lines say what its rows mean.
"""

from importlib import import_module

from benchmarks._report import options, show

PARTS = ("power", "null", "faults", "peers", "secrets", "scripts")


def main() -> None:
    """Attack and print."""
    chosen = options(__doc__ or "", only=PARTS)
    for part in chosen.only or PARTS:
        show(import_module(f"benchmarks.audits.{part}").rows(chosen.quick), chosen.json)


if __name__ == "__main__":
    main()
