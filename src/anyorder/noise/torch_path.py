"""The path of torch: steps made on the device where the gradients are, in torch's own operations, a launch for each.

No kernel that is written for one kind of accelerator ships. `anyorder.noise` states the layout.

Every product, sum, root and division is an operation of its own, so nothing is fused, and each rounds once. The square
root is taken in float64: no root of a float32 comes within four float64 ulps of where float32 rounds either way, so the
result is the correctly rounded one even if the root in float64 is a little off.

- CPU: the bits of the NumPy reference.
- CUDA: the same operations, so the bits should be those of the CPU; this was never run on a GPU. The integer part is
  exact. torch's kernels round float32 sums, products, divisions and conversions to nearest and flush nothing to zero;
  no flag of torch (TF32, deterministic algorithms) touches them. Two rewritings would: products contracted with sums,
  and division by a scalar made a product with its reciprocal. Neither can happen, as no operation has a product and a
  sum to contract, and the divisor is a tensor. `torch.compile` may fuse: run these functions eagerly.

Working memory: some twenty vectors of 2^16 elements on a CPU, of 2^22 (about 0.4 GiB) elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anyorder.noise import normals
from anyorder.noise.compiled import Targets
from anyorder.noise.normals import BLOCK
from anyorder.noise.program import NoiseState, Program, execute
from anyorder.noise.stream import NoiseSource
from anyorder.strategy.base import State

_CPU_PIECE = 16 << 12  # elements at a time: what a core's cache holds
_PIECE = 16 << 18  # elements at a time: enough to fill a GPU
_EXTENSION = -(1 << 31)  # bit 63 of the counter, in its high word
_SIGN = -(1 << 31)
_TWO_POW_MINUS_32 = 2.0**-32
_CONSTANTS = [int(word) for word in np.frombuffer(b"expand 32-byte k", "<i4")]
_SQRT_HALF = 0x3F3504F3  # bits of float32 sqrt(1/2)
_TOP = _SQRT_HALF + (32 << 23)  # the same times 2^32


def add(out: Tensor, noise: Tensor, scale: float) -> None:
    """Write (out + noise) * scale to out; noise is float32."""
    total = out + noise  # in float32, or float64 where out is
    out.copy_(total.mul_(scale) if scale != 1 else total)


def float32(value: float) -> float:
    """Rounded to float32, exact in what torch makes of it."""
    return float(np.float32(value))


def pieces(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that make up start .. stop - 1 and meet at whole blocks."""
    size = _CPU_PIECE if device.type == "cpu" else _PIECE
    low = start
    while low < stop:
        high = min(stop, (low // size + 1) * size)
        yield low, high
        low = high


def normal_piece(source: NoiseSource, row: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Z[row, start:stop] of one piece, as `NoiseSource.normal`: a fresh float32 tensor on the device.

    Cost: about 350 operations of torch; one of them, the search for the rare radii that need further bits, makes the
    host wait for the device.
    """
    counters = torch.arange(start // BLOCK, -(-stop // BLOCK), dtype=torch.int64, device=device)

    def further(columns: Tensor) -> Tensor:
        return _blocks(source, counters[columns], _EXTENSION, row)

    flat = _transform(_blocks(source, counters, 0, row), further).T.reshape(-1)
    return flat[start % BLOCK : start % BLOCK + stop - start]


def _blocks(source: NoiseSource, counters: Tensor, domain: int, row: int) -> Tensor:
    """(16, B) int32 bits of the words of each block. ChaCha as in `normals.blocks`: int32 wraps as uint32 does."""
    key = np.frombuffer(source.of(row).key, "<i4").tolist()
    nonce = np.array([row & 0xFFFFFFFF, row >> 32], np.uint32).view(np.int32).tolist()
    start = torch.empty((16, len(counters)), dtype=torch.int32, device=counters.device)
    for i, word in enumerate([*_CONSTANTS, *key]):
        start[i] = word
    start[12] = counters.to(torch.int32)  # the low half
    start[13] = (counters >> 32).to(torch.int32) ^ domain
    start[14], start[15] = nonce
    a, b, c, d = start[0:4], start[4:8], start[8:12], start[12:16]
    for _ in range(source.rounds // 2):
        for turn in (1, 3):  # columns, then diagonals as columns; back again
            a, b, c, d = _round(a, b, c, d)
            b, c, d = b.roll(-turn, 0), c.roll(2, 0), d.roll(turn, 0)
    return torch.cat([a, b, c, d]) + start


def _round(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four quarter rounds, one to a column."""
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _rotate(d ^ a, left)
        c = c + d
        b = _rotate(b ^ c, right)
    return a, b, c, d


def _rotate(x: Tensor, left: int) -> Tensor:
    return (x << left) | ((x >> (32 - left)) & ((1 << left) - 1))


def _transform(words: Tensor, further: Callable[[Tensor], Tensor]) -> Tensor:
    """(16, B) float32 normals from (16, B) words, as `normals.box_muller`."""
    radius = _radius(words[:8], further)
    cosine, sine = _circle(words[8:])
    return torch.cat([cosine.mul_(radius), sine.mul_(radius)])


def _unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64) & 0xFFFFFFFF


def _radius(words: Tensor, further: Callable[[Tensor], Tensor]) -> Tensor:
    unsigned = _unsigned(words)
    value = unsigned.to(torch.float32)
    rows, columns = torch.nonzero(unsigned < 1 << 16, as_tuple=True)
    if columns.numel():
        more, at = _unsigned(further(columns)).to(torch.float32), torch.arange(columns.numel(), device=words.device)
        tail = (more[2 * rows + 1, at] * _TWO_POW_MINUS_32 + more[2 * rows, at]) * _TWO_POW_MINUS_32
        value[rows, columns] = (tail + value[rows, columns]).clamp_min(2.0**-64)

    # u = 2^exponent (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
    bits = value.view(torch.int32) - _TOP
    f = ((bits & 0x7FFFFF) + _SQRT_HALF).view(torch.float32) - 1.0
    f = torch.where(bits >= 0, words.to(torch.float32) * _TWO_POW_MINUS_32, f)
    exponent = (bits >> 23).to(torch.float32)

    square = f * f
    y = _polynomial(normals.LOG, f)
    y *= f
    y *= square
    y += exponent * float32(normals.TWO_LN2_LOW)
    y += square
    y += f * -2.0
    y += exponent * float32(normals.TWO_LN2_HIGH)
    return _root(y)


def _root(y: Tensor) -> Tensor:
    """The float32 nearest to the square root. torch's own root of a float32 is an ulp off now and then on CPUs."""
    return y.double().sqrt_().float()


def _circle(words: Tensor) -> tuple[Tensor, Tensor]:
    y = (words << 2).to(torch.float32) * 2.0**-31
    z = y * y
    sine = _polynomial(normals.SIN, z)
    sine *= y
    cosine = _polynomial(normals.COS, z)
    odd = (words & (1 << 30)) != 0
    first, second = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    first.view(torch.int32).bitwise_xor_((words ^ (words << 1)) & _SIGN)
    second.view(torch.int32).bitwise_xor_(words & _SIGN)
    return first, second


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule, a rounding after every product and every sum."""
    result = x * float32(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        result += float32(coefficient)
        result *= x
    result += float32(coefficients[0])
    return result


# ----------------------------------------------------------------------------------------------------
# Steps of a stream. On CPUs they are tested to the bit; on a GPU none of this was ever run.


class TorchPath:
    """Makes std * (K Z)[t] over the coordinates start, .., start + size - 1, with arrays on a device.

    Args:
        source: gives Z.
        std: a float32.
        start: first coordinate.
        size: number of coordinates.
        device: where the tensors are.
    """

    def __init__(self, source: NoiseSource, std: np.float32, start: int, size: int, device: torch.device | str) -> None:
        self._source, self._std, self._start, self._size = source, float(std), start, size
        self.device = torch.empty(0, device=device).device  # with its number: "cuda" becomes "cuda:0"

    def new(self) -> Tensor:
        """An array that is not written."""
        return torch.empty(self._size, dtype=torch.float32, device=self.device)

    def load(self, vectors: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """Arrays that hold copies of these."""
        return [torch.from_numpy(vector).to(self.device, copy=True) for vector in vectors]

    def save(self, arrays: Sequence[Tensor]) -> State:
        """What arrays hold: copies, on the CPU."""
        return tuple(array.cpu().numpy().copy() for array in arrays)

    def next(self, state: NoiseState[Tensor]) -> NDArray[np.float32]:
        """The noise of the next step, (size,) float32, a fresh array of the CPU."""
        # -0 + x is x, where x is -0 too
        noise = torch.full((self._size,), -0.0, dtype=torch.float32, device=self.device)
        self.add(state, Targets([noise], self._size), 1.0)
        state.broken = True
        made: NDArray[np.float32] = noise.cpu().numpy()
        state.broken = False
        return made

    def add(self, state: NoiseState[Tensor], targets: Targets, scale: float) -> None:
        """Write (target + noise of the next step) * scale to targets on the device."""
        outs = [tensor.contiguous().view(-1) for tensor in targets.tensors]
        made, arrays = state.prepare()
        state.broken = True
        run(made.program, self._source, arrays, self._start, outs, self._std, scale, self.device)
        state.advance(made, arrays)
        for x, out in zip(targets.tensors, outs, strict=True):
            if not x.is_contiguous():
                x.copy_(out.view(x.shape))
        state.broken = False


def run(
    program: Program, source: NoiseSource, arrays: Sequence[Tensor], start: int, outs: Sequence[Tensor], std: float,
    scale: float, device: torch.device,
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
    edges = list(accumulate((len(out) for out in outs), initial=0))
    for low, high in pieces(start, start + edges[-1], device):
        at, end = low - start, high - start
        noise = execute(
            program,
            partial(normal_piece, source, start=low, stop=high, device=device),
            [array[at:end] for array in arrays],
            partial(torch.zeros, high - low, dtype=torch.float32, device=device),
            partial(torch.full, (), dtype=torch.float32, device=device),
        )
        noise = noise * float32(std)
        for out, (first, last) in zip(outs, pairwise(edges), strict=True):
            if first < end and at < last:
                add(out[max(at - first, 0) : end - first], noise[max(first - at, 0) : last - at], scale)
