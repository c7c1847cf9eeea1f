"""Rules for layers of one's own: the gradients of a layer's parameters, from what entered it and came back to it.

Without a rule autograd makes these gradients, for each example; that is always right, and a rule is there where it is
dear. A rule is somebody else's code, so that nothing rests on its being right but the gradient itself:

- It runs under `torch.func.vmap`, and so does the layer: what it returns for an example is a function of that example.
- What it returns is what is cut and added up. A wrong gradient is bounded as a right one is.
- It is compared with autograd on made-up numbers when a layer is first used with inputs of a shape. What is raised
  there depends on the model and on shapes, not on the data.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from anyorder.clipping.kept import Made, Witness, note
from anyorder.clipping.rules import backward_as_forward
from anyorder.clipping.stand_in import stand_in
from anyorder.clipping.tracing import Part, Tracer, other_use
from anyorder.clipping.uses import DirectUse
from anyorder.errors import ArgumentError, ModelError

__all__ = ["LayerRule", "layers_with_rules", "register_layer_rule"]

LayerRule = Callable[[Any, list[Tensor], Tensor], Mapping[Tensor, Tensor]]
"""(layer, activations, backprops) -> {parameter: gradients}; see `register_layer_rule`."""
Rule = TypeVar("Rule", bound=LayerRule)

_RULES: dict[type[nn.Module], LayerRule] = {}
_OURS = frozenset({
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm,
    nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell,
})  # fmt: skip
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of the gradient's norm; else HALF
_HALF = 5e-2


@overload
def register_layer_rule(kind: type[nn.Module], rule: None = None) -> Callable[[Rule], Rule]: ...
@overload
def register_layer_rule(kind: type[nn.Module], rule: Rule) -> Rule: ...
def register_layer_rule(kind: type[nn.Module], rule: Any = None) -> Any:
    """Give a type of layers a rule that makes the gradients of its parameters; as a decorator, or by a call.

        @register_layer_rule(Scale)
        def scale_rule(layer, activations, backprops):
            return {layer.weight: (activations[0] * backprops).flatten(1, -2).sum(1)}

    The rule has the form of Opacus's `register_grad_sampler`. It is given

        layer          the layer, whose parameters are tensors of float32 (float64 where they are)
        activations    what forward was given: its tensors, the positional ones first, each (n, ..)
        backprops      (n, ..), the gradient of the loss with respect to what forward returned, one tensor

    in float32 or float64, and returns {parameter of the layer: its gradients, (n, *shape)}, one entry for each that is
    trained, those of parts of the layer included; row i is of row i of activations and backprops. n is 1, or as many
    rows as the layer sees of one example: the rule runs under `torch.func.vmap`, on each example alone.

    Args:
        kind: the type itself; a subclass needs a rule of its own. A second rule takes the place of the first.
        rule: the function; None for a decorator.
    Returns: the rule, or the decorator.
    Guarantee: what the rule returns for an example is what is cut to the clip norm and added up: whatever that is, the
        privacy of the plan holds. It is compared with autograd on made-up numbers on the first use of each layer with
        inputs of a shape; a rule that disagrees is refused by ModelError, before anything is released.
    Cost: as autograd, a gradient for each example is made. In secure mode, and for models that are run in two passes,
        autograd makes them and the rule is not used.
    Raises: ArgumentError for what is no type of layers, and for a type that has a rule of this package.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ArgumentError(f"kind must be a subclass of torch.nn.Module, the type of the layers, got {kind!r}")
    if kind in _OURS:
        raise ArgumentError(
            f"kind must be a type that has no rule of anyorder, got {kind.__name__}: how its gradients are bounded is "
            "proven for the rule that it has; for another, register a class of your own"
        )
    if rule is None:
        return functools.partial(register_layer_rule, kind)
    if not callable(rule):
        raise ArgumentError(f"rule must be a function of (layer, activations, backprops), got {type(rule).__name__}")
    _RULES[kind] = rule
    return rule


@contextmanager
def layers_with_rules(module: nn.Module, tracer: Tracer, made: Made) -> Iterator[None]:
    """Have the layers of a module that have a rule tell the tracer of their parameters' gradients by that rule."""
    if not _RULES:
        yield
        return
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    inside: set[nn.Module] = set()  # parts of layers with a rule, whose gradients that rule gives
    with ExitStack() as stack:
        for name, layer in module.named_modules():
            rule = _RULES.get(type(layer))
            own = {local: Part(names[id(p)]) for local, p in layer.named_parameters() if id(p) in names}
            if rule is None or not own or layer in inside:
                continue
            for part in own.values():
                if part.name in tracer.tables:
                    raise ModelError(other_use(part.name, f"{type(layer).__name__}, which has a rule of its own"))
            inside.update(layer.modules())
            before = vars(layer).get("forward")
            undo = (
                functools.partial(delattr, layer, "forward")
                if before is None
                else functools.partial(setattr, layer, "forward", before)
            )
            ruled = _Ruled(layer, name, rule, own, layer.forward, tracer, made)
            layer.forward = ruled
            stack.callback(undo)
        yield


@dataclass(frozen=True)
class _Ruled:
    """The forward of one layer that has a rule.

    Attributes:
        name: of the layer in the model.
        parts: the trained parameters, by their names in the layer.
        original: its own forward.
    """

    layer: nn.Module
    name: str
    rule: LayerRule
    parts: dict[str, Part]
    original: Callable[..., Any]
    tracer: Tracer
    made: Made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns for one example, whose parameters get no gradient but by the rule."""
        tracer = self.tracer
        if tracer.nested() or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not slots:
            raise ModelError(f"{self} was given no tensor, and its rule would have no activations")
        tracer.expect(*self.parts.values())
        tracer.direct.update(part.name for part in self.parts.values())
        versions = [_version(leaves[i]) for i in slots]
        with stand_in(self.layer, {local: tracer.tensor(part) for local, part in self.parts.items()}):
            y = self.original(*args, **kwargs)
        if not isinstance(y, Tensor) or not y.is_floating_point():
            raise ModelError(f"{self} must return one floating-point tensor to have a rule, got {type(y).__name__}")
        if versions != [_version(leaves[i]) for i in slots]:
            raise ModelError(f"{self} changes its input in place, which its rule would see; work on a copy")

        def call(tensors: Sequence[Tensor]) -> Any:
            filled = list(leaves)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return self.original(*args, **kwargs)

        def run(y: Tensor, *activations: Tensor) -> Any:
            self._check_once(call, activations, y)
            return tracer.anchored(_Told, self, y, *activations)

        with torch._C.DisableTorchFunction():
            result: Tensor = tracer.on_batch(run, y, *(leaves[i] for i in slots))
        tracer.note(result)
        return result

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({type(self.layer).__name__})"

    def tell(self, activations: Sequence[Tensor], backprops: Tensor) -> None:
        """Enter the gradients, by the rule, of all examples; called in backward."""
        for local, values in self._by_rule(activations, backprops).items():
            self._enter(self.parts[local], values)

    def _enter(self, part: Part, values: Tensor) -> None:
        self.tracer.enter(part, lambda dtype: DirectUse(values, dtype))

    def _by_rule(self, activations: Sequence[Tensor], backprops: Tensor) -> dict[str, Tensor]:
        """{parameter: (B, *shape)} of (B, n, ..) activations and backprops: the rule sees one example at a time."""
        own = {local: _wide(self.tracer.tensor(part)) for local, part in self.parts.items()}

        def alone(*tensors: Tensor) -> tuple[Tensor, ...]:
            note(self.made, *tensors)
            *entered, back = tensors
            found = self.rule(self.layer, entered, back)
            values = {id(p): v for p, v in found.items()}
            strange = values.keys() - {id(p) for p in self.layer.parameters()}
            if strange:
                raise ModelError(f"the rule of {self} gives gradients of {len(strange)} that are not its parameters")
            return tuple(self._summed(local, p, values.get(id(p))) for local, p in own.items())

        with stand_in(self.layer, own), Witness(self.made):
            sums = vmap(alone)(*map(_wide, activations), _wide(backprops))
        return dict(zip(own, sums, strict=True))

    def _summed(self, local: str, parameter: Tensor, values: Any) -> Tensor:
        """The gradient of one example, of those of its rows."""
        if not isinstance(values, Tensor) or values.shape[1:] != parameter.shape or not values.dim():
            given = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else "none"
            raise ModelError(
                f"the rule of {self} must give gradients of shape (n, *{tuple(parameter.shape)}) for its parameter "
                f"{local}, got {given}"
            )
        return values.sum(0)

    # -- the check ---------------------------------------------------------------------------------------------------

    def _check_once(self, call: Callable[[Sequence[Tensor]], Any], activations: Sequence[Tensor], y: Tensor) -> None:
        """Compare rule and autograd on numbers of one's own, where a layer is first used with such inputs.

        Not on those of the batch: that they disagree there, and not elsewhere, would tell of the data.
        """
        shapes = tuple((t.shape[1:], t.dtype) for t in (y, *activations))
        key = self.rule, shapes, self.layer.training, tuple(self.parts)
        checked = _checked.setdefault(self.layer, set())
        if key in checked:
            return
        devices = [y.device.index] if y.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            finite = any(self._agree(call, activations, y, make) for make in (torch.randn, torch.rand))
        if not finite:
            raise ModelError(
                f"the rule of {self} could not be compared with autograd: on random numbers of the shapes of its "
                "inputs the gradients are not finite"
            )
        checked.add(key)

    def _agree(
        self, call: Callable[[Sequence[Tensor]], Any], like: Sequence[Tensor], y: Tensor, make: Callable[..., Tensor]
    ) -> bool:
        """Whether there was something to compare; raises ModelError where the two differ."""
        generator = torch.Generator().manual_seed(0)
        sizes = [size for p in self.layer.parameters() for size in p.shape]
        activations = [_made_up(t, make, generator, min(sizes, default=2)) for t in like]
        backprops = _made_up(y, make, generator, 0)
        try:
            by_autograd = [self._loop(call, [t[i] for t in activations], backprops[i]) for i in range(EXAMPLES)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ModelError(
                f"{self} does not run on random numbers of the shapes of its inputs, so that its rule could not be "
                f"compared with autograd: {error}"
            ) from error
        with torch.no_grad():
            by_rule = self._by_rule(activations, backprops)
        right = {local: torch.stack([one[local] for one in by_autograd]).double() for local in self.parts}
        total = torch.stack([values.norm() for values in right.values()]).norm()
        if not bool(total.isfinite()):
            return False
        for local, values in right.items():
            close = _CLOSE.get(self.tracer.tensor(self.parts[local]).dtype, _HALF)
            close = max(close, *(_CLOSE.get(t.dtype, _HALF) for t in (y, *like) if t.is_floating_point()))
            off = (by_rule[local].double() - values).norm()
            if not bool(off <= close * values.norm() + 1e-6 * total):
                raise ModelError(
                    f"the rule of {self} does not give the gradient of its parameter {local} that autograd gives, on "
                    f"random numbers: they differ by {float(off / values.norm()):.1g} of its norm. Correct the rule "
                    "(its docstring in register_layer_rule says what it is given), or leave it out"
                )
        return True

    def _loop(
        self, call: Callable[[Sequence[Tensor]], Any], example: Sequence[Tensor], back: Tensor
    ) -> dict[str, Tensor]:
        """The gradients of one example by autograd."""
        own = {local: self.tracer.tensor(part).clone().requires_grad_() for local, part in self.parts.items()}
        with stand_in(self.layer, own):
            y = call(example)
        found = torch.autograd.grad(y, list(own.values()), back, allow_unused=True, materialize_grads=True)
        return dict(zip(own, found, strict=True))


EXAMPLES = 2  # in a comparison: one that adds up over the batch would show
_checked: "weakref.WeakKeyDictionary[nn.Module, set[Any]]" = weakref.WeakKeyDictionary()


def _made_up(like: Tensor, make: Callable[..., Tensor], generator: torch.Generator, below: int) -> Tensor:
    """Some examples of the shape and type of one; whole numbers are below the least size of a parameter, as ids."""
    shape = EXAMPLES, *like.shape[1:]
    if like.is_floating_point() or like.is_complex():
        return make(shape, generator=generator).to(like.device, like.dtype)
    high = 2 if like.dtype == torch.bool else max(1, min(below, 127))
    return torch.randint(0, high, shape, generator=generator).to(like.device, like.dtype)


def _version(tensor: Tensor) -> int:
    """How often the examples' own tensor was written."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor._version


def _wide(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 as float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Told(torch.autograd.Function):
    """A layer's output, whose gradient is told to the layer's rule."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ruled: _Ruled, y: Tensor, *activations: Tensor) -> Tensor:
        ctx.ruled, ctx.count = ruled, len(activations)
        ctx.save_for_backward(*activations)
        return y.view_as(y)

    @staticmethod
    @backward_as_forward
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.ruled.tell([t.detach() for t in ctx.saved_tensors], grad)
        return None, None, grad, *(None,) * ctx.count
