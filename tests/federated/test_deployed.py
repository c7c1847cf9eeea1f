"""Deployed language models of a keyboard, each as a plan: google_federated.json, delta 1e-10.

Their separation counts the rounds between two participations: b is one more. Their multiplier is noise over clip norm
for the matrix as it was, with columns of squared norm 0.2 or 1: their accounting gives 0.6 and 2.0 for 3 and 2 rounds.
"""

import math

import numpy as np
import pytest

import anyorder as ao
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.gaussian import rdp_epsilon, zcdp_rho
from anyorder.participation import MinSeparation
from anyorder.strategy import Banded, Tree
from references import load

DELTA = 1e-10
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
VALUES = {entry["id"]: entry for entry in load("google_federated.json")["values"]}


def deployed(entry, strategy, noise_multiplier):
    p = entry["params"]
    rule = MinSeparation(strategy.n, p["min_separation_kairouz"] + 1, p["max_participation"])
    return ao.plan(
        order=rule, mechanism=strategy, noise_multiplier=noise_multiplier, delta=p["delta"],
        batch_size=p.get("clients_per_round", 6500), unit="user",
    )  # fmt: skip


def test_the_first_one_by_a_tree():
    entry = VALUES["gboard_esES_tree_eps"]
    plan = deployed(entry, Tree(2000), entry["params"]["noise_multiplier"])
    rho = zcdp_rho(plan.mu)
    assert plan.sensitivity.value**2 == pytest.approx(79, rel=1e-12)
    assert plan.sensitivity.exact
    assert plan.noise_multiplier == pytest.approx(7.0, rel=1e-12)
    assert rho == pytest.approx(0.806122, rel=1e-5)
    assert round(rho, 2) == VALUES["gboard_esES_tree_zcdp"]["value"]
    assert rdp_epsilon((ORDERS, [order * rho for order in ORDERS]), DELTA) == pytest.approx(8.898605, rel=1e-5)
    assert gdp_epsilon(plan.mu, DELTA, "rdp") < 8.8986 * (1 + 1e-5)
    assert plan.epsilon == pytest.approx(8.526093, rel=1e-5)
    assert gdp_epsilon(math.sqrt(2 * 0.81), DELTA) == pytest.approx(8.549, abs=5e-4)


@pytest.mark.parametrize(
    ("model", "column", "rho", "epsilon"),
    [
        ("esES", 0.2, 0.150684, 3.42401),
        ("ptBR", 1.0, 0.0143426, 0.99355),
        ("esUS", 1.0, 0.0143426, 0.99355),
    ],
)
def test_banded_ones(model, column, rho, epsilon):
    """With bands no more than the separation, sens^2 is k squared column norms, whatever the bands.

    So bands of ones, with columns scaled to norm 1, stand for their matrix at the noise against its columns' norm.
    """
    entry = VALUES[f"gboard_{model}_eps"]
    p = entry["params"]
    bands, n = np.arange(p["bands"]), p["rounds"]
    strategy = Banded((bands[:, None] + np.arange(n) < n).astype(float)).normalized()
    plan = deployed(entry, strategy, p["l2_clip_norm_noise_multiplier"] / math.sqrt(column))
    k = p["max_participation"]
    assert k * column == pytest.approx(p["squared_sensitivity_implied"])
    assert plan.sensitivity.value**2 == pytest.approx(k, rel=1e-9)
    assert plan.sensitivity.exact
    assert zcdp_rho(plan.mu) == pytest.approx(rho, rel=1e-5)
    assert plan.epsilon == pytest.approx(epsilon, rel=1e-5)
    assert plan.epsilon == pytest.approx(entry["value"], rel=2e-6)
