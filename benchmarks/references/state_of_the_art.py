"""Independent computations of optima and errors: state_of_the_art.json (computed_here) and dense_optima.json."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anyorder import workload as W
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.gaussian import calibrate_gaussian
from anyorder.optimize import fit
from anyorder.participation import FixedOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, BandedInverse, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree, registry
from anyorder.strategy.banded import fit_banded
from anyorder.strategy.blt import fit_blts
from anyorder.strategy.dense import Optimum, fit_dense
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.rescaled import Rescaled, rescale
from benchmarks.references import google
from benchmarks.references._value import LOCAL, Rule, Value, skip, statistics

Entry = dict[str, Any]
Values = Iterator[Value]

NAMES = {"rmse": "rmse", "max": "max_rmse", "last": "last_rmse", "sens": "sensitivity"}
TEN = FixedOrder(1000, 10, 100)


def measured(strategy: Strategy, participation: Participation, A: W.Workload | None = None) -> dict[str, float]:
    """rmse, max, last (root scale, with the sensitivity) and sens."""
    found = statistics(strategy, A or W.prefix_sum(strategy.n), participation)
    found["last_rmse"] = found["sensitivity"] * math.sqrt(found["last_error"])
    return {short: found[name] for short, name in NAMES.items()}


@functools.cache
def dense(n: int, objective: str, momentum: float = 0.0, tolerance: float = 1e-7) -> Optimum:
    """The certified optimum of one participation."""
    A = W.momentum(n, momentum, W.linear_cooldown(n)) if momentum else W.prefix_sum(n)
    return fit_dense(A, SingleEpoch(n), objective, tolerance=tolerance)


# dense_optima.json


def independent_optimum(entry: Entry, workload: str, n: int) -> Values:
    """Both have a certificate: their optimum and ours lie within both."""
    found = dense(n, "mean", 0.95 if workload == "momentum" else 0.0)
    name = entry["id"]
    yield Value(name, "rmse", entry["rmse"], found.upper, "least")
    yield Value(name, "mean_error", entry["mean_error"], found.upper**2, "least")
    yield Value(name, "lower_bound", entry["lower_bound"], found.lower**2)
    yield Value(
        name, "iterations", entry["iterations"], found.iterations, "side",
        reason="another algorithm: ours mixes steps, and stops at a gap of 1e-7",
    )  # fmt: skip


# Optima, closed forms, trees


def optimum(entry: Entry, n: int, objective: str) -> Values:
    found = dense(n, objective)
    yield Value(entry["id"], "upper", entry["upper"], found.upper, "least", reason="they stopped at a gap of 1e-6")
    yield Value(entry["id"], "lower", entry["lower"], found.lower)
    yield Value(entry["id"], "relgap", entry["relgap"], found.upper / found.lower - 1, "side")
    yield Value(entry["id"], "iters", entry["iters"], found.iterations, "side", reason="another algorithm")


def closed_forms(entry: Entry, n: int) -> Values:
    """The square root and bounds by logarithms: where the formula is known, ours is the strategy's own error."""
    one, root = SingleEpoch(n), SquareRoot(n)
    A, log = W.prefix_sum(n), math.log(n) / math.pi
    unit = Rescaled(root, np.sqrt(root.column_norms_squared()))
    ours = {
        "landau": registry.max_error(root, A, one), "sqrt_mean": registry.rmse(root, A, one),
        "nsr_max": registry.max_error(unit, A, one), "nsr_mean": registry.rmse(unit, A, one),
    }  # fmt: skip
    ours |= {f"{key}_minus_log": ours[key] - log for key in ("nsr_max", "nsr_mean")}
    for objective in ("max", "mean"):
        if f"opt_{objective}" in entry:
            ours[f"opt_{objective}"] = dense(n, objective).lower  # theirs is the lower end too
            ours[f"opt_{objective}_minus_log"] = ours[f"opt_{objective}"] - log
    for key, value in entry.items():
        if key in ours:
            yield Value(entry["id"], key, value, ours[key])
    yield Value(entry["id"], "landau_asym", entry["landau_asym"], ours["landau"], "side", reason=EXPANSION)
    best = dense(n, "max") if "opt_max" in entry else None
    for key, rule in (("mathias_ub", "limit"), ("mathias_explicit", "limit"), ("MNT_lb", "floor")):
        yield Value(entry["id"], key, entry[key], best and (best.upper if rule == "limit" else best.lower), rule,
                    reason=BOUND if best else "the dense optimum of so many steps takes minutes")  # fmt: skip


EXPANSION = "an expansion in ln n of the error above"
BOUND = "a bound on the optimum of the maximum error, and ours lies on its right side"


def tree(entry: Entry, n: int) -> Values:
    one, A = SingleEpoch(n), W.prefix_sum(n)
    vanilla, online = Tree(n), Tree(n, "online")
    ours = {
        "sens_sq": sensitivity(vanilla, one).value ** 2,
        "naive_rmse": registry.rmse(vanilla, A, one), "naive_max": registry.max_error(vanilla, A, one),
        "honaker_online_rmse": registry.rmse(online, A, one), "honaker_online_max": registry.max_error(online, A, one),
    }  # fmt: skip
    for key, value in ours.items():
        yield Value(entry["id"], key, entry[key], value)


# Every mechanism in four scenarios


def scenario(name: str) -> Participation:
    """The order of a scenario, named ..n<steps>.. or as in the file."""
    return {
        "n1000_k10_b100": MinSeparation(1000, 100, 10), "cifar_2000_k20_b100": MinSeparation(2000, 100, 20),
        "so_2052_k6_b342": MinSeparation(2052, 342, 6), "single_1024": SingleEpoch(1024),
    }[name]  # fmt: skip


@functools.cache
def blts(name: str, objective: str) -> list[BLT]:
    order = scenario(name)
    return fit_blts(W.prefix_sum(order.n), order, 5, objective)


def mechanism(entry: Entry, where: str, kind: str) -> Values:
    """A strategy that the name determines."""
    order = scenario(where)
    family, _, bands = kind.partition("_p")
    A = W.prefix_sum(order.n)
    strategy: Strategy = {
        "identity": lambda: Independent(order.n),
        "sqrt_dense": lambda: SquareRoot(order.n),
        "BSR": lambda: ToeplitzBanded.from_square_root(A, int(bands)),
        "BISR": lambda: BandedInverse.from_square_root(A, int(bands)),
    }[family]()
    yield from _same(entry, measured(strategy, order))


def _same(entry: Entry, ours: dict[str, float], prefix: str = "") -> Values:
    for key, value in ours.items():
        if key in entry:
            yield Value(entry["id"], f"{prefix}{key}", entry[key], value)


def lambda_cgd(entry: Entry, where: str) -> Values:
    order = scenario(where)
    yield from _same(entry, measured(BandedInverse([1.0, -entry["lambda"]], order.n), order), "their C: ")
    best = fit("banded_inverse", W.prefix_sum(order.n), order, bands=2)
    yield Value(entry["id"], "lambda", entry["lambda"], float(-best.noising_coefficients(2)[1]), "side")
    yield Value(entry["id"], "optimum: rmse", entry["rmse"], measured(best, order)["rmse"], "least", reason=STOPPED)


def given_blt(entry: Entry, where: str, buffers: int, objective: str) -> Values:
    order, key = scenario(where), "max" if objective == "max" else "rmse"
    yield from _same(entry, measured(BLT(entry["buf_decay"], entry["output_scale"], order.n), order), "their BLT: ")
    found = blts(where, objective)
    ours = measured(found[min(buffers, len(found)) - 1], order)[key]
    yield Value(entry["id"], f"optimum: {key}", entry[key], ours, "least", reason=STOPPED, above=LOCAL)


STOPPED = "their optimiser stopped short of the optimum: our parameters give less in the same formulas"


def banded_toeplitz(entry: Entry, where: str, bands: int) -> Values:
    order = scenario(where)
    c = fit("toeplitz", W.prefix_sum(order.n), order, bands=bands).toeplitz_coefficients(bands)
    ours = measured(ToeplitzBanded(c / np.linalg.norm(c), order.n), order)  # theirs has columns of norm 1
    for key, value in ours.items():
        yield Value(entry["id"], key, entry[key], value, {"rmse": "least", "sens": "same"}.get(key, "side"), 1e-6)


FIXED = (
    "the first column c of C rises somewhere, so steps 0, b, 2b, .. are not proven the worst of a minimum "
    "separation; theirs takes them to be, and for the fixed order we get theirs"
)


def banded_inverse(entry: Entry, where: str, bands: int) -> Values:
    """Their coefficients: for the fixed order theirs, for the minimum separation at least as much. And our fit."""
    order, A = scenario(where), W.prefix_sum(scenario(where).n)
    fixed = _fixed(order)
    peer = BandedInverse(entry["noising_coef"], order.n)
    ours, as_fixed = measured(peer, order), measured(peer, fixed)
    for key, value in ours.items():
        yield Value(entry["id"], f"their C: {key}", entry[key], value, reason=FIXED, variant=as_fixed[key])
    found = measured(fit("banded_inverse", A, fixed, bands=bands), fixed)["rmse"]
    yield Value(entry["id"], "optimum, fixed order: rmse", entry["rmse"], found, "least", reason=STOPPED)


def _fixed(order: Participation) -> FixedOrder:
    k, b = order.max_participations, min(order.min_separation, order.n)
    return FixedOrder(order.n, k, b)


def inverse_check(entry: Entry, where: str, bands: int) -> Values:
    order = scenario(where)
    peer = BandedInverse(entry["coefficients"], order.n)
    c = peer.toeplitz_coefficients()
    fixed, separated = (measured(peer, rule)["rmse"] for rule in (_fixed(order), order))
    top = ToeplitzBanded(np.maximum.accumulate(np.abs(c)[::-1])[::-1], order.n)
    majorant = fixed / sensitivity(peer, _fixed(order)).value * sensitivity(top, order).value
    name = entry["id"]
    yield Value(name, "rmse_formula", entry["rmse_formula"], fixed)
    yield Value(name, "rmse_exact_fixed_order", entry["rmse_exact_fixed_order"], fixed)
    yield Value(
        name, "rmse_majorant_bound", entry["rmse_majorant_bound"], separated, "least",
        reason="theirs is the sensitivity of the non-increasing majorant of c; ours takes X itself, which is less",
        variant=majorant,
    )  # fmt: skip
    yield Value(name, "cmin", entry["cmin"], float(c.min()), "side", reason="near 0: rounding")
    rise = float(np.maximum(np.diff(c), 0).max())
    yield Value(name, "c_monotone_violation", entry["c_monotone_violation"], rise, "side",
                reason="another measure of the rise of c than its largest step")  # fmt: skip


# Multi-epoch optima


def dense_epochs(entry: Entry, n: int, k: int, b: int) -> Values:
    order = FixedOrder(n, k, b)
    strategy = fit("dense", W.prefix_sum(n), order)
    ours = measured(strategy, order)
    yield Value(entry["id"], "rmse", entry["rmse"], ours["rmse"], "least", reason="theirs is stopped after 300 steps")
    yield Value(entry["id"], "max", entry["max"], ours["max"], "side")
    yield Value(entry["id"], "sens", entry["sens"], ours["sens"])
    apart = sensitivity(strategy, MinSeparation(n, b, k)).value
    yield Value(entry["id"], "minsep_sens_upper", entry["minsep_sens_upper"], apart, "side",
                reason="of our optimum, since theirs is not stored")  # fmt: skip
    C = strategy.matrix()
    yield Value(entry["id"], "minX", entry["minX"], float((C.T @ C).min()), "side", reason="of our optimum")


def banded_columns(entry: Entry, n: int, k: int, b: int, bands: int) -> Values:
    order = MinSeparation(n, b, k)
    ours = measured(fit("banded", W.prefix_sum(n), order, bands=bands), order)
    yield Value(entry["id"], "rmse", entry["rmse"], ours["rmse"], "least", reason=STOPPED, above=EARLY)
    if ours["rmse"] > entry["rmse"]:
        longer = measured(fit_banded(W.prefix_sum(n), order, bands, max_iterations=120), order)["rmse"]
        yield Value(entry["id"], "rmse, 120 iterations", entry["rmse"], longer, "least", reason=STOPPED)
    yield Value(entry["id"], "max", entry["max"], ours["max"], "side")
    yield Value(entry["id"], "sens", entry["sens"], ours["sens"])


EARLY = "ours stops after 60 iterations; with 120 it is lower, see its table"


# BLTs against the square root, over the horizon, rescaled, for workloads


def _over_the_root(strategy: BLT) -> float:
    n = strategy.n
    A, one = W.prefix_sum(n), SingleEpoch(n)
    return registry.max_error(strategy, A, one) / registry.max_error(SquareRoot(n), A, one)


def ratios(entry: Entry, n: int) -> Values:
    found = fit_blts(W.prefix_sum(n), SingleEpoch(n), 5, "max")
    for buffers, value in entry.items():
        if buffers != "id":
            ours = _over_the_root(found[min(int(buffers), len(found)) - 1])
            yield Value(entry["id"], f"{buffers} buffers", value, round(ours, 5), "least", reason=STOPPED, above=LOCAL)


def horizon(entry: Entry, n: int, buffers: int) -> Values:
    made = fit("blt", W.prefix_sum(n), SingleEpoch(n), "max", buffers=buffers)
    for steps, value in entry.items():
        if steps != "id":
            ours = _over_the_root(BLT(made.decays, made.scales, int(steps)))
            yield Value(entry["id"], f"{steps} steps", value, round(ours, 4), tolerance=1.5e-4)


def rescaling(entry: Entry, kind: str) -> Values:
    """Another base for BLT2 (the fit of the scenario); the scales are those of least mean-square loss."""
    A, order = W.prefix_sum(1000), SingleEpoch(1000) if kind == "sqrt_single" else TEN
    base: Strategy = {
        "BLT2_mean": lambda: blts("n1000_k10_b100", "mean")[1],
        "BISR64": lambda: BandedInverse.from_square_root(A, 64),
        "sqrt": lambda: SquareRoot(1000),
        "sqrt_single": lambda: SquareRoot(1000),
    }[kind]()
    unit = Rescaled(base, np.sqrt(base.column_norms_squared()))
    for key, strategy in (("base", base), ("colnorm", unit), ("opt_rescale", rescale(base, A, order))):
        yield Value(
            entry["id"], f"rmse_{key}", entry[f"rmse_{key}"], registry.rmse(strategy, A, order),
            "least" if key == "opt_rescale" else "same", reason=STOPPED,
        )  # fmt: skip


def aware(entry: Entry, workload: str, what: str) -> Values:
    """BLT2 fitted to the plain prefix sum, and to the workload itself."""
    n = 1000
    A = {
        "prefix": lambda: W.prefix_sum(n),
        "mom0.9": lambda: W.momentum(n, 0.9),
        "cosine": lambda: W.Workload(n, learning_rates=W.cosine(n)),
        "mom0.9+cosine": lambda: W.momentum(n, 0.9, W.cosine(n)),
        "mom0.9+wsd": lambda: W.momentum(n, 0.9, W.warmup_stable_decay(n, warmup=0.0, decay=0.2)),
    }[workload]()
    objective = "mean" if what == "rmse" else "last"
    plain = fit("blt", W.prefix_sum(n), TEN, objective="mean", buffers=2)
    made = fit("blt", A, TEN, objective, buffers=2)
    identity, prefix, own = (measured(C, TEN, A)[what] for C in (Independent(n), plain, made))
    name = entry["id"]
    yield Value(name, "identity", entry["identity"], identity)
    yield Value(name, "prefix_opt", entry["prefix_opt"], prefix)
    yield Value(name, "aware", entry["aware"], own, "least", reason=STOPPED)
    yield Value(name, "gain_vs_prefix_opt", entry["gain_vs_prefix_opt"], 1 - own / prefix, "side")
    yield Value(name, "gain_vs_identity", entry["gain_vs_identity"], 1 - own / identity, "side")


def audit(entry: Entry, kind: str) -> Values:
    """The mu of the whitened score, the sensitivity; and of the plain dot product, k / || K^T pi ||."""
    made: Strategy = {
        "DP-SGD": lambda: Independent(1000),
        "BISR p=4": lambda: BandedInverse.from_square_root(W.prefix_sum(1000), 4),
        "BISR p=64": lambda: BandedInverse.from_square_root(W.prefix_sum(1000), 64),
        "sqrt": lambda: SquareRoot(1000),
    }[kind]()
    pattern = np.arange(0, 1000, 100)
    noise = made.noising_matrix()[pattern].sum(axis=0)
    plain = len(pattern) / math.sqrt(noise @ noise)
    yield Value(entry["id"], "mu_whitened", entry["mu_whitened"], round(sensitivity(made, TEN).value, 3))
    yield Value(entry["id"], "mu_naive_dot_product", entry["mu_naive_dot_product"], round(plain, 3))


# Accounting


def epsilons(entry: Entry) -> Values:
    for sigma, value in entry["value"].items():
        yield Value(entry["id"], f"noise multiplier {sigma}", value, gdp_epsilon(1 / float(sigma), 1e-5))


def sigmas(entry: Entry) -> Values:
    for case, value in entry["value"].items():
        epsilon, delta = map(float, case.split(","))
        yield Value(entry["id"], f"epsilon {epsilon:g}, delta {delta:g}", value, calibrate_gaussian(epsilon, delta))


def rho(entry: Entry) -> Values:
    yield Value(entry["id"], "", entry["value"], gdp_epsilon(math.sqrt(1.62), 1e-10))


RULES = (
    Rule(r"(prefix|momentum)_n(\d{1,2}|128)", independent_optimum),
    Rule(r"(prefix|momentum)_n(\d+)", independent_optimum, slow=True),
    Rule(r"optimum (\d{1,2}|128|256):(mean|max)", optimum),
    Rule(r"optimum (\d+):(mean|max)", optimum, slow=True),
    Rule(r"closed forms, n=(\d\d|256|2048)", closed_forms),
    Rule(r"closed forms, n=(\d+)", closed_forms, slow=True),
    Rule(r"tree, n=(\d+)", tree),
    Rule(r"(\w+): (identity|sqrt_dense|BSR_p\d+|BISR_p\d+)", mechanism),
    Rule(r"(\w+): lambdaCGD_best_rmse", lambda_cgd),
    Rule(r"(n1000_k10_b100|single_1024): BLT(\d)_(mean|max)", given_blt),
    Rule(r"(\w+): BLT(\d)_(mean|max)", given_blt, slow=True),
    Rule(r"(\w+): BandToep_p(\d+)", banded_toeplitz),
    Rule(r"(\w+): BandInvMF_p(\d+)", banded_inverse, slow=True),
    Rule(r"sensitivity of (\w+):BandInvMF_p(\d+)", inverse_check, slow=True),
    Rule(r"dense, n(\d+)_k(\d+)_b(\d+)", dense_epochs, slow=True),
    Rule(r"banded, n(\d+)_k(\d+)_b(\d+)_bands(\d+)", banded_columns, slow=True),
    Rule(r"BLT over the optimum, n=(\d+)", ratios),
    Rule(r"horizon, opt n0=(\d+), (\d) buffers", horizon),
    Rule(r"rescaled (\w+)", rescaling, slow=True),
    Rule(r"aware, ([\w.+]+)\|(rmse|last)", aware, slow=True),
    Rule(r"audit, (.*)", audit),
    Rule(r"eps_at_delta1e-5_by_noise_multiplier", epsilons),
    Rule(r"sigma_for_eps_delta", sigmas),
    Rule(r"exact_gaussian_eps_for_rho0.81_delta1e-10", rho),
    Rule(r"tree_restart_example", google.restart_example),
    Rule(r"lazy_noise_identity", skip("noise of rows that are skipped: not in the package")),
)


def entries(computed: dict[str, Any]) -> list[Entry]:
    """Every case of `computed_here` as an entry with an id."""
    values = {name: content.get("values", {}) for name, content in computed.items()}
    found = [{"id": f"optimum {case}"} | v for case, v in values.pop("prefix_sum_single_participation_optimum").items()]
    closed = values.pop("closed_forms_and_sqrt_nsr").pop("prefix")
    found += [{"id": f"closed forms, n={case['n']}"} | case for case in closed]
    scenarios = values.pop("mechanisms_by_scenario")
    for where, content in scenarios.items():
        found += [{"id": f"{where}: {kind}"} | mechanism for kind, mechanism in content["mechanisms"].items()]
    for case, content in values.pop("bandinvmf_sensitivity_check").items():
        where, kind = case.split(":")
        coefficients = scenarios[where]["mechanisms"][kind]["noising_coef"]
        found.append({"id": f"sensitivity of {case}", "coefficients": coefficients} | content)
    titles = {
        "tree": "tree, n={}", "dense_multi_epoch": "dense, {}", "banded_column_normalised": "banded, {}",
        "blt_ratio_to_toeplitz_optimum_max_loss": "BLT over the optimum, {}",
        "blt_horizon_robustness_max_loss_ratio": "horizon, {}", "free_rescaling_gain": "rescaled {}",
        "workload_aware_BLT2": "aware, {}", "audit_power": "audit, {}",
    }  # fmt: skip
    for name, title in titles.items():
        found += [{"id": title.format(case)} | content for case, content in values.pop(name).items()]
    found += [{"id": name, "value": content} for name, content in values.pop("gaussian_exact").items()]
    found += [{"id": name, "value": computed[name].get("result")} for name in values]
    return found
