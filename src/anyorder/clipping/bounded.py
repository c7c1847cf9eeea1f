"""Sums of the clipped vectors of whole units, from vectors that are already there, all at once or in chunks."""

from collections.abc import Iterable
from fractions import Fraction
from math import frexp
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyorder import checks
from anyorder.clipping.norms import Cut, accumulator_dtype, cleared, round_down, sums_of
from anyorder.errors import ArgumentError, NonFiniteError
from anyorder.ledger import as_units, numbered

BLOCK = 2**19  # numbers
NON_FINITE = frozenset({"zero", "refuse"})


class ClippedSum:
    """Adds per-example gradients up to units, clips each unit once, and adds the units up.

    The norm of every clipped unit is at most clip_norm in exact arithmetic: squares are added in float64, the
    factor is rounded down, and no product goes through a matrix unit of reduced precision. Between chunks it holds
    the sum and one unclipped unit.

    On a grid, each clipped unit v becomes the integers trunc(v / grid), and these are summed in int64, exactly: a
    unit changes the sum by its own integers and nothing else. Truncation raises no coordinate, so the norm stays
    below clip_norm / grid; it is computed again in integers, and a unit that is above it all the same counts as 0.

    Args:
        parameters: shapes, devices and dtypes of the gradients, by name.
        clip_norm: L2 bound on a unit's gradient.
        scale: what the gradients are multiplied by before they are clipped.
        grid: None for sums of floats; a power of two from 2^-100 to 2^100 and from clip_norm / 2^31 to clip_norm for
            sums of integers, in grid steps.
        cut: how norms become factors; `Flat` at a fixed norm if None, and on a grid.
        any_order: make sums of floats the same, bit for bit, in whatever order and chunks the units come: each clipped
            unit is truncated to multiples of `step_of(clip_norm)`, about clip_norm / 2^31, which are added exactly, up
            to 2^22 units. Truncation raises no coordinate. The sums are float64.

    Attributes:
        bad: how many units have a gradient whose norm is NaN or infinite; they add exactly zero.
        units: how many units there are.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        *,
        clip_norm: float,
        scale: float,
        grid: float | None = None,
        cut: Cut | None = None,
        any_order: bool = False,
    ) -> None:
        self._scale = scale
        self._step = step_of(clip_norm) if any_order and grid is None else None
        self._cut = Cut.of(None) if cut is None else cut
        self._grid = grid
        self._largest_square = 0 if grid is None else int((Fraction(clip_norm) / Fraction(grid)) ** 2)
        self._dtypes = {name: accumulator_dtype(p) for name, p in parameters.items()}
        self._sum = {
            name: torch.zeros(p.numel(), dtype=self._sum_dtype(name), device=p.device) for name, p in parameters.items()
        }
        # Just under clip_norm, so that the rounding of each product (eps / 2) and of the norm cannot carry a unit over.
        slack = max(1e-12, *(4 * torch.finfo(dtype).eps for dtype in self._dtypes.values()))
        self._clip_norm = clip_norm * (1 - slack)
        nobody = torch.zeros(0, dtype=torch.float64, device=next(iter(parameters.values())).device)
        self._further = self._sums_of_further(dict.fromkeys(self._cut.counted, nobody))
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._open: dict[str, Tensor] = {}
        self.units, self.bad = 0, 0

    def _sum_dtype(self, name: str) -> torch.dtype:
        if self._grid is not None:
            return torch.int64
        return self._dtypes[name] if self._step is None else torch.float64

    def add(self, gradients: dict[str, Tensor], units: Tensor, *, complete: bool) -> None:
        """Add a chunk of c examples, sorted by unit.

        Args:
            gradients: {name: (c, *shape)}; not written.
            units: (c,) int64 on the CPU, 0, .., u - 1 in order. A unit that the chunk before left open is unit 0.
            complete: whether the last unit has no examples in later chunks.
        """
        count = int(units[-1]) + 1
        rows = {name: self._by_unit(name, gradients[name], units, count) for name in self._sum}
        self._open = {} if complete else {name: row[-1].clone() for name, row in rows.items()}
        self._clip_and_add(rows if complete else {name: row[:-1] for name, row in rows.items()})

    def finish(self) -> dict[str, Tensor]:
        """The sum over units, {name: (*shape)}, and those of the schedule's own; int64 on a grid."""
        return {name: total.view(self._shapes[name]) for name, total in self._sum.items()} | self._further

    def _by_unit(self, name: str, gradient: Tensor, units: Tensor, count: int) -> Tensor:
        """(count, size) sums over the examples of a unit, with what the open unit has so far."""
        total = self._sum[name]
        flat = gradient.reshape(len(gradient), total.numel()).to(self._dtypes[name])
        if count == len(units) and not self._open:
            return flat
        result = flat.new_zeros(count, total.numel()).index_add_(0, units.to(flat.device), flat)
        if self._open:
            result[0] += self._open[name]
        return result

    def _clip_and_add(self, rows: dict[str, Tensor]) -> None:
        """Clip every unit, rows {name: (u, size)}, to clip_norm over all names jointly; add to the sum."""
        first = next(iter(rows.values()))
        if not len(first):
            return
        squares = {}
        for name, row in rows.items():
            norms = [torch.linalg.vector_norm(row[block], dim=1, dtype=torch.float64) for block in _blocks(row)]
            squares[name] = (self._scale * torch.cat(norms)).square().to(first.device)
        self.units += len(first)
        finite = torch.stack(list(squares.values())).sum(0).isfinite()
        if not finite.all():  # a factor of 0 would leave NaN
            self.bad += int((~finite).sum())
            rows = {name: cleared(row, ~finite.to(row.device)) for name, row in rows.items()}
            squares = {name: square.where(finite, 0.0) for name, square in squares.items()}
        factors, further = self._cut.apply(squares, self._clip_norm)
        factors = {name: self._scale * factor for name, factor in factors.items()}
        if self._grid is not None:
            within = self._within(rows, factors)
            factors = {name: torch.where(within, factor, 0.0) for name, factor in factors.items()}
        for name, row in rows.items():
            for block in _blocks(row):
                clipped = self._clipped(row[block], factors[name][block])
                self._sum[name] += _truncated_sum(clipped, self._step)
        for name, total in self._sums_of_further(further).items():
            self._further[name] += total

    def _sums_of_further(self, coordinates: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums over units of the schedule's own coordinates."""
        if self._step is None:
            return sums_of(coordinates, self._dtypes)
        return {name: _truncated_sum(values, self._step) for name, values in coordinates.items()}

    def _clipped(self, row: Tensor, factors: Tensor) -> Tensor:
        """The units times their factors; integers on a grid."""
        # Elementwise: a matrix product may run in TF32 or bfloat16, and so leave a unit over the bound.
        clipped = row * round_down(factors, row.dtype).to(row.device)[:, None]
        return clipped if self._grid is None else (clipped * (1 / self._grid)).trunc().to(torch.int64)

    def _within(self, rows: dict[str, Tensor], factors: dict[str, Tensor]) -> Tensor:
        """Which units' integers have a squared norm of at most (clip_norm / grid)^2, in exact arithmetic."""
        first = next(iter(factors.values()))
        squares = torch.zeros(len(first), dtype=torch.int64, device=first.device)
        for name, row in rows.items():
            for block in _blocks(row):
                squares[block] += self._clipped(row[block], factors[name][block]).square().sum(1).to(squares.device)
        return squares <= self._largest_square


def check_finite(bad: int, units: int) -> None:
    """Raise NonFiniteError if any unit, of `units`, is bad: what `non_finite="refuse"` asks for."""
    if bad:
        raise NonFiniteError(
            f'the gradients of {bad} of {units} units are NaN or infinite, and non_finite="refuse" asks for finite '
            "ones. No gradient was released, but this message tells of the data, and no noise covers it: check inputs "
            'and loss, lower the learning rate, or train in float32; with non_finite="zero" such units add zero'
        )


def step_of(clip_norm: float) -> float:
    """The power of two from clip_norm / 2^31 to below twice that, of which sums in any order are multiples.

    Raises: ArgumentError for a clip norm so far from 1 that float32 has no room around it.
    """
    if not 2.0**-60 <= clip_norm <= 2.0**60:
        raise ArgumentError(f"sums in any order need a clip norm from 2^-60 to 2^60, got {clip_norm}")
    mantissa, exponent = frexp(clip_norm)
    return float(2.0 ** (exponent - 31 - (mantissa == 0.5)))


def _truncated_sum(rows: Tensor, step: float | None) -> Tensor:
    """The sum of the rows in multiples of step, in float64, exact of few enough of them; None: as they are."""
    if step is None:
        return rows.sum(0)
    multiples = rows.detach().double().mul_(1 / step)
    if multiples.device.type != "cpu":
        return multiples.trunc_().sum(0).mul_(step)
    np.trunc(multiples.numpy(), out=multiples.numpy())  # in an eighth of torch's time
    return multiples.sum(0).mul_(step)


def _blocks(rows: Tensor) -> list[slice]:
    """Slices of the rows, such that what is computed from one of them stays small."""
    size = max(1, BLOCK // max(1, rows.shape[1]))
    return [slice(i, i + size) for i in range(0, len(rows), size)]


def bounded_sum(vectors: Any, units: Iterable[Any], clip_norm: float, *, grid: float | None = None) -> Any:
    """The sum over units of each unit's vector, clipped to L2 norm clip_norm: a sum for `Release.step`.

        sum over units u of  g_u min(1, clip_norm / ||g_u||),    g_u = sum of the rows of u

    Args:
        vectors: (m, *shape), a NumPy array or torch tensor of floats; not written.
        units: (m,) the unit of each row, integers or strings.
        clip_norm: `release.clip_norm`.
        grid: `plan.grid`, for a plan with exact integers.
    Returns: (*shape), float64 for float64 vectors, else float32; on a grid int64, in grid steps.
    Guarantee: a unit changes the result by a vector of norm at most clip_norm, whatever its rows are: one whose sum is
        NaN or infinite adds exactly zero, and nothing tells of it. Factors are rounded down.
    Cost: O(m d) time; memory of one further copy of the vectors.
    Raises: ArgumentError for other shapes or types.

    Example:
        >>> ao.bounded_sum(np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 0.0]]), ["a", "b", "c"], clip_norm=1.0).round(6)
        array([0.9, 1.2])
    """
    clip_norm = checks.positive("clip_norm", clip_norm)
    ids = as_units(units)
    if not isinstance(vectors, Tensor) and not (isinstance(vectors, np.ndarray) and vectors.dtype.kind == "f"):
        raise ArgumentError(f"vectors must be a NumPy array or torch tensor of floats, got {type(vectors).__name__}")
    rows = vectors.detach() if isinstance(vectors, Tensor) else torch.from_numpy(np.array(vectors, order="C"))
    if not rows.is_floating_point() or rows.dim() < 2 or len(rows) != len(ids):
        raise ArgumentError(
            f"vectors must be floats of shape (m, ..), one row for each of the {len(ids)} units named, got "
            f"{vectors.dtype} of shape {tuple(vectors.shape)}"
        )
    groups = numbered(ids)
    order = np.argsort(groups, kind="stable")
    one = torch.empty(rows.shape[1:], dtype=rows.dtype, device=rows.device)
    total = ClippedSum({"": one}, clip_norm=clip_norm, scale=1.0, grid=grid)
    if len(rows):
        by_unit = torch.from_numpy(groups[order].astype(np.int64))
        total.add({"": rows[torch.from_numpy(order).to(rows.device)]}, by_unit, complete=True)
    result = total.finish()[""]
    return result if isinstance(vectors, Tensor) else result.numpy()
