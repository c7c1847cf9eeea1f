"""Per-unit clipping in one forward and one backward pass, without a gradient for each example where that is dear."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anyorder import checks
from anyorder.clipping.alone import Alone, Tensors
from anyorder.clipping.base import PerUnitClipping, Receive, Table
from anyorder.clipping.batch import Settings, check_groups
from anyorder.clipping.clip_rules import Cut, Rule
from anyorder.clipping.functional import FunctionalClipping
from anyorder.clipping.kept import Made
from anyorder.clipping.lookups import Tables
from anyorder.clipping.passes import Pass, Sums, TooLarge, Unmapped
from anyorder.clipping.plain import Plain
from anyorder.clipping.units import NON_FINITE, check_finite
from anyorder.errors import ClippingWarning, ModelError, TrainingError

__all__ = ["GhostClipping"]

DIRECT_BYTES = 2**28


class GhostClipping(PerUnitClipping):
    """Per-unit clipping for any module that torch.func can map over examples, at about the price of a plain step.

    Outputs are those of the module on each example alone (`torch.func.vmap`), so that no example can depend on
    another. What enters and leaves each linear map, convolution, table and recurrent layer in that one forward and
    backward pass gives the norm of each unit's gradient ("ghost norms") and then, weighted by the clip factors, the
    sum [Li et al. 2022; Bu et al. 2023, book-keeping]; `norms` has the formulas and how their rounding is bounded.
    A parameter that is used in any other way has its per-example gradients made by autograd. A model with a function
    that cannot be mapped so runs with functions in the form of `Mapped`, or else by `FunctionalClipping`. A model of
    torch's own layers in a row, which treat examples apart by definition, runs on the whole batch; see `plain`.

    Cost: a plain step, plus the norms. Memory: what autograd holds, and the gradients of all layers' outputs.

    Args:
        module: the model. Frozen parameters (requires_grad=False) cost nothing; tied ones have one gradient.
        chunk_size: examples that go through the model at a time; a unit's examples are never split. Below the batch
            size every chunk's forward is run twice, with the same random numbers. None takes the whole batch, or
            as many as keep the gradients made by autograd under 256 MiB, or half when a GPU's memory runs out.
        rule: how norms become factors.
        non_finite, tables, count_norm: see `make_clipping`.
    """

    def __init__(
        self,
        module: nn.Module,
        chunk_size: int | None = None,
        rule: Rule | None = None,
        non_finite: str = "zero",
        *,
        tables: Mapping[str, Table] | None = None,
        count_norm: float | None = None,
    ) -> None:
        self._module = module
        self._fixed = chunk_size is not None
        self._chunk_size = None if chunk_size is None else checks.integer("chunk_size", chunk_size, low=1)
        self._rule, self._cut = rule, Cut.of(rule)
        self._non_finite = checks.choice("non_finite", non_finite, NON_FINITE)
        self._tables = Tables.of(module, tables or {}, count_norm)
        self._unmapped = self._mapped = False
        self._made: Made = []

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
        tables = self._tables.by_name
        if not tables.keys() <= parameters.keys():
            frozen = ", ".join(sorted(tables.keys() - parameters.keys()))
            raise ModelError(f"{frozen} was made a table and has been frozen since; set requires_grad=True again")
        plain = None if self._mapped or self._unmapped else Plain.of(self._module, args, kwargs, self._made, tables)
        call = plain or Alone(self._module, args, kwargs, self._made, mapped=self._mapped)
        check_groups(groups, call.size)
        clip_norm = checks.positive("clip_norm", clip_norm)
        if call.size:
            scale = checks.positive("scale", scale)
        nothing = not call.size or not torch.is_grad_enabled()
        if (nothing or self._unmapped) and not tables:  # nothing to clip, or not by this engine
            return self._other(args, kwargs, groups=groups, clip_norm=clip_norm, scale=scale, receive=receive)
        start = Settings.now(call.tensors[0].device)
        groups = groups.detach().cpu()
        refuse = self._non_finite == "refuse"
        options = self._cut, self._tables, refuse, clip_norm, scale, receive, start
        job = _Job(self._module, call, parameters, groups, *options)
        while True:
            try:
                return job.outputs(self._chunk_size, None if self._fixed else DIRECT_BYTES)
            except Unmapped as error:
                cause = error.__cause__ or error
                start.rewind()
                if isinstance(job.call, Plain):
                    job.call = Alone(self._module, args, kwargs, self._made)
                    continue
                if not job.call.mapped:
                    job.call.mapped = self._mapped = True
                    continue
                if tables:
                    raise ModelError(
                        f"{error}\nRow-sparse sums need a model that runs in one pass; with sparse=False its tables "
                        "are trained like any other parameter"
                    ) from cause
                self._unmapped, self._mapped = True, False
                outputs = self._other(args, kwargs, groups=groups, clip_norm=clip_norm, scale=scale, receive=receive)
                warnings.warn(
                    f"{type(self._module).__name__} is clipped in two passes, which takes up to twice as long, since "
                    f"the one-pass engine cannot run it ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})",
                    ClippingWarning,
                    stacklevel=2,
                )
                return outputs
            except (TooLarge, torch.OutOfMemoryError) as error:
                if self._fixed or self._chunk_size == 1:
                    raise
                start.rewind()
                half = max(1, (self._chunk_size or call.size) // 2)
                self._chunk_size = error.size if isinstance(error, TooLarge) else half

    def state_dict(self) -> dict[str, Any]:
        """The chunk size, whether the other engine runs the model, and how; all are found in the first batches."""
        return {"chunk_size": self._chunk_size, "unmapped": self._unmapped, "mapped": self._mapped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with another engine's, save for a chunk size that was given to this one."""
        self._chunk_size = self._chunk_size if self._fixed else state["chunk_size"]
        self._unmapped, self._mapped = state["unmapped"], state["mapped"]

    def _other(self, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
        """By the engine that makes every gradient: some functions can be mapped there alone."""
        other = FunctionalClipping(self._module, self._chunk_size, rule=self._rule, non_finite=self._non_finite)
        other.mapped, other.made = self._mapped, self._made
        outputs = other.forward(args, kwargs, **options)
        self._mapped = other.mapped
        return outputs


@dataclass
class _Job:
    """One batch, from its forward pass to its backward pass."""

    module: nn.Module
    call: Alone | Plain
    parameters: dict[str, Tensor]
    groups: Tensor
    cut: Cut
    tables: Tables
    refuse: bool
    clip_norm: float
    scale: float
    receive: Receive
    settings: Settings
    done: bool = False

    def outputs(self, chunk_size: int | None, direct_bytes: int | None) -> Any:
        """The module's outputs, attached to autograd."""
        if not self.call.size:
            return self._of_nobody()
        cuts = _cut(self.groups, chunk_size)
        held = (*self.parameters.values(), *self.call.tensors)
        if cuts is None:
            whole = self._pass(self.groups, self._finish)
            differentiable, others, anchor = whole.outputs(self.call.tensors, direct_bytes)
            if not torch.is_grad_enabled():
                return self.call.assemble(differentiable, others)
            return self.call.assemble(_Whole.apply(anchor, self, len(held), *held, *differentiable), others)  # type: ignore[no-untyped-call]
        pieces = []
        for cut in cuts:
            differentiable, others, _ = self._pass(self.groups[cut]).outputs(_take(self.call.tensors, cut))
            pieces.append((tuple(t.detach() for t in differentiable), others))
        joined, rest = (
            tuple(_put_together(cuts, parts) for parts in zip(*group, strict=True))
            for group in zip(*pieces, strict=True)
        )
        if not torch.is_grad_enabled():
            return self.call.assemble(joined, rest)
        root = torch.zeros((), device=held[0].device, requires_grad=True)
        return self.call.assemble(_Chunked.apply(root, self, cuts, len(held), *held, *joined), rest)  # type: ignore[no-untyped-call]

    def _of_nobody(self) -> Any:
        """The outputs of no example, of the shapes that those of an example of zeros have."""
        zeros = tuple(t.new_zeros(1, *t.shape[1:]) for t in self.call.tensors)
        with self.settings.random_again(), torch.no_grad():
            differentiable, others, _ = self._pass(self.groups).outputs(zeros)
        empty, rest = (tuple(t[:0] for t in group) for group in (differentiable, others))
        if not torch.is_grad_enabled():
            return self.call.assemble(empty, rest)
        root = torch.zeros((), device=zeros[0].device, requires_grad=True)
        return self.call.assemble(_Chunked.apply(root, self, [], 0, *empty), rest)  # type: ignore[no-untyped-call]

    def backward_in_chunks(self, cuts: list[Tensor], grads: Tensors) -> None:
        """Every chunk's forward pass again, and its backward pass."""
        found: list[Sums] = []
        if not cuts:
            self._pass(self.groups, self._finish).nobody()
            return
        with self.settings.random_again(), self.settings.autocast_again(), torch.enable_grad():
            for cut in cuts:
                chunk = self._pass(self.groups[cut], found.append)
                outputs, _, anchor = chunk.outputs(_take(self.call.tensors, cut))
                # The anchor is there for outputs that depend on no parameter: the pass must finish.
                pairs = [(t, g) for t, g in zip(outputs, _take(grads, cut), strict=True) if t.requires_grad]
                pairs.append((anchor, torch.zeros_like(anchor)))
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                if len(found) > 1:
                    found = [found[0] + found[1]]
        self._finish(found[0])

    def start(self) -> None:
        """Refuse a second backward pass, and one that is to be differentiated."""
        if torch.is_grad_enabled():
            raise TrainingError("create_graph=True asks for the gradient of a clipped gradient: it is not covered")
        if self.done:
            raise TrainingError(
                "backward ran a second time on the same outputs of the private model: each unit is clipped once. Add "
                "the losses and call backward once"
            )
        self.done = True

    def _pass(self, groups: Tensor, receive: Any = None) -> Pass:
        options = self.cut, self.clip_norm, self.scale, receive, self.tables
        return Pass(self.module, self.call, self.parameters, groups, self.settings, *options)

    def _finish(self, found: Sums) -> None:
        if self.refuse:
            check_finite(found.bad, found.units)
        self.receive(found.sums)


def _cut(groups: Tensor, size: int | None) -> list[Tensor] | None:
    """Indices of the examples of each chunk: whole units, `size` examples where units allow. None: one chunk."""
    if size is None or size >= len(groups):
        return None
    ranked, order = torch.sort(groups, stable=True)
    ends = torch.unique_consecutive(ranked, return_counts=True)[1].cumsum(0).tolist()
    cuts, start = [], 0
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        if following is None or following - start > size:
            cuts.append(order[start:end])
            start = end
    return cuts


def _take(tensors: Tensors, cut: Tensor) -> Tensors:
    return tuple(t[cut.to(t.device)] for t in tensors)


def _put_together(cuts: list[Tensor], parts: tuple[Tensor, ...]) -> Tensor:
    whole = torch.cat(parts)
    return torch.empty_like(whole).index_copy_(0, torch.cat(cuts).to(whole.device), whole)


def _saved(ctx: Any) -> None:
    """Check that neither parameters nor inputs were changed in place."""
    try:
        ctx.saved_tensors  # noqa: B018
    except RuntimeError as error:
        raise TrainingError(f"backward through the private model cannot run: {error}") from error


class _Whole(torch.autograd.Function):
    """The outputs of a pass; its backward is where that of the model begins."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, job: _Job, count: int, *tensors: Tensor) -> Tensors:
        ctx.job, ctx.count = job, count
        ctx.save_for_backward(*tensors[:count])
        return tuple(t.view_as(t) for t in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.job.start()
        _saved(ctx)
        # A gradient for the anchor, and be it zero: the parameters' part of backward runs even if nothing uses them.
        return grads[0].new_zeros(()), *(None,) * (2 + ctx.count), *grads


class _Chunked(torch.autograd.Function):
    """The outputs of a job in chunks, whose backward runs the model again."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, job: _Job, cuts: Any, count: int, *tensors: Tensor) -> Tensors:
        ctx.job, ctx.cuts, ctx.count = job, cuts, len(tensors)
        ctx.save_for_backward(*tensors[:count])
        return tuple(t.view_as(t) for t in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.job.start()
        _saved(ctx)
        ctx.job.backward_in_chunks(ctx.cuts, grads)
        return (None,) * (4 + ctx.count)
