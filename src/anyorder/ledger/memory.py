"""The history in memory: each step compressed, about one byte for each participation of an integer id."""

import zlib
from collections.abc import Iterator

import numpy as np

from anyorder._limits import inflate, spend_participations
from anyorder.ledger.ids import Integers, Units, canonical_bytes
from anyorder.ledger.seen import Seen

__all__ = ["Memory", "integers_from", "integers_raw", "pack", "unpack"]


class Memory:
    """Keeps what was recorded in a list."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def __len__(self) -> int:
        return len(self.chunks)

    def write(self, t: int, ids: Units, seen: Seen, digest: bytes) -> None:
        """Nothing that could fail."""

    def keep(self, ids: Units) -> None:
        """Take the step in."""
        self.chunks.append(pack(ids))

    def history(self, seen: Seen) -> Iterator[Units]:
        """The units of each step."""
        return map(unpack, self.chunks)

    def close(self) -> None:
        """Nothing is open."""


def integers_raw(ids: Integers) -> tuple[bytes, bytes]:
    """(one digit, the width; the first id and the distances to the next in that width): of sorted ids."""
    # Distances of sorted int64 values fit uint64, where the subtraction wraps around to the right result.
    distances = np.diff(ids.astype(np.uint64))
    width = next(w for w in (1, 2, 4, 8) if w == 8 or distances.max(initial=0) < 1 << (8 * w))
    return str(width).encode(), ids[:1].astype("<i8").tobytes() + distances.astype(f"<u{width}").tobytes()


def integers_from(kind: bytes, raw: bytes) -> Integers:
    """What `integers_raw` wrote."""
    distances = np.frombuffer(raw[8:], f"<u{int(kind)}")
    spend_participations(len(distances) + 1)
    ids = np.concatenate([np.frombuffer(raw[:8], "<u8"), distances.astype(np.uint64)])
    return np.cumsum(ids, dtype=np.uint64).astype(np.int64)


def pack(ids: Units) -> bytes:
    """One step: a letter, then the compressed ids; integers as the first and the distances, in the least width."""
    if isinstance(ids, list):
        return b"s" + zlib.compress(canonical_bytes(ids)[1:], 1)
    if not len(ids):
        return b"0"
    kind, raw = integers_raw(ids)
    return kind + zlib.compress(raw, 1)


def unpack(chunk: bytes) -> Units:
    """What `pack` wrote."""
    if chunk == b"0":
        return np.empty(0, np.int64)
    kind, raw = chunk[:1], inflate(chunk[1:])
    if kind != b"s":
        return integers_from(kind, raw)
    spend_participations(len(raw) // 8)
    names, start = [], 0
    while start < len(raw):
        end = start + 8 + int.from_bytes(raw[start : start + 8], "little")
        names.append(raw[start + 8 : end].decode("utf-8", "surrogatepass"))
        start = end
    return names
