"""Functions of positive definite matrices, block by block: arrays (blocks, length, length), one block a pattern."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["TINY", "constant_diagonal", "function", "log", "log_gram", "profile", "proportional"]

Floats = NDArray[np.float64]

TINY = 1e-300


def proportional(B: Floats) -> Floats:
    """The rows of each block of L: the directions of B's, norm^2 = the block's share of sum v = 1."""
    norms = np.linalg.norm(B, axis=2)
    return np.asarray(B / norms[:, :, None] * norms.sum(axis=1)[:, None, None])


def log_gram(B: Floats) -> Floats:
    """log(L L^T) for L = `proportional`(B)."""
    norms = np.linalg.norm(B, axis=2)
    N = B / norms[:, :, None]
    scale = 2 * np.log(norms.sum(axis=1))
    return np.asarray(function(log, N @ N.transpose(0, 2, 1)) + scale[:, None, None] * np.eye(B.shape[1]))


def log(x: Floats) -> Floats:
    """The logarithm; of what is not above `TINY`, its."""
    return np.asarray(np.log(np.maximum(x, TINY)))


def function(f: Callable[[Floats], Floats], blocks: Floats) -> Floats:
    """F of symmetric blocks, through their eigenvalues."""
    if blocks.shape[1] == 1:
        return f(np.maximum(blocks, TINY)) if f is not np.exp else np.exp(blocks)
    values, Q = np.linalg.eigh(blocks)
    if f is not np.exp:
        values = np.maximum(values, 1e-14 * values[:, -1:])
    return np.asarray((Q * f(values)[:, None, :]) @ Q.transpose(0, 2, 1))


def constant_diagonal(logs: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """V = exp(logs) scaled on both sides to a constant diagonal: log V, V^1/2, V^-1/2, the diagonal."""
    V = function(np.exp, logs)
    d = np.sqrt(np.einsum("gii->gi", V))
    nu = np.square(d.mean(axis=1))
    V = V / (d[:, :, None] * d[:, None, :]) * nu[:, None, None]
    return function(log, V), function(np.sqrt, V), function(lambda x: 1 / np.sqrt(x), V), nu


def profile(X: Floats) -> Floats:
    """Root of the diagonal of each block over its trace."""
    diagonal = np.einsum("gii->gi", X)
    return np.asarray(np.sqrt(diagonal / diagonal.sum(axis=1, keepdims=True)))
