"""Models of torch's own layers in a row, run on the whole batch as they stand: vmap takes a quarter of a small step.

A model is plain if it is `nn.Sequential`, or one layer, and every part of it is exactly of a kind listed here. Then no
example can see another, although all run together:

- Each kind is, by its definition in torch, a function of one row of its input at a time, row i of the result being of
  row i alone: a linear map and LayerNorm over later dimensions than the first, a convolution and pooling of images
  with a dimension of examples in front, rows of a table, functions of one element; a dropout mask is of no data.
  Where the number of dimensions decides which dimension a layer takes for the examples, it is checked.
- What runs is that and nothing else. The type of each part is the listed class itself, with the `forward` that it had
  when this file was loaded; the part has the attributes that its class gives it and no further ones, settings are
  numbers and words, buffers there are none, hooks none but of saving and loading, parameters are `nn.Parameter` of the
  shape that the class gives them. Input and modes of torch are checked likewise: no subclass, no transform, no mode, no
  hook for all modules. So no code of the user runs between the batch and the outputs, and nothing can be kept of it. A
  table that is read elsewhere than in its parameter (`base.Table`) is the engine's.
- Functions and settings are read when the model is called, and the chunks of backward run with what was read.

Each use of a trained parameter is a function of `rules`, the same as under vmap, with the parameter cut off from
autograd: what enters and leaves it is all that norms and sums are made of. All is looked at anew in every batch; what
is not plain in every respect is run on each example alone.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyorder.clipping.base import Table
from anyorder.clipping.kept import Made, one_pass
from anyorder.clipping.rules import Convolution, LayerNorm, LinearMap
from anyorder.clipping.table_rules import Bag, Lookup, rows_of
from anyorder.clipping.tracing import Part, Tracer
from anyorder.clipping.uses import Geometry

__all__ = ["NotPlain", "Plain"]

Layer = Callable[[Tracer, Tensor], Tensor]


class NotPlain(Exception):
    """What is not in the form of this file."""


class Plain:
    """The call `module(x)` of a plain model on the whole batch.

    Attributes:
        tensors: (x,), with leading dimension `size`.
        size: B, the number of examples.
    """

    mapped = False

    def __init__(self, x: Tensor, layers: list[Layer], made: Made) -> None:
        self.tensors, self.size, self._layers, self.made = (x,), len(x), layers, made

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None = None,
        tables: Mapping[str, Table] | None = None,
    ) -> "Plain | None":  # fmt: skip
        """The call, or None where model or arguments are not in this form."""
        if type(module) not in _KINDS or len(args) != 1 or kwargs or type(args[0]) is not Tensor or not _alone(args[0]):
            return None
        names: dict[int, str] = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        try:
            layers = list(_layers(module, _Trained(names, tables or {})))
        except NotPlain:
            return None
        return cls(args[0], layers, Made() if made is None else made)

    def __call__(self, tracer: Tracer, x: Tensor) -> Tensor:
        """The outputs of (b, ..) examples; the tracer's book is told of every use of a parameter.

        Raises: NotPlain where an input has too few dimensions.
        """
        with one_pass(self.made):
            for layer in self._layers:
                x = layer(tracer, x)
        return x

    def assemble(self, differentiable: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
        """The module's output: a tensor."""
        del others
        return differentiable[0]


def _alone(x: Tensor) -> bool:
    """Whether torch itself, and nobody else, computes what is computed of a tensor."""
    functorch = torch._C._functorch
    return (
        x.dim() > 0
        and not x.requires_grad
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.is_autocast_enabled(x.device.type)
        and not functorch.is_functorch_wrapped_tensor(x)
        and functorch.maybe_current_level() is None
        and not torch.compiler.is_compiling()
        and not (_modes() or _dispatch_modes())
        and nn.Module.__call__ is _CALL
        and bool(_FOR_ALL_MODULES)
        and not any(_FOR_ALL_MODULES)
    )


def _many() -> int:
    return 1


_modes: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", _many)
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _many)
_CALL = nn.Module.__call__
_FOR_ALL_MODULES: list[Mapping[Any, Any]] = [
    value
    for name, value in vars(nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, Mapping)
]


# -- which layers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trained:
    """The names of trained parameters by their id, and how those are read that are tables."""

    names: Mapping[int, str]
    tables: Mapping[str, Table]

    def part(self, parameter: Any) -> Part | None:
        name = self.names.get(id(parameter))
        return None if name is None else Part(name)

    def is_table(self, parameter: Any) -> bool:
        return self.names.get(id(parameter)) in self.tables


def _layers(module: nn.Module, trained: _Trained) -> Iterator[Layer]:
    """The layers in order; raises NotPlain."""
    kind, own = type(module), vars(module)
    known = _KINDS.get(kind)
    if known is None or kind.forward is not known[0] or own.keys() != known[1] or any(map(own.get, _EMPTY)):
        raise NotPlain
    if kind is nn.Sequential:
        if own["_parameters"]:
            raise NotPlain
        for part in own["_modules"].values():
            yield from _layers(part, trained)
        return
    settings = [own[name] for name in ("training", *known[2])]
    if own["_modules"] or not all(map(_is_setting, settings)) or own.get("inplace") or own.get("return_indices"):
        raise NotPlain
    if kind in _WITH_PARAMETERS:
        if kind not in _LOOKUPS and any(map(trained.is_table, own["_parameters"].values())):
            raise NotPlain
        yield _WITH_PARAMETERS[kind](own, trained)
        return
    if own["_parameters"]:
        raise NotPlain
    yield _of_rows(kind, own)


def _is_setting(value: Any) -> bool:
    kind = type(value)
    return kind in _SETTINGS or (kind in (tuple, list) and all(type(v) in _SETTINGS for v in value))


def _of_rows(kind: type[nn.Module], own: dict[str, Any]) -> Layer:
    function, names = _OF_ROWS[kind]
    settings = [own[name] for name in names]
    if kind is nn.Flatten and not (
        set(map(type, settings)) == {int} and settings[0] >= 1 and (settings[1] == -1 or settings[1] >= 1)
    ):
        raise NotPlain
    least = 4 if kind in _POOLS else 1

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if x.dim() < least:
            raise NotPlain
        return function(x, *settings)

    return layer


def _parameters(own: dict[str, Any], trained: _Trained, *wanted: str) -> tuple[list[Any], list[Any]]:
    """The parameters of a layer, cut off, and their parts: None for frozen ones."""
    held = own["_parameters"]
    if tuple(held) != wanted or any(p is not None and type(p) is not nn.Parameter for p in held.values()):
        raise NotPlain
    parts = [trained.part(p) for p in held.values()]
    return [None if p is None else p.detach() for p in held.values()], parts


# -- layers with parameters ------------------------------------------------------------------------------------------


def _linear(own: dict[str, Any], trained: _Trained) -> Layer:
    (w, b), parts = _parameters(own, trained, "weight", "bias")
    if w is None or w.dim() != 2 or (b is not None and b.shape != w.shape[:1]) or _bias_alone(parts):
        raise NotPlain

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if x.dim() < 2:
            raise NotPlain
        if parts[0] is None:
            return F.linear(x, w, b)
        tracer.expect(*parts)
        result: Tensor = tracer.anchored(LinearMap, tracer, parts, x, w, b)
        return result

    return layer


def _convolution(own: dict[str, Any], trained: _Trained) -> Layer:
    (w, b), parts = _parameters(own, trained, "weight", "bias")
    spatial = 0 if w is None else w.dim() - 2
    odd = any(type(own[name]) is not tuple for name in ("kernel_size", "stride", "padding", "dilation"))
    odd = odd or own["padding_mode"] != "zeros" or own["transposed"] or len(own["kernel_size"]) != spatial
    if odd or w is None or (b is not None and b.shape != w.shape[:1]) or _bias_alone(parts):
        raise NotPlain
    geometry = Geometry(tuple(w.shape[2:]), own["stride"], own["padding"], own["dilation"], own["groups"])

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if x.dim() != spatial + 2:
            raise NotPlain
        if parts[0] is None:
            stride, padding, dilation, groups = geometry.stride, geometry.padding, geometry.dilation, geometry.groups
            return torch.convolution(x, w, b, stride, padding, dilation, False, [0] * spatial, groups)
        tracer.expect(*parts)
        result: Tensor = tracer.anchored(Convolution, tracer, parts, geometry, x, w, b)
        return result

    return layer


def _table(own: dict[str, Any], trained: _Trained) -> tuple[Any, Part | None, int | None]:
    """Where the rows of a table come from, its part, and the row of padding."""
    (w,), (part,) = _parameters(own, trained, "weight")
    padding = own["padding_idx"]
    if (
        w is None
        or w.dim() != 2
        or type(padding) not in (int, type(None))
        or own["max_norm"] is not None
        or own["scale_grad_by_freq"]
    ):
        raise NotPlain
    source = w if part is None else trained.tables.get(part.name, w)
    return source, part, None if padding is None else padding % rows_of(source)


def _embedding(own: dict[str, Any], trained: _Trained) -> Layer:
    source, part, padding = _table(own, trained)

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if part is None:
            return F.embedding(x, source)
        tracer.expect(part)
        result: Tensor = tracer.anchored(Lookup, tracer, part, padding, x, source)
        return result

    return layer


def _bag(own: dict[str, Any], trained: _Trained) -> Layer:
    source, part, padding = _table(own, trained)
    mode = own["mode"]
    if mode not in ("sum", "mean") or own["include_last_offset"]:
        raise NotPlain

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if x.dim() != 2:
            raise NotPlain
        if part is None:
            return F.embedding_bag(x, source, mode=mode, padding_idx=padding)
        tracer.expect(part)
        result: Tensor = tracer.anchored(Bag, tracer, part, padding, mode, x.unsqueeze(1), None, source)
        return result.squeeze(1)

    return layer


def _layer_norm(own: dict[str, Any], trained: _Trained) -> Layer:
    (w, b), parts = _parameters(own, trained, "weight", "bias")
    shape, eps = own["normalized_shape"], own["eps"]
    if type(shape) is not tuple or any(p is not None and p.shape != shape for p in (w, b)):
        raise NotPlain
    learns = parts[0] is not None
    if (b is not None and (parts[1] is not None) != learns) or (w is None and b is not None):
        raise NotPlain

    def layer(tracer: Tracer, x: Tensor) -> Tensor:
        if x.dim() <= len(shape) or tuple(x.shape[-len(shape) :]) != shape:
            raise NotPlain
        if not learns:
            return F.layer_norm(x, shape, w, b, eps)
        if x.dtype not in (torch.float32, torch.float64) or any(p is not None and p.dtype != x.dtype for p in (w, b)):
            raise NotPlain
        tracer.expect(*parts)
        result: Tensor = tracer.anchored(LayerNorm, tracer, parts, eps, x, w, b)
        return result

    return layer


def _bias_alone(parts: list[Part | None]) -> bool:
    """Whether the bias is trained and the weight is not."""
    return parts[0] is None and parts[1] is not None


_WITH_PARAMETERS: dict[type[nn.Module], Callable[[dict[str, Any], _Trained], Layer]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _bag,
    nn.LayerNorm: _layer_norm,
}


# -- layers without --------------------------------------------------------------------------------------------------


def _itself(x: Tensor) -> Tensor:
    return x


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


_OF_ROWS: dict[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    # (function, the attributes that it takes after its input)
    nn.Identity: (_itself, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.ReLU: (F.relu, ()),
    nn.SiLU: (F.silu, ()),
    nn.Mish: (F.mish, ()),
    nn.GELU: (_gelu, ("approximate",)),
    nn.ELU: (F.elu, ("alpha",)),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
    nn.Flatten: (torch.flatten, ("start_dim", "end_dim")),
    nn.Dropout: (F.dropout, ("p", "training")),
    nn.MaxPool2d: (F.max_pool2d, ("kernel_size", "stride", "padding", "dilation", "ceil_mode")),
    nn.AvgPool2d: (
        F.avg_pool2d,
        ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    ),
    nn.AdaptiveAvgPool2d: (F.adaptive_avg_pool2d, ("output_size",)),
}
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)

_CONVOLUTION = (
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "transposed", "output_padding",
    "groups", "padding_mode", "_reversed_padding_repeated_twice",
)  # fmt: skip
_ATTRIBUTES: dict[type[nn.Module], tuple[str, ...]] = {  # what its class gives a part beside what every module has
    **{kind: names for kind, (_, names) in _OF_ROWS.items()},
    **dict.fromkeys((nn.ReLU, nn.SiLU, nn.Mish), ("inplace",)),
    nn.ELU: ("alpha", "inplace"),
    nn.LeakyReLU: ("negative_slope", "inplace"),
    nn.Dropout: ("p", "inplace"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode"),
    nn.Sequential: (),
    nn.Linear: ("in_features", "out_features"),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Embedding: (
        "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
    ),
    nn.EmbeddingBag: (
        "num_embeddings", "embedding_dim", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
        "include_last_offset", "padding_idx",
    ),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
}  # fmt: skip
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_EVERY_MODULE = vars(nn.Module()).keys()
_WHEN_SAVED = {name for name in _EVERY_MODULE if "state_dict" in name}  # hooks, which no forward or backward runs
_EMPTY = tuple(_EVERY_MODULE - {"training", "_parameters", "_modules"} - _WHEN_SAVED)
_KINDS = {kind: (kind.forward, _EVERY_MODULE | set(names), names) for kind, names in _ATTRIBUTES.items()}
_SETTINGS = frozenset({type(None), bool, int, float, str})
