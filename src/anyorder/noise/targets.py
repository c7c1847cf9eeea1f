"""Tensors and arrays that noise is added to: as memory for the kernel, and by their own operations without it."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError
from anyorder.noise.native import SEGMENT, TYPES

__all__ = ["Targets"]

_NAMES = "float32, float64, float16 or bfloat16"


class Targets:
    """Tensors that hold the coordinates of a stream, in their order; each in row-major order, whatever its strides.

    Args:
        tensors: torch tensors or NumPy arrays of any shapes and floating types.
        size: elements in all.
    Raises: ArgumentError if they do not fit, or one cannot be written; nothing is written before `add`.
    """

    def __init__(self, tensors: Sequence[Any], size: int) -> None:
        self.tensors = [_detached(i, x) for i, x in enumerate(tensors)]
        total = sum(_count(x) for x in self.tensors)
        if total != size:
            raise ArgumentError(f"tensors must hold the stream's {size} coordinates, got {total} elements")
        self.devices = {x.device for x in self.tensors if not isinstance(x, np.ndarray)}
        self.has_arrays = any(isinstance(x, np.ndarray) for x in self.tensors)
        self.on_cpu = all(device.type == "cpu" for device in self.devices)

    def segments(self, start: int) -> tuple[NDArray[Any], NDArray[np.int32], list[Any]]:
        """Memory for the kernel: segments, their types, and contiguous stand-ins where a tensor is not (else None)."""
        stand_ins = [None if _is_contiguous(x) else _contiguous(x) for x in self.tensors]
        segments, types = [], []
        for x, stand_in in zip(self.tensors, stand_ins, strict=True):
            x, count = x if stand_in is None else stand_in, _count(x)
            segments.append((x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr(), start, count))
            types.append(TYPES[_type_of(x)])
            start += count
        return np.array(segments, SEGMENT), np.array(types, np.int32), stand_ins

    def take_back(self, stand_ins: list[Any]) -> None:
        """Copy what was written to stand-ins."""
        for x, stand_in in zip(self.tensors, stand_ins, strict=True):
            if stand_in is not None:
                _write(x, stand_in)

    def add(self, noise: NDArray[np.float32], scale: float) -> None:
        """Tensor = (tensor + noise) * scale, with the roundings of the kernel."""
        start = 0
        for x in self.tensors:
            part = noise[start : start + _count(x)].reshape(tuple(x.shape))
            start += _count(x)
            wide = _type_of(x) == "float64"
            if isinstance(x, np.ndarray):
                total = x + part if wide else x.astype(np.float32) + part
                total *= scale if wide else np.float32(scale)
            else:
                torch = sys.modules["torch"]
                total = (x if wide else x.float()) + torch.from_numpy(part).to(x.device)
                total *= scale if wide else float(np.float32(scale))
            _write(x, total)


def _detached(i: int, x: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach()
        if x.device.type == "meta" or (type(x) is not torch.Tensor and "FakeTensor" in type(x).__name__):
            raise ArgumentError(f"tensors[{i}] has no memory (a meta or fake tensor): noise needs a real one")
        if x.layout != torch.strided:
            raise ArgumentError(f"tensors[{i}] must be dense, got layout {x.layout}")
        strides = x.stride()
        if 0 in strides and x.numel() and any(e > 1 for e, stride in zip(x.shape, strides, strict=True) if stride == 0):
            raise ArgumentError(f"tensors[{i}] has elements that share memory (an expanded tensor): give a copy of it")
    elif not isinstance(x, np.ndarray):
        raise ArgumentError(f"tensors must be torch tensors or NumPy arrays, got {type(x).__name__} at {i}")
    elif not x.flags.writeable or not x.dtype.isnative:
        raise ArgumentError(f"tensors[{i}] must be writeable and of native byte order")
    if _type_of(x) not in TYPES or _type_of(x) == "uint32":
        raise ArgumentError(f"tensors[{i}] must be of type {_NAMES}, got {x.dtype}")
    return x


def _type_of(x: Any) -> str:
    return _name(x.dtype)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _count(x: Any) -> int:
    return int(x.size if isinstance(x, np.ndarray) else x.numel())


def _is_contiguous(x: Any) -> bool:
    return bool(x.flags.c_contiguous if isinstance(x, np.ndarray) else x.is_contiguous())


def _contiguous(x: Any) -> Any:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def _write(x: Any, values: Any) -> None:
    if isinstance(x, np.ndarray):
        x[...] = values
    else:
        x.copy_(values)
