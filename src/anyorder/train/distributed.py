"""The processes that train one model together: what they tell each other, and how they fail together."""

import atexit
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from anyorder.clipping.per_example import Receive
from anyorder.errors import AnyorderError, TrainingError
from anyorder.ledger import Units

__all__ = ["Group", "distinct_units", "forward_together"]

T = TypeVar("T")


class Group:
    """The default process group; a process without one is a group of one, and talks to nobody.

    Every rank must call the same methods in the same order. `together` finds out where they do not.

    Attributes:
        rank, size: this process, and how many there are.
    """

    def __init__(self) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.size = dist.get_world_size() if there else 1
        if self.size > 1:
            atexit.unregister(_let_others_finish)  # once is enough
            atexit.register(_let_others_finish)

    @property
    def is_first(self) -> bool:
        """Whether this process holds the key, the files and the journal."""
        return self.rank == 0

    def together(self, place: str, work: Callable[[], T]) -> list[T]:
        """The results of `work` on all ranks, by rank. What fails on one rank fails on all.

        Args:
            place: what is being done; all ranks must be doing the same.
            work: must not communicate.
        Raises: the error of `work`; where it failed on other ranks only, the error of the first of them, with its
            rank. TrainingError if the ranks are at different places: none of them waits for the others.
        """
        if self.size == 1:
            return [work()]
        own: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            own = error
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, (place, None if own is None else _portable(own), result))
        if own is not None:
            raise own
        places = [place for place, _, _ in told]
        if len(set(places)) > 1:
            raise TrainingError(
                "the ranks do not keep step: "
                + ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
                + ". Every rank must make the same calls, with the same number of batches"
            )
        for rank, (_, problem, _) in enumerate(told):
            if problem is not None:
                kind, message = problem
                raise kind(f"rank {rank}: {message}")
        return [result for _, _, result in told]

    def from_first(self, value: T) -> T:
        """The first rank's value."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        result: T = box[0]
        return result

    def by_first(self, place: str, work: Callable[[], T]) -> T:
        """What `work` gives on the first rank, which alone does it. Where it fails, all ranks fail."""
        results: list[Any] = []
        self.together(place, lambda: results.append(work()) if self.is_first else None)
        result: Any = self.from_first(results[0] if results else None)
        return result  # type: ignore[no-any-return]

    def to_first(self, value: T) -> list[T] | None:
        """All ranks' values, on the first rank; None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=0)
        return values

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors by the first rank's."""
        if self.size == 1:
            return
        for tensor in tensors:
            values = tensor.detach().contiguous().reshape(-1)
            if len(values):
                dist.broadcast(values.view(torch.uint8), src=0)  # bytes: not every backend knows every dtype
                tensor.detach().copy_(values.view(tensor.shape))

    def sum_of_parts(self, parts: list[Tensor]) -> Tensor:
        """The sum over ranks of part number `rank`; the parts may be overwritten.

        Each sum is made once, for one rank, so that no two ranks could round it differently.
        """
        if self.size > 1:
            for rank, part in enumerate(parts):
                if part.numel():
                    dist.reduce(part, dst=rank)
        return parts[self.rank]

    def concatenated(self, part: Tensor, length: int) -> Tensor:
        """The parts of all ranks one behind the other, cut to `length`; all but the last ones have one size."""
        if self.size == 1:
            return part
        most = -(-length // self.size)
        padded = torch.cat([part, part.new_zeros(most - len(part))])
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[:length]


def _portable(error: Exception) -> tuple[type[Exception], str]:
    """An error in a form that other processes can raise."""
    if isinstance(error, AnyorderError):
        return type(error), str(error)
    return TrainingError, f"{type(error).__name__}: {error}"


def distinct_units(told: list[Units]) -> Units | list[Any]:
    """The units of one step on all ranks, example by example.

    Raises: TrainingError if a unit is on two ranks: each would clip it, and it would count twice.
    """
    if len(told) == 1:
        return told[0]
    seen: set[Any] = set()
    for units in told:
        mine = set(units if isinstance(units, list) else units.tolist())
        if seen & mine:
            raise TrainingError(
                "a unit is on two ranks in one step, and would be clipped twice. Give every rank its own part of the "
                "data with a torch DistributedSampler(drop_last=True), with all examples of a unit on one rank; where "
                "ranks read data sets of their own, name the units with unit="
            )
        seen |= mine
    return [unit for units in told for unit in units]


def _let_others_finish() -> None:
    """Leave the interpreter to gloo's threads before it ends.

    They drop the tensors of a collective after it has returned, and need the interpreter for that. One that comes too
    late aborts the process, and a run that was complete looks as if it had failed (pytorch/pytorch, issue 190489).
    """
    time.sleep(0.2)


def forward_together(group: Group, step: int, forward: Callable[[Receive], Any], receive: Receive) -> Any:
    """The outputs of `forward`; forward and backward pass fail on all ranks where they fail on one.

    Args:
        forward: runs the clipping engine, which it tells where the sums go.
        receive: takes the sums, once the backward pass of no rank has failed.
    """
    if group.size == 1:
        return forward(receive)
    outputs: list[Any] = []
    sums: list[dict[str, Tensor]] = []
    group.together(f"the forward pass of step {step}", lambda: outputs.append(forward(sums.append)))
    return _joined_backward(group, f"the backward pass of step {step}", outputs[0], lambda: receive(sums.pop()))


def _joined_backward(group: Group, place: str, outputs: Any, then: Callable[[], None]) -> Any:
    """The outputs, whose backward fails on all ranks where it fails on one, and else calls `then`.

    The graph behind the outputs is run by hand, inside of the backward of what is returned: an error that arises in a
    graph can be caught nowhere else.
    """
    leaves, structure = pytree.tree_flatten(outputs)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inner = [leaves[i] for i in places]

    def run(cotangents: tuple[Tensor, ...]) -> None:
        create_graph = torch.is_grad_enabled()
        group.together(place, lambda: torch.autograd.backward(inner, cotangents, create_graph=create_graph))
        then()

    root = torch.zeros((), device=inner[0].device, requires_grad=True)
    joined = _Joined.apply(root, run, [t.detach() for t in inner])  # type: ignore[no-untyped-call]
    for i, tensor in zip(places, joined, strict=True):
        leaves[i] = tensor
    return pytree.tree_unflatten(leaves, structure)


class _Joined(torch.autograd.Function):
    """Tensors whose backward is a function of their cotangents."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, run: Callable[[tuple[Tensor, ...]], None], tensors: list[Tensor]) -> Any:
        ctx.run = run
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None, None]:
        run, ctx.run = ctx.run, None  # lets go of the inner graph
        if run is None:
            raise TrainingError(
                "backward ran a second time on the same outputs of the private model: each unit is clipped once. Add "
                "the losses and call backward once"
            )
        run(cotangents)
        return None, None, None
