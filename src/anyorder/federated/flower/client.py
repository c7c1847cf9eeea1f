"""The client's part: a mod around an app's training, which lets one clipped message out and nothing else."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message_type import MessageType
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from torch import Tensor

from anyorder.errors import ArgumentError, TrainingError
from anyorder.federated.flower.messages import ARRAYS, RECORD, Instruction, Masking, masked_reply, record_of
from anyorder.federated.server import Layout, clip_message

__all__ = ["client_mod"]


class DeviceCounter(Protocol):
    """A counter and a timer on the device's disk: `anyorder.federated.DeviceRecord`."""

    def may(self, step: int) -> bool: ...
    def take(self, step: int) -> object: ...


Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]

_log = logging.getLogger("anyorder.federated.flower")

_ABSENT = Error(code=0, reason="not in this round")  # says no more than a device that is off


def client_mod(
    *,
    user: str | Callable[[Context], str] | None = None,
    record: Callable[[Context], DeviceCounter] | None = None,
) -> Mod:
    """A mod for `flwr.clientapp.ClientApp(mods=[..])`: one clipped change leaves the device, and whom it is from.

        change = what the app's training returned - what the server sent
        message = change * min(1, clip_norm / ||change||)

    The app's train function stays as it is: it finds the shared parameters in `message.content["arrays"]` (load them
    with strict=False: buffers and personal parameters are not among them) and returns its own in an ArrayRecord. Of
    that the mod reads the floats that the server sent, and nothing more; metrics, losses, counts of examples, buffers
    and the words of an exception stay on the device. It answers to train messages of
    `anyorder.federated.flower.PrivateStrategy` alone: evaluation on private data has no noise.

    A training that fails is a change of zero, which is sent and recorded as every other: whether it fails may depend on
    the data, and a device that then kept silent would make room for another one. List this mod first, so that what
    other mods raise is caught as well. What it cannot answer for is a process that its data kills, and data that take
    longer than a round: bound memory and steps of the training by something else than the data.

    Under secure aggregation (`on_device=("clipping",)`) the message is integers on the plan's grid, and Flower's
    `secaggplus_mod` masks them; do not list that mod too. The device then refuses to tell both secrets of another
    one, and thresholds of half the devices or fewer.

    Args:
        user: whose data this device holds, or a function of the context that says it; it is what the server's ledger
            counts. The same person on two devices is the same user. None where the record is kept on the device.
        record: where the plan keeps the record on the device (`on_device=("record",)`): a function of the context that
            opens its `DeviceRecord`; the server then learns no name.
    Guarantee: the change's norm is at most the clip norm that the server told; one that is not finite, or that could
        not be made, is zero. Whether and what the device answers besides is no function of its data.
    Raises: ArgumentError unless there is one of user and record. The mod raises TrainingError where the server's plan
        keeps its record elsewhere, or its message is none; Flower tells the server so, which goes on without this
        device.
    """
    if (user is None) == (record is None):
        raise ArgumentError(
            "give user= (the server keeps the record, by user) or record= (the device does, and the server learns no "
            f"name), and one of them, got {'neither' if user is None else 'both'}"
        )

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            raise TrainingError(
                f"client_mod answers train messages alone, got {message.metadata.message_type!r}: an evaluation of "
                "private data would be released without noise"
            )
        instruction = Instruction.of(message.content)
        _check_places(instruction, record is not None)
        kept = None if record is None else record(context)
        name = user(context) if callable(user) else user
        if kept is None and (not isinstance(name, str) or not name):
            raise TrainingError("user must be a word, or a function of the context that gives one")
        device = _Device(name, kept, context, call_next)
        return device.masked(message, instruction) if instruction.grid else device.plain(message, instruction)

    return mod


class _Device:
    """One message's way through a device."""

    def __init__(self, user: str | None, kept: DeviceCounter | None, context: Context, call_next: Next) -> None:
        self._user, self._kept, self._context, self._call_next = user, kept, context, call_next

    def plain(self, message: Message, instruction: Instruction) -> Message:
        if self._kept is not None and not self._kept.may(instruction.step):
            return Message(_ABSENT, reply_to=message)
        clipped = clip_message(self._change(message), instruction.cut)
        self._take(instruction)
        arrays = ArrayRecord({name: Array(value.numpy()) for name, value in clipped.items()})
        return Message(RecordDict({ARRAYS: arrays, RECORD: self._told(instruction)}), reply_to=message)

    def masked(self, message: Message, instruction: Instruction) -> Message:
        """One stage of secure aggregation."""
        state = self._context.state.config_records
        stage = record_of(message.content, RECORD_KEY_CONFIGS).get(Key.STAGE)
        masking = Masking.of(instruction)
        if stage == Stage.SETUP:
            masking.check_setup(message.content.config_records[RECORD_KEY_CONFIGS])
            if self._kept is not None and not self._kept.may(instruction.step):
                return Message(_ABSENT, reply_to=message)
            state[RECORD] = instruction.record()
        elif state.get(RECORD) != instruction.record():
            raise TrainingError("this stage of secure aggregation is of another round than the stage before")
        if stage == Stage.UNMASK:
            masking.check_unmask(message.content.config_records[RECORD_KEY_CONFIGS])

        def integers(message: Message, context: Context) -> Message:
            change = self._change(message)
            whole = masking.integers(Layout.of(change), change)
            self._take(instruction)
            return masking.legacy(whole, message)

        reply = masked_reply(message, self._context, integers)
        if stage == Stage.SETUP:
            reply.content[RECORD] = self._told(instruction)
        return reply

    def _change(self, message: Message) -> dict[str, Tensor]:
        """What training changed, by the names that the server sent; zeros where it failed, for the device's log alone.

        An error in place of zeros would tell the server that training fails on this data, and would leave the device
        out of the round and of the record, so that another one is taken in: its data would move more than its message.
        """
        # A copy, as all that apps are handed: they may train it.
        before = dict(message.content.array_records[ARRAYS].to_torch_state_dict())
        try:
            reply = self._call_next(message, self._context)
            if reply.has_error():
                raise TrainingError(f"the app answered with an error: {reply.error.reason}")
            after = _trained(reply.content, before)
            return {name: after[name].to(value.dtype) - value for name, value in before.items()}
        except (Exception, SystemExit):
            _log.exception("training on this device failed; its message is zero, and the server is not told why")
        return {name: torch.zeros_like(value) for name, value in before.items()}

    def _take(self, instruction: Instruction) -> None:
        if self._kept is not None:
            self._kept.take(instruction.step)

    def _told(self, instruction: Instruction) -> ConfigRecord:
        name: dict[str, Any] = {} if self._kept is not None else {"user": self._user}
        return ConfigRecord({"round": instruction.step, **name})


def _trained(content: RecordDict, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that the app returned, of those that it was sent."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise TrainingError(f"the app must return one ArrayRecord, of its parameters, got {len(records)}")
    after = {name: array for name, array in records[0].items() if name in before}
    lacking = sorted(before.keys() - after.keys())
    if lacking:
        raise TrainingError(f"the app must return all parameters that it was sent, and {lacking[0]!r} is not there")
    tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in after.items()}
    for name, value in tensors.items():
        if value.shape != before[name].shape or not value.is_floating_point():
            raise TrainingError(f"the app must return {name!r} in the shape {tuple(before[name].shape)} and in floats")
    return tensors


def _check_places(instruction: Instruction, on_device: bool) -> None:
    """Whether the plan keeps the record where this device does, and clips where it says."""
    if set(instruction.on_device) - {"clipping", "record"}:
        raise TrainingError(f"on_device must be of 'clipping' and 'record', got {list(instruction.on_device)}")
    if ("record" in instruction.on_device) != on_device:
        raise TrainingError(
            "the plan keeps the record on the devices, and this one has none: client_mod(record=..)"
            if not on_device
            else "the plan keeps the record at the server, by user: client_mod(user=..)"
        )
    if ("clipping" in instruction.on_device) != (instruction.grid is not None):
        raise TrainingError("a plan that leaves clipping to the devices sums integers under masks, and no other does")
