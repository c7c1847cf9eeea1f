"""Losses that couple examples: watched in the first batch, from the model's outputs to `backward`.

Clipping bounds what a unit adds to the sum if each example's loss depends on that example alone. The loss is computed
in the caller's own code, between `model(x)` and `loss.backward()`. So the outputs of the first batch are tensors that
write down what is done with them. At `backward` the same functions run again on made-up outputs, of which one example's
are then changed: where the gradients of others move, the loss is refused. Couplings that run through targets, weights
and masks are seen in the functions that make them. What decides is the code of the loss, not the data.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from anyorder.clipping.loss_calls import CURE, checked
from anyorder.errors import ModelError

__all__ = ["LossWatch", "unwatched"]

_MOVED = 1e-5  # of the largest gradient; less is rounding
_BATCHES = 3  # whose losses may never come to `backward`, or by another way
_MASKINGS = (torch.masked_select, Tensor.masked_select)


class LossWatch:
    """Watches what is done with a model's outputs up to `backward`, in the first batch of two examples or more.

    A mean over labels of which some may not count divides by the number of those that do, so that one example's
    padding would scale the gradients of others. Where the loss has one (`cross_entropy` and `nll_loss` of several
    labels for each example, or with an `ignore_index` of the caller's own), every batch is watched, and the sum is
    divided by the number of all labels instead: the same number where all count.

    Raises: ModelError, where the loss is computed or in `backward`, for a loss that couples examples.
    """

    def __init__(self) -> None:
        self.done = self.labels = False
        self._batches = 0
        self._tape: _Tape | None = None

    def outputs(self, outputs: Any) -> Any:
        """The outputs of a batch, watched as long as there is something to see."""
        self.done = self.done or self._batches == _BATCHES
        if self.done and not self.labels:
            return outputs
        tape = _Tape(self)
        _leave_to_python()

        def watched(leaf: Any) -> Any:
            return tape.begin(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim() else leaf

        result = pytree.tree_map(watched, outputs)
        self._batches += tape.size > 1
        self._tape = tape
        return result

    def came_back(self) -> None:
        """The outputs got their gradients. Warns where it was not seen how, as the loss may couple examples."""
        if self.done or self._tape is None or self._tape.size < 2:
            return
        self.done = True
        warnings.warn(
            "it could not be seen whether the loss couples examples, as its gradients came by a way that is not "
            "followed: an autograd function of one's own, torch.autograd.backward, a compiled loss, or gradients given "
            "by hand. The guarantee needs a loss of each example alone, as ExampleLoss gives",
            stacklevel=2,
        )


def unwatched(tree: Any) -> Any:
    """The tree with ordinary tensors in the place of watched ones, for a loss that cannot couple examples."""

    def of(tensor: Any) -> Any:
        if tensor.tape is not None:
            tensor.tape.watch.done = True
        return tensor.as_subclass(Tensor)

    return pytree.tree_map_only(_Watched, of, tree)


class _Tape:
    """What was done with the outputs of one batch; with those of several, where one loss is made of them."""

    def __init__(self, watch: LossWatch) -> None:
        self.watch, self.recording, self.size = watch, not watch.done, 0
        self._into: _Tape | None = None
        self._roots: list[list[Tensor]] = [[]]  # by batch
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Any]]] = []

    @property
    def useful(self) -> bool:
        return self.recording or self.watch.labels

    @property
    def current(self) -> "_Tape":
        """The tape that this one was joined to, or itself."""
        return self if self._into is None else self._into.current

    def join(self, other: "_Tape") -> None:
        """Go on for the outputs of another batch too."""
        if other is not self:
            self._roots += other._roots
            self._calls += other._calls
            self.size += other.size
            other._into = self

    def begin(self, output: Tensor) -> Tensor:
        """Watch an output of the model."""
        self.size = len(output)
        self._roots[0].append(self.follow(output))
        return self._roots[0][-1]

    def follow(self, tensor: Tensor, *, masked: bool = False) -> Tensor:
        """Watch what was computed from an output, perhaps from a part of it that a mask chose."""
        watched: Any = tensor if isinstance(tensor, _Watched) else tensor.as_subclass(_Watched)
        watched.tape, watched.masked = self, masked
        return watched  # type: ignore[no-any-return]

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        if self.recording:
            self._calls.append((function, args, kwargs, pytree.tree_leaves(result)))

    def check(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Refuse a loss in which one example's outputs move the gradients of others."""
        if gradient is None and loss.numel() > 1:
            raise ModelError(
                f"the loss must be one number, and has shape {tuple(loss.shape)}: call loss.mean().backward(). A "
                "criterion with reduction='none', and a model that computes its own loss, give one for each example"
            )
        roots = [root for batch in self._roots for root in batch]
        if not self.recording or self.size < 2 or any(loss is root for root in roots):
            return  # gradients of the outputs themselves were computed elsewhere
        if _has_own_backward(loss, roots):
            return
        found: list[bool] = []
        for make in (torch.randn, torch.rand):  # some losses take numbers in (0, 1) alone
            try:
                found.append(self._coupled(loss, gradient, make))
            except _Apart:
                return  # the loss of a detached copy, perhaps; that of the outputs is still to come
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self.recording, self._roots, self._calls = False, [], []
        if any(found):
            raise ModelError(
                "the loss couples examples: where the outputs of one change, so do the gradients of others, and "
                f"clipping bounds what a unit adds only if each example's loss depends on itself alone; {CURE}"
            )
        if not found:
            warnings.warn(
                "the loss could not be run on made-up outputs, to see whether it couples examples; the guarantee needs "
                f"one that does not ({problem})",
                stacklevel=4,
            )
        self.watch.done = True

    def _coupled(self, loss: Tensor, gradient: Tensor | None, make: Callable[..., Tensor]) -> bool:
        generator = torch.Generator().manual_seed(0)
        outputs, others = (
            [[make(t.shape, generator=generator).to(t.device, t.dtype) for t in roots] for roots in self._roots]
            for _ in range(2)
        )
        before = self._gradients(loss, gradient, outputs)
        for batch, roots in enumerate(outputs):
            size = len(roots[0])
            for j in sorted({0, size // 2, size - 1}):
                changed = [
                    torch.cat([t[:j], other[j : j + 1], t[j + 1 :]])
                    for t, other in zip(roots, others[batch], strict=True)
                ]
                after = self._gradients(loss, gradient, [*outputs[:batch], changed, *outputs[batch + 1 :]])
                for k, (old, new) in enumerate(zip(before, after, strict=True)):
                    if any(_moved(*pair, j if k == batch else None) for pair in zip(old, new, strict=True)):
                        return True
        return False

    def _gradients(
        self, loss: Tensor, gradient: Tensor | None, outputs: Sequence[Sequence[Tensor]]
    ) -> list[Sequence[Tensor]]:
        """Those of other outputs, by batch: from the same functions with the same random numbers."""
        leaves = [t.requires_grad_() for batch in outputs for t in batch]
        roots = [root for batch in self._roots for root in batch]
        values: dict[int, Any] = {id(root): leaf.clone() for root, leaf in zip(roots, leaves, strict=True)}

        def swap(tree: Any) -> Any:
            return pytree.tree_map_only(_Watched, lambda t: values[id(t)], tree)

        devices = sorted({t.device.index for t in leaves if t.device.type == "cuda"})
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            for function, args, kwargs, results in self._calls:
                made = pytree.tree_leaves(function(*swap(args), **swap(kwargs)))
                values |= {id(old): new for old, new in zip(results, made, strict=False)}
        end = values[id(loss)]
        found = torch.autograd.grad(end, leaves, gradient, allow_unused=True)
        if all(g is None for g in found):
            raise _Apart
        full = iter(torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True))
        return [[next(full) for _ in batch] for batch in outputs]


def _has_own_backward(loss: Tensor, roots: Sequence[Tensor]) -> bool:
    """Whether a `torch.autograd.Function`, whose backward may be anything, lies between the outputs and the loss."""
    seen: set[Any] = {None, *(root.grad_fn for root in roots)}
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _moved(before: Tensor, after: Tensor, j: int | None) -> bool:
    """Whether rows other than j differ."""
    # Each row by its own size: the target of one example, huge or not a number, must not hide what moves the others.
    before, after = (g.nan_to_num(0.0, 0.0, 0.0).double().reshape(len(g), -1) for g in (before, after))
    off = (before - after).abs().amax(1)
    if j is not None:
        off[j] = 0.0
    return bool((off > _MOVED * before.abs().amax(1)).any())


class _Apart(Exception):
    """No gradient of this loss goes to the outputs."""


class _Watched(Tensor):
    """An output of the private model, or what was computed from one."""

    tape: _Tape | None = None
    masked: bool = False

    def __format__(self, spec: str) -> str:
        return format(_plain(self), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_plain(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Watched)]
        tapes = [t.tape.current for t in given if t.tape is not None]
        tape = tapes[0] if tapes else None
        with torch._C.DisableTorchFunctionSubclass():
            if tape is None or not tape.useful:
                return func(*args, **kwargs)
            for other in tapes:
                tape.join(other.current)
            if func is Tensor.backward:
                tape.check(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]
            masked = any(t.masked for t in given)
            function = checked(func, args, kwargs, size=tape.size, masked=masked, watched=_Watched)
            tape.watch.labels = tape.watch.labels or function is not func
            before = args[0].detach().clone() if _writes(func) and not isinstance(args[0], _Watched) else None
            result = function(*args, **kwargs)
            if before is not None:  # what is written is not the model's: run again on a copy
                args, function = (before, *args[1:]), _on_copy(function)
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
                if func is Tensor.register_hook or (func is Tensor.__setitem__ and before is None):
                    tape.record(function, args, kwargs, None)
                return result
            masked = masked or func in _MASKINGS or (func is Tensor.__getitem__ and _has_mask(args[1]))
            watched = pytree.tree_map_only(Tensor, lambda t: tape.follow(t, masked=masked and t.dim() > 0), result)
            tape.record(function, args, kwargs, watched)
            return watched


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _leave_to_python() -> None:
    """Have `torch.compile` run what it meets watched tensors in as it is written; tracing them would not end."""
    config = sys.modules.get("torch._dynamo.config")
    if config is not None and _Watched not in config.nontraceable_tensor_subclasses:
        config.nontraceable_tensor_subclasses.add(_Watched)
        function = torch.compiler.disable(_Watched.__torch_function__)  # type: ignore[no-untyped-call]
        _Watched.__torch_function__ = staticmethod(function)  # type: ignore[method-assign]


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_")


def _on_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, *args, **kwargs: function(first.clone(), *args, **kwargs)
