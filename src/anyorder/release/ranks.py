"""Who carries a plan out: one process, or several that make the same calls, each with coordinates of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

T = TypeVar("T")

Range = tuple[int, int]
"""Coordinates start, .., stop - 1."""


class Ranks(Protocol):
    """The processes of a run. All of them call the same methods in the same order.

    Attributes:
        rank, size: this process, and how many there are. The first one, of rank 0, holds key, files and journal.
    """

    rank: int
    size: int

    def together(self, place: str, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all ranks, by rank. What fails on one rank fails on all."""

    def from_first(self, value: T) -> T:
        """The first rank's value."""

    def by_first(self, place: str, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, which alone does it. Where it fails, all ranks fail."""

    def to_first(self, value: T) -> list[T] | None:
        """All ranks' values, on the first rank; None elsewhere."""


class Alone:
    """A process that carries a plan out by itself."""

    rank, size = 0, 1

    def together(self, place: str, work: Callable[[], T]) -> list[T]:
        return [work()]

    def from_first(self, value: T) -> T:
        return value

    def by_first(self, place: str, work: Callable[[], T]) -> T:
        return work()

    def to_first(self, value: T) -> list[T] | None:
        return [value]


class Coordinates(Protocol):
    """The vector that is released, and this rank's part of it.

    Attributes:
        size: number of coordinates, over all ranks.
        ranges: this rank's coordinates, in the order of its own vector.
    """

    @property
    def group(self) -> Ranks: ...
    @property
    def size(self) -> int: ...
    @property
    def ranges(self) -> list[Range]: ...


@dataclass(frozen=True)
class OneProcess:
    """All coordinates, in one process."""

    size: int
    group: Alone = field(default_factory=Alone)

    @property
    def ranges(self) -> list[Range]:
        return [(0, self.size)]
