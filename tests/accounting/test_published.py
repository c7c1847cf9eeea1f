"""Published and reference numbers: Kairouz et al. 2021, deployed models, other libraries' accountants."""

import math

import numpy as np
import pytest

from anyorder.accounting import gdp_epsilon
from anyorder.accounting.curves import compose
from anyorder.accounting.gaussian import calibrate_gaussian, rdp_epsilon, zcdp_rho
from references import load

TENTHS = [1 + x / 10 for x in range(1, 100)]
TFP_ORDERS = [*TENTHS, *range(12, 64)]
GOOGLE_ORDERS = [*TENTHS, *range(11, 64), 128, 256, 512, 1024]  # dp-accounting's own
DPFTRL_ORDERS = 1 + np.arange(1, 1990) / 10


def levels(leaves):
    """Nodes over a leaf, ceil(log2(leaves + 1)) [Kairouz et al. 2021, Theorem 4.1]."""
    return leaves.bit_length()


def at_orders(mu, delta, orders):
    orders = np.asarray(orders, dtype=np.float64)
    return rdp_epsilon((orders, orders * zcdp_rho(mu)), delta)


def entries(file, section):
    return load(file)[section]


@pytest.mark.parametrize(
    ("sigma_node", "printed", "exact"),
    [(1.13, 18.71, 17.667), (2.33, 7.83, 7.342), (4.03, 4.19, 3.920), (6.21, 2.60, 2.424), (8.83, 1.77, 1.649)],
)
def test_kairouz_table_4(sigma_node, printed, exact):
    # StackOverflow, 1600 rounds, each user once: 11 levels of one tree, delta 1e-6
    mu = math.sqrt(levels(1600)) / sigma_node
    assert round(gdp_epsilon(mu, 1e-6, "rdp"), 2) == printed
    assert round(gdp_epsilon(mu, 1e-6), 3) == exact


@pytest.mark.parametrize(
    ("printed", "sigma_node", "report_goal", "population", "trees", "depth"),
    [
        (363.66, 0.149, 100, 342_477, 1, 11),
        (32.52, 1.49, 1000, 342_477, 5, 9),
        (9.76, 7.53, 5060, 342_477, 24, 7),
        (4.11, 24.29, 16_300, 342_477, 77, 5),
        (7.57, 5.73, 3850, 1_000_000, 7, 9),
        (3.56, 15.29, 10_300, 1_000_000, 17, 7),
    ],
)
def test_kairouz_table_5(printed, sigma_node, report_goal, population, trees, depth):
    # 1600 rounds in epochs of floor(population / report goal) rounds, a new tree every epoch, each tree counted at
    # the depth of a whole epoch, the unfinished last one too. Noise and goals are printed to three digits, so 0.5 %.
    epoch = min(1600, population // report_goal)
    assert (trees, depth) == (math.ceil(1600 / epoch), levels(epoch))
    mu = compose(*[math.sqrt(depth) / sigma_node] * trees)
    assert gdp_epsilon(mu, 1e-6, "rdp") == pytest.approx(printed, rel=5e-3)
    assert at_orders(mu, 1e-6, TFP_ORDERS) == pytest.approx(printed, rel=5e-3)
    assert gdp_epsilon(mu, 1e-6) < printed


def test_dpftrl_compute_epsilon_tree():
    for entry in entries("dpftrl.json", "dpftrl_privacy.compute_epsilon_tree"):
        mu = 1 / entry["effective_sigma"]
        assert mu == pytest.approx(math.sqrt(entry["sensitivity_sq"]) / entry["noise"], rel=1e-12)
        check_renyi(mu, entry["delta"], DPFTRL_ORDERS, entry["epsilon"])


def test_dpftrl_convert_gaussian_renyi_to_dp():
    for entry in entries("dpftrl.json", "dpftrl_privacy.convert_gaussian_renyi_to_dp"):
        sigma, delta = map(float, entry["call"].split("(")[1].split(", verbose")[0].split(", "))
        check_renyi(1 / sigma, delta, DPFTRL_ORDERS, entry["value"])


def test_tfp_tree_restart():
    for entry in entries("dpftrl.json", "tfp.compute_rdp_tree_restart"):
        trees = entry["steps_list"] if isinstance(entry["steps_list"], list) else [entry["steps_list"]]
        mu = compose(*(math.sqrt(levels(steps)) / entry["noise_multiplier"] for steps in trees))
        check_renyi(mu, entry["delta"], TFP_ORDERS, entry["epsilon"])


def test_tfp_single_tree():
    for entry in entries("dpftrl.json", "tfp.compute_rdp_single_tree"):
        mu = math.sqrt(entry["sum_sensitivity_square"]) / entry["noise_multiplier"]
        assert zcdp_rho(mu) == pytest.approx(entry["zcdp"], rel=1e-12)
        for delta, epsilon in entry["epsilon"].items():
            check_renyi(mu, float(delta), TFP_ORDERS, epsilon)


def test_single_epoch_tree_event():
    for entry in entries("dpftrl.json", "dp_accounting.SingleEpochTreeAggregationDpEvent"):
        mu, delta = 1 / entry["gaussian_sigma"], float(entry["call"].split("get_epsilon(")[1].rstrip(")"))
        check_renyi(mu, delta, GOOGLE_ORDERS, entry["epsilon_default_orders"])
        check_renyi(mu, delta, TFP_ORDERS, entry["epsilon_ORDERS"])
        check_pld(mu, delta, entry["pld_epsilon"])


def test_plain_gaussian_of_jax_privacy():
    values = {entry["id"]: entry["value"] for entry in entries("jax_privacy.json", "values")}
    check_pld(1.0, 1e-5, values["gauss_eps_pld_s1.0_d1e-05"])
    check_pld(2.0, 1e-6, values["gauss_eps_pld_s0.5_d1e-06"])
    check_pld(0.1, 1e-8, values["gauss_eps_pld_s10.0_d1e-08"])
    check_pld(compose(*[1 / 5] * 10), 1e-6, values["gauss_k10_eps_pld"])
    check_renyi(1.0, 1e-5, GOOGLE_ORDERS, values["gauss_eps_rdp_s1.0_d1e-05"])
    check_renyi(0.25, 1e-6, GOOGLE_ORDERS, values["gauss_eps_rdp_s4.0_d1e-06"])
    check_renyi(0.1, 1e-8, GOOGLE_ORDERS, values["gauss_eps_rdp_s10.0_d1e-08"])
    check_renyi(math.sqrt(levels(16)) / 10, 1e-6, GOOGLE_ORDERS, values["tree_single_epoch_eps_rdp_T16"])
    check_renyi(math.sqrt(levels(1024)) / 10, 1e-6, GOOGLE_ORDERS, values["tree_single_epoch_eps_rdp_T1024"])
    # three trees within one epoch: a unit is in one of them, the deepest at worst
    check_renyi(math.sqrt(levels(300)) / 10, 1e-6, GOOGLE_ORDERS, values["tree_restarts_eps_rdp"])
    assert calibrate_gaussian(8.0, 1e-8) == pytest.approx(values["gauss_nm_pld_e8.0_d1e-08"], rel=1e-4)
    assert calibrate_gaussian(18.9, 1e-10) == pytest.approx(values["gauss_nm_pld_e18.9_d1e-10"], rel=1e-4)


def test_deployed_keyboards():
    values = {entry["id"]: entry for entry in entries("google_federated.json", "values")}
    for model, squared, sigma in (("esES", 0.6, 1.411), ("ptBR", 2.0, 8.35), ("esUS", 2.0, 8.35)):
        mu = math.sqrt(squared) / sigma
        if f"gboard_{model}_zcdp" in values:
            assert zcdp_rho(mu) == pytest.approx(values[f"gboard_{model}_zcdp"]["value"], rel=1e-12)
        check_pld(mu, 1e-10, values[f"gboard_{model}_eps"]["value"], rel=2e-7)
    tree = values["tree_sens2_2000_6_313"]["recomputed_here"]
    mu = math.sqrt(79) / 7.0
    assert zcdp_rho(mu) == pytest.approx(tree["zcdp"], rel=1e-12)
    check_renyi(mu, 1e-10, TFP_ORDERS, tree["rdp_eps_1e10"])
    check_pld(mu, 1e-10, tree["pld_eps_1e10"])
    rounded = values["zcdp081_to_eps_rdp"]
    check_renyi(math.sqrt(2 * 0.81), 1e-10, TFP_ORDERS, rounded["recomputed_here"])
    assert gdp_epsilon(math.sqrt(2 * 0.81), 1e-10) == pytest.approx(8.548917, abs=1e-6)


def test_deployed_numbers_as_printed():
    # the same, from the published notes alone
    assert zcdp_rho(math.sqrt(0.6) / 1.411) == pytest.approx(0.150684, abs=1e-6)
    assert gdp_epsilon(math.sqrt(0.6) / 1.411, 1e-10) == pytest.approx(3.42401, abs=1e-5)
    assert zcdp_rho(math.sqrt(2.0) / 8.35) == pytest.approx(0.0143426, abs=1e-7)
    assert gdp_epsilon(math.sqrt(2.0) / 8.35, 1e-10) == pytest.approx(0.99355, abs=1e-5)
    assert zcdp_rho(math.sqrt(79) / 7) == pytest.approx(0.806, abs=1e-3)
    assert gdp_epsilon(math.sqrt(79) / 7, 1e-10, "rdp") == pytest.approx(8.8986, abs=2e-4)


def check_renyi(mu, delta, orders, theirs):
    """Equal at their orders; over all orders a little less; the exact one 1 % less or more."""
    assert at_orders(mu, delta, orders) == pytest.approx(theirs, rel=1e-9)
    assert theirs * 0.99 <= gdp_epsilon(mu, delta, "rdp") <= theirs * (1 + 1e-12)
    assert gdp_epsilon(mu, delta) < theirs * 0.99


def check_pld(mu, delta, theirs, rel=1e-5):
    """Privacy loss distributions are pessimistic, but barely."""
    assert theirs * (1 - rel) <= gdp_epsilon(mu, delta) <= theirs
