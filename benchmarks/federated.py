"""Federated learning with user-level privacy: speed and size beside other simulators, faults, words, joint privacy.

    python -m benchmarks.federated                    every part
    python -m benchmarks.federated --quick            few rounds, small sizes
    python -m benchmarks.federated --only speed       one part; may be repeated

A part is a module of `benchmarks/federations` with `rows(quick) -> Iterator[Row]`; its first lines say what
its rows mean.
"""

from importlib import import_module
from pathlib import Path

from benchmarks._report import options, show

ORDER = ("speed", "ledger", "faults", "words", "joint", "flower_wrappers")
PARTS = tuple(part for part in ORDER if (Path(__file__).parent / "federations" / f"{part}.py").exists())


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "", only=PARTS)
    for part in chosen.only or PARTS:
        show(import_module(f"benchmarks.federations.{part}").rows(chosen.quick), chosen.json)


if __name__ == "__main__":
    main()
