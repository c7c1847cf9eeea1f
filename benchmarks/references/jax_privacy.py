"""The values of jax_privacy (and of dp-accounting, which it calls)."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from anyorder import workload as W
from anyorder.accounting import gdp_epsilon
from anyorder.accounting.gaussian import calibrate_gaussian, zcdp_rho
from anyorder.accounting.poisson import calibrate_poisson, poisson_epsilon
from anyorder.optimize import fit
from anyorder.participation import FixedOrder, MinSeparation, SingleEpoch
from anyorder.patterns import Participation
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, SquareRoot, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.dense import fit_dense
from anyorder.strategy.registry import sensitivity
from anyorder.strategy.toeplitz import inverse_series
from benchmarks.references._accountants import GAUSS, RENYI, pld, renyi, sampled, smallest
from benchmarks.references._value import LOCAL, Rule, Value, compare, skip, statistics

Entry = dict[str, Any]
Values = Iterator[Value]

GIVEN = {"decays": [0.9, 0.5], "scales": [0.3, 0.1]}
LINEAR = [3.0, -1.0, 2.0, 5.0, 4.0, -2.0, 6.0, 1.0, 0.5, 2.5]
RISING = [0.5, 1.0, 0.25, -0.75]
MEAN = {"sensitivity": "same", "mean_error": "least", "loss_mean": "least", "rmse": "least"}
MAX = {"sensitivity": "same", "max_error": "least", "last_error": "least", "loss_max": "least", "max_rmse": "least"}


def one(entry: Entry, ours: Any, **options: Any) -> Values:
    """An entry of one number or one array."""
    yield Value(entry["id"], "", entry["value"], ours, **options)


def given_matrix(n: int, sign: bool) -> np.ndarray:
    i, j = np.indices((n, n))
    with np.errstate(divide="ignore"):
        C = np.where(i >= j, (1 + 0.3 * np.cos(1 + i + 2 * j)) / (1.0 + i - j), 0.0)
    return np.where(sign & (i != j) & ((i + 2 * j) % 3 == 1), -C, C)


def given_noise(n: int) -> np.ndarray:
    i, j = np.indices((n, 2))
    return np.sin(1 + i + 2 * j)


def cooled(n: int) -> W.Workload:
    return W.momentum(n, 0.95, W.linear_cooldown(n))


# Coefficients, matrices, streams


def coefficients(entry: Entry, kind: str) -> Values:
    root = SquareRoot(16)
    yield from one(entry, root.noising_coefficients() if kind == "noising" else root.toeplitz_coefficients())


def banded_inverse_root(entry: Entry, workload: str) -> Values:
    A = W.prefix_sum(8) if workload == "prefix" else W.momentum(8, 0.9)
    yield from one(entry, BandedInverse.from_square_root(A, 8).coefficients)


def stream(entry: Entry, kind: str) -> Values:
    if kind == "blt_forward":
        C = BLT(**GIVEN, n=8).matrix()
    else:
        columns = Banded(ToeplitzBanded([1.0, 0.5, 0.375], 8).matrix()).normalized()
        C = (columns if kind == "banded_toeplitz_colnorm" else BLT(**GIVEN, n=8)).noising_matrix()
    yield from one(entry, C @ given_noise(8))


def normalised_columns(entry: Entry) -> Values:
    root = ToeplitzBanded.from_square_root(W.prefix_sum(64), 4)
    error = Banded(root.matrix()).normalized().prefix_variance()
    ours = {"mean_error": error.mean(), "max_error": error.max(), "first": error[:6]}
    yield from compare(entry["id"], entry["value"], ours)


# Errors of given strategies


def root_error(entry: Entry, workload: str, n: int) -> Values:
    A = W.prefix_sum(n) if workload == "prefix" else cooled(n)
    yield from compare(entry["id"], entry["value"], statistics(SquareRoot(n), A, SingleEpoch(n)))


def identity_error(entry: Entry, workload: str, n: int) -> Values:
    A = W.prefix_sum(n) if workload == "prefix" else cooled(n)
    yield from compare(entry["id"], entry["value"], statistics(Independent(n), A, SingleEpoch(n)))


def output_perturbation(entry: Entry) -> Values:
    C = ToeplitzBanded(np.ones(1024), 1024)
    yield from compare(entry["id"], entry["value"], statistics(C, W.prefix_sum(1024), SingleEpoch(1024)))


def banded_root(entry: Entry, kind: str, n: int, bands: int, b: int | None) -> Values:
    made = BandedInverse if kind == "bisr" else ToeplitzBanded
    C: Strategy = made.from_square_root(W.prefix_sum(n), bands)
    rule: Participation = SingleEpoch(n) if b is None else MinSeparation(n, b)
    yield from compare(entry["id"], entry["value"], statistics(C, W.prefix_sum(n), rule))


# Sensitivities


def linear(weights: np.ndarray | list[float], b: int, k: int | None) -> float:
    """The largest sum of weights over allowed steps: sens^2 of a diagonal C; negative ones are never taken."""
    diagonal = np.sqrt(np.maximum(weights, 1e-300))
    return sensitivity(Banded(diagonal[None]), MinSeparation(len(diagonal), b, k)).value ** 2


def linear_maximum(entry: Entry, b: int, k: int | None) -> Values:
    yield from one(entry, linear(LINEAR, b, k))


def two_maxima(C: np.ndarray, b: int, k: int | None) -> float:
    """jax_privacy's bound: in every row the heaviest steps, then the heaviest rows."""
    rows = [linear(row, b, k) for row in np.abs(C.T @ C)]
    return float(np.sqrt(linear(rows, b, k)))


def dense_separated(entry: Entry, sign: int, b: int, k: int | None) -> Values:
    C = given_matrix(8, bool(sign))
    ours = sensitivity(Dense(C), MinSeparation(8, b, k)).value
    theirs = entry["value"]
    yield Value(
        entry["id"], "jax_privacy_upper_bound", theirs["jax_privacy_upper_bound"], ours, "least",
        reason="theirs is an upper bound: in every row the heaviest steps, then the heaviest rows; ours tries all "
        "patterns where they are few, and equals the enumeration in the row below",
        variant=two_maxima(C, b, k),
    )  # fmt: skip
    yield Value(entry["id"], "brute_force_exact", theirs["brute_force_exact"], ours)


def fixed_epochs(entry: Entry, sign: int, k: int) -> Values:
    yield from one(entry, sensitivity(Dense(given_matrix(8, bool(sign))), FixedOrder(8, k, 8 // k)).value)


def banded_separated(entry: Entry, b: int) -> Values:
    C = given_matrix(8, False)
    C -= np.tril(C, -3)
    yield from one(entry, sensitivity(Banded(C), MinSeparation(8, b)).value)


def root_separated(entry: Entry, kind: str, n: int, b: int, k: int | None, bands: int | None) -> Values:
    C = SquareRoot(n) if bands is None else ToeplitzBanded.from_square_root(W.prefix_sum(n), bands)
    yield from one(entry, sensitivity(C, MinSeparation(n, b, k)).value)


def rising(entry: Entry) -> Values:
    ours = sensitivity(ToeplitzBanded(RISING, 8), MinSeparation(8, 2)).value
    majorant = ToeplitzBanded(np.maximum.accumulate(np.abs(RISING)[::-1])[::-1], 8)
    yield Value(
        entry["id"], "bound", entry["value"]["bound"], ours, "least",
        reason="the first column c of C rises, and theirs is the sensitivity of its non-increasing majorant; ours is "
        "exact here, since with at most 2b bands a participation meets only its neighbours",
        variant=sensitivity(majorant, MinSeparation(8, 2)).value,
    )  # fmt: skip
    yield Value(entry["id"], "brute_force_exact", entry["value"]["brute_force_exact"], ours)


# Buffered linear Toeplitz


def given_blt(entry: Entry, what: str) -> Values:
    blt = BLT(**GIVEN, n=10)
    if what == "inverse":
        inverse = blt.inverse()
        ours = {"buf_decay": inverse.decays, "output_scale": inverse.scales}
        yield from compare(entry["id"], entry["value"], ours)
        return
    far = 10**6
    yield from one(entry, {
        "coefs_10": lambda: blt.toeplitz_coefficients(),
        "max_error_n10": lambda: blt.last_prefix_variance(),
        "sens2_n10_minsep": lambda: sensitivity(blt, MinSeparation(10, 2, 5)).value ** 2,
        "sens2_n1000": lambda: sensitivity(BLT(**GIVEN, n=1000), SingleEpoch(1000)).value ** 2,
        # the variance grows linearly in the end: its slope
        "limit_max_error": lambda: (
            BLT(**GIVEN, n=2 * far).last_prefix_variance() - BLT(**GIVEN, n=far).last_prefix_variance()
        ) / far,
    }[what]())  # fmt: skip


def optimal_blt(entry: Entry, participation: Participation, buffers: int, objective: str) -> Values:
    """Their parameters in our formulas, then our own fit for the same purpose."""
    n, theirs = participation.n, entry["value"]
    peer, A = BLT(theirs["buf_decay"], theirs["output_scale"], n), W.prefix_sum(n)
    inverse = peer.inverse()
    ours = statistics(peer, A, SingleEpoch(n))
    yield from compare(entry["id"], theirs["single"], ours, "their BLT: ")
    yield Value(entry["id"], "their BLT: closed_form_max_error", theirs["closed_form_max_error"], ours["max_error"])
    yield Value(entry["id"], "their BLT: inv_buf_decay", theirs["inv_buf_decay"], inverse.decays)
    yield Value(entry["id"], "their BLT: inv_output_scale", theirs["inv_output_scale"], inverse.scales)
    for rule, value in theirs["minsep_sensitivity"].items():
        b, k = (None if part.endswith("None") else int(part.split("=")[1]) for part in rule.split(","))
        assert b is not None
        yield Value(
            entry["id"], f"their BLT: sensitivity, {rule}", value, sensitivity(peer, MinSeparation(n, b, k)).value
        )
    found = fit("blt", A, participation, objective, buffers=buffers)
    name = "max_rmse" if objective == "max" else "rmse"
    yield Value(
        entry["id"], f"optimum: {name}", statistics(peer, A, participation)[name],
        statistics(found, A, participation)[name], "least", reason="their optimiser stopped short of the optimum",
        above=LOCAL,
    )  # fmt: skip


def single_blt(entry: Entry, n: int, buffers: int) -> Values:
    yield from optimal_blt(entry, SingleEpoch(n), buffers, "max")


def separated_blt(entry: Entry, n: int, b: int, k: int, buffers: int, objective: str) -> Values:
    yield from optimal_blt(entry, MinSeparation(n, b, k), buffers, objective)


# Optima


def _optimum(A: W.Workload, order: Participation, tolerance: float) -> Any:
    """C as near to the optimum as arithmetic allows: a tolerance this small may be missed, which is no news here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the dense optimum is found to a gap")
        return fit_dense(A, order, tolerance=tolerance).C


def dense(entry: Entry, workload: str, n: int, k: int) -> Values:
    A = W.prefix_sum(n) if workload == "prefix" else cooled(n)
    order: Participation = SingleEpoch(n) if k == 1 else FixedOrder(n, k, n // k)
    ours = statistics(Dense(_optimum(A, order, 1e-9)), A, order)
    yield from compare(
        entry["id"], entry["value"], ours, rules=MEAN,
        reason="theirs stopped a little above the optimum; ours comes with a certificate",
    )  # fmt: skip


def dense_matrix(entry: Entry, n: int, k: int) -> Values:
    order: Participation = SingleEpoch(n) if k == 1 else FixedOrder(n, k, n // k)
    yield from one(entry, _optimum(W.prefix_sum(n), order, 1e-13), tolerance=1e-5)


def dense_banded(entry: Entry) -> Values:
    A, rule = W.prefix_sum(128), MinSeparation(128, 16)
    found = fit("banded", A, rule, bands=16)
    ours = statistics(found, A, rule) | {"single": sensitivity(found, SingleEpoch(128)).value}
    yield from compare(entry["id"], entry["value"], ours, rules=MEAN | {"single": "same"}, reason=BANDED)


def normalised_banded(entry: Entry, n: int, bands: int) -> Values:
    A = W.prefix_sum(n)
    ours = statistics(fit("banded", A, SingleEpoch(n), bands=bands), A, SingleEpoch(n))
    yield from compare(entry["id"], entry["value"], ours, rules=MEAN, reason=BANDED)


BANDED = "a fit of every column; both optimisers stop a little above the optimum, ours the lower"


def banded_toeplitz(entry: Entry, n: int, bands: int, objective: str) -> Values:
    A, theirs = W.prefix_sum(n), entry["value"]
    found = fit("toeplitz", A, SingleEpoch(n), objective, bands=bands)
    norm = sensitivity(found, SingleEpoch(n)).value
    unit = ToeplitzBanded(found.toeplitz_coefficients()[:bands] / norm, n)
    ours = statistics(unit, A, SingleEpoch(n)) | {"coef": unit.coefficients}
    peer = statistics(ToeplitzBanded(theirs["coef"], n), A, SingleEpoch(n))
    yield from compare(entry["id"], {k: v for k, v in theirs.items() if k in peer}, peer, "their C: ")
    yield from compare(entry["id"], theirs, ours, "optimum: ", rules=MEAN if objective == "mean" else MAX)


def banded_inverse(entry: Entry, n: int, bands: int, b: int) -> Values:
    """Their coefficients in our formulas, then our own fit."""
    A, rule, theirs = W.prefix_sum(n), MinSeparation(n, b), entry["value"]
    peer = BandedInverse(theirs["noising_coef"], n)
    ours = statistics(peer, A, rule)
    c = peer.toeplitz_coefficients()
    top = np.maximum.accumulate(np.abs(c)[::-1])[::-1]
    majorant = sensitivity(ToeplitzBanded(top, n), rule).value
    scale = {"sensitivity": 1.0, "loss_mean": 2.0, "loss_max": 2.0, "rmse": 1.0, "max_rmse": 1.0}
    for key, mine in ours.items():
        power = scale.get(key, 0.0)
        yield Value(
            entry["id"], f"their C: {key}", theirs[key], mine, "least" if power else "same", reason=MAJORANT,
            variant=mine * (majorant / ours["sensitivity"]) ** power,
        )  # fmt: skip
    bound = theirs["sens_matrix_bound"]
    yield Value(entry["id"], "their C: sens_matrix_bound", bound, ours["sensitivity"])
    found = statistics(fit("banded_inverse", A, rule, bands=bands), A, rule)
    yield Value(
        entry["id"], "optimum: rmse", theirs["rmse"], found["rmse"], "least",
        reason="ours is fitted to a smaller bound on the sensitivity, and their C has more in our formulas too",
    )  # fmt: skip


MAJORANT = (
    "the first column c of C is not monotone, and theirs is a bound (the majorant of c, or row by row); ours takes X "
    "itself, which is smaller, and never below the truth"
)


# Accounting


def gaussian(entry: Entry, kind: str, sigma: str, delta: str) -> Values:
    sigma_, delta_ = float(sigma), float(delta)
    ours = gdp_epsilon(1 / sigma_, delta_)
    if kind == "pld":
        yield from one(entry, ours, rule="least", reason=GAUSS, variant=pld(1 / sigma_, delta_))
    else:
        yield from one(entry, ours, rule="least", reason=RENYI, variant=renyi(1 / sigma_, delta_))


def gaussian_ten_times(entry: Entry) -> Values:
    mu = 10**0.5 / 5
    yield from one(entry, gdp_epsilon(mu, 1e-6), rule="least", reason=GAUSS, variant=pld(mu, 1e-6))


def gaussian_calibration(entry: Entry, epsilon: str, delta: str) -> Values:
    yield from one(
        entry, calibrate_gaussian(float(epsilon), float(delta)), rule="least",
        reason="theirs is the end of a bisection that stops early; ours keeps the same epsilon and delta, exactly",
        variant=smallest(float(epsilon), float(delta)),
    )  # fmt: skip


def poisson(entry: Entry, kind: str, sigma: str, steps: int, q: str) -> Values:
    delta = float(entry["note"].split("=")[1])
    arguments = (float(sigma), float(q), steps, delta)
    reason = RENYI if kind == "rdp" else "10^-17 a step is taken off delta first, for the rounding of the transform"
    yield from one(entry, poisson_epsilon(*arguments), rule="least", reason=reason, variant=sampled(kind, *arguments))


def cyclic(entry: Entry, bands: int) -> Values:
    """Cyclic sampling of banded C: a unit is in every bands-th step with q = bands B / N, the same as Poisson."""
    yield from one(entry, poisson_epsilon(2.0, bands / 128, 1024 // bands, 1e-6))


def cyclic_long(entry: Entry, bands: int) -> Values:
    """Twenty epochs of 100 steps, at four cycles; the largest takes every unit of its group."""
    q, sigma = {1: (0.01, 1.5), 10: (0.1, 2.0), 50: (0.5, 3.0), 100: (1.0, 4.0)}[bands]
    ours = poisson_epsilon(sigma, q, 2000 // bands, 1e-5) if q < 1 else gdp_epsilon(20**0.5 / sigma, 1e-5)
    yield from one(entry, ours, tolerance=1e-3, reason="their grid")


def cyclic_calibration(entry: Entry) -> Values:
    yield from one(
        entry, calibrate_poisson(1.0, 1e-6, 0.125, 64), tolerance=1e-5,
        reason="both searches stop within 1e-6 of epsilon",
    )  # fmt: skip


def tree_epsilon(entry: Entry, leaves: int | None) -> Values:
    trees = Tree(600, restarts=(100, 300)) if leaves is None else Tree(leaves)
    mu = sensitivity(trees, SingleEpoch(trees.n)).value / 10
    yield from one(entry, gdp_epsilon(mu, 1e-6), rule="least", reason=RENYI, variant=renyi(mu, 1e-6))


FIXED_SIZE = "a sampler of batches of one size, which the package does not have"
SAMPLERS = "of secret sampling: tests/accounting/amplification compares it"
_B, _K = r"b(\d+)", r"k(\d+|None)"

RULES = (
    Rule(r"sqrt_(noising_)?coefs_16", lambda e, kind: coefficients(e, "noising" if kind else "")),
    Rule(r"bisr_(prefix|momentum0\.9)_b8", banded_inverse_root),
    Rule(r"inverse_coef_given", lambda e: one(e, inverse_series([1.0, 0.5, 0.25, 0.125], 12))),
    Rule(
        r"multiply_given",
        lambda e: one(e, ToeplitzBanded([1.0, 0.5, 0.25], 5).matrix() @ np.array([2.0, -1.0, 0.5, 0.0, 0.0])),
    ),
    Rule(
        r"momentum_matrix_n6",
        lambda e: one(e, W.momentum(6, 0.9, [1.0, 0.8, 0.6, 0.4, 0.2, 0.1]).matrix()),
    ),
    Rule(r"momentum095_cooldown_n8", lambda e: one(e, cooled(8).matrix())),
    Rule(r"sqrt_toeplitz_(prefix|momentum)_n(\d+)", root_error),
    Rule(r"identity_(prefix|momentum)_n(\d+)", identity_error),
    Rule(r"output_pert_prefix_n1024", output_perturbation),
    Rule(r"(banded_sqrt|bisr)_prefix_n(\d+)_b(\d+)(?:_minsep(\d+))?", banded_root),
    Rule(r"per_query_error_n8_b3", lambda e: one(e, ToeplitzBanded([1.0, 0.5, 0.375], 8).prefix_variance())),
    Rule(r"colnorm_banded_default_n64_b4_pqe", normalised_columns),
    Rule(
        rf"true_max_participations_n(\d+)_{_B}_{_K}",
        lambda e, n, b, k: one(e, MinSeparation(n, b, k).max_participations),
    ),
    Rule(rf"vecsens_{_B}_{_K}", linear_maximum),
    Rule(rf"dense_minsep_upper_sign(\d)_n8_{_B}_{_K}", dense_separated),
    Rule(r"fixed_epoch_sign(\d)_n8_k(\d)", fixed_epochs),
    Rule(r"banded_sens_testmat8_bands3_minsep(\d)", banded_separated),
    Rule(rf"(sqrt|bsr)_minsep_sens_n(\d+)_{_B}_{_K}(?:_bands(\d+))?", root_separated),
    Rule(r"minsep_sens_increasing_coefs_bound", rising),
    Rule(r"stream_(banded_toeplitz_colnorm|blt_inverse|blt_forward)_n8", stream),
    Rule(r"gauss_eps_(pld|rdp)_s([\d.]+)_d([\de.-]+)", gaussian),
    Rule(r"gauss_nm_pld_e([\d.]+)_d([\de.-]+)", gaussian_calibration, slow=True),
    Rule(r"gauss_k10_eps_pld", gaussian_ten_times),
    Rule(r"poisson_eps_(pld|rdp)_s([\d.]+)_T(\d+)_q([\d.]+)", poisson, slow=True),
    Rule(r"fixed_wor_eps_rdp", skip(FIXED_SIZE)),
    Rule(r"truncated_poisson_eps_pld(?:_loose|_s2.0_T2000)?|bandmf_truncated_eps(?:_\d)?", skip(SAMPLERS)),
    Rule(r"(?:bnb|bminsep)_(?:delta|loss)_.*|cyclic_delta_.*", skip(SAMPLERS)),
    Rule(r"mc_(?:minimum_samples|(?:overall|base)_delta)", skip("a bound of their Monte Carlo; ours is another")),
    Rule(r"bandmf_cyclic_eps_n2000_b(\d+)", cyclic_long, slow=True),
    Rule(r"bandmf_cyclic_eps_b(\d+)", cyclic, slow=True),
    Rule(r"bandmf_nm_e1_b16", cyclic_calibration, slow=True),
    Rule(r"amplified_opt_n256", skip("chooses the bands for cyclic sampling, which the package does not plan")),
    Rule(r"tree_(?:single_epoch|restarts)_eps_rdp(?:_T(\d+))?", tree_epsilon),
    Rule(r"zcdp_rho_event", lambda e: one(e, zcdp_rho(1 / 5.0))),
    Rule(r"dense_(prefix|momentum)_n(\d+)_k(\d+)", dense),
    Rule(r"dense_C_n(\d+)_k(\d+)", dense_matrix),
    Rule(r"dense_banded_equalnorm_n128_b16", dense_banded),
    Rule(r"toeplitz_opt_n(\d+)_b(\d+)_(mean|max)", banded_toeplitz),
    Rule(r"bandinv_opt_n(\d+)_b(\d+)_minsep(\d+)", banded_inverse),
    Rule(r"colnorm_banded_opt_n(\d+)_b(\d+)", normalised_banded),
    Rule(r"blt_given_pillutla", skip("a score of their parametrisation that enters no error")),
    Rule(r"blt_given_(.*)", given_blt),
    Rule(r"ra_blt_5_clipped", skip("the start of their optimiser; ours starts elsewhere")),
    Rule(r"blt_opt_max_n(\d+)_buf(\d+)", single_blt),
    Rule(r"blt_opt_minsep_n(\d+)_b(\d+)_k(\d+)_buf(\d+)_(mean|max)", separated_blt),
)
