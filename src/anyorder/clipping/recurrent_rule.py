"""The recurrent layers of torch.nn inside a traced module: unmodified, and run on the whole batch."""

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anyorder.clipping.recurrent import run_recurrent
from anyorder.clipping.tracing import Part, Tracer
from anyorder.clipping.uses import DirectUse, LinearUse

__all__ = ["recurrent_layers"]

Layer = nn.RNNBase | nn.RNNCellBase
_LAYERS = (nn.RNNBase, nn.RNNCellBase)


@contextmanager
def recurrent_layers(modules: Sequence[nn.Module], tracer: Tracer) -> Iterator[list[nn.Module]]:
    """Run the recurrent layers of torch.nn among the modules, those of plain parameters, on the whole batch.

    Yields: these layers.
    """
    layers: list[nn.Module] = []
    with ExitStack() as stack:
        for layer in modules:
            if not isinstance(layer, _LAYERS) or "forward" in vars(layer):
                continue
            if {name for name, _ in layer.named_parameters(recurse=False)} >= set(_weight_names(layer)):
                layer.forward = functools.partial(_forward, tracer, layer)
                stack.callback(delattr, layer, "forward")
                layers.append(layer)
        yield layers


def _weight_names(layer: Layer) -> list[str]:
    if isinstance(layer, nn.RNNBase):
        return [name for names in layer._all_weights for name in names]
    return ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if layer.bias else [])]


def _forward(tracer: Tracer, layer: Layer, input: Any, hx: Any = None) -> Any:
    """What `layer(input, hx)` returns for one example; a layer takes a batch, here n = 1 as a rule, or one sequence."""
    if not isinstance(input, Tensor) or tracer.nested():
        return type(layer).forward(layer, input, hx)
    cell, lstm = isinstance(layer, nn.RNNCellBase), isinstance(layer, (nn.LSTM, nn.LSTMCell))
    dim = (
        0 if cell or layer.batch_first else 1
    )  # of n in the inputs and outputs; states have it in front or behind layers
    state_dim = 0 if cell else 1
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    alone = input.dim() == (1 if cell else 2)
    if alone:
        input, states = input.unsqueeze(dim), [state.unsqueeze(state_dim) for state in states]
    parts = {name: tracer.part(getattr(layer, name)) for name in _weight_names(layer)}
    tracer.expect(*parts.values())

    def run(x: Tensor, *hidden: Tensor) -> tuple[Tensor, ...]:
        folded = tuple(_fold(h, state_dim) for h in hidden)
        hx = None if not folded else folded if lstm else folded[0]
        twin = _with_own_weights(tracer, layer, parts)
        result = run_recurrent(twin, _fold(x, dim), hx, _recorder(tracer, parts, len(x)))
        y, last = (None, result) if cell else result
        last = last if lstm else (last,)
        outputs = () if y is None else (_unfold(y, dim, len(x)),)
        return *outputs, *(_unfold(h, state_dim, len(x)) for h in last)

    with torch._C.DisableTorchFunction():
        outputs = list(tracer.on_batch(run, input, *states))
    tracer.note(*outputs)
    y = None if cell else outputs.pop(0)
    if alone:
        y, outputs = y if y is None else y.squeeze(dim), [state.squeeze(state_dim) for state in outputs]
    last = tuple(outputs) if lstm else outputs[0]
    return last if cell else (y, last)


def _fold(tensor: Tensor, dim: int) -> Tensor:
    """(B, ..., n, ...) with B and n in one dimension, at `dim`."""
    return tensor.movedim(0, dim).flatten(dim, dim + 1)


def _unfold(tensor: Tensor, dim: int, batch: int) -> Tensor:
    """(B, ..., n, ...) again."""
    return tensor.reshape(*tensor.shape[:dim], batch, -1, *tensor.shape[dim + 1 :]).movedim(dim, 0)


def _with_own_weights(tracer: Tracer, layer: Layer, parts: dict[str, Part | None]) -> Any:
    """The layer with the parameters themselves in the place of their copies."""
    twin: Any = copy.copy(layer)
    twin._parameters = {
        name: getattr(layer, name) if part is None else tracer.anchored(_Same, tracer.tensor(part))
        for name, part in parts.items()
    }
    return twin


def _recorder(tracer: Tracer, parts: dict[str, Part | None], batch: int) -> Any:
    def record(name: str, activations: Tensor | None, gradients: Tensor) -> None:
        part = parts[name]
        if part is None:
            return
        g = gradients.reshape(batch, -1, gradients.shape[-1])
        if activations is None:
            tracer.enter(part, lambda dtype: DirectUse(g.sum(1, dtype=dtype), dtype))
        else:
            a = activations.reshape(batch, -1, activations.shape[-1])
            tracer.enter(part, lambda dtype: LinearUse(a, g, dtype))

    return record


class _Same(torch.autograd.Function):
    """A parameter, such that what is computed from it depends on the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None
