"""Clients one after the other, with nothing of a step made anew for each of them.

One copy of the model serves all, gradients come from `torch.autograd.grad`, updates are made in place, and images are
laid out channels last where the model takes them so.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from anyorder.errors import ArgumentError
from anyorder.federated.messages import Layout
from anyorder.federated.recorded import Gradients, recorded
from anyorder.federated.state import HIDDEN, Snapshot, same, snapshot
from anyorder.sampling.samplers import key_of, permutation_of

if TYPE_CHECKING:
    from anyorder.federated.clients import LocalTraining

__all__ = ["Examples", "looped", "order_of"]

_known: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()

Examples = tuple[Tensor, Tensor]
"""(x, y) of one user: their first dimension is that of the examples."""


def order_of(count: int, training: "LocalTraining", seed: int | bytes) -> list[Tensor]:
    """The rows of a client's examples that each epoch takes, in order: at most max_examples, the same in all."""
    first = permutation_of(count, seed)[: training.max_examples]
    later = (first[permutation_of(len(first), seed, epoch)] for epoch in range(1, training.epochs))
    return [torch.from_numpy(rows) for rows in (first, *later)]


def dtype_of(parameters: Sequence[Tensor]) -> torch.dtype:
    """That of a message: float64 where some parameter has it, else float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32


def trained(model: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    """The parameters of a model that are in the layout, in its order.

    Raises: ArgumentError where the model has none of that name and shape.
    """
    parameters = dict(model.named_parameters())
    for name, shape in layout.shapes.items():
        if name not in parameters or tuple(parameters[name].shape) != shape:
            found = tuple(parameters[name].shape) if name in parameters else "none"
            raise ArgumentError(
                f"the model must have a parameter {name} of shape {shape}, as the layout says, got {found}"
            )
    return {name: parameters[name] for name in layout.shapes}


def looped(
    training: "LocalTraining",
    model: nn.Module,
    layout: Layout,
    cohort: Sequence[Examples],
    seeds: Sequence[int | bytes],
    *,
    record: bool = False,
) -> Tensor:
    """(m, size): the change of each client, one after the other; `record` changes no bit of it."""
    return _Looped(training, model, layout, record).changes(cohort, seeds)


class _Looped:
    """Clients one after the other, on one copy of the model.

    Args:
        training: what each client does.
        model: not changed.
        layout: of what is shared.
        record: whether no value of the model decides what is computed, so that `recorded` may serve.
    Cost: one copy of the model; a step is a forward and a backward pass and one update in place.
    """

    def __init__(self, training: "LocalTraining", model: nn.Module, layout: Layout, record: bool) -> None:
        self._training, self._layout, self._given = training, layout, model
        self._channels_last: bool | None = None
        self._record = record  # not yet tried
        self._recorded: Gradients | None = None
        self._begin()
        self._device = self._parameters[0].device

    def _begin(self) -> None:
        """A copy of the model, and of a loss that is one: for the first client, and after one that left a trace."""
        self._model, self._loss = deepcopy((self._given, self._training.loss))
        self._model.train()
        if self._channels_last:  # first of all: buffers of images become other objects
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        own = trained(self._model, self._layout)
        for p in self._model.parameters():
            p.grad = None
            p.requires_grad_(False)
        self._parameters = [p.requires_grad_() for p in own.values()]
        self._buffers = list(self._model.buffers())
        self._sent = [b.clone() for b in self._buffers]
        self._state = self._snapshots()

    def _snapshots(self) -> list[Snapshot]:
        return [snapshot(self._model), snapshot(self._loss)]

    def _end(self, before: list[Tensor]) -> None:
        """Make everything as it was before a client."""
        if not all(map(same, self._state, self._snapshots())):
            if self._record or self._recorded is not None:
                raise ArgumentError(HIDDEN)
            self._begin()
            return
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, before)
            for b, b0 in zip(self._buffers, self._sent, strict=True):
                b.copy_(b0)

    @torch.enable_grad()
    def changes(self, cohort: Sequence[Examples], seeds: Sequence[int | bytes]) -> Tensor:
        """(m, size): row i is the change of client i."""
        result = torch.zeros(len(cohort), self._layout.size, dtype=dtype_of(self._parameters), device=self._device)
        some = [i for i, (x, _) in enumerate(cohort) if len(x)]
        if not some:
            return result
        # Made for all now: right after a step, which has filled the caches, it takes up to ten times as long.
        orders = [order_of(len(cohort[i][0]), self._training, seeds[i]) for i in some]
        numbers = [int.from_bytes(key_of(seeds[i])[:8], "little") for i in some]
        rows = [list(self._layout.named(result[i]).values()) for i in some]
        self._arrange(cohort[some[0]][0])
        before = [p.detach().clone() for p in self._parameters]
        with kept_generator(self._device):
            for i, order, number, row in zip(some, orders, numbers, rows, strict=True):
                _seed(self._device, number)
                self._train(*cohort[i], order)
                with torch.no_grad():
                    torch._foreach_copy_(row, torch._foreach_sub(self._parameters, before))
                self._end(before)
        return result

    def _train(self, x: Tensor, y: Tensor, order: list[Tensor]) -> None:
        """The steps of one client, in place."""
        training, parameters = self._training, self._parameters
        velocities = [torch.zeros_like(p) for p in parameters] if training.momentum else []
        for rows in order:
            xs, ys = (torch.index_select(part, 0, rows.to(part.device)).to(self._device) for part in (x, y))
            if self._channels_last:
                xs = xs.contiguous(memory_format=torch.channels_last)
            size = training.batch_size
            for xb, yb in zip(torch.split(xs, size), torch.split(ys, size), strict=True):
                gradients = self._gradients(xb, yb)
                with torch.no_grad():
                    if velocities:
                        torch._foreach_mul_(velocities, training.momentum)
                        torch._foreach_add_(velocities, gradients)
                    torch._foreach_add_(parameters, velocities or gradients, alpha=-training.lr)

    def _gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Of one batch, at the parameters as they are."""
        full = len(x) == self._training.batch_size
        if full and self._record:
            self._record = False
            self._recorded, first = recorded(self._training, self._given, self._model, list(self._layout.shapes), x, y)
            if first is not None:
                return first
        if full and self._recorded is not None:
            with torch.no_grad():
                return self._recorded(*self._parameters, x, y)
        loss = self._loss(self._model(x), y)
        return list(torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True))

    def _arrange(self, x: Tensor) -> None:
        """Lay weights and images out channels last where the model takes them so: pools are four times faster."""
        if self._channels_last is None:
            self._channels_last = takes_channels_last(self._given, x)
            if self._channels_last:
                self._begin()


def takes_channels_last(model: nn.Module, x: Tensor) -> bool:
    """Whether a model of convolutions has the same outputs for images laid out channels last; tried on no data.

    A model that takes a view of what its convolutions return has none: torch refuses it. Found once for a model and a
    shape.
    """
    if x.ndim != 4 or not x.is_floating_point() or not any(p.ndim == 4 for p in model.parameters()):
        return False
    found = _known.setdefault(model, {})
    key = (x.shape[1:], x.dtype)
    if key not in found:
        found[key] = _try_channels_last(model, x)
    return found[key]


def _try_channels_last(model: nn.Module, x: Tensor) -> bool:
    device = next(model.parameters()).device
    probe = torch.linspace(-1, 1, x[0].numel() * 2, dtype=x.dtype, device=device).view(2, *x.shape[1:])
    first, second = deepcopy(model).train(), deepcopy(model).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with kept_generator(device), torch.enable_grad():
        _seed(device, 0)
        expected = first(probe)
        _seed(device, 0)
        try:
            found = second(probe.contiguous(memory_format=torch.channels_last))
            if not isinstance(found, Tensor) or found.shape != expected.shape:
                return False
            torch.autograd.grad(found.sum(), [p for p in second.parameters() if p.requires_grad], allow_unused=True)
        except RuntimeError:  # what is wrong with the model itself, the loop will say
            return False
    return bool(torch.allclose(found, expected, rtol=1e-3, atol=1e-4))


@contextmanager
def kept_generator(device: torch.device) -> Iterator[None]:
    """Generators of torch are afterwards as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generators that a model on the device draws from; `torch.manual_seed` takes a millisecond for all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
