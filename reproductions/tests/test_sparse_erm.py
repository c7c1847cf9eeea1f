"""Private ERM with sparse gradients, as printed: its formulas, the data that it asks for, and the verdicts."""

import math

import numpy as np
import pytest
from reproductions import sparse_erm

from anyorder.accounting import gdp_mu


def test_every_verdict_holds():
    findings = list(sparse_erm.run(quick=True))
    assert [finding.holds for finding in findings].count(True) >= 7
    assert not [finding.name for finding in findings if finding.holds is False]


def test_the_settings_are_the_printed_ones_and_m_cancels_in_alpha():
    own = sparse_erm.settings(1000, 50, 5, 10, 25, 2.0, 1e-5)
    assert own.epsilon == pytest.approx(2.0 * 10 / (2 * math.sqrt(50 * math.log(2e5))))
    assert own.delta == pytest.approx(1e-5 * 10 / 50)
    assert own.s == 2 * 10 / 1000
    root = math.sqrt(50 * math.log(2e5)) * math.sqrt(5 * math.log(2 / own.delta))
    assert own.alpha == pytest.approx(80 * math.log(50 * 4 * 5 * 1000) * root / (1000 * 2.0))


def test_the_gradient_is_that_of_the_loss_and_each_record_moves_it_by_less_than_claimed():
    rng = np.random.default_rng(0)
    data = sparse_erm.make(200, 40, 4, rng)
    w, direction = rng.standard_normal(40), rng.standard_normal(40)
    slope = (sparse_erm.loss(data, w + 1e-6 * direction) - sparse_erm.loss(data, w - 1e-6 * direction)) / 2e-6
    assert sparse_erm.gradient(data, w) @ direction == pytest.approx(slope, rel=1e-6)
    each = data.x * (1 / (1 + np.exp(-data.x @ w)) - data.y)[:, None]
    assert np.linalg.norm(each, axis=1).max() < math.sqrt(sparse_erm.ONES)
    assert np.abs(each).max() < sparse_erm.C2


def test_a_group_touches_its_own_block_alone():
    data = sparse_erm.make(120, 60, 3, np.random.default_rng(1))
    for i in range(3):
        touched = np.flatnonzero(data.group(i).x.any(axis=0))
        assert touched.min() >= 20 * i
        assert touched.max() < 20 * (i + 1)
    assert (np.count_nonzero(data.x, axis=1) == sparse_erm.ONES).all()


def test_the_gaussian_beside_it_has_noise_for_the_claim():
    """Data without any signal: w is a sum of T noises, each eta times the printed std."""
    data = sparse_erm.Data(np.zeros((1000, 2000)), np.zeros(1000), 10)
    w = sparse_erm.gaussian(data, 16, 2.0, 0.5, np.random.default_rng(2))
    std = 2 * math.sqrt(10) / 1000 * math.sqrt(16) / gdp_mu(2.0, 1e-5)
    assert w.std() == pytest.approx(0.5 * std * math.sqrt(16), rel=0.06)


def test_the_amplification_that_holds_is_more_than_the_printed_one():
    """One step of one group of many: log(1 + (e^eps - 1) / m) m / eps is 1.72 at eps = 1."""
    assert sparse_erm.by_its_lemmas(1.0, 100, 100) == pytest.approx(0.893, abs=1e-3)
    assert math.log1p(math.expm1(1.0) / 1e6) * 1e6 == pytest.approx(1.718, abs=1e-3)
