"""Norms of every unit's gradient from what its layers saw, and the weighted sum that follows them.

The per-example gradient of a linear map is sum_t g_t (x) a_t. Its norm needs no gradient [Goodfellow 2015; Li et al.
2022, section 4; Bu et al. 2023]:

    || sum_t g_t (x) a_t ||^2  =  sum_{s,t} <a_s, a_t> <g_s, g_t>,      which is |a|^2 |g|^2 for one position,

at T^2 (in + out) multiplications in the place of T in out. Whichever is cheaper is taken for each parameter.

Rounding. u is the unit roundoff, S = sum_t |a_t| |g_t|. A dot product of n numbers, in whatever order, is off by at
most n u |x| |y| (1 + O(n u)) [Higham 2002, eq. 3.5], so that the double sum is off by at most (in + out) u S^2 (1 +
O(u)) however much its terms cancel; S comes from the diagonals. Products over long vectors are cut into pieces of
PIECE and these are added in float64, so that n <= PIECE. A gradient that is made and dropped is off by (T + 2) u S in
norm. Each norm here is the computed one plus such a bound, times SPARE for the terms of higher order; a weight
times a or g, rounded, moves a unit by at most u S more. So a weighted sum holds, in exact arithmetic, at most the norm
that is stated, times the weight, of each unit. Where the gradients themselves are kept and summed, nothing is to add.

Underflow. The product of g and a weight, and that of the result and a, is off by up to d more, the smallest normal
number (2^-126 in float32), whether or not what is below it is kept. So rows of g are off by d sqrt(out), the unit by

    d T sqrt(in out) (max|a| + 1),

and likewise with g for a where a is weighted. In float32 with max|a| <= LARGE = 2^30 this is, over all parameters,
below 2^-24 clip_norm for every clip_norm >= 2^-71 (sum over parameters of T sqrt(in out)), 1e-11 for a sum of 2^34.
That is within what clip_norm is lowered by before factors are taken, 2^-21 clip_norm. (`Adaptive` cuts at 2^-37 or
more.) With a larger a the sum is made in float64, whose d is 2^-1022: it takes the a of a model in float64, above
2^800, to see that.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import fsum, isclose, isfinite, prod
from types import MappingProxyType
from typing import Any, Protocol, Self, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyorder import checks
from anyorder.checks import final
from anyorder.clipping import native
from anyorder.clipping import torch_private as private
from anyorder.errors import ArgumentError
from anyorder.release.schedules import Adaptive, FixedNorm, Schedule

# -- sums and squares ------------------------------------------------------------------------------------------------

BLOCK = 2**20
"""Numbers in an intermediate tensor, so that it stays in the cache."""


ROWS = 2**12  # terms of a weighted sum that are added up in float32 at a time; such pieces are added in float64
SHORT_PIECE = 64
SMALL = 2**15  # numbers that are fast in float64
LARGE = 2.0**30  # what multiplies a weighted tensor in float32 at most; so what underflows in that cannot be seen


def squares_of(rows: Tensor) -> Tensor:
    """(n,) float64, the squared norms of (n, m) or a little more, never less.

    The compiled library adds float32 on a CPU in float64. Without it such numbers are added in pieces of
    SHORT_PIECE, which errs by a factor of at most 1 + (SHORT_PIECE + 3) u and, by underflow, by the smallest normal
    number for each element; the pieces are added in float64, as is all else.
    """
    if rows.dtype == torch.float64 or rows.device.type != "cpu":
        square: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
        # In float64 squares may be lost below the smallest number; those of float32 are not.
        return square + rows.shape[1] * torch.finfo(torch.float64).tiny if rows.dtype == torch.float64 else square
    m = rows.shape[1]
    if rows.dtype == torch.float32 and rows.stride(1) == 1 and native.available():
        return native.squares(rows)
    if rows.numel() <= SMALL:
        return rows.double().square_().sum(1)
    whole = m - m % SHORT_PIECE
    parts = [rows[:, :whole].reshape(len(rows), -1, SHORT_PIECE)] if whole else []
    parts += [rows[:, None, whole:]] if whole < m else []
    square = rows.new_zeros(len(rows), dtype=torch.float64)
    for part in parts:
        square += torch.linalg.vector_norm(part, dim=2).double().square_().sum(1)
    info = torch.finfo(rows.dtype)
    square = square * (1 + SHORT_PIECE * info.eps) + m * info.tiny
    if not bool(square.isfinite().all()):  # squares overflow before their roots do
        size = max(1, BLOCK // max(1, m))
        return torch.cat([rows[i : i + size].double().square_().sum(1) for i in range(0, len(rows), size)])
    return square


def outer_sum(g: Tensor, a: Tensor) -> Tensor:
    """(m, n), the sum over rows of g (x) a, of (rows, m) and (rows, n)."""
    if len(g) <= ROWS or g.dtype == torch.float64:
        return g.mT @ a
    result = g.new_zeros(g.shape[1], a.shape[1], dtype=torch.float64)
    for i in range(0, len(g), ROWS):
        result += g[i : i + ROWS].mT @ a[i : i + ROWS]
    return result.to(g.dtype)


def has_large(tensor: Tensor) -> bool:
    """Whether a float32 tensor has numbers above LARGE."""
    if tensor.dtype == torch.float64 or not tensor.numel():
        return False
    low, high = torch.aminmax(tensor)
    return bool(torch.maximum(-low, high).item() > LARGE)


def cleared(tensor: Tensor, rows: Tensor) -> Tensor:
    """A copy of (B, ...) with zeros in some rows, (B,) bool."""
    return tensor.masked_fill(rows.view(-1, *(1 for _ in tensor.shape[1:])), 0)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """The sum of one tensor or more."""
    result = tensors[0]
    for other in tensors[1:]:
        result = result + other
    return result


# -- the units of a batch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitMap:
    """Which unit each example of a batch belongs to.

    Attributes:
        index: (B,) int64 on the examples' device, units 0, .., U - 1.
        count: U.
        classes: None where each example is a unit, and example i is unit i; else pairs (units (u,), members (u, m)):
            units of similar size and their examples, -1 where a unit has fewer than m.
    """

    index: Tensor
    count: int
    classes: tuple[tuple[Tensor, Tensor], ...] | None

    @classmethod
    def of(cls, groups: Tensor, device: torch.device) -> "UnitMap":
        """The units of (B,) groups."""
        groups = groups.cpu()
        size = groups.shape[0]
        if groups is _each_alone(size, groups.device).index or len(set(groups.tolist())) == size:
            return _each_alone(size, device)  # as most batches come: nothing to sort
        _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        order = torch.argsort(index, stable=True)
        first = sizes.cumsum(0) - sizes
        # Sizes are rounded up to a power of two, so that padding at most doubles the work.
        widths = torch.pow(2, (sizes - 1).clamp(min=0).double().log2().floor().clamp(min=-1) + 1).long()
        widths = torch.where(sizes == 1, 1, widths)
        classes = []
        for width in widths.unique().tolist():  # type: ignore[no-untyped-call]
            units = (widths == width).nonzero()[:, 0]
            place = torch.arange(width)
            inside = place < sizes[units, None]
            members = torch.where(inside, order[(first[units, None] + place).clamp(max=len(order) - 1)], -1)
            classes.append((units.to(device), members.to(device)))
        return cls(index.to(device), len(sizes), tuple(classes))

    @staticmethod
    @lru_cache(64)
    def alone(size: int) -> Tensor:
        """(size,) groups on the CPU, each example a unit: one tensor for all batches of a size, which `of` knows."""
        return _each_alone(size, _CPU).index

    @property
    def largest(self) -> int:
        """The largest m: 1 where each example is a unit."""
        return 1 if self.classes is None else max(members.shape[1] for _, members in self.classes)

    def blocks(self, size: int) -> Iterator[tuple[slice | Tensor, slice | Tensor]]:
        """(units, members) of at most `size` units each; members is a slice where each example is a unit."""
        if self.classes is None:
            yield from ((slice(i, i + size), slice(i, i + size)) for i in range(0, self.count, size))
            return
        for units, members in self.classes:
            yield from ((units[i : i + size], members[i : i + size]) for i in range(0, len(units), size))

    def sum(self, values: Tensor) -> Tensor:
        """(U, ...) sums over the examples of each unit, of (B, ...)."""
        if self.classes is None:
            return values
        return values.new_zeros(self.count, *values.shape[1:]).index_add_(0, self.index, values)


_CPU = torch.device("cpu")


@lru_cache(64)
def _each_alone(size: int, device: torch.device) -> UnitMap:
    return UnitMap(torch.arange(size, device=device), size, None)


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """float32 products in float32: TF32 and bfloat16 would round the factors, and so move a unit over its bound."""
    products, convolutions = _KERNELS["cuda" if device.type == "cuda" else "cpu"]
    exact = products.fp32_precision in _FULL and convolutions.fp32_precision in _FULL
    if not exact or torch.is_autocast_enabled(device.type):
        reduced = [one for one in (products, convolutions) if one.fp32_precision not in _FULL]
        return _in_full_precision(device, reduced)
    return _AS_IT_IS


_FULL = ("ieee", "none")  # none: where nothing was chosen
_AS_IT_IS = nullcontext()


class _Legacy:
    """The settings of older versions of torch in the form of the newer ones."""

    @property
    def fp32_precision(self) -> Any:
        precise = torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
        return "ieee" if precise else (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)

    @fp32_precision.setter
    def fp32_precision(self, value: Any) -> None:
        matmul, tf32 = ("highest", False) if value == "ieee" else value
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32


_LEGACY = not hasattr(torch.backends.cuda.matmul, "fp32_precision")  # before torch 2.9
_KERNELS: dict[str, tuple[Any, ...]] = (
    {"cuda": (_Legacy(), _Legacy()), "cpu": (_Legacy(), _Legacy())}
    if _LEGACY
    else {
        "cuda": (torch.backends.cuda.matmul, torch.backends.cudnn.conv),  # type: ignore[attr-defined]
        "cpu": (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv),  # type: ignore[attr-defined]
    }
)


@contextmanager
def _in_full_precision(device: torch.device, reduced: list[Any]) -> Iterator[None]:
    before = [kernels.fp32_precision for kernels in reduced]
    try:
        for kernels in reduced:
            kernels.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for kernels, precision in zip(reduced, before, strict=True):
            kernels.fp32_precision = precision


# -- what backward tells of one use of a parameter -------------------------------------------------------------------

Rows = slice | Tensor
"""Some examples of the batch: a slice, or (b,) indices."""


POSITIONS, CHANNELS = 128, 16  # from where on a convolution with the examples as groups beats a product of patches


class Use(ABC):
    """One use of a parameter of shape `shape` by a batch of B examples.

    The tensors that it holds are those of the forward and backward pass, in their dtype; what it returns is in
    `dtype`, float32 or float64.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def gradients(self, rows: Rows) -> Tensor:
        """(b, *shape), the gradients of some examples."""

    @abstractmethod
    def lengths(self, rows: Rows) -> Tensor:
        """(b, n) float64, the norms of the terms that add up to each gradient."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """(*shape), the sum over examples of weights[i] times the gradient of example i; weights (B,) in `dtype`."""

    @abstractmethod
    def without(self, examples: Tensor) -> Self:
        """The use with zeros in the place of what it holds of some examples, (B,) bool: a weight of 0 leaves NaN."""

    def versions(self) -> list[int]:
        """How often each tensor that it holds was written: a norm is of these values, and so must the sum be."""
        return [private.version(tensor) for tensor in self.held()]

    @abstractmethod
    def held(self) -> tuple[Tensor, ...]:
        """The tensors of the passes."""

    def rows(self) -> tuple[Tensor | None, Tensor] | None:
        """(a, g) such that the gradient of example i is g_i (x) a_i, or g_i where a is None: for `native.clip`."""
        return None


def _are_rows(tensor: Tensor) -> bool:
    """Whether each row of a matrix is one run of float32."""
    return tensor.dtype == torch.float32 and (tensor.stride(1) == 1 or tensor.shape[1] == 1)


@dataclass
class DirectUse(Use):
    """The gradients themselves: values (B, *shape)."""

    values: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.shape = self.values.shape[1:]

    def held(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def rows(self) -> tuple[None, Tensor] | None:
        """The gradients."""
        g = self.values.reshape(len(self.values), -1)
        return (None, g) if len(g) <= ROWS and _are_rows(g) else None

    def gradients(self, rows: Rows) -> Tensor:
        return self.values[rows].to(self.dtype)

    def lengths(self, rows: Rows) -> Tensor:
        return squares_of((g := self.gradients(rows)).reshape(len(g), -1)).sqrt()[:, None]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return (weights @ self.values.reshape(len(self.values), -1).to(self.dtype)).view(self.shape)

    def without(self, examples: Tensor) -> Self:
        return replace(self, values=cleared(self.values, examples))


class FactoredUse(Use):
    """A linear map of G groups, applied at T positions of each example.

        gradient of example i, group c  =  sum over positions t of  g[i, c, t] (x) a[i, c, t],     (out, in)

    Attributes:
        groups, positions, inputs, outputs: G, T, in, out.
        batch: B.
        unfolds: whether `factors` computes the activations, rather than handing out what was saved.
        grouped: whether `gradients` is faster than a product of `factors`.
    """

    groups: int
    positions: int
    inputs: int
    outputs: int
    batch: int
    unfolds: bool
    grouped: bool = False

    @abstractmethod
    def factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Activations (b, G, T, in) and output gradients (b, G, T, out)."""

    @abstractmethod
    def shaped(self, gradient: Tensor) -> Tensor:
        """(..., G, out, in) in the shape of the parameter, (..., *shape)."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """How many terms g (x) a `weighted_sum` adds up at a time in `dtype`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what it holds."""

    def gradients(self, rows: Rows) -> Tensor:
        a, g = self.factors(rows)
        return self.shaped(g.mT @ a)

    def lengths(self, rows: Rows) -> Tensor:
        a, g = self.factors(rows)
        return (squares_of(a.flatten(0, 2)) * squares_of(g.flatten(0, 2))).sqrt().view(len(a), -1)


@dataclass
class LinearUse(FactoredUse):
    """y = x W^T: activations (B, T, in) and output gradients (B, T, out) of a weight (out, in)."""

    activations: Tensor
    output_gradients: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.batch, self.positions, self.inputs = self.activations.shape
        self.outputs, self.groups, self.unfolds = self.output_gradients.shape[2], 1, False
        self.shape = torch.Size((self.outputs, self.inputs))

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Of one position, and not so large that a product of matrices is faster."""
        if self.positions > 1 or self.batch > ROWS or self.batch * self.inputs * self.outputs > BLOCK:
            return None
        a, g = self.activations.flatten(1), self.output_gradients.flatten(1)
        return (a, g) if _are_rows(a) and _are_rows(g) else None

    def held(self) -> tuple[Tensor, ...]:
        return self.activations, self.output_gradients

    def factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        a, g = self.activations[rows].to(self.dtype), self.output_gradients[rows].to(self.dtype)
        return a.unsqueeze(1), g.unsqueeze(1)

    def shaped(self, gradient: Tensor) -> Tensor:
        return gradient.squeeze(-3)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        a, g = self.activations.to(self.dtype), self.output_gradients.to(self.dtype)
        by_input = self.inputs < self.outputs  # the smaller one is the cheaper to copy
        if has_large(g if by_input else a):
            return replace(self, dtype=torch.float64).weighted_sum(weights.double()).to(self.dtype)
        weights = weights[:, None, None]
        a, g = (a * weights, g) if by_input else (a, g * weights)
        return outer_sum(g.flatten(0, 1), a.flatten(0, 1))

    def without(self, examples: Tensor) -> Self:
        a, g = (cleared(t, examples) for t in (self.activations, self.output_gradients))
        return replace(self, activations=a, output_gradients=g)

    @property
    def terms(self) -> int:
        rows = self.batch * self.positions
        return rows if self.dtype == torch.float64 else min(ROWS, rows)

    @property
    def nbytes(self) -> int:
        return self.activations.nbytes + self.output_gradients.nbytes


@dataclass(frozen=True)
class Geometry:
    """The settings of a convolution; `padding` is in front of and behind each dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def patches(self, x: Tensor) -> Tensor:
        """(N, *out, C, *kernel), a view of the padded (N, *size, C)."""
        x = F.pad(x, [0, 0, *(p for p in reversed(self.padding) for _ in range(2))]) if any(self.padding) else x
        for dim, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True), start=1):
            x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
        return x


@dataclass
class ConvolutionUse(FactoredUse):
    """A convolution: its inputs (B n, C, *size), n images for each example, and output gradients (B n, out, *out).

    A kernel is a linear map of the patch that it sees. Channels come last in a patch, so that runs of memory are
    copied.

    Attributes:
        compiled: whether `normed_gradients` can be called.
    """

    x: Tensor
    output_gradients: Tensor
    geometry: Geometry
    batch: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        geometry, self.groups = self.geometry, self.geometry.groups
        channels, out = self.x.shape[1] // self.groups, self.output_gradients.shape[1]
        self.positions = self.x.shape[0] // self.batch * prod(self.output_gradients.shape[2:])
        self.inputs, self.outputs, self.unfolds = channels * prod(geometry.kernel), out // self.groups, True
        self.shape = torch.Size((out, channels, *geometry.kernel))
        alone = self.x.shape[0] == self.batch and self.dtype == torch.float32 and self.x.device.type == "cpu"
        self.compiled = (
            alone
            and len(geometry.kernel) == 2
            and geometry.dilation[1] == self.groups == 1
            and self.output_gradients.numel() > 0
            and native.available()
        )
        self.grouped = (
            alone
            and self.positions >= POSITIONS
            and min(channels, self.outputs) >= CHANNELS
            and bool(torch.backends.mkldnn.enabled)
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        )

    def held(self) -> tuple[Tensor, ...]:
        return self.x, self.output_gradients

    def factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        x, g = (_by_example(t, self.batch)[rows].to(self.dtype) for t in (self.x, self.output_gradients))
        b, images, d = len(g), g.shape[1], len(self.geometry.kernel)
        patches = self.geometry.patches(x.flatten(0, 1).movedim(1, -1).contiguous())
        shape = b, images, *patches.shape[1 : 1 + d], self.groups, -1, *self.geometry.kernel
        patches = patches.view(shape)
        # (b, images, *out, G, C, *kernel) to (b, G, images, *out, *kernel, C)
        order = 0, 2 + d, *range(1, 2 + d), *range(4 + d, 4 + 2 * d), 3 + d
        a = patches.permute(order).reshape(b, self.groups, self.positions, self.inputs)
        g = g.reshape(b, images, self.groups, self.outputs, -1)
        g = g[:, 0].mT if images == 1 else g.permute(0, 2, 1, 4, 3).reshape(b, self.groups, self.positions, -1)
        return a, g

    def normed_gradients(self) -> tuple[Tensor, Tensor]:
        """(B, *kernel, C, out), the gradients, and (B,) float64, their squared norms."""
        x, g = self.x.to(self.dtype), self.output_gradients.to(self.dtype)
        (kernel_h, kernel_w), (stride_h, stride_w) = self.geometry.kernel, self.geometry.stride
        padding_h, padding_w = self.geometry.padding
        return native.convolution(
            x, g, (kernel_h, kernel_w), (stride_h, stride_w), (padding_h, padding_w), self.geometry.dilation[0]
        )

    def gradients(self, rows: Rows) -> Tensor:
        """By oneDNN where it is fast: one convolution with the examples as groups, and nothing is unfolded."""
        if not self.grouped:
            return super().gradients(rows)
        x, g = (t[rows].to(self.dtype) for t in (self.x, self.output_gradients))
        images, gradients = (t.reshape(1, -1, *t.shape[2:]) for t in (x, g))
        return self._sum(gradients, images, len(x)).view(len(x), *self.shape)

    def shaped(self, gradient: Tensor) -> Tensor:
        lead = gradient.dim() - 3
        split = gradient.reshape(*gradient.shape[:lead], -1, *self.geometry.kernel, self.shape[1])
        return split.movedim(-1, lead + 1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        x = self.x.to(self.dtype)
        if has_large(x):
            return replace(self, dtype=torch.float64).weighted_sum(weights.double()).to(self.dtype)
        g = _by_example(self.output_gradients.to(self.dtype), self.batch)
        g = (g * weights.view(-1, *(1 for _ in g.shape[1:]))).flatten(0, 1)
        pieces = [slice(i, i + self._images) for i in range(0, len(g), self._images)]
        sums = (self._sum(g[piece], x[piece]) for piece in pieces)
        if len(pieces) == 1:
            return next(sums)
        result = x.new_zeros(self.shape, dtype=torch.float64)
        for part in sums:
            result += part
        return result.to(self.dtype)

    def without(self, examples: Tensor) -> Self:
        images = examples.repeat_interleave(len(self.x) // self.batch)
        return replace(self, x=cleared(self.x, images), output_gradients=cleared(self.output_gradients, images))

    def _sum(self, g: Tensor, x: Tensor, times: int = 1) -> Tensor:
        """The weight's gradient (times out, C, *kernel), of `times` as many groups as the convolution has."""
        geometry = self.geometry
        weight = x.new_empty(times * self.shape[0], *self.shape[1:])
        result: Tensor = torch.ops.aten.convolution_backward(
            g, x, weight, None, geometry.stride, geometry.padding, geometry.dilation, False,
            [0] * len(geometry.kernel), times * geometry.groups, (False, True, False),
        )[1]  # fmt: skip
        return result

    @property
    def _images(self) -> int:
        """Images whose terms are added up at a time."""
        places = prod(self.output_gradients.shape[2:])
        return len(self.x) if self.dtype == torch.float64 else min(len(self.x), max(1, ROWS // max(1, places)))

    @property
    def terms(self) -> int:
        return self._images * prod(self.output_gradients.shape[2:])

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.output_gradients.nbytes


def _by_example(images: Tensor, batch: int) -> Tensor:
    """(B, n, ...) of (B n, ...), a view."""
    return images.view(batch, -1, *images.shape[1:])


@dataclass
class EmbeddingUse(Use):
    """A table of V rows read at ids (B, T): what came back to each, (B, T, D); row `padding` gets no gradient."""

    ids: Tensor
    output_gradients: Tensor
    size: int
    padding: int | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.shape = torch.Size((self.size, self.output_gradients.shape[2]))
        if self.padding is not None:
            self.output_gradients = self.output_gradients.masked_fill((self.ids == self.padding)[..., None], 0)

    def held(self) -> tuple[Tensor, ...]:
        return self.ids, self.output_gradients

    def lookups(self) -> tuple[Tensor, Tensor] | None:
        """Ids and what came back, where the compiled library takes them."""
        g = self.output_gradients
        return (self.ids, g) if self.padding is None and g.dtype == torch.float32 and self.ids.numel() else None

    def gradients(self, rows: Rows) -> Tensor:
        ids, g = self.ids[rows], self.output_gradients[rows].to(self.dtype)
        offset = torch.arange(len(ids), device=ids.device)[:, None] * self.size
        table = g.new_zeros(len(ids) * self.size, g.shape[2])
        return table.index_add_(0, (ids + offset).flatten(), g.flatten(0, 1)).view(len(ids), *self.shape)

    def lengths(self, rows: Rows) -> Tensor:
        g = self.output_gradients[rows].to(self.dtype)
        return squares_of(g.flatten(0, 1)).sqrt().view(g.shape[:2])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = self.output_gradients.to(self.dtype) * weights[:, None, None]
        return g.new_zeros(self.shape).index_add_(0, self.ids.flatten(), g.flatten(0, 1))

    def without(self, examples: Tensor) -> Self:
        return replace(self, output_gradients=cleared(self.output_gradients, examples))


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def accumulator_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """`accumulator_dtype` of each."""
    result = {}
    for name, tensor in tensors.items():
        result[name] = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return result


def round_down(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 factors in dtype, never further from 0 than they were."""
    if factors.dtype == dtype:
        return factors
    rounded = factors.to(dtype)
    if rounded.dtype == torch.float32 and rounded.device.type == "cpu":  # the same, in fewer calls
        near = rounded.detach().numpy()
        np.nextafter(near, np.float32(0), out=near, where=np.abs(near) > np.abs(factors.detach().numpy()))
        return rounded
    above = rounded.abs() > factors.abs()  # compared in float64
    return torch.where(above, torch.nextafter(rounded, rounded.new_zeros(())), rounded)


def sums_of(coordinates: dict[str, Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """The sums over units of a schedule's own coordinates, in the widest of the parameters' dtypes."""
    dtype = torch.float64 if torch.float64 in dtypes.values() else torch.float32
    return {name: round_down(values, dtype).sum() for name, values in coordinates.items()}


# -- norms, and the weighted sum -------------------------------------------------------------------------------------

PIECE = 512  # numbers in a dot product that runs in the accumulator's precision
SPARE = 1.01  # for the terms of higher order in u
LOOSE = 1.01  # ratio of a squared norm's bound to what was computed, above which it is computed in float64
EXAMPLES = 16  # whose gradients are made at a time where a convolution makes them
STORE_BYTES = 2**26  # of a parameter's per-unit gradients that may be kept


@dataclass(frozen=True)
class Weights:
    """What the gradients are multiplied by in their sum.

    Attributes:
        by_unit: (U,).
        by_example: (B,), that of each example's unit.
        left_out: None, or which units (U,) and which examples (B,), bool, add exactly zero whatever is held of them:
            a weight of 0 would leave NaN.
    """

    by_unit: Tensor
    by_example: Tensor
    left_out: tuple[Tensor, Tensor] | None = None

    def sum_of_units(self, rows: Tensor) -> Tensor:
        """The weighted sum (n,) of the units' rows (U, n). No term is above what the weights bound it to."""
        return self.by_unit @ (rows if self.left_out is None else cleared(rows, self.left_out[0]))

    def add_rows(self, rows: Tensor, owner: Tensor, ids: Tensor, to: Tensor) -> Tensor:
        """`to` (V, n), plus rows (K, n) of the units `owner` (K,) times their weights, at `ids` (K,)."""
        rows = rows if self.left_out is None else cleared(rows, self.left_out[0][owner])
        return to.index_add_(0, ids, rows * self.by_unit.index_select(0, owner).unsqueeze(1))

    def sum_of_uses(self, uses: Sequence[Use]) -> Tensor:
        """The weighted sum (*shape) of the examples' gradients by all uses."""
        if self.left_out is not None:
            uses = [use.without(self.left_out[1]) for use in uses]
        result = uses[0].weighted_sum(self.by_example)
        for use in uses[1:]:
            result = result + use.weighted_sum(self.by_example)
        if result.dtype == torch.float64 or isfinite(float(result.sum())):
            return result
        # All terms are finite, and so is what each unit adds; but a weight times one factor of a term may be too
        # large for float32, and so may terms that cancel.
        wide = [replace(use, dtype=torch.float64) for use in uses]  # type: ignore[type-var]
        return sum_of([use.weighted_sum(self.by_example.double()) for use in wide]).to(result.dtype)


@dataclass(frozen=True)
class RowsRead:
    """Which units read which rows of a table: K pairs, of R rows.

    Attributes:
        owner: (K,) the unit.
        place: (K,) the row, as its place in `distinct`; the units of a row ascend.
        distinct: (R,) the rows, ascending.
    """

    owner: Tensor
    place: Tensor
    distinct: Tensor


@dataclass(frozen=True)
class Settled:
    """A parameter whose per-unit norms are known.

    Attributes:
        squares: (U,) float64, not below the squared norm of what a unit adds to `total` with weights of 1.
        total: the weighted sum, (*shape).
        kept: (U, *shape), the units' gradients, where they are kept.
        rows: of a table whose sum is sparse, which units read which rows.
    """

    squares: Tensor
    total: Callable[[Weights], Tensor]
    kept: Tensor | None = None
    rows: RowsRead | None = None

    @classmethod
    def keep(cls, gradients: Tensor, squares: Tensor | None = None) -> "Settled":
        """From the units' gradients themselves, (U, *shape), and their squared norms if known."""
        flat = gradients.reshape(len(gradients), -1)
        squares = squares_of(flat) if squares is None else squares
        return cls(squares, lambda weights: weights.sum_of_units(flat).view(gradients.shape[1:]), gradients)


def settle(uses: Sequence[Use], units: UnitMap) -> Settled:
    """Norms and sum of the gradient that all uses of one parameter have together."""
    if len(uses) == 1:  # as nearly all parameters are used
        (use,) = uses
        if isinstance(use, DirectUse):
            return Settled.keep(units.sum(use.values.to(use.dtype)))
        if isinstance(use, FactoredUse):
            return _settle_factored([use], units)
    direct = [use for use in uses if isinstance(use, DirectUse)]
    if len(direct) == len(uses):
        return Settled.keep(sum_of([units.sum(use.values.to(use.dtype)) for use in direct]))
    factored = [use for use in uses if isinstance(use, FactoredUse)]
    tables = [use for use in uses if isinstance(use, EmbeddingUse)]
    if len(factored) == len(uses):
        return _settle_factored(factored, units)
    if len(tables) == len(uses):
        return _settle_tables(tables, units)
    linear = [use for use in factored if isinstance(use, LinearUse)]
    if len(linear) + len(tables) == len(uses) and _gram_is_cheaper(linear, units):
        return _settle_tied(linear, tables, units)
    return _settle_any(uses, units)


# -- linear maps -----------------------------------------------------------------------------------------------------


def _settle_factored(uses: Sequence[FactoredUse], units: UnitMap) -> Settled:
    first = uses[0]
    if isinstance(first, LinearUse) and len(uses) == first.positions == units.largest == 1:
        a, g = squares_of(first.activations.flatten(1).to(first.dtype)), first.output_gradients.flatten(1)
        return Settled(a * squares_of(g.to(first.dtype)), lambda weights: weights.sum_of_uses([first]))
    alone = len(uses) == 1 and units.classes is None and _keeping_is_cheaper(uses, units)
    if alone and isinstance(first, ConvolutionUse) and first.compiled:
        return _made_by_library(first)
    if alone and first.grouped:
        return Settled.keep(_all_gradients(first))
    T, size = _positions(uses, units), first.groups * first.inputs * first.outputs
    keep = _keeping_is_cheaper(uses, units)
    gram = not keep and _gram_is_cheaper(uses, units)
    squares = torch.zeros(units.count, dtype=torch.float64, device=units.index.device)
    kept = torch.empty(units.count, size, dtype=first.dtype, device=units.index.device) if keep else None
    per_unit = T * first.groups * (first.inputs + first.outputs) if first.unfolds or units.classes else 2 * T * T
    moved = (max(use.terms for use in uses) + len(uses) + 4) * torch.finfo(first.dtype).eps / 2
    block = units.count if T == 1 else max(1, BLOCK // max(per_unit, 0 if gram or keep else size))
    for rows, members in units.blocks(block):
        a, g = _joined(uses, members)
        if T == 1:
            squares[rows] = (squares_of(a.flatten(0, 2)) * squares_of(g.flatten(0, 2))).view(len(a), -1).sum(1)
        elif gram:
            squares[rows] = _gram_squares(a, g, moved)
        else:
            made = kept[rows] if kept is not None and isinstance(rows, slice) else a.new_empty(len(a), size)
            torch.bmm(g.flatten(0, 1).mT, a.flatten(0, 1), out=made.view(-1, first.outputs, first.inputs))
            if kept is None:
                squares[rows] = _made_squares(made, a, g, moved)
            elif not isinstance(rows, slice):
                kept[rows] = made
    if kept is None:
        return Settled(squares, lambda weights: weights.sum_of_uses(uses))
    split = (-1, first.groups, first.outputs, first.inputs)
    return Settled(
        squares_of(kept),
        lambda weights: first.shaped(weights.sum_of_units(kept).view(split))[0],
        first.shaped(kept.view(split)),
    )


def _made_by_library(use: ConvolutionUse) -> Settled:
    made, squares = use.normed_gradients()
    flat, shape = made.flatten(1), made.shape[1:]
    return Settled(
        squares,
        lambda weights: weights.sum_of_units(flat).view(shape).permute(3, 2, 0, 1),
        made.permute(0, 4, 3, 1, 2),
    )


def _all_gradients(use: FactoredUse) -> Tensor:
    """(B, *shape), made a few at a time."""
    first = use.gradients(slice(EXAMPLES))
    result = first.new_empty(use.batch, *use.shape)
    result[:EXAMPLES] = first
    for i in range(EXAMPLES, use.batch, EXAMPLES):
        result[i : i + EXAMPLES] = use.gradients(slice(i, i + EXAMPLES))
    return result


def _joined(uses: Sequence[FactoredUse], members: slice | Tensor) -> tuple[Tensor, Tensor]:
    """(u, G, T, in) and (u, G, T, out) of some units: all uses, and all examples of a unit, one after the other."""
    if len(uses) == 1:
        return _factors(uses[0], members)
    a, g = zip(*[_factors(use, members) for use in uses], strict=True)
    return torch.cat(a, 2), torch.cat(g, 2)


def _factors(use: FactoredUse, members: slice | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(members, slice):
        return use.factors(members)
    a, g = (_by_member(t, members).transpose(1, 2).flatten(2, 3) for t in use.factors(members.clamp(min=0).flatten()))
    return a, g


def _by_member(values: Tensor, members: Tensor) -> Tensor:
    """(u, m, ...) of (u m, ...), with zeros where a unit has fewer than m examples."""
    values = values.view(*members.shape, *values.shape[1:])
    return values.masked_fill((members < 0).view(*members.shape, *(1 for _ in values.shape[2:])), 0)


def _positions(uses: Sequence[FactoredUse], units: UnitMap) -> int:
    """Terms g (x) a of the largest unit."""
    positions = 0
    for use in uses:
        positions += use.positions
    return positions * units.largest


def _costs(uses: Sequence[FactoredUse], units: UnitMap) -> tuple[float, float, float]:
    """Multiplications for one unit and group: by Gram matrices; by gradients that are kept; that are dropped.

    A number costs about 20 multiplications for each time that it passes through memory, and 2 through the cache; what
    is not kept is made again for the sum.
    """
    T, n, m = _positions(uses, units), uses[0].inputs, uses[0].outputs
    passes = 40.0 if units.count * uses[0].groups * n * m > BLOCK else 4.0
    again = T * n * m + (20.0 * T * n if uses[0].unfolds else 0.0)
    return 1.5 * T * T * (n + m) + again, T * n * m + passes * n * m, T * n * m + 20.0 * n * m + again


def _keeping_is_cheaper(uses: Sequence[FactoredUse], units: UnitMap) -> bool:
    first = uses[0]
    if _positions(uses, units) == 1:
        return False
    gram, keep, drop = _costs(uses, units)
    nbytes = units.count * first.groups * first.inputs * first.outputs * first.dtype.itemsize
    # What is kept takes the place of the uses, which are held no longer.
    if keep > min(gram, drop):
        return False
    return nbytes <= STORE_BYTES or nbytes <= 1.25 * sum(use.nbytes for use in uses)


def _gram_is_cheaper(uses: Sequence[FactoredUse], units: UnitMap) -> bool:
    gram, _, drop = _costs(uses, units)
    return gram <= drop


def _gram_squares(a: Tensor, g: Tensor, moved: float) -> Tensor:
    """(u,) upper bounds of the squared norms of sum_t g_t (x) a_t, by Gram matrices; a (u, G, T, in), g likewise.

    Where terms cancel so far that float32 tells little, they are computed again in float64.
    """
    info = torch.finfo(a.dtype)
    u = info.eps / 2
    most = PIECE if a.dtype == torch.float32 else max(a.shape[-1], g.shape[-1])
    n = min(most, a.shape[-1]) + min(most, g.shape[-1]) + 8
    gram_a, gram_g = _gram(a), _gram(g)
    squares = (gram_a * gram_g).sum((1, 2, 3), dtype=torch.float64)
    lengths = [
        (gram.diagonal(dim1=-2, dim2=-1).double() + n * info.tiny).clamp(min=0).sqrt() for gram in (gram_a, gram_g)
    ]
    S = (lengths[0] * lengths[1]).sum((1, 2))
    underflow = n * info.tiny * sum(length.sum(2).square().sum(1) for length in lengths)
    # The products of two Gram matrices may underflow too.
    underflow = underflow + gram_a[0].numel() * info.tiny
    own = squares.clamp(min=0) + SPARE * n * u * S.square() + underflow
    bound = (own.sqrt() + SPARE * moved * S).square()
    if a.dtype == torch.float64:
        return bound
    loose = (~(own <= LOOSE * squares) | ~bound.isfinite()).nonzero()[:, 0]
    if len(loose):
        bound[loose] = _gram_squares(a[loose].double(), g[loose].double(), moved)
    return bound


def _gram(x: Tensor) -> Tensor:
    """(u, G, T, T) of (u, G, T, n), pieces of n added in float64."""
    n = x.shape[-1]
    if n <= PIECE or x.dtype == torch.float64:
        return x @ x.mT
    result = torch.zeros(*x.shape[:-1], x.shape[-2], dtype=torch.float64, device=x.device)
    for i in range(0, n, PIECE):
        piece = x[..., i : i + PIECE]
        result += piece @ piece.mT
    return result


def _made_squares(gradients: Tensor, a: Tensor, g: Tensor, moved: float) -> Tensor:
    """(u,) upper bounds of the squared norms of gradients (u, n) that were made from a and g and are made again."""
    lengths = squares_of(a.flatten(0, 2)) * squares_of(g.flatten(0, 2))
    S = lengths.view(*a.shape[:3]).sqrt().sum((1, 2))
    u = torch.finfo(a.dtype).eps / 2
    return (squares_of(gradients).sqrt() + SPARE * ((a.shape[2] + 4) * u + moved) * S).square()


# -- tables ----------------------------------------------------------------------------------------------------------


def _settle_tables(uses: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """A unit's gradient has the rows that its examples read: those are added up and kept, (K, D) for all units."""
    rows, ids, owner = _table_rows(uses, units)
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device).index_add_(0, owner, squares_of(rows))
    shape = uses[0].shape

    return Settled(squares, lambda weights: weights.add_rows(rows, owner, ids, to=rows.new_zeros(shape)))


def _table_rows(uses: Sequence[EmbeddingUse], units: UnitMap) -> tuple[Tensor, Tensor, Tensor]:
    """(K, D) the nonzero rows of all units' gradients, (K,) which rows of the table, (K,) of which unit."""
    size = uses[0].size
    keys = torch.cat([(units.index[:, None] * size + use.ids).flatten() for use in uses])
    g = torch.cat([use.output_gradients.to(use.dtype).flatten(0, 1) for use in uses])
    found, place = torch.unique(keys, return_inverse=True)
    rows = g if len(found) == len(keys) else g.new_zeros(len(found), g.shape[1]).index_add_(0, place, g)
    if len(found) == len(keys):
        found = keys
    return rows, found % size, found // size


def _settle_tied(linear: Sequence[LinearUse], tables: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """One matrix read as a table and applied as a linear map, as in language models with tied embeddings.

        || L + E ||^2 = ||L||^2 + ||E||^2 + 2 <L, E>,    <L, E> = sum_{s,t} g_s[id_t] <a_s, e_t>,

    with e_t what came back to the row read at t. No (unit, V, D) tensor is made.
    """
    rows, ids, owner = _table_rows(tables, units)
    V, D = tables[0].shape
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device)
    table_squares = squares.index_add(0, owner, squares_of(rows))
    u = torch.finfo(rows.dtype).eps / 2
    T = units.largest * sum(use.positions for use in linear)
    reads = units.largest * sum(use.ids.shape[1] for use in tables)
    moved = (max(use.terms for use in linear) + len(linear) + reads + 4) * u
    for block, members in units.blocks(max(1, BLOCK // (T * (V + D + reads) + reads * D))):
        a, g = (t.squeeze(1) for t in _joined(linear, members))
        at, e = (torch.cat(parts, 1) for parts in zip(*(_read(use, members) for use in tables), strict=True))
        cross = (a @ e.mT) * g.gather(2, at[:, None, :].expand(-1, a.shape[1], -1))
        both = 2 * cross.sum((1, 2), dtype=torch.float64)
        a_, g_ = a.unsqueeze(1), g.unsqueeze(1)
        S = (squares_of(a.flatten(0, 1)) * squares_of(g.flatten(0, 1))).sqrt().view(len(a), -1).sum(1)
        S = S + squares_of(e.flatten(0, 1)).sqrt().view(len(e), -1).sum(1)
        own = squares_of(a[:, 0]) * squares_of(g[:, 0]) if T == 1 else _gram_squares(a_, g_, 0.0)
        bound = (own + table_squares[block] + both).clamp(min=0) + SPARE * (D + reads + 8) * u * S.square()
        squares[block] = (bound.sqrt() + SPARE * moved * S).square()

    return Settled(squares, lambda weights: weights.add_rows(rows, owner, ids, to=weights.sum_of_uses(linear)))


def _read(use: EmbeddingUse, members: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Ids (u, T) and what came back to them (u, T, D), a unit's examples one after the other."""
    if isinstance(members, slice):
        return use.ids[members], use.output_gradients[members].to(use.dtype)
    flat = members.clamp(min=0).flatten()
    ids, g = (_by_member(t[flat], members).flatten(1, 2) for t in (use.ids, use.output_gradients.to(use.dtype)))
    return ids, g


# -- anything --------------------------------------------------------------------------------------------------------


def _settle_any(uses: Sequence[Use], units: UnitMap) -> Settled:
    """Uses of several kinds: every unit's gradient is made, a few units at a time; kept if all fit."""
    shape = uses[0].shape
    size = max(1, prod(shape))
    device, dtype = units.index.device, uses[0].dtype
    keep = units.count * size * dtype.itemsize <= STORE_BYTES
    kept = torch.empty(units.count, size, dtype=dtype, device=device) if keep else None
    squares = torch.zeros(units.count, dtype=torch.float64, device=device)
    for rows, members in units.blocks(max(1, BLOCK // (size * units.largest))):
        gradients = sum_of([_unit_gradients(use, members) for use in uses]).flatten(1)
        if kept is not None:
            kept[rows] = gradients
            squares[rows] = squares_of(gradients)
        else:
            squares[rows] = (squares_of(gradients).sqrt() + sum_of([_slack(use, members) for use in uses])).square()
    if kept is None:
        return Settled(squares, lambda weights: weights.sum_of_uses(uses))
    return Settled.keep(kept.view(-1, *shape), squares)


def _unit_gradients(use: Use, members: slice | Tensor) -> Tensor:
    if isinstance(members, slice):
        return use.gradients(members)
    return _by_member(use.gradients(members.clamp(min=0).flatten()), members).sum(1)


def _slack(use: Use, members: slice | Tensor) -> Tensor:
    """(u,) bounds of what rounding may hide of a use's part of the norm."""
    if isinstance(members, slice):
        lengths = use.lengths(members)
    else:
        lengths = _by_member(use.lengths(members.clamp(min=0).flatten()), members).flatten(1)
    terms = use.terms if isinstance(use, FactoredUse) else 0
    return (lengths.shape[1] + terms + 8) * torch.finfo(use.dtype).eps * lengths.sum(1)


# -- tables whose sums are sparse ------------------------------------------------------------------------------------


class Table(Protocol):
    """A parameter of which a model reads rows and nothing else: how they are read."""

    @property
    def num_rows(self) -> int:
        """V, from 1 to 2^40."""

    @property
    def width(self) -> int:
        """D."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def read(self, ids: Tensor) -> Tensor:
        """(*ids.shape, D), the rows as they are now, a tensor of its own; ids are integers from 0 to V - 1.

        It is called once for each lookup of a forward pass, with the ids of all its examples; and again for examples
        whose forward runs again, where it must return the same.
        """


def count_of(name: str) -> str:
    """The name under which the rows of a table are counted; see `make_clipping`."""
    return f"{name} (count)"


_MOST_ROWS = 2**40  # times the units of a batch, a row and a unit are one int64


@dataclass(frozen=True)
class SparseTables:
    """The parameters of a model that are read as tables.

    Attributes:
        by_name: how each is read, by the parameter's name.
        count_norm: None, or the L2 bound on what a unit adds to the counts of rows, over all tables together.
    """

    by_name: Mapping[str, Table] = field(default_factory=lambda: MappingProxyType({}))
    count_norm: float | None = None

    @classmethod
    def of(cls, module: nn.Module, tables: Mapping[str, Table], count_norm: float | None) -> "SparseTables":
        """Raises: ArgumentError for a name, a shape or a norm that does not fit the module."""
        if count_norm is not None:
            count_norm = checks.positive("count_norm", count_norm)
            if not tables:
                raise ArgumentError("count_norm bounds the counts of rows, and there are no tables; leave it out")
        parameters = dict(module.named_parameters())
        for name, table in tables.items():
            p = parameters.get(name)
            if p is None or not p.requires_grad:
                raise ArgumentError(f"tables must be trainable parameters of the model, by name; got {name!r}")
            checks.integer("num_rows", table.num_rows, low=1, high=_MOST_ROWS)
            if p.dim() != 2 or p.shape[1] != table.width or p.shape[0] not in (0, table.num_rows):
                raise ArgumentError(
                    f"the table {name} has {table.num_rows} rows of {table.width} numbers, and its parameter must have "
                    f"the same shape, or no rows; got shape {tuple(p.shape)}"
                )
            if p.dtype != table.dtype:
                raise ArgumentError(f"the table {name} is {table.dtype}, and its parameter {p.dtype}")
        return cls(MappingProxyType(dict(tables)), count_norm)

    def nothing(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(V, D), the sum of nobody."""
        table = self.by_name[name]
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return sparse_rows(none, torch.zeros(0, table.width, dtype=dtype, device=device), (table.num_rows, table.width))

    def counts(self, settled: Mapping[str, Settled], units: int, device: torch.device) -> dict[str, Tensor]:
        """{count_of(table): (V,) sparse float64}, how many units read each row, weighted; nothing without count_norm.

            sum over units u that read the row of  min(1, count_norm / sqrt(m_u)),    m_u: rows that u reads, in all

        Guarantee: what a unit adds, all tables together, is a function of its own ids alone and has norm at most
            count_norm in exact arithmetic: it has m_u entries, each at most count_norm / sqrt(m_u). That does not rest
            on the gradient, so that a unit whose gradient is NaN or infinite is counted like any other.
        """
        if self.count_norm is None:
            return {}
        none = torch.zeros(0, dtype=torch.int64, device=device)
        nothing = RowsRead(none, none, none)
        read = {name: settled[name].rows or nothing if name in settled else nothing for name in self.by_name}
        number = torch.zeros(units, dtype=torch.float64, device=device)
        for rows in read.values():
            number += torch.bincount(rows.owner, minlength=units)
        # Just under count_norm, for the rounding of root and quotient. No rows: infinity, and so 1, of nothing.
        weights = (self.count_norm * (1 - 1e-12) / number.sqrt()).clamp(max=1.0)
        result = {}
        for name, rows in read.items():
            values = weights.new_zeros(len(rows.distinct)).index_add_(0, rows.place, weights[rows.owner])
            result[count_of(name)] = sparse_rows(rows.distinct, values, (self.by_name[name].num_rows,))
        return result


NO_TABLES = SparseTables()


def settle_lookups(uses: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """Norms and sparse sum of the gradient that all lookups in one table have together.

    A unit's gradient has the rows that its examples read, without those of padding: these are added up and kept, so
    that the norm is that of what is summed.
    """
    if len(uses) == 1 and units.classes is None and units.index.device.type == "cpu":
        once = _each_once(uses[0], units)
        if once is not None:
            return once
    shape, count = uses[0].shape, max(1, units.count)
    reads = [_reads(use, units) for use in uses]
    keys = [torch.add(owner, ids, alpha=count) for ids, owner, _ in reads]  # by row, then by unit
    found, pair = torch.unique(torch.cat(keys) if len(keys) > 1 else keys[0], return_inverse=True)
    rows = reads[0][2].new_zeros(len(found), shape[1])
    for (_, _, g), own in zip(reads, pair.split([len(own) for own in keys]), strict=True):
        rows.index_add_(0, own, g)
    owner = found % count
    distinct, place = torch.unique_consecutive(found // count, return_inverse=True)
    return _settled(rows, RowsRead(owner, place, distinct), shape, units)


def _each_once(use: EmbeddingUse, units: UnitMap) -> Settled | None:
    """The same where no unit reads a row twice, as most batches come: nothing is to add. Else None.

    Each example is a unit; so in the order in which rows were read the units ascend, those of each row too.
    """
    ids = use.ids.long().contiguous().view(-1).numpy()
    found = native.ranked(ids, use.size, use.ids.shape[1], -1 if use.padding is None else use.padding)
    if found.twice:
        return None
    _, owner, rows = _reads(use, units)
    place = found.place if use.padding is None else found.place[found.place >= 0]
    return _settled(rows, RowsRead(owner, torch.from_numpy(place), torch.from_numpy(found.distinct)), use.shape, units)


def _settled(rows: Tensor, read: RowsRead, shape: Sequence[int], units: UnitMap) -> Settled:
    """From the rows (K, D) of the pairs of `read`."""
    owner, place, distinct = read.owner, read.place, read.distinct
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device).index_add_(0, owner, squares_of(rows))

    def total(weights: Weights) -> Tensor:
        summed = weights.add_rows(rows, owner, place, to=rows.new_zeros(len(distinct), rows.shape[1]))
        return sparse_rows(distinct, summed, shape)

    return Settled(squares, total, rows=read)


def _reads(use: EmbeddingUse, units: UnitMap) -> tuple[Tensor, Tensor, Tensor]:
    """(n,) ids, (n,) units and (n, D) what came back, of all that was read but padding."""
    ids, g = use.ids.flatten(), use.output_gradients.to(use.dtype).flatten(0, 1)
    owner = units.index if len(ids) == len(units.index) else units.index.repeat_interleave(use.ids.shape[1])
    if use.padding is None:
        return ids.long(), owner, g
    read = (ids != use.padding).nonzero()[:, 0]
    return ids[read].long(), owner[read], g[read]


def sparse_rows(ids: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A coalesced tensor of rows at ascending ids."""
    return torch.sparse_coo_tensor(ids[None], values, tuple(shape), is_coalesced=True, check_invariants=False)


# ----------------------------------------------------------------------------------------------------
# How the norms of a unit's gradient become the factors by which it is multiplied.
#
# `Flat`, `PerGroup` and `Automatic` are factors under the plan's own norm. `Adaptive`, which users give as a rule
# too, is a schedule of norms, whose factors are `Flat`: it stands in `release/schedules.py`, and `Cut` joins the two.


class ClipRule(ABC):
    """Factors such that no unit's vector, all parameters together, is longer than clip_norm.

    A rule of one's own is a subclass. For each unit it is copied and given that unit alone, so that nothing that it
    keeps in itself goes on to another unit or step; what it leaves longer than clip_norm is clipped. You promise that
    it keeps nothing elsewhere, in a global, a class, a closure or a file, and draws nothing.
    """

    @abstractmethod
    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        """{parameter: (U,)} factors.

        Args:
            squares: {parameter: (U,)} float64, the squared norms of the units' gradients, finite.
            clip_norm: L2 bound on what a unit may add, above 0.
        Raises: ArgumentError if the rule does not fit the parameters.
        """

    @abstractmethod
    def describe(self) -> str:
        """For the plan's card."""


@final
@dataclass(frozen=True)
class Flat(ClipRule):
    """min(1, clip_norm / ||g||) [Abadi et al. 2016, Algorithm 1]."""

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, _clip(_total(squares), clip_norm))

    def describe(self) -> str:
        return "flat: the gradient as a whole is clipped to the clip norm"


@final
@dataclass(frozen=True)
class PerGroup(ClipRule):
    """min(1, c_l / ||g_l||) for each group l of parameters, with sum_l c_l^2 = clip_norm^2 [McMahan et al. 2018, 3.2].

    Attributes:
        groups: for each group, the names of its parameters, or of modules that hold them; empty: each parameter is
            a group of its own.
        shares: c_l / clip_norm for each group, their squares adding up to 1; empty: equal ones.
    """

    groups: tuple[tuple[str, ...], ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shares:
            return
        if len(self.shares) != len(self.groups):
            raise ArgumentError(f"shares must be one for each of the {len(self.groups)} groups, got {len(self.shares)}")
        total = fsum(checks.positive("shares", share) ** 2 for share in self.shares)
        if not isclose(total, 1.0, rel_tol=1e-12):
            raise ArgumentError(
                f"the squares of shares must add up to 1, so that the norms do to clip_norm; got {total}"
            )

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        groups = self._members(squares)
        # Rounded down: the squares of the norms may add up to no more than clip_norm squared.
        shares = [share * (1 - 1e-12) for share in self.shares or [len(groups) ** -0.5] * len(groups)]
        result: dict[str, Tensor] = {}
        for names, share in zip(groups, shares, strict=True):
            factor = _clip(_total({name: squares[name] for name in names}), clip_norm * share)
            result |= dict.fromkeys(names, factor)
        return {name: result[name] for name in squares}

    def _members(self, squares: Mapping[str, Tensor]) -> Sequence[Sequence[str]]:
        if not self.groups:
            return [[name] for name in squares]
        members = [
            [name for name in squares if any(name == own or name.startswith(f"{own}.") for own in group)]
            for group in self.groups
        ]
        held = [name for names in members for name in names]
        if sorted(held) != sorted(squares) or not all(members):
            missing, twice = sorted(set(squares) - set(held)), sorted({n for n in held if held.count(n) > 1})
            raise ArgumentError(
                "every trainable parameter must be in exactly one group, and no group empty; "
                f"in none: {', '.join(missing) or '-'}; in several: {', '.join(twice) or '-'}; "
                f"empty: {sum(not names for names in members)}"
            )
        return members

    def describe(self) -> str:
        number = len(self.groups) or "one group for each parameter:"
        return f"per group: {number} parts, each cut to its share of the clip norm"


@final
@dataclass(frozen=True)
class Automatic(ClipRule):
    """clip_norm / (||g|| + gamma): every unit is normalised, none is longer than clip_norm [Bu et al. 2023, eq. 4].

    The length of a unit's vector is clip_norm ||g|| / (||g|| + gamma) < clip_norm, so that clip_norm only scales the
    learning rate and need not be tuned.

    Attributes:
        gamma: stability constant, above 0, in the units of the gradient.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        checks.positive("gamma", self.gamma)

    def factors(self, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(squares, clip_norm / (_total(squares).sqrt() + self.gamma))

    def describe(self) -> str:
        return f"automatic: the gradient times clip norm / (its norm + {self.gamma:g})"


Rule = ClipRule | Adaptive
"""What `make_private(rule=..)` takes: factors under the plan's own norm, or a schedule of norms for `Flat` factors."""


@final
@dataclass(frozen=True)
class Cut:
    """How units are clipped: by which factors, and at which norms.

    Attributes:
        factors: of the gradients. A rule from elsewhere is held to the bound, which those of this file keep by proof.
        schedule: which norm is in force when. It may add a coordinate of its own to each unit's vector.
    """

    factors: ClipRule
    schedule: Schedule

    @classmethod
    def of(cls, rule: Rule | None) -> "Cut":
        """Return what a rule asks for; `Flat()` at the plan's norm if None.

        Raises: ArgumentError for what is no rule, and for a rule from elsewhere with coordinates, which no plan has, or
            that cannot be copied.
        """
        if type(rule) is Adaptive:
            return cls(Flat(), rule)
        if rule is not None and not isinstance(rule, ClipRule):
            raise ArgumentError(
                f"rule must be None or a rule of anyorder.clipping, such as Flat() or Automatic(gamma=0.01), "
                f"got {rule!r}"
            )
        if hasattr(rule, "coordinates"):
            raise ArgumentError(f"{rule!r} has coordinates of its own: only Adaptive() may; give factors alone")
        try:
            copy.deepcopy(rule)
        except Exception as problem:
            raise ArgumentError(
                f"{rule!r} cannot be copied, as it must be for each unit, so that it keeps nothing of others: {problem}"
            ) from problem
        return cls(Flat() if rule is None else rule, FixedNorm())

    @property
    def is_flat(self) -> bool:
        """True if a unit has one factor, min(1, norm / its own), at a norm that does not move."""
        return type(self.factors) is Flat and type(self.schedule) is FixedNorm

    @property
    def counted(self) -> tuple[str, ...]:
        """Names of the schedule's own sums."""
        match self.schedule:
            case FixedNorm():
                return ()
            case Adaptive():
                return (Adaptive.COUNT,)
            case _:
                assert_never(self.schedule)

    def apply(self, squares: Mapping[str, Tensor], clip_norm: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Factors {parameter: (U,)}, and what units add to the schedule's own sums, {name: (U,)}, both float64.

        Guarantee: no unit's vector, all of both together, is longer than clip_norm, in exact arithmetic.
        """
        factors = _clip_factors(self.factors, squares, clip_norm)
        match self.schedule:
            case FixedNorm():
                return factors, {}
            case Adaptive() as adaptive:
                shared = {id(factor): adaptive.gradient_share * factor for factor in factors.values()}
                above = (_total(squares).sqrt() > clip_norm).double()
                count = {adaptive.COUNT: adaptive.share * clip_norm * above}
                return {name: shared[id(factor)] for name, factor in factors.items()}, count
            case _:
                assert_never(self.schedule)


def _clip_factors(rule: ClipRule, squares: Mapping[str, Tensor], clip_norm: float) -> dict[str, Tensor]:
    """The rule's factors.

    A rule from elsewhere is given one unit at a time, and each unit a copy of the rule: factors that depend on other
    units' norms, of this step or of earlier ones, would let one unit move what all others add. A unit that it leaves
    longer than clip_norm is cut to it, and one whose factors are not numbers adds zero: silently, since an error would
    tell of that unit.

    Raises: ArgumentError if those of a rule from elsewhere are of other names or shapes.
    """
    match rule:
        case Flat() | PerGroup() | Automatic():  # whose bound is proven; checking it would cost every step
            return rule.factors(squares, clip_norm)
    shape = next(iter(squares.values())).shape
    each = [{name: square[i : i + 1] for name, square in squares.items()} for i in range(shape[0])]
    factors = _of_all([copy.deepcopy(rule).factors(unit, clip_norm) for unit in each])
    if set(factors) != set(squares):
        raise ArgumentError(f"{rule!r} must give a factor for each parameter, and for nothing else")
    if any(values.shape != shape for values in factors.values()):
        raise ArgumentError(f"{rule!r} must give one number for each of the {shape[0]} units")
    total = torch.stack([factors[name].double().square() * square for name, square in squares.items()]).sum(0)
    kept = torch.where(total > clip_norm**2, clip_norm / total.sqrt(), 1.0)
    return {name: torch.where(total.isfinite(), values * kept, 0.0) for name, values in factors.items()}


def _of_all(units: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if any(unit.keys() != units[0].keys() for unit in units):
        raise ArgumentError("a clip rule must give factors of the same names for all units")
    return {name: torch.cat([unit[name] for unit in units]) for name in units[0]}


def _total(squares: Mapping[str, Tensor]) -> Tensor:
    first, *more = squares.values()
    return torch.stack([first, *more]).sum(0) if more else first


def _clip(squares: Tensor, clip_norm: float) -> Tensor:
    # A zero norm gives clip_norm / 0 = inf, and so the factor of an unclipped unit.
    return (clip_norm / squares.sqrt()).clamp(max=1.0)
