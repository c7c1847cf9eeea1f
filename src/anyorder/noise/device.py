"""The noise of a stream made on the device where the gradients are, and added to them there.

BLT, the banded strategies, and all that combine rows and keep nothing take one fused kernel a tensor on a CUDA device
where the package triton is, and plain torch operations elsewhere, or where ANYORDER_KERNEL is "reference". Any other
strategy runs its own `step` on vectors of the device, an operation of torch for each of NumPy. The roundings are those
of the CPU in each case; `torch_backend` and `triton_kernel` say what bits follow.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor

from anyorder.errors import ArgumentError
from anyorder.noise import torch_backend
from anyorder.noise.source import NoiseSource
from anyorder.strategy import BLT, Banded, ToeplitzBanded, Tree
from anyorder.strategy.base import Combination, State, Strategy

__all__ = ["DeviceNoise"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class DeviceNoise:
    """std * (K Z)[t] over the coordinates start, .., start + size - 1, with the state on a device.

    The caller owns the step: it takes t = 0, 1, .. in order.

    Args:
        strategy: gives K. Its `step`, where it is none of the fused ones, may use on rows `copy`, sums, differences,
            products, quotients and `numpy.zeros_like`.
        source: gives Z.
        std: rounded to float32.
        size: number of coordinates.
        start: first coordinate.
        device: where the tensors are.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: float, size: int, start: int, device: torch.device | str
    ) -> None:
        self._source, self._std, self._size, self._start = source, float(std), size, start
        self.device = torch.empty(0, device=device).device  # with its number: "cuda" becomes "cuda:0"
        self._steps = _steps_of(strategy)(strategy, size, self.device)

    def add(self, t: int, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write (tensor + noise of step t) * scale to tensors that hold the coordinates in their order.

        Args:
            t: step.
            tensors: on the device, of any shapes and floating types, `size` elements in all; each in row-major order,
                whatever its strides.
            scale: factor of the sums. Sum and product are rounded to float32 (float64 where the tensor is), then to the
                type of the tensor.
        Raises: ArgumentError if a tensor does not fit; nothing changes.
        """
        self._check(tensors)
        outs = [tensor.detach().contiguous().view(-1) for tensor in tensors]
        self._steps.add(t, self._source, self._std, self._start, outs, scale)
        for tensor, out in zip(tensors, outs, strict=True):
            if not tensor.is_contiguous():
                tensor.detach().copy_(out.view(tensor.shape))

    def state(self, t: int) -> State:
        """The state before step t as `Strategy.step` returns it: copies, on the CPU."""
        return tuple(vector.cpu().numpy().copy() for vector in self._steps.state(t))

    def load(self, t: int, state: State) -> None:
        """Go on from a state before step t, of this class or of `Strategy.step`."""
        self._steps.load(t, [torch.from_numpy(vector) for vector in state])

    def _check(self, tensors: Sequence[Tensor]) -> None:
        total = sum(tensor.numel() for tensor in tensors)
        if total != self._size:
            raise ArgumentError(f"tensors must have the stream's {self._size} elements in all, got {total}")
        for tensor in tensors:
            if tensor.device != self.device:
                raise ArgumentError(f"tensors must be on the stream's device {self.device}, got {tensor.device}")
            if tensor.dtype not in _TYPES:
                raise ArgumentError(f"tensors must be float32, bfloat16, float16 or float64, got {tensor.dtype}")


class _Stateless:
    """Combinations of rows."""

    def __init__(self, strategy: Combination, size: int, device: torch.device) -> None:
        self._strategy = strategy

    def add(self, t: int, source: NoiseSource, std: float, start: int, outs: Sequence[Tensor], scale: float) -> None:
        terms = self._strategy.terms(t)
        for (low, _), out in _parts(outs):
            _kernels(out).combination(source, terms.rows, terms.coefficients, std, start + low, out, scale)

    def state(self, t: int) -> Sequence[Tensor]:
        return ()

    def load(self, t: int, state: Sequence[Tensor]) -> None:
        pass


class _Buffers:
    """BLT."""

    def __init__(self, strategy: BLT, size: int, device: torch.device) -> None:
        self._scales, self._losses = strategy.scales, 1 - strategy.decays
        self._buffers = torch.zeros((strategy.num_buffers, size), device=device)

    def add(self, t: int, source: NoiseSource, std: float, start: int, outs: Sequence[Tensor], scale: float) -> None:
        for (low, high), out in _parts(outs):
            buffers = self._buffers[:, low:high]
            _kernels(out).blt(source, t, self._scales, self._losses, buffers, std, start + low, out, scale)

    def state(self, t: int) -> Sequence[Tensor]:
        return tuple(self._buffers)

    def load(self, t: int, state: Sequence[Tensor]) -> None:
        for buffer, saved in zip(self._buffers, state, strict=True):
            buffer.copy_(saved)


class _Ring:
    """Banded and ToeplitzBanded: the last p - 1 outputs, y_s in row s mod (p - 1)."""

    def __init__(self, strategy: Banded | ToeplitzBanded, size: int, device: torch.device) -> None:
        self._strategy = strategy
        self._ring = torch.zeros((strategy.num_bands - 1, size), device=device)

    def add(self, t: int, source: NoiseSource, std: float, start: int, outs: Sequence[Tensor], scale: float) -> None:
        back = np.arange(min(t, len(self._ring)) + 1)
        strategy = self._strategy
        row = strategy.bands[back, t - back] if isinstance(strategy, Banded) else strategy.coefficients[back]
        for (low, high), out in _parts(outs):
            ring = self._ring[:, low:high]
            _kernels(out).banded(source, t, row[1:], float(row[0]), ring, std, start + low, out, scale)

    def state(self, t: int) -> Sequence[Tensor]:
        return [self._ring[(t - i) % len(self._ring)] for i in range(1, min(t, len(self._ring)) + 1)]

    def load(self, t: int, state: Sequence[Tensor]) -> None:
        for i, saved in enumerate(state, start=1):
            self._ring[(t - i) % len(self._ring)] = saved


class _Own:
    """Any strategy: its own step, on vectors of the device."""

    def __init__(self, strategy: Strategy, size: int, device: torch.device) -> None:
        self._strategy, self._size, self._device = strategy, size, device
        self._state: Any = ()
        self.load(0, [torch.from_numpy(vector) for vector in strategy.init(size)])

    def add(self, t: int, source: NoiseSource, std: float, start: int, outs: Sequence[Tensor], scale: float) -> None:
        def row(r: int) -> Any:
            z = torch.full((self._size,), -0.0, device=self._device)  # -0 + x is x, also where x is -0
            _kernels(z).combination(source, [r], [1.0], 1.0, start, z)
            return _Vector(z)

        noise: Any
        noise, self._state = self._strategy.step(t, self._state, row)
        for (low, high), out in _parts(outs):
            torch_backend.add(out, noise.tensor[low:high], std, scale)

    def state(self, t: int) -> Sequence[Tensor]:
        return [vector.tensor for vector in self._state]

    def load(self, t: int, state: Sequence[Tensor]) -> None:
        self._state = tuple(_Vector(saved.to(self._device, copy=True)) for saved in state)


class _Vector(NDArrayOperatorsMixin):
    """A float32 vector of a device in place of a NumPy one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def copy(self) -> "_Vector":
        return _Vector(self.tensor.clone())

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None) -> Any:
        operation = _OPERATIONS.get(ufunc)
        values = [self._operand(value) for value in inputs]
        if operation is None or method != "__call__" or any(value is None for value in values):
            return NotImplemented
        if out is None:
            return _Vector(operation(*values))
        operation(*values, out=out[0].tensor)
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _Vector(torch.zeros_like(self.tensor)) if function is np.zeros_like else NotImplemented

    def _operand(self, value: Any) -> Tensor | None:
        if isinstance(value, _Vector):
            return value.tensor
        if not isinstance(value, np.float32 | float | int) or isinstance(value, np.float64):
            return None  # NumPy would go on in float64
        return torch.full(
            (), float(np.float32(value)), device=self.tensor.device
        )  # on CUDA, a / scalar is a (1 / scalar)


_OPERATIONS: dict[Any, Any] = {
    np.add: torch.add,
    np.subtract: torch.sub,
    np.multiply: torch.mul,
    np.true_divide: torch.div,
}


def _steps_of(strategy: Strategy) -> Any:
    """What makes the steps of a strategy. A subclass with a step of its own is a strategy of its own."""
    step = type(strategy).step
    if step is BLT.step:
        return _Buffers
    if step in (Banded.step, ToeplitzBanded.step):
        return _Ring
    if step is Combination.step or (step is Tree.step and strategy.state_rows == 0):
        return _Stateless
    return _Own


def _parts(outs: Sequence[Tensor]) -> list[tuple[tuple[int, int], Tensor]]:
    """Each tensor with its range of coordinates, counted from the first."""
    edges = accumulate((len(out) for out in outs), initial=0)
    return list(zip(pairwise(edges), outs, strict=True))


def _kernels(out: Tensor) -> ModuleType:
    """The module that makes the step: Triton's kernels where they can and ANYORDER_KERNEL allows it."""
    wanted = out.is_cuda and out.dtype != torch.float64 and os.environ.get("ANYORDER_KERNEL") != "reference"
    if wanted and find_spec("triton") is not None:
        from anyorder.noise import triton_kernel

        return triton_kernel
    return torch_backend
