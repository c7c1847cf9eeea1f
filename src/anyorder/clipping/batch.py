"""A batch: the units of its examples, and the state of torch under which it runs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyorder.errors import ArgumentError

__all__ = ["Settings", "UnitMap", "check_groups", "full_precision"]


def check_groups(groups: Tensor, size: int) -> None:
    if groups.dtype != torch.int64 or groups.shape != (size,):
        raise ArgumentError(
            f"groups must be int64 of shape ({size},), one unit for each example of the batch, got {groups.dtype} of "
            f"shape {tuple(groups.shape)}; the model must be called on the whole batch"
        )


@dataclass(frozen=True)
class Settings:
    """The state of torch that a forward pass depends on: random numbers and autocast, on the CPU and on `devices`."""

    devices: tuple[torch.device, ...]
    random: tuple[Tensor, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device: torch.device) -> "Settings":
        devices = (device,) if device.type == "cuda" else ()
        random = (torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices))
        types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        autocast = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types)
        return cls(devices, random, autocast)

    def rewind(self) -> None:
        """Put the global generators back, so that another attempt draws the same numbers."""
        torch.set_rng_state(self.random[0])
        for device, state in zip(self.devices, self.random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def autocast_again(self) -> Iterator[None]:
        """Autocast as it was, without its cache, which would keep every chunk's casts of the weights."""
        with ExitStack() as stack:
            for device_type, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
            yield

    @contextmanager
    def random_again(self) -> Iterator[None]:
        """The same random numbers again; the global generators are left as they were."""
        with torch.random.fork_rng([d.index for d in self.devices]):
            torch.set_rng_state(self.random[0])
            for device, state in zip(self.devices, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


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
        groups = groups.detach().cpu()
        if len(set(groups.tolist())) == len(groups):  # as most batches come: nothing to sort
            return cls(torch.arange(len(groups), device=device), len(groups), None)
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


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """float32 products in float32: TF32 and bfloat16 would round the factors, and so move a unit over its bound."""
    reduced = [kernels for kernels in _kernels(device) if kernels.fp32_precision not in _FULL]
    return _in_full_precision(device, reduced) if reduced or torch.is_autocast_enabled(device.type) else nullcontext()


_FULL = ("ieee", "none")  # none: where nothing was chosen
_LEGACY = not hasattr(torch.backends.cuda.matmul, "fp32_precision")  # before torch 2.9


def _kernels(device: torch.device) -> tuple[Any, ...]:
    if _LEGACY:
        return (_Legacy(),)
    if device.type == "cuda":
        return torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv  # type: ignore[attr-defined]


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
