"""Remez exchange: the polynomial of given powers with the least weighted maximum error."""

import numpy as np


def minimax(target, weight, powers, low, high):
    """Coefficients and error of min over c of max over x of weight(x) |target(x) - sum c_p x^p|."""
    m = len(powers)
    grid = np.linspace(low, high, 100_001)
    values, weights = target(grid), weight(grid)
    at = np.round((1 - np.cos(np.pi * (np.arange(m + 1) + 0.5) / (m + 1))) / 2 * (len(grid) - 1)).astype(int)
    for _ in range(20):
        x = grid[at]
        system = np.stack([x**p for p in powers] + [(-1.0) ** np.arange(m + 1) / weights[at]], axis=1)
        c = np.linalg.solve(system, values[at])[:m]
        error = weights * (values - evaluate(c, powers, grid))
        pieces = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        extrema = np.array([piece[np.abs(error[piece]).argmax()] for piece in pieces])
        if len(extrema) > m + 1:  # a change of sign by rounding where the weight vanishes
            extrema = np.sort(extrema[np.argsort(-np.abs(error[extrema]))[: m + 1]])
        if len(extrema) < m + 1 or np.ptp(np.abs(error[extrema])) < 1e-4 * np.abs(error).max():
            break
        at = extrema
    return c, np.abs(error).max()


def evaluate(c, powers, x):
    return sum(float(coefficient) * x**p for coefficient, p in zip(c, powers, strict=True))
