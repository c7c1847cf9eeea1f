"""Federated learning with user-level privacy: speed and size beside other simulators, faults, words, joint privacy.

    python -m benchmarks.federated                    every part
    python -m benchmarks.federated --quick            few rounds, small sizes
    python -m benchmarks.federated --only speed       one part; may be repeated

A part is a module of `benchmarks/federations` with `rows(quick) -> Iterator[Row]`; its first lines say what
its rows mean.
"""

from benchmarks._report import run_parts

PARTS = ("speed", "messages", "ledger", "faults", "words", "joint", "flower_wrappers", "nvflare")


def main() -> None:
    """Measure and print."""
    run_parts(__doc__ or "", "federations", PARTS)


if __name__ == "__main__":
    main()
