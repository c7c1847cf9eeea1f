"""What backward tells of one use of a parameter: enough to make every example's gradient, and less than that."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from anyorder.clipping import native
from anyorder.clipping.arithmetic import ROWS, cleared, has_large, outer_sum, squares_of

__all__ = [
    "ConvolutionUse",
    "DirectUse",
    "EmbeddingUse",
    "FactoredUse",
    "Geometry",
    "LinearUse",
    "Rows",
    "Use",
]

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


@dataclass
class DirectUse(Use):
    """The gradients themselves: values (B, *shape)."""

    values: Tensor
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.shape = self.values.shape[1:]

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

    def factors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        a, g = (t[rows].to(self.dtype).unsqueeze(1) for t in (self.activations, self.output_gradients))
        return a, g

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
        return sum(t.numel() * t.element_size() for t in (self.activations, self.output_gradients))


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
        return sum(t.numel() * t.element_size() for t in (self.x, self.output_gradients))


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
