"""Norms of every unit's gradient from what its layers saw, and the weighted sum that follows them.

The per-example gradient of a linear map is sum_t g_t (x) a_t. Its norm needs no gradient [Goodfellow 2015; Li et al.
2022, section 4; Bu et al. 2023]:

    || sum_t g_t (x) a_t ||^2  =  sum_{s,t} <a_s, a_t> <g_s, g_t>,      which is |a|^2 |g|^2 for one position,

at T^2 (in + out) multiplications in the place of T in out. Whichever is cheaper is taken for each parameter.

Rounding. u is the unit roundoff, S = sum_t |a_t| |g_t|. A dot product of n numbers, in whatever order, is off by at
most n u |x| |y| (1 + O(n u)) [Higham 2002, eq. 3.5], so that the double sum is off by at most (in + out) u S^2 (1 +
O(u)) however much its terms cancel; S comes from the diagonals. Products over long vectors are cut into pieces of
PIECE and these are added in float64, so that n <= PIECE. A gradient that is made and dropped is off by (T + 2) u S in
norm. Each norm here is the computed one plus such a bound, times SPARE for the terms of higher order; a weight
times a or g, rounded, moves a unit by at most u S more. So a weighted sum holds, in exact arithmetic, at most the norm
that is stated, times the weight, of each unit. Where the gradients themselves are kept and summed, nothing is to add.

Underflow. The product of g and a weight, and that of the result and a, is off by up to d more, the smallest normal
number (2^-126 in float32), whether or not what is below it is kept. So rows of g are off by d sqrt(out), the unit by

    d T sqrt(in out) (max|a| + 1),

and likewise with g for a where a is weighted. In float32 with max|a| <= LARGE = 2^30 this is, over all parameters,
below 2^-24 clip_norm for every clip_norm >= 2^-71 (sum over parameters of T sqrt(in out)), 1e-11 for a sum of 2^34.
That is within what clip_norm is lowered by before factors are taken, 2^-21 clip_norm. (`Adaptive` cuts at 2^-37 or
more.) With a larger a the sum is made in float64, whose d is 2^-1022: it takes the a of a model in float64, above
2^800, to see that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod

import torch
from torch import Tensor

from anyorder.clipping.arithmetic import BLOCK, cleared, squares_of, sum_of
from anyorder.clipping.batch import UnitMap
from anyorder.clipping.uses import ConvolutionUse, DirectUse, EmbeddingUse, FactoredUse, LinearUse, Use

__all__ = ["RowsRead", "Settled", "Weights", "settle"]

PIECE = 512  # numbers in a dot product that runs in the accumulator's precision
SPARE = 1.01  # for the terms of higher order in u
LOOSE = 1.01  # ratio of a squared norm's bound to what was computed, above which it is computed in float64
EXAMPLES = 16  # whose gradients are made at a time where a convolution makes them
STORE_BYTES = 2**26  # of a parameter's per-unit gradients that may be kept


@dataclass(frozen=True)
class Weights:
    """What the gradients are multiplied by in their sum.

    Attributes:
        by_unit: (U,).
        by_example: (B,), that of each example's unit.
        left_out: None, or which units (U,) and which examples (B,), bool, add exactly zero whatever is held of them:
            a weight of 0 would leave NaN.
    """

    by_unit: Tensor
    by_example: Tensor
    left_out: tuple[Tensor, Tensor] | None = None

    def sum_of_units(self, rows: Tensor) -> Tensor:
        """The weighted sum (n,) of the units' rows (U, n). No term is above what the weights bound it to."""
        return self.by_unit @ (rows if self.left_out is None else cleared(rows, self.left_out[0]))

    def add_rows(self, rows: Tensor, owner: Tensor, ids: Tensor, to: Tensor) -> Tensor:
        """`to` (V, n), plus rows (K, n) of the units `owner` (K,) times their weights, at `ids` (K,)."""
        rows = rows if self.left_out is None else cleared(rows, self.left_out[0][owner])
        return to.index_add_(0, ids, rows * self.by_unit.index_select(0, owner).unsqueeze(1))

    def sum_of_uses(self, uses: Sequence[Use]) -> Tensor:
        """The weighted sum (*shape) of the examples' gradients by all uses."""
        uses = uses if self.left_out is None else [use.without(self.left_out[1]) for use in uses]
        result = sum_of([use.weighted_sum(self.by_example) for use in uses])
        if result.dtype == torch.float64 or isfinite(float(result.sum())):
            return result
        # All terms are finite, and so is what each unit adds; but a weight times one factor of a term may be too
        # large for float32, and so may terms that cancel.
        wide = [replace(use, dtype=torch.float64) for use in uses]  # type: ignore[type-var]
        return sum_of([use.weighted_sum(self.by_example.double()) for use in wide]).to(result.dtype)


@dataclass(frozen=True)
class RowsRead:
    """Which units read which rows of a table: K pairs, of R rows.

    Attributes:
        owner: (K,) the unit.
        place: (K,) the row, as its place in `distinct`; the units of a row ascend.
        distinct: (R,) the rows, ascending.
    """

    owner: Tensor
    place: Tensor
    distinct: Tensor


@dataclass(frozen=True)
class Settled:
    """A parameter whose per-unit norms are known.

    Attributes:
        squares: (U,) float64, not below the squared norm of what a unit adds to `total` with weights of 1.
        total: the weighted sum, (*shape).
        kept: (U, *shape), the units' gradients, where they are kept.
        rows: of a table whose sum is sparse, which units read which rows.
    """

    squares: Tensor
    total: Callable[[Weights], Tensor]
    kept: Tensor | None = None
    rows: RowsRead | None = None

    @classmethod
    def keep(cls, gradients: Tensor, squares: Tensor | None = None) -> "Settled":
        """From the units' gradients themselves, (U, *shape), and their squared norms if known."""
        flat = gradients.reshape(len(gradients), -1)
        squares = squares_of(flat) if squares is None else squares
        return cls(squares, lambda weights: weights.sum_of_units(flat).view(gradients.shape[1:]), gradients)


def settle(uses: Sequence[Use], units: UnitMap) -> Settled:
    """Norms and sum of the gradient that all uses of one parameter have together."""
    direct = [use for use in uses if isinstance(use, DirectUse)]
    if len(direct) == len(uses):
        return Settled.keep(sum_of([units.sum(use.values.to(use.dtype)) for use in direct]))
    factored = [use for use in uses if isinstance(use, FactoredUse)]
    tables = [use for use in uses if isinstance(use, EmbeddingUse)]
    if len(factored) == len(uses):
        return _settle_factored(factored, units)
    if len(tables) == len(uses):
        return _settle_tables(tables, units)
    linear = [use for use in factored if isinstance(use, LinearUse)]
    if len(linear) + len(tables) == len(uses) and _gram_is_cheaper(linear, units):
        return _settle_tied(linear, tables, units)
    return _settle_any(uses, units)


# -- linear maps -----------------------------------------------------------------------------------------------------


def _settle_factored(uses: Sequence[FactoredUse], units: UnitMap) -> Settled:
    first = uses[0]
    alone = len(uses) == 1 and units.classes is None and _keeping_is_cheaper(uses, units)
    if alone and isinstance(first, ConvolutionUse) and first.compiled:
        return _made_by_library(first)
    if alone and first.grouped:
        return Settled.keep(_all_gradients(first))
    if isinstance(first, LinearUse) and len(uses) == first.positions == units.largest == 1:
        a, g = (squares_of(t.flatten(1).to(first.dtype)) for t in (first.activations, first.output_gradients))
        return Settled(a * g, lambda weights: weights.sum_of_uses([first]))
    T, size = units.largest * sum(use.positions for use in uses), first.groups * first.inputs * first.outputs
    keep = _keeping_is_cheaper(uses, units)
    gram = not keep and _gram_is_cheaper(uses, units)
    squares = torch.zeros(units.count, dtype=torch.float64, device=units.index.device)
    kept = torch.empty(units.count, size, dtype=first.dtype, device=units.index.device) if keep else None
    per_unit = T * first.groups * (first.inputs + first.outputs) if first.unfolds or units.classes else 2 * T * T
    moved = (max(use.terms for use in uses) + len(uses) + 4) * torch.finfo(first.dtype).eps / 2
    block = units.count if T == 1 else max(1, BLOCK // max(per_unit, 0 if gram or keep else size))
    for rows, members in units.blocks(block):
        a, g = _joined(uses, members)
        if T == 1:
            squares[rows] = (squares_of(a.flatten(0, 2)) * squares_of(g.flatten(0, 2))).view(len(a), -1).sum(1)
        elif gram:
            squares[rows] = _gram_squares(a, g, moved)
        else:
            made = kept[rows] if kept is not None and isinstance(rows, slice) else a.new_empty(len(a), size)
            torch.bmm(g.flatten(0, 1).mT, a.flatten(0, 1), out=made.view(-1, first.outputs, first.inputs))
            if kept is None:
                squares[rows] = _made_squares(made, a, g, moved)
            elif not isinstance(rows, slice):
                kept[rows] = made
    if kept is None:
        return Settled(squares, lambda weights: weights.sum_of_uses(uses))
    split = (-1, first.groups, first.outputs, first.inputs)
    return Settled(
        squares_of(kept),
        lambda weights: first.shaped(weights.sum_of_units(kept).view(split))[0],
        first.shaped(kept.view(split)),
    )


def _made_by_library(use: ConvolutionUse) -> Settled:
    made, squares = use.normed_gradients()
    flat, shape = made.flatten(1), made.shape[1:]
    return Settled(
        squares,
        lambda weights: weights.sum_of_units(flat).view(shape).permute(3, 2, 0, 1),
        made.permute(0, 4, 3, 1, 2),
    )


def _all_gradients(use: FactoredUse) -> Tensor:
    """(B, *shape), made a few at a time."""
    first = use.gradients(slice(EXAMPLES))
    result = first.new_empty(use.batch, *use.shape)
    result[:EXAMPLES] = first
    for i in range(EXAMPLES, use.batch, EXAMPLES):
        result[i : i + EXAMPLES] = use.gradients(slice(i, i + EXAMPLES))
    return result


def _joined(uses: Sequence[FactoredUse], members: slice | Tensor) -> tuple[Tensor, Tensor]:
    """(u, G, T, in) and (u, G, T, out) of some units: all uses, and all examples of a unit, one after the other."""
    pairs = [_factors(use, members) for use in uses]
    a, g = ([pair[i] for pair in pairs] for i in (0, 1))
    return (torch.cat(a, 2), torch.cat(g, 2)) if len(uses) > 1 else (a[0], g[0])


def _factors(use: FactoredUse, members: slice | Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(members, slice):
        return use.factors(members)
    a, g = (_by_member(t, members).transpose(1, 2).flatten(2, 3) for t in use.factors(members.clamp(min=0).flatten()))
    return a, g


def _by_member(values: Tensor, members: Tensor) -> Tensor:
    """(u, m, ...) of (u m, ...), with zeros where a unit has fewer than m examples."""
    values = values.view(*members.shape, *values.shape[1:])
    return values.masked_fill((members < 0).view(*members.shape, *(1 for _ in values.shape[2:])), 0)


def _costs(uses: Sequence[FactoredUse], units: UnitMap) -> tuple[float, float, float]:
    """Multiplications for one unit and group: by Gram matrices; by gradients that are kept; that are dropped.

    A number costs about 20 multiplications for each time that it passes through memory, and 2 through the cache; what
    is not kept is made again for the sum.
    """
    T, n, m = units.largest * sum(use.positions for use in uses), uses[0].inputs, uses[0].outputs
    passes = 40.0 if units.count * uses[0].groups * n * m > BLOCK else 4.0
    again = T * n * m + (20.0 * T * n if uses[0].unfolds else 0.0)
    return 1.5 * T * T * (n + m) + again, T * n * m + passes * n * m, T * n * m + 20.0 * n * m + again


def _keeping_is_cheaper(uses: Sequence[FactoredUse], units: UnitMap) -> bool:
    first = uses[0]
    if units.largest * sum(use.positions for use in uses) == 1:
        return False
    gram, keep, drop = _costs(uses, units)
    nbytes = units.count * first.groups * first.inputs * first.outputs * first.dtype.itemsize
    # What is kept takes the place of the uses, which are held no longer.
    return keep <= min(gram, drop) and nbytes <= max(STORE_BYTES, 1.25 * sum(use.nbytes for use in uses))


def _gram_is_cheaper(uses: Sequence[FactoredUse], units: UnitMap) -> bool:
    gram, _, drop = _costs(uses, units)
    return gram <= drop


def _gram_squares(a: Tensor, g: Tensor, moved: float) -> Tensor:
    """(u,) upper bounds of the squared norms of sum_t g_t (x) a_t, by Gram matrices; a (u, G, T, in), g likewise.

    Where terms cancel so far that float32 tells little, they are computed again in float64.
    """
    info = torch.finfo(a.dtype)
    u = info.eps / 2
    most = PIECE if a.dtype == torch.float32 else max(a.shape[-1], g.shape[-1])
    n = min(most, a.shape[-1]) + min(most, g.shape[-1]) + 8
    gram_a, gram_g = _gram(a), _gram(g)
    squares = (gram_a * gram_g).sum((1, 2, 3), dtype=torch.float64)
    lengths = [
        (gram.diagonal(dim1=-2, dim2=-1).double() + n * info.tiny).clamp(min=0).sqrt() for gram in (gram_a, gram_g)
    ]
    S = (lengths[0] * lengths[1]).sum((1, 2))
    underflow = n * info.tiny * sum(length.sum(2).square().sum(1) for length in lengths)
    # The products of two Gram matrices may underflow too.
    underflow = underflow + gram_a[0].numel() * info.tiny
    own = squares.clamp(min=0) + SPARE * n * u * S.square() + underflow
    bound = (own.sqrt() + SPARE * moved * S).square()
    if a.dtype == torch.float64:
        return bound
    loose = (~(own <= LOOSE * squares) | ~bound.isfinite()).nonzero()[:, 0]
    if len(loose):
        bound[loose] = _gram_squares(a[loose].double(), g[loose].double(), moved)
    return bound


def _gram(x: Tensor) -> Tensor:
    """(u, G, T, T) of (u, G, T, n), pieces of n added in float64."""
    n = x.shape[-1]
    if n <= PIECE or x.dtype == torch.float64:
        return x @ x.mT
    result = torch.zeros(*x.shape[:-1], x.shape[-2], dtype=torch.float64, device=x.device)
    for i in range(0, n, PIECE):
        piece = x[..., i : i + PIECE]
        result += piece @ piece.mT
    return result


def _made_squares(gradients: Tensor, a: Tensor, g: Tensor, moved: float) -> Tensor:
    """(u,) upper bounds of the squared norms of gradients (u, n) that were made from a and g and are made again."""
    lengths = squares_of(a.flatten(0, 2)) * squares_of(g.flatten(0, 2))
    S = lengths.view(*a.shape[:3]).sqrt().sum((1, 2))
    u = torch.finfo(a.dtype).eps / 2
    return (squares_of(gradients).sqrt() + SPARE * ((a.shape[2] + 4) * u + moved) * S).square()


# -- tables ----------------------------------------------------------------------------------------------------------


def _settle_tables(uses: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """A unit's gradient has the rows that its examples read: those are added up and kept, (K, D) for all units."""
    rows, ids, owner = _table_rows(uses, units)
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device).index_add_(0, owner, squares_of(rows))
    shape = uses[0].shape

    return Settled(squares, lambda weights: weights.add_rows(rows, owner, ids, to=rows.new_zeros(shape)))


def _table_rows(uses: Sequence[EmbeddingUse], units: UnitMap) -> tuple[Tensor, Tensor, Tensor]:
    """(K, D) the nonzero rows of all units' gradients, (K,) which rows of the table, (K,) of which unit."""
    size = uses[0].size
    keys = torch.cat([(units.index[:, None] * size + use.ids).flatten() for use in uses])
    g = torch.cat([use.output_gradients.to(use.dtype).flatten(0, 1) for use in uses])
    found, place = torch.unique(keys, return_inverse=True)
    rows = g if len(found) == len(keys) else g.new_zeros(len(found), g.shape[1]).index_add_(0, place, g)
    if len(found) == len(keys):
        found = keys
    return rows, found % size, found // size


def _settle_tied(linear: Sequence[LinearUse], tables: Sequence[EmbeddingUse], units: UnitMap) -> Settled:
    """One matrix read as a table and applied as a linear map, as in language models with tied embeddings.

        || L + E ||^2 = ||L||^2 + ||E||^2 + 2 <L, E>,    <L, E> = sum_{s,t} g_s[id_t] <a_s, e_t>,

    with e_t what came back to the row read at t. No (unit, V, D) tensor is made.
    """
    rows, ids, owner = _table_rows(tables, units)
    V, D = tables[0].shape
    squares = torch.zeros(units.count, dtype=torch.float64, device=rows.device)
    table_squares = squares.index_add(0, owner, squares_of(rows))
    u = torch.finfo(rows.dtype).eps / 2
    T = units.largest * sum(use.positions for use in linear)
    reads = units.largest * sum(use.ids.shape[1] for use in tables)
    moved = (max(use.terms for use in linear) + len(linear) + reads + 4) * u
    for block, members in units.blocks(max(1, BLOCK // (T * (V + D + reads) + reads * D))):
        a, g = (t.squeeze(1) for t in _joined(linear, members))
        at, e = (torch.cat(parts, 1) for parts in zip(*(_read(use, members) for use in tables), strict=True))
        cross = (a @ e.mT) * g.gather(2, at[:, None, :].expand(-1, a.shape[1], -1))
        both = 2 * cross.sum((1, 2), dtype=torch.float64)
        a_, g_ = a.unsqueeze(1), g.unsqueeze(1)
        S = (squares_of(a.flatten(0, 1)) * squares_of(g.flatten(0, 1))).sqrt().view(len(a), -1).sum(1)
        S = S + squares_of(e.flatten(0, 1)).sqrt().view(len(e), -1).sum(1)
        own = squares_of(a[:, 0]) * squares_of(g[:, 0]) if T == 1 else _gram_squares(a_, g_, 0.0)
        bound = (own + table_squares[block] + both).clamp(min=0) + SPARE * (D + reads + 8) * u * S.square()
        squares[block] = (bound.sqrt() + SPARE * moved * S).square()

    return Settled(squares, lambda weights: weights.add_rows(rows, owner, ids, to=weights.sum_of_uses(linear)))


def _read(use: EmbeddingUse, members: slice | Tensor) -> tuple[Tensor, Tensor]:
    """Ids (u, T) and what came back to them (u, T, D), a unit's examples one after the other."""
    if isinstance(members, slice):
        return use.ids[members], use.output_gradients[members].to(use.dtype)
    flat = members.clamp(min=0).flatten()
    ids, g = (_by_member(t[flat], members).flatten(1, 2) for t in (use.ids, use.output_gradients.to(use.dtype)))
    return ids, g


# -- anything --------------------------------------------------------------------------------------------------------


def _settle_any(uses: Sequence[Use], units: UnitMap) -> Settled:
    """Uses of several kinds: every unit's gradient is made, a few units at a time; kept if all fit."""
    shape = uses[0].shape
    size = max(1, prod(shape))
    device, dtype = units.index.device, uses[0].dtype
    keep = units.count * size * dtype.itemsize <= STORE_BYTES
    kept = torch.empty(units.count, size, dtype=dtype, device=device) if keep else None
    squares = torch.zeros(units.count, dtype=torch.float64, device=device)
    for rows, members in units.blocks(max(1, BLOCK // (size * units.largest))):
        gradients = sum_of([_unit_gradients(use, members) for use in uses]).flatten(1)
        if kept is not None:
            kept[rows] = gradients
            squares[rows] = squares_of(gradients)
        else:
            squares[rows] = (squares_of(gradients).sqrt() + sum_of([_slack(use, members) for use in uses])).square()
    if kept is None:
        return Settled(squares, lambda weights: weights.sum_of_uses(uses))
    return Settled.keep(kept.view(-1, *shape), squares)


def _unit_gradients(use: Use, members: slice | Tensor) -> Tensor:
    if isinstance(members, slice):
        return use.gradients(members)
    return _by_member(use.gradients(members.clamp(min=0).flatten()), members).sum(1)


def _slack(use: Use, members: slice | Tensor) -> Tensor:
    """(u,) bounds of what rounding may hide of a use's part of the norm."""
    if isinstance(members, slice):
        lengths = use.lengths(members)
    else:
        lengths = _by_member(use.lengths(members.clamp(min=0).flatten()), members).flatten(1)
    terms = use.terms if isinstance(use, FactoredUse) else 0
    return (lengths.shape[1] + terms + 8) * torch.finfo(use.dtype).eps * lengths.sum(1)
