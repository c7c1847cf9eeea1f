"""Whether the gradients that a script clips are those of single examples: its model and its loss, as they run.

Clipping bounds what an example adds if nothing else in the sum depends on it. Every operation between the batch that a
loader hands out and `backward` is carried through the rules of `anyorder.clipping.rows`. The loss must be, in every
batch, a sum over rows of functions of each row alone, times what the optimizer takes for it (1 for
loss_reduction="sum", one over the rows for "mean"), times numbers that are the same in all batches. What no rule knows
is not established. The script's own tensors and numbers are left as they are.

What is taken for granted: labels count (none is `ignore_index`, where none was seen that is), and what the script takes
out of torch by NumPy and puts into torch again is public.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anyorder.clipping.rows import AtenCall, ByRow, Coupled, Interpreter, NoRule, State, Total
from anyorder.clipping.torch_private import pytree

_BEFORE = Coupled("has numbers of an earlier batch, so that its examples move the gradients of others")
_WHOLE = Coupled("has a tensor of the batch that is not one row for each example")
_MOVES = (
    "a number in the loss differs from batch to batch, and may be of the examples (a count of valid ones, a padded "
    "length): whoever is there would move the gradients of others"
)
_OTHER_WAY = "gradients of examples were clipped that no loss.backward() gave which was followed"
_IGNORED = "the loss is a mean over the labels that count: how many do depends on all examples"
_WEIGHTED = "the loss is a mean by the weights of the classes of all examples"
_OWN = "the loss or the model has an autograd.Function of its own, whose backward pass is not followed"
_HOOKED = "a hook on a tensor of the batch may change the gradients of all examples"
_MODE = "the script runs torch under a mode of its own, which hides the operations of its loss"
_SCALE = {
    "mean": 'the loss is not a mean over the examples, and loss_reduction="mean" says so: the size of each gradient '
    "depends on how many others there are",
    "sum": 'the loss is not a sum over the examples, and loss_reduction="sum" says so: the size of each gradient '
    "depends on how many others there are",
}  # fmt: skip


class LossRows(Interpreter):  # type: ignore[no-untyped-call]
    """Follows the batches of a run up to their backward passes.

    Attributes:
        doubt: why some gradient that was clipped may depend on several examples; "" where none does.
    """

    def __init__(self, careful: Callable[..., Any]) -> None:
        super().__init__()
        self.doubt, self._careful = "", careful
        self._is_on = self._is_judged = False
        self._rows = 0
        self._degrees: dict[int, set[int]] = {}  # of totals: by which powers of the rows they may be divided
        self._numbers: list[float] = []  # in this batch's loss, in order
        self._first: tuple[int, list[float]] | None = None  # the rows and the numbers of the first batch
        self._earlier: dict[int, StorageWeakRef] = {}  # memory in which numbers of earlier batches are
        self._scale: set[int] = set()
        self._is_ghost = self._is_second = False

    # -- called by the hooks of `watch` ------------------------------------------------------------------------------

    def batch(self, data: Any, rows: int | None) -> None:
        """A loader has handed out a batch that is trained on."""
        leaves = pytree.tree_leaves(data)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) < len(leaves) or not tensors or any(t.layout is not torch.strided for t in tensors):
            self._doubt("a batch of other things than tensors cannot be followed")
            return
        rows = tensors[0].shape[0] if rows is None and tensors[0].dim() else rows or 0
        axis = () if not self._is_on else (id(data),)  # of two batches that are joined
        self._rows = rows
        for tensor in tensors:
            self.put(tensor, ByRow((0, *axis), 0, 1) if tensor.dim() and tensor.shape[0] == rows else _WHOLE)
        if not self._is_on:
            self._is_on = True
            if not any(mode is self for mode in _get_current_dispatch_mode_stack()):
                self.__enter__()  # type: ignore[no-untyped-call]

    def backward(self, loss: Any, gradients: Any) -> None:
        """`loss.backward()` is called."""
        if self._is_second:
            return
        self._is_second = self._is_ghost
        if not self._is_on:
            self._doubt(_OTHER_WAY)
            return
        state, rows = self.state(loss) if isinstance(loss, Tensor) else None, self._rows
        self._is_judged = True
        if gradients is not None:
            self._doubt("gradients were given to backward() by hand")
        elif isinstance(state, Coupled) and (rows > 1 or state is _BEFORE):
            self._doubt(f"the loss {state.why}")
        elif rows > 1:
            if isinstance(state, NoRule):
                self._doubt(f"no rule says what an operation of the loss or the model does with examples: {state.what}")
            elif not isinstance(state, Total):
                self._doubt("the loss is no sum over the examples of the batch that was handed out last")
            self._compare(rows)
            self._scale = self._degrees.get(loss.data_ptr(), {0, 1}) if isinstance(loss, Tensor) else {0, 1}
        if _has_own_function(getattr(loss, "grad_fn", None)):
            self._doubt(_OWN)
        self.forget()

    def clipped(self, reduction: str) -> None:
        """The optimizer clips gradients."""
        if not self._is_judged:
            self._doubt(_OTHER_WAY)
        if self._scale and (1 if reduction == "mean" else 0) not in self._scale:
            self._doubt(_SCALE[reduction])
        self._is_judged, self._scale = False, set()

    @contextmanager
    def ghost(self) -> Iterator[None]:
        """Two backward passes of ghost norms, of which the second is of the same loss."""
        self._is_ghost = True
        try:
            yield
        finally:
            self._is_ghost = self._is_second = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Operations that are not the script's."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def hooked(self) -> None:
        """A hook on a tensor was registered."""
        if self._is_on:
            self._doubt(_HOOKED)

    def forget(self) -> None:
        """The batch is over: what is left of it is of an earlier one."""
        self._is_on = False
        left = {
            tensor.untyped_storage().data_ptr(): tensor for tensor, state in self._states.values() if state is not None
        }
        self._earlier = {start: own for start, own in self._earlier.items() if not _is_gone(own)}
        self._earlier |= {start: _weakly(tensor) for start, tensor in left.items() if start}
        self._states.clear()
        self._degrees.clear()
        self._numbers = []
        self.read.clear()
        self.leave()

    def leave(self) -> None:
        """Follow nothing more, if the script has no mode of its own that began later."""
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        elif any(mode is self for mode in stack):
            self._doubt(_MODE)

    # -- operations --------------------------------------------------------------------------------------------------

    def state(self, tensor: Tensor, otherwise: State = None) -> State:
        found = super().state(tensor, otherwise)
        if found is None and self._earlier and tensor.layout is torch.strided:
            ref = self._earlier.get(tensor.untyped_storage().data_ptr())
            return _BEFORE if ref is not None and not _is_gone(ref) else None
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_on or self._rows < 2:
            return func(*args, **(kwargs or {}))
        call = self._careful(AtenCall, func, args, kwargs or {}, self.state)
        result = func(*args, **(kwargs or {}))
        if call is not None and any(state is not None for state in call.states):
            self._careful(self._follow, call, result)
        return result

    def _follow(self, call: AtenCall, result: Any) -> None:
        self.follow(call, result)
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not results:
            return
        made = self.state(results[0])
        if call.name.startswith("nll_loss") and call.values["reduction"] == 1:
            made = self._mean_of_labels(call, results)
        self._note_numbers(call, results[0])
        if isinstance(made, Total):
            self._degrees[results[0].data_ptr()] = self._degrees_of(call)

    def _mean_of_labels(self, call: AtenCall, results: list[Tensor]) -> State:
        """A mean over labels is one over rows, where all of them count."""
        of_scores, labels = call.states[0], call.values["target"]
        state: State = NoRule("a mean over labels of other rows than the scores")
        if isinstance(of_scores, (Coupled, NoRule)):
            state = of_scores
        elif isinstance(of_scores, ByRow) and of_scores.dim == 0 and self.state(labels) == of_scores:
            state = Total()
            if call.values["weight"] is not None:
                state = Coupled(_WEIGHTED.removeprefix("the loss "))
            elif float(results[1]) != labels.numel():
                state = Coupled(_IGNORED.removeprefix("the loss "))
        for tensor in results:
            self.put(tensor, state)
        return state

    def _note_numbers(self, call: AtenCall, result: Tensor) -> None:
        """Numbers of Python, and how many numbers of each row a mean divides by: the same in all batches, or public."""
        if call.pointwise:
            self._numbers += [float(v) for v in call.values.values() if type(v) in (int, float)]
        if call.name == "mean" or call.values.get("reduction") == 1:
            self._numbers.append(call.tensors[0].numel() / max(1, result.numel()))

    def _degrees_of(self, call: AtenCall) -> set[int]:
        """By which powers of the number of rows a total is divided: a number of as many may be that, or a constant."""
        own = [
            self._degrees.get(t.data_ptr(), {0})
            for t, s in zip(call.tensors, call.states, strict=True)
            if isinstance(s, Total)
        ]
        if not own:
            return {1} if call.name == "mean" or call.values.get("reduction") == 1 else {0}
        degrees = set.intersection(*own)
        other = call.values.get("other")
        if call.name in ("div", "true_divide") and _is_multiple(other, self._rows):
            degrees = degrees | {d + 1 for d in degrees}
        if call.name == "mul" and type(other) is float and other and _is_multiple(1 / other, self._rows):
            degrees = degrees | {d + 1 for d in degrees}
        return degrees

    def _compare(self, rows: int) -> None:
        """The numbers of this batch's loss with those of the first, each as it is or by the rows."""
        if self._first is None:
            self._first = rows, self._numbers
            return
        first, numbers = self._first
        ratio = rows / first
        if len(numbers) != len(self._numbers) or not all(
            any(_is_close(b, a * scale) for scale in (1.0, ratio, 1 / ratio))
            for a, b in zip(numbers, self._numbers, strict=True)
        ):
            self._doubt(_MOVES)

    def _doubt(self, why: str) -> None:
        self.doubt = self.doubt or why


def _weakly(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]


def _is_close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-9 * abs(b)


def _is_multiple(number: Any, rows: int) -> bool:
    return type(number) in (int, float) and number >= rows and abs(number / rows - round(number / rows)) < 1e-9


def _has_own_function(start: Any) -> bool:
    """Whether a graph has an autograd.Function in Python, other than those of hooks on modules."""
    seen: set[Any] = set()
    nodes = [start]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and (
            getattr(type(node), "_forward_cls", None) is not BackwardHookFunction
        ):
            return True
        nodes += [one for one, _ in node.next_functions]
    return False
