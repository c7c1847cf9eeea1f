"""Clients: what a user does between the model that it is sent and the change that it sends back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from anyorder import _check
from anyorder.errors import ArgumentError
from anyorder.federated.looped import Examples, looped
from anyorder.federated.messages import Layout
from anyorder.federated.vectorised import LARGE, mapped, why_looped

__all__ = ["LocalTraining"]


@dataclass(frozen=True)
class LocalTraining:
    """SGD on the examples of one user, from the weights that the server sent; the message is the change.

        v <- momentum v + grad loss(model(x), y),    w <- w - lr v,    v = 0 at first;    message = w_after - w_before

    As in [Kairouz et al. 2021, section 7], whose settings are lr 0.5, batches of 16, one epoch, at most 256 examples.
    A user with more examples trains on a choice of them, drawn anew from each seed. Each epoch has an order of its own;
    its last batch may be short.

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
        _check.positive("lr", self.lr)
        _check.integer("batch_size", self.batch_size, low=1)
        _check.integer("epochs", self.epochs, low=1)
        _check.integer("max_examples", self.max_examples, low=1)
        if not 0 <= _check.real("momentum", self.momentum) < 1:
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
