"""The processes that train one model together: what they tell each other, and how they fail together."""

import atexit
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from anyorder.clipping.per_example import Receive
from anyorder.errors import AnyorderError, ModelError, TrainingError
from anyorder.ledger import Units
from anyorder.release.ranks import Range

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


# ----------------------------------------------------------------------------------------------------
# Models sharded by FSDP2 (`torch.distributed.fsdp.fully_shard`): their rows, and the whole model for a step.


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a distributed one."""
    # Importing this module takes a second; before someone else did, there are no such tensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_sharding(model: nn.Module, group: Group) -> None:
    """Raise ModelError unless the model is plain, or its parameters are sharded by rows over all ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers: tuple[type, ...] = (DistributedDataParallel,)
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    for part in model.modules():
        if isinstance(part, wrappers):
            raise ModelError(
                f"{type(part).__name__} adds up gradients before they are clipped; pass the model itself to "
                "make_private, which adds up the clipped ones of all ranks, or shard it with "
                "torch.distributed.fsdp.fully_shard"
            )
        if _is_fsdp(part) and part._get_fsdp_state()._mp_policy.param_dtype is not None:  # type: ignore[operator]
            raise ModelError(
                "fully_shard with a mixed-precision policy: private training makes its own forward pass and would not "
                "follow it; leave mp_policy out and use torch.autocast"
            )
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, p in parameters.items():
        if is_sharded(p):
            mesh, part = p.device_mesh, p.to_local()
            by_rows = len(p.placements) == 1 and p.placements[0].is_shard(0) and len(part) == _length(p, group)
            if not by_rows or mesh.size() != group.size or mesh.device_type != part.device.type:
                raise ModelError(
                    f"parameter {name} is placed as {tuple(p.placements)} on {part.device.type}, over a mesh of "
                    f"{mesh.device_type} of shape {mesh.shape}; anyorder covers fully_shard over one mesh of all "
                    f"{group.size} ranks, by rows: no tensor parallelism, replicated groups, other dimension or offload"
                )


def rows_of(p: Tensor, rank: int, ranks: int) -> tuple[int, int]:
    """The rows first, .., last - 1 of a sharded parameter that a rank has: those of torch.chunk."""
    most = -(-len(p) // ranks)
    return min(rank * most, len(p)), min((rank + 1) * most, len(p))


def _length(p: Tensor, group: Group) -> int:
    low, high = rows_of(p, group.rank, group.size)
    return high - low


def shard_of(p: Any, local: Tensor) -> Tensor:
    """The distributed tensor like p, of which `local` holds this rank's rows."""
    local = local.view(p.detach().to_local().shape)
    like: Tensor = type(p.data).from_local(
        local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return like


def whole(tree: Any) -> Any:
    """The tree with whole tensors in the place of distributed ones. All ranks must call it."""
    return pytree.tree_map(lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf, tree)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; a plain tensor is itself."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def load_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, of_model: dict[str, Any], of_optimizer: dict[str, Any]
) -> None:
    """Load states of whole tensors into a model and an optimizer that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: _shard_like(own.get(name), value) for name, value in of_model.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in of_optimizer["param_groups"] for i in group["params"]]
    states = dict(of_optimizer["state"])
    for i, p in zip(ids, parameters, strict=False):  # the optimizer itself refuses another number of parameters
        if i in states:
            states[i] = {name: _shard_like(p, value) for name, value in states[i].items()}
    optimizer.load_state_dict({**of_optimizer, "state": states})


def _shard_like(p: Any, value: Any) -> Any:
    """This rank's part of a whole tensor that belongs to p; anything else as it is."""
    if not is_sharded(p) or not isinstance(value, Tensor) or value.shape != p.shape:
        return value
    low, high = rows_of(p, dist.get_rank(), dist.get_world_size())
    return shard_of(p, value[low:high].to(p.device))


class WholeModel:
    """A model that can be called on one example alone, whatever its parameters are sharded over.

    A plain model is that already. For a model sharded by FSDP2 this is a copy of its modules without FSDP's hooks,
    which shares buffers and settings with them; `gather` gives it whole parameters, and `drop` takes them away.

    Memory: between `gather` and the end of the step's backward pass, the whole parameters on every rank.

    Attributes:
        module: what to call, after `gather`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[nn.Module, nn.Module] = {}
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}
        self.module = self._copy(model) if any(is_sharded(p) for p in model.parameters()) else model

    def _copy(self, part: nn.Module) -> nn.Module:
        if part not in self._copies:
            # fully_shard puts a class of its own and FSDPModule in front of the module's class.
            own = type(part).__mro__[2] if _is_fsdp(part) else type(part)
            copy: Any = nn.Module.__new__(own)
            self._copies[part] = copy
            nn.Module.__init__(copy)
            self._share(part, copy)
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(part, name)
                setattr(copy, name, type(hooks)((i, hook) for i, hook in hooks.items() if not _is_of_torch(hook)))
            copy._modules = {name: m if m is None else self._copy(m) for name, m in part._modules.items()}
            copy._parameters = {name: p if p is None else self._stand_in(p) for name, p in part._parameters.items()}
            if isinstance(copy, nn.RNNBase):  # holds its parameters a second time
                copy._flat_weights = [getattr(copy, name) for name in copy._flat_weights_names]
        return self._copies[part]

    def _stand_in(self, p: nn.Parameter) -> nn.Parameter:
        if not is_sharded(p):
            return p
        if p not in self._parameters:
            self._parameters[p] = nn.Parameter(_no_memory(p.shape, p), requires_grad=p.requires_grad)
        return self._parameters[p]

    @staticmethod
    def _share(part: nn.Module, copy: nn.Module) -> None:
        """Let the copy see the part's buffers and settings as they are now."""
        vars(copy).update({name: value for name, value in vars(part).items() if name not in _OWN})

    def gather(self) -> nn.Module:
        """The module, with the whole parameters as they are now. All ranks must call it."""
        for part, copy in self._copies.items():
            self._share(part, copy)
        for p, stand_in in self._parameters.items():
            stand_in.data = p.detach().full_tensor()  # type: ignore[attr-defined]
        return self.module

    def drop(self) -> None:
        """Let go of the whole parameters, and of those that FSDP holds after an evaluation: a step changes them."""
        for p, stand_in in self._parameters.items():
            stand_in.data = _no_memory(p.shape, p)
        for part in self._copies:
            if _is_fsdp(part):
                part.reshard()  # type: ignore[operator]


_OWN = ("_modules", "_parameters", "_flat_weights", "_forward_pre_hooks", "_forward_hooks")


def _is_fsdp(part: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # without it no module is sharded
    return fsdp is not None and isinstance(part, fsdp.FSDPModule)


def _no_memory(shape: torch.Size, like: Tensor) -> Tensor:
    """A tensor of a shape, all of whose numbers are one number in memory."""
    return torch.empty((), dtype=like.dtype, device=like.device).expand(shape)


def _is_of_torch(hook: Any) -> bool:
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("torch.distributed.")


# ----------------------------------------------------------------------------------------------------
# Who owns what: every rank adds up, noises and keeps its own coordinates of the vector of all parameters.


class Shards:
    """The coordinates of all trainable parameters, flattened one behind the other, dealt out to the ranks.

    A parameter that every rank has whole is summed, noised and divided by one rank for each coordinate, and then
    gathered: nobody makes a number that another rank makes too, and all ranks get the same bits. These coordinates
    are dealt out evenly. Of a parameter sharded by FSDP2, each rank owns the rows that it has, and keeps them.

    A rank's own vector holds its range of the whole parameters' coordinates first, then its rows, in their order.

    Args:
        parameters: in the order of the coordinates.

    Attributes:
        size: number of coordinates.
        ranges: this rank's coordinates, in the order of its own vector.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group) -> None:
        self.group = group
        self._whole = {name: p for name, p in parameters.items() if not is_sharded(p)}
        self._sharded = {name: p for name, p in parameters.items() if is_sharded(p)}
        sizes = {name: p.numel() for name, p in parameters.items()}
        starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
        self.size = sum(sizes.values())
        self._whole_size = sum(p.numel() for p in self._whole.values())
        most = -(-self._whole_size // group.size)
        self._cuts = [min(rank * most, self._whole_size) for rank in range(group.size + 1)]
        low, high = self._cuts[group.rank : group.rank + 2]
        self.ranges = _joined([
            *_overlap(low, high, [(starts[name], p.numel()) for name, p in self._whole.items()]),
            *((starts[name] + i, starts[name] + j) for name, (i, j) in self._own_rows(group.rank).items()),
        ])  # fmt: skip

    def _own_rows(self, rank: int) -> dict[str, Range]:
        """The coordinates of a rank's rows within each sharded parameter."""
        ranges = {name: rows_of(p, rank, self.group.size) for name, p in self._sharded.items()}
        widths = {name: math.prod(p.shape[1:]) for name, p in self._sharded.items()}
        return {name: (low * widths[name], high * widths[name]) for name, (low, high) in ranges.items()}

    def sum_of_own(self, sums: Mapping[str, Tensor]) -> list[Tensor]:
        """This rank's coordinates of the sum over ranks of `sums`, each of which covers all coordinates.

        Returns: one flat piece.
        """
        whole = [torch.cat([sums[name].reshape(-1) for name in self._whole])] if self._whole else []
        parts = []
        for rank, (low, high) in enumerate(pairwise(self._cuts)):
            pieces = [vector[low:high] for vector in whole]
            pieces += [sums[name].reshape(-1)[i:j] for name, (i, j) in self._own_rows(rank).items()]
            parts.append(torch.cat(pieces) if self._sharded else pieces[0])
        return [self.group.sum_of_parts(parts)]

    def gradients(self, pieces: list[Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every parameter with its gradient, cut out of the ranks' own vectors; of sharded ones, the own shard."""
        (own,) = pieces
        low, high = self._cuts[self.group.rank : self.group.rank + 2]
        if self._whole:
            whole = self.group.concatenated(own[: high - low], self._whole_size)
            parts = torch.split(whole, [p.numel() for p in self._whole.values()])
            for p, part in zip(self._whole.values(), parts, strict=True):
                yield p, part.view(p.shape).to(p.dtype)
        start = high - low
        for name, (i, j) in self._own_rows(self.group.rank).items():
            p = self._sharded[name]
            yield p, shard_of(p, own[start : start + j - i].to(p.dtype))
            start += j - i


def _overlap(low: int, high: int, runs: Iterable[tuple[int, int]]) -> Iterator[Range]:
    """The coordinates behind places low, .., high - 1 of the concatenation of runs (first coordinate, length)."""
    place = 0
    for start, length in runs:
        i, j = max(low - place, 0), min(high - place, length)
        if i < j:
            yield start + i, start + j
        place += length


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """The ranges that are not empty, neighbours joined."""
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        elif start < stop:
            result.append((start, stop))
    return result
