"""C diag(s)^-1: X' = D^-1 X D^-1, from whatever the structure of C gives."""

from math import inf, nextafter

import numpy as np
from numpy.typing import NDArray

from anyorder.patterns import Listed, Pattern
from anyorder.sensitivity import banded, blt, dense, toeplitz
from anyorder.sensitivity.bound import Bound, from_sum, roots
from anyorder.sensitivity.visits import UnitSquares, Visits, largest, visits
from anyorder.strategy import BLT, Banded, Independent, Rescaled, Strategy, Toeplitz, ToeplitzBanded

__all__ = ["bound", "units"]

Floats = NDArray[np.float64]


def bound(strategy: Rescaled, pattern: Pattern) -> Bound:
    """The sensitivity of C diag(s)^-1.

    Banded C stays banded. For Toeplitz C, listed patterns go unit by unit, all others by X itself, for n up to
    4096; beyond, sens(C) / min(s) is an upper bound, since u_t / s_t is no longer than 1 / min(s).
    """
    inner, weights = _flat(strategy)
    gram = _banded(inner, weights)
    if gram is not None:
        return banded.gram_bound(gram, pattern)
    if pattern.max_participations == 1:
        norms = strategy.column_norms_squared()
        if isinstance(pattern, Listed):
            norms = norms[pattern.steps]  # a step may be empty
        return from_sum(float(norms.max()), _terms(strategy, pattern), exact=True)
    if isinstance(pattern, Listed) and isinstance(inner, Toeplitz):
        return largest(_unit_squares(inner, weights, visits(pattern)), _terms(strategy, pattern))
    if isinstance(inner, Toeplitz):
        if strategy.n > toeplitz.MAX_GRAM:
            whole = blt.bound(inner, pattern) if type(inner) is BLT else toeplitz.bound(inner, pattern)
            return Bound(nextafter(whole.value * float(weights.max()), inf), exact=False)
        X = toeplitz.gram_matrix(inner.toeplitz_coefficients()) * weights * weights[:, None]
        return dense.gram_bound(X, pattern, terms=strategy.n)
    return dense.bound(strategy, pattern)


def units(strategy: Rescaled, listed: Listed) -> Floats:
    """Of each unit: sum |X'| over its steps squared."""
    inner, weights = _flat(strategy)
    gram = _banded(inner, weights)
    if gram is not None:
        return roots(banded.unit_squares(gram, visits(listed)).upper, _terms(strategy, listed))
    if isinstance(inner, Toeplitz):
        return roots(_unit_squares(inner, weights, visits(listed)).upper, _terms(strategy, listed))
    return dense.units(strategy, listed)


def _flat(strategy: Rescaled) -> tuple[Strategy, Floats]:
    """The strategy inside, and 1 / scales, also where scales are nested."""
    inner: Strategy = strategy
    weights = np.ones(strategy.n)
    while type(inner) is Rescaled:
        weights, inner = weights / inner.scales, inner.strategy
    return inner, weights


def _banded(inner: Strategy, weights: Floats) -> banded.Gram | None:
    """X' if it is banded."""
    if type(inner) is Independent:
        return banded.Gram(inner.n, 1, lambda gaps, steps: weights[steps] ** 2)
    if not (type(inner) is Banded or type(inner) is ToeplitzBanded):
        return None
    gram = banded.gram_of(inner)
    return banded.Gram(
        gram.n, gram.num_bands, lambda gaps, steps: gram.entry(gaps, steps) * weights[steps] * weights[steps + gaps]
    )


def _unit_squares(inner: Toeplitz, weights: Floats, units: Visits) -> UnitSquares:
    if type(inner) is BLT and blt.is_positive(inner):
        return blt.unit_squares(inner, units, weights)
    return toeplitz.unit_squares(inner.toeplitz_coefficients(), units, weights)


def _terms(strategy: Strategy, pattern: Pattern) -> int:
    return strategy.n + pattern.max_participations
