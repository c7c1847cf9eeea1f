"""NumericSparse as printed: its noise, its scan, and the verdicts."""

import math

import numpy as np
import pytest
from reproductions import numeric_sparse
from reproductions.numeric_sparse import CHOSEN, CLIP, DELTA, EPSILON


class Scripted:
    """Laplace noise of zeros, with what scales were asked for."""

    def __init__(self):
        self.scales = []

    def laplace(self, scale, size=None):
        self.scales.append(scale)
        return 0.0 if size is None else np.zeros(size)


def test_every_verdict_holds():
    findings = list(numeric_sparse.run(quick=True))
    assert [finding.holds for finding in findings].count(True) >= 12
    assert not [finding.name for finding in findings if finding.holds is False]


def test_scales_are_the_printed_ones():
    """s = 0.1, c1 = 100, eps = 16, delta = 1.25e-7: 1.516 and 28.8, and alpha of Lemma 4."""
    assert numeric_sparse.sigma(0.95 * EPSILON, DELTA, CHOSEN, CLIP) == pytest.approx(1.5159, rel=1e-4)
    assert numeric_sparse.sigma(0.05 * EPSILON, DELTA, CHOSEN, CLIP) == pytest.approx(28.802, rel=1e-4)
    exact = 20 * 0.1 * math.log(1e5 * 400 / 0.01) * math.sqrt(100 * math.log(1.6e7)) / 16
    assert numeric_sparse.printed_alpha(100_000, 100, 16.0, 1.25e-7, 0.1, 0.01) == pytest.approx(exact)


def test_without_noise_the_scan_takes_the_first_coordinates_above_the_bar_and_halts():
    u, rng = np.array([0.0, 3.0, -4.0, 1.0, 5.0, 9.0]), Scripted()
    scan = numeric_sparse.numeric_sparse(u, 2.0, 3, 1.0, 0.01, 1.0, rng)
    assert scan.found.tolist() == [0, 3, -4, 0, 5, 0]
    assert (scan.seen, scan.hits) == (5, 3)
    bar, query, output = (
        numeric_sparse.sigma(e, 0.01, 3, 1.0) * factor for e, factor in ((0.95, 1), (0.95, 2), (0.05, 2))
    )
    assert rng.scales == pytest.approx([query, *[bar, output] * 3])
    few = numeric_sparse.numeric_sparse(u, 8.0, 3, 1.0, 0.01, 1.0, Scripted())
    assert (few.found.tolist(), few.seen, few.hits) == ([0, 0, 0, 0, 0, 9], 6, 1)


def test_the_scan_depends_on_the_order():
    """The same coordinates, reversed: others are chosen. A selector by sets could not do that."""
    u = np.arange(1.0, 7.0)
    ahead = numeric_sparse.numeric_sparse(u, 0.5, 2, 1.0, 0.01, 1.0, Scripted()).found
    back = numeric_sparse.numeric_sparse(u[::-1], 0.5, 2, 1.0, 0.01, 1.0, Scripted()).found[::-1]
    assert not set(np.flatnonzero(ahead)) & set(np.flatnonzero(back))


def test_an_output_misses_alpha_as_often_as_the_laplace_law_says():
    """One coordinate: exp(-alpha / (2 sigma(eps2)))."""
    alpha = numeric_sparse.printed_alpha(10, 1, EPSILON, DELTA, CLIP, 0.1)
    expected = math.exp(-alpha / (2 * numeric_sparse.sigma(0.05 * EPSILON, DELTA, 1, CLIP)))
    off = numeric_sparse.lemmas_hold(10, 1, 0.1, 3000, np.random.default_rng(5))[1]
    assert off == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 3000))
