"""Per-unit clipping by torch.func: every example's gradient, in chunks, made again on backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from anyorder import checks
from anyorder.clipping.alone import Alone, Tensors, check_nothing_kept, mappable
from anyorder.clipping.base import PerUnitClipping, Receive
from anyorder.clipping.batch import Settings, check_groups
from anyorder.clipping.clip_rules import Cut, Flat, Rule
from anyorder.clipping.explain import FAILURES
from anyorder.clipping.kept import Made, Witness, one_pass
from anyorder.clipping.units import NON_FINITE, ClippedSum, accumulator_dtype, check_finite
from anyorder.errors import AnyorderError, ArgumentError, ModelError, TrainingError

__all__ = ["FunctionalClipping"]

CHUNK_BYTES = 2**28


class FunctionalClipping(PerUnitClipping):
    """Per-unit clipping for any module that torch.func can map over examples.

    Outputs are those of the module on each example alone (`torch.func.vmap`; each draws its own dropout mask), so
    that no example can depend on another. On backward every chunk's forward is run again with the same random
    numbers, and its per-example gradients are added up by unit, clipped, and dropped.

    Memory: inputs and outputs, and for one chunk its activations and chunk_size * d gradients (d trainable
    parameters), and the sums of one unit. Cost: two forward passes and one backward pass with a gradient for each
    example. LSTM, GRU and RNN run without their fused kernels. On the CPU, convolutional models with pooling run
    faster after `module.to(memory_format=torch.channels_last)`.

    Args:
        module: the model. Frozen parameters (requires_grad=False) cost nothing; tied ones have one gradient.
        chunk_size: examples per chunk; None takes as many as keep chunk_size * d numbers under 256 MiB, at least 1.
            The sums do not depend on it, save for rounding; dropout masks do.
        grid: None, or the grid on which units are rounded; the sums are then int64, see `ClippedSum`.
        rule: how norms become factors; on a grid `Flat`.
        non_finite: see `make_clipping`.

    Attributes:
        mapped: whether the module runs with functions in the form of `Mapped`: it is found in the first batch.
        made: what its last pass made; see `kept`.

    Raises: ArgumentError for another rule on a grid.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_size: int | None = None,
        grid: float | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
    ) -> None:
        if grid is not None and rule not in (None, Flat()):
            raise ArgumentError(f"rule must be Flat() in secure mode, whose units are cut as a whole, got {rule}")
        self._module = module
        self._grid, self._cut = grid, Cut.of(rule)
        self.mapped, self.made = False, Made()
        self._refuse = checks.choice("non_finite", non_finite, NON_FINITE) == "refuse"
        self._chunk_size = None if chunk_size is None else checks.integer("chunk_size", chunk_size, low=1)

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        groups: Tensor,
        clip_norm: float,
        scale: float,
        receive: Receive,
    ) -> Any:
        """The module's outputs on each example alone; see `PerUnitClipping.forward`."""
        parameters = {name: p.detach() for name, p in self._module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the model has no trainable parameters; at least one must have requires_grad=True")
        call = Alone(self._module, args, kwargs, self.made, mapped=self.mapped)
        check_groups(groups, call.size)
        job = _Job(
            module=self._module,
            call=call,
            names=tuple(parameters),
            batch=_Batch.sort(groups, self._chunk_size or _default_chunk_size(parameters), call.tensors[0].device),
            clip_norm=checks.positive("clip_norm", clip_norm),
            grid=self._grid,
            cut=self._cut,
            refuse=self._refuse,
            scale=checks.positive("scale", scale) if call.size else 1.0,
            receive=receive,
            settings=Settings.now(call.tensors[0].device),
        )
        tensors = (*parameters.values(), *call.tensors)
        if not torch.is_grad_enabled():
            outputs = job.outputs(tensors)
            self.mapped = call.mapped
            return call.assemble(*outputs)
        # The sums go to `receive`, not along the graph: a scalar that requires a gradient keeps the outputs in it.
        root = torch.zeros((), device=call.tensors[0].device, requires_grad=True)
        outputs = _Outputs.apply(root, job, *tensors)  # type: ignore[no-untyped-call]
        self.mapped = call.mapped
        return call.assemble(outputs[: job.differentiable], outputs[job.differentiable :])


def _default_chunk_size(parameters: dict[str, Tensor]) -> int:
    size = sum(p.numel() * accumulator_dtype(p).itemsize for p in parameters.values())
    return max(1, CHUNK_BYTES // size)


@dataclass(frozen=True)
class _Batch:
    """The examples in the order of their units, cut into chunks.

    Attributes:
        order: (B,) indices of the examples, unit by unit, on their device; None if they come so.
        units: (B,) on the CPU, the rank of the unit of each sorted example: 0, .., U - 1 in order.
        chunk_size: examples per chunk.
    """

    order: Tensor | None
    units: Tensor
    chunk_size: int

    @classmethod
    def sort(cls, groups: Tensor, chunk_size: int, device: torch.device) -> "_Batch":
        groups = groups.detach().cpu()
        ranked, order = torch.sort(groups, stable=True)
        units = torch.unique_consecutive(ranked, return_inverse=True)[1]
        return cls(None if torch.equal(ranked, groups) else order.to(device), units, chunk_size)

    def chunks(self) -> Iterator[slice]:
        """Slices of the sorted examples."""
        return (slice(i, i + self.chunk_size) for i in range(0, len(self.units), self.chunk_size))

    def take(self, tensors: Tensors, chunk: slice) -> Tensors:
        """The examples of a chunk."""
        return tuple(t[chunk] if self.order is None else t[self.order[chunk]] for t in tensors)

    def unsort(self, tensor: Tensor) -> Tensor:
        """Sorted examples in the order in which they came."""
        return tensor if self.order is None else torch.empty_like(tensor).index_copy_(0, self.order, tensor)

    def units_of(self, chunk: slice) -> tuple[Tensor, bool]:
        """The chunk's units from 0 on, and whether its last unit has no examples in later chunks."""
        units = self.units[chunk]
        complete = chunk.stop >= len(self.units) or bool(self.units[chunk.stop] != units[-1])
        return units - units[0], complete


@dataclass(kw_only=True)
class _Job:
    """One batch, from its forward pass to its backward pass. It holds no tensor of the batch but the units."""

    module: nn.Module
    call: Alone
    names: tuple[str, ...]
    batch: _Batch
    clip_norm: float
    grid: float | None
    cut: Cut
    refuse: bool
    scale: float
    receive: Receive
    settings: Settings
    differentiable: int = 0
    done: bool = False

    def outputs(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """The module's output tensors on the batch, the differentiable ones and the others, cut off from autograd."""
        parameters, inputs = self._split(tensors)

        # The same trace as in `backward`, so that both take the same kernels, and so the same random numbers.
        def example(parameters: dict[str, Tensor], tensors: Tensors) -> tuple[Tensors, Tensors]:
            outputs, _, others = vjp(lambda p: self.call(p, tensors, Witness(self.call.made)), parameters, has_aux=True)  # type: ignore[misc]
            return outputs, others

        if not self.call.size:  # nothing to map: the shapes are those of an example of zeros
            with self.settings.random_again():
                zeros = tuple(t.new_zeros(1, *t.shape[1:]) for t in inputs)
                pieces = [self._map(example, parameters, zeros)]
            outputs, others = (tuple(t[:0] for t in group) for group in pieces[0])
        else:
            pieces = [self._map(example, parameters, self.batch.take(inputs, c)) for c in self.batch.chunks()]
            outputs, others = (
                tuple(self.batch.unsort(torch.cat(parts)) for parts in zip(*group, strict=True))
                for group in zip(*pieces, strict=True)
            )
        self.differentiable = len(outputs)
        return outputs, others

    def backward(self, tensors: Tensors, cotangents: Tensors) -> None:
        """Give `receive` the sum over units of the clipped gradients of <outputs, cotangents>."""
        if self.done:
            raise TrainingError(
                "backward ran a second time on the same outputs of the private model: each unit is clipped once. Add "
                "the losses and call backward once"
            )
        self.done = True
        parameters, inputs = self._split(tensors)
        total = ClippedSum(parameters, clip_norm=self.clip_norm, scale=self.scale, grid=self.grid, cut=self.cut)

        def example(parameters: dict[str, Tensor], tensors: Tensors, cotangents: Tensors) -> dict[str, Tensor]:
            _, pull_back, _ = vjp(lambda p: self.call(p, tensors, Witness(self.call.made)), parameters, has_aux=True)  # type: ignore[misc]
            gradients: dict[str, Tensor] = pull_back(cotangents)[0]
            return gradients

        with self.settings.random_again():
            for chunk in self.batch.chunks():
                taken = self.batch.take(inputs, chunk), self.batch.take(cotangents, chunk)
                gradients = self._map(example, parameters, *taken)
                units, complete = self.batch.units_of(chunk)
                total.add(gradients, units, complete=complete)
        if self.refuse:
            check_finite(total.bad, total.units)
        self.receive(total.finish())

    def _split(self, tensors: Tensors) -> tuple[dict[str, Tensor], Tensors]:
        count = len(self.names)
        return dict(zip(self.names, tensors[:count], strict=True)), tensors[count:]

    def _map(self, function: Callable[..., Any], parameters: dict[str, Tensor], *batched: Tensors) -> Any:
        """function(parameters, example) for every example of a chunk."""
        mapped = vmap(function, in_dims=(None, *(0 for _ in batched)), randomness="different")
        with self.settings.autocast_again():
            try:
                with one_pass(self.call.made), mappable(list(self.module.modules()), batched[0][0].device):
                    result = mapped(parameters, *batched)
                check_nothing_kept(self.module)
                return result
            except (AnyorderError, torch.OutOfMemoryError):
                raise
            except FAILURES as error:
                if not self.call.mapped:
                    self.call.mapped = True
                    self.settings.rewind()
                    return self._map(function, parameters, *batched)
                with self.settings.random_again():
                    reason = self.call.explain(error, parameters, batched[0])
                raise ModelError(reason) from error


class _Outputs(torch.autograd.Function):
    """The outputs of a job, whose backward clips."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _Job, *tensors: Tensor) -> Tensors:
        outputs, others = job.outputs(tensors)
        ctx.job = job
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*others)
        return *outputs, *others

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, ...]:
        job: _Job = ctx.job
        if torch.is_grad_enabled():
            raise TrainingError("create_graph=True asks for the gradient of a clipped gradient: it is not covered")
        try:
            tensors = ctx.saved_tensors  # checks that none was changed in place
        except RuntimeError as error:
            raise TrainingError(f"backward through the private model cannot run: {error}") from error
        job.backward(tensors, cotangents[: job.differentiable])
        return (None,) * (2 + len(tensors))
