"""Which operations map rows to rows: the rules by which a loss is proved to be of each example alone.

Every value of a loss is in one of the states below, and each operation of torch (ATEN level: what composites such as
`F.huber_loss` are made of, as they run) carries them from its arguments to its results. Rules look at operations,
shapes and settings alone, never at numbers of the batch.

    None      a public constant: no number of the batch is in it
    ByRow      dimension `dim` goes over the rows of the batch, `inner` places each, row by row; what stands at a row's
              places is a function of that row alone
    OfRow     a function of one row alone, as `out[i]` is: whatever is made of it and of constants is one too
    Picked    numbers of single rows that a mask chose: how many there are depends on all rows
    Total     a sum over rows of functions of each row alone, times public constants
    Coupled   a function of several rows that is none of the above
    NoRule   no rule says what it is

A loss that is a Total has, with respect to the outputs of a row, a gradient that is a function of that row alone: the
derivative of its own term. `Total` passes through what is linear, and everything else makes it Coupled.
"""

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anyorder.clipping import torch_private as private
from anyorder.clipping.torch_private import pytree


class ByRow(NamedTuple):
    """Row by row along `dim`, `inner` places a row.

    `axis` says of which batch, then what was made of its rows: a part of them, (start, end, step) or ("index", ..), or
    several views one below the other, ("stack", how many). Such rows are those of a batch as well, each a function of
    one row: what is a sum over them is one over the rows that they are of.
    """

    axis: tuple[Any, ...]
    dim: int
    inner: int


class OfRow(NamedTuple):
    """Of row `row` out of `rows`; `sized` where its shape is public, as it is not where a mask of the row chose."""

    axis: tuple[Any, ...]
    row: int
    rows: int
    sized: bool = True


class Picked(NamedTuple):
    """What a mask chose."""

    axis: tuple[Any, ...]


class Total(NamedTuple):
    """A sum over rows."""

    mark: str = "total"


class Coupled(NamedTuple):
    """Of several rows; `why` ends a sentence that begins with "the loss "."""

    why: str


class NoRule(NamedTuple):
    """No rule: `what` says where it began; `sized` where its shape is public, as far as anybody knows."""

    what: str
    sized: bool = True


State = ByRow | OfRow | Picked | Total | Coupled | NoRule | None
TOTAL = Total()


def has_secret_shape(state: State) -> bool:
    """Whether it has as many numbers as a mask chose, or as numbers of the batch say."""
    return isinstance(state, Picked) or (isinstance(state, (OfRow, NoRule)) and not state.sized)


class AtenCall:
    """One call of an ATEN operation: its arguments by name, and the states of those that are tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any, state_of: Callable[[Tensor], State]) -> None:
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
        self.name: str = func._schema.name.removeprefix("aten::")
        self.in_place = bool(written) and written == names[:1]
        self.writes_others = bool(written) and not self.in_place
        self.name = self.name.removesuffix("_") if self.in_place else self.name
        self.pointwise = torch.Tag.pointwise in func.tags
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.chooses = torch.Tag.dynamic_output_shape in func.tags
        self.values = {argument.name: argument.default_value for argument in arguments}
        self.values |= dict(zip(names, args, strict=False)) | kwargs
        self.tensors = [leaf for leaf in pytree.tree_leaves(list(self.values.values())) if isinstance(leaf, Tensor)]
        self.state_of = state_of
        self.states = [state_of(t) for t in self.tensors]
        self.shape = self.tensors[0].shape if self.tensors else None  # before what is written in place

    def dims(self, name: str = "dim", of: str = "self") -> list[int] | None:
        """Dimensions that a call names, from 0 on; None for all of them."""
        given, rank = self.values.get(name), self.values[of].dim()
        if given is None or (isinstance(given, (list, tuple)) and not given):
            return None
        return [d % rank if rank else 0 for d in (given if isinstance(given, (list, tuple)) else [given])]


def _coupled(what: str) -> Coupled:
    return Coupled(f"takes rows of the batch together ({what}), so that one example moves the gradients of others")


DIVIDED = Coupled(
    "is divided by, or weighted with, a number that depends on all examples, so that one moves the gradients of others"
)


_MASKED_MEAN = Coupled(
    "is a mean over what a mask chose of the outputs: it divides by a number that depends on all examples, so that one "
    "moves the gradients of others; for labels mark the others with ignore_index="
)


def result_states(call: AtenCall, results: Sequence[Tensor]) -> list[State]:
    """The states of an operation's results."""
    if any(isinstance(s, OfRow) for s in call.states) and (own := _of_one_row(call, results)) is not None:
        return own
    lost = sorted((s for s in call.states if isinstance(s, NoRule)), key=lambda s: s.sized)
    worst = next((s for s in call.states if isinstance(s, Coupled)), lost[0] if lost else None)
    of_its_shape = call.name == "zero" or call.name.endswith("_like")
    if of_its_shape and any(isinstance(s, Picked) for s in call.states):
        worst = worst or NoRule(f"{call.name} of what a mask chose: as many numbers as the mask says", sized=False)
    elif all(s is None for s in call.states) or (call.name in _CONSTANT and not (worst and of_its_shape)):
        return [None] * len(results)
    lost_here = NoRule(call.name, sized=not call.chooses)
    if worst is not None or call.writes_others:
        kept = worst is not None and (isinstance(worst, Coupled) or not call.chooses)
        return [worst if kept else lost_here] * len(results)
    if call.in_place and results[0].shape != call.shape:
        return [NoRule("another shape of the same tensor")] * len(results)
    rule = _RULES.get(call.name) or (_pointwise if call.pointwise else None)
    if rule is None:
        of_total = any(isinstance(s, Total) for s in call.states)
        return [_coupled(f"{call.name} of a sum over the batch") if of_total else lost_here] * len(results)
    made = rule(call, results)
    made = made if isinstance(made, list) else [made] * len(results)
    return [
        s if _has_all_rows(call, s, r) else NoRule(f"{call.name} of some rows")
        for s, r in zip(made, results, strict=True)
    ]


def _has_all_rows(call: AtenCall, state: State, result: Tensor) -> bool:
    """Whether a result has the rows of its axis, as many as the arguments: one of them would broadcast against all."""
    if not isinstance(state, ByRow):
        return True
    given = {
        t.shape[s.dim] // s.inner
        for t, s in zip(call.tensors, call.states, strict=True)
        if isinstance(s, ByRow) and s.axis == state.axis
    }
    return state.dim < result.dim() and {result.shape[state.dim] // state.inner} >= given


# -- one row alone -------------------------------------------------------------------------------------------------

_OTHER_MEMORY = {"as_strided", "set", "resize", "resize_as"}
"""What may read the memory around what it is given: a row is a view of the batch."""


def _of_one_row(call: AtenCall, results: Sequence[Tensor]) -> list[State] | None:
    """Results of a call with numbers of single rows; None where these are read as sums in which others count zero."""
    live = {s for s in call.states if s is not None}
    rows = [s for s in live if isinstance(s, OfRow)]
    if "::" in call.name or call.name in _OTHER_MEMORY or call.writes_others:
        return [NoRule(call.name)] * len(results)
    if len(live) == len(rows) and len({(s.axis, s.row, s.rows) for s in rows}) == 1:
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors)
        sized = all(s.sized for s in rows) and not (call.chooses and (masks or call.name != "index"))
        if (not sized and call.draws) or (call.in_place and results[0].shape != call.shape):
            return [NoRule(call.name, sized=False)] * len(results)  # as many draws as the row's numbers say
        return [rows[0]._replace(sized=sized or not t.dim()) for t in results]
    if call.name in ("cat", "stack"):
        return [_joined_rows(call, results[0])]
    if not all(s.sized for s in rows) and not any(isinstance(s, (Coupled, NoRule)) for s in live):
        return [NoRule(f"{call.name} of what masks of single rows chose", sized=False)] * len(results)
    known = call.state_of
    call.states = [TOTAL if isinstance(s, OfRow) else s for s in call.states]
    call.state_of = lambda t: TOTAL if isinstance(known(t), OfRow) else known(t)
    return None


def _joined_rows(call: AtenCall, result: Tensor) -> State:
    """Single rows, put together again."""
    dim = call.values["dim"] % result.dim()
    rows = [s for s in call.states if isinstance(s, OfRow)]
    places = {1} if call.name == "stack" else {t.shape[dim] for t in call.tensors}
    if len(rows) < len(call.states):
        whole = all(s is None or isinstance(s, Total) or (isinstance(s, OfRow) and s.sized) for s in call.states)
        return TOTAL if whole else NoRule(call.name)
    ((axis, size), *others) = {(s.axis, s.rows) for s in rows}
    if others:
        return TOTAL if all(s.sized for s in rows) else NoRule(call.name)
    if not all(s.sized for s in rows):
        return Picked(axis) if dim == 0 and call.name == "cat" else NoRule(call.name)
    if len(places) > 1 or 0 in places:
        return TOTAL
    taken = [s.row for s in rows]
    axis = axis if taken == list(range(size)) else (*axis, ("index", *taken))
    return ByRow(axis, dim, places.pop())


# -- pointwise, and what broadcasts ----------------------------------------------------------------------------------

_LINEAR = {"add", "sub", "rsub", "neg", "positive", "clone", "_to_copy", "copy", "detach", "alias", "lift_fresh"}


def _pointwise(call: AtenCall, results: Sequence[Tensor]) -> Any:
    divisor = call.values.get("other") if call.name in ("div", "true_divide") else None
    by_total = isinstance(divisor, Tensor) and isinstance(call.state_of(divisor), Total)  # of a number: `div(1.0, x)`
    if by_total or (call.values.get("rounding_mode") and any(isinstance(s, Total) for s in call.states)):
        return DIVIDED
    return joined(call.name, list(zip(call.tensors, call.states, strict=True)), results[0].dim())


def shape_text(tensor: Tensor, state: ByRow) -> str:
    """Its shape, with B for the rows: how many a batch has is secret where batches are drawn in secret."""
    rows = "B" if state.inner == 1 else f"{state.inner} B"
    sizes = [rows if dim == state.dim else str(size) for dim, size in enumerate(tensor.shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def joined(name: str, given: Sequence[tuple[Tensor, State]], rank: int) -> State:
    """What broadcasting operands against each other gives, number by number."""
    live = [(t, s) for t, s in given if s is not None]
    if any(isinstance(s, Total) for _, s in live):
        return _of_totals(name, given)
    if any(isinstance(s, Picked) for _, s in live):
        alone = len(live) == 1 and all(t.numel() == 1 for t, s in given if s is None)
        return live[0][1] if alone else NoRule(f"{name} of what a mask chose", sized=False)
    places = {(t.dim() - s.dim, s.axis, s.inner) for t, s in live if isinstance(s, ByRow)}
    if len(places) > 1 and len({tuple(t.shape) for t, _ in live}) == 1:
        return Coupled(
            f"joins rows of different examples: {name} was given rows in several orders (mixup, a shuffled or shifted "
            "copy), so that one example moves the gradients of others; mix what belongs to one example, such as two "
            "augmented copies of it"
        )
    if len(places) > 1:
        shapes = " and ".join(shape_text(t, s) for t, s in live if isinstance(s, ByRow))
        return Coupled(
            f"joins each example's numbers with those of others: {name} was given the shapes {shapes}, so that one "
            "example moves the gradients of others; give both the same shape, for example output.squeeze(1) or "
            "target.unsqueeze(1)"
        )
    ((place, axis, inner),) = places
    size = max(t.shape[-place] for t, _ in live)
    for t, s in given:
        if s is None and t.dim() >= place and t.shape[-place] not in (1, size):
            return NoRule(name)
    return ByRow(axis, rank - place, inner)


def _of_totals(name: str, given: Sequence[tuple[Tensor, State]]) -> State:
    """Sums of totals, and totals times constants; a total that scales something else couples."""
    states = [s for _, s in given]
    if name in _LINEAR and all(s is None or isinstance(s, Total) for s in states):
        return TOTAL
    others = states[1:] if isinstance(states[0], Total) else states[:1] + states[2:]
    constant = all(s is None for s in others)
    if name == "mul" and constant:
        return TOTAL
    if name in ("div", "true_divide") and isinstance(states[0], Total) and constant:
        return TOTAL
    return DIVIDED if name in ("div", "mul", "true_divide") else _coupled(f"{name} of a sum over the batch")


# -- reductions, and what runs along a dimension ---------------------------------------------------------------------


def _reduced(call: AtenCall, results: Sequence[Tensor]) -> State:
    """A reduction: over the rows it may only be a sum, or a mean over a number that shapes alone decide."""
    state, linear = call.states[0], call.name in ("sum", "mean", "nansum")
    dims = call.dims()
    if isinstance(state, Total):
        return TOTAL if call.name in ("sum", "mean") else _coupled(f"{call.name} of a sum over the batch")
    if call.name == "prod":  # of which `product` takes the place
        return _coupled("prod, on whose way back a zero in one row changes the formula for all")
    if isinstance(state, Picked):
        if call.name == "sum":
            return state if dims is not None and 0 not in dims else TOTAL
        return _MASKED_MEAN
    assert isinstance(state, ByRow)
    if dims is None or state.dim in dims:
        return TOTAL if linear else _coupled(call.name)
    kept = call.values.get("keepdim", False)
    return state._replace(dim=state.dim - (0 if kept else sum(d < state.dim for d in dims)))


def _along(call: AtenCall, results: Sequence[Tensor]) -> State:
    """What runs along some dimensions and keeps the shape: softmax, sort, cumulated sums, flips."""
    state = call.states[0]
    dims = call.dims("dims" if "dims" in call.values else "dim")
    if isinstance(state, ByRow):
        if dims is not None and state.dim in dims and call.name in ("flip", "roll") and state.inner == 1:
            by = sum(n for n, d in zip(call.values.get("shifts", ()), dims, strict=False) if d == state.dim)
            if (views := _views(state.axis)) and by and by * views % (call.tensors[0].shape[state.dim] or 1) == 0:
                return state  # each view in the place of another
            return state._replace(axis=(*state.axis, (call.name, by)))  # other places
        return _coupled(call.name) if dims is None or state.dim in dims else state
    if isinstance(state, Picked):
        return NoRule(call.name) if dims is None or 0 in dims else state
    return _coupled(f"{call.name} of a sum over the batch")


def _behind(count: int) -> Callable[..., State]:
    """Operations on the last `count` dimensions, with a batch before: matrices of linear algebra."""

    def rule(call: AtenCall, results: Sequence[Tensor]) -> State:
        if any(isinstance(s, (Total, Picked)) for s in call.states):
            return NoRule(call.name)
        if len({t.dim() for t in call.tensors}) > 1:
            return NoRule(f"{call.name} of matrices with other dimensions before them")
        ranks = [(t.dim(), s) for t, s in zip(call.tensors, call.states, strict=True) if isinstance(s, ByRow)]
        if any(s.dim >= rank - count for rank, s in ranks):
            return _coupled(call.name)
        return ranks[0][1] if len({s for _, s in ranks}) == 1 else _coupled(call.name)

    return rule


def product(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """`torch.prod`, as the last of cumulated products.

    On the way back of `prod` a zero anywhere in the batch changes the formula for all rows, and so their gradients
    where numbers leave the range of floats. That of `cumprod` gives a row without zeros the same gradient either way.
    """
    if dim is None:
        input, dim = input.flatten(), 0
    if not input.dim() or not input.shape[dim]:
        return torch.ops.aten.prod.dim_int(input, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]
    steps = input.cumprod(dim, dtype=dtype)
    return steps.narrow(dim, -1, 1) if keepdim else steps.select(dim, -1)


# -- views and what moves numbers about ------------------------------------------------------------------------------


def _moved(place: Callable[[AtenCall, ByRow, Tensor], Any]) -> Callable[..., State]:
    """An operation whose results are numbers of its argument; `place` says what becomes of ByRow."""

    def rule(call: AtenCall, results: Sequence[Tensor]) -> Any:
        state = call.states[0]
        if isinstance(state, Total):
            return TOTAL
        if isinstance(state, Picked):
            return NoRule(f"{call.name} of what a mask chose", sized=False)
        assert isinstance(state, ByRow)
        made = place(call, state, results[0])
        return state._replace(dim=made) if isinstance(made, int) else made

    return rule


def reshaped(state: ByRow, old: Sequence[int], new: Sequence[int]) -> State:
    """Where the rows are after a view: flat places of a row stay together, and behind the same leading dimensions.

    With P numbers before the rows' dimension and blocks of `inner * prod(old[dim + 1:])` for each row, the new shape
    has the rows along d if prod(new[:d]) == P and what stands behind d divides a block.
    """
    views, dim = _views(state.axis), state.dim
    before, block = prod(old[:dim]), state.inner * prod(old[dim + 1 :])
    rows = old[dim] // state.inner
    leads = prod(new[:dim]), *new[dim : dim + 2]
    if views and len(new) > len(old) and leads == (before, views, old[dim] // views):  # the views apart again
        return ByRow(state.axis[:-1], dim + 1, state.inner)
    for d, size in enumerate(new):
        behind = prod(new[d + 1 :])
        if prod(new[:d]) == before and behind and block and block % behind == 0 and size == rows * (block // behind):
            return ByRow(state.axis, d, block // behind)
    if views:  # apart again, and of another shape
        apart = *old[:dim], views, old[dim] // views, *old[dim + 1 :]
        return reshaped(ByRow(state.axis[:-1], dim + 1, state.inner), apart, new)
    return NoRule("a view that takes places of several rows together")


def _view(call: AtenCall, state: ByRow, result: Tensor) -> State:
    if result.dtype != call.tensors[0].dtype:
        return NoRule("a view as another type")
    return reshaped(state, call.tensors[0].shape, result.shape)


def _permuted(call: AtenCall, state: ByRow, result: Tensor) -> int:
    dims = call.dims("dims")
    assert dims is not None
    return dims.index(state.dim)


def _transposed(call: AtenCall, state: ByRow, result: Tensor) -> int:
    rank = call.tensors[0].dim()
    a, b = (0, rank - 1) if call.name == "t" else (call.values["dim0"] % rank, call.values["dim1"] % rank)
    return b if state.dim == a else a if state.dim == b else state.dim


def _unsqueezed(call: AtenCall, state: ByRow, result: Tensor) -> int:
    return state.dim + int(call.values["dim"] % result.dim() <= state.dim)


def _squeezed(call: AtenCall, state: ByRow, result: Tensor) -> Any:
    dims = call.dims() if "dim" in call.values else None
    shape = call.tensors[0].shape
    dims = [] if call.values.get("dim") == [] else dims
    gone = [d for d in (range(len(shape)) if dims is None else dims) if shape[d] == 1]
    return OfRow(state.axis, 0, 1) if state.dim in gone else state.dim - sum(d < state.dim for d in gone)


def _expanded(call: AtenCall, state: ByRow, result: Tensor) -> Any:
    at = state.dim + result.dim() - call.tensors[0].dim()
    return at if result.shape[at] == call.tensors[0].shape[state.dim] else NoRule("one row in the place of many")


def _repeated(call: AtenCall, state: ByRow, result: Tensor) -> Any:
    at = state.dim + result.dim() - call.tensors[0].dim()
    return at if call.values["repeats"][at] == 1 else NoRule("repeat along the batch")


def _selected(call: AtenCall, state: ByRow, result: Tensor) -> Any:
    dim, places = call.values["dim"] % call.tensors[0].dim(), call.tensors[0].shape[state.dim]
    if dim == state.dim:
        return OfRow(state.axis, call.values["index"] % places // state.inner, places // state.inner)
    return state.dim - (dim < state.dim)


def _sliced(call: AtenCall, state: ByRow, result: Tensor) -> Any:
    dim, size = call.values["dim"] % call.tensors[0].dim(), call.tensors[0].shape[state.dim]
    if dim != state.dim or result.shape[dim] == size:
        return state.dim
    start, end, step = slice(call.values["start"], call.values["end"], call.values["step"]).indices(size)
    if (whole := _whole_views(state, start, end, step, size)) is not None:  # also where a batch has one row
        return whole
    if start < end and start // state.inner == (end - 1) // state.inner:
        return OfRow(state.axis, start // state.inner, size // state.inner)
    return _part(state, start, end, step, size)


def _diagonal(call: AtenCall, results: Sequence[Tensor]) -> State:
    return TOTAL if isinstance(call.states[0], Total) else NoRule(call.name)


def _split(call: AtenCall, results: Sequence[Tensor]) -> Any:
    state = call.states[0]
    if not isinstance(state, ByRow):
        return TOTAL if isinstance(state, Total) else NoRule(call.name)
    dim = call.values.get("dim", 0) % call.tensors[0].dim()
    if dim != state.dim:
        return state._replace(dim=state.dim - (dim < state.dim)) if call.name == "unbind" else state
    places = call.tensors[0].shape[dim]
    sizes = [1 if call.name == "unbind" else r.shape[dim] for r in results]
    ends = list(itertools.accumulate(sizes))
    views = [_whole_views(state, e - n, e, 1, places) for e, n in zip(ends, sizes, strict=True)]
    if call.name != "unbind" and views and None not in views:
        return views
    if sizes and all(n and (e - n) // state.inner == (e - 1) // state.inner for e, n in zip(ends, sizes, strict=True)):
        return [OfRow(state.axis, (e - 1) // state.inner, places // state.inner) for e in ends]
    return [_part(state, e - n, e, 1, places) for e, n in zip(ends, sizes, strict=True)]


def _views(axis: tuple[Any, ...]) -> int:
    """How many views stand one below the other; 0 where none do."""
    return int(axis[-1][1]) if isinstance(axis[-1], tuple) and axis[-1][0] == "stack" else 0


def unstacked(axis: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of the rows that each of the views has."""
    return unstacked(axis[:-1]) if _views(axis) else axis


def _whole_views(state: ByRow, start: int, end: int, step: int, size: int) -> ByRow | None:
    """One of the views, or several; None for anything else. No batch is empty here: `_concatenated` stacks none."""
    one = size // (_views(state.axis) or 1)
    if not _views(state.axis) or step != 1 or start >= end or start % one or end % one:
        return None
    return state._replace(axis=_stacked(state.axis[:-1], (end - start) // one))


def _stacked(axis: tuple[Any, ...], views: int) -> tuple[Any, ...]:
    return axis if views == 1 else (*axis, ("stack", views))


def _part(state: ByRow, start: int, end: int, step: int, size: int) -> State:
    """Some of the rows of what has so many places along them."""
    if not size:  # of none, none: as of any batch
        return state
    if state.inner > 1:
        return NoRule("a part of rows and places")
    return state._replace(axis=(*state.axis, (start, end, step)))


def _concatenated(call: AtenCall, results: Sequence[Tensor]) -> State:
    parts = list(zip(call.tensors, call.states, strict=True))
    dim = call.values["dim"] % results[0].dim()
    if any(isinstance(s, Total) for _, s in parts):
        whole = all(s is None or isinstance(s, Total) for _, s in parts)
        return TOTAL if whole else _coupled(f"{call.name} of a sum over the batch with rows")
    parts = [(t, s) for t, s in parts if call.name == "stack" or t.dim() == results[0].dim()]  # cat skips (0,)
    rows = [(t, s) for t, s in parts if isinstance(s, ByRow)]
    if not rows or any(not (s is None or isinstance(s, ByRow)) for _, s in parts):
        return NoRule(call.name)
    state = rows[0][1]
    if call.name == "stack" or dim != state.dim:
        if any(s != state for _, s in rows) or len({t.shape[state.dim] for t, _ in parts}) > 1:
            return NoRule(call.name)
        return state._replace(dim=state.dim + (call.name == "stack" and dim <= state.dim))
    state = state._replace(axis=unstacked(state.axis))
    sizes = {t.shape[dim] // (_views(s.axis) or 1) for t, s in rows}  # of one view
    one = sizes.pop()
    if sizes or any(s._replace(axis=unstacked(s.axis)) != state for _, s in rows):
        return NoRule(call.name)
    if any(t.shape[dim] % one if one else t.shape[dim] for t, _ in parts):
        return NoRule(call.name)
    return state._replace(axis=_stacked(state.axis, results[0].shape[dim] // one)) if one else state


# -- lookups ---------------------------------------------------------------------------------------------------------


def _gathered(call: AtenCall, results: Sequence[Tensor]) -> State:
    """gather, scatter: what is read or written of a row is told by an index of the same row."""
    rank = call.values["self"].dim()
    dim = call.values["dim"] % rank if rank else 0
    of_self, of_index = call.state_of(call.values["self"]), call.state_of(call.values["index"])
    if call.name == "gather" and of_self is None:
        return of_index if isinstance(of_index, ByRow) else NoRule(call.name)
    state = joined(call.name, list(zip(call.tensors, call.states, strict=True)), rank)
    if isinstance(state, ByRow) and state.dim == dim:
        return _coupled(call.name)
    return state


def _looked_up(call: AtenCall, results: Sequence[Tensor]) -> State:
    """A table and indices: rows of a public table, one or more for each place."""
    table, index = call.tensors[0], call.values["indices" if call.name == "embedding" else "index"]
    of_table, of_index = call.states[0], call.state_of(index)
    dim = call.values.get("dim", 0) % table.dim()
    if of_table is None and isinstance(of_index, ByRow):
        return of_index._replace(dim=of_index.dim + dim)
    if isinstance(of_table, ByRow) and of_index is None and dim != of_table.dim:
        return of_table._replace(dim=of_table.dim + (results[0].dim() - table.dim()) * (dim < of_table.dim))
    return _coupled(call.name)


def _indexed(call: AtenCall, results: Sequence[Tensor]) -> State:
    """x[..] with tensors: masks, or labels of rows beside 0, 1, .. for the rows themselves."""
    x, state = call.tensors[0], call.states[0]
    indices = call.values["indices"]
    given = [(i, t, call.state_of(t)) for i, t in enumerate(indices) if t is not None]
    if any(t.dtype in (torch.bool, torch.uint8) for _, t, _ in given):
        if isinstance(state, ByRow) and len(given) == 1 and given[0][0] == 0 == state.dim:
            _, mask, of_mask = given[0]
            if of_mask is None and mask.dim() == 1 and state.inner == 1:
                return _taken(state, mask.nonzero().flatten().tolist(), len(x))
            return Picked(state.axis) if of_mask in (None, state) else _coupled("a mask of other rows")
        return NoRule("a mask")
    adjacent = [i for i, _, _ in given] == list(range(given[0][0], given[0][0] + len(given)))
    if state is None:
        whole = joined("index", [(t, s) for _, t, s in given], max(t.dim() for _, t, _ in given))
        first = given[0][0] if adjacent else 0
        return whole._replace(dim=whole.dim + first) if isinstance(whole, ByRow) else whole
    if not isinstance(state, ByRow) or not adjacent:
        return NoRule("index")
    at_rows = [t for i, t, _ in given if i == state.dim]
    if not at_rows:
        constant = all(s is None for _, _, s in given)
        moved = (max(t.dim() for _, t, _ in given) - len(given)) * (given[0][0] < state.dim)
        return state._replace(dim=state.dim + moved) if constant else _coupled("index by the labels of other rows")
    if given[0][0] != state.dim or state.inner != 1 or call.state_of(at_rows[0]) is not None:
        return _coupled("index along the batch")
    size = x.shape[state.dim]
    taken = at_rows[0].flatten().tolist()  # a public constant: its numbers are no one's
    if taken != list(range(size)):
        alone = len(given) == 1 and at_rows[0].dim() == 1
        return _taken(state, taken, size) if alone else _coupled("index along the batch")
    along = [d for d, size in enumerate(at_rows[0].shape) if size == len(taken)]
    if not along:  # rows side by side
        return NoRule("index along the batch")
    as_rows = state._replace(dim=along[0])
    beside = [(t, as_rows if t is at_rows[0] else s) for _, t, s in given]
    whole = joined("index", beside, max(t.dim() for _, t, _ in given))
    return whole._replace(dim=whole.dim + state.dim) if isinstance(whole, ByRow) else whole


def _taken(state: ByRow, rows: list[int], size: int) -> ByRow:
    """These rows of what has so many, in this order."""
    rows = [r % size for r in rows] if size else rows
    if rows and rows == list(range(rows[0], rows[-1] + 1)):
        whole = state if len(rows) == size else _whole_views(state, rows[0], rows[-1] + 1, 1, size)
        return whole or state._replace(axis=(*state.axis, (rows[0], rows[-1] + 1, 1)))
    return state._replace(axis=(*state.axis, ("index", *rows))) if rows or size else state


def repeats_rows(state: ByRow) -> bool:
    """Whether a row of the batch may stand in several places."""
    return any(kind == "stack" or (kind == "index" and len(set(rows)) < len(rows)) for kind, *rows in state.axis[1:])


def _mask_selected(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Numbers that a mask of the same rows chose."""
    state = joined(call.name, list(zip(call.tensors, call.states, strict=True)), max(t.dim() for t in call.tensors))
    return Picked(state.axis) if isinstance(state, ByRow) else state


def _goes_to_its_rows(call: AtenCall, state: ByRow) -> bool:
    """Whether x[k] = numbers puts into each row what is of this row, as x[k] = f(x[k]) does with a constant k."""
    x, numbers, (k, *more) = call.values["self"], call.values["values"], call.values["indices"]
    own = call.state_of(numbers)
    if more or not isinstance(own, ByRow) or call.state_of(k) is not None or k.dim() != 1 or state[1:] != (0, 1):
        return False
    rows = (k.nonzero().flatten() if k.dtype in (torch.bool, torch.uint8) else k).tolist()
    row_by_row = own[1:] == (0, 1) and numbers.dim() == x.dim()
    return own.axis == _taken(state, rows, len(x)).axis and (row_by_row or len(rows) == 1)


def _written_at(call: AtenCall, results: Sequence[Tensor]) -> State:
    """x[..] = number: public numbers at public places, or one number where a mask of the same rows says so."""
    state, numbers, indices = call.state_of(call.values["self"]), call.values["values"], call.values["indices"]
    of_indices = [call.state_of(t) for t in indices if t is not None]
    if not isinstance(state, ByRow):
        return NoRule("index_put")
    others = [s for s in (call.state_of(numbers), *of_indices) if s is not None]
    if not others:
        return state
    if _goes_to_its_rows(call, state):
        return state
    if any(not isinstance(s, ByRow) or s.axis != state.axis for s in others):
        return _coupled("numbers written into rows of others, or where others say: write torch.where(mask, new, x)")
    by_mask = state.dim == 0 and len(indices) == 1 and of_indices == [state] and indices[0].dtype is torch.bool
    return state if by_mask and others == [state] and numbers.numel() == 1 else NoRule("index_put")


def _padded(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Padding of the last dimensions by a number, two settings for each."""
    return _behind(len(call.values["pad"]) // 2)(call, results)


# -- products --------------------------------------------------------------------------------------------------------

_PRODUCTS = {
    "mm": "ik,kj->ij", "addmm": "ik,kj->ij", "bmm": "bik,bkj->bij", "baddbmm": "bik,bkj->bij", "mv": "ik,k->i",
    "addmv": "ik,k->i", "dot": "k,k->", "vdot": "k,k->", "_cdist_forward": "ik,jk->ij",
}  # fmt: skip


def _product(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Sums of products: rows may be kept, or summed over; two rows of different examples must not meet."""
    spec = _PRODUCTS[call.name]
    added = call.name.startswith(("add", "badd"))
    if call.name == "_cdist_forward":
        ranks = {t.dim() for t in call.tensors}
        if len(ranks) > 1 or max(ranks) > 3:
            return NoRule(call.name)
        spec = "bik,bjk->bij" if ranks == {3} else spec
    inputs, output = spec.split("->")
    pair = list(zip(inputs.split(","), call.tensors[added:], call.states[added:], strict=False))
    states = [s for _, _, s in pair if s is not None]
    if any(isinstance(s, (Total, Picked)) for s in states):
        linear = len(states) == 1 and isinstance(states[0], Total) and "cdist" not in call.name
        product: State = TOTAL if linear else _coupled(f"{call.name} of a sum over the batch")
    elif not states:
        product = None
    else:
        letters = {(names[s.dim], s.axis, s.inner) for names, _, s in pair if isinstance(s, ByRow)}
        ((letter, axis, inner),) = letters if len(letters) == 1 else {("", (), 0)}
        if letter and letter in output:
            product = ByRow(axis, output.index(letter), inner)
        elif letter and "cdist" not in call.name:
            product = TOTAL
        else:
            product = _coupled(call.name)
    if not added or isinstance(product, Coupled):
        return product
    return joined("add", [(call.tensors[0], call.states[0]), (results[0], product)], results[0].dim())


def _convolved(call: AtenCall, results: Sequence[Tensor]) -> State:
    state = call.states[0]
    if isinstance(state, ByRow) and state.dim == 0 and all(s is None for s in call.states[1:]):
        return state
    return NoRule(call.name) if not isinstance(state, ByRow) else _coupled(call.name)


def _normalised(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Batch, layer and group normalisation."""
    state = call.states[0]
    if not isinstance(state, ByRow) or any(s is not None for s in call.states[1:]):
        return NoRule(call.name)
    if "batch_norm" in call.name:
        training = call.values.get("training", call.values.get("train", "no_training" not in call.name))
        if training:  # statistics of each channel over everything else; a channel may be of one row
            return NoRule(call.name) if state.dim == 1 else _coupled("batch normalisation")
        return state
    if call.name == "native_layer_norm":
        below = call.tensors[0].dim() - len(call.values["normalized_shape"])
        return state if state.dim < below else _coupled("layer normalisation")
    alone = state.dim == 0 and call.values["N"] == call.tensors[0].shape[0]
    return state if alone else _coupled("group normalisation")


# -- losses ----------------------------------------------------------------------------------------------------------


def _reduced_loss(state: State, reduction: int) -> State:
    """Reduction 0: none, 1: the mean, 2: the sum."""
    return state if reduction == 0 or not isinstance(state, ByRow) else TOTAL


def _loss(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Number by number, then joined."""
    state = joined(call.name, list(zip(call.tensors, call.states, strict=True)), max(t.dim() for t in call.tensors))
    if isinstance(state, Picked) and call.values["reduction"] == 1:
        return _MASKED_MEAN
    return _reduced_loss(state, call.values["reduction"])


def _class_loss(call: AtenCall, results: Sequence[Tensor]) -> State:
    """Rows of scores with rows of labels, and a weight for each class."""
    scores, labels = call.states[0], call.state_of(call.values["target"])
    weight, reduction = call.values.get("weight"), call.values["reduction"]
    if isinstance(scores, Picked) or isinstance(labels, Picked):
        return _MASKED_MEAN if reduction == 1 else NoRule(call.name)
    if (weight is not None and call.state_of(weight) is not None) or any(isinstance(s, Total) for s in call.states):
        return _coupled(call.name)
    if isinstance(scores, ByRow) and isinstance(labels, ByRow) and scores != labels:
        return _coupled(call.name)
    if call.tensors[0].dim() < 2:  # of one example: rows in the place of its classes
        return _coupled(call.name)
    state = scores if isinstance(scores, ByRow) else labels
    if not isinstance(state, ByRow) or state.dim != 0:
        return NoRule(call.name)
    if call.name.startswith("nll_loss") and reduction == 1:
        return NoRule("a mean over labels")
    return _reduced_loss(state, reduction)


def _ctc(call: AtenCall, results: Sequence[Tensor]) -> State:
    scores, labels = call.states[0], call.values["targets"]
    of_labels = call.state_of(labels)
    if not isinstance(scores, ByRow) or scores.dim != 1 or labels.dim() != 2:
        return NoRule("ctc_loss of labels one behind the other")
    row = scores._replace(dim=0)
    fits = all(s in (None, row) for s in (of_labels, *call.states[2:]))
    return row if fits else _coupled("ctc_loss")


def _coupling(call: AtenCall, results: Sequence[Tensor]) -> State:
    return _coupled(call.name)


def _same(call: AtenCall, results: Sequence[Tensor]) -> State:
    return call.states[0]


_POOLS = (
    ("max_pool", "_with_indices"), ("adaptive_max_pool", ""), ("avg_pool", ""), ("adaptive_avg_pool", ""),
    ("_adaptive_avg_pool", ""),
)  # fmt: skip
"""Names of pools over the last dimensions, before and behind their number."""

_CONSTANT = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "new_zeros",
    "new_ones", "new_full", "new_empty", "zero", "new_empty_strided",
}  # fmt: skip

_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "logsumexp", "norm", "var", "std",
         "linalg_vector_norm", "any", "all", "median", "nanmedian", "count_nonzero", "var_mean", "std_mean", "aminmax",
         "nansum", "mode", "kthvalue"), _reduced),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort",
         "topk", "flip", "roll"), _along),
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten"), _moved(_view)),
    "permute": _moved(_permuted),
    **dict.fromkeys(("t", "transpose"), _moved(_transposed)),
    "unsqueeze": _moved(_unsqueezed), "squeeze": _moved(_squeezed), "expand": _moved(_expanded),
    "repeat": _moved(_repeated), "select": _moved(_selected), "slice": _moved(_sliced),
    "diagonal": _diagonal,
    **dict.fromkeys(("split", "split_with_sizes", "unbind"), _split),
    **dict.fromkeys(("cat", "stack"), _concatenated),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), _gathered),
    **dict.fromkeys(("embedding", "index_select"), _looked_up), "index": _indexed,
    "masked_select": _mask_selected, "index_put": _written_at,
    **dict.fromkeys(_PRODUCTS, _product), "convolution": _convolved,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
         "native_layer_norm", "native_group_norm"), _normalised),
    **dict.fromkeys(
        ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
         "binary_cross_entropy_with_logits"), _loss),
    **dict.fromkeys(
        ("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward"), _class_loss),
    "_ctc_loss": _ctc,
    **dict.fromkeys(
        ("linalg_cholesky_ex", "cholesky", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex",
         "_linalg_eigh", "_linalg_svd", "tril", "triu", "linalg_solve_triangular",
         "_scaled_dot_product_flash_attention_for_cpu"), _behind(2)),
    **{f"{name}{d}d{end}": _behind(d) for d in (1, 2, 3) for name, end in _POOLS}, "constant_pad_nd": _padded,
    **dict.fromkeys(("bincount", "histc", "_unique2", "unique_dim", "_pdist_forward", "trace"), _coupling),
    **dict.fromkeys(
        ("clone", "_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "contiguous"), _same),
    **dict.fromkeys(
        ("fill", "copy", "masked_fill", "where", "frexp", "_prelu_kernel", "bernoulli", "log_sigmoid_forward"),
        _pointwise),
}  # fmt: skip


# -- a function as it runs -------------------------------------------------------------------------------------------


class Interpreter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries states through everything that runs inside.

    Tensors are known as objects, and by the memory that they show: autograd puts other objects around some. What has
    no state is a public constant.

    Attributes:
        looked: whether a number of the batch was read into Python.
        read: what such numbers were of.
        exact: whether a rule looked at the numbers of a constant, so that what was found is of this call alone.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states: dict[Any, tuple[Tensor, State]] = {}
        self.looked = self.exact = False
        self.read: set[State] = set()

    def put(self, tensor: Tensor, state: State) -> None:
        """Say what a tensor is."""
        for key in (id(tensor), _memory(tensor)):
            if key is not None:
                self._states[key] = tensor, state

    def state(self, tensor: Tensor, otherwise: State = None) -> State:
        """What a tensor is; `otherwise`, where nothing made it here."""
        for key in (id(tensor), _memory(tensor)):
            if key is not None and key in self._states:
                return self._states[key][1]
        return otherwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = AtenCall(func, args, kwargs, self.state)
        result = func(*args, **kwargs)
        self.follow(call, result)
        return result

    def follow(self, call: AtenCall, result: Any) -> None:
        """Put down what the results of a call are."""
        if call.name == "_local_scalar_dense":
            self.read.add(call.states[0])
            self.looked = self.looked or call.states[0] is not None
            self.exact = True  # the number decides, a row perhaps (`x[i]`)
            return
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if not results:
            self.looked = self.looked or any(s is not None for s in call.states)
            self.read.update(call.states)
            return
        at_constant = call.name == "index" or (call.name == "index_put" and call.state_of(call.values["values"]))
        self.exact = self.exact or bool(at_constant and any(s is not None for s in call.states))
        made = result_states(call, results)
        if call.in_place:
            self._write(call.tensors[0], made[0])
        else:
            for tensor, state in zip(results, made, strict=True):
                self.put(tensor, state)

    def _write(self, written: Tensor, state: State) -> None:
        """A tensor was written: what shares its memory is known no longer, unless it is still what it was."""
        if self.state(written) == state and keeps_memory(state):
            return
        start, own = written.untyped_storage().data_ptr(), _memory(written)
        for key, (tensor, before) in list(self._states.items()):
            if tensor.untyped_storage().data_ptr() == start:
                same = isinstance(state, Coupled) or _memory(tensor) == own
                through: State = NoRule("what was written in place through a view")
                if isinstance(state, Total) and isinstance(before, ByRow):
                    through = Coupled(
                        "has rows into which numbers of other rows were written: they are of all of these"
                    )
                self._states[key] = tensor, state if same else through
        self.put(written, state)


def keeps_memory(state: State) -> bool:
    """Whether what else shows the memory of a tensor of this state is as it was, after it is written and is so again.

    Each row's places are still of that row. A total may be one row of what it is a view of, and of all rows now.
    """
    return state is None or isinstance(state, ByRow)


def _memory(tensor: Tensor) -> Any:
    """The numbers that a tensor shows; None where there are none, or no memory to tell it by."""
    if private.is_wrapped(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
