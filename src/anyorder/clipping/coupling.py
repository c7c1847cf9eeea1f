"""The loss of a batch, from the model's outputs to `backward`: proved row by row, or run again row by row, or refused.

Clipping bounds what a unit adds if each example's loss depends on that example alone. The loss is the caller's own
code, between `model(x)` and `loss.backward()`. So the tensors of a batch and the model's outputs are handed out as
tensors that write down what is done with them, in every batch:

    proved    each operation, as it really runs, is carried through the rules of `rows`, and the loss is a total: a sum
              over rows, each a function of its own row, times public constants. Then the gradient that comes to an
              output's row is that of its own term, and is used as it is.
    mapped    an operation has no rule, or something else may have touched the graph. What was written down is run
              again under vmap, each row's outputs and targets alone. What goes back to the outputs are these gradients,
                  sum_i grad l(outputs_i, targets_i) / rows        (not divided where loss_reduction="sum")
              whatever the batch's loss was: nobody is told whether they differ from its own.
    refused   rows are known to meet before the final sum; or the loss came by a way that is not written down; or vmap
              cannot run it. What decides are operations, shapes and where tensors come from, never their numbers.

What counts as data is what the loader hands out and what is computed of it: a total of it that divides (`mask.sum()`,
counts of classes) couples. A tensor that never met the batch is a public constant. What `item` and `tolist` take out
before `backward` are Python numbers that know it, as does what is computed of them: a loss that has one is refused.
Other ways out of torch are not followed: any other Python number in the loss is the caller's word that it is public,
and so is what a branch chose. Where torch tells of such a look before `backward`, the loss is "promised" from then on.

*Normalisers.* A mean over a tensor divides by its shape, of which the rows are public; other dimensions (a padded
length) are the same for every row of the batch, and are public where lengths are. A mean over labels (`cross_entropy`,
`nll_loss`) that may not count is, here,

    (1 / rows) sum_i  ( sum of row i's counted terms / number of row i's counted labels )

of which the i-th term is a function of row i alone, whatever the padded length: what the criterion gives for row i by
itself, and zero where none of its labels counts. Where each row has one label, or all count, it is torch's own number.
"""

import copy
import functools
import itertools
import os
import sys
import types
import weakref
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import is_dataclass
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.func import vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anyorder import checks
from anyorder.clipping import torch_private as private
from anyorder.clipping.kept_tensors import check_argument, check_nothing_kept, check_own, written_since
from anyorder.clipping.rows import (
    TOTAL,
    ByRow,
    Coupled,
    Interpreter,
    NoRule,
    OfRow,
    Picked,
    State,
    Total,
    has_secret_shape,
    keeps_memory,
    product,
    repeats_rows,
    shape_text,
    unstacked,
)
from anyorder.clipping.torch_private import pytree
from anyorder.errors import AnyorderError, ArgumentError, ModelError, TrainingError
from anyorder.sampling.batch_classes import named_parts, remade

_CURE = (
    "take the loss of each example (reduction='none') and the mean over all examples, or give the criterion one "
    "example at a time with anyorder.clipping.ExampleLoss"
)
_OF_FROZEN = (
    "that operation is a layer of a frozen network (a reference model, perhaps): compute what the network gives for "
    "each example once before training, under torch.no_grad() and in evaluation mode, and put it into the data set as "
    "a column. nn.GRU, nn.LSTM and nn.RNN on padded sequences, one row for each example, may stay in the loop"
)
_UNKNOWN_ORIGIN = Coupled(
    "has a tensor of unknown origin that is not one row for each example: a number that depends on all of them would "
    "couple them, so that one moves the gradients of others. If it is a constant, make it a Python number with "
    "float(), or an nn.Parameter that needs no gradient"
)
_BY_ROW = ByRow((0,), 0, 1)
_OF_BATCH = Coupled(
    "has a tensor of the batch that is not one row for each example, so that one moves the gradients of others"
)
_EARLIER = Coupled("has numbers of an earlier batch, so that its examples move the gradients of others")
_WRITTEN = Coupled(
    "has a tensor into which numbers of the batch were written, in this run or another one of the process, so that one "
    "example may move the gradients of others"
)
_TAKEN_OUT = Coupled(
    "has a number that was taken out of the batch with item() or tolist(), or is the end of a slice (x[:n]), so that "
    "one example may move the gradients of others; such numbers may be printed and logged"
)
_NOT_FOLLOWED = Coupled("comes by a way that is not followed, so that one example may move the gradients of others")

_LOOKED = Coupled(
    "has outputs that the model gave without gradients: they are of the batch as a whole, so that one example may move "
    "the gradients of others. Take model(x).detach() of the private pass, or a frozen copy of the model"
)

# -- a run -----------------------------------------------------------------------------------------------------------


class LossWatch:
    """Watches what is done with the batches and outputs of a run.

    Args:
        reduction: how the loss joins examples, "mean" or "sum": what gradients of single rows are divided by.
        parameters: of the private model, whose gradients are released; others in a loss would get theirs as they are.
        model: the private model, into which no number of a batch may be written.

    Attributes:
        kept: how rows are kept apart in all batches so far: "proved", "mapped" (in one of them at least), "promised"
            (where tensors were taken for rows that nobody followed, of a batch that is not all tensors, or the loop
            saw Python values of one), or None before the first loss.
        escaped: of all runs of the process: the line of a loop that first put numbers of a batch into memory of which
            no watched tensor tells (NumPy's arrays, parameters), to the end of the process; empty where none did.
        aliased: of all runs: how often numbers of a batch were written by an alias (`x.data.add_(loss)`), of which the
            versions of other tensors that show the memory do not tell.
    """

    escaped: ClassVar[str] = ""
    aliased: ClassVar[int] = 0

    def __init__(
        self, reduction: str = "mean", parameters: Iterable[Tensor] = (), model: nn.Module | None = None
    ) -> None:
        self.reduction, self.model = reduction, model
        self.parameters = {id(p): p for p in parameters}
        self.kept: str | None = None
        self.known: dict[Any, tuple[list[State], State]] = {}
        self.has_unfollowed = False  # whether a batch had what is not followed
        self.was_seen = False  # whether the loop has Python values of a batch that nobody follows: a branch, `float(t)`
        self._newest: Callable[[], _Tape | None] = _nothing
        _watches.add(self)
        weakref.finalize(self, _end).atexit = False

    def batch(self, batch: Any, rows: int, handed: Any = None) -> Any:
        """A batch as the loop gets it: its tensors write down what is done with them, and that they are of `handed`."""
        tape, kind = _Tape(self, rows, handed), type(batch)
        if sys.modules.get(private.COMPILER) not in _LEFT:
            _leave_to_python()
        self._newest = weakref.ref(tape)
        if (kind is tuple or kind is list) and set(map(type, batch)) == {Tensor}:  # as most batches are
            tape.followed_data = set(map(_LAYOUT, batch)) == {torch.strided}
            self.has_unfollowed = self.has_unfollowed or not tape.followed_data
            return kind(map(tape.of_batch, batch))
        tape.followed_data = all(x is None or (type(x) is Tensor and x.layout is torch.strided) for x in flat(batch))
        self.has_unfollowed = self.has_unfollowed or not tape.followed_data
        tape.assumed = not all(x is None or isinstance(x, Tensor) for x in flat(batch))  # a length, a text
        single = {id(leaf) for values in getattr(handed, "single_rows", ()) for leaf in flat(values)}
        return _changed(batch, lambda tensor: tape.of_batch(tensor, id(tensor) not in single))

    def batch_of(self, given: Iterable[Any]) -> tuple[Any, bool]:
        """(the batch, as it was handed out, whose rows these leaves have; whether they stand in the batch's order).

        None where no watched tensor tells; an order that is not known is none.

        Raises: TrainingError: they are of two batches.
        """
        found, straight = None, True
        for leaf in given:
            tape, number = _place(leaf) if type(leaf) is _Watched else (None, -1)
            state = None if tape is None or tape.closed else tape.states[number]
            if tape is None or not isinstance(state, (ByRow, NoRule)):
                continue
            first, *moved = state.axis if isinstance(state, ByRow) else (0, None)
            with private.WithoutSubclasses():  # a part of the rows is refused for their number
                whole = leaf.shape[:1] == (tape.sizes[first],)
            straight = straight and not (whole and moved)
            for own in [tape.batches[first]] if isinstance(state, ByRow) else tape.batches:
                if own is None:  # made for what is of no batch of the loader
                    continue
                if found is not None and own is not found:
                    raise TrainingError("the model was given tensors of two batches at once; call it on one at a time")
                found = own
        return found, straight

    def by_row(self, args: Any, kwargs: Any) -> Any:
        """The model's (args, kwargs) as ordinary tensors; what no rule knows is computed again of each row alone.

        What cannot be computed again stays as it is, and is taken for rows: "promised".
        """

        def again(leaf: Any) -> Any:
            tape, number = _place(leaf) if type(leaf) is _Watched else (None, -1)
            if tape is None or tape.closed or not isinstance(tape.states[number], NoRule):
                return leaf
            with private.WithoutSubclasses():
                rows = None if leaf.requires_grad else tape.of_rows(leaf, number)
            if rows is None:
                return leaf
            tape.alone.add(number)
            return rows

        as_most_are = not kwargs and set(map(type, args)) == {_Watched}
        for leaf in args if as_most_are else flat((args, kwargs)):
            tape = leaf.tape if type(leaf) is _Watched else None
            if tape is None or tape.closed or (tape.into is None and type(tape.states[leaf.number]) is not NoRule):
                continue
            args, kwargs = _changed((args, kwargs), again)
            break
        else:
            if as_most_are:
                return tuple(map(_plain, args)), kwargs
        return unwatched(args), unwatched(kwargs)

    def outputs(self, outputs: Any, given: Iterable[Any] = ()) -> Any:
        """The outputs of the model, called with these leaves. One row is watched for what earlier batches may add.

        Raises: ModelError where rows were joined in what the model was given (mixup, statistics of the batch), or stand
            in another order than in another argument or another pass (negatives that are other examples).
        """
        if type(outputs) is Tensor:
            size = outputs.shape[0] if outputs.requires_grad and outputs.dim() else 0
        else:
            leaves = pytree.tree_leaves(outputs)
            size = next((t.shape[0] for t in leaves if isinstance(t, Tensor) and t.requires_grad and t.dim()), 0)
        if not size:
            return outputs
        tape, axis = self._tape_of(given, size)
        if tape.passes and any(earlier[0] == axis[0] and earlier != axis for earlier in tape.passes):
            raise _other_rows("the model was called twice on the batch, with its rows in two orders")
        tape.passes.append(axis)
        if tape.given_without_rule and len(tape.passes) > 1:
            raise _other_rows(
                "the model was called twice on the batch, and given what an operation made of it of which it is not "
                "known that it keeps the order of rows"
            )
        if type(outputs) is Tensor:
            return tape.output(outputs, axis)

        def watched(leaf: Tensor) -> Tensor:
            if leaf.requires_grad and leaf.dim():
                return tape.output(leaf, axis)
            return leaf if type(leaf) is _Watched else tape.without_gradient(leaf, axis)

        return _changed(outputs, watched)

    def is_released(self, given: Any) -> bool:
        """Whether the model is called on tensors that require gradients, of which none is of a batch: a generator's.

        Not where batches have things of which tensors could be made that nobody follows, such as texts.
        """
        if _Watched in map(type, given[0]):  # as most calls are
            return False
        found = False
        for leaf in () if self.has_unfollowed or self.escaped else flat(given):
            if type(leaf) is _Watched or private.is_marked(leaf):
                return False
            found = found or (isinstance(leaf, Tensor) and leaf.requires_grad)
        return found

    def check_chain(self, given: Iterable[Any]) -> None:
        """Let a network be given what another made of the same batch, so that gradients go back through both.

        They stay with their rows if what lies between is known to keep rows apart, and no other tensor gets any.

        Raises: ModelError for any other tensor that requires gradients.
        """
        for leaf in given:
            with private.WithoutSubclasses():
                needs = isinstance(leaf, Tensor) and leaf.requires_grad
                start = leaf.grad_fn if needs else None
            if not needs:
                continue
            tape, number = _place(leaf) if type(leaf) is _Watched else (None, -1)
            if tape is None or tape.closed or start is None:
                raise _needs_gradients()
            reached, own, leaves = _walk(start, tape.trusted)
            state = tape.states[number]
            if not reached or own or leaves or not isinstance(state, ByRow) or state.dim != 0:
                raise _needs_gradients()
            tape.given_on |= tape._needed(number)[1]

    def check_target(self, written: Any) -> None:
        """Refuse to write numbers of a batch into the model, of which they would be told and move later gradients.

        Raises: ModelError for a tensor that shows memory of a parameter, a buffer or an attribute of its modules.
        """
        if self.model is None or not isinstance(written, Tensor) or written.layout is not torch.strided:
            return
        own, start = {type(written), *_ORDINARY}, _start(written)
        for name, part in self.model.named_modules():
            for attribute, held in (*part._parameters.items(), *part._buffers.items(), *vars(part).items()):
                if type(held) in own and (held is written or (start and start == _start(held))):
                    raise ModelError(
                        f"numbers of the batch are written into {attribute!r} of {name or 'the model'}, which would "
                        "tell of them and move the gradients of later batches without noise; normalise by public "
                        "numbers, and keep what is measured of batches out of the private model"
                    )

    def looked(self, outputs: Any, given: Any) -> Any:
        """Outputs that no gradient leaves, of this batch or an earlier one: for looking, not for a loss."""
        tapes = [_place(leaf)[0] for leaf in flat(given) if type(leaf) is _Watched]
        tape = next((tape for tape in tapes if tape is not None and not tape.closed), None)
        if tape is not None:
            return _changed(outputs, lambda leaf: tape.follow(_plain(leaf), _LOOKED))
        return _changed(outputs, lambda leaf: _as_earlier(tapes[0], _plain(leaf))) if tapes else outputs

    def shown(self, given: Any) -> Any:
        """What a pass without gradients gets: copies, known as of an earlier batch. What the model's code, or a hook,
        keeps of them is of the batch, and nothing of them is written into the model.
        """
        tape, before = _Tape(self, 1), [_place(x)[0] for x in flat(given) if type(x) is _Watched]
        tape.close()
        tape.is_shown = any(one is not None and not one.closed for one in before)  # else it is of an earlier batch
        return _changed(given, lambda leaf: _as_earlier(tape, _plain(leaf).clone()) if type(leaf) is _Watched else leaf)

    def _tape_of(self, given: Any, size: int) -> "tuple[_Tape, tuple[Any, ...]]":
        """Where the batch is written down that the model was called with, and which rows of it these are."""
        found, without_rule, taken_for_rows, outside = None, False, False, list[Tensor]()
        for leaf in given:
            if type(leaf) is not _Watched:
                outside += [leaf] if isinstance(leaf, Tensor) else ()
                if isinstance(leaf, Tensor) and (self.escaped or private.is_marked(leaf)):
                    raise ModelError(f"the model was given a tensor that {_words(_WRITTEN)}: give it the loader's own")
                taken_for_rows = taken_for_rows or (self.has_unfollowed and isinstance(leaf, Tensor))
                continue
            tape, number = _place(leaf)
            if tape is None:
                raise ModelError(f"the model was given a tensor that {_TAKEN_OUT.why}")
            if tape.closed:
                raise ModelError(
                    "the model was given a tensor of an earlier batch, a hidden state perhaps: examples of that batch "
                    "would reach the gradients of this one. Begin each batch again, or put a whole sequence into a row"
                )
            state = tape.states[number]
            if isinstance(state, ByRow) and len(state.axis) > 1 and repeats_rows(state):
                raise ModelError(
                    "the model was given some rows of the batch several times, or rows that were stacked again: one "
                    "example would be clipped as several. Give it the rows as the loader did, and draw rows again in "
                    "the sampler or the data set"
                )
            as_it_came = state is _OF_BATCH and any(root.number == number for root in tape.roots)
            if isinstance(state, Coupled) and not as_it_came:
                raise ModelError(
                    f"the model was given a tensor that {state.why}: give it rows of single examples, as the loader did"
                )
            if state is None or as_it_came:
                continue
            if isinstance(state, NoRule):  # of the rows, as far as anybody knows
                without_rule = True
                tape.assumed = tape.assumed or number not in tape.alone
                continue
            with private.WithoutSubclasses():
                in_rows = isinstance(state, ByRow) and state[1:] == (0, 1) and leaf.shape[0] == size
            if not isinstance(state, ByRow) or not in_rows:
                raise ModelError(
                    "the model was given a tensor of the batch whose first dimension does not go over the examples, "
                    "so that one example moves the gradients of others: give it rows of single examples, as the loader "
                    "did"
                )
            if found is not None and found != (tape, state.axis):
                raise _other_rows("the model was given the batch's rows in two orders at once")
            found = tape, state.axis
        if found is None:
            newest = self._newest()
            if newest is None or newest.closed or newest.sizes != [size]:
                newest = _Tape(self, size)
                if sys.modules.get(private.COMPILER) not in _LEFT:
                    _leave_to_python()
                self._newest = weakref.ref(newest)
            found = newest, (0,)
        found[0].given_without_rule |= without_rule
        found[0].assumed |= taken_for_rows
        found[0].given_outside |= set(map(int, map(found[0]._operand, outside)))
        return found


_ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
_VIEWED = (private.VIEWED,)
_watches: "weakref.WeakSet[LossWatch]" = weakref.WeakSet()


def _end() -> None:
    if not [*_watches]:  # those that live
        private.place_below(ASKED, False)


def _check_targets(written: Iterable[Any]) -> None:
    """`check_target` of all runs. Raises: ModelError too for a parameter that another network trains."""
    runs = [*_watches]
    for one in written if runs else ():
        for run in runs:
            run.check_target(one)
        if type(one) is nn.Parameter and one.requires_grad and not any(id(one) in run.parameters for run in runs):
            raise _trains_others()


def own_memory(run: Callable[[], Any]) -> Any:
    """What a pass gives that nothing goes back through, where it shows memory that others have, the model perhaps, as a
    copy: what is written into it is written nowhere else.
    """

    def alias(leaf: Tensor) -> Tensor:  # the tensor itself lives on where others have it
        return leaf if leaf.requires_grad and torch.is_grad_enabled() else leaf.detach()

    outputs = _changed(run(), alias)

    def own(leaf: Tensor) -> Tensor:
        return leaf.clone() if leaf.layout is torch.strided and private.uses_of_memory(leaf) > 1 else leaf

    with private.WithoutSubclasses():
        return _changed(outputs, own)


def _start(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    plain = tensor.layout is torch.strided and not private.is_wrapped(tensor)
    return tensor.untyped_storage().data_ptr() if plain else 0


def _nothing() -> None:
    return None


def unwatched(tree: Any) -> Any:
    """The tree with ordinary tensors in the place of watched ones: as the loader made them, where they are so."""
    return _changed(tree, _plain)


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) is not _Watched:
        return tensor
    return _ordinary(tensor) if tensor.plain is None else tensor.plain


def _changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with other tensors: what `pytree` does, of which it takes a tenth of the time where trees are flat."""
    kind = type(tree)
    if kind is Tensor or kind is _Watched:
        return change(tree)
    if kind is tuple or kind is list:
        return kind([_changed(leaf, change) for leaf in tree])
    if kind is dict:
        return {name: _changed(leaf, change) for name, leaf in tree.items()} if tree else tree
    if kind in _SETTINGS:
        return tree
    if _parts(tree) is not None:
        return remade(tree, lambda part: _changed(part, change))
    leaves, structure = private.flattened(tree)
    alone = len(leaves) == 1 and leaves[0] is tree
    return tree if alone else pytree.tree_unflatten([_changed(leaf, change) for leaf in leaves], structure)


def _parts(tree: Any) -> list[Any] | None:
    """What a container of a class of one's own holds, or an object that has tensors, as a batch may; None of others.

    No code of the class runs: on a batch that nobody follows yet it could join rows.
    """
    kind = type(tree)
    if issubclass(kind, (type, Tensor)):
        return None
    parts = [part for _, part in named_parts(tree)]
    is_container = issubclass(kind, (tuple, list, dict, UserDict, UserList)) or is_dataclass(kind)
    is_container = is_container or kind in pytree.SUPPORTED_NODES
    return parts if parts and (is_container or any(issubclass(type(part), Tensor) for part in parts)) else None


def flat(tree: Any) -> list[Any]:
    """All tensors that `_changed` would change, and other leaves: what the model is given is looked at whole."""
    found, waiting = [], [tree]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind is Tensor or kind is _Watched or kind in _SETTINGS:
            found.append(one)
        elif kind is tuple or kind is list:
            waiting += one[::-1]
        elif kind is dict:
            waiting += [*one.values()][::-1]
        elif (parts := _parts(one)) is not None:
            waiting += parts[::-1]
        else:
            leaves = private.flattened(one)[0]
            if len(leaves) == 1 and leaves[0] is one:
                found.append(one)
            else:
                waiting += leaves[::-1]
    return found


_SETTINGS = frozenset({type(None), bool, int, float, str})


# -- a batch ---------------------------------------------------------------------------------------------------------


class _Node(int):
    """In the place of a watched tensor in what was written down: its number."""


class _Operand(int):
    """In the place of a tensor that is not watched: its place among the tape's."""


class _Source(NamedTuple):
    """Where numbers of the batch begin. `port`: which output of which node of autograd; None for data."""

    number: int
    tensor: Tensor
    version: int
    port: tuple[int, int] | None


class _Call(NamedTuple):
    """A function as it was called, and the numbers of its results."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Sequence[int | None]
    with_grad: bool
    written: int | None = None


class _Tape:
    """What was done with a batch, up to its backward pass; with two, where one loss is made of them.

    It holds the tensors of the batch and the outputs cut off from autograd, and no other that was computed of them:
    numbers stand for these. The graph's hook knows the tape weakly. So no cycle goes through a tensor.
    """

    def __init__(self, watch: LossWatch, size: int, handed: Any = None) -> None:
        self.watch, self.sizes, self.batches = watch, [size], [handed]
        self.closed = self.followed_data = False
        self.allowed = False  # while the backward pass of a loss runs that was judged
        self.exposed = False  # whether the loop has a node of the graph, where it may put a hook
        self.aliased_before = LossWatch.aliased  # when the batch was begun
        self.taken_out = self.of_numbers = False  # whether numbers were among the arguments of this call, of any
        self.is_shown = False  # see `LossWatch.shown`
        self.of_written = self.assumed = False  # whether what was written into was, or what is taken for rows
        self.given_without_rule = False  # whether a model was given what no rule knows
        self.alone: set[int] = set()  # of which it was given what each row alone gives
        self.given_outside: set[int] = set()  # operands: what it was given that is not watched
        self.states: list[State] = []
        self.roots: list[_Source] = []
        self.calls: list[_Call] = []
        self.operands: list[Tensor] = []
        self.noted: list[int] = []  # their versions, when they were read
        self.foreign: set[int] = set()  # those of other batches
        self.gradients: dict[tuple[int, int], Tensor] | None = None
        self.trusted: list[Any] = []  # nodes of autograd behind which rows are alone
        self.nodes: dict[int, int] = {}  # of outputs: of which batch they are
        self.given_on: set[int] = set()  # what a network was given that another made, and what that was made of
        self.passes: list[tuple[Any, ...]] = []  # the axes of the rows that the model was called on
        self.used: set[int] = set()  # batches whose gradients came
        self.into: tuple[_Tape, int] | None = None
        self._alive: list[weakref.ref[Tensor]] = []
        self._at, self._has_weights = "", False  # the name of the operation that runs again, whether it has parameters
        self._autocast: list[tuple[str, bool, torch.dtype]] = []

    # -- roots -------------------------------------------------------------------------------------------------------

    def of_batch(self, tensor: Tensor, of_all: bool = True) -> Tensor:
        """A tensor of the batch that the loader made. `of_all`: it is not of a single row, whatever its length."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return tensor
        by_row = of_all and tensor.dim() and tensor.shape[0] == self.sizes[0]
        shown: Any = self.follow(tensor, _BY_ROW if by_row else _OF_BATCH)
        shown.plain = tensor
        self.roots.append(_Source(shown.number, tensor, private.version(tensor), None))
        return shown  # type: ignore[no-any-return]

    def without_gradient(self, output: Tensor, axis: tuple[Any, ...]) -> Tensor:
        """An output that needs no gradient (classes, codes, masks): data of its rows, as a tensor of the batch is.

        A copy: what is written into it is not written into an attribute of the model, or what its backward pass reads.
        """
        by_row = output.dim() and output.shape[0] == self.sizes[axis[0]]
        own = output.clone()
        _mark(own)
        shown: Any = self.follow(own, ByRow(axis, 0, 1) if by_row else _LOOKED)
        shown.plain = own
        self.roots.append(_Source(shown.number, own, private.version(own), None))
        return shown  # type: ignore[no-any-return]

    def output(self, output: Tensor, axis: tuple[Any, ...]) -> Tensor:
        """An output of the model. What comes back to it goes through `_arrived`.

        Where all rows are one in memory it is a copy: that may be a parameter's, or an attribute's of the model.
        """
        if not output.stride(0) or output.shape[0] == 1:
            output = output.clone(memory_format=torch.contiguous_format)
        if not isinstance(output.grad_fn, BackwardCFunction):
            output = _Boundary.apply(output)  # type: ignore[no-untyped-call]
        private.mark_memory(output)
        node: Any = output.grad_fn
        if "of_outputs" not in vars(node):
            node.of_outputs = next(_ids)
            arrived = functools.partial(_arrived, weakref.ref(self), node.of_outputs)
            if "gate" in vars(node):  # a node of this package, which asks it first of all
                node.gate = arrived
            else:
                node.register_prehook(arrived)
            self.nodes[node.of_outputs] = axis[0]
            self._autocast.clear()
            for kind in {"cpu", output.device.type}:
                self._autocast.append((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)))
        watched: Any = self.follow(output, _BY_ROW if axis == (0,) else ByRow(axis, 0, 1))
        port = node.of_outputs, output.output_nr
        self.roots.append(_Source(watched.number, output.detach(), private.version(output), port))
        return watched  # type: ignore[no-any-return]

    def follow(self, tensor: Tensor, state: State, is_new: bool = False) -> Tensor:
        """Watch a tensor: as it is, if nobody else has it; by another object the graph has a node more."""
        watched: Any = tensor if is_new else tensor.as_subclass(_Watched)
        if is_new:
            watched.__class__ = _Watched
        watched.tape, watched.number, watched.plain = self, len(self.states), None
        self.states.append(state)
        self._alive.append(weakref.ref(watched))
        return watched  # type: ignore[no-any-return]

    def join(self, other: "_Tape") -> None:
        """Go on for another batch too."""
        offset, batches, operands = len(self.states), len(self.sizes), len(self.operands)

        def moved(tree: Any) -> Any:
            tree = pytree.tree_map_only(_Node, lambda n: _Node(n + offset), tree)
            return pytree.tree_map_only(_Operand, lambda n: _Operand(n + operands), tree)

        for state in other.states:
            if isinstance(state, (ByRow, OfRow, Picked)):
                state = state._replace(axis=(state.axis[0] + batches, *state.axis[1:]))
            self.states.append(state)
        self.sizes += other.sizes
        self.batches += other.batches
        self.roots += [_Source(r.number + offset, r.tensor, r.version, r.port) for r in other.roots]
        self.calls += [
            _Call(
                c.function, moved(c.args), moved(c.kwargs), [None if r is None else r + offset for r in c.results],
                c.with_grad, None if c.written is None else c.written + offset,
            )
            for c in other.calls
        ]  # fmt: skip
        self.operands += other.operands
        self.noted += other.noted
        self.foreign |= {i + operands for i in other.foreign}
        self.trusted += other.trusted
        self.nodes |= {node: axis + batches for node, axis in other.nodes.items()}
        self.given_on |= {n + offset for n in other.given_on}
        self.passes += [(axis[0] + batches, *axis[1:]) for axis in other.passes]
        self._alive += other._alive
        self.exposed = self.exposed or other.exposed
        self.aliased_before = min(self.aliased_before, other.aliased_before)
        self.of_numbers = self.of_numbers or other.of_numbers
        self.of_written, self.assumed = self.of_written or other.of_written, self.assumed or other.assumed
        self.given_without_rule |= other.given_without_rule
        self.alone |= {n + offset for n in other.alone}
        self.given_outside |= {i + operands for i in other.given_outside}
        self.followed_data = self.followed_data and other.followed_data
        other.into = self, offset
        other._drop()

    def close(self) -> None:
        """The batch's backward pass has run: let go of everything."""
        self.closed = True
        self._drop()

    def _drop(self) -> None:
        self.roots, self.calls, self.operands, self.noted, self.trusted, self._alive = [], [], [], [], [], []
        self.gradients, self.foreign = None, set()

    # -- functions ---------------------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, rule: Any = None) -> Any:
        """Run a function, and write down what it was and what its results are."""
        if private.changes_saved_tensors():
            raise ModelError(
                "a hook on saved tensors (torch.autograd.graph.saved_tensors_hooks, torch.utils.checkpoint around the "
                "loss) sees those of all examples, and what it gives back, or runs again, decides their gradients; "
                "leave the loss out of it, from model(x) to loss.backward(). checkpoint may stay inside of the model"
            )
        by_rules = rule is None
        writes, norm, special = _kind_of(func) if by_rules else _NO_KIND
        function = (special(self, func, args, kwargs) or func) if special is not None else func
        written_to: Any = _target(func, args) if writes else None
        own = written_to is None or (type(written_to) is _Watched and _place(written_to)[0] is self)
        targets: Any = ()
        if writes or norm or (kwargs and kwargs.get("out") is not None):
            targets = _targets(func, args, kwargs)
            _check_targets(targets)
            if any(type(one) is _Watched for one in pytree.tree_leaves(kwargs.get("out"))):
                raise ModelError(
                    "out= writes into a tensor of the batch, of which it is not followed whose rows it has then: take "
                    "what the function returns, x = torch.sub(x, mean), or write x.sub_(mean)"
                )
        before = None if own else written_to.detach().as_subclass(Tensor).clone()
        if not own:
            _keep_line(_escapes(self, written_to))
        key: list[Any] = [func]
        given: list[tuple[Tensor, State]] = []
        self.taken_out = False
        stored = self._encode(args, key, given), self._encode(kwargs, key, given) if kwargs else kwargs
        if self.taken_out or (func in _MAKES_NUMBERS and _makes_numbers(func, args, kwargs)):
            self.of_numbers, rule = True, _of_taken_out
        tensors = list(map(_FIRST, given))
        versions = private.versions(tensors)
        at: Any = tuple(key)
        try:
            known = self.watch.known.get(at) if rule is None else None
        except TypeError:  # an argument without a hash: read under the rules each time
            known, at = None, object()
        own_states = _of_recurrent(args, given) if func in _RECURRENT and rule is None and not kwargs else None
        if known is None and own_states is not None:
            known = own_states, None
        try:
            if known is not None:
                result = function(*args, **kwargs)
                states, written = known
            else:
                result, states, written = self._interpret(function, args, kwargs, given, at, rule)
        except RuntimeError as refusal:
            if "is a view and" in str(refusal):
                raise _writes_output() from refusal
            raise
        if not own:
            earlier = type(written_to) is _Watched
            self._adopt(written_to, _EARLIER if earlier else written)
            if type(written_to) is _Watched:
                given_to = (before, *stored[0][1:]), stored[1]
                self.calls.append(_Call(_on_copy(function), *given_to, [written_to.number], torch.is_grad_enabled()))
            return result
        if written_to is not None:
            self._write(written_to, written)
        if norm or targets or private.versions(tensors) != versions:
            for (tensor, _), version in zip(given, versions, strict=True):
                silent = any(map(is_, repeat(tensor), targets))  # running means have no versions
                if tensor is not written_to and (silent or private.version(tensor) != version):
                    self._also_written(tensor, states[0] if tensor is result else _NOT_FOLLOWED)
        if type(result) not in _NO_VALUES:  # a truth, a number, or a list that may be as long as a mask says
            by_value = not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result))
            if by_value or type(result) in (tuple, list):
                for tensor, _ in given:
                    _seen(tensor, by_value)
        is_new = type(result) is Tensor and by_rules and _makes_new(func) and not any(map(is_, repeat(result), tensors))
        shown, numbers = self._shown(result, states, tensors, is_new)
        if numbers or written_to is not None:
            number = None if written_to is None else written_to.number
            self.calls.append(_Call(function, *stored, numbers, torch.is_grad_enabled(), number))
        return shown

    def _shown(
        self, result: Any, states: list[State], given: Sequence[Tensor], is_new: bool
    ) -> tuple[Any, list[int | None]]:
        """The result, watched, and the numbers of its tensors. `given`: of what; `is_new`: nobody else has it."""
        if isinstance(result, Tensor):
            _mark(result, states[0], given)
            watched: Any = result if type(result) is _Watched else self.follow(result, states[0], is_new)
            return watched, [watched.number]
        leaves, structure = pytree.tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return result, []
        for leaf, state in zip(leaves, states, strict=True):
            _mark(leaf, state, given)
        shown = [
            leaf if type(leaf) is _Watched or not isinstance(leaf, Tensor) else self.follow(leaf, state)
            for leaf, state in zip(leaves, states, strict=True)
        ]
        return pytree.tree_unflatten(shown, structure), [x.number if type(x) is _Watched else None for x in shown]

    def _adopt(self, tensor: Any, state: State) -> None:
        """Numbers of the batch were written into a tensor that stood outside: watch it from here on, as it is."""
        private.mark_memory(tensor, private.WRITTEN)
        if type(tensor) in _FOLLOWED:
            self.take_in(tensor, state)

    def take_in(self, one: Any, state: State) -> None:
        """Watch a tensor that stood outside, as it is."""
        _become_watched(one)
        one.tape, one.number, one.plain = self, len(self.states), None
        self.states.append(state)
        self._alive.append(weakref.ref(one))

    def _also_written(self, tensor: Any, state: State) -> None:
        """What a function wrote that is not said to write: outputs of `out=`, running means, `inplace=True`."""
        own = type(tensor) is _Watched and _place(tensor)[0] is self
        if own:
            self._write(tensor, state)
        else:
            _keep_line(_escapes(self, tensor))
            self._adopt(tensor, _NOT_FOLLOWED)
        if not own or private.is_marked(tensor, what=_VIEWED):
            _check_targets([tensor])

    def _interpret(
        self, function: Any, args: Any, kwargs: Any, given: list[tuple[Tensor, State]], key: Any, rule: Any
    ) -> tuple[Any, list[State], State]:
        """Run the function under the rules; what they find is kept for calls of the same shapes and states."""
        inside = Interpreter()
        for tensor, state in given:
            inside.put(tensor, state)
        if rule is None:
            with inside:
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        leaves = pytree.tree_leaves(result)
        found = rule([state for _, state in given]) if rule is not None else None
        unknown = NoRule("a tensor that no function made") if any(s is not None for _, s in given) else None
        states = [(found or inside.state(t, unknown)) if isinstance(t, Tensor) else None for t in leaves]
        written = (found or inside.state(args[0])) if args and isinstance(args[0], Tensor) else None
        unseen = kwargs.get("out") is not None or function in _BACK or (function in _SPLITS and len(given) > 1)
        if (inside.looked and function not in _LOOKS) or unseen:
            states = [_after_a_look(s, t, inside.read) for s, t in zip(states, leaves, strict=True)]
            written = written if isinstance(written, Coupled) else NoRule("a look at numbers")
        if rule is None and not inside.exact:
            if len(self.watch.known) >= _KNOWN:
                self.watch.known.clear()
            self.watch.known[key] = states, written
        return result, states, written

    def _encode(self, value: Any, key: list[Any], given: list[tuple[Tensor, State]]) -> Any:
        """What stands for an argument; the key is all that rules may depend on."""
        kind = type(value)
        if kind is _Watched:
            tape, number = value.tape, value.number
            if tape is not None and tape.into is not None:
                tape, number = _place(value)
            state = self.states[number] if tape is self else _of_another(tape, number)
            key += (state, value.shape, value.dtype)
            given.append((value, state))
            if tape is self:
                return _Node(number)
            self.foreign.add(len(self.operands))
            private.mark_memory(value, private.VIEWED)
            private.shows_too(alias := _ordinary(value).detach())
            return self._operand(alias)
        if isinstance(value, Tensor):
            state = self._origin(value)
            key += (state, value.shape, value.dtype)
            given.append((value, state))
            return self._operand(value if kind is nn.Parameter or not value.requires_grad else value.detach())
        if kind in (tuple, list) or (kind not in _CONSTANTS and isinstance(value, (tuple, list))):
            key += (kind, len(value))
            made: Any = []
            for one in value:
                if type(one) is _Watched and one.tape is self:  # as most are; else the same
                    key += (state := self.states[one.number], one.shape, one.dtype)
                    given.append((one, state))
                    made.append(_Node(one.number))
                elif type(one) in _CONSTANTS:
                    key += (type(one), one)
                    made.append(one)
                else:
                    made.append(self._encode(one, key, given))
            return tuple(made) if isinstance(value, tuple) else made
        if isinstance(value, dict):
            key.append(tuple(value))
            made = {}
            for name, one in value.items():
                if type(one) in _CONSTANTS:
                    key += (type(one), one)
                    made[name] = one
                else:
                    made[name] = self._encode(one, key, given)
            return made
        if kind is _Float or kind is _Int:
            self.taken_out = True
            return value.plain()
        if kind is slice:
            ends = {type(value.start), type(value.stop), type(value.step)}
            self.taken_out = self.taken_out or not ends.isdisjoint({_Int, _Watched})
            key += (kind, *(x if type(x) in _CONSTANTS else object() for x in (value.start, value.stop, value.step)))
        elif kind is float or kind is complex:
            key.append(kind)  # no rule looks at it, and it may follow a schedule
        elif kind in _CONSTANTS:
            key += (kind, value)
        else:  # what it does may follow from anything, and a number that it stands for may change
            is_fixed = not callable(value) and not hasattr(kind, "__index__") and kind.__hash__ is not None
            key += (kind, value if is_fixed else object())
        return value

    def _operand(self, tensor: Tensor) -> _Operand:
        """What stands for a tensor that is not watched."""
        self.operands.append(tensor)
        self.noted.append(private.version(tensor))
        return _Operand(len(self.operands) - 1)

    def _origin(self, tensor: Tensor) -> State:
        """Where a tensor that is not watched comes from."""
        if private.is_wrapped(tensor):
            raise _transformed()
        if tensor.requires_grad and not tensor.is_leaf and _walk(tensor.grad_fn, self.trusted)[0]:
            return _NOT_FOLLOWED
        if self.watch.escaped or private.is_marked(tensor):
            self.of_written = True
            return _WRITTEN
        if self.followed_data or isinstance(tensor, nn.Parameter):
            return None
        size = self.sizes[0]
        if tensor.dim() and len(tensor) and len(tensor) % size == 0:
            self.assumed = True
            return ByRow((0,), 0, len(tensor) // size)
        return _UNKNOWN_ORIGIN

    def _write(self, written: Any, state: State) -> None:
        """A watched tensor was written in place: what shares its memory is known no longer, if it is not as before."""
        if private.is_marked(written, what=_VIEWED):
            _keep_line(_escapes(self, written))
            private.mark_memory(written, private.WRITTEN)
        number = _place(written)[1]
        if self.states[number] == state and keeps_memory(state):
            return
        start = written.untyped_storage().data_ptr()
        for reference in self._alive:
            other: Any = reference()
            place, other_number = (None, -1) if other is None else _place(other)
            if place is self and other is not written and other.untyped_storage().data_ptr() == start:
                self.states[other_number] = _WRITTEN
        self.states[number] = state if torch.is_grad_enabled() else _of_graph(written, self.states[number], state)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, args: Any, kwargs: Any) -> Any:
        """Prove the loss, or run it row by row, or refuse it; then go back."""
        gradient = args[0] if args else kwargs.get("gradient")
        if gradient is None and loss.numel() > 1:
            state = self.states[_place(loss)[1]]  # how many a mask chose is not public
            raise ModelError(
                f"the loss must be one number, and has "
                f"{f'shape {shape_text(loss, state)}' if isinstance(state, ByRow) else 'several'}: call "
                "loss.mean().backward(). A criterion with reduction='none', and a model that computes its own loss, "
                "give one for each example"
            )
        reached, own, leaves = _walk(loss.grad_fn, self.trusted)
        if not reached:  # the loss of a detached copy, perhaps
            _check_trains_nothing(self, leaves)
            return Tensor.backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]
        if own:
            raise _unseen()
        if leaves and any(type(leaf) is not _Watched and id(leaf) not in self.watch.parameters for leaf in leaves):
            raise ModelError(
                "the loss trains a tensor that the private model does not have: it would get a gradient without noise. "
                "Make it a parameter of the model, before make_private, or let it need no gradient"
            )
        kept = self._judge(loss, gradient)
        self.roots = list(itertools.filterfalse(attrgetter("port"), self.roots))  # outputs may go: logits are large
        self.allowed = True
        try:
            result = Tensor.backward(loss, *args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of torch, which names no tensor
            if isinstance(error, AnyorderError) or not private.tells_of_a_write(error):
                raise
            raise written_since() from None
        finally:
            self.allowed, self.gradients = False, None
        # the model may read, from a global say, what the loop wrote there; nobody knows what a branch chose
        assumed = self.assumed or bool(self.watch.escaped or LossWatch.aliased) or self.watch.was_seen
        self.watch.kept = min("promised" if assumed else kept, self.watch.kept or "proved", key=_KEPT.index)
        self.close()
        return result

    def _judge(self, loss: Any, gradient: Tensor | None) -> str:
        """How rows are kept apart."""
        if isinstance(gradient, Tensor) and gradient.shape != loss.shape:  # without the shapes: a mask may choose them
            raise ModelError(
                "the gradient that backward is given must have the loss's shape, one number for each of the loss: give "
                "torch.ones_like(loss), or multiply the loss with these numbers and call loss.sum().backward()"
            )
        number = _place(loss)[1]
        state = self.states[number]
        aliased = LossWatch.aliased != self.aliased_before
        since = set(filter(self._written_since, {*range(len(self.operands))} - self.foreign))
        lost = any(map(is_, self.states, repeat(_NOT_FOLLOWED)))
        calls, needed = self._needed(number) if since or self.watch.escaped or aliased or lost else ([], set[int]())
        if (
            any(map(is_, map(self.states.__getitem__, needed - {number}), repeat(_NOT_FOLLOWED)))
            or (self.watch.escaped and any(map(_reads_besides, calls)))
            or (aliased and any(isinstance(call.function, (_Again, _OfDistance)) for call in calls))
            or since & self.given_outside
            or (since and since.intersection(n for call in calls for n in _leaves(call, _Operand)))
        ):  # perhaps since then
            raise ModelError(
                f"the loss couples examples: it {_words(_WRITTEN)}. Write average = 0.9 * average + 0.1 * x.detach(); "
                "after a write into an array of NumPy, a parameter, or what torch.load gave, begin a new process"
            )
        alone = self.sizes == [1] and not (self.foreign or self.of_numbers or self.of_written or self.exposed)
        if alone and state is not _NOT_FOLLOWED:  # one row couples nothing
            return "proved"
        if gradient is not None:
            total: Any = self.call(torch.sum, (self.call(torch.mul, (loss, gradient), {}),), {})
            number, state = total.number, self.states[total.number]
        if isinstance(state, (Coupled, Picked)):
            why = _words(state) if isinstance(state, Coupled) else "is of what a mask chose"
            raise ModelError(f"the loss couples examples: it {why}; {_CURE}")
        if self.exposed and self.given_on:  # what lies between networks is not run again
            raise _unseen()
        if isinstance(state, (Total, ByRow, OfRow)) and not self.exposed:
            return "proved"  # each of its terms is of one row: see `rows`
        self.gradients = self._of_single_rows(number)
        return "mapped"

    def _written_since(self, operand: int) -> bool:
        """Whether numbers of a batch came into a tensor since it was read, of which its version does not tell."""
        tensor = self.operands[operand]
        unsaid = private.version(tensor) == self.noted[operand] and private.is_marked(tensor, what=(private.WRITTEN,))
        return unsaid or private.is_marked(tensor, what=(private.OF_A_BATCH,))

    def _of_single_rows(self, end: int) -> dict[tuple[int, int], Tensor]:
        """The gradients of the sum of single rows' losses, by output.

        A row's loss is that of a batch of the row alone; of as many copies of it as the batch has rows, where a call
        was given a number or a constant of as many rows (`loss.sum() / len(y)`): a function of one row either way.
        """
        calls, needed = self._needed(end)
        roots = [r for r in self.roots if r.number in needed]
        operands = {int(n) for c in calls for n in _leaves(c, _Operand)}
        axes = {unstacked(state.axis) for n in needed if isinstance(state := self.states[n], ByRow)}
        written = any(private.version(r.tensor) != r.version for r in roots) or not all(map(self._is_as_then, operands))
        if len(axes) != 1 or written or operands & self.foreign:
            raise _cannot_map("it is made of two batches, or of rows in another order, or was written in place")
        if any(r.port is not None and r.number in self.given_on for r in roots):
            raise _cannot_map("it uses what one network made, and what another made of that")
        size = len(roots[0].tensor)
        by_row = [
            i for i in sorted(operands)
            if self.operands[i].dim() and len(self.operands[i]) == size
            and not isinstance(self.operands[i], nn.Parameter)
        ]  # fmt: skip
        by_one = any(isinstance(self.states[n], OfRow) for c in calls for n in c.results if n is not None)
        copies = size if by_one or any(_counts_rows(c, size) for c in calls) else 1
        if by_row and self.followed_data:  # constants, one for each row, or of that shape by chance
            by_row, copies = [], size
        if any(t.dim() and len(t) > size and not len(t) % size for t in map(self.operands.__getitem__, operands)):
            copies = size  # one for each row of several views
        leaves = [r.tensor if r.port is None else r.tensor.detach().requires_grad_() for r in roots]

        def row(*rows: Tensor) -> Tensor:
            alone = [t.unsqueeze(0).expand(copies, *t.shape) for t in rows]
            values = {r.number: t for r, t in zip(roots, alone, strict=False)}
            self._run(calls, values, dict(zip(by_row, alone[len(roots) :], strict=True)), copies)
            return values[end].reshape(())

        outputs = [(r.port, t) for r, t in zip(roots, leaves, strict=True) if r.port is not None]
        try:
            with self._as_then():
                given = [*leaves, *(self.operands[i] for i in by_row)]
                total = vmap(row, randomness="different")(*given).sum()
                if self.watch.reduction == "mean" or copies > 1:
                    total = total / size
                found = torch.autograd.grad(total, [t for _, t in outputs], allow_unused=True)
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = type(error).__name__
        else:
            pairs = zip(outputs, found, strict=True)
            return {port: torch.zeros_like(t) if g is None else g for (port, t), g in pairs if port is not None}
        # Outside of the handler: a chained error would show the words of torch, with numbers of the batch in them.
        why = f"vmap cannot run it ({problem}{f' in {self._at}' if self._at else ''})"
        raise _cannot_map(why, _OF_FROZEN if self._has_weights else _CURE)

    def of_rows(self, watched: Tensor, number: int) -> Tensor | None:
        """A tensor that was computed of the batch, computed again of each row alone, in the batch's order:

            row i = ( what was done, with row i in the place of every row )[i]

        a function of row i and of public constants, and what was there where each row was a function of its own one.
        Draws that nobody holds are drawn again. None where that is not known, or vmap cannot run it.
        """
        size, calls, needed, given = self.sizes[0], [], {number}, dict[int, Tensor]()
        for call in reversed(self.calls):
            if needed.intersection(n for n in (*call.results, call.written) if n is not None):
                calls.append(call)
                for n in map(int, _leaves(call, _Node)):
                    if n not in given and (rows := self._rows_now(n)) is not None:
                        given[n] = rows
                    elif n not in given:
                        needed.add(n)
        operands = [int(n) for c in calls for n in _leaves(c, _Operand)]
        if len(self.sizes) > 1 or not size or not calls or self.foreign.intersection(operands):
            return None
        if not all(map(self._is_as_then, operands)) or (self.watch.escaped and any(map(_reads_besides, calls))):
            return None
        constants = [self.operands[n] for n in operands] + [t for n, t in given.items() if self.states[n] is None]
        placed = any(t.dim() and len(t) == size for t in constants)
        by_one = any(isinstance(self.states[n], OfRow) for c in calls for n in c.results if n is not None)
        copies = size if placed or by_one or any(_counts_rows(c, size) for c in calls) else 1
        by_row = [n for n in given if self.states[n] is not None]
        calls = calls[::-1]

        def row(place: Tensor, *rows: Tensor) -> Tensor:
            alone = [t.unsqueeze(0).expand(copies, *t.shape) for t in rows]
            values = given | dict(zip(by_row, alone, strict=True))
            self._run(calls, values, {}, copies)
            if len(values[number]) != copies:
                raise ValueError("other rows")
            return values[number].index_select(0, place.reshape(1) if copies > 1 else place.new_zeros(1)).squeeze(0)

        try:
            with torch.autocast(watched.device.type, enabled=False):
                chunk = None if copies == 1 else max(1, _COPIES // copies)
                places = torch.arange(size, device=watched.device)
                one_by_one = vmap(row, randomness="different", chunk_size=chunk)
                made: Tensor = one_by_one(places, *map(given.__getitem__, by_row)).detach()
        except (AnyorderError, torch.OutOfMemoryError):
            raise
        except Exception:
            return None
        return made if (made.shape, made.dtype) == (watched.shape, watched.dtype) else None

    def _is_as_then(self, operand: int) -> bool:
        """Whether a tensor that is not watched holds what it held when it was read: no number of the batch since."""
        tensor = self.operands[operand]
        return type(tensor) is not _Watched and private.version(tensor) == self.noted[operand]

    def _rows_now(self, number: int) -> Tensor | None:
        """The rows that a number stands for, each known to be of its row alone, or a constant, if anybody has them."""
        state = self.states[number]
        if not (state is None or state == _BY_ROW) or any(call.written == number for call in self.calls):
            return None
        root = next((r for r in self.roots if r.number == number), None)
        tensor = self._alive[number]() if root is None else root.tensor
        if tensor is None or (root is not None and private.version(root.tensor) != root.version):
            return None
        if root is None and _place(tensor) != (self, number):  # it was given other memory since
            return None
        return _ordinary(tensor).detach()

    def _run(self, calls: list[_Call], values: dict[int, Tensor], operands: dict[int, Tensor], copies: int) -> None:
        """Do again what was written down, with `copies` rows; `values` gets what it makes."""
        for call in calls:
            args, kwargs = self._replaced((call.args, call.kwargs), values, operands)
            self._at = getattr(call.function, "__name__", "")
            self._has_weights = any(isinstance(self.operands[n], nn.Parameter) for n in _leaves(call, _Operand))
            with torch.set_grad_enabled(call.with_grad):
                function = call.function.of(copies) if isinstance(call.function, _Mean) else call.function
                made = pytree.tree_leaves(function(*args, **kwargs))
            if call.results:
                values |= {n: t for n, t in zip(call.results, made, strict=True) if n is not None}

    def _needed(self, end: int) -> tuple[list[_Call], set[int]]:
        """The calls that the loss was made by, in order."""
        needed, calls = {end}, []
        for call in reversed(self.calls):
            if needed.intersection(n for n in (*call.results, call.written) if n is not None):
                calls.append(call)
                needed |= {int(n) for n in _leaves(call, _Node)}
        return calls[::-1], needed

    def _replaced(self, tree: Any, values: dict[int, Tensor], operands: dict[int, Tensor]) -> Any:
        def of(leaf: Any) -> Any:
            if type(leaf) is _Node:
                return values[leaf]
            return operands.get(leaf, self.operands[leaf]) if type(leaf) is _Operand else leaf

        return pytree.tree_map(of, tree)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Gradients on, autocast as it was, and the generators of torch as they are after it."""
        devices = sorted({r.tensor.device.index for r in self.roots if r.tensor.device.type == "cuda"})
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices))
            for device_type, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=False))
            yield


def _after_a_look(state: State, result: Any, read: set[State]) -> State:
    """A row's result by numbers of the same row (`out[i, y[i]]`) is of that row; its shape may follow from them."""
    if isinstance(state, OfRow) and read - {None} == {state}:
        return state._replace(sized=not result.dim())
    return state if isinstance(state, Coupled) else NoRule("a look at numbers")


_RECURRENT = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}


def _of_recurrent(args: Any, given: list[tuple[Tensor, State]]) -> list[State] | None:
    """The states of output and last states of a frozen recurrent layer on padded sequences; None where not known.

    (input, begun, weights, has_biases, layers, dropout, train, bidirectional, batch_first): each sequence runs by
    itself, whatever kernel a device has for it, from states (layers, rows, hidden) of its own or public ones. In the
    calls for packed sequences the lengths stand second and the weights later.
    """
    if len(args) != 9 or type(args[3]) is not bool or not isinstance(args[2], (list, tuple)):
        return None
    (_, rows), *others = given
    count = 1 if isinstance(args[1], Tensor) else len(args[1])
    if not isinstance(rows, ByRow) or rows.dim != (0 if args[8] else 1):
        return None
    last = rows._replace(dim=1)
    begun, weights = others[:count], others[count:]
    if any(s not in (None, last) for _, s in begun) or any(s is not None for _, s in weights):
        return None
    return [rows, *[last] * count]


_CONSTANTS = dict.fromkeys((int, bool, str, type(None)))  # a dict: the compiler of torch 2.8 cannot read a set
_KEPT = ["promised", "mapped", "proved"]
_COPIES = 1024
"""Rows that stand in memory at once where each row takes the place of all."""
_KNOWN = 4096
"""Calls whose states are kept; then it is begun again."""


def _leaves(call: _Call, kind: type) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if type(leaf) is kind]


def _reads_besides(call: _Call) -> bool:
    """Whether a call reads tensors that are not watched, or may."""
    return isinstance(call.function, (_Again, _OfDistance)) or bool(_leaves(call, _Operand))


def _counts_rows(call: _Call, rows: int) -> bool:
    """Whether a call was given a number that may come of the number of rows."""
    numbers = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if type(x) in (int, float) and x and x == x]
    return any((abs(y) >= rows and y % rows == 0) for x in numbers for y in (x, 1 / x))


def _unseen() -> ModelError:
    return ModelError(
        "the loss couples examples, or may: its gradients come to the private model's outputs by a way that is not "
        "followed (an autograd.Function of one's own, torch.autograd.backward, a scripted function, or gradients given "
        f"by hand). Call loss.backward() on a loss made of torch's functions; {_CURE}"
    )


def _cannot_map(why: str, cure: str = _CURE) -> ModelError:
    return ModelError(
        "the loss couples examples, or may: it is not made of operations that are known to keep rows apart, and cannot "
        f"be run row by row, since {why}, so that one example may move the gradients of others; {cure}"
    )


_ids = itertools.count()


def _needs_gradients() -> ModelError:
    return ModelError(
        "the tensors given to the model must not require gradients: what came before the model would get a gradient "
        "that is not private. Detach them, or put those layers into the model. A generator's may, unless numbers of a "
        "batch were written into an alias in this process (t.data.add_(loss)); networks of one make_private may be "
        "given one another's outputs, and what is made of them row by row. For a gradient penalty take "
        "torch.func.grad inside of forward; for adversarial examples torch.autograd.grad of model.module(x)"
    )


class _Released(torch.autograd.Function):
    """The private model on tensors of no batch. A gradient goes to them from its outputs, and from nothing else of it:
    the model ran on `cut`, copies of them without their graph. `before` are they themselves.
    """

    @staticmethod
    def forward(ctx: Any, inside: list[Tensor], cut: list[Tensor], *before: Tensor) -> tuple[Tensor, ...]:
        ctx.of_released, ctx.inside, ctx.cut = True, inside, cut
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in inside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not _free:
            raise _not_free()
        came = [(output, g) for output, g in zip(ctx.inside, gradients, strict=True) if g is not None]
        outputs, given = [output for output, _ in came], [g for _, g in came]
        _passed.append(ctx)
        try:
            found = torch.autograd.grad(outputs, ctx.cut, given, retain_graph=True, allow_unused=True)
        finally:
            _passed.pop()
        return None, None, *found


_free: list[Any] = []
"""The backward pass of a generator's step that runs now: in it no number of a batch is touched."""
_passed: list[Any] = []
"""The nodes of `_Released` of which the gradients are taken now."""


def _not_free() -> ModelError:
    return ModelError(
        "a gradient goes to a generator through the private model by a way that is not followed: features that a hook "
        "or an attribute kept, gradients given by hand, an autograd.Function of one's own, or a tensor of a batch in "
        "the backward pass. It would train on private data what no noise covers. Call loss.backward() on a loss made "
        "of the private model's outputs by torch's functions, without numbers of a batch"
    )


def _check_passed(gradient: Tensor) -> None:
    """Raises: ModelError for a gradient of a loss that has something of the model which is no output of it."""
    if not _passed:
        raise _not_free()


def released(model: Callable[..., Any], given: Any, otherwise: Callable[[Any], Any]) -> Any:
    """The outputs of `model(*args, **kwargs)`, given = (args, kwargs), of which a loss trains what came before.

    Args:
        otherwise: what becomes of outputs without gradients.
    Raises: ModelError, in the backward pass, for a loss that has numbers of a batch, or comes by another way.
    """
    before: list[Tensor] = []
    cut: list[Tensor] = []

    def alone(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        before.append(_ordinary(leaf))
        cut.append(before[-1].detach().requires_grad_())
        cut[-1].register_hook(_check_passed)  # type: ignore[no-untyped-call]
        return cut[-1].clone()  # which the model may write into

    args, kwargs = _changed(given, alone)
    leaves, structure = pytree.tree_flatten(model(*args, **kwargs))
    inside = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    made = iter(map(_as_generated, _Released.apply(inside, cut, *before)) if inside else ())  # type: ignore[no-untyped-call]
    outputs = [next(made) if isinstance(x, Tensor) and x.requires_grad else otherwise(x) for x in leaves]
    return pytree.tree_unflatten(outputs, structure)


def _as_generated(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor and tensor.requires_grad:
        tensor.__class__ = _Generated
    return tensor


class _Generated(Tensor):
    """An output of `released`, or what was computed of it: a loss of it goes back by `backward` or `grad` alone."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @staticmethod
    @private.never_compiled
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, (_Watched, _TakenOut)) for kind in types):
            return NotImplemented
        if func is not Tensor.backward and func not in _BACK:
            with private.WithoutSubclasses():
                return pytree.tree_map_only(Tensor, _as_generated, func(*args, **kwargs))
        first, *rest = args or (kwargs.pop("outputs"),)
        place, name = (0, "gradient") if func is Tensor.backward else (1, "grad_outputs")
        given = rest[place] if len(rest) > place else kwargs.get(name)
        others = pytree.tree_leaves((rest, kwargs))
        written = LossWatch.escaped or LossWatch.aliased  # what the graph saved, perhaps
        if given is not None or written or any(type(one) is _Generated for one in others):
            raise _not_free()
        _free.append(func)
        try:  # not without subclasses: what hooks do with numbers of a batch is to be seen
            return func(pytree.tree_map_only(_Generated, _ordinary, first), *rest, **kwargs)
        except RuntimeError as error:  # of torch, which names no tensor
            if isinstance(error, AnyorderError) or not private.tells_of_a_write(error):
                raise
            raise written_since() from None
        finally:
            _free.pop()


def _has_hooks(tensor: Any) -> bool:
    return bool(getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _check_trains_nothing(tape: "_Tape | None", leaves: list[Tensor]) -> None:
    """Raises: ModelError where a loss of a batch, of no private output, trains tensors that are not of the batch.

    Gradients that come to the private model's own parameters past it are refused by the step.
    """
    if tape is not None and not any(tape.sizes):  # a batch of nobody, under secret sampling
        return
    own = {} if tape is None else tape.watch.parameters
    if any(type(leaf) is not _Watched and id(leaf) not in own for leaf in leaves):
        raise _trains_others()


def _hooked() -> ModelError:
    return ModelError(
        "a hook on an output of the private model, or on what gets a gradient of it, sees the gradients of all "
        f"examples, and couples them; {_CURE}"
    )


def _as_gradients(what: str) -> ModelError:
    return ModelError(
        f"a backward pass of tensors that are not of the batch {what}: what it makes of them is not followed, so that "
        "one example may move the gradients of others, and other tensors learn from private data without noise. "
        "Multiply with these numbers before, torch.autograd.grad((output * numbers).sum(), inputs)"
    )


def _trains_others() -> ModelError:
    return ModelError(
        "what was computed of the batch, and not of outputs of the private model alone, trains other tensors, those of "
        "another network perhaps: they would learn from private data without noise. Give make_private every network "
        "that learns from the batch. A network that is not to be private learns from the loader that make_private was "
        "given"
    )


def _other_rows(what: str) -> ModelError:
    return ModelError(
        f"{what} (negatives that are other examples of the batch, perhaps): a unit's gradient would be of another "
        "unit's data too. Pair what belongs to one example: its own views, or what is public"
    )


def _writes_output() -> ModelError:
    return ModelError(
        "an output of the private model is written in place: make a new tensor, out = out / 2 in place of out /= 2, or "
        "F.relu(out) without inplace=True; or take out = model(x).clone(), which may be written"
    )


class _Boundary(torch.autograd.Function):
    """Where the loss begins, for outputs that no autograd function of the package made."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _arrived(of: "weakref.ref[_Tape]", node: int, gradients: tuple[Tensor | None, ...]) -> Any:
    """Gradients came to a node of the model's outputs: only those of a loss that was judged go on."""
    tape = of()
    while tape is not None and tape.into is not None:
        tape = tape.into[0]
    if tape is None or not (tape.allowed or (tape.closed and tape.nodes[node] in tape.used)):
        raise _unseen()
    tape.used.add(tape.nodes[node])  # a second backward pass of the batch is refused by the engine
    if tape.gradients is None:
        return None
    if any(g is not None and (node, i) not in tape.gradients for i, g in enumerate(gradients)):
        raise _unseen()  # of an output that what runs again does not read
    return tuple(tape.gradients.get((node, i)) for i in range(len(gradients)))


def _walk(start: Any, trusted: Sequence[Any]) -> tuple[bool, bool, list[Tensor]]:
    """Whether a graph reaches outputs of the model, whether a function with a backward of its own lies before, and the
    leaves to which gradients come by other ways.
    """
    seen: set[Any] = {None}
    nodes, reached, own, leaves = [start], False, False, []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and "of_released" in vars(node):
            raise ModelError(
                "the loss joins numbers of the batch with outputs of the private model on tensors that require "
                "gradients, a generator's perhaps: it would train on private data what no noise covers. In the private "
                "model's own step detach them, model(fake.detach()); leave the batch out of the generator's step"
            )
        if node in trusted or (isinstance(node, BackwardCFunction) and "of_outputs" in vars(node)):
            reached = True
            continue
        if isinstance(node, BackwardCFunction) and "of_evaluation" in vars(node):  # which no gradient passes
            continue
        own = own or isinstance(node, BackwardCFunction)
        leaf: Any = getattr(node, "variable", None)
        if "BackwardHook" in type(node).__name__ or (leaf is not None and _has_hooks(leaf)):
            raise _hooked()
        if leaf is not None:
            leaves.append(leaf)
        nodes += map(_FIRST, node.next_functions)
    return reached, own, leaves


# -- functions that are given another form ---------------------------------------------------------------------------


def _of_labels(tape: _Tape, func: Any, args: Any, kwargs: Any) -> "Callable[..., Tensor] | None":
    """A mean over labels, as one over rows: see the head of this file. A label of no class never counts."""
    given = {"ignore_index": -100, "weight": None, **dict(zip(_LABEL_NAMES, args, strict=False)), **kwargs}
    labels = given["target"]
    if labels.is_floating_point():  # probabilities: a mean over all rows
        return None
    if not _is_mean(given):
        return functools.partial(_of_classes, func)
    watched: Any = given["input"] if type(given["input"]) is _Watched else labels
    state = tape.states[_place(watched)[1]] if type(watched) is _Watched else None
    if isinstance(state, OfRow):  # with other rows, or those of a batch, the rules refuse it
        own = _Mean(func, labels.numel(), 1).__call__ if given["weight"] is None else None
        return own or functools.partial(_of_classes, func)
    if given["weight"] is not None:
        raise _weighted(func)
    if not isinstance(state, ByRow) or state.dim != 0 or len(state.axis) > 1:
        return None
    size = tape.sizes[state.axis[0]]
    if not size or not labels.numel() or labels.numel() % size:
        return None
    return _Mean(func, labels.numel() // size, size)


def _of_classes(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The function, where a label that is no class does not count: an error would tell of it, and name it."""
    given = {**dict(zip(_LABEL_NAMES, args, strict=False)), **kwargs}
    given["target"] = _counted(given)
    return func(**given)  # type: ignore[no-any-return]


def _counted(given: dict[str, Any]) -> Tensor:
    """The labels, with `ignore_index` in the place of those that are no class."""
    labels: Tensor = given["target"].long()
    classes = given["input"].shape[1 if given["input"].dim() > 1 else 0]
    return labels.masked_fill(labels.clamp(0, classes - 1) != labels, given.get("ignore_index", -100))


class _Mean:
    """The mean over rows of a row's mean over those of its labels that count; 0 for a row without any."""

    def __init__(self, func: Any, labels: int, rows: int) -> None:
        self._func, self._labels, self._rows = func, labels, rows

    def of(self, rows: int) -> "_Mean":
        """The same of another number of rows."""
        return _Mean(self._func, self._labels, rows)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = {**dict(zip(_LABEL_NAMES, args, strict=False)), **kwargs, "size_average": None, "reduce": None}
        given["target"] = _counted(given)
        if self._labels == 1:
            return self._func(**{**given, "reduction": "sum"}) / self._rows  # type: ignore[no-any-return]
        terms = self._func(**{**given, "reduction": "none"}).reshape(self._rows, -1).sum(1)
        counted = (given["target"] != given.get("ignore_index", -100)).reshape(self._rows, -1).sum(1)
        return (terms / counted.clamp(min=1)).sum() / self._rows  # type: ignore[no-any-return]


def _is_mean(given: dict[str, Any]) -> bool:
    legacy = given.get("size_average"), given.get("reduce")
    if legacy != (None, None):
        return False not in legacy
    return bool(given.get("reduction", "mean") == "mean")


def _of_weights(tape: _Tape, func: Any, args: Any, kwargs: Any) -> None:
    """A mean by weights of single numbers divides by the weights of all rows; a column meets every row."""
    names = ("input", "target", "size_average", "reduce", "reduction")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    shapes, size = {tuple(given["input"].shape), tuple(given["target"].shape)}, tape.sizes[0]
    if size > 1 and shapes == {(size, 1), (size,)}:
        raise ModelError(
            f"the loss joins each example's output with the numbers of all others: {func.__name__} was given the "
            "shapes (B, 1) and (B,), which broadcast to (B, B), so that one example moves the "
            "gradients of others; give both the same shape, for example output.squeeze(1) or target.unsqueeze(1)"
        )
    given_to = [tape.states[_place(t)[1]] for t in given.values() if type(t) is _Watched]
    if given.get("weight") is not None and _is_mean(given) and not all(isinstance(s, OfRow) for s in given_to):
        raise _weighted(func)


def _of_columns(tape: _Tape, func: Any, args: Any, kwargs: Any) -> None:
    """As many columns as the largest label of the batch says are no one's own."""
    if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        raise ModelError(
            "one_hot was not told the number of classes, and makes as many columns as the largest label of the batch "
            "says, so that one example may move the gradients of others: state it, F.one_hot(labels, num_classes=..)"
        )


def _of_probabilities(tape: _Tape, func: Any, args: Any, kwargs: Any) -> "Callable[..., Tensor] | None":
    """The function, where an output that is no probability, NaN say, adds zero: an error would tell of it."""
    given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
    legacy = len(args) > 3 or given.get("size_average") is not None or given.get("reduce") is not None
    return None if legacy or given["input"].shape != given["target"].shape else functools.partial(_probable, func)


def _probable(
    func: Any, input: Tensor, target: Tensor, weight: Any = None, reduction: str = "mean", **legacy: None
) -> Tensor:  # named as torch names them
    probable = torch.where((input >= 0) & (input <= 1), input, 0.5)
    return func(probable, target, weight, reduction=reduction)  # type: ignore[no-any-return]


class _OfDistance:
    """The function, whose distance is given rows, and nothing else of a batch."""

    def __init__(self, func: Any) -> None:
        self._func = func

    def __call__(self, *args: Any, distance_function: Any, **kwargs: Any) -> Any:
        def distance(*rows: Tensor) -> Any:
            return _Again(distance_function, {})(*unwatched(rows))

        return self._func(*args, distance_function=distance, **kwargs)


def _of_distance(tape: _Tape, func: Any, args: Any, kwargs: Any) -> _OfDistance | None:
    return None if kwargs.get("distance_function") is None else _OfDistance(func)


def _weighted(func: Any) -> ModelError:
    return ModelError(
        f"{func.__name__} with weight= and reduction='mean' divides by the weights of the whole batch, so that one "
        "example's label moves the gradients of others; take reduction='none' and the mean over all examples: "
        f"{func.__name__}(.., weight=weight, reduction='none').mean()"
    )


def _of_python(tape: _Tape, func: Any, args: Any, kwargs: Any) -> None:
    """A Python function is given numbers, and one for each: of which rows it made what it puts there, nobody knows."""
    if func is not Tensor.apply_:
        raise ModelError(
            f"{func.__name__} gives numbers of the batch to a Python function, and what it makes of them is not "
            "followed, so that one example may move the gradients of others; take torch's functions, torch.where say"
        )
    tape.watch.was_seen = True


def _of_gradients(tape: _Tape, func: Any, args: Any, kwargs: Any) -> None:
    """The loop wants gradients of the batch: the model is given, and refuses, this tensor, and not the loader's own."""
    if type(args[0]) is _Watched:
        args[0].plain = None


_LABEL_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")


def _of_product(tape: _Tape, func: Any, args: Any, kwargs: Any) -> Callable[..., Tensor]:
    return product


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.prod: _of_product, Tensor.prod: _of_product,
    F.cross_entropy: _of_labels, F.nll_loss: _of_labels,
    F.binary_cross_entropy: _of_probabilities, F.one_hot: _of_columns,
    F.triplet_margin_with_distance_loss: _of_distance,
    Tensor.requires_grad_: _of_gradients, getattr(Tensor.requires_grad, "__set__", None): _of_gradients,
    Tensor.map_: _of_python, Tensor.map2_: _of_python, Tensor.apply_: _of_python,
    F.mse_loss: _of_weights, F.l1_loss: _of_weights, F.huber_loss: _of_weights, F.smooth_l1_loss: _of_weights,
}  # fmt: skip
_LOOKS = (F.gaussian_nll_loss, F.one_hot)
"""Functions that look at numbers only to refuse what is out of their range."""


@functools.cache
def _kind_of(func: Any) -> tuple[bool, bool, Any]:
    """Whether a function writes its first argument, may write others, and what gives it another form."""
    name = getattr(func, "__name__", "")
    unsaid = "norm" in name or "fake_quant" in name or name == "__set__"
    return _writes(func), unsaid or bool(private.written_by(func)), _SPECIAL.get(func)


_NO_KIND = False, False, None


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether a result that is none of the function's arguments is an object that nobody else has."""
    of_torch = type(func) is type(Tensor.sum) or type(func) is type(torch.sum) or func in _SPECIAL
    return of_torch and getattr(func, "__name__", "") not in ("__get__", "apply", "getattr")


_BACK = (torch.autograd.grad,)
"""Functions that read what autograd saved, which no rule has seen."""
_SPLITS = (torch.tensor_split, Tensor.tensor_split)
"""Functions that read where to split off the memory of a tensor, where no rule sees it."""


@functools.cache
def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "").partition(".")[0]  # torch.ops.aten.copy_.default is "copy_.default"
    if name.startswith("__"):
        others = ("__int__", "__index__", "__invert__", "__iter__")
        return name == "__setitem__" or (name.startswith("__i") and name not in others)
    return name.endswith("_")


_MAKES_NUMBERS = {Tensor.__getitem__, Tensor.__setitem__, Tensor.new_tensor}


def _makes_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch makes Python numbers of tensors of a batch: in lists of an index (`x[:, [n]]`), or of data."""
    parts: Any = args[1:], kwargs
    if func is not Tensor.new_tensor:
        parts = [p for p in (args[1] if type(args[1]) is tuple else args[1:2]) if isinstance(p, (list, tuple))]
    return any(issubclass(type(t), (_Watched, _TakenOut)) for t in pytree.tree_leaves(parts))


def _target(func: Any, args: Any) -> Tensor:
    """The tensor that a function writes into."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    raise ModelError(
        f"{func.__name__} writes numbers of the batch into a list of tensors, or into one that is named by a keyword, "
        "which is not followed; write into one tensor at a time, given as the first argument"
    )


def _targets(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors, not watched, into which a function writes, in lists too: its first argument, `out=`, running means,
    of which no version tells, and what the schema of an operator says.
    """
    name = getattr(func, "__name__", "")
    found = [*args[:1]] if _writes(func) or name == "__set__" else []
    if kwargs.get("out") is not None:
        found.append(kwargs["out"])
    for place, argument in private.written_by(func):
        found += [args[place]] if place < len(args) else [kwargs.get(argument)]
    if name == "fused_moving_avg_obs_fake_quant":
        found += [*args[3:7], *map(kwargs.get, ("running_min", "running_max", "scale", "zero_point"))]
    trains = "_stats" in name or any(value is True for value in (*args, *kwargs.values()))
    if func is F.instance_norm or (func is F.batch_norm and trains):
        found += [*args[1:3], *map(kwargs.get, ("running_mean", "running_var"))]
    elif "norm" in name and trains:
        found += [one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor) and one.dim() == 1]
    tensors = [one for one in pytree.tree_leaves(found) if isinstance(one, Tensor)]
    return [one for one in tensors if type(one) is not _Watched or private.is_marked(one, what=_VIEWED)]


def _on_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that writes its first argument, as one that returns what it would write."""

    def on_copy(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        written = first.clone()
        function(written, *args, **kwargs)
        return written

    return on_copy


# -- the tensors -----------------------------------------------------------------------------------------------------


class _Watched(Tensor):
    """A tensor of a batch, an output of the private model, or what was computed from them."""

    tape: _Tape | None = None
    number: int = -1
    plain: Tensor | None = None

    def __format__(self, spec: str) -> str:
        return format(_ordinary(self), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_ordinary(self))

    def __copy__(self) -> Tensor:
        return self.view_as(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = copy.deepcopy(_ordinary(self))  # torch refuses results of functions that need gradients
        tape = _place(self)[0]
        return _as_earlier(tape, copied) if tape is None or tape.closed else self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def as_subclass(self, cls: Any) -> Any:  # of which torch tells nobody
        """Watched as before: an ordinary tensor that shared the memory would be taken for a constant."""
        if cls not in (Tensor, _Watched):
            raise ModelError(
                f"a tensor of the batch was made a {cls.__name__}, which is not followed, so that one example may move "
                "the gradients of others; make it one in the data set, or inside of the model's forward"
            )
        return self.view_as(self)

    @staticmethod
    @private.never_compiled
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args and "tensor" in kwargs:  # as `nn.init` says it
            args = (kwargs.pop("tensor"),)
        if _free:
            raise _not_free()
        if private.here.in_pass:  # where no mode sees it: in an autograd.Function, or an operator of the model's own
            check_own((_Watched,), ())
        with private.WithoutSubclasses():
            if _is_ordinary(func) and not _given_alone and not _elsewhere:  # as most are
                tape = _tape_of(args, kwargs)
                if tape is None or tape.closed:
                    return _of_earlier(tape, func, args, kwargs)
                return tape.call(func, args, kwargs)
            if func in _TYPES and len(args) == 2 and type(args[0]) is not _Watched and type(args[1]) is _Watched:
                return args[0].to(args[1].device, args[1].dtype, **kwargs)  # which is read of it, as below
            if func in _PUBLIC or (func is Tensor.type and len(args) + len(kwargs) == 1):
                return func(*args, **kwargs)
            if func in _READS:
                _seen(args[0] if args else kwargs["input"], func in _VALUES)
                return func(*args, **kwargs)
            if func in _TAKES:
                if (tape := _place(args[0])[0]) is not None:  # else of a number, as is what is taken out of it
                    _seen(args[0], False)
                value = func(*args, **kwargs)
                return value if tape is not None and tape.closed and not tape.is_shown else _taken_out(value)
            if _given_alone:
                raise ModelError(
                    "a function that is given one example at a time, or rows (by ExampleLoss, torch.vmap, "
                    "distance_function=), reads tensors of the batch that it was not given: they are those of all "
                    "examples, which would move the gradients of others. Give them to it as further arguments"
                )
            if _elsewhere and private.backward_pass() >= 0:  # in this thread
                raise _as_gradients("has a hook, or a function of one's own, that reads numbers of the batch")
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                # no version tells what is written there: an alias of which it does
                func = Tensor.detach
            if func in _BACK:
                for output in pytree.tree_leaves(args[0] if args else kwargs["outputs"]):
                    _walk(output.grad_fn, ())  # which refuses those of a generator
                for one in pytree.tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"]):
                    if _has_hooks(one):
                        raise _hooked()
            if func in _HOOKS:
                raise _hooked()
            name = getattr(func, "__name__", "")
            if name == "__set__" and isinstance(args[1], Tensor):  # backward would add to it, and tell nobody
                raise ModelError("the gradient of a tensor of the batch is made by backward(), and not put in place")
            tape = _tape_of(args, kwargs)
            if tape is None or tape.closed:
                return _of_earlier(tape, func, args, kwargs)
            if func is Tensor.backward:
                return tape.backward(args[0], args[1:], kwargs)
            if func is torch.autograd.backward:
                loss, *rest = args or (kwargs.pop("tensors"),)
                one = loss[0] if isinstance(loss, (tuple, list)) and len(loss) == 1 else loss
                if type(one) is not _Watched or rest or kwargs.get("grad_tensors") is not None:
                    raise _unseen()
                return tape.backward(one, (), {k: v for k, v in kwargs.items() if v is not None})
            if func is Tensor.__iter__:
                return iter(tape.call(torch.unbind, (args[0], 0), {}))
            if name == "__get__":
                result = func(*args, **kwargs)
                if not isinstance(result, Tensor):
                    _seen(args[0], False)
                    tape.exposed = tape.exposed or isinstance(result, torch.autograd.graph.Node)
                    return result
            return tape.call(func, args, kwargs)


class _Asking(TorchFunctionMode):
    """Asks of what torch tells no tensor: those of a batch that are taken for Python values (`torch.full(.., t)`,
    `torch.tensor(t)`, `alpha=t`), and numbers of a batch (`table[n]`). It is below all modes, and on in the loop alone.
    """

    @private.never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) == 1 and _Watched in types and private.asks_subclasses():  # as in most losses
            return _Watched.__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        if not (_holds(args) or (kwargs and _holds(kwargs.values()))):
            return func(*args, **kwargs)
        if _Watched in types or func in _TOLD or not private.asks_subclasses():
            return func(*args, **kwargs)
        args = tuple(list(one) if isinstance(one, (deque, UserList)) else one for one in args)
        place, named = _CONVERTS.get(func, (len(args), ""))
        copied = args[place] if place < len(args) else kwargs.get(named)
        if type(copied) is _Watched:  # of which no operation tells
            made = copied.detach() if func is not torch.as_tensor else copied
            made = made.clone() if func not in (torch.as_tensor, torch.asarray) else made  # which show its memory
            kind = {"dtype": args[0].dtype, "device": args[0].device} if place else {"dtype": copied.dtype}
            given = {name: kwargs[name] for name in ("dtype", "device", "copy") if kwargs.get(name) is not None}
            made = made.to(*args[place + 1 :], **kind | given)
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if not hasattr(func, "__code__"):  # what Python does with them is asked in its turn
            args, kwargs = pytree.tree_map(_number_of, (args, kwargs))
        return _Watched.__torch_function__(func, types, args, kwargs)


def _number_of(leaf: Any) -> Any:
    return leaf.item() if type(leaf) is _Watched and not leaf.dim() else leaf


_DATA = (0, "data")
_CONVERTS = {torch.tensor: _DATA, torch.as_tensor: _DATA, torch.asarray: (0, "obj"), Tensor.new_tensor: (1, "data")}
"""What makes a tensor of its argument in this place, of this name."""
ASKED = _Asking()


def _holds(values: Iterable[Any]) -> bool:
    """Whether a tensor or number of a batch is among them."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN_KINDS:
            continue
        if kind is _Watched or kind is _Float or kind is _Int:
            return True
        if kind is slice:
            value = value.start, value.stop, value.step
        if isinstance(value, (tuple, list, deque, UserList)) and _holds(value):
            return True
    return False


_PLAIN_KINDS = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device})


@functools.cache
def _is_ordinary(func: Any) -> bool:
    """Whether a function goes to `_Tape.call` in any case."""
    others = _READS | _TAKES | _TYPES | _HOOKS | _BACKWARD | {*_BACK, Tensor.type, Tensor.__iter__}
    return func not in others and getattr(func, "__name__", "") not in ("__set__", "__get__")


_HOOKS = {Tensor.register_hook}
_BACKWARD = {Tensor.backward, torch.autograd.backward}
_TOLD = {*_BACKWARD, *_BACK, Tensor.grad.__set__}  # type: ignore[union-attr]
"""Of what these are given others ask."""
_TYPES = {Tensor.type_as, Tensor.to}
"""Of a second tensor they take dtype and device, and no number."""
_given_alone: list[Any] = []
"""The `ExampleLoss`, or function under vmap, that runs now: it sees one example at a time, and no more of a batch."""
_PUBLIC = {getattr(getattr(Tensor, name), "__get__", None) for name in (
    "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "is_sparse",
)} | {
    Tensor.dim, Tensor.element_size, Tensor.__hash__, Tensor.is_floating_point, torch.is_floating_point,
    Tensor.is_complex, torch.is_complex, Tensor.is_signed, Tensor.get_device, Tensor.is_inference,
    Tensor.retain_grad,
}  # fmt: skip
"""What gives no tensor, opens no way into the graph, and tells nothing that follows from the batch."""
_SIZES = {
    getattr(Tensor.shape, "__get__", None), Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel,
    Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.data_ptr,
}  # fmt: skip
"""What tells how many numbers a mask chose: that no loss has this number is the caller's word."""
_VALUES = {
    Tensor.numpy, Tensor.untyped_storage, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__,
}  # fmt: skip
"""What gives numbers of the batch that nobody follows: that no loss follows from them is the caller's word."""
_READS = _PUBLIC | _SIZES | _VALUES
_TAKES = {Tensor.item, Tensor.tolist}


def _seen(watched: Any, by_value: bool) -> None:
    """The loop is given a Python value of a tensor, or its size."""
    if type(watched) is not _Watched:
        return
    tape, number = _place(watched)
    if tape is None:  # made of numbers that were taken out, as perhaps its size
        _all_saw()
        return
    if tape.is_shown:
        tape.watch.was_seen |= by_value
    if not tape.closed:
        state = tape.states[number]
        secret = has_secret_shape(state) or (isinstance(state, Coupled) and state not in (_OF_BATCH, _LOOKED))
        tape.watch.was_seen |= secret or (by_value and state is not None)


_NO_VALUES = (Tensor, _Watched, type(None))


class _TakenOut:
    """A Python number of a batch: an ordinary one to print, log and save; what torch makes of it is of all examples."""

    __slots__ = ()
    kind: Any

    def plain(self) -> Any:
        return self.kind.__pos__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.kind, (self.plain(),)

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Watched.__torch_function__(func, types, args, kwargs)


class _Float(_TakenOut, float):
    kind = float


class _Int(_TakenOut, int):
    kind = int


def _taken_out(value: Any) -> Any:
    """Numbers that were taken out of a batch of a run, or computed of such; what is none is known to have been seen."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_taken_out, value))
    if kind is float or kind is int:
        return _Float(value) if kind is float else _Int(value)
    if value is not NotImplemented:
        _all_saw()
    return value


def _all_saw() -> None:
    """The loop has what nobody follows, made of a number of a batch; which run's is not known, so it is any one's."""
    for run in _watches:
        run.was_seen = True


def _computed(plain: Any) -> Any:
    def operation(number: Any, *others: Any) -> Any:
        return _taken_out(plain(number, *others))

    return operation


def _converted(plain: Any) -> Any:
    def conversion(number: Any) -> Any:
        _all_saw()
        return plain(number)

    return conversion


private.OF_A_BATCH_KINDS |= {_Watched, _Float, _Int}
_SHOWN = {"__repr__", "__format__", "__hash__", "__getattribute__", "__getnewargs__", "__sizeof__", "__index__"}
for _kind, _plain_kind in ((_Float, float), (_Int, int)):
    for _name, _member in vars(_plain_kind).items():
        if _name in ("__float__", "__int__"):  # of which Python makes an ordinary number
            setattr(_kind, _name, _converted(_member))
        elif isinstance(_member, types.GetSetDescriptorType):
            setattr(_kind, _name, property(_computed(_member.__get__)))
        elif isinstance(_member, (types.WrapperDescriptorType, types.MethodDescriptorType)) and _name not in _SHOWN:
            setattr(_kind, _name, _computed(_member))


torch.serialization.add_safe_globals([float, int])  # as which they are saved


def _of_taken_out(states: list[State]) -> State:
    return _TAKEN_OUT


def _tape_of(args: Any, kwargs: Any) -> _Tape | None:
    """The tape of the tensors that a function is given; those of several open ones are joined."""
    found: _Tape | None = None
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is _Watched:
            tape = _place(value)[0]
        elif kind in _CONSTANTS:
            continue
        elif isinstance(value, (tuple, list)):
            tape = _tape_of(value, _NO_NAMES)
        elif isinstance(value, dict):
            tape = _tape_of((), value)
        elif kind is slice:
            tape = _tape_of((value.start, value.stop, value.step), _NO_NAMES)
        else:
            continue
        if tape is None or tape is found:
            continue
        if found is None or found.closed or (tape.nodes and not found.nodes and not tape.closed):
            found = tape
        elif tape.nodes and not tape.closed:
            found.join(tape)
    return found


_NO_NAMES: dict[str, Any] = {}


def _of_another(tape: _Tape | None, number: int) -> State:
    """The state of a value of another batch: totals may be added, and nothing else may be made of it."""
    state = None if tape is None or tape.closed else tape.states[number]
    if tape is None:
        return _TAKEN_OUT
    if tape.closed:
        return _EARLIER
    if isinstance(state, OfRow) and state.sized:
        return TOTAL
    return state if state is None or isinstance(state, Total) else _EARLIER


def _place(watched: Any) -> tuple[_Tape | None, int]:
    """The tape that a tensor is on now, and its number there."""
    while watched.tape is not None and watched.tape.into is not None:
        tape, offset = watched.tape.into
        watched.tape, watched.number = tape, watched.number + offset
    return watched.tape, watched.number


def _of_earlier(tape: _Tape | None, func: Any, args: Any, kwargs: Any) -> Any:
    """A function of tensors of a batch whose backward pass has run: the results are of it too."""
    if func in _BACKWARD:
        for loss in pytree.tree_leaves(args[0] if args else kwargs["tensors"]):
            reached, _, leaves = _walk(loss.grad_fn, ())
            if not reached:
                _check_trains_nothing(tape, leaves)
        return func(*unwatched(args), **unwatched(kwargs))
    written = _targets(func, args, kwargs)
    leaves = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if written:
        _check_targets(written)
        _keep_line(any(_escapes(tape, one) for one in written))
    others = [one for one in leaves if type(one) is not _Watched or private.is_marked(one, what=_VIEWED)]
    versions = private.versions(others)
    result, unsaid = func(*args, **kwargs), list[Any]()
    if others and private.versions(others) != versions:  # some is written, also by what does not say so
        moved = [one for one, before in zip(others, versions, strict=True) if private.version(one) != before]
        unsaid = [one for one in moved if not any(map(is_, repeat(one), written))]
        _keep_line(any(_escapes(tape, one) for one in unsaid))
        written += unsaid
    for one in written:
        _of_earlier_too(tape, one)
    _check_targets(unsaid)
    if tape is None and not any(isinstance(one, Tensor) for one in pytree.tree_leaves(result)):
        _all_saw()
    return pytree.tree_map_only(Tensor, functools.partial(_as_earlier, tape, given=leaves), result)


def _of_earlier_too(tape: _Tape | None, tensor: Tensor) -> None:
    """Watch a tensor that stood outside, as it is, as one of a batch whose backward pass has run."""
    private.mark_memory(tensor, private.WRITTEN)
    if type(tensor) is Tensor:
        _become_watched(tensor)
        tensor.tape = tape  # type: ignore[attr-defined]


def _become_watched(tensor: Any) -> None:
    """A gradient that the loop put in place while nobody watched is added to in place by later backward passes."""
    _keep_line(type(tensor) is not _Watched and tensor.is_leaf and tensor.grad is not None)
    tensor.__class__ = _Watched


def _give_memory(put: Callable[[Tensor, Any], None], tensor: Any, value: Any) -> None:
    """`tensor.data = value`: where one is of a batch, a copy, for nobody is told of what is written into both.

    From here on the tensor is what the value is. A graph that has saved it reads what it is now.
    """
    if type(tensor) is not _Watched and type(value) is not _Watched:
        put(tensor, value)
        return
    made: Any = value.detach().clone()
    saved = private.use_count(tensor) != 1  # by a graph, or as the base of a view
    before, place = _place(tensor) if type(tensor) is _Watched else (None, -1)
    if type(made) is not _Watched:
        is_open = before is not None and not before.closed
        made = before.follow(made, before._origin(value)) if is_open else _as_earlier(before, made)  # type: ignore[union-attr]
    tape, number = _place(made)
    now = None if tape is None or tape.closed else tape
    is_public = now is not None and now.states[number] is None
    if type(tensor) is not _Watched and not is_public:
        _check_targets([tensor])
        _keep_line(type(tensor) is not Tensor)
        LossWatch.aliased += saved
    elif before is not None and not before.closed:
        if saved:
            before.states[place] = _NOT_FOLLOWED
        if now is not None:
            now.states[number] = _of_graph(tensor, before.states[place], now.states[number])
    with private.WithoutSubclasses():
        put(tensor, _ordinary(made))
    if type(tensor) is Tensor and not is_public:
        _become_watched(tensor)
    if isinstance(tensor, _Watched):
        tensor.tape, tensor.number, tensor.plain = tape, number, None
        if now is not None:
            now._alive[number] = weakref.ref(tensor)


def _of_graph(tensor: Tensor, before: State, now: State) -> State:
    """The state of a tensor that has other numbers now, while gradients go back through it as they did before."""
    with private.WithoutSubclasses():
        return now if tensor.grad_fn is None or now == before else _NOT_FOLLOWED


def _as_earlier(tape: _Tape | None, tensor: Any, given: Sequence[Tensor] = ()) -> Any:
    """A tensor, watched as one of a batch whose backward pass has run. `given`: of which it was made."""
    if type(tensor) is not _Watched:
        _mark(tensor, given=given)
        if tensor.layout is torch.strided:
            tensor = tensor.as_subclass(_Watched)
        else:  # torch makes no other object of one
            tensor.__class__ = _Watched
        tensor.tape = tape
        with private.WithoutSubclasses():
            private.shows_too(tensor)
    return tensor


def _mark(made: Any, state: Any = _OF_BATCH, given: Iterable[Tensor] = ()) -> None:
    """Of what was made of a batch, or shows what stood outside: `counts[label]`."""
    if not isinstance(made, Tensor):
        return
    for one in given:
        if type(one) is not _Watched and private.share_memory(one, made):
            private.mark_memory(made, private.VIEWED)
    if made._base is not None:
        private.shows_too(made)
    elif state is not None:
        private.mark_memory(made)


def _keep_line(escaped: bool) -> None:
    """Numbers of a batch are where nothing tells of them: keep which line of the loop put the first there."""
    if not escaped or LossWatch.escaped:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("anyorder", "torch"):
        frame = frame.f_back
    LossWatch.escaped = f"line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"


def _words(state: Coupled) -> str:
    """Why rows are coupled, with the line that let numbers of a batch escape, where one did."""
    line = LossWatch.escaped if state is _WRITTEN else ""
    return f"{state.why} (into shared memory, first on {line})" if line else state.why


_FOLLOWED = (Tensor, _Watched)


def _escapes(tape: _Tape | None, written: Any) -> bool:
    """Whether what is written into a tensor can be read of what cannot be watched: lists, parameters, NumPy's arrays.

    All tensors that show its memory, views and aliases (`x.data`), are of the batch from here on; Python's collector
    knows them. Torch says how many there are: one that is left, in a saved graph perhaps, may be anywhere.
    """
    if not isinstance(written, Tensor):
        return True
    with private.WithoutSubclasses():
        known, uses = private.showing(written, _FOLLOWED), private.uses_of_memory(written)
        strange = any(type(one) not in _FOLLOWED for one in known) or not private.is_of_torch(written)
        noted = {id(written)} if tape is None else {id(written), *(id(tape.operands[i]) for i in tape.foreign)}
        others = [one for one in known if id(one) not in noted]
        outside = [one for one in others if type(one) is Tensor]
        base = written if written._base is None else written._base
        LossWatch.aliased += any(one is not base and one._base is not base for one in others)
    for one in outside if tape is not None else ():
        tape.take_in(one, _WRITTEN)  # type: ignore[union-attr]
    for one in known:
        place, number = _place(one) if type(one) is _Watched else (None, -1)
        if place is not None and not place.closed:  # it may have been public
            place.states[number] = _WRITTEN
            place.of_written = place.of_written or place is not tape
    return uses != len(known) or strange or (bool(outside) and tape is None)


def _ordinary(tensor: Tensor) -> Tensor:
    with private.WithoutSubclasses():
        return Tensor.as_subclass(tensor, Tensor)


def _leave_to_python() -> None:
    """Have `torch.compile` run what it meets watched tensors in as it is written; tracing them would not end.

    And have the transforms of `torch.func` refuse them: inside, their numbers are those of ordinary tensors.
    """
    private.guard_transforms(_refuse_transform, _follow_vmap)
    private.guard_backward(_run_elsewhere)
    private.guard_makers(_run_unseen)
    private.guard_variable(_Watched)
    private.guard_data(_give_memory)
    private.guard_compiler()
    private.compiler_leaves(_Watched)
    _LEFT.add(sys.modules.get(private.COMPILER))


_LEFT: set[Any] = set()
"""The modules of the compiler's settings, None where it is not loaded, of which that was done."""
_LAYOUT, _FIRST = attrgetter("layout"), itemgetter(0)


# -- values of single rows that are released ---------------------------------------------------------------------------


def tape_of(outputs: Any, given: Any) -> Callable[[], _Tape | None]:
    """Where the batch is written down that the model was called with, as long as it is; see `rows_of`."""
    for leaf in pytree.tree_leaves((outputs, given)):
        tape = _place(leaf)[0] if type(leaf) is _Watched else None
        if tape is not None and not tape.closed:
            return weakref.ref(tape)
    return _nothing


def rows_of(name: str, values: Any, rows: int, tape: _Tape | None) -> Tensor:
    """The values as an ordinary tensor (rows,), each proved to be a function of its own row of this batch.

    No row is that of a batch that couples nothing; nor is one row, where nothing of other batches may be in it: what is
    refused follows from operations and shapes, and not from who is there.

    Args:
        tape: of the batch, from `tape_of`.
    Raises: ArgumentError for what is no tensor of one number for each row; ModelError for what is not proved.
    """
    if not isinstance(values, Tensor) or values.shape != (rows,) or values.is_complex():
        got = f"another, of {values.dim()} dimension(s)" if isinstance(values, Tensor) else type(values).__name__
        raise ArgumentError(  # not of which length: how many a mask chose is not public
            f"{name} must be a tensor of one real number for each row of the batch, shape (rows,), got {got}: take the "
            "criterion with reduction='none', and the mean over what is inside of a row"
        )
    own, number = _place(values) if type(values) is _Watched else (None, -1)
    while tape is not None and tape.into is not None:
        tape = tape.into[0]
    if own is None and not rows:
        return values
    if own is None or own.closed or (tape is not None and own is not tape):
        raise ModelError(
            f"{name} must be computed of the batch that the model was called on last, by torch's functions of its "
            "outputs and labels, before the backward pass: else nothing shows that a value is of its row alone"
        )
    state = own.states[number]
    alone = rows == 1 and not (own.foreign or own.of_numbers or own.of_written)
    if not alone and (state != _BY_ROW or own.sizes != [rows]):
        unknown = "is not made of operations that are known to keep rows apart"
        why = _words(state) if isinstance(state, Coupled) else unknown
        raise ModelError(
            f"{name} couples examples, or may: it {why}; give one value for each example, of this example alone, in "
            "the batch's order"
        )
    return _ordinary(values)


def _refuse_transform(tensor: Any) -> None:
    """Raises: ModelError for a watched tensor that torch.func (vmap, grad, jvp, functionalize) takes in, or gives out.

    Those of earlier batches may be looked at; what was made of them may be anywhere from here on.
    """
    tape = _place(tensor)[0] if type(tensor) is _Watched else None
    if type(tensor) is _Watched and (tape is None or not tape.closed):
        raise _transformed()
    _keep_line(tape is not None)


def _transformed() -> ModelError:
    return ModelError(
        "the loss couples examples, or may: a function under a transform of torch.func (vmap, grad, jvp, "
        "functionalize), or the private model, reads a tensor of the batch that it was not given row by row, and what "
        "it makes of it is not followed. Give the model, and vmap with in_dims=0 and out_dims=0, all tensors of the "
        "batch that they read; call several networks one after another, torch.stack([network(x) for network in "
        f"networks]); take torch.func.grad inside of the model's forward. Or {_CURE}"
    )


_elsewhere: list[None] = []
"""Backward passes of ordinary tensors that run now: what their hooks do with numbers of a batch is not seen."""


def _run_elsewhere(run: Callable[[], Any], gradients: Any) -> Any:
    """A backward pass that `_Tape.backward` does not know.

    Raises: ModelError where it is given numbers of a batch, or its hooks or functions read any.
    """
    for gradient in gradients:
        if isinstance(gradient, Tensor) and type(private.unwrapped(gradient)) is _Watched:
            raise _as_gradients("was given numbers of the batch as gradients")
    _elsewhere.append(None)
    try:
        return run()
    finally:
        _elsewhere.pop()


def _run_unseen(name: str, run: Callable[[], Any], given: Any) -> Any:
    """What a function makes of tensors, or sends to other processes, that torch lets nobody follow.

    Of an earlier batch, which may be looked at, what comes of it is known to be of it too.
    Raises: ModelError for tensors of a batch whose backward pass has not run.
    """
    talks = name.startswith(private.TALK)
    if talks and "object" not in name:  # as gradients are added up: the group and its options are looked at by nobody
        given = [one for one in given[0] if isinstance(one, (list, tuple, Tensor))]
    leaves = flat(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tapes = [_place(tensor)[0] for tensor in tensors if type(tensor) is _Watched]
    if not tapes and not any(isinstance(leaf, _TakenOut) for leaf in leaves):
        return run()
    tapes = tapes or [None]  # as what is made of numbers that were taken out
    if any(tape is not None and not tape.closed for tape in tapes):
        raise ModelError(
            "torch.distributed was given a tensor of the batch before its backward pass: what other processes get, or "
            "this one, is of all examples and is not followed, so that one example may move the gradients of others. "
            "Gather losses and metrics after loss.backward(); the engine adds up the gradients of all processes"
            if talks
            else f"torch.{name} was given a tensor of the batch, and what it makes is not followed, so that one "
            "example may move the gradients of others; call it in the data set or in collate_fn, or inside of the "
            "model's forward"
        )
    outside = [tensor for tensor in tensors if talks and type(tensor) is not _Watched]
    unseen = "object" in name or any(_escapes(tapes[0], one) for one in outside)
    made = run()
    for one in (one for tensor in outside for one in (tensor, tensor._base) if one is not None):
        _of_earlier_too(tapes[0], one)
    if unseen or (isinstance(made, Tensor) and made.is_nested):
        if tensors:
            _keep_line(True)
        else:
            _all_saw()
    return _as_earlier(tapes[0], made) if isinstance(made, Tensor) and not made.is_nested else made


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
            raise ModelError(  # not of which lengths: how many a mask chose is not public
                "outputs and targets must be batches of one length, the number of rows: give the criterion all rows of "
                "both, with the examples in the first dimension"
            )

        with private.WithoutSubclasses():
            tape = _tape_of(pytree.tree_leaves(batches), _NO_NAMES)
        loss: Tensor = _one_at_a_time(self._mean, batches, {}, tape, _of_rows)
        if tape is not None and not tape.closed:
            with private.WithoutSubclasses():
                tape.trusted.append(_ordinary(loss).grad_fn)
        return loss

    def _mean(self, *batches: Any) -> Tensor:
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


def _one_at_a_time(run: Any, batches: Any, kwargs: Any, tape: _Tape | None, rule: Any) -> Any:
    """`run(*batches)`, of a function that is given one example at a time and sees nothing else of the batch."""
    again = _Again(run, kwargs)
    made = _run_on(tape, batches, again)
    if tape is None or tape.closed:
        return made
    again.first.append(made)
    with private.WithoutSubclasses():
        return tape.call(again, batches, {}, rule=rule)


def _run_on(tape: _Tape | None, given: Any, run: Callable[..., Any]) -> Any:
    """`run(*given)`, without what watches: what it writes is of the batch."""
    tensors = [one for one in pytree.tree_leaves(given) if isinstance(one, Tensor)]
    versions = private.versions(tensors)
    made = run(*unwatched(given))
    with private.WithoutSubclasses():
        for one, before in zip(tensors, versions, strict=True):
            if tape is not None and (one.is_inference() or private.version(one) != before):
                tape._also_written(one, _NOT_FOLLOWED)
    return made


class _Again:
    """A function that sees one example at a time: what it made of a batch, once, and of a row where that runs again."""

    def __init__(self, run: Any, kwargs: Any) -> None:
        self.run, self.kwargs, self.first = run, kwargs, list[Any]()

    def __call__(self, *rows: Any) -> Any:
        if self.first:
            return self.first.pop()
        _given_alone.append(self.run)
        try:
            with private.WithSubclasses():  # a tensor of the batch that it reads now is refused too
                return self.run(*rows, **self.kwargs)
        finally:
            _given_alone.pop()


def _follow_vmap(run: Any, in_dims: Any, out_dims: Any, args: Any, kwargs: Any) -> Any:
    """Run what a loss gives to vmap: proved where all of it is mapped along the rows; else as it is, and refused."""
    along_rows = out_dims == 0 and in_dims in (0, (0,) * len(args))
    if not _given_alone and (along_rows or _Watched in map(type, args)):
        with private.WithoutSubclasses():
            tape = _tape_of(pytree.tree_leaves(args), _NO_NAMES)
        if tape is not None and tape.closed:
            made = _run_on(tape, args, functools.partial(run, **kwargs))
            return pytree.tree_map_only(Tensor, functools.partial(_as_earlier, tape), made)
        watch = tape.watch if tape is not None and along_rows and tape.followed_data else None
        if watch is not None and not watch.escaped:  # what it reads besides is public
            return _one_at_a_time(run, args, kwargs, tape, _along_rows)
    return run(*args, **kwargs)


def _along_rows(states: list[State]) -> State:
    """The state of what vmap gives along the rows."""
    rows = {s for s in states if s is not None}
    state = next(iter(rows), None)
    alone = len(rows) == 1 and isinstance(state, ByRow) and state == ByRow(state.axis, 0, 1)
    if len([s for s in rows if isinstance(s, ByRow)]) > 1:
        return Coupled("gives rows in several orders to torch.vmap, so that one example moves the gradients of others")
    return state if alone else next((s for s in states if isinstance(s, Coupled)), NoRule("vmap"))


def _of_rows(states: list[State]) -> State:
    """The state of a mean over rows of any criterion, given one row of each batch at a time."""
    coupled = next((s for s in states if isinstance(s, Coupled)), None)
    by_row = all(s is None or (isinstance(s, ByRow) and s == ByRow(s.axis, 0, 1)) for s in states)
    alike = len({s for s in states if s is not None}) <= 1
    return TOTAL if coupled is None and by_row and alike else coupled or NoRule("ExampleLoss")
