"""How correlated noise is made with torch's own operations: what a careful user would write. Times are per step."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Independent:
    """`normal_` and `add_`, into a buffer that is kept."""

    def __init__(self, size: int, std: float) -> None:
        self._noise, self._std = torch.empty(size), std

    def add_to(self, gradient: Tensor) -> None:
        """Gradient += std z."""
        gradient.add_(self._noise.normal_(), alpha=self._std)


class BLT:
    """y = z - scales . u, u = decays u + y, a buffer at a time."""

    def __init__(self, decays: Sequence[float], scales: Sequence[float], size: int, std: float) -> None:
        self._decays, self._scales, self._std = decays, scales, std
        self._buffers = [torch.zeros(size) for _ in decays]
        self._noise = torch.empty(size)

    def add_to(self, gradient: Tensor) -> None:
        """Gradient += std y."""
        self._noise.normal_()
        for scale, buffer in zip(self._scales, self._buffers, strict=True):
            self._noise.sub_(buffer, alpha=scale)
        for decay, buffer in zip(self._decays, self._buffers, strict=True):
            buffer.mul_(decay).add_(self._noise)
        gradient.add_(self._noise, alpha=self._std)


class Banded:
    """y = (z - c_1 y_{t-1} - ..) / c_0 with a ring of outputs."""

    def __init__(self, coefficients: Sequence[float], size: int, std: float) -> None:
        self._c, self._std = coefficients, std
        self._ring = [torch.zeros(size) for _ in coefficients]
        self._t = 0

    def add_to(self, gradient: Tensor) -> None:
        """Gradient += std y."""
        p = len(self._c)
        noise = self._ring[self._t % p].normal_()
        for i in range(1, p):
            noise.sub_(self._ring[(self._t - i) % p], alpha=self._c[i])
        noise.div_(self._c[0])
        self._t += 1
        gradient.add_(noise, alpha=self._std)


class PublishedTree:
    """Tree aggregation as published with DP-FTRL (Kairouz et al. 2021): the open nodes' noise on a stack.

    One tensor for each parameter and node, `torch.normal` for each new one, the estimate of the prefix kept, and the
    new prefix less the old one added to the gradient.
    """

    def __init__(self, shapes: Sequence[torch.Size], std: float) -> None:
        self._shapes, self._std = shapes, std
        self._stack: list[tuple[int, list[Tensor]]] = []
        self._prefix = [torch.zeros(shape) for shape in shapes]

    def add_to(self, gradients: Sequence[Tensor]) -> None:
        """Every gradient += the difference of the tree's prefix sums."""
        level = 0
        while self._stack and self._stack[-1][0] == level:
            self._stack.pop()
            level += 1
        self._stack.append((level, [torch.normal(0.0, self._std, shape) for shape in self._shapes]))
        prefix = [torch.zeros(shape) for shape in self._shapes]
        for _, nodes in self._stack:
            for total, node in zip(prefix, nodes, strict=True):
                total.add_(node)
        for gradient, new, old in zip(gradients, prefix, self._prefix, strict=True):
            gradient.add_(new - old)
        self._prefix = prefix


class Sums(torch.nn.Module):
    """So many parameters of so many numbers in all, of each of which the first is used."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size // count)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 1) of (B, 1)."""
        return torch.stack([p[:1] * x for p in self.parts]).sum(0)
