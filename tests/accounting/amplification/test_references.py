"""Secret sampling against what jax_privacy and dp-accounting print, every scheme that they have."""

import math

import numpy as np
import pytest

from accounting.amplification import oracle
from anyorder.accounting import Sampled
from anyorder.accounting.amplification.exact import _truncated, _truncated_steps, cyclic_parts, pld_delta, pld_epsilon
from anyorder.accounting.poisson import sampled_gaussian
from anyorder.participation import BallsInBins, CyclicPoisson, MinSeparationSampling, TruncatedPoisson
from anyorder.strategy import Independent, ToeplitzBanded
from references import load

REFERENCES = {entry["id"]: entry for entry in load("jax_privacy.json")["values"]}


def unit_columns(bands, n):
    """A banded C all of whose full columns have norm 1."""
    return ToeplitzBanded(np.full(bands, 1 / math.sqrt(bands)), n=n) if bands > 1 else Independent(n)


# (sigma, n, bands = cycle, q, delta)
CYCLIC = {
    "bandmf_cyclic_eps_b4": (2.0, 1024, 4, 4 / 128, 1e-6),
    "bandmf_cyclic_eps_b16": (2.0, 1024, 16, 16 / 128, 1e-6),
    "bandmf_cyclic_eps_n2000_b1": (1.5, 2000, 1, 0.01, 1e-5),
    "bandmf_cyclic_eps_n2000_b10": (2.0, 2000, 10, 0.1, 1e-5),
    "bandmf_cyclic_eps_n2000_b50": (3.0, 2000, 50, 0.5, 1e-5),
    "bandmf_cyclic_eps_n2000_b100": (4.0, 2000, 100, 1.0, 1e-5),
}


@pytest.mark.parametrize("name", CYCLIC)
def test_cyclic_poisson(name):
    sigma, n, bands, q, delta = CYCLIC[name]
    parts = cyclic_parts(unit_columns(bands, n), CyclicPoisson(n, bands, q), sigma)
    assert Sampled(*parts).epsilon(delta) == pytest.approx(REFERENCES[name]["value"], rel=1e-3)


# (sigma, n, cycle, q, batch size, group size, delta)
TRUNCATED = {
    "truncated_poisson_eps_pld": (1.0, 500, 1, 0.01, 120, 10000, 1e-6),
    "truncated_poisson_eps_pld_loose": (1.0, 500, 1, 0.01, 200, 10000, 1e-6),
    "bandmf_truncated_eps": (2.0, 1024, 16, 0.125, 100, 625, 1e-6),
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_truncated_poisson(name):
    sigma, n, cycle, q, most, size, delta = TRUNCATED[name]
    rule = TruncatedPoisson(n, q, most, size * cycle, cycle)
    found = pld_epsilon(unit_columns(cycle, n), rule, sigma, delta)
    assert found == pytest.approx(REFERENCES[name]["value"], rel=1e-3)


def test_dp_accounting_on_two_small_truncated_samples():
    # three steps with 4 units and two with 3, each by our loss distribution: what its own test asserts, 17.904330
    parts = [_truncated(1.0, 0.5, steps, 2, size) for steps, size in ((3, 4), (2, 3))]
    assert parts[0].compose(parts[1]).get_epsilon_for_delta(1e-6) == pytest.approx(17.904330, rel=1e-3)


@pytest.mark.parametrize("sigma", [2.0, 4.0])
def test_balls_in_bins_by_their_samples(sigma):
    entry = REFERENCES[f"bnb_delta_dpsgd_nm{sigma}_eps1"]["value"]
    found = pld_delta(Independent(100), BallsInBins(10, 10), sigma, 1.0)
    worst = max(("remove", "add"), key=lambda side: entry[side]["delta"])
    assert found == pytest.approx(entry[worst]["delta"], abs=4 * entry[worst]["stderr"])


def root(count):
    """The first coefficients of (1 - x)^(-1/2)."""
    return np.cumprod([1.0, *((2 * i - 1) / (2 * i) for i in range(1, count))])


SMALL = {
    "bnb_delta_root3_n8_b4_nm1.0_eps1": (root(3), BallsInBins(2, 4), 1.0, 1.0),
    "bnb_delta_root8_n8_b4_nm2.0_eps0.5": (root(8), BallsInBins(2, 4), 2.0, 0.5),
    "bminsep_delta_warm_p0.5_n8_b3_nm1.0_eps1": (root(3), MinSeparationSampling(8, 3, 0.5), 1.0, 1.0),
    "bminsep_delta_cold_p0.5_n8_b3_nm1.0_eps1": (root(3), MinSeparationSampling(8, 3, 0.5, False), 1.0, 1.0),
    "bminsep_delta_warm_p0.5_n8_b1_nm2.0_eps1": (root(1), MinSeparationSampling(8, 1, 0.5), 2.0, 1.0),
    "bminsep_delta_cold_p0.5_n8_b1_nm2.0_eps1": (root(1), MinSeparationSampling(8, 1, 0.5, False), 2.0, 1.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_brute_force_by_their_samples(name):
    coefficients, rule, sigma, epsilon = SMALL[name]
    matrix = np.array(
        [[coefficients[t - s] if 0 <= t - s < len(coefficients) else 0.0 for s in range(8)] for t in range(8)]
    )
    found, entry = oracle.scheme_deltas(matrix, rule, sigma, epsilon, step=0.5), REFERENCES[name]["value"]
    for side in ("remove", "add"):
        assert getattr(found, side) == pytest.approx(entry[side]["delta"], abs=4.5 * entry[side]["stderr"] + 1e-6)


def test_truncated_steps_are_those_of_dp_accounting():
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    from dp_accounting.privacy_accountant import NeighboringRelation

    for sigma, q, steps, batch_size, size in [(1.3, 0.33, 6, 25, 60), (0.5, 0.1, 3, 17, 80), (0.7, 1.0, 6, 5, 60)]:
        theirs = pld.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=size, sampling_probability=q, truncated_batch_size=batch_size, noise_multiplier=sigma,
            value_discretization_interval=4e-3, neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
        ).self_compose(steps)  # fmt: skip
        ours = _truncated_steps(pld, sigma, q, steps, batch_size, size, 4e-3)
        assert ours.get_epsilon_for_delta(1e-5) == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=1e-9)
    never_cut = [_truncated_steps(pld, 1.3, 0.33, 6, batch_size, 60, 4e-3) for batch_size in (60, 61)]
    plain = sampled_gaussian(pld, 1.3, 0.33, 4e-3).self_compose(6).get_epsilon_for_delta(1e-5)
    assert [one.get_epsilon_for_delta(1e-5) for one in never_cut] == [plain, plain]
