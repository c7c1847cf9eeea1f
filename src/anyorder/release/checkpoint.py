"""Checkpoints: files that are whole or absent, whatever kills the writer."""

import io
import os
import struct
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anyorder import durable
from anyorder.errors import CheckpointError

_MAGIC = b"anyorder checkpt"
_VERSION = 3
_HEAD = struct.Struct("<16sIQ32s32s")  # magic, version, length of the body, run, sha256 of all before and the body


def save_atomic(path: str | Path, payload: dict[str, Any], run_id: str = "") -> None:
    """Write a checkpoint file: at every moment the path holds the old file or the new one, whole.

    Readable by the owner only: a checkpoint that holds a noise key must be kept as safe as the data.

    Args:
        path: the file. A symbolic link is followed.
        payload: tensors, NumPy arrays (loaded as tensors), numbers, strings, bytes, None, and lists, tuples and dicts
            of them.
        run_id: up to 32 letters and digits. A file of another run, or of something else, is not replaced.
    Raises: CheckpointError with the reason; the temporary file is removed, the old file left as it was.
    """
    buffer = io.BytesIO()
    torch.save(_storable(payload, "payload"), buffer)
    body, run = buffer.getbuffer(), run_id.encode()
    head = _HEAD.pack(_MAGIC, _VERSION, len(body), run, _seal(run, body))
    target = Path(os.path.realpath(path))
    try:
        _check_own(target, run)
        durable.replace(target, head, body, secret=True)
    except OSError as problem:
        raise CheckpointError(
            f"the checkpoint {path} was not written: {problem}. The file of the last save is intact; make room or "
            "choose another folder, and save again"
        ) from problem


def load(path: str | Path) -> dict[str, Any]:
    """The payload of a checkpoint file, tensors on the CPU. Nothing in the file is executed.

    Raises: CheckpointError if the file cannot be read, is cut short or altered, or is no checkpoint of this package.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as problem:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {problem}") from problem
    if not data.startswith(_MAGIC):
        raise CheckpointError(f"{path} is no checkpoint of anyorder: it does not begin with its mark")
    if len(data) < _HEAD.size:
        raise CheckpointError(f"the checkpoint {path} is cut short: {len(data)} bytes; use another checkpoint")
    _, version, length, run, seal = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if version != _VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has format {version}, this version of anyorder reads {_VERSION}; resume with the "
            "version that wrote it"
        )
    if len(body) != length or _seal(run, body) != seal:
        raise CheckpointError(
            f"the checkpoint {path} is cut short or altered: {len(body)} bytes of {length}, or another checksum; "
            "use another checkpoint"
        )
    try:
        payload = torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever the decoder trips over, the file is not ours
        raise CheckpointError(f"the checkpoint {path} cannot be decoded: {problem}") from problem
    if not isinstance(payload, dict):
        raise CheckpointError(f"the checkpoint {path} holds a {type(payload).__name__}, not a dict")
    return payload


def check_ours(path: Path) -> None:
    """Raise CheckpointError where a file may be something else than a checkpoint: one that lost its end, or all that it
    held, still is one.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_MAGIC))
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read, and is not moved aside: {problem}") from problem
    if not _MAGIC.startswith(begin.rstrip(b"\0")):
        raise CheckpointError(f"{path} is no checkpoint of anyorder, and not moved aside; move it away, and start over")


def _check_own(target: Path, run: bytes) -> None:
    """Refuse to replace what this run did not write."""
    try:
        with open(target, "rb") as file:
            head = file.read(_HEAD.size)
    except FileNotFoundError:
        return
    if len(head) < _HEAD.size or not head.startswith(_MAGIC) or _HEAD.unpack(head)[3].rstrip(b"\0") != run:
        raise CheckpointError(
            f"{target} is not a checkpoint of this run, and is not replaced: another run or program wrote it after "
            "this run began; move it away, and save again"
        )


def _seal(run: bytes, body: memoryview) -> bytes:
    seal = sha256(_MAGIC + struct.pack("<IQ32s", _VERSION, len(body), run))
    seal.update(body)
    return seal.digest()


def _storable(value: Any, where: str) -> Any:
    """The value with NumPy's types replaced by torch's and Python's; an error names what cannot be stored."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except (TypeError, ValueError) as problem:
            raise CheckpointError(f"{where} is an array that torch cannot hold: {problem}") from problem
    if isinstance(value, dict):
        if not all(isinstance(key, (str, int, float, bytes)) for key in value):
            raise CheckpointError(f"{where} has a key that is no string or number: {list(value)[:5]}")
        return {key: _storable(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_storable(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, torch.Tensor):
        return value.detach()
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, (int, float)):  # of a batch, say
        return float.__float__(value) if isinstance(value, float) else int.__int__(value)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a checkpoint holds tensors, NumPy arrays of numbers, numbers, strings, "
        "bytes, None, and lists, tuples and dicts of them"
    )
