"""The noise of a stream made on the device where the gradients are, and added to them there.

One fused kernel a tensor makes the step on a CUDA device where the package triton is (`execute_triton`); plain torch
operations make it elsewhere, for float64, for the rare program with more tiles than the kernel has, and where
ANYORDER_KERNEL is "reference" (`execute_torch`). Both run the program of the step, with the roundings of the CPU. On a
GPU none of this was ever run: on CPUs torch's operations are tested to the bit, and the kernel under Triton's
interpreter; of its code for a GPU it is tested that it compiles, and which operations it has.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.noise import execute_torch
from anyorder.noise.held import Held
from anyorder.noise.program import Program
from anyorder.noise.source import NoiseSource
from anyorder.noise.targets import Targets
from anyorder.strategy import State, Strategy

__all__ = ["DeviceNoise"]

Run = Callable[..., None]


class DeviceNoise:
    """std * (K Z)[t] over the coordinates start, .., start + size - 1, with the state on a device.

    Args:
        strategy: gives K.
        source: gives Z.
        std: a float32.
        size: number of coordinates.
        start: first coordinate.
        most: number of arrays to hold at most, the state's included.
        device: where the tensors are.
    """

    def __init__(
        self, strategy: Strategy, source: NoiseSource, std: np.float32, size: int, start: int, most: int,
        device: torch.device | str,
    ) -> None:  # fmt: skip
        self._strategy, self._source, self._std = strategy, source, float(std)
        self._size, self._start, self._most = size, start, most
        self.device = torch.empty(0, device=device).device  # with its number: "cuda" becomes "cuda:0"
        self.load(0, strategy.init(size))

    def next(self) -> NDArray[np.float32]:
        """The noise of the next step, (size,) float32, a fresh array of the CPU."""
        # -0 + x is x, where x is -0 too
        noise = torch.full((self._size,), -0.0, dtype=torch.float32, device=self.device)
        self.add(Targets([noise], self._size), 1.0)
        with self.held.unsafe():
            made: NDArray[np.float32] = noise.cpu().numpy()
        return made

    def add(self, targets: Targets, scale: float) -> None:
        """Write (target + noise of the next step) * scale to targets on the device."""
        outs = [tensor.contiguous().view(-1) for tensor in targets.tensors]
        made, arrays = self.held.prepare()
        with self.held.unsafe():
            for run, part, low, high in _parts(made.program, outs):
                here = [array[low:high] for array in arrays]
                run(made.program, self._source, here, self._start + low, part, self._std, scale)
            self.held.settle(made, arrays)
            for x, out in zip(targets.tensors, outs, strict=True):
                if not x.is_contiguous():
                    x.copy_(out.view(x.shape))

    def state(self) -> State:
        """The state before the next step as `Strategy.step` returns it: copies, on the CPU."""
        return tuple(vector.cpu().numpy().copy() for vector in self.held.state)

    def load(self, t: int, state: Sequence[Any]) -> None:
        """Go on from a copy of a state before step t."""
        own = [torch.from_numpy(vector).to(self.device, copy=True) for vector in state]
        self.held: Held[Tensor] = Held(self._strategy, t, own, self._most, self._new)

    def _new(self) -> Tensor:
        return torch.empty(self._size, dtype=torch.float32, device=self.device)


def _parts(program: Program, outs: Sequence[Tensor]) -> Iterator[tuple[Run, list[Tensor], int, int]]:
    """Tensors side by side that one executor takes, with their range of coordinates, counted from the first."""
    edges = pairwise(accumulate((len(out) for out in outs), initial=0))
    for run, group in groupby(zip(outs, edges, strict=True), key=lambda pair: _executor(program, pair[0])):
        part = list(group)
        yield run, [out for out, _ in part], part[0][1][0], part[-1][1][1]


def _executor(program: Program, out: Tensor) -> Run:
    """What makes the step: Triton's kernel where it can and ANYORDER_KERNEL allows it."""
    wanted = out.is_cuda and out.dtype != torch.float64 and os.environ.get("ANYORDER_KERNEL") != "reference"
    if wanted and find_spec("triton") is not None:
        from anyorder.noise import execute_triton

        if program.num_tiles <= execute_triton.MOST_TILES:
            return execute_triton.run
    return execute_torch.run
