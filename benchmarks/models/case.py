"""A model of the table, and how its clipped sum is compared with that of a loop over examples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyorder.clipping import convert
from anyorder.clipping.per_example import GhostClipping
from anyorder.clipping.validate import refuse_unfit
from anyorder.errors import ModelError

__all__ = ["EXAMPLES", "Batch", "Case", "Outcome", "outcome"]

EXAMPLES = 3
TOLERANCE = 1e-4  # relative, in float32

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model with random weights and a small configuration, and a batch for it.

    Attributes:
        library: where it is from.
        name: the model's.
        make: makes the model, in training mode and without dropout, and keyword arguments of EXAMPLES rows each.
        given: what the page says of the model or its arguments; "" where the name says it.
        refused: words of the message with which it is refused; "" where it runs.
        converted: whether `clipping.convert` is asked first.
    """

    library: str
    name: str
    make: Callable[[], tuple[nn.Module, Batch]]
    given: str = ""
    refused: str = ""
    converted: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        error: distance of the clipped sum from that of the loop, over its norm; None where the model is refused.
        passes: 1 for one forward and one backward pass, 2 where every gradient was made.
        refusal: the message; "" where it ran.
    """

    error: float | None
    passes: int
    refusal: str

    @property
    def right(self) -> bool:
        """Whether it ran, and the sum is that of the loop."""
        return self.error is not None and self.error <= TOLERANCE


def outcome(case: Case) -> Outcome:
    """Run a case by the engine, and by a loop over its examples with plain autograd."""
    torch.manual_seed(0)
    model, batch = case.make()
    model = convert(model) if case.converted else model
    try:
        refuse_unfit(model)
    except ModelError as error:
        return Outcome(None, 0, str(error))
    rows = [_gradients(model, {name: t[i : i + 1] for name, t in batch.items()}) for i in range(EXAMPLES)]
    norms = [_norm(row) for row in rows]
    clip_norm = sorted(norms)[EXAMPLES // 2]  # so that some are cut and some are not
    expected = {
        name: sum(row[name] * min(1.0, clip_norm / norm) for row, norm in zip(rows, norms, strict=True))
        for name in rows[0]
    }
    clipping, received = GhostClipping(model), []
    groups = torch.arange(EXAMPLES)
    try:
        outputs = clipping.forward((), batch, groups=groups, clip_norm=clip_norm, scale=1.0, receive=received.append)
    except ModelError as error:
        return Outcome(None, 0, str(error))
    _loss(outputs).backward()
    distance = _norm({name: received[0][name].double() - value for name, value in expected.items()})
    return Outcome(distance / _norm(expected), 2 if clipping.state_dict()["unmapped"] else 1, "")


def _loss(outputs: object) -> Tensor:
    """The sum over examples of the mean squares of an example's outputs."""
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    rows = [t.flatten(1) if t.dim() > 1 else t.reshape(-1, 1) for t in leaves]
    return torch.stack([row.square().mean(1).sum() for row in rows]).sum()


def _gradients(model: nn.Module, example: Batch) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = _loss(model(**example))
    grads = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True, materialize_grads=True)
    return {name: g.double() for name, g in zip(parameters, grads, strict=True)}


def _norm(values: Batch) -> float:
    return float(torch.stack([value.square().sum() for value in values.values()]).sum().sqrt())
