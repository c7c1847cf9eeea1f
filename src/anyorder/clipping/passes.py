"""One forward and one backward pass over some examples, and the clipped sum of their units."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks

from anyorder.clipping.alone import Alone, Tensors, check_nothing_kept, mappable
from anyorder.clipping.batch import Settings, UnitMap, full_precision
from anyorder.clipping.clip_rules import Cut
from anyorder.clipping.explain import FAILURES
from anyorder.clipping.kept import one_pass
from anyorder.clipping.layer_rules import layers_with_rules
from anyorder.clipping.lookups import NO_TABLES, Tables, settle_lookups
from anyorder.clipping.norms import Settled, Weights, settle
from anyorder.clipping.plain import NotPlain, Plain
from anyorder.clipping.recurrent_rule import recurrent_layers
from anyorder.clipping.rules import FUNCTION_RULES
from anyorder.clipping.table_rules import TABLE_RULES, Reading
from anyorder.clipping.tracing import Part, Tracer, for_each_example, other_use
from anyorder.clipping.units import accumulator_dtype, round_down, sums_of
from anyorder.clipping.uses import DirectUse, EmbeddingUse, Use
from anyorder.errors import AnyorderError, ModelError

__all__ = ["Pass", "Sums", "TooLarge", "Unmapped"]


RULES = FUNCTION_RULES | TABLE_RULES
_SLACK = {dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
_NO_HOOKS = "they would run or move parts of the model outside of vmap"


class TooLarge(Exception):
    """The per-example gradients of all examples would not fit; those of `size` examples do."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Unmapped(ModelError):
    """The module runs on one example alone, but not under vmap."""


@dataclass(frozen=True)
class Sums:
    """What a pass found.

    Attributes:
        sums: {parameter: sum over units of clipped gradients}, and those of the schedule's own.
        bad: how many units have a gradient whose norm is NaN or infinite; they add exactly zero.
        units: how many units there are.
    """

    sums: dict[str, Tensor]
    bad: int
    units: int

    def __add__(self, other: "Sums") -> "Sums":
        sums = {name: _added(value, other.sums[name]) for name, value in self.sums.items()}
        return Sums(sums, self.bad + other.bad, self.units + other.units)


def _added(to: Tensor, other: Tensor) -> Tensor:
    return (to + other).coalesce() if to.is_sparse else to.add_(other)


class Pass:
    """One forward and one backward pass; backward calls `receive` once, at its end.

    Args:
        module: the module.
        call: how it is called on one example, or on all of them.
        parameters: the trainable parameters, cut off from autograd.
        groups: (b,) int64 on the CPU, equal for examples of one unit.
        settings: of torch, where the call began.
        cut, clip_norm, scale: see `GhostClipping`, `PerUnitClipping`.
        receive: takes the `Sums`.
        tables: the parameters that are read by lookups alone.
    """

    def __init__(
        self, module: nn.Module, call: Alone | Plain, parameters: dict[str, Tensor], groups: Tensor, settings: Settings,
        cut: Cut, clip_norm: float, scale: float, receive: Callable[[Sums], None], tables: Tables = NO_TABLES,
    ) -> None:  # fmt: skip
        self._module, self._call, self.parameters, self._settings = module, call, parameters, settings
        self._cut, self._clip_norm, self._scale, self._receive = cut, clip_norm, scale, receive
        self._tables = tables
        self._device = call.tensors[0].device
        self._units = UnitMap.of(groups, self._device)
        self._dtypes = {name: accumulator_dtype(p) for name, p in parameters.items()}
        self._expected: Counter[str] = Counter()
        self._uses: dict[str, list[tuple[Part, Use]]] = {name: [] for name in parameters}
        self._settled: dict[str, tuple[Part, Settled]] = {}

    # -- forward -----------------------------------------------------------------------------------------------------

    def outputs(self, tensors: Tensors, direct_bytes: int | None = None) -> tuple[Tensors, Tensors, Tensor]:
        """The module's output tensors on the given examples: those that are differentiable, and the others.

        The third is a scalar on which all outputs depend.

        Raises: TooLarge if autograd would make more than direct_bytes of per-example gradients.
        """
        size = len(tensors[0])
        root = torch.zeros((), device=self._device, requires_grad=True)
        if isinstance(self._call, Plain):
            return self._on_batch(self._call, root, *tensors)
        call = self._call
        # Nothing here may hold the anchor: the graph behind it holds this object, and would live on.
        anchor, *copies = _Root.apply(root, self, size, *self.parameters.values())  # type: ignore[no-untyped-call]
        tracer = Tracer(RULES, self.parameters, self._dtypes, anchor, self, call.made, self._tables.by_name)

        def example(token: Tensor, *tensors: Tensor) -> tuple[Tensors, Tensors]:
            copies = dict(zip(self.parameters, tensors, strict=False))
            tracer.start(copies, token)
            return call(copies, tensors[len(copies) :], within=tracer)

        modules = list(self._module.modules())
        versions = [p._version for p in self.parameters.values()]
        token = torch.empty(size, device=self._device)
        with (
            self._understood(call, tensors),
            self._settings.autocast_again(),
            disable_saved_tensors_hooks(_NO_HOOKS),
            recurrent_layers(modules, tracer) as layers,
            layers_with_rules(self._module, tracer, call.made),
            mappable(modules, self._device, traced=layers),
            one_pass(call.made),
        ):
            differentiable, others = for_each_example(example, token, *copies, *tensors)
        tracer.forget()
        written = [n for (n, p), v in zip(self.parameters.items(), versions, strict=True) if p._version != v]
        if written:
            raise ModelError(
                f"forward writes the parameters {', '.join(written)} in place: what it wrote is not private, and is in "
                "them now. Load a saved state, and keep such updates out of forward"
            )
        check_nothing_kept(self._module)
        self._refuse(tracer.direct)
        each = sum(self.parameters[n].numel() * self._dtypes[n].itemsize for n in tracer.direct)
        if direct_bytes is not None and each * size > direct_bytes and size > 1:
            raise TooLarge(max(1, min(size - 1, direct_bytes // each)))
        return differentiable, others, anchor

    def _on_batch(self, call: Plain, root: Tensor, x: Tensor) -> tuple[Tensors, Tensors, Tensor]:
        """The same of a plain model. Where that fails, running it on one example alone tells why."""
        (anchor,) = _Root.apply(root, self, 0)  # type: ignore[no-untyped-call]
        tracer = Tracer({}, self.parameters, self._dtypes, anchor, self, call.made, self._tables.by_name)
        try:
            with disable_saved_tensors_hooks(_NO_HOOKS):
                return (call(tracer, x),), (), anchor
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except (NotPlain, *FAILURES) as error:
            raise Unmapped(f"the model does not run on the whole batch: {error}") from error

    @contextmanager
    def _understood(self, call: Alone, tensors: Tensors) -> Iterator[None]:
        """Say which errors come of running the module on one example alone, and which are its own."""
        try:
            yield
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except FAILURES as error:
            with torch.random.fork_rng([self._device.index] if self._device.type == "cuda" else []):
                reason = call.explain(error, self.parameters, tensors, self._reading)
            raise Unmapped(reason) from error

    def _reading(self, parameters: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """What a model whose tables stand elsewhere runs in, without vmap."""
        tables = self._tables.by_name
        return Reading({id(parameters[name]): table for name, table in tables.items()}) if tables else nullcontext()

    def _refuse(self, names: Iterable[str]) -> None:
        """Refuse tables that are used in another way than lookups."""
        for name in self._tables.by_name.keys() & set(names) if self._tables.by_name else ():
            raise ModelError(other_use(name, "a function that has no rule for it"))

    # -- backward ----------------------------------------------------------------------------------------------------

    def expect(self, part: Part) -> None:
        """A use that backward may enter; see `Book`."""
        self._expected[part.name] += 1

    def enter(self, part: Part, use: Use) -> None:
        """A use that backward has come to. An only one is settled now, while its tensors are in the cache."""
        if self._expected[part.name] > 1 or isinstance(use, DirectUse):
            self._uses[part.name].append((part, use))
            return
        with full_precision(self._device):
            settled = self._settle_uses(part.name, [use])
        self._settled[part.name] = part, settled
        if settled.kept is None:
            self._uses[part.name].append((part, use))

    @torch.no_grad()
    def finish(self, direct: Tensors) -> None:
        """Settle the rest, clip, and add up.

        Args:
            direct: for each parameter, the per-example gradients (b, *shape) that came by autograd, or None.
        """
        self._refuse(name for name, values in zip(self.parameters, direct, strict=True) if values is not None)
        with full_precision(self._device):
            settled = {name: self._settle(name, values) for name, values in zip(self.parameters, direct, strict=True)}
            self._uses, self._settled = {}, {}
            self._receive(self._clipped({name: s for name, s in settled.items() if s is not None}))

    def _settle(self, name: str, direct: Tensor | None) -> Settled | None:
        parameter, uses = self.parameters[name], self._uses[name]
        if name in self._settled:
            part, settled = self._settled[name]
            if direct is None:
                return _in_place(part, settled, parameter)
            if settled.kept is not None:
                kept = _in_shape(part, settled.kept, parameter)
                return Settled.keep(kept + self._units.sum(direct.to(kept.dtype)))
        if direct is not None:
            uses.append((Part(name), DirectUse(direct, self._dtypes[name])))
        if name in self._tables.by_name:
            return self._settle_uses(name, [use for _, use in uses]) if uses else None
        return _settle_parts(uses, parameter, self._units) if uses else None

    def _settle_uses(self, name: str, uses: list[Use]) -> Settled:
        """Settle all uses of a parameter, which none of them is of a view of."""
        if name not in self._tables.by_name:
            return settle(uses, self._units)
        lookups = [use for use in uses if isinstance(use, EmbeddingUse)]
        if len(lookups) < len(uses):
            raise ModelError(other_use(name, "a layer with a rule of its own"))
        return settle_lookups(lookups, self._units)

    def nobody(self) -> None:
        """Give `receive` the sums of no unit at all."""
        self._receive(self._clipped({}))

    def _clipped(self, settled: dict[str, Settled]) -> Sums:
        if settled:
            each = [s.squares.to(self._device) for s in settled.values()]
            rows = (torch.stack(each) if len(each) > 1 else each[0]) * self._scale**2  # (.., U)
        else:  # no parameter has a gradient: all are zero
            rows = torch.zeros(len(self.parameters), self._units.count, dtype=torch.float64, device=self._device)
        bad = None
        if not isfinite(float(rows.sum())):
            bad = ~rows.view(-1, self._units.count).sum(0).isfinite()
            rows = rows.masked_fill(bad, 0.0)
        # Just under clip_norm, so that the rounding of weights and of the norms cannot carry a unit over.
        slack = max(1e-12, *(_SLACK[dtype] for dtype in self._dtypes.values()))
        clip_norm = self._clip_norm * (1 - slack)
        squares = dict(zip(settled or self.parameters, rows if rows.dim() > 1 else [rows], strict=True))
        factors, further = self._cut.apply(squares, clip_norm)
        weights: dict[tuple[int, torch.dtype], Weights] = {}
        sums = {}
        for name, parameter in self.parameters.items():
            dtype = self._dtypes[name]
            if name not in settled and name in self._tables.by_name:
                sums[name] = self._tables.nothing(name, dtype, self._device)
                continue
            if name not in settled:
                sums[name] = parameter.new_zeros(parameter.shape, dtype=dtype)
                continue
            key = id(factors[name]), dtype
            if key not in weights:
                weights[key] = self._weights(self._scale * factors[name], dtype, bad)
            sums[name] = settled[name].total(weights[key])
        sums |= sums_of(further, self._dtypes)
        sums |= self._tables.counts(settled, self._units.count, self._device)
        return Sums(sums, 0 if bad is None else int(bad.sum()), self._units.count)

    def _weights(self, factors: Tensor, dtype: torch.dtype, bad: Tensor | None) -> Weights:
        by_unit = round_down(factors, dtype)
        alone, index = self._units.classes is None, self._units.index
        by_example = by_unit if alone else by_unit[index]
        return Weights(by_unit, by_example, None if bad is None else (bad, bad if alone else bad[index]))


def _settle_parts(uses: list[tuple[Part, Use]], parameter: Tensor, units: UnitMap) -> Settled:
    """Settle the uses of a parameter, of which some may be of views of it."""
    if len(uses) == 1:
        part, use = uses[0]
        return _in_place(part, settle([use], units), parameter)
    views: dict[tuple[str, str], tuple[Part, list[Use]]] = {}
    for part, use in uses:
        views.setdefault(part.key, (part, []))[1].append(use)
    if not _disjoint([part for part, _ in views.values()], parameter):
        whole = [DirectUse(_in_shape(part, use.gradients(slice(None)), parameter), use.dtype) for part, use in uses]
        return settle(whole, units)
    settled = [_in_place(part, settle(own, units), parameter) for part, own in views.values()]
    if len(settled) == 1:
        return settled[0]

    def total(weights: Weights) -> Tensor:
        return torch.stack([s.total(weights) for s in settled]).sum(0)

    return Settled(torch.stack([s.squares for s in settled]).sum(0), total)


def _disjoint(parts: list[Part], parameter: Tensor) -> bool:
    """Whether no two views share an element: then their squared norms add up."""
    if len(parts) == 1:
        return True
    elements = torch.arange(parameter.numel()).view(parameter.shape)
    return int(torch.cat([part.of(elements).flatten() for part in parts]).bincount().max()) <= 1


def _in_place(part: Part, settled: Settled, parameter: Tensor) -> Settled:
    """A view's sums in the parameter's shape, zero elsewhere."""
    if not part.chain:
        return settled

    def total(weights: Weights) -> Tensor:
        return _in_shape(part, settled.total(weights)[None], parameter)[0]

    return Settled(settled.squares, total)


def _in_shape(part: Part, values: Tensor, parameter: Tensor) -> Tensor:
    """(n, *view) in the parameter's shape, (n, *shape), zero elsewhere."""
    if not part.chain:
        return values
    result = values.new_zeros(len(values), *parameter.shape)
    for row, value in zip(result, values, strict=True):
        part.of(row).copy_(value)
    return result


class _Root(torch.autograd.Function):
    """A copy of each parameter for each example; its backward is the last of all."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, owner: Pass, size: int, *parameters: Tensor) -> Tensors:
        ctx.owner, ctx.count = owner, len(owner.parameters)
        ctx.set_materialize_grads(False)
        return root.clone(), *(p.expand(size, *p.shape) for p in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Tensor, *grads: Tensor) -> Any:
        ctx.owner.finish(grads or (None,) * ctx.count)
        return (None,) * (3 + len(grads))
