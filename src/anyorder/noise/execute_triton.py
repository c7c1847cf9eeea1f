"""Programs run on a GPU by one Triton kernel, which reads the operations as data: one launch a tensor.

Import this module only where the package triton is, as torch for CUDA brings it.

**Never run on a GPU.** The bits are tested under Triton's interpreter (TRITON_INTERPRET=1), on CPUs, for every strategy
of the laws. Of the code that is compiled for a GPU it is tested that it compiles, without one, and that it holds
the operations below and no others. Its speed is not known.

The kernel holds the tiles of a program in registers and goes through its operations in a loop, so that one compilation
serves all strategies and steps with as many tiles (of ChaCha's rounds and the type of `out`). Each coordinate of an
array is read and written where the program says so.

Rounding. By default Triton lets the compiler contract a product and a sum into a fused multiply-add, and its `sqrt`
and `/` are approximate. Here every launch passes enable_fp_fusion=False, so that products and sums are mul.rn and
add.rn, which the assembler may not contract, and root and quotient are `sqrt_rn` and `div_rn`: IEEE operations, each
rounded by itself. (In old versions of Triton the last two flush subnormals to zero: no root here is one, and a quotient
is with probability 1e-38.) So the bits should be those of the CPU.

A program of Triton's makes _BLOCKS blocks of 16 elements, one to a thread. Only where one of its radii needs further
bits (1 in 64) does it make the extension blocks too. An array that was written may be read by another thread, so that
there is a barrier on both sides of every write.
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
from anyorder.noise import transform
from anyorder.noise.program import NONE, Operation, Program
from anyorder.noise.source import NoiseSource

__all__ = ["MOST_TILES", "run"]

MOST_TILES = 8

_BLOCKS = 128  # blocks of a program: as many as it has threads
_OUT = (torch.float32, torch.bfloat16, torch.float16)
_SUM = NONE - 1  # operand: the result of the operation before
_FIELDS = 7  # of an operation in the table: kind, dst, base, x, bits of c, row, place of its key

# Operations of the kernel. Each leaves its result in the sum, and in `dst` where that is an operand:
#   GAUSS     [base +] Z[row] * c
#   MULTIPLY  [base +] x * c
#   LEAK      x + (base + x * c)
#   DIVIDE    x / c
_GAUSS, _MULTIPLY, _LEAK, _DIVIDE = (tl.constexpr(kind) for kind in range(4))
_NO_OPERAND, _LAST_SUM, _WIDTH = tl.constexpr(NONE), tl.constexpr(_SUM), tl.constexpr(_FIELDS)


def _constants(*values: float) -> Any:
    return [tl.constexpr(float(np.float32(value))) for value in values]


L0, L1, L2, L3, L4, L5, L6 = _constants(*transform.LOG)
S0, S1, S2, S3 = _constants(*transform.SIN)
C0, C1, C2, C3 = _constants(*transform.COS)
HIGH, LOW = _constants(transform.TWO_LN2_HIGH, transform.TWO_LN2_LOW)


def run(
    program: Program, source: NoiseSource, arrays: Sequence[Tensor], start: int, outs: Sequence[Tensor], std: float,
    scale: float,
) -> None:  # fmt: skip
    """Write (out + noise * std) * scale to outs, and the arrays, as `execute_torch.run`.

    Args:
        program: the step; of at most MOST_TILES tiles.
        source, arrays, start, std, scale: as there.
        outs: float32, bfloat16 or float16, on a CUDA device, or on the CPU under TRITON_INTERPRET=1.
    Guarantee: under the interpreter the bits of `Strategy.step` (bfloat16 is cut there, not rounded). On a GPU this was
        never run.
    """
    if program.num_tiles > MOST_TILES:
        raise ArgumentError(f"the Triton kernel takes programs of at most {MOST_TILES} tiles, got {program.num_tiles}")
    for out in outs:
        if out.dtype not in _OUT:
            raise ArgumentError(f"out must be float32, bfloat16 or float16 for the Triton kernel, got {out.dtype}")
    table, first_op, num_ops = _table(program, source, arrays)
    uploaded, low = torch.from_numpy(table).to(outs[0].device), 0
    for out in outs:
        if len(out):
            count = -(-(start + low + len(out)) // 16) - (start + low) // 16
            with torch.cuda.device_of(out):
                _run[(triton.cdiv(count, _BLOCKS),)](
                    out, uploaded, first_op, num_ops, program.result, low, start + low, len(out),
                    float(np.float32(std)), float(np.float32(scale)),
                    TILES=program.num_tiles, ROUNDS=source.rounds, BLOCKS=_BLOCKS,
                    num_warps=_BLOCKS // 32, enable_fp_fusion=False,
                )  # fmt: skip
        low += len(out)


def _table(program: Program, source: NoiseSource, arrays: Sequence[Tensor]) -> tuple[Any, int, int]:
    """Int64 numbers: addresses of the arrays, keys, operations; where the operations begin, and how many they are."""
    addresses = [array.data_ptr() for array in arrays]
    places: dict[bytes, int] = {}
    keys: list[int] = []

    def key_of(row: int) -> int:
        one = source.of(row)
        if one.key not in places:
            places[one.key] = len(addresses) + len(keys)
            keys.extend(one.key_words.tolist())
        return places[one.key]

    terms = program.terms.tolist()
    ops: list[tuple[int, ...]] = []
    for kind, dst, a, b, c, count, at in program.ops.tolist():
        if kind == Operation.GAUSS:
            ops.append((_GAUSS.value, dst, a, NONE, _bits(c), at, key_of(at)))
        elif kind == Operation.LINEAR and count:
            parts = terms[at : at + count]
            for i, (x, factor) in enumerate(parts, start=1):
                ops.append(
                    (_MULTIPLY.value, dst if i == count else NONE, a if i == 1 else _SUM, x, _bits(factor), 0, 0)
                )
        elif kind == Operation.LINEAR:
            ops.append((_MULTIPLY.value, dst, NONE, a, _bits(1.0), 0, 0))  # no operand is zeros
        elif kind == Operation.LEAK:
            ops.append((_LEAK.value, dst, b, a, _bits(c), 0, 0))
        elif kind == Operation.DIVIDE:
            ops.append((_DIVIDE.value, dst, NONE, a, _bits(c), 0, 0))
        else:
            raise AssertionError(kind)
    flat = [number for op in ops for number in op]
    return np.array([*addresses, *keys, *flat], np.int64), len(addresses) + len(keys), len(ops)


def _bits(c: float) -> int:
    return int(np.float32(c).view(np.int32))


_INTEGERS = ["first_op", "num_ops", "result", "low"]  # no further compilation for 1 or 16


@triton.jit(do_not_specialize=_INTEGERS)
def _run(
    out, table, first_op, num_ops, result, low: tl.int64, start: tl.int64, size: tl.int64, std: tl.float32,
    scale: tl.float32, TILES: tl.constexpr, ROUNDS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    counters, at, inside = _tile(start, size, BLOCKS)
    here = low + at  # in the arrays
    total = tl.zeros((BLOCKS, 16), tl.float32)
    t0, t1, t2, t3, t4, t5, t6, t7 = total, total, total, total, total, total, total, total
    for i in range(num_ops):
        op = table + first_op + i * _WIDTH
        kind, dst, base = tl.load(op), tl.load(op + 1), tl.load(op + 2)
        c = tl.load(op + 4).to(tl.int32).to(tl.float32, bitcast=True)
        if kind == _GAUSS:
            x = _normals(table + tl.load(op + 6), counters, tl.load(op + 5), ROUNDS, BLOCKS)
        else:
            x = _read(table, tl.load(op + 3), here, inside, total, t0, t1, t2, t3, t4, t5, t6, t7, TILES)
        if kind == _DIVIDE:
            total = tl.div_rn(x, tl.zeros_like(x) + c)
        elif base == _NO_OPERAND:
            total = x * c
        else:
            total = _read(table, base, here, inside, total, t0, t1, t2, t3, t4, t5, t6, t7, TILES) + x * c
            if kind == _LEAK:
                total = x + total
        if dst < 0:
            tl.debug_barrier()
            tl.store(_array(table, dst) + here, total, mask=inside)
            tl.debug_barrier()
        t0 = tl.where(dst == 0, total, t0)
        if TILES > 1:
            t1 = tl.where(dst == 1, total, t1)
        if TILES > 2:
            t2 = tl.where(dst == 2, total, t2)
        if TILES > 3:
            t3 = tl.where(dst == 3, total, t3)
        if TILES > 4:
            t4 = tl.where(dst == 4, total, t4)
        if TILES > 5:
            t5 = tl.where(dst == 5, total, t5)
        if TILES > 6:
            t6 = tl.where(dst == 6, total, t6)
        if TILES > 7:
            t7 = tl.where(dst == 7, total, t7)
    noise = _read(table, result, here, inside, total, t0, t1, t2, t3, t4, t5, t6, t7, TILES)
    _add(out, at, inside, noise * std, scale)


@triton.jit
def _array(table, operand):
    return tl.load(table + (-1 - operand)).to(tl.pointer_type(tl.float32))


@triton.jit
def _read(table, operand, here, inside, total, t0, t1, t2, t3, t4, t5, t6, t7, TILES: tl.constexpr):
    """An operand: an array, a tile, the last sum, or zeros where there is none."""
    value = tl.zeros_like(total)
    if operand < 0:
        value = tl.load(_array(table, operand) + here, mask=inside, other=0.0)
    else:
        value = tl.where(operand == _LAST_SUM, total, value)
        value = tl.where(operand == 0, t0, value)
        if TILES > 1:
            value = tl.where(operand == 1, t1, value)
        if TILES > 2:
            value = tl.where(operand == 2, t2, value)
        if TILES > 3:
            value = tl.where(operand == 3, t3, value)
        if TILES > 4:
            value = tl.where(operand == 4, t4, value)
        if TILES > 5:
            value = tl.where(operand == 5, t5, value)
        if TILES > 6:
            value = tl.where(operand == 6, t6, value)
        if TILES > 7:
            value = tl.where(operand == 7, t7, value)
    return value


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
    return zero + tl.load(key + i).to(tl.uint32)


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
