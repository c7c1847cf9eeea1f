"""Many clients at once: their weights in one stack, their gradients by `torch.func.vmap` of `torch.func.grad`.

A step of m clients is one call of each operation instead of m: small models gain two to four times. What is computed
is what the loop computes. Clients that have as many examples in their batch take the step together, so that nothing is
padded and a loss is the mean over the very examples that it is in the loop.

Not everything gains, on a processor: see `why_looped`, which says it from the model and the shapes alone.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from anyorder.errors import ArgumentError
from anyorder.federated.looped import Examples, dtype_of, kept_generator, order_of, takes_channels_last, trained
from anyorder.federated.messages import Layout
from anyorder.federated.state import HIDDEN, KEEPS, same, snapshot

if TYPE_CHECKING:
    from anyorder.federated.clients import LocalTraining

__all__ = ["LARGE", "mapped", "why_looped"]

_BUSY, _BUSY_IMAGES = 6e5, 2.5e5  # multiplications an operation, from which the call itself no longer costs
_WEIGHTS, _INPUTS = 2**22, 2**24  # numbers in the stacks of weights, and of examples

LARGE = "its operations are large"
"""What `why_looped` says of a model that could be mapped: no value in it decides what is computed."""

_known: WeakKeyDictionary[nn.Module, dict[Any, str | None]] = WeakKeyDictionary()


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
    reasons = _known.setdefault(model, {})
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
