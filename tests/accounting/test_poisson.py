"""Poisson-sampled DP-SGD: references, an independent integral, the float error of the transform, arguments."""

import importlib
import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from anyorder import checks
from anyorder.accounting import gdp_epsilon, poisson
from anyorder.accounting.poisson import calibrate_poisson, poisson_epsilon, replaced_gaussian, sampled_gaussian
from anyorder.errors import ArgumentError, MissingDependencyError
from references import load

# (sigma, q, steps, delta), as named in the references
REFERENCES = {
    "poisson_eps_pld_s3.0_T512_q0.1": (3.0, 0.1, 512, 1e-6),
    "poisson_eps_pld_s1.0_T1000_q0.01": (1.0, 0.01, 1000, 1e-5),
    "bandmf_cyclic_eps_b4": (2.0, 4 / 128, 1024 // 4, 1e-6),  # cyclic Poisson: a group is met every 4 steps
    "bandmf_cyclic_eps_b16": (2.0, 16 / 128, 1024 // 16, 1e-6),
}


def reference(name):
    values = load("jax_privacy.json")["values"]
    return next(entry["value"] for entry in values if entry["id"] == name)


@pytest.mark.parametrize("name", REFERENCES)
def test_epsilon_of_the_reference(name):
    assert poisson_epsilon(*REFERENCES[name]) == pytest.approx(reference(name), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("poisson_eps_rdp_s3.0_T512_q0.1", (3.0, 0.1, 512, 1e-6)),
        ("poisson_eps_rdp_s1.0_T1000_q0.01", (1.0, 0.01, 1000, 1e-5)),
        ("poisson_eps_rdp_s0.8_T2000_q0.004", (0.8, 0.004, 2000, 1e-6)),
    ],
)
def test_renyi_is_never_below(name, arguments):
    assert 0.7 * reference(name) < poisson_epsilon(*arguments) < reference(name)


def test_calibration_of_the_reference():
    sigma = calibrate_poisson(1.0, 1e-6, 0.125, 64)
    assert sigma == pytest.approx(reference("bandmf_nm_e1_b16"), rel=1e-4)


def test_what_an_assumed_sampling_hides():
    # three epochs at sigma 1, batches of a twentieth: Rényi accounting of the sampling prints 3.368, an independent
    # numerical one 2.8569; read in an order that is not sampled, the same noise gives 8.39
    assert poisson_epsilon(1.0, 0.05, 60, 1e-5) == pytest.approx(2.8569, abs=1e-3)
    assert gdp_epsilon(math.sqrt(3), 1e-5) == pytest.approx(8.3854, abs=1e-3)


@pytest.mark.parametrize(
    ("parts", "delta"),
    [
        ([(0.35, 0.001, 300)], 1e-6),
        ([(0.185, 5.2e-5, 1), (0.728, 0.0046, 600)], 3.9e-4),  # one step whose losses are far beyond all others
    ],
)
def test_grids_of_far_losses_are_coarse_and_lose_next_to_nothing(parts, delta):
    interval = poisson._grid_interval(parts)
    assert 1.5e-4 < interval <= 1e-3
    found = poisson.mixed_epsilon(tuple(parts), delta)
    assert found == pytest.approx(poisson.mixed_epsilon(tuple(parts), delta, 1e-4 / interval), rel=1e-4)
    assert poisson._grid_interval([(1.0, 0.01, 1000)]) == 1e-4  # where points are few enough


def two_step_delta(sigma, q, epsilon):
    """delta(epsilon) of two steps when a unit is removed: E over the first output of the second's delta, by quadrature.

    P = (1-q) N(0, sigma^2) + q N(1, sigma^2) against Q = N(0, sigma^2), loss L = ln dP/dQ; the other direction is
    smaller at the epsilons asked for.
    """

    def one_step(remaining):
        level = np.expm1(remaining) + q  # P >= e^remaining Q where q e^((2x - 1) / (2 sigma^2)) >= level
        if level <= 0:
            return -np.expm1(remaining)
        x = sigma**2 * np.log(level / q) + 0.5
        return q * norm.sf((x - 1) / sigma) - level * norm.sf(x / sigma)

    def integrand(x):
        density = (1 - q) * norm.pdf(x, scale=sigma) + q * norm.pdf(x, loc=1, scale=sigma)
        return density * one_step(epsilon - np.log1p(q * np.expm1((2 * x - 1) / (2 * sigma**2))))

    kink = 0.5 + sigma**2 * math.log1p(math.expm1(epsilon - math.log1p(-q)) / q)  # where the first loss is enough
    ends = (-12 * sigma, 0.0, 1.0, 3 * sigma, kink, kink + 12 * sigma)
    parts = [quad(integrand, a, b, epsabs=0, epsrel=1e-9, limit=200)[0] for a, b in itertools.pairwise(ends)]
    return sum(parts)


@pytest.mark.parametrize(("sigma", "q", "delta"), [(1.0, 0.1, 1e-5), (0.7, 0.3, 1e-3), (2.0, 0.5, 1e-6)])
def test_two_steps_by_quadrature(sigma, q, delta):
    epsilon = poisson_epsilon(sigma, q, 2, delta)
    assert two_step_delta(sigma, q, epsilon) <= delta <= two_step_delta(sigma, q, epsilon * (1 - 1e-3))


@pytest.mark.parametrize(
    ("mu", "steps", "delta"),
    [(3.0, 10, 1e-11), (1.0, 1000, 1e-10), (1.0, 10_000, 1e-10), (1.0, 10_000, 1e-11), (10.0, 100_000, 1e-10)],
)
def test_float_error_of_the_transform_is_covered(mu, steps, delta):
    # dp-accounting alone is below the truth at these, by up to 2 %
    assert poisson_epsilon(math.sqrt(steps) / mu, 1.0, steps, delta) >= gdp_epsilon(mu, delta) * (1 - 1e-14)


def test_what_transforms_may_lose_is_counted_against_the_claim(monkeypatch):
    asked = []

    class Losses:
        def get_epsilon_for_delta(self, delta):
            asked.append(delta)
            return 1.0

        def get_delta_for_epsilon(self, _):
            return 1e-7

    monkeypatch.setattr(poisson, "_losses", lambda *_: Losses())
    lost = (4 + 16 * 3) * 2.0**-53
    parts = (1.0, 0.1, 3), (2.0, 1.0, 1)
    assert (
        1.0 < poisson.mixed_epsilon.__wrapped__(parts, 1e-5) <= 1.0 + 1e-9
    )  # up, for the rounding of the losses themselves
    assert asked[0] <= 1e-5 - lost
    assert poisson.mixed_delta(parts, 1.0) >= 1e-7 + lost


def test_where_the_transform_cannot_tell_the_unamplified_epsilon_stands():
    assert poisson_epsilon(2.0, 0.01, 1000, 1e-14) == gdp_epsilon(math.sqrt(1000) / 2, 1e-14)
    unsampled = gdp_epsilon(math.sqrt(10) * 1e4, 1e-5)
    assert poisson_epsilon(1e-4, 0.5, 10, 1e-5) == pytest.approx(unsampled, rel=1e-12)
    assert poisson_epsilon(1e-200, 0.5, 10, 1e-5) == math.inf
    assert poisson_epsilon(1e200, 0.5, 10, 1e-5) == 0.0


def test_a_grid_finer_than_the_loss_of_rare_units():
    # one step's loss deviates by 1e-4; the usual grid of 1e-4 gives 0.002152, 9 % above what grids of 1e-6 tend to
    assert poisson_epsilon(10.0, 0.001, 100, 1e-5) == pytest.approx(0.0019673, rel=2e-3)


def test_falls_with_noise_and_rises_with_sampling_and_steps():
    base = poisson_epsilon(1.5, 0.02, 50, 1e-5)
    assert poisson_epsilon(1.6, 0.02, 50, 1e-5) < base
    assert poisson_epsilon(1.5, 0.03, 50, 1e-5) > base
    assert poisson_epsilon(1.5, 0.02, 60, 1e-5) > base
    assert poisson_epsilon(1.5, 0.02, 50, 1e-6) > base


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: poisson_epsilon(0.0, 0.1, 10, 1e-5), "noise_multiplier"),
        (lambda: poisson_epsilon(math.nan, 0.1, 10, 1e-5), "noise_multiplier"),
        (lambda: poisson_epsilon(1.0, 0.0, 10, 1e-5), "sampling_probability"),
        (lambda: poisson_epsilon(1.0, 1.01, 10, 1e-5), "sampling_probability"),
        (lambda: poisson_epsilon(1.0, 0.1, 0, 1e-5), "steps"),
        (lambda: poisson_epsilon(1.0, 0.1, 2.5, 1e-5), "steps"),
        (lambda: poisson_epsilon(1.0, 0.1, 10**7, 1e-5), "steps"),
        (lambda: poisson_epsilon(1.0, 0.1, 10, 0.0), "delta"),
        (lambda: poisson_epsilon(1.0, 0.1, 10, 1.0), "delta"),
        (lambda: calibrate_poisson(0.0, 1e-5, 0.1, 10), "epsilon"),
        (lambda: calibrate_poisson(math.nan, 1e-5, 0.1, 10), "epsilon"),
        (lambda: calibrate_poisson(1.0, 1.0, 0.1, 10), "delta"),
        (lambda: calibrate_poisson(1.0, 1e-5, -0.1, 10), "sampling_probability"),
        (lambda: calibrate_poisson(1.0, 1e-5, 0.1, -1), "steps"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ArgumentError, match=f"^{name} must"):
        call()


def test_absent_dependency_names_its_extra(monkeypatch):
    def absent(module):
        raise ModuleNotFoundError(f"No module named {module!r}", name="dp_accounting")

    monkeypatch.setattr(importlib, "import_module", absent)
    assert checks.importlib is importlib
    with pytest.raises(MissingDependencyError, match=r"\.\[amplified\]"):
        poisson_epsilon(1.0, 0.1, 10, 1e-5)


def test_losses_are_those_of_dp_accounting():
    """Of both directions, and of another unit in one's place; at probability 1 and where most of the grid is beyond."""
    pld = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    replaced = importlib.import_module("dp_accounting.privacy_accountant").NeighboringRelation.REPLACE_ONE
    for sigma, q, h in [(1.3, 0.3, 1e-3), (0.3, 0.01, 5e-3), (2.0, 1.0, 1e-3), (30.0, 0.01, 1e-5)]:
        options = {"sampling_prob": q, "value_discretization_interval": h}
        plain = pld.from_gaussian_mechanism(sigma, **options)
        other = pld.from_gaussian_mechanism(sigma, **options, neighboring_relation=replaced)
        for theirs, ours in (
            (plain._pmf_remove, sampled_gaussian(pld, sigma, q, h)._pmf_remove),
            (plain._pmf_add, sampled_gaussian(pld, sigma, q, h)._pmf_add),
            (other._pmf_remove, replaced_gaussian(pld, sigma, q, h)._pmf_remove),
        ):
            assert ours.to_dense_pmf().size == theirs.to_dense_pmf().size
            for epsilon in (-2.0, -0.01, 0.0, 0.004, 0.3, 1.0, 3.0):
                assert ours.get_delta_for_epsilon(epsilon) == pytest.approx(
                    theirs.get_delta_for_epsilon(epsilon), rel=1e-12, abs=1e-15
                )
