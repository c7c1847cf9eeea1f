"""What lets one example of a batch reach the gradients of another, or of a later batch: refused here.

Clipping bounds what a unit adds to the sum if each example's loss depends on that example alone, and on nothing of an
earlier batch.

- What a model keeps of one batch for the next, wherever it keeps it: a list, a closure, a global (`one_pass`). Tensors
  of a pass are those of `torch.func` (their data are all examples', and can be read inside alone), so that what is left
  of them when the next pass begins was kept by the model.
- A loss that joins examples (`LossWatch`). It is computed in the caller's own code, between `model(x)` and
  `loss.backward()`. So the outputs of the first batch are tensors that write down what is done with them. At `backward`
  the same functions run again on made-up outputs, of which one example's are then changed: where the gradients of
  others move, the loss is refused. Couplings that run through targets, weights and masks are seen in the functions that
  make them. What decides is the code of the loss, not the data.
- A loss that cannot join them, being given one example at a time: `ExampleLoss`.
"""

import copy
import functools
import gc
import inspect
import itertools
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anyorder import checks
from anyorder.clipping import torch_private as private
from anyorder.clipping.torch_private import pytree
from anyorder.errors import ModelError

# -- what a model keeps of a batch -----------------------------------------------------------------------------------

Made = list["weakref.ref[Tensor]"]
"""What functions made in a private model's pass, or in its last one; one list for each private model. Written to in
place: a call of Python's own for each function would cost time, and be compiled where the model is."""


def note(made: Made, *tensors: Tensor) -> None:
    """Remember tensors that no function of torch made."""
    made.extend(map(weakref.ref, tensors))


class Witness(TorchFunctionMode):
    """Notes what every function makes."""

    def __init__(self, made: Made) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self._made.append(weakref.ref(made))
        return result


@contextmanager
def one_pass(made: Made) -> Iterator[None]:
    """One run of a model on a batch, or on some of its examples.

    Args:
        made: what was made in the model's last run; what is made in this one goes there.
    Raises: ModelError if anything of an earlier one is still there.
    """
    if made:
        _refuse_what_is_kept(made)
    # What compiled parts would be compiled to is not used, and the compiler keeps tensors.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        with eager:
            yield
    except BaseException:
        made.clear()  # the error's own frames hold them
        raise


def _refuse_what_is_kept(made: Made) -> None:
    """What is left of an earlier pass, and held by Python."""
    if _left(made):
        gc.collect()  # what only a cycle holds, nobody can read
    made[:] = [one for one in _left(made) if _holders(one) > 0]
    if made:
        raise ModelError(
            "the model keeps tensors of an earlier batch, in a list, a closure or a global perhaps: a later batch "
            "would depend on those examples. Return them from forward, and keep nothing of a batch in training"
        )


def _left(made: Made) -> Made:
    return [one for one in made if (tensor := one()) is not None and private.is_of_batch(tensor)]


def _holders(made: "weakref.ref[Tensor]") -> int:
    """How often Python holds a tensor: torch's own graphs may too, where an operation in place made a cycle of them.

    By the count of references. To look for the holders (`gc.get_referrers`) hands out what other threads are making.
    """
    return _references(made) - _of_nobody()


def _references(made: "weakref.ref[Tensor]") -> int:
    tensor = made()
    if tensor is None:
        return 0
    private.held_by_python(tensor)
    by_torch = _torch_adds_one() and (private.use_count(tensor) or 0) > 1
    return sys.getrefcount(tensor) - by_torch


@functools.cache
def _torch_adds_one() -> bool:
    """Whether torch, where a graph holds a tensor, has a reference beside those of Python, as from 2.10 on."""
    with torch.inference_mode(False), torch.enable_grad():
        tensor, factor = torch.zeros(()), torch.zeros((), requires_grad=True)
        before = sys.getrefcount(tensor)
        product = factor * tensor
        return sys.getrefcount(tensor) > before and product.requires_grad and private.use_count(tensor) is not None


@functools.cache
def _of_nobody() -> int:
    """The references that `_references` makes while it counts: Python's releases differ in that."""
    held = [torch.zeros(())]
    return _references(weakref.ref(held[0])) - len(held)


SETTING = (type(None), bool, int, float, str)
_PLAIN = frozenset(SETTING)
_CONTAINERS = frozenset({tuple, list, set, dict, OrderedDict})


def check_argument(argument: Any, of: str = "the model") -> None:
    """A setting stands alone; a container holds tensors. A list of lengths would tell one example of the others."""
    if isinstance(argument, (Tensor, *SETTING)):
        return
    leaves = pytree.tree_leaves(argument)
    strange = next((leaf for leaf in leaves if leaf is not None and not isinstance(leaf, Tensor)), None)
    if strange is not None:
        raise ModelError(
            f"the arguments of {of} must be tensors (or containers of tensors) that can be split by example, and "
            f"settings None, bool, int, float, str outside containers; got a {type(strange).__name__}"
            f"{'' if strange is argument else f' inside a {type(argument).__name__}'}: make it a tensor with one row "
            "for each example"
        )


def check_nothing_kept(module: nn.Module, of: str = "the model") -> None:
    """Refuse a module that keeps tensors of this batch: in the next, they would let its units move other units."""
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            kind = type(value)
            if kind in _PLAIN or (kind in _CONTAINERS and not value) or attribute == "_modules":
                continue  # most attributes, and the modules, whose turn comes
            if _is_of_batch(value):
                raise ModelError(
                    f"{name or f'{of} itself'} ({type(part).__name__}) keeps a tensor of the batch in its "
                    f"attribute {attribute!r}: a later batch would depend on these examples. Return it from forward, "
                    "or do not store it in training"
                )


def _is_of_batch(value: Any) -> bool:
    """Whether a value is, or holds, a tensor that was mapped."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if isinstance(value, Tensor):
        return private.is_of_batch(value)
    if kind in _CONTAINERS:
        return any(map(_is_of_batch, value.values() if isinstance(value, dict) else value))
    leaves = pytree.tree_leaves(value)
    return any(isinstance(x, Tensor) and private.is_of_batch(x) for x in leaves)


# -- calls in which a loss is seen to join examples ------------------------------------------------------------------

_UNUSED_LABEL = -100  # torch's default for `ignore_index`
_BY_LABELS = (F.cross_entropy, F.nll_loss)
_BY_WEIGHTS = tuple(f for f in (F.mse_loss, F.l1_loss, F.huber_loss) if "weight" in inspect.signature(f).parameters)
_MEANS = (torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean)
_ELEMENTWISE = {
    "sub", "__rsub__", "sub_", "add", "add_", "mul", "mul_", "div", "div_", "true_divide", "__rdiv__", "pow",
    "__rpow__", "max", "min", "maximum", "minimum", "where", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "poisson_nll_loss", "soft_margin_loss", "kl_div",
}  # fmt: skip
_DIVISIONS = (
    torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.true_divide, Tensor.true_divide_,
    Tensor.__truediv__, Tensor.__itruediv__,
)  # fmt: skip
_CURE = (
    "take the loss of each example (reduction='none') and the mean over all examples, or give the criterion one "
    "example at a time with anyorder.clipping.ExampleLoss"
)


def _checked_call(
    func: Any, args: Any, kwargs: Any, *, size: int, masked: bool, watched: type[Tensor]
) -> Callable[..., Any]:
    """What to call: the function, or in the place of a mean over labels that may not count, one over all of them.

    Args:
        func, args, kwargs: the call.
        size: examples of the batch.
        masked: whether a mask chose among the outputs that it is given.
        watched: the type of the outputs, and of what was computed from them.
    Raises: ModelError for functions that divide by a number which depends on other examples' targets or masks.
    """
    mean = _is_mean(func, args, kwargs)
    if masked and mean:
        raise ModelError(
            "the loss is a mean over what a mask chose of the outputs: it divides by a number that depends on all "
            "examples, so that one moves the gradients of others; for labels mark the others with ignore_index=; else "
            f"{_CURE}"
        )
    if getattr(func, "__name__", "") in _ELEMENTWISE and _joins_examples(args, kwargs, size):
        raise ModelError(
            f"the loss joins each example's output with the numbers of all others: {func.__name__} was given the "
            f"shapes ({size}, 1) and ({size},), which broadcast to ({size}, {size}), so that one "
            "example moves the gradients of others; give both the same shape, for example output.squeeze(1) or "
            "target.unsqueeze(1). Numbers that are not one for each example: give them the shape (1, ..)"
        )
    if func in _DIVISIONS and len(args) == 2 and _divides_total(args[0], args[1], watched):
        raise ModelError(
            "the loss is a sum over the batch divided by a tensor that was not computed from the outputs, such as the "
            "number of unmasked items: that depends on all examples, so that one moves the gradients of others. If "
            f"it is a constant, make it a Python number with float(); else {_CURE}"
        )
    if not mean or func not in (*_BY_LABELS, *_BY_WEIGHTS):
        return func  # type: ignore[no-any-return]
    arguments = _arguments(func, args, kwargs)
    if func in _BY_LABELS and arguments["target"].is_floating_point():  # probabilities: the mean is over examples
        return func  # type: ignore[no-any-return]
    if arguments["weight"] is not None:
        raise ModelError(
            f"{func.__name__} with weight= and reduction='mean' divides by the weights of the whole batch, so that one "
            "example's label moves the gradients of others; take reduction='none' and the mean over all examples: "
            f"{func.__name__}(.., weight=weight, reduction='none').mean()"
        )
    if func in _BY_LABELS and (arguments["target"].numel() > size or arguments["ignore_index"] != _UNUSED_LABEL):
        return _over_all_labels(func)
    return func  # type: ignore[no-any-return]


def _is_mean(func: Any, args: Any, kwargs: Any) -> bool:
    if func in _MEANS:
        return True
    try:
        arguments = _arguments(func, args, kwargs)
    except (TypeError, ValueError):  # not a function of Python
        return False
    legacy = arguments.get("size_average"), arguments.get("reduce")
    if legacy != (None, None):
        return False not in legacy
    return arguments.get("reduction") == "mean"


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _over_all_labels(func: Any) -> Callable[..., Any]:
    def over_all_labels(*args: Any, **kwargs: Any) -> Any:
        arguments = _arguments(func, args, kwargs) | {"size_average": None, "reduce": None, "reduction": "sum"}
        return func(**arguments) / arguments["target"].numel()

    return over_all_labels


def _joins_examples(args: Any, kwargs: Any, size: int) -> bool:
    """Whether (size, 1) meets (size,): a target without the last dimension of the outputs, most often."""
    shapes = {tuple(t.shape) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
    return size > 1 and {(size, 1), (size,)} <= shapes


def _divides_total(total: Any, by: Any, watched: type[Tensor]) -> bool:
    return (
        isinstance(total, watched) and total.dim() == 0
        and isinstance(by, Tensor) and not isinstance(by, watched) and by.numel() == 1
    )  # fmt: skip


# -- the watch of a loss ---------------------------------------------------------------------------------------------

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


@dataclass(frozen=True)
class _Node:
    """In the place of a watched tensor on a tape. A tensor knows its tape: one that held the tensor would never go."""

    number: int


@dataclass(frozen=True)
class _Output:
    """An output of the model: its number, its shape, and where its own part of the graph begins."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad_fn: Any


class _Tape:
    """What was done with the outputs of one batch; with those of several, where one loss is made of them.

    It holds no output, nor what was computed from one: numbers stand for these.
    """

    def __init__(self, watch: LossWatch) -> None:
        self.watch, self.recording, self.size = watch, not watch.done, 0
        self._into: _Tape | None = None
        self._roots: list[list[_Output]] = [[]]  # by batch
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[int | None]]] = []

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
        watched: Any = self.follow(output)
        if self.recording:
            root = _Output(watched.number, output.shape, output.dtype, output.device, watched.grad_fn)
            self._roots[0].append(root)
        return watched  # type: ignore[no-any-return]

    def follow(self, tensor: Tensor, *, masked: bool = False) -> Tensor:
        """Watch what was computed from an output, perhaps from a part of it that a mask chose."""
        watched: Any = tensor
        if not isinstance(tensor, _Watched):  # else it was written in place
            watched = tensor.as_subclass(_Watched)
            watched.number = next(_numbers)
        watched.tape, watched.masked = self, masked
        return watched  # type: ignore[no-any-return]

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        if self.recording:
            args, kwargs = pytree.tree_map_only(_Watched, lambda t: _Node(t.number), (args, kwargs))
            made = [leaf.number if isinstance(leaf, _Watched) else None for leaf in pytree.tree_leaves(result)]
            self._calls.append((function, args, kwargs, made))

    def check(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Refuse a loss in which one example's outputs move the gradients of others."""
        if gradient is None and loss.numel() > 1:
            raise ModelError(
                f"the loss must be one number, and has shape {tuple(loss.shape)}: call loss.mean().backward(). A "
                "criterion with reduction='none', and a model that computes its own loss, give one for each example"
            )
        roots = [root for batch in self._roots for root in batch]
        if not self.recording or self.size < 2 or any(_number(loss) == root.number for root in roots):
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
                f"clipping bounds what a unit adds only if each example's loss depends on itself alone; {_CURE}"
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
        values: dict[int | None, Any] = {r.number: leaf.clone() for r, leaf in zip(roots, leaves, strict=True)}

        def swap(tree: Any) -> Any:
            return pytree.tree_map_only(_Node, lambda node: values[node.number], tree)

        devices = sorted({t.device.index for t in leaves if t.device.type == "cuda"})
        with torch.enable_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            for function, args, kwargs, results in self._calls:
                made = pytree.tree_leaves(function(*swap(args), **swap(kwargs)))
                values |= dict(zip(results, made, strict=False))
        end = values[_number(loss)]
        found = torch.autograd.grad(end, leaves, gradient, allow_unused=True)
        if all(g is None for g in found):
            raise _Apart
        full = iter(torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True))
        return [[next(full) for _ in batch] for batch in outputs]


_numbers = itertools.count()


def _number(tensor: Tensor) -> int:
    """Of a watched tensor."""
    assert isinstance(tensor, _Watched)
    return tensor.number


def _has_own_backward(loss: Tensor, roots: Sequence[_Output]) -> bool:
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
    number: int = -1

    def __format__(self, spec: str) -> str:
        return format(_ordinary(self), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_ordinary(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_ordinary(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, _Watched)]
        tapes = [t.tape.current for t in given if t.tape is not None]
        tape = tapes[0] if tapes else None
        with private.WithoutSubclasses():
            if tape is None or not tape.useful:
                return func(*args, **kwargs)
            for other in tapes:
                tape.join(other.current)
            if func is Tensor.backward:
                tape.check(args[0], args[1] if len(args) > 1 else kwargs.get("gradient"))
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]
            masked = any(t.masked for t in given)
            function = _checked_call(func, args, kwargs, size=tape.size, masked=masked, watched=_Watched)
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


def _ordinary(tensor: Tensor) -> Tensor:
    with private.WithoutSubclasses():
        return tensor.as_subclass(Tensor)


def _leave_to_python() -> None:
    """Have `torch.compile` run what it meets watched tensors in as it is written; tracing them would not end."""
    if private.compiler_leaves(_Watched):
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


# -- a loss of one example at a time ---------------------------------------------------------------------------------


class ExampleLoss(nn.Module):
    """The mean, or sum, over examples of a criterion that is given one example at a time.

        (1 / b) sum_i criterion(outputs[i : i + 1], targets[i : i + 1])

    The engine's guarantee needs a loss in which an example's term depends on that example alone. Many criteria are not
    of this kind: a cross-entropy with `ignore_index` divides by the number of unmasked tokens of the whole batch, a
    contrastive loss compares examples. Here the criterion is mapped over the batch, and cannot.

    Args:
        criterion: a function or module of batches, (1, ..) tensors and nested dicts and sequences of them, to one
            number. It must be one that `torch.func.vmap` can run: no branches on values. It must keep nothing of a
            batch for the next; a module that does is refused.
        reduction: "mean" or "sum", the same as `loss_reduction` of `make_private`.
    Raises: ModelError where the batches differ in length, where something is neither a tensor nor a setting (a list of
        labels would be seen by every example), or the criterion gives more than one number for an example.

    Where no label of an example counts, `CrossEntropyLoss` is 0 / 0: the loss shows NaN, the gradients are those of
    the others.
    """

    def __init__(self, criterion: Any, reduction: str = "mean") -> None:
        super().__init__()
        self.criterion = criterion
        self.reduction = checks.choice("reduction", reduction, {"mean", "sum"})

    def forward(self, *batches: Any) -> Tensor:
        """The loss of outputs and targets, whose first dimension is the batch."""
        lengths = {len(leaf) if leaf.dim() else 0 for leaf in pytree.tree_leaves(batches) if isinstance(leaf, Tensor)}
        if len(lengths) != 1:
            raise ModelError(f"outputs and targets must be batches of one length, got lengths {sorted(lengths)}")

        batches = unwatched(batches)
        for batch in batches:
            check_argument(batch, of="the criterion")

        def alone(*example: Any) -> Tensor:
            value = self.criterion(*pytree.tree_map_only(Tensor, lambda t: t.unsqueeze(0), example))
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ModelError(f"criterion must give one number for a batch of one example, got {shape}")
            return value.reshape(())

        dimensions = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batches)
        losses: Tensor = vmap(alone, in_dims=dimensions, randomness="different")(*batches)
        if isinstance(self.criterion, nn.Module):
            check_nothing_kept(self.criterion, of="the criterion")
        return losses.mean() if self.reduction == "mean" else torch.sum(losses)
