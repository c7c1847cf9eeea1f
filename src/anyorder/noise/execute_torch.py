"""Programs run on a device in torch's own operations, a launch for each."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from anyorder.noise import torch_backend
from anyorder.noise.execute_numpy import execute
from anyorder.noise.program import Program
from anyorder.noise.source import NoiseSource

__all__ = ["run"]


def run(
    program: Program, source: NoiseSource, arrays: Sequence[Tensor], start: int, outs: Sequence[Tensor], std: float,
    scale: float,
) -> None:  # fmt: skip
    """Write (out + noise * std) * scale to outs, and the arrays; the roundings are those of the CPU.

    Sum and product are rounded to float32 (float64 where the out is that), then to the out's type. Rows may come from
    several keys. Working memory: the tiles, and some twenty vectors more, of 2^16 coordinates on a CPU, of 2^22
    elsewhere.

    Args:
        program: the step.
        source: gives Z.
        arrays: (size,) float32 each, on the device.
        start: coordinate of the first element.
        outs: contiguous vectors of any floating types on the device, which hold `size` coordinates in their order.
        std, scale: rounded to float32 (scale to float64 where the out is that).
    Guarantee: on a CPU the bits of `Strategy.step`, for every strategy. On CUDA the same operations one by one, so the
        bits should be those of the CPU; that was never run on a GPU.
    """
    device = outs[0].device
    edges = list(accumulate((len(out) for out in outs), initial=0))
    for low, high in torch_backend.pieces(start, start + edges[-1], device):
        at, end = low - start, high - start
        noise = execute(
            program,
            partial(torch_backend.normal_piece, source, start=low, stop=high, device=device),
            [array[at:end] for array in arrays],
            partial(torch.zeros, high - low, dtype=torch.float32, device=device),
            partial(torch.full, (), dtype=torch.float32, device=device),
        )
        noise = noise * torch_backend.float32(std)
        for out, (first, last) in zip(outs, pairwise(edges), strict=True):
            if first < end and at < last:
                torch_backend.add(out[max(at - first, 0) : end - first], noise[max(first - at, 0) : last - at], scale)
