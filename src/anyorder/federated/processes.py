"""Several processes of one simulation: the first has the server, the others make clients' changes for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyorder.errors import ArgumentError, TrainingError
from anyorder.federated.clients import LocalTraining
from anyorder.federated.messages import Layout

__all__ = ["Team", "assist"]

Examples = tuple[Tensor, Tensor]
Users = Mapping[Any, Examples] | Sequence[Examples]

Block = tuple[list[int], list[int]]
"""Places of users, and the seeds of their local training."""


def assist(model: nn.Module, users: Users, training: LocalTraining) -> None:
    """Make clients' changes for the `simulate` of the first rank, until that ends; for all ranks but the first.

    Args:
        model: of the same kind as the server's; its parameters and buffers are overwritten by the server's.
        users, training: the same as on the first rank.
    Raises: TrainingError if another process fails or ends; ArgumentError on the first rank, or without a group.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        raise ArgumentError(
            "assist() is for the ranks after the first of a torch.distributed group; simulate() is on it"
        )
    examples = by_place(users)
    names: list[str] = _heard(None)
    parameters = dict(model.named_parameters())
    layout = Layout.of({name: parameters[name] for name in names})
    dtype = _dtype(model, layout)
    with torch.no_grad():
        for tensor in _state(model):
            _share(tensor)
    while (blocks := _heard(None)) is not None:
        with torch.no_grad():
            for name in names:
                _share(parameters[name])
        problem: Exception | None = None
        sent: list[tuple[Any, Tensor]] = []  # a tensor lives until it is sent
        for block in blocks[dist.get_rank() :: dist.get_world_size()]:
            rows = torch.zeros(len(block[0]), layout.size, dtype=dtype)
            if problem is None:
                try:
                    rows = training.changes(model, layout, [examples[i] for i in block[0]], block[1])
                except Exception as caught:
                    problem = caught
            rows = rows.to("cpu", dtype).contiguous()
            sent.append((_talk(dist.isend, rows, 0), rows))
        for work, _ in sent:
            _talk(work.wait)
        _agree(problem)


class Team:
    """The first rank's side: it makes its share of the changes, and gathers the others' in a fixed order.

    Without a process group, or alone in one, it makes them all. The blocks are the same for any number of processes,
    and so are the bits.
    """

    def __init__(self, model: nn.Module, layout: Layout, users: Users, training: LocalTraining) -> None:
        self._model, self._layout, self._training = model, layout, training
        self._examples = by_place(users)
        self._dtype = _dtype(model, layout)
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._listening = self._ranks > 1  # the others, between two rounds
        if self._ranks > 1:
            if dist.get_rank() != 0:
                raise ArgumentError(
                    f"the server is on the first rank, this is rank {dist.get_rank()}: call assist() on it"
                )
            _heard(list(layout.shapes))
            for tensor in _state(model):
                _share(tensor.detach())

    def make(self, blocks: list[Block], add: Callable[[list[int], Tensor], object]) -> None:
        """Hand the changes (m, size) of each block to `add`, in order. What fails on any rank fails here."""
        if self._ranks > 1:
            self._listening = False  # until the round is over: what fails in it ends the others as well
            _heard(blocks)
            parameters = dict(self._model.named_parameters())
            for name in self._layout.shapes:
                _share(parameters[name].detach())
        problem: Exception | None = None
        for i, (places, seeds) in enumerate(blocks):
            other = i % self._ranks
            if other:
                rows = torch.empty(len(places), self._layout.size, dtype=self._dtype)
                _talk(dist.recv, rows, other)
            if problem is None:
                try:
                    if not other:
                        rows = self._training.changes(
                            self._model, self._layout, [self._examples[place] for place in places], seeds
                        )
                    add(places, rows)
                except Exception as caught:  # told to all, and raised, once the others have sent theirs
                    problem = caught
        if self._ranks > 1:
            _agree(problem)
            self._listening = True
        elif problem is not None:
            raise problem

    def end(self) -> None:
        """Let the others go, if they are there."""
        if self._listening:
            _heard(None)


def by_place(users: Users) -> list[Examples]:
    """The users' examples in the order in which they were given."""
    return list(users.values()) if isinstance(users, Mapping) else list(users)


def _dtype(model: nn.Module, layout: Layout) -> torch.dtype:
    """That of changes on their way: float64 where some shared parameter has it."""
    own = dict(model.named_parameters())
    return torch.float64 if any(own[name].dtype == torch.float64 for name in layout.shapes) else torch.float32


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _heard(words: Any) -> Any:
    """What the first rank says."""
    box = [words]
    _talk(dist.broadcast_object_list, box, 0)
    return box[0]


def _share(tensor: Tensor) -> None:
    """The first rank's values, on all ranks; gloo speaks of tensors on the CPU."""
    there = tensor.detach().cpu().contiguous()
    _talk(dist.broadcast, there, 0)
    if dist.get_rank() != 0:
        tensor.copy_(there)


def _agree(problem: Exception | None) -> None:
    """Raise on all ranks if something failed on one of them."""
    texts: list[str | None] = [None] * dist.get_world_size()
    _talk(dist.all_gather_object, texts, None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise TrainingError(f"rank {rank}: {text}")


def _talk(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except RuntimeError as problem:  # gloo's, when a process is gone
        first = str(problem).strip().splitlines()[:1]
        raise TrainingError(
            f"another process of this simulation ended ({first[0] if first else type(problem).__name__}); "
            "start it again: it goes on from the server's checkpoint"
        ) from problem
