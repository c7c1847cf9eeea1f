"""Clients: what a user does between the model that it is sent and the change that it sends back."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.federated.server import Layout
from anyorder.sampling.samplers import key_of, permutation_of

# ----------------------------------------------------------------------------------------------------
# What a module keeps beside its parameters and buffers: state in plain attributes, which no client may inherit.


KEEPS = "it keeps state in plain attributes"

HIDDEN = (
    "the model or the loss keeps state in plain attributes, and only for some data, which was not seen when it was "
    "tried: one client's data would come into the changes of others. Keep such state in buffers, which begin anew for "
    "each client"
)

Snapshot = list[Any] | None
"""The objects that a module is made of, and the versions of tensors; None where some cannot be looked into."""

_LEAVES = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, Enum, FunctionType, BuiltinFunctionType,
    ModuleType, ReferenceType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MOST_OBJECTS = 50_000  # objects that are looked at


def snapshot(module: Any) -> Snapshot:
    """What tells whether a module, or a loss, changed: everything that its attributes lead to.

    Values of parameters and buffers are left out, as they are set back by those who train; a parameter or buffer that
    is another object counts. Objects are held, so that none can take the place of another one unseen. What functions
    close over, and globals, are not seen.

    Returns: None where something cannot be looked into: it may have changed.
    """
    known: set[int] = set()
    if isinstance(module, nn.Module):
        known = {id(t) for t in [*module.parameters(), *module.buffers()]}
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [module]
    while waiting:
        value = waiting.pop()
        found.append(value)
        if isinstance(value, _LEAVES) or id(value) in known or id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        if parts is None or len(found) + len(waiting) + len(parts) > _MOST_OBJECTS:
            return None
        waiting.extend(parts)
    return found


def same(before: Snapshot, after: Snapshot) -> bool:
    """Whether nothing changed between two snapshots; not where one could not be taken."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(a is b or (type(a) is int and type(b) is int and a == b) for a, b in zip(before, after, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """What an object is made of; None where that cannot be told."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else [value._version]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    own = getattr(value, "__dict__", None)
    if isinstance(value, Mapping) and type(value).__module__ in {"builtins", "collections"}:
        return [*value.keys(), *value.values()]
    if isinstance(value, _CONTAINERS):
        return [*value, *(own or {}).values()]
    kind: Any = type(value)  # with a way of its own to be copied it may have more than its attributes
    plain = kind.__reduce__ is object.__reduce__ and not isinstance(value, torch.jit.ScriptModule)
    return list(own.values()) if own is not None and plain else None


# ----------------------------------------------------------------------------------------------------
# A gradient as the list of operations that autograd runs, run again without it: a fifth less for a small step.


Gradients = Callable[..., list[Tensor]]
"""(*parameters, x, y) -> the gradient of the mean loss by each parameter."""

_known_operation: WeakKeyDictionary[nn.Module, dict[Any, Gradients]] = WeakKeyDictionary()


def gradients_of(training: "LocalTraining", model: nn.Module, names: list[str]) -> Gradients:
    """By autograd, of parameters in the place of the model's."""

    def gradients(*given: Tensor) -> list[Tensor]:
        *parameters, x, y = given
        own = [p.requires_grad_() for p in parameters]
        loss = training.loss(functional_call(model, dict(zip(names, own, strict=True)), (x,)), y)
        return list(torch.autograd.grad(loss, own, allow_unused=True, materialize_grads=True))

    return gradients


def recorded(
    training: "LocalTraining", given: nn.Module, client: nn.Module, names: list[str], x: Tensor, y: Tensor
) -> tuple[Gradients | None, list[Tensor] | None]:
    """The gradients for batches like this one, from a list of operations written down once; None if they differ.

    For models in which no value decides what is computed, and whose whole state is the parameters: `why_looped` tries
    the first, and the second is looked at here. What else a model or a loss may depend on, a number that is changed
    between rounds, is why the list is compared with autograd on this batch, bit for bit, each time it is asked for.

    Args:
        given: whose list it is, as long as it lives.
        client: the copy of it that is trained.
        names: of the parameters that are trained.
        x, y: one batch.
    Returns: the list, and the gradients of this batch by autograd; None for both where nothing is tried.
    """
    if len(names) < len(list(client.parameters())) or list(client.buffers()):
        return None, None
    own = dict(client.named_parameters())
    parameters = [own[name].detach().clone() for name in names]
    lists = _known_operation.setdefault(given, {})
    key = (training.loss, x.shape, x.stride(), x.dtype, y.shape, y.dtype, tuple(names))
    expected = gradients_of(training, client, names)(*parameters, x, y)
    for _ in range(2):  # the second time with a new list
        run = lists.pop(key, None) or _record(gradients_of(training, client, names), [*parameters, x, y])
        with torch.no_grad():
            found = run(*parameters, x, y)
        if all(map(torch.equal, found, expected)):
            lists[key] = run
            return run, expected
    return None, expected


def _record(gradients: Gradients, given: list[Tensor]) -> Gradients:
    module = make_fx(gradients)(*given)
    aten = torch.ops.aten
    for node in list(module.graph.nodes):
        if node.target is aten.detach.default:  # there is nothing to detach from
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:  # turned twice
            node.replace_all_uses_with(node.args[0].args[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    run: Gradients = module.forward
    return run


# ----------------------------------------------------------------------------------------------------
# Clients one after the other, with nothing of a step made anew for each of them.
#
# One copy of the model serves all, gradients come from `torch.autograd.grad`, updates are made in place, and images are
# laid out channels last where the model takes them so.


_known_loss: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()

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
    found = _known_loss.setdefault(model, {})
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


@dataclass(frozen=True)
class LocalTraining:
    """SGD on the examples of one user, from the weights that the server sent; the message is the change.

        v <- momentum v + grad loss(model(x), y),    w <- w - lr v,    v = 0 at first;    message = w_after - w_before

    As in [Kairouz et al. 2021, section 7], whose settings are lr 0.5, batches of 16, one epoch, at most 256 examples.
    A user with more examples trains on a choice of them, drawn again from each seed. Each epoch has an order of its
    own; its last batch may be short.

    Only the parameters of the layout are trained; the others stay as the server sent them. The model that is given is
    never changed, nor is torch's generator: clients train a copy, in training mode, whose buffers begin with the given
    ones for each client and are dropped after it. So does what a model or a loss keeps in plain attributes, but not
    what functions close over: that would go from client to client.

    Args:
        loss: loss(model(x), y) -> the mean over a batch, a scalar.
        lr: of the clients' SGD.
        batch_size: examples of a step.
        epochs: how many times a client goes through its examples.
        max_examples: of a user, in one round.
        momentum: of the clients' SGD, from 0 to below 1.
    Raises: ArgumentError.

    Example:
        >>> training = LocalTraining(torch.nn.functional.mse_loss, lr=0.25, batch_size=1)
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> layout = Layout.of({"weight": torch.nn.init.zeros_(model.weight)})
        >>> training.change(model, layout, (torch.ones(1, 1), torch.ones(1, 1)), seed=0)  # 0.25 * 2 * (1 - 0)
        tensor([0.5000])
    """

    loss: Callable[[Any, Tensor], Tensor]
    lr: float = 0.5
    batch_size: int = 16
    epochs: int = 1
    max_examples: int = 256
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ArgumentError(f"loss must be a function of outputs and targets, got {type(self.loss).__name__}")
        checks.positive("lr", self.lr)
        checks.integer("batch_size", self.batch_size, low=1)
        checks.integer("epochs", self.epochs, low=1)
        checks.integer("max_examples", self.max_examples, low=1)
        if not 0 <= checks.real("momentum", self.momentum) < 1:
            raise ArgumentError(f"momentum must be at least 0 and below 1, got {self.momentum!r}")

    def change(self, model: nn.Module, layout: Layout, examples: Examples, seed: int | bytes) -> Tensor:
        """The change of one client, (size,) in the order of the layout: the loop.

        Args:
            model: as the server sent it; not changed.
            layout: of what is shared, `server.layout`.
            examples: (x, y), tensors of as many examples; none are a change of zero.
            seed: of the order of the examples, and of dropout; equal seeds give equal changes.
        Returns: float32, float64 where some parameter is; not finite where the loss was not.
        Raises: ArgumentError for examples that are no pair of tensors of equal length, or a parameter that the model
            has not.
        """
        return self.looped(model, layout, [examples], [seed])[0]

    def changes(
        self, model: nn.Module, layout: Layout, cohort: Sequence[Examples], seeds: Sequence[int | bytes]
    ) -> Tensor:
        """The changes of many clients, (m, size): row i is `change` of client i, up to rounding.

        Small models are trained many clients at once, by `torch.func`; the others one after the other.

        Args: as of `change`, for each client one pair of examples and one seed.
        """
        cohort = checked(cohort, seeds)
        result = None
        for group in _alike(cohort):
            some, own = [cohort[i] for i in group], [seeds[i] for i in group]
            reason = why_looped(self, model, layout, some[0])
            if reason is None:
                changes = mapped(self, model, layout, some, own)
            else:
                changes = looped(self, model, layout, some, own, record=reason == LARGE)
            if len(group) == len(cohort):
                return changes
            result = changes.new_zeros(len(cohort), layout.size) if result is None else result
            result[group] = changes
        return looped(self, model, layout, [], []) if result is None else result

    def looped(
        self, model: nn.Module, layout: Layout, cohort: Sequence[Examples], seeds: Sequence[int | bytes]
    ) -> Tensor:
        """The changes of a cohort as `changes` gives them, by the loop for every model."""
        cohort = checked(cohort, seeds)
        return looped(self, model, layout, cohort, seeds)


def checked(cohort: Sequence[Examples], seeds: Sequence[int | bytes]) -> list[Examples]:
    """The cohort, each client a pair of tensors of as many examples, and as many seeds."""
    if len(cohort) != len(seeds):
        raise ArgumentError(f"there must be one seed a client, got {len(seeds)} for {len(cohort)}")
    for examples in cohort:
        if not isinstance(examples, (tuple, list)) or [isinstance(part, Tensor) for part in examples] != [True, True]:
            raise ArgumentError(f"examples must be a pair (x, y) of tensors, got {type(examples).__name__}")
        x, y = examples
        if not x.ndim or not y.ndim or len(x) != len(y):
            raise ArgumentError("x and y must have as many rows, one an example; those of some client differ")
    return [(x, y) for x, y in cohort]


def _alike(cohort: Sequence[Examples]) -> list[list[int]]:
    """The clients whose examples have the same shapes and types, those with some before those with none."""
    groups: dict[Any, list[int]] = {}
    for i, (x, y) in enumerate(cohort):
        groups.setdefault((x.shape[1:], x.dtype, y.shape[1:], y.dtype), []).append(i)
    return list(groups.values())


# ----------------------------------------------------------------------------------------------------
# Many clients at once: their weights in one stack, their gradients by `torch.func.vmap` of `torch.func.grad`.
#
# A step of m clients is one call of each operation instead of m: small models gain two to four times. What is computed
# is what the loop computes. Clients that have as many examples in their batch take the step together, so that nothing
# is padded and a loss is the mean over the very examples that it is in the loop.
#
# Not everything gains, on a processor: see `why_looped`, which says it from the model and the shapes alone.


_BUSY, _BUSY_IMAGES = 6e5, 2.5e5  # multiplications an operation, from which the call itself no longer costs
_WEIGHTS, _INPUTS = 2**22, 2**24  # numbers in the stacks of weights, and of examples

LARGE = "its operations are large"
"""What `why_looped` says of a model that could be mapped: no value in it decides what is computed."""

_known_module: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


def why_looped(training: "LocalTraining", model: nn.Module, layout: Layout, examples: Examples) -> str | None:
    """Why clients of this model are trained one by one; None where they are trained at once.

    A function of the model and of the shapes and types of the examples, never of what is in them: so that equal seeds
    give equal changes.

    - Recurrent layers: torch's own kernels take one set of weights, and without them a step takes twice as long.
    - Models whose operations are large: from about 600 000 multiplications for each operation and client, calling it
      once for all saves nothing; from 250 000 where images can be laid out channels last, which vmap cannot.
    - What torch.func cannot do: random numbers (dropout), buffers that change (batch norm), values that decide what is
      computed, operations without a rule.
    - State in plain attributes, which would go from client to client: the loop makes a new copy for each.

    Cost: two small passes, once for a model and these shapes.
    """
    x, y = examples
    size = min(training.batch_size, training.max_examples)
    key = (training.loss, size, x.shape[1:], x.dtype, y.shape[1:], y.dtype, tuple(layout.shapes))
    reasons = _known_module.setdefault(model, {})
    if key not in reasons:
        probe = torch.zeros(2, size, *x.shape[1:], dtype=x.dtype), torch.zeros(2, size, *y.shape[1:], dtype=y.dtype)
        reasons[key] = _reason(training, model, layout, probe)
    return reasons[key]


def mapped(
    training: "LocalTraining",
    model: nn.Module,
    layout: Layout,
    cohort: Sequence[Examples],
    seeds: Sequence[int | bytes],
) -> Tensor:
    """(m, size): the changes of clients whose examples have one shape and type, all at once.

    Cost: the weights of at most 2^22 / size clients at a time, thrice (weights, gradients, velocities), and their
    examples. A call a step for all full batches, and one for each length of a short one.
    """
    step, before, untouched = _step(training, model, layout)
    device = next(iter(before.values())).device
    result = torch.zeros(len(cohort), layout.size, dtype=dtype_of(list(before.values())), device=device)
    order = sorted(range(len(cohort)), key=lambda i: -len(cohort[i][0]))
    longest = min(len(cohort[order[0]][0]), training.max_examples)
    numbers = max(1, longest * cohort[0][0].shape[1:].numel())
    at_once = max(1, min(_WEIGHTS // layout.size, _INPUTS // numbers))
    for start in range(0, len(order), at_once):
        chosen = order[start : start + at_once]
        weights = {name: p.expand(len(chosen), *p.shape).clone() for name, p in before.items()}
        _train(training, step, weights, [cohort[i] for i in chosen], [seeds[i] for i in chosen])
        pieces = [(weights[name] - p).reshape(len(chosen), -1) for name, p in before.items()]
        result[chosen] = torch.cat(pieces, 1).to(result.dtype)
    if not untouched():
        raise ArgumentError(HIDDEN)
    return result


Step = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]


def _step(
    training: "LocalTraining", model: nn.Module, layout: Layout
) -> tuple[Step, dict[str, Tensor], Callable[[], bool]]:
    """Gradients of m clients from weights and batches, the weights that all begin with, whether no state was left."""
    client, own_loss = deepcopy((model, training.loss))
    client.train()
    before = {name: p.detach().clone() for name, p in trained(client, layout).items()}
    for p in client.parameters():
        p.requires_grad_(False)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return own_loss(functional_call(client, weights, (x,)), y)

    mean = vmap(grad(loss))

    def step(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention has no rule
            gradients: dict[str, Tensor] = mean(weights, x, y)
        return gradients

    state = [snapshot(client), snapshot(own_loss)]
    return step, before, lambda: all(map(same, state, [snapshot(client), snapshot(own_loss)]))


@torch.no_grad()
def _train(
    training: "LocalTraining", step: Step, weights: dict[str, Tensor], cohort: list[Examples], seeds: list[int | bytes]
) -> None:
    """Train in place; the clients are sorted by how many examples they have, most first."""
    counts = [min(len(x), training.max_examples) for x, _ in cohort]
    orders = [order_of(len(x), training, seed) for (x, _), seed in zip(cohort, seeds, strict=True)]
    device = next(iter(weights.values())).device
    velocities = {name: torch.zeros_like(w) for name, w in weights.items()} if training.momentum else {}
    (x, y), longest = cohort[0], counts[0]
    xs, ys = x.new_zeros(len(cohort), longest, *x.shape[1:]), y.new_zeros(len(cohort), longest, *y.shape[1:])
    for epoch in range(training.epochs):
        for i, (x, y) in enumerate(cohort):
            rows = orders[i][epoch]
            torch.index_select(x, 0, rows.to(x.device), out=xs[i, : counts[i]])
            torch.index_select(y, 0, rows.to(y.device), out=ys[i, : counts[i]])
        on_x, on_y = xs.to(device), ys.to(device)
        for clients, batch in _batches(counts, training.batch_size):
            own = {name: w[clients] for name, w in weights.items()}
            gradients = step(own, on_x[clients, batch], on_y[clients, batch])
            steps = [gradients[name] for name in own]
            if velocities:
                moved = [v[clients] for v in velocities.values()]
                torch._foreach_mul_(moved, training.momentum)
                torch._foreach_add_(moved, steps)
                steps = moved
            torch._foreach_add_(list(own.values()), steps, alpha=-training.lr)


def _batches(counts: list[int], size: int) -> Iterator[tuple[slice, slice]]:
    """(clients, examples) of each step of an epoch: clients with as many examples in their batch go together.

    Args:
        counts: of the clients' examples, falling.
        size: of a full batch.
    """
    for start in range(0, counts[0], size):
        lengths = [max(0, min(size, count - start)) for count in counts]  # falling as well
        first = 0
        while first < len(lengths) and lengths[first]:
            last = first
            while last < len(lengths) and lengths[last] == lengths[first]:
                last += 1
            yield slice(first, last), slice(start, start + lengths[first])
            first = last


# -- what is mapped ----------------------------------------------------------------------------------------------------


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many operations are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, and count it if it is no view."""
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


def _reason(training: "LocalTraining", model: nn.Module, layout: Layout, probe: Examples) -> str | None:
    """What `why_looped` says, tried on zeros."""
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        return "it has recurrent layers"
    client = deepcopy(model).train()
    device = next(client.parameters()).device
    x, y = probe[0].to(device), probe[1].to(device)
    before = [b.clone() for b in client.buffers()]
    with kept_generator(device):
        state, made_of = torch.get_rng_state(), snapshot(client)
        with torch.no_grad(), _Count() as count, FlopCounterMode(display=False) as flops:
            client(x[0])
        if not torch.equal(torch.get_rng_state(), state):
            return "it draws random numbers"
        if not all(torch.equal(b, b0) for b, b0 in zip(client.buffers(), before, strict=True)):
            return "its buffers change"
        if not same(made_of, snapshot(client)):
            return KEEPS
        step, weights, untouched = _step(training, model, layout)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop", UserWarning)
                step({name: w.expand(2, *w.shape) for name, w in weights.items()}, x, y)
        except (RuntimeError, TypeError, ValueError, UserWarning) as error:  # what is wrong in itself, the loop says
            return f"torch.func.vmap cannot run it: {str(error).splitlines()[0]}"
        if not untouched():
            return KEEPS
    busy = _BUSY_IMAGES if takes_channels_last(model, x[0]) else _BUSY
    return LARGE if flops.get_total_flops() > 2 * busy * max(1, count.calls) else None
