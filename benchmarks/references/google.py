"""The values of google-research/federated, google-research/DP-FTRL, tensorflow-privacy and dp-accounting."""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from anyorder import workload as W
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.gaussian import zcdp_rho
from anyorder.optimize import fit
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import Independent, Tree
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from benchmarks.references._accountants import DPFTRL, GAUSS, GOOGLE, PRIVACY, RENYI, pld, renyi
from benchmarks.references._value import Rule, Value, skip

Entry = dict[str, Any]
Values = Iterator[Value]


def squared(tree: Tree, rule: Any) -> float:
    """The squared sensitivity, an integer."""
    return float(round(sensitivity(tree, rule).value ** 2))


# google_federated.json


def deployed(entry: Entry, model: str, what: str) -> Values:
    """The squared sensitivity is what their rho implies: their matrix is not at hand."""
    given, name = entry["params"], entry["id"]
    mu = math.sqrt(given["squared_sensitivity_implied"]) / given["l2_clip_norm_noise_multiplier"]
    if what == "zcdp":
        yield Value(name, "", entry["value"], zcdp_rho(mu))
        yield Value(name, "again", entry["recomputed_here"], zcdp_rho(mu))
        return
    ours, grid = gdp_epsilon(mu, given["delta"]), pld(mu, given["delta"])
    yield Value(name, "", entry["value"], ours, "least", reason=GAUSS, variant=grid)
    yield Value(name, "again", entry["recomputed_here"], ours, "least", reason=GAUSS, variant=grid)
    yield Value(name, "analytic Gaussian", float(entry["note"].split("gives ")[1]), ours, tolerance=1e-9)


def deployed_tree(entry: Entry, what: str) -> Values:
    given = entry["params"]
    rule = MinSeparation(given["total_steps"], given["min_separation_kairouz"] + 1, given["max_participation"])
    mu = sensitivity(Tree(rule.n), rule).value / given["noise_multiplier"]
    if what == "zcdp":
        yield Value(entry["id"], "as printed", entry["value"], round(zcdp_rho(mu), 2))
        yield Value(entry["id"], "all digits", entry["recomputed_here"], zcdp_rho(mu))
        return
    at_orders, exact = renyi(mu, given["delta"], PRIVACY), gdp_epsilon(mu, given["delta"])
    why = {"rule": "least", "reason": RENYI}
    yield Value(entry["id"], "as printed", entry["value"], round(exact, 2), **why, variant=round(at_orders, 2))
    yield Value(entry["id"], "all digits", entry["recomputed_here"], exact, **why, variant=at_orders)


def separated_tree(entry: Entry) -> Values:
    given = entry["params"]
    rule = MinSeparation(given["steps"], given["min_separation_kairouz"] + 1, given["max_participation"])
    found = squared(Tree(rule.n), rule)
    yield Value(entry["id"], "", entry["value"], found)
    if entry["id"] != "tree_sens2_2000_6_313":
        return
    again, mu = entry["recomputed_here"], math.sqrt(found) / 7.0
    exact = gdp_epsilon(mu, 1e-10)
    yield Value(entry["id"], "zcdp", again["zcdp"], zcdp_rho(mu))
    yield Value(entry["id"], "rdp_eps_1e10", again["rdp_eps_1e10"], exact, "least", reason=RENYI,
                variant=renyi(mu, 1e-10, PRIVACY))  # fmt: skip
    yield Value(entry["id"], "pld_eps_1e10", again["pld_eps_1e10"], exact, "least", reason=GAUSS,
                variant=pld(mu, 1e-10))  # fmt: skip


def from_rho(entry: Entry) -> Values:
    mu, delta = math.sqrt(2 * entry["params"]["rho"]), entry["params"]["delta"]
    at_orders, exact = renyi(mu, delta, PRIVACY), gdp_epsilon(mu, delta)
    why = {"rule": "least", "reason": RENYI}
    yield Value(entry["id"], "as printed", entry["value"], round(exact, 2), **why, variant=round(at_orders, 2))
    yield Value(entry["id"], "all digits", entry["recomputed_here"], exact, **why, variant=at_orders)


def node_counts(entry: Entry) -> Values:
    yield Value(entry["id"], "", entry["value"], Tree(8).prefix_variance())


def all_ones(entry: Entry, steps: int) -> Values:
    """What the estimates add up to if every node is 1: the coefficients of the prefix, summed."""
    total = sum(Tree(steps, "online").terms(t).coefficients.sum() for t in range(steps))
    yield Value(entry["id"], "", entry["value"], float(total))


def noiseless(entry: Entry, steps: int) -> Values:
    A = W.momentum(steps, 0.0, np.full(steps, entry["params"]["lr"]))
    yield Value(entry["id"], "", entry["value"], -float(A.apply(np.ones(steps))[-1]))


def signed_patterns(entry: Entry) -> Values:
    """The matrix whose columns are the patterns with all signs, the first +; columns in any order."""
    n, k = entry["params"]["n"], entry["params"]["epochs"]
    signs = [[1 - 2 * (i >> bit & 1) for bit in range(k - 1)] for i in range(1 << (k - 1))]
    columns = []
    for steps in FixedOrder(n, k, n // k).patterns():
        for rest in signs:
            column = np.zeros(n, dtype=int)
            column[list(steps)] = [1, *rest]
            columns.append(column.tolist())
    theirs = sorted(np.array(entry["value"]).T.tolist())
    yield Value(entry["id"], "columns, sorted", theirs, sorted(columns))


def spectral(entry: Entry) -> Values:
    n = entry["params"]["n"]
    found = [sensitivity(Independent(n), FixedOrder(n, k, n // k)).value for k in entry["params"]["epochs"]]
    yield Value(entry["id"], "", entry["value"], found)


def column_sums(entry: Entry) -> Values:
    found = [float(Tree(1 << depth).columns([0]).sum()) for depth in entry["params"]["log2_leaves"]]
    yield Value(entry["id"], "", entry["value"], found)


def single_band(entry: Entry) -> Values:
    found = fit("banded", W.prefix_sum(16), SingleEpoch(16), bands=1).matrix()
    yield Value(entry["id"], "C", np.eye(16), found)


def cifar_grid(entry: Entry) -> Values:
    integers, again = list(range(2, 65)), entry["recomputed_here"]
    for i, (sigma, value) in enumerate(zip(entry["params"]["noise_multipliers"], entry["value"], strict=True)):
        digits, name = 2 - math.floor(math.log10(value)), f"noise multiplier {sigma:g}"
        yield Value(
            entry["id"], f"{name}, as printed", value, round(gdp_epsilon(1 / sigma, 1e-5), digits), "least",
            reason="theirs converts from Rényi DP at whole orders alone, delta 1e-5: so we get their digits",
            variant=round(renyi(1 / sigma, 1e-5, integers), digits),
        )  # fmt: skip
        for key, delta in (("pld_1e5", 1e-5), ("rdp_1e5", 1e-5), ("rdp_1e6", 1e-6)):
            yield Value(
                entry["id"], f"{name}, {key}", again[key][i], round(gdp_epsilon(1 / sigma, delta), 3), "least",
                reason=RENYI, variant=round(renyi(1 / sigma, delta), 3),
            )  # fmt: skip


def cooldown(entry: Entry) -> Values:
    rates = W.linear_cooldown(64)
    yield Value(entry["id"], "cooldown_period at n = 64", 64 // 4, int(64 - np.flatnonzero(rates == 1)[-2] - 1))
    yield Value(entry["id"], "cooldown_target", entry["value"]["cooldown_target"], float(rates[-1]))


SETTING = "a setting or a wall time, not a value that follows from one"

FEDERATED = (
    Rule(r"gboard_esES_tree_(zcdp|eps)", deployed_tree),
    Rule(r"gboard_(esES|ptBR|esUS)_(eps|zcdp)", deployed),
    Rule(r"tree_sens2_.*", separated_tree),
    Rule(r"zcdp081_to_eps_rdp", from_rho),
    Rule(r"tree_noise_popcount", node_counts),
    Rule(r"efficient_tree_value_(\d+)", all_ones),
    Rule(r"dpftrlm_noiseless_m0_s(\d+)", noiseless),
    Rule(r"contrib_\d_\d", signed_patterns),
    Rule(r"spectral_sens_eye", spectral),
    Rule(r"tree_matrix_column_sum", column_sums),
    Rule(r"single_band_identity", single_band),
    Rule(r"cifar10_mf_eps_grid", cifar_grid),
    Rule(r"cooldown_schedule", cooldown),
    Rule(r"stackoverflow_dpftrlm_cmd|stackoverflow_mf_run_time|dp_visual_embeddings_cmd", skip(SETTING)),
)


# dpftrl.json


def restarted(entry: Entry) -> Values:
    """DP-FTRL's accountant: epochs in one order from one restart to the next, blocks composed."""
    name, b = entry["id"], entry["num_batches"]
    blocks = [epochs for epochs in entry["epochs_between_restarts"] if epochs]
    total = 0.0
    for i, k in enumerate(blocks):
        last = i == len(blocks) - 1 or not entry["tree_completion"]
        total += squared(Tree(b * k), FixedOrder(b * k, k, b)) if last else completed(b, k)
    mu = math.sqrt(total) / entry["noise"]
    yield Value(name, "sensitivity_sq", entry["sensitivity_sq"], total)
    yield Value(name, "effective_sigma", entry["effective_sigma"], 1 / mu)
    yield _epsilon(name, "epsilon", entry["epsilon"], mu, entry["delta"], DPFTRL)


def completed(b: int, k: int) -> float:
    """The tree of k epochs of b steps with virtual steps up to a power of two, then one step of nobody."""
    tree = Tree(b * k + 1, restarts=(b * k,), completion=True)
    return squared(tree, KnownOrder([*([t % b] for t in range(b * k)), []]))


def _epsilon(name: str, what: str, theirs: float, mu: float, delta: float, orders: list[float]) -> Value:
    return Value(name, what, theirs, gdp_epsilon(mu, delta), "least", reason=RENYI, variant=renyi(mu, delta, orders))


def same_order(entry: Entry) -> Values:
    b, k, virtual = (int(part) for part in entry["call"].split("order(")[1].split(")")[0].split(","))
    yield Value(entry["id"], "without virtual steps", entry["value"][1], squared(Tree(b * k), FixedOrder(b * k, k, b)))
    if virtual:  # they make a power of two
        yield Value(entry["id"], "with virtual steps", entry["value"][0], completed(b, k))
    else:
        yield Value(
            entry["id"], "with no virtual steps", entry["value"][0], squared(Tree(b * k), FixedOrder(b * k, k, b))
        )


def given_order(entry: Entry) -> Values:
    steps = json.loads(entry["call"].split("(")[1].rstrip(")"))
    order = KnownOrder([[unit] if unit >= 0 else [] for unit in steps])
    yield Value(entry["id"], "largest", entry["value"][0], squared(Tree(len(steps)), order))
    each = unit_sensitivities(Tree(len(steps)), order) ** 2
    yield Value(entry["id"], "each unit", entry["value"][1], each)


def restart_example(entry: Entry) -> Values:
    """CIFAR-10: 100 epochs of 100 steps, a new tree every 20 epochs, completed but for the last; noise 46.3 a node."""
    (theirs,) = entry["value"].values()
    last = sensitivity(Tree(2000), FixedOrder(2000, 20, 100)).value ** 2
    mu = math.sqrt(4 * completed(100, 20) + last) / 46.3
    names = ("effective sigma", "eps printed by reference (RDP conversion)", "exact Gaussian eps for the same sigma")
    yield Value(entry["id"], names[0], theirs[names[0]], 1 / mu)
    yield Value(entry["id"], names[1], theirs[names[1]], gdp_epsilon(mu, 1e-5), "least", reason=RENYI,
                variant=renyi(mu, 1e-5, DPFTRL))  # fmt: skip
    yield Value(entry["id"], names[2], theirs[names[2]], gdp_epsilon(mu, 1e-5))


def conversion(entry: Entry) -> Values:
    sigma, delta = (float(part) for part in entry["call"].split("(")[1].split(", verbose")[0].split(", "))
    yield _epsilon(entry["id"], "", entry["value"], 1 / sigma, delta, DPFTRL)


def trees_by_epoch(entry: Entry) -> Values:
    """tensorflow-privacy: a fresh tree for each of the given numbers of steps, a unit once in each."""
    steps, sigma = entry["steps_list"], entry["noise_multiplier"]
    sizes = steps if isinstance(steps, list) else [steps]
    mu = math.sqrt(sum(squared(Tree(m), SingleEpoch(m)) for m in sizes)) / sigma
    yield _epsilon(entry["id"], "epsilon", entry["epsilon"], mu, entry["delta"], PRIVACY)
    orders = entry["rdp_at_orders"]
    yield Value(entry["id"], "rdp_at_orders", list(orders.values()), [float(a) * zcdp_rho(mu) for a in orders])


def one_tree(entry: Entry) -> Values:
    rule = MinSeparation(entry["total_steps"], entry["min_separation"] + 1, entry["max_participation"])
    found = squared(Tree(rule.n), rule)
    mu = math.sqrt(found) / entry["noise_multiplier"]
    yield Value(entry["id"], "sum_sensitivity_square", entry["sum_sensitivity_square"], found)
    yield Value(entry["id"], "zcdp", entry["zcdp"], zcdp_rho(mu))
    for delta, value in entry["epsilon"].items():
        yield _epsilon(entry["id"], f"epsilon, delta {delta}", value, mu, float(delta), PRIVACY)


def tree_event(entry: Entry) -> Values:
    """dp-accounting: a unit once in the trees of an event, and the event repeated."""
    call = entry["call"].split("SingleEpochTreeAggregationDpEvent(")[1]
    arguments, rest = call.split(")", 1)
    sigma, sizes = json.loads(f"[{arguments}]")
    repeats, delta = int(rest.split(",")[1].split(")")[0]), float(call.split("get_epsilon(")[1].rstrip(")"))
    largest = max(squared(Tree(m), SingleEpoch(m)) for m in (sizes if isinstance(sizes, list) else [sizes]))
    mu = math.sqrt(repeats * largest) / sigma
    yield Value(entry["id"], "gaussian_sigma", entry["gaussian_sigma"], 1 / mu)
    yield _epsilon(entry["id"], "epsilon_default_orders", entry["epsilon_default_orders"], mu, delta, GOOGLE)
    yield _epsilon(entry["id"], "epsilon_ORDERS", entry["epsilon_ORDERS"], mu, delta, PRIVACY)
    yield Value(entry["id"], "pld_epsilon", entry["pld_epsilon"], gdp_epsilon(mu, delta), "least", reason=GAUSS,
                variant=pld(mu, delta))  # fmt: skip


def node_noise(entry: Entry) -> Values:
    """Variances of 64 prefixes and of the steps between them, both estimators."""
    online, vanilla = Tree(64, "online"), Tree(64)
    for name, tree, kind in (("CummuNoiseEffTorch", online, "eff"), ("CummuNoiseTorch", vanilla, "vanilla")):
        variance, K = tree.prefix_variance(), tree.noising_matrix()
        sums = np.cumsum(K, axis=0)[:8]
        yield Value(entry["id"], name, entry[name], variance)
        if fractions := entry.get(f"{name}_exact"):
            yield Value(entry["id"], f"{name}_exact", [float(Fraction(x)) for x in fractions], variance)
        yield Value(
            entry["id"], f"increment_variance_{kind}", entry[f"increment_variance_{kind}"], np.square(K).sum(axis=1)
        )
        yield Value(entry["id"], f"covariance_first_8_{kind}", entry[f"covariance_first_8_{kind}"], sums @ sums.T)
        yield Value(
            entry["id"], f"mean_variance_1_to_64, {kind}", entry["mean_variance_1_to_64"][kind], variance.mean()
        )
        yield Value(entry["id"], f"rms_prefix_error, {kind}", entry["rms_prefix_error"][kind], variance.mean() ** 0.5)
        drawn = len({int(row) for t in range(64) for row in tree.terms(t).rows})
        yield Value(
            entry["id"], f"nodes_drawn_by_step_64, {kind}", entry["nodes_drawn_by_step_64"][kind], drawn,
            "side", reason="an inner matter of the code",
        )  # fmt: skip


DPFTRL_RULES = (
    Rule(r"compute_epsilon_tree .*", restarted),
    Rule(r"get_total_sensitivity_sq_same_order .*", same_order),
    Rule(r"get_total_sensitivity_sq_given_order .*", given_order),
    Rule(r"convert_gaussian_renyi_to_dp .*", conversion),
    Rule(r"compute_rdp_tree_restart .*", trees_by_epoch),
    Rule(r"compute_rdp_single_tree .*", one_tree),
    Rule(r"SingleEpochTreeAggregationDpEvent .*", tree_event),
    Rule(r"noise_variance_steps_1_to_64_std_1", node_noise),
)


def dpftrl_entries(data: dict[str, Any]) -> list[Entry]:
    """Every call of dpftrl.json as an entry with an id."""
    found = []
    for section, content in data.items():
        if section in ("about", "versions", "tfp_orders"):
            continue
        if isinstance(content, dict):
            found.append({"id": section} | content)
            continue
        short = section.split(".")[-1]
        found += [{"id": f"{short} {i + 1}"} | entry for i, entry in enumerate(content)]
    return found
