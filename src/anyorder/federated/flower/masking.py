"""Integers under Flower's masks: what both sides of secure aggregation agree on, so that sums are exact.

Flower's SecAgg+ sums floats: each is multiplied by its client's weight, clipped to a range, shifted, scaled, and
rounded at random to an integer; masks are added modulo 2^32. With weights of 1, a range of whole numbers c and 2 c
steps in it, all of these leave integers from -c to c as they are, but for the shift by c, which the server takes away.
No two sums can be taken for each other as long as

    messages in the sum * 2 c < 2^32,        c = floor(clip_norm / grid)

which is checked before training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.compat.common import recorddict_compat
from torch import Tensor

from anyorder.clipping.units import ClippedSum
from anyorder.errors import PlanError, TrainingError
from anyorder.federated.flower.instruction import Instruction
from anyorder.federated.messages import Layout

__all__ = ["MODULUS", "Masking", "masked_reply"]

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
                f"{self.bound} can wrap around: plan with a coarser grid (secure=), or ask fewer clients a round"
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
