"""Smith 2025, lecture 14 of BU CS599, "DP-FTRL": its constants and bounds [S25].

Steps T, sigma the noise on a node, d dimensions, gradients of norm 1 at most. The tree of the lecture has all nodes
over T leaves, and prefix sums add the nodes of the binary expansion of t. Its slides were read by a machine: a lost
exponent may be ours.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting import gdp_epsilon
from anyorder.online import regret_bound
from anyorder.participation import SingleEpoch
from anyorder.strategy import Tree
from anyorder.strategy.registry import sensitivity
from reproductions._claims import Claim, Curves, Figure, Run, judged
from reproductions.kairouz import regret

TITLE = "Smith 2025, Lecture 14: DP-FTRL"

Floats = NDArray[np.float64]


def privacy(run: Run) -> Iterator[Claim]:
    """The noise of a node for (epsilon, delta), and the Gaussian privacy it has."""
    worst, at = 0.0, (0.0, 0.0, 0)
    for T in (2**4, 2**10, 2**20):
        for delta in (1e-3, 1e-6, 1e-10):
            for epsilon in np.geomspace(0.01, 8, 60).tolist():
                sigma = 2 * math.sqrt(math.log2(T) * math.log(1 / delta)) / epsilon
                exact = gdp_epsilon(math.sqrt(math.log2(T) + 1) / sigma, delta)
                if exact / epsilon > worst:
                    worst, at = exact / epsilon, (epsilon, delta, T)
    yield Claim(
        place="Tree mechanism, privacy",
        statement="Noise sigma = 2 sqrt(log2(T) ln(1/delta)) / epsilon at each node is (epsilon, delta)-private",
        theirs="epsilon",
        ours=f"at most {worst:.2f} epsilon: at epsilon {at[0]:.2g}, delta {at[1]:g}, T = {at[2]}",
        verdict=judged(worst <= 1),
        value=worst,
        why=(
            "Exactly, log2(T) + 1 nodes over a leaf, T from 16 to 2^20, delta from 1e-3 to 1e-10, epsilon from 0.01"
            " to 8."
        ),
    )

    def crossing(delta: float) -> float:
        T, low, high = 1024, 1.0, 1000.0
        while high / low > 1.0001:
            middle = math.sqrt(low * high)
            sigma = 2 * math.sqrt(math.log2(T) * math.log(1 / delta)) / middle
            exact = gdp_epsilon(math.sqrt(math.log2(T) + 1) / sigma, delta)
            low, high = (middle, high) if exact <= middle else (low, middle)
        return low

    ends = {delta: crossing(delta) for delta in (1e-3, 1e-6, 1e-10)}
    yield Claim(
        place="Tree mechanism, privacy",
        statement="That holds for every epsilon, as no condition is given",
        theirs="every epsilon",
        ours="up to " + ", ".join(f"{e:.1f} (delta {d:g})" for d, e in ends.items()) + " at T = 1024",
        verdict=judged(min(ends.values()) > 900),
        value=list(ends.values()),
        why=(
            "Noise falls as 1/epsilon, but for large epsilon a Gaussian needs about 1/sqrt(2 epsilon): mu^2 / 2 grows"
            " faster than epsilon."
        ),
    )
    found = [sensitivity(Tree(T), SingleEpoch(T)).value for T in (2, 16, 1024)]
    stated = [math.sqrt(math.log2(T)) for T in (2, 16, 1024)]
    told = ", ".join(f"{value:.3f}" for value in found)
    yield Claim(
        place="Tree mechanism, privacy",
        statement="With noise sigma on a node the mechanism is (sigma sqrt(log2 T))-GDP",
        theirs=f"for sigma 1: {', '.join(f'{value:.3f}' for value in stated)} at T = 2, 16, 1024",
        ours=f"{told}; and it falls with sigma",
        verdict=judged(all(abs(a - b) < 1e-9 for a, b in zip(found, stated, strict=True))),
        value=found,
        why=(
            "mu = sqrt(log2(T) + 1) / sigma: the noise divides, and a leaf has log2(T) + 1 nodes over it, itself among"
            " them."
        ),
    )


def accuracy(run: Run) -> Iterator[Claim]:
    """Nodes in a sum, and the norm of the noise."""
    T = 1024
    nodes = np.array([t.bit_count() for t in range(1, T + 1)])
    yield Claim(
        place="Tree mechanism, accuracy",
        statement="The noise of a sum is that of k nodes, k about log2 T",
        theirs="k about 10 at T = 1024",
        ours=f"at most {nodes.max()}, {nodes.mean():.2f} on average",
        verdict=judged(bool(nodes.max() <= 10)),
        why="The most is log2 T; the mean is half of that.",
        value=[float(nodes.max()), float(nodes.mean())],
    )
    draws = 60 if run.quick else 2000
    rng, failing, ratios = np.random.default_rng(0), [], {}
    for d in (1, 10, 100):
        means = np.array([_mean_norm(T, d, rng) for _ in range(draws)])
        for beta in (0.5, 0.1, 0.01):
            bound = math.sqrt(d * math.log2(T) * math.log(1 / beta))
            share = float((means > bound).mean())
            ratios[f"d = {d}, beta = {beta:g}"] = float(np.quantile(means, 1 - beta)) / bound
            if share > beta + 3 * math.sqrt(beta * (1 - beta) / draws):
                failing.append(f"d = {d}, beta = {beta:g}: {share:.2f}")
    yield Claim(
        place="Tree mechanism, accuracy",
        statement=(
            "With probability 1 - beta the mean norm of the noise over steps is at most sigma sqrt(d log2(T)"
            " ln(1/beta))"
        ),
        theirs="for all beta > 0",
        ours=f"quantiles are {min(ratios.values()):.2f} to {max(ratios.values()):.2f} of it"
        + (f"; it is passed with probability, at {'; '.join(failing)}" if failing else ""),
        verdict=judged(not failing),
        value=ratios,
        seeds=(0,),
        why=f"T = 1024, {draws} draws, d of 1, 10, 100."
        + (
            " For beta near 1 the bound goes to 0, and the mean norm does not: it needs "
            "sqrt(d) + sqrt(2 ln(1/beta)) in place of the product."
            if failing
            else ""
        ),
    )
    means = np.array([_mean_norm(T, 100, rng) for _ in range(draws)])
    share = float((means > math.sqrt(100 * 10 * math.log(1 / 0.9))).mean())
    yield Claim(
        place="Tree mechanism, accuracy",
        statement="The same for beta near 1",
        theirs="probability 0.9 at most of passing it, beta = 0.9",
        ours=f"passed with probability {share:.2f} at d = 100, T = 1024",
        verdict=judged(share <= 0.9 + 0.03),
        value=share,
        seeds=(0,),
        why="The bound goes to 0 as beta goes to 1, and the norm does not; no use is made of such beta.",
    )


def _mean_norm(T: int, d: int, rng: np.random.Generator) -> float:
    """Mean over steps of the norm of the noise in the prefix sums, sigma 1: nodes by level, T a power of two."""
    total = np.zeros((T + 1, d))
    steps = np.arange(T + 1)
    for level in range(T.bit_length()):
        drawn = rng.standard_normal(((T >> level) + 1, d))
        on = (steps >> level) & 1 == 1
        total[on] += drawn[(steps[on] >> level) - 1]
    return float(np.linalg.norm(total[1:], axis=1).mean())


def theorem(run: Run) -> Iterator[Claim]:
    """Regret: measured elsewhere; its terms."""
    rows = regret.lines("adversary")
    shares = []
    for row in rows:
        made = regret.plan(row["n"])
        levels = math.log2(row["n"])
        error = made.noise_std * math.sqrt(row["d"] * levels * math.log(1 / 0.05))
        at = regret_bound(row["n"], row["d"], lipschitz=1.0, radius=1.0, plan=made, beta=None).regularization
        shares.append(row["regret"] / ((error + 0.5) / at + at / (2 * row["n"])))
    yield Claim(
        place="Theorem",
        statement=(
            "Regret is at most (tree error)/lambda + 1/lambda + lambda |w*|/2n for every w*, with probability 1 - beta"
        ),
        theirs="an upper bound",
        ours=(
            f"an adversary who reads the noise reaches {min(shares):.2f} to {max(shares):.2f} of it, |w*| = 1, beta"
            " 0.05"
        ),
        verdict=judged(max(shares) <= 1),
        value=shares,
        measured=regret.MEASURED,
        why=(
            "With 1/(2 lambda), as its proof has it, and the square of the norm in the last term, which the statement"
            " leaves out."
        ),
    )
    n, lam = 1000, 100.0
    paid, best = _line(n, lam, 10.0)
    bound, stated = 1 / (2 * lam) + lam * 10.0**2 / (2 * n), 1 / lam + lam * 10.0 / (2 * n)
    yield Claim(
        place="Theorem",
        statement="The comparator's term is lambda |w*| / 2n, with the norm itself",
        theirs=f"regret at most {stated:.2f} without noise: n = 1000, lambda = 100, |w*| = 10",
        ours=f"{(paid - best) / n:.3f}",
        verdict=judged((paid - best) / n <= stated),
        value=[(paid - best) / n, stated, bound],
        why=f"Losses -w: the norm must be squared; then the bound is {bound:.3f}. The slip may be our copy's.",
    )
    slopes = [regret.slope(rows, "n"), regret.slope(rows, "d")]
    yield Claim(
        place="Theorem",
        statement="With the best lambda regret is of order sqrt(sqrt(d) / (epsilon n)), up to logarithms",
        theirs="-0.5 in n, 0.25 in d",
        ours=f"{slopes[0]:.2f} in n, {slopes[1]:.2f} in d",
        verdict=judged(-0.55 < slopes[0] < -0.4 and slopes[1] < 0.35),
        value=slopes,
        measured=regret.MEASURED,
        why=regret.SETTING,
    )


def _line(n: int, lam: float, far: float) -> tuple[float, float]:
    """Losses -w in one dimension: what w_t = t / lambda pays, and what w* = far pays."""
    return -sum(t / lam for t in range(n)), -n * far


def potential(run: Run) -> Iterator[Claim]:
    """The steps of the proof."""
    rng = np.random.default_rng(0)
    n, d, lam, worst, apart = 500, 5, 7.0, -math.inf, 0.0
    w, target, spent, regrets = np.zeros(d), rng.standard_normal(d), 0.0, 0.0
    for _ in range(n):
        g = rng.standard_normal(d)
        g /= max(1.0, float(np.linalg.norm(g)))
        after = w - g / lam
        r = float(g @ (w - target))
        phi, then = 0.5 * float((w - target) @ (w - target)), 0.5 * float((after - target) @ (after - target))
        worst = max(worst, r / lam - float(g @ g) / (2 * lam**2) - (phi - then))
        apart = max(apart, abs(r / lam - float(g @ g) / (2 * lam**2) - (phi - then)))
        regrets, spent, w = regrets + r, spent + float(g @ g), after
    yield Claim(
        place="Proof, regret",
        statement="Phi_t - Phi_(t+1) >= r_t / lambda - |g_t|^2 / (2 lambda^2) for Phi_t = |w'_t - w*|^2 / 2",
        theirs="an inequality",
        ours=f"an equality, to {apart:.0e}, in {n} random steps",
        verdict=judged(worst < 1e-12),
        value=apart,
        seeds=(0,),
        why="Without a constraint; projections only help.",
    )
    left, right = regrets / n, lam / n * (0.5 * float(target @ target)) + spent / (2 * lam * n)
    yield Claim(
        place="Proof, regret",
        statement="Summed over steps: mean r_t <= lambda Phi_1 / n + 1 / (2 lambda)",
        theirs="an upper bound",
        ours=f"{left:.4f} <= {right:.4f}",
        verdict=judged(left <= right + 1e-12),
        value=[left, right],
        seeds=(0,),
        why="Its last line then writes Phi_1 = |w*| for |w*|^2 / 2.",
    )
    T = 256
    noise = np.cumsum(Tree(T).noising_matrix() @ rng.standard_normal((Tree(T).num_rows, d)), axis=0)
    g = rng.standard_normal((T, d))
    g /= np.linalg.norm(g, axis=1, keepdims=True)
    behind = np.vstack([np.zeros(d), noise[:-1]])
    left, right = float(-(g * behind).sum(1).mean()) / lam, float(np.linalg.norm(behind, axis=1).mean()) / lam
    yield Claim(
        place="Proof, noise",
        statement="The noise term is at most the mean norm of the noise over lambda",
        theirs="Cauchy and Schwarz",
        ours=f"{left:.3f} <= {right:.3f} on random gradients; the adversary above makes them equal",
        verdict=judged(left <= right),
        value=[left, right],
        seeds=(0,),
    )


def errors(run: Run) -> Iterator[Claim]:
    """Online sums: the tree against T."""
    sizes = [2**k for k in range(2, 11 if run.quick else 15)]
    curves: dict[str, list[tuple[float, float]]] = {"tree": [], "a noise on each gradient": [], "log2(T)": []}
    for T in sizes:
        levels = math.log2(T) + 1
        curves["tree"].append((T, math.sqrt(levels * float(np.mean([t.bit_count() for t in range(1, T + 1)])))))
        curves["a noise on each gradient"].append((T, math.sqrt((T + 1) / 2)))
        curves["log2(T)"].append((T, math.log2(T)))
    ratio = [a / b for (_, a), (_, b) in zip(curves["tree"], curves["log2(T)"], strict=True)]
    yield Claim(
        place="Gradient descent as online sums",
        statement="At one privacy the error of a sum grows as log T with the tree",
        theirs="sqrt(d log^2(n) ln(1/delta) ln(1/beta)) / epsilon",
        ours=f"{ratio[-1]:.2f} log2(T) at T = {sizes[-1]}, falling from {ratio[0]:.2f}",
        verdict=judged(ratio[-1] <= ratio[0] <= 1.5),
        value=ratio,
        curves=Curves("steps T", "root mean square error of a sum (mu 1)", curves, log="xy"),
        why="Root mean square over steps, in clip norms; sqrt(T / 2) for independent noise.",
    )


FIGURES = (
    Figure("sums", errors),
    Figure("privacy", privacy),
    Figure("accuracy", accuracy),
    Figure("theorem", theorem),
    Figure("proof", potential),
)
