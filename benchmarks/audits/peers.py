"""What other libraries claim of an order, beside the guarantee that holds for it."""

from collections.abc import Iterator

from benchmarks._report import Row
from benchmarks.train import opacus


def rows(quick: bool) -> Iterator[Row]:
    """Epsilon: ours is what holds for the order, the peer's is what it prints."""
    yield from opacus()
