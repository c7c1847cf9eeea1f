"""What a server tells its clients beside the parameters, in a record of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from math import isfinite
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.compat.common import recorddict_compat
from torch import Tensor

from anyorder.clipping.bounded import ClippedSum
from anyorder.errors import PlanError, TrainingError
from anyorder.federated.server import Layout

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
                "this message is not from anyorder.federated.flower.PrivateStrategy, and an answer would not be "
                "protected: use that strategy on the server, or take client_mod out of the app's mods"
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


# ----------------------------------------------------------------------------------------------------
# Integers under Flower's masks: what both sides of secure aggregation agree on, so that sums are exact.
#
# Flower's SecAgg+ sums floats: each is multiplied by its client's weight, clipped to a range, shifted, scaled, and
# rounded at random to an integer; masks are added modulo 2^32. With weights of 1, a range of whole numbers c and 2 c
# steps in it, all of these leave integers from -c to c as they are, but for the shift by c, which the server takes
# away. No two sums can be taken for each other as long as
#
#     messages in the sum * 2 c < 2^32,        c = floor(clip_norm / grid)
#
# which is checked before training.


MODULUS = 2**32


@dataclass(frozen=True)
class Masking:
    """The numbers of one round of secure aggregation.

    Attributes:
        clip_norm, grid: of the round; a message is integers, in steps of grid, of L2 norm at most clip_norm / grid.
        bound: c, the largest that a coordinate can be.
    """

    clip_norm: float
    grid: float

    @property
    def bound(self) -> int:
        return int(Fraction(self.clip_norm) / Fraction(self.grid))

    @classmethod
    def of(cls, instruction: Instruction) -> "Masking":
        if instruction.grid is None:
            raise TrainingError("this round has no grid: floats cannot be summed under masks")
        return cls(instruction.clip_norm, instruction.grid)

    def check_size(self, messages: int) -> None:
        """Raise PlanError where the sum of so many messages could wrap around."""
        if 2 * messages * self.bound >= MODULUS:
            raise PlanError(
                f"sums under masks are modulo 2^32, and {messages} messages of coordinates up to clip_norm / grid = "
                f"{self.bound} can wrap around: take "
                "dataclasses.replace(plan, grid=..) with a coarser grid, or ask fewer clients a round"
            )

    def settings(self, messages: int, threshold: int) -> dict[str, Any]:
        """What the clients are told at the beginning, in Flower's words."""
        return {
            Key.SAMPLE_NUMBER: messages,
            Key.SHARE_NUMBER: messages,
            Key.THRESHOLD: threshold,
            Key.CLIPPING_RANGE: float(self.bound),
            Key.TARGET_RANGE: 2 * self.bound,
            Key.MOD_RANGE: MODULUS,
            Key.MAX_WEIGHT: 1.0,
        }

    # -- on the device ---------------------------------------------------------------------------------------------

    def check_setup(self, told: ConfigRecord) -> None:
        """Raise TrainingError unless the server's numbers carry integers exactly, and protect against it."""
        messages, threshold = told.get(Key.SAMPLE_NUMBER), told.get(Key.THRESHOLD)
        if type(messages) is not int or type(threshold) is not int or not messages // 2 < threshold <= messages:
            raise TrainingError(
                "secure aggregation must need more than half of the devices to unmask a sum, or the server could ask "
                f"one half for this device's mask and the other half for its key; got {threshold!r} of {messages!r}"
            )
        if threshold < 2:
            raise TrainingError("a sum of one device is its message: secure aggregation needs two or more")
        self.check_size(messages)
        wanted = self.settings(messages, threshold)
        if any(told.get(key) != value for key, value in wanted.items()):
            raise TrainingError(f"secure aggregation of integers needs the settings {wanted}, got others")

    @staticmethod
    def check_unmask(told: ConfigRecord) -> None:
        """Raise TrainingError where the server asks for both secrets of a device: together they show its message."""
        active, dead = told.get(Key.ACTIVE_NODE_ID_LIST), told.get(Key.DEAD_NODE_ID_LIST)
        if not isinstance(active, list) or not isinstance(dead, list) or set(active) & set(dead):
            raise TrainingError("the server asked for the mask and the key of the same device, which would unmask it")

    def integers(self, layout: Layout, change: Mapping[str, Tensor]) -> Tensor:
        """(size,) int64: a change clipped, in steps of the grid; to the bit what the server would make of it itself."""
        parts = layout.named(layout.flat(change))
        total = ClippedSum(parts, clip_norm=self.clip_norm, scale=1.0, grid=self.grid)
        rows = {name: part[None] for name, part in parts.items()}
        total.add(rows, torch.zeros(1, dtype=torch.int64), complete=True)
        return torch.cat([part.reshape(-1) for part in total.finish().values()])

    def legacy(self, integers: Tensor, message: Message) -> Message:
        """A reply as Flower's mod reads it: weight 1, one array, no metrics."""
        arrays = ndarrays_to_parameters([integers.numpy()])
        result = FitRes(Status(Code.OK, ""), arrays, num_examples=1, metrics={})
        return Message(recorddict_compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)

    # -- at the server ---------------------------------------------------------------------------------------------

    def unshift(self, total: np.ndarray[Any, Any], weights: int, messages: int) -> Tensor | None:
        """(size,) int64: the sum of the integers, from that of the shifted ones; None if no messages have it."""
        largest = 2 * messages * self.bound
        if weights != largest or total.min(initial=0) < 0 or total.max(initial=0) > largest:
            return None
        return torch.from_numpy(total.astype(np.int64)) - messages * self.bound


def masked_reply(message: Message, context: Context, train: Callable[[Message, Context], Message]) -> Message:
    """What Flower's mod answers, less the records that its server does not need."""
    reply = secaggplus_mod(message, context, train)
    content = RecordDict(dict(reply.content.config_records.items()))
    for name in [name for name in content if name.startswith("fitres.")]:
        del content[name]
    return Message(content, reply_to=message)
