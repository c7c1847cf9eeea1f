"""The same noise in plain torch operations, on any device. `anyorder.noise` states the layout.

Every product, sum, root and division is an operation of its own, so nothing is fused, and each rounds once. The square
root is taken in float64: no root of a float32 comes within four float64 ulps of where float32 rounds either way, so the
result is the correctly rounded one even if the root in float64 is a little off.

- CPU: the bits of the NumPy reference, for the rows and for the steps of the strategies.
- CUDA: the same operations, so the bits should be those of the CPU; this has not been run. The integer part is exact.
  torch's kernels round float32 sums, products, divisions and conversions to nearest and flush nothing to zero; no flag
  of torch (TF32, deterministic algorithms) touches them. Two rewritings would: products contracted with sums, and
  division by a scalar made a product with its reciprocal. Neither can happen, as no operation has a product and a sum
  to contract, and the divisor is a tensor. `torch.compile` may fuse: run these functions eagerly.

The steps below do to a range of coordinates what `Strategy.step`, then a product with std, does to NumPy arrays, in the
same order of roundings. Then out = (out + noise) * scale, sum and product each rounded to float32 (to float64 where
`out` is that), and the result to the type of `out`. Working memory: that for 2^16 elements on a CPU, for 2^22 (about
0.1 GiB) elsewhere.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from anyorder import _check
from anyorder.errors import ArgumentError
from anyorder.noise import transform
from anyorder.noise.source import NoiseSource

__all__ = ["add", "banded", "blt", "check_out", "combination", "normal", "words"]

_BLOCK = 16  # words, and normals, of a block
_CPU_PIECE = 16 << 12  # elements at a time: what a core's cache holds
_PIECE = 16 << 18  # elements at a time: enough to fill a GPU
_RAW, _EXTENSION = 1 << 30, -(1 << 31)  # bits 62 and 63 of the counter, in its high word
_SIGN = -(1 << 31)
_TWO_POW_MINUS_32 = 2.0**-32
_CONSTANTS = [int(word) for word in np.frombuffer(b"expand 32-byte k", "<i4")]
_MAX_ELEMENT = 1 << 62
_MAX_ROW = (1 << 63) - 1
_SQRT_HALF = 0x3F3504F3  # bits of float32 sqrt(1/2)
_TOP = _SQRT_HALF + (32 << 23)  # the same times 2^32


def normal(source: NoiseSource, row: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """Z[row, start:stop] as `NoiseSource.normal`: (stop - start,) float32 on the device.

    Cost: about 350 operations of torch for each piece of the range; one of them, the search for the rare radii that
    need further bits, makes the host wait for the device.
    """
    return _fill(_normals, source, row, start, stop, torch.device(device), torch.float32)


def words(source: NoiseSource, row: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """Raw words as `NoiseSource.words`: (stop - start,) int32 with the bits of the uint32 words."""
    return _fill(_raw, source, row, start, stop, torch.device(device), torch.int32)


def combination(
    source: NoiseSource,
    rows: Sequence[int],
    coefficients: Sequence[float],
    std: float,
    start: int,
    out: Tensor,
    scale: float = 1.0,
) -> None:
    """Add std * (coefficients[0] Z[rows[0]] + coefficients[1] Z[rows[1]] + ..), the step of `Combination`.

    Args:
        source: gives Z.
        rows: at least one row id.
        coefficients: one for each row; rounded to float32.
        std: rounded to float32.
        start: coordinate of out[0].
        out: (size,) contiguous, of a floating type, on any device; written in place.
        scale: factor of the sum.
    """
    check_out(out)
    for low, high in _pieces(start, start + out.numel(), out.device):
        noise = _normals(source, int(rows[0]), low, high, out.device).mul_(_float32(coefficients[0]))
        for row, coefficient in zip(rows[1:], coefficients[1:], strict=True):
            noise += _normals(source, int(row), low, high, out.device).mul_(_float32(coefficient))
        add(out[low - start : high - start], noise, std, scale)


def blt(
    source: NoiseSource,
    row: int,
    scales: Sequence[float],
    losses: Sequence[float],
    buffers: Tensor,
    std: float,
    start: int,
    out: Tensor,
    scale: float = 1.0,
) -> None:
    """Add std * y, y = Z[row] - scales . buffers; then buffers += y - losses * buffers: the step of `BLT`.

    Args:
        source, row: give Z.
        scales, losses: (m,) the losses are 1 - decays; rounded to float32.
        buffers: (m, size) float32 on the device of out, each row contiguous; written in place.
        std, start, out, scale: as for `combination`.
    """
    check_out(out, buffers)
    for low, high in _pieces(start, start + out.numel(), out.device):
        noise = _normals(source, row, low, high, out.device)
        state = buffers[:, low - start : high - start]
        for weight, buffer in zip(scales, state, strict=True):
            noise -= buffer * _float32(weight)
        for loss, buffer in zip(losses, state, strict=True):
            buffer += noise - buffer * _float32(loss)
        add(out[low - start : high - start], noise, std, scale)


def banded(
    source: NoiseSource,
    row: int,
    coefficients: Sequence[float],
    diagonal: float,
    ring: Tensor,
    std: float,
    start: int,
    out: Tensor,
    scale: float = 1.0,
) -> None:
    """Add std * y, y = (Z[row] - sum_i coefficients[i - 1] y_{row - i}) / diagonal: the step of `Banded`.

    Args:
        source, row: give Z; the row is the step.
        coefficients: of y_{row - 1}, y_{row - 2}, ..: at most min(row, len(ring)); rounded to float32.
        diagonal: rounded to float32.
        ring: (p - 1, size) float32 on the device of out, each row contiguous: y_s stands in row s mod (p - 1). y_row
            takes the place of the oldest.
        std, start, out, scale: as for `combination`.
    """
    check_out(out, ring)
    divisor = torch.full((), _float32(diagonal), device=out.device)  # a scalar would become a reciprocal on CUDA
    for low, high in _pieces(start, start + out.numel(), out.device):
        noise = _normals(source, row, low, high, out.device)
        past = ring[:, low - start : high - start]
        for i, coefficient in enumerate(coefficients, start=1):
            noise -= past[(row - i) % len(ring)] * _float32(coefficient)
        noise /= divisor
        if len(ring):
            past[row % len(ring)] = noise
        add(out[low - start : high - start], noise, std, scale)


def add(out: Tensor, noise: Tensor, std: float, scale: float) -> None:
    """Write (out + noise * std) * scale to out; noise is float32, and is written over."""
    total = out + noise.mul_(_float32(std))  # in float32, or float64 where out is
    out.copy_(total.mul_(scale) if scale != 1 else total)


def check_out(out: Tensor, state: Tensor | None = None) -> None:
    """Refuse what the steps cannot write element by element."""
    if out.dim() != 1 or not out.is_contiguous() or not out.is_floating_point():
        raise ArgumentError(
            f"out must be a contiguous floating-point vector, got {out.dtype} of shape {tuple(out.shape)} and strides "
            f"{out.stride()}; pass gradient.view(-1)"
        )
    if state is None:
        return
    if state.dtype != torch.float32 or state.dim() != 2 or state.shape[1] != len(out) or state.stride(1) != 1:
        raise ArgumentError(
            f"the state must be float32 rows of {len(out)} coordinates like out, got {state.dtype} of shape "
            f"{tuple(state.shape)}"
        )
    if state.device != out.device:
        raise ArgumentError(f"the state must be on the device of out, {out.device}, got {state.device}")


def _float32(value: float) -> float:
    """Rounded to float32, exact in what torch makes of it."""
    return float(np.float32(value))


def _pieces(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges that make up start .. stop - 1 and meet at whole blocks."""
    size = _CPU_PIECE if device.type == "cpu" else _PIECE
    low = start
    while low < stop:
        high = min(stop, (low // size + 1) * size)
        yield low, high
        low = high


def _fill(
    make: Callable[..., Tensor],
    source: NoiseSource,
    row: int,
    start: int,
    stop: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    _check.integer("row", row, low=0, high=_MAX_ROW)
    _check.integer("start", start, low=0, high=_MAX_ELEMENT)
    _check.integer("stop", stop, low=start, high=_MAX_ELEMENT)
    result = torch.empty(stop - start, dtype=dtype, device=device)
    for low, high in _pieces(start, stop, device):
        result[low - start : high - start] = make(source, row, low, high, device)
    return result


def _normals(source: NoiseSource, row: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Z[row, start:stop] of one piece, a fresh tensor."""
    counters = _counters(start, stop, device)

    def further(columns: Tensor) -> Tensor:
        return _blocks(source, counters[columns], _EXTENSION, row)

    return _range(_transform(_blocks(source, counters, 0, row), further), start, stop)


def _raw(source: NoiseSource, row: int, start: int, stop: int, device: torch.device) -> Tensor:
    return _range(_blocks(source, _counters(start, stop, device), _RAW, row), start, stop)


def _counters(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start // _BLOCK, -(-stop // _BLOCK), dtype=torch.int64, device=device)


def _range(columns: Tensor, start: int, stop: int) -> Tensor:
    """Elements start .. stop - 1 of blocks that stand in columns."""
    first = start // _BLOCK * _BLOCK
    return columns.T.reshape(-1)[start - first : stop - first]


def _blocks(source: NoiseSource, counters: Tensor, domain: int, row: int) -> Tensor:
    """(16, B) int32 bits of the words of each block. ChaCha as in `chacha.blocks`: int32 wraps as uint32 does."""
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
    """(16, B) float32 normals from (16, B) words, as `transform.normals`."""
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
    y = _polynomial(transform.LOG, f)
    y *= f
    y *= square
    y += exponent * _float32(transform.TWO_LN2_LOW)
    y += square
    y += f * -2.0
    y += exponent * _float32(transform.TWO_LN2_HIGH)
    return _root(y)


def _root(y: Tensor) -> Tensor:
    """The float32 nearest to the square root. torch's own root of a float32 is an ulp off now and then on CPUs."""
    return y.double().sqrt_().float()


def _circle(words: Tensor) -> tuple[Tensor, Tensor]:
    y = (words << 2).to(torch.float32) * 2.0**-31
    z = y * y
    sine = _polynomial(transform.SIN, z)
    sine *= y
    cosine = _polynomial(transform.COS, z)
    odd = (words & (1 << 30)) != 0
    first, second = torch.where(odd, sine, cosine), torch.where(odd, cosine, sine)
    first.view(torch.int32).bitwise_xor_((words ^ (words << 1)) & _SIGN)
    second.view(torch.int32).bitwise_xor_(words & _SIGN)
    return first, second


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule, a rounding after every product and every sum."""
    result = x * _float32(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        result += _float32(coefficient)
        result *= x
    result += _float32(coefficients[0])
    return result
