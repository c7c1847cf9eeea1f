"""The steps of `torch_backend` as fused Triton kernels: each reads and writes every coordinate once.

Import this module only where the package triton is, as torch for CUDA brings it. Arguments, results and the order of
roundings are those of the functions of the same names in `torch_backend`; `out` is float32, bfloat16 or float16 on a
CUDA device, or on the CPU under TRITON_INTERPRET=1.

Rounding. By default Triton lets the compiler contract a product and a sum into a fused multiply-add, and its `sqrt`
and `/` are approximate. Here every launch passes enable_fp_fusion=False, so that products and sums are mul.rn and
add.rn, which the assembler may not contract, and root and quotient are `sqrt_rn` and `div_rn`: IEEE operations, each
rounded by itself. (In old versions of Triton the last two flush subnormals to zero: no root here is one, and a quotient
is with probability 1e-38.) So the bits should be those of the CPU. Under the interpreter that is tested; of the code
compiled for a GPU it is tested that it holds these operations and no others; it has not been run on a GPU.

A program makes _BLOCKS blocks of 16 elements, one to a thread. Only where one of its radii needs further bits
(1 program in 64) does it make the extension blocks too.
"""

# mypy: disable-error-code="misc, no-untyped-def, no-untyped-call, import-not-found, import-untyped, untyped-decorator"
# ruff: noqa: ANN001, ANN202, E741

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from anyorder.errors import ArgumentError
from anyorder.noise import torch_backend, transform
from anyorder.noise.source import NoiseSource
from anyorder.noise.torch_backend import check_out

__all__ = ["banded", "blt", "combination"]

_BLOCKS = 128  # blocks of a program: as many as it has threads
_OUT = (torch.float32, torch.bfloat16, torch.float16)


def _constants(*values: float) -> Any:
    return [tl.constexpr(float(np.float32(value))) for value in values]


L0, L1, L2, L3, L4, L5, L6 = _constants(*transform.LOG)
S0, S1, S2, S3 = _constants(*transform.SIN)
C0, C1, C2, C3 = _constants(*transform.COS)
HIGH, LOW = _constants(transform.TWO_LN2_HIGH, transform.TWO_LN2_LOW)


def combination(
    source: NoiseSource,
    rows: Sequence[int],
    coefficients: Sequence[float],
    std: float,
    start: int,
    out: Tensor,
    scale: float = 1.0,
) -> None:
    """As `torch_backend.combination`; all rows are made in one pass, where they come from one key."""
    _check(out)
    one = source.of_all(rows)
    if one is None:
        torch_backend.combination(source, rows, coefficients, std, start, out, scale)
        return
    row_ids = torch.tensor([int(row) for row in rows], dtype=torch.int64, device=out.device)
    weights = _vector(coefficients, out)
    _launch(_combination, one, out, row_ids, weights, len(row_ids), start, std, scale)


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
    """As `torch_backend.blt`."""
    _check(out, buffers)
    arguments = (_vector(scales, out), _vector(losses, out), len(buffers), buffers, buffers.stride(0))
    _launch(_blt, source.of(row), out, *arguments, row, start, std, scale)


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
    """As `torch_backend.banded`."""
    _check(out, ring)
    arguments = (_vector(coefficients, out), len(coefficients), _rounded(diagonal), ring, len(ring), ring.stride(0))
    _launch(_banded, source.of(row), out, *arguments, row, start, std, scale)


def _check(out: Tensor, state: Tensor | None = None) -> None:
    check_out(out, state)
    if out.dtype not in _OUT:
        raise ArgumentError(f"out must be float32, bfloat16 or float16 for the Triton kernels, got {out.dtype}")


def _rounded(value: float) -> float:
    return float(np.float32(value))


def _vector(values: Sequence[float], out: Tensor) -> Tensor:
    return torch.from_numpy(np.array(values, np.float32)).to(out.device)


def _launch(kernel: Any, source: NoiseSource, out: Tensor, *arguments: Any) -> None:
    """Run the kernel over all blocks that hold an element of out; the last three arguments are start, std and scale."""
    *rest, start, std, scale = arguments
    if not len(out):
        return
    key = torch.from_numpy(np.frombuffer(source.key, "<i4").astype(np.int32)).to(out.device)
    count = -(-(start + len(out)) // 16) - start // 16
    with torch.cuda.device_of(out):
        kernel[(triton.cdiv(count, _BLOCKS),)](
            out, key, *rest, start, len(out), _rounded(std), _rounded(scale),
            ROUNDS=source.rounds, BLOCKS=_BLOCKS, num_warps=_BLOCKS // 32, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # no further compilation for 1 or 16
def _combination(
    out, key, rows, coefficients, num_rows,
    start: tl.int64, size: tl.int64, std: tl.float32, scale: tl.float32,
    ROUNDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    counters, at, inside = _tile(start, size, BLOCKS)
    noise = _normals(key, counters, tl.load(rows), ROUNDS, BLOCKS) * tl.load(coefficients)
    for i in range(1, num_rows):
        noise += _normals(key, counters, tl.load(rows + i), ROUNDS, BLOCKS) * tl.load(coefficients + i)
    _add(out, at, inside, noise * std, scale)


@triton.jit(do_not_specialize=["num_buffers", "row"])  # no further compilation for 1 or 16
def _blt(
    out, key, scales, losses, num_buffers, buffers, stride: tl.int64, row: tl.int64,
    start: tl.int64, size: tl.int64, std: tl.float32, scale: tl.float32,
    ROUNDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    counters, at, inside = _tile(start, size, BLOCKS)
    noise = _normals(key, counters, row, ROUNDS, BLOCKS)
    for i in range(num_buffers):
        noise -= tl.load(buffers + i * stride + at, mask=inside, other=0.0) * tl.load(scales + i)
    for i in range(num_buffers):
        place = buffers + i * stride + at
        buffer = tl.load(place, mask=inside, other=0.0)
        tl.store(place, buffer + (noise - buffer * tl.load(losses + i)), mask=inside)
    _add(out, at, inside, noise * std, scale)


@triton.jit(do_not_specialize=["count", "num_kept", "row"])  # no further compilation for 1 or 16
def _banded(
    out, key, coefficients, count, diagonal: tl.float32, ring, num_kept, stride: tl.int64, row: tl.int64,
    start: tl.int64, size: tl.int64, std: tl.float32, scale: tl.float32,
    ROUNDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    counters, at, inside = _tile(start, size, BLOCKS)
    noise = _normals(key, counters, row, ROUNDS, BLOCKS)
    for i in range(count):
        past = ring + (row - 1 - i) % num_kept * stride + at
        noise -= tl.load(past, mask=inside, other=0.0) * tl.load(coefficients + i)
    noise = tl.div_rn(noise, tl.zeros_like(noise) + diagonal)
    if num_kept > 0:
        tl.store(ring + row % num_kept * stride + at, noise, mask=inside)
    _add(out, at, inside, noise * std, scale)


@triton.jit
def _tile(start, size, BLOCKS: tl.constexpr):
    """Counters (BLOCKS,) of this program; place in out (BLOCKS, 16) of every element, and whether it is one."""
    counters = start // 16 + tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = (counters * 16 - start)[:, None] + tl.arange(0, 16)[None, :]
    return counters, at, (at >= 0) & (at < size)


@triton.jit
def _add(out, at, inside, noise, scale):
    total = (tl.load(out + at, mask=inside, other=0.0).to(tl.float32) + noise) * scale
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normals(key, counters, row, ROUNDS: tl.constexpr, BLOCKS: tl.constexpr):
    """(BLOCKS, 16) float32: element 16 b + j of row in [b, j]."""
    low = counters.to(tl.uint32)
    high = (counters >> 32).to(tl.uint32)
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _blocks(key, low, high, row, ROUNDS)
    radii, angles = _eight(a, b, c, d, e, f, g, h, BLOCKS), _eight(i, j, k, l, m, n, o, p, BLOCKS)
    value = radii.to(tl.float32)
    if tl.max((radii < 65536).to(tl.int32)) > 0:
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _blocks(key, low, high | 0x80000000, row, ROUNDS)
        first = _eight(a, c, e, g, i, k, m, o, BLOCKS).to(tl.float32)
        second = _eight(b, d, f, h, j, l, n, p, BLOCKS).to(tl.float32)
        tail = (second * 2.0**-32 + first) * 2.0**-32 + value
        value = tl.where(radii < 65536, tl.maximum(tail, 2.0**-64), value)
    radius = _radius(radii, value)
    cosine, sine = _circle(angles)
    pairs = tl.join(radius * cosine, radius * sine)  # [b, j, half]
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCKS, 16))


@triton.jit
def _eight(a, b, c, d, e, f, g, h, BLOCKS: tl.constexpr):
    """(BLOCKS, 8): the eight vectors as columns."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (BLOCKS, 8))


@triton.jit
def _radius(words, value):
    bits = value.to(tl.int32, bitcast=True) - 0x4F3504F3
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    near_one = words.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32
    f = tl.where(bits >= 0, near_one, f)
    exponent = (bits >> 23).to(tl.float32)
    square = f * f
    y = (((((f * L6 + L5) * f + L4) * f + L3) * f + L2) * f + L1) * f + L0
    y = y * f
    y = y * square
    y = y + exponent * LOW
    y = y + square
    y = y + f * -2.0
    y = y + exponent * HIGH
    return tl.sqrt_rn(y)


@triton.jit
def _circle(words):
    y = (words << 2).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31
    z = y * y
    sine = (((z * S3 + S2) * z + S1) * z + S0) * y
    cosine = ((z * C3 + C2) * z + C1) * z + C0
    odd = (words & 0x40000000) != 0
    first = tl.where(odd, sine, cosine).to(tl.uint32, bitcast=True) ^ ((words ^ (words << 1)) & 0x80000000)
    second = tl.where(odd, cosine, sine).to(tl.uint32, bitcast=True) ^ (words & 0x80000000)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit
def _blocks(key, low, high, row, ROUNDS: tl.constexpr):
    """The 16 words of each block, as vectors: `chacha.blocks`."""
    zero = low ^ low
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = _word(key, 0, zero), _word(key, 1, zero), _word(key, 2, zero), _word(key, 3, zero)
    s8, s9, s10, s11 = _word(key, 4, zero), _word(key, 5, zero), _word(key, 6, zero), _word(key, 7, zero)
    s14, s15 = zero + row.to(tl.uint32), zero + (row >> 32).to(tl.uint32)
    a0, a1, a2, a3, b0, b1, b2, b3 = s0, s1, s2, s3, s4, s5, s6, s7
    c0, c1, c2, c3, d0, d1, d2, d3 = s8, s9, s10, s11, low, high, s14, s15
    for _ in range(ROUNDS // 2):
        a0, b0, c0, d0 = _quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    return (
        a0 + s0, a1 + s1, a2 + s2, a3 + s3, b0 + s4, b1 + s5, b2 + s6, b3 + s7,
        c0 + s8, c1 + s9, c2 + s10, c3 + s11, d0 + low, d1 + high, d2 + s14, d3 + s15,
    )  # fmt: skip


@triton.jit
def _word(key, i: tl.constexpr, zero):
    return zero + tl.load(key + i).to(tl.uint32, bitcast=True)


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _rotate(d ^ a, 16)
    c += d
    b = _rotate(b ^ c, 12)
    a += b
    d = _rotate(d ^ a, 8)
    c += d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotate(x, left: tl.constexpr):
    return (x << left) | (x >> (32 - left))
