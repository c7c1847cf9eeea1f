"""What a server tells its clients beside the parameters, in a record of its own."""

from dataclasses import dataclass
from io import BytesIO
from math import isfinite
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from anyorder.errors import TrainingError

__all__ = ["ARRAYS", "CONFIG", "RECORD", "Instruction", "array_of", "of_reply", "record_of"]

RECORD = "anyorder"
ARRAYS, CONFIG = "arrays", "config"  # where Flower's own strategies put them, so that apps find them

_LONGEST = 256  # characters of a user's id


@dataclass(frozen=True)
class Instruction:
    """One round, as a client is told of it.

    Attributes:
        step: the round, 0, .., n - 1; Flower counts from 1.
        clip_norm: the norm in force.
        cut: the norm at which the device cuts its change: the one in force, or above it where that follows the norms
            of the messages, so that the server sees which are longer; it cuts them itself.
        grid: of integer messages, which are summed under masks; None where the server cuts single messages itself.
        on_device: what the plan trusts to the clients: "clipping", "record".
    """

    step: int
    clip_norm: float
    cut: float
    grid: float | None
    on_device: tuple[str, ...]

    def record(self) -> ConfigRecord:
        """The same, to be sent."""
        return ConfigRecord(
            {
                "round": self.step,
                "clip_norm": self.clip_norm,
                "cut": self.cut,
                "grid": self.grid or 0.0,
                "on_device": list(self.on_device),
            }
        )

    @classmethod
    def of(cls, content: RecordDict) -> "Instruction":
        """What a message says. Raises: TrainingError if it comes from another strategy, which would not noise."""
        record = record_of(content, RECORD)
        if not record:
            raise TrainingError(
                "this message is not from anyorder.federated.flower.Strategy, and an answer would not be protected: "
                "use that strategy on the server, or take client_mod out of the app's mods"
            )
        clip_norm, cut, grid = (_number(record.get(name)) for name in ("clip_norm", "cut", "grid"))
        step, places = record.get("round"), record.get("on_device")
        if type(step) is not int or step < 0 or not isinstance(places, list) or min(clip_norm, cut) <= 0 or grid < 0:
            raise TrainingError(f"the server must tell a round, norms, a grid and what it trusts, got {record}")
        return cls(step, clip_norm, cut, grid or None, tuple(str(place) for place in places))


def _number(value: Any) -> float:
    """A float as it was sent; -1 for what is none."""
    return value if isinstance(value, float) and isfinite(value) and value >= 0 else -1.0


def of_reply(content: RecordDict, step: int, *, named: bool) -> tuple[bool, str | None]:
    """(whether a reply belongs to this round and says from whom, its user).

    Args:
        named: whether users are told; else a user that is told all the same is not read.
    """
    record = record_of(content, RECORD)
    if type(record.get("round")) is not int or record["round"] != step:
        return False, None
    if not named:
        return True, None
    user = record.get("user")
    return (True, user) if type(user) is str and 0 < len(user) <= _LONGEST else (False, None)


def record_of(content: RecordDict, name: str) -> dict[str, Any]:
    """One of the records of plain values in a message; empty if it has none of that name."""
    return dict(content.config_records.get(name) or {})


def array_of(data: bytes) -> np.ndarray[Any, Any] | None:
    """The array in bytes that a client sent; None if there is none."""
    if not data.startswith(b"\x93NUMPY"):  # nor a pickle, nor an archive
        return None
    try:
        return np.load(BytesIO(data), allow_pickle=False)  # type: ignore[no-any-return]
    except Exception:  # whatever NumPy raises for bytes that somebody made up; a message that is none is zeros
        return None
