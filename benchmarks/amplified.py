"""Secret orders beside open ones, and beside jax_privacy: error of the iterates at one epsilon and delta.

    python -m benchmarks.factorize --only amplified            what is missing in benchmarks/results/amplified.jsonl
    python -m benchmarks.factorize --only amplified --write    the same, then its part of docs/compared.md from the file
    python -m benchmarks.factorize --only amplified --quick    200 steps, two epsilons; kept nowhere

The error is the root mean square over steps of the noise in A G, for clip norm 1, learning rate 1 and batch size 1:
error(A, C) times the noise multiplier that the claim needs. Batches have the same expected size everywhere.
"""

import functools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyorder as ao
from anyorder import workload as W
from anyorder.accounting.amplification.bound import calibrate_amplified
from anyorder.accounting.amplification.claims import default_method
from anyorder.accounting.amplification.methods import describe
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.accounting.amplification.monte_carlo import MonteCarlo
from anyorder.accounting.gaussian import calibrate_gaussian
from anyorder.accounting.poisson import calibrate_poisson
from anyorder.optimize import choose, fit
from anyorder.optimize.amplified import Judge
from anyorder.optimize.candidates import kind_in
from anyorder.participation import BallsInBins, CyclicPoisson, FixedOrder, PoissonSampling
from anyorder.patterns import Participation
from anyorder.strategy import Independent, Strategy, ToeplitzBanded, registry
from benchmarks._peers import interpreter
from benchmarks._report import Row
from benchmarks.bins import bins_interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amplified.jsonl"
PAGE = ROOT / "docs" / "compared.md"
MARKS = ("<!-- amplified -->", "<!-- end of amplified -->")
PACKAGE = "jax-privacy==2.0.0"
DELTA = 1e-5
SETTINGS = ((50, 40),)
QUICK = ((5, 40),)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
FIRST = (1.0, 8.0, 2.0, 4.0)  # what is measured first
WORKLOADS: dict[str, Callable[[int], W.Workload]] = {
    "prefix sum": W.prefix_sum,
    "momentum 0.9": lambda n: W.momentum(n, 0.9),
}
KINDS = {"BLT": "blt", "banded": "toeplitz", "banded inverse": "banded inverse", "tree": "tree"}
_PEER_SAMPLES = 5_000
_TIE = 1 + 1e-5  # one C under one order: searches for the noise end so near each other
BANDS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 50, 64, 80, 100)


class Case(NamedTuple):
    """A column of a table."""

    k: int
    b: int
    workload: str
    epsilon: float

    @property
    def n(self) -> int:
        """Steps."""
        return self.k * self.b

    @property
    def A(self) -> W.Workload:
        """The workload."""
        return WORKLOADS[self.workload](self.n)

    @property
    def bins(self) -> BallsInBins:
        """The secret order."""
        return BallsInBins(self.k, self.b)


class Found(NamedTuple):
    """A cell: its error, noise std over clip norm, and what it is."""

    error: float
    noise: float
    strategy: str
    method: str


# -- orders without secrets, and independent noise ---------------------------------------------------------------------


def fixed(case: Case) -> Found:
    """The best C of a fixed order."""
    return _open(case, _fixed_candidates(case._replace(epsilon=0.0))[0].strategy, _fixed(case))


def _open(case: Case, strategy: Strategy, order: Participation) -> Found:
    sigma = calibrate_gaussian(case.epsilon, DELTA)
    loss = registry.rmse(strategy, case.A, order) * sigma
    return Found(loss, loss / _unit_error(strategy, case), strategy.describe(), "Gaussian, exact")


def dpsgd(case: Case) -> Found:
    """Independent noise under Poisson sampling."""
    sigma = calibrate_poisson(case.epsilon, DELTA, 1 / case.b, case.n)
    plan = ao.plan(
        order=PoissonSampling(case.n, 1 / case.b), batch_size=1, mechanism="independent", optimizer=case.A,
        noise_multiplier=sigma, delta=DELTA,
    )  # fmt: skip
    return Found(plan.noise_error(), sigma, plan.strategy.describe(), "privacy loss distribution")


# -- secret orders -----------------------------------------------------------------------------------------------------


def cyclic(case: Case) -> Found:
    """Banded C of the number of bands that is best, each with cycles of as many groups."""
    sigmas = {}
    for bands in (1, *BANDS):
        if bands <= case.b:
            C = fit("toeplitz", case.A, CyclicPoisson(case.n, bands, bands / case.b), bands=bands, **_claim(case))
            sigmas[C] = _cyclic_noise(C, bands, bands / case.b, case)
    best = min(sigmas, key=lambda C: sigmas[C] * _unit_error(C, case))
    return _found(best, sigmas[best], case, "privacy loss distribution")


def _cyclic_noise(C: Strategy, cycle: int, q: float, case: Case) -> float:
    times = math.ceil(case.n / cycle)
    alone = math.sqrt(times) * calibrate_gaussian(case.epsilon, DELTA)
    if q < 1:
        alone = calibrate_poisson(case.epsilon, DELTA, q, times)
    return alone * math.sqrt(float(C.column_norms_squared().max()))


def bins_independent(case: Case) -> Found:
    """Independent noise under balls in bins."""
    return _in_bins(Independent(case.n), case)


def bins(kind: str, case: Case) -> Found:
    """The C of a kind that was fitted for balls in bins."""
    candidates = [one for one in _bins_candidates(case) if _is(one.name, kind)]
    return _in_bins(candidates[0].strategy, case)


def _is(name: str, kind: str) -> bool:
    return kind_in(name) == {"toeplitz": "banded toeplitz"}.get(kind, kind)


def _in_bins(strategy: Strategy, case: Case) -> Found:
    """With the least noise of its claim."""
    method = default_method(strategy, case.bins)
    sigma = calibrate_amplified(strategy, case.bins, case.epsilon, DELTA, method)
    return _found(strategy, sigma, case, describe(method))


def _found(strategy: Strategy, sigma: float, case: Case, method: str) -> Found:
    return Found(sigma * _unit_error(strategy, case), sigma, strategy.describe(), method)


def _unit_error(strategy: Strategy, case: Case) -> float:
    return math.sqrt(float(registry.row_variances(strategy, case.A).mean()))


def _fixed(case: Case) -> FixedOrder:
    return FixedOrder(case.n, case.k, case.b)


def _claim(case: Case) -> dict[str, float]:
    return {"epsilon": case.epsilon, "delta": DELTA}


@functools.lru_cache(4)
def _judge(case: Case) -> Judge:
    return Judge(case.A, case.bins, "mean", case.epsilon, DELTA)


@functools.lru_cache(8)
def _fixed_candidates(case: Case) -> list[Any]:
    return choose(case.A, _fixed(case), max_cost=case.b)


@functools.lru_cache(2)
def _bins_candidates(case: Case) -> list[Any]:
    return choose(case.A, case.bins, max_cost=case.b, **_claim(case))


# -- jax_privacy -------------------------------------------------------------------------------------------------------


def jax_cyclic(accountant: str, case: Case) -> Found:
    """Its banded C and its noise under cyclic Poisson sampling; of its numbers of bands the best under the workload."""
    at = EPSILONS.index(case.epsilon)
    cells = [
        _found(ToeplitzBanded(one["coef"], case.n), one[accountant][at], case, "")
        for one in _jax(case.k, case.b)["fits"]
    ]
    return min(cells)._replace(method={"rdp": "Renyi divergences", "pld": "privacy loss distribution"}[accountant])


def jax_bins(case: Case) -> Found:
    """Its banded C under balls in bins, at the least delta that its Monte Carlo allows with 10^7 samples.

    It would need hours of sampling for each sigma tried: ours takes few, and the lower end of their interval, which
    is in its favour.
    """
    peer = _jax(case.k, case.b)
    fits = [ToeplitzBanded(one["coef"], case.n) for one in peer["fits"]]
    best = min(fits, key=lambda C: _judge(case)(C).loss)
    x = math.log(_judge(case).noise(best).sigma)
    G = bins_gram(best, case.bins)
    for _ in range(5):
        low = bins_interval(G, math.exp(x), peer["base_delta"], MonteCarlo(_PEER_SAMPLES)).lower
        step = math.log(low / case.epsilon)
        x += step
        if abs(step) < 3e-3:
            break
    return _found(best, math.exp(x), case, "Monte Carlo, 10^7 samples")


@functools.cache
def _jax(k: int, b: int) -> dict[str, Any]:
    """What its script prints, kept in a file beside the results."""
    path = RESULTS.with_name(f"amplified_jax_privacy_{k}_{b}.json")
    if not path.exists():
        script = Path(__file__).parent / "peers" / "jax_privacy_amplified.py"
        words = [interpreter(PACKAGE, module="jax_privacy"), script, k * b, b, DELTA, *EPSILONS]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True)
        path.write_text(done.stdout, encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


# -- the grid ----------------------------------------------------------------------------------------------------------

Way = Callable[[Case], Found]
OPEN: dict[str, Way] = {"best C, fixed order": fixed}
BINS: dict[str, Way] = {f"{name}, balls in bins": functools.partial(bins, kind) for name, kind in KINDS.items()}
CYCLIC: dict[str, Way] = {"banded, cyclic Poisson": cyclic}
PEERS: dict[str, Way] = {
    "DP-SGD, Poisson": dpsgd,
    "jax_privacy, banded, cyclic Poisson": functools.partial(jax_cyclic, "rdp"),
    "jax_privacy, the same by privacy loss distributions": functools.partial(jax_cyclic, "pld"),
    "jax_privacy, banded, balls in bins": jax_bins,
}
WAYS: dict[str, Way] = OPEN | PEERS | {"DP-SGD, balls in bins": bins_independent} | CYCLIC | BINS


def rows(quick: bool) -> Iterator[Row]:
    """Every cell, those on file as they are; then whether each of ours is at least as good as every peer."""
    settings, epsilons = (QUICK, (1.0, 8.0)) if quick else (SETTINGS, EPSILONS)
    on_file = {} if quick else read()
    ways = {name: way for name, way in WAYS.items() if not (quick and name.startswith("jax"))}
    cases = [Case(k, b, w, e) for k, b in settings for w in WORKLOADS for e in sorted(epsilons, key=FIRST.index)]
    for case in cases:
        for name, way in ways.items():
            if (name, case) not in on_file:
                start = time.perf_counter()
                found = way(case)
                on_file[name, case] = found
                if not quick:
                    _keep(name, case, found, time.perf_counter() - start)
        peer = min(found.error for (name, at), found in on_file.items() if at == case and name in PEERS)
        label = f"k={case.k}, b={case.b}, {case.workload}, epsilon {case.epsilon:g}"
        for name in ways:
            ours = on_file[name, case].error
            yield Row(f"{label}: {name}", ours, None if name in PEERS else peer, peer / ours, "error; best peer")


def _keep(name: str, case: Case, found: Found, took: float) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    line = {"way": name, **case._asdict(), **found._asdict(), "seconds": round(took, 1)}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read() -> dict[tuple[str, Case], Found]:
    """The cells on file; the last line of each counts."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    cells = [json.loads(line) for line in lines]
    return {
        (cell["way"], Case(*(cell[name] for name in Case._fields))): Found(*(cell[name] for name in Found._fields))
        for cell in cells
    }


# -- the page ----------------------------------------------------------------------------------------------------------


def write() -> None:
    """Its part of docs/compared.md, from the cells on file."""
    cells = read()
    parts = [_verdict(cells)]
    for k, b in SETTINGS:
        for workload in WORKLOADS:
            if not any(_whole(cells, Case(k, b, workload, epsilon)) for epsilon in EPSILONS):
                continue
            parts += [f"\n### {workload}, {k} epochs of {b} steps\n", _table(cells, k, b, workload)]
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text("\n".join([f"{before}{MARKS[0]}\n", *parts, f"\n{MARKS[1]}{after}"]), encoding="utf-8")


def _table(cells: dict[tuple[str, Case], Found], k: int, b: int, workload: str) -> str:
    lines = ["| | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |", "|---|" + "---|" * len(EPSILONS)]
    for name in WAYS:
        found = [cells.get((name, Case(k, b, workload, e))) for e in EPSILONS]
        if any(found):
            lines.append(
                f"| {name} | "
                + " | ".join("not measured" if one is None else _number(one.error) for one in found)
                + " |"
            )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _verdict(cells: dict[tuple[str, Case], Found]) -> str:
    """In how many cells the best of ours is at least as good as each peer, and where not."""
    cases = [Case(k, b, w, e) for k, b in SETTINGS for w in WORKLOADS for e in EPSILONS]
    whole = [case for case in cases if _whole(cells, case)]
    if not whole:
        return "Whether ours is at least as good as every peer was not measured yet."
    best = {case: min(cells[name, case].error for name in (*BINS, *CYCLIC)) for case in whole}
    peers = {case: min(cells[name, case].error for name in PEERS) for case in whole}
    behind = [case for case in whole if best[case] > peers[case] * _TIE]
    return (
        f"The best secret order of ours is at least as good as every peer in {len(whole) - len(behind)} of "
        f"{len(whole)} columns{_where(behind)}."
    )


def _whole(cells: dict[tuple[str, Case], Found], case: Case) -> bool:
    return all((name, case) in cells for name in (*BINS, *CYCLIC, *PEERS))


def _where(cases: list[Case]) -> str:
    if not cases:
        return ""
    return "; not at " + ", ".join(f"{c.workload} k={c.k} epsilon {c.epsilon:g}" for c in cases)
