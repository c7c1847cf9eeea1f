"""What the theorems state, beside the exact value: privacy of one tree, restarts, several visits, least squares."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, norm

from anyorder.accounting import gdp_epsilon
from anyorder.participation import FixedOrder, KnownOrder, MinSeparation, SingleEpoch
from anyorder.strategy import Tree
from anyorder.strategy.registry import sensitivity, unit_sensitivities
from reproductions._claims import Claim, Curves, Run, judged


def levels(n: int) -> int:
    """ceil(log2(n + 1))."""
    return n.bit_length()


def mu_as_stated(epsilon: float, delta: float) -> float:
    """Of the noise of Theorems 4.1 and C.3 for this epsilon: the levels of the tree cancel."""
    return epsilon / math.sqrt(2 * math.log(1 / delta))


def worst(stated: Callable[[float, float], float], delta: float) -> tuple[float, float, float]:
    """Where exact over stated is largest, up to 2 ln(1/delta): stated, exact, and the first stated that is too small.

    `stated(epsilon, delta)` is the mu of the run whose noise is set for that epsilon.
    """
    grid = np.geomspace(0.01, 2 * math.log(1 / delta), 200)
    exact = np.array([gdp_epsilon(stated(float(epsilon), delta), delta) for epsilon in grid])
    at = int(np.argmax(exact / grid))
    over = np.flatnonzero(exact > grid)
    return float(grid[at]), float(exact[at]), float(grid[over[0]]) if len(over) else math.inf


def thm4_1(run: Run) -> Iterator[Claim]:
    """Levels, and the noise for (epsilon, delta)."""
    sizes = range(1, 200 if run.quick else 2049)
    found = [round(sensitivity(Tree(n), SingleEpoch(n)).value ** 2) for n in sizes]
    yield Claim(
        place="Theorem 4.1",
        statement="A gradient is in at most ceil(log2(n + 1)) nodes of the tree over n steps",
        theirs="ceil(log2(n + 1))",
        ours=f"the same for every n up to {sizes[-1]}",
        verdict=judged(found == [levels(n) for n in sizes]),
        why=(
            "Counting the nodes that prefix sums use. The algorithm as printed also fills a root over 2^ceil(log2 n)"
            " leaves, one node more where n is no power of two; it is never released."
        ),
        value=float(max(found)),
    )
    stated, exact, first = worst(mu_as_stated, 1e-6)
    grid = np.geomspace(0.1, 2 * math.log(1e6), 40).tolist()
    yield Claim(
        place="Theorem 4.1",
        statement=(
            "Noise sqrt(2 ceil(log2(n + 1)) ln(1/delta)) / epsilon is (epsilon, delta)-private for epsilon up to 2"
            " ln(1/delta)"
        ),
        theirs=f"epsilon {2 * math.log(1e6):.1f} at the end of the range, delta 1e-6",
        ours=f"{exact:.1f}, exactly; too small a claim from epsilon {first:.2f} on",
        verdict=judged(exact <= stated),
        why=(
            "The conversion of Renyi divergence alpha mu^2 / 2 costs mu^2 / 2 more than the theorem's epsilon; at small"
            " epsilon what the conversion wastes hides that."
        ),
        value=[stated, exact, first],
        curves=Curves(
            "epsilon as stated",
            "epsilon / stated epsilon (delta 1e-6)",
            {
                "stated": [(e, 1.0) for e in grid],
                "Theorem 4.1, exact": [(e, gdp_epsilon(mu_as_stated(e, 1e-6), 1e-6) / e) for e in grid],
                "Theorem D.1, exact": [(e, gdp_epsilon(math.sqrt(2) * mu_as_stated(e, 1e-6), 1e-6) / e) for e in grid],
            },
            log="x",
        ),
    )


def thmD1(run: Run) -> Iterator[Claim]:
    """Restarts in every epoch."""
    epochs, n = 5, 100
    tree = Tree(epochs * n, restarts=[n * i for i in range(1, epochs)])
    squared = sensitivity(tree, FixedOrder(epochs * n, epochs, n)).value ** 2
    yield Claim(
        place="Theorem D.1",
        statement="With restarts in each of E epochs of n steps the squared sensitivity is E ceil(log2(n + 1))",
        theirs=f"{epochs * levels(n)} for E = {epochs}, n = {n}",
        ours=f"{squared:.0f}",
        verdict=judged(round(squared) == epochs * levels(n)),
        value=squared,
    )
    for delta in (1e-6,):
        at_one = gdp_epsilon(1 / math.sqrt(math.log(1 / delta)), delta)
        stated, exact, first = worst(lambda e, d: e / math.sqrt(math.log(1 / d)), delta)
        yield Claim(
            place="Theorem D.1",
            statement="Noise sqrt(E ceil(log2(n + 1)) ln(1/delta)) / epsilon is (epsilon, delta)-private",
            theirs=f"epsilon 1; {stated:.1f} at the end of the range, delta {delta:g}",
            ours=f"{at_one:.2f}; {exact:.1f}; too small a claim from epsilon {first:.2f} on",
            verdict=judged(exact <= stated and at_one <= 1),
            why="A factor 2 under the root of Theorem 4.1 is lost: the noise is sqrt(2) too small.",
            value=[at_one, exact, first],
        )


def algorithm3(T: int, gap: int, E: int) -> int:
    """As printed: the bound on the squared sensitivity; `gap` steps at least between two of one unit."""
    total = 0
    for height in range(T.bit_length()):
        k, mu = T >> height, -(-(1 << height) // (gap + 1))
        full = min(k, E // mu)
        total += full * mu**2 + (full < k) * (E - full * mu) ** 2
    return total


def brute(T: int, gap: int, E: int) -> int:
    """The largest sum of squared counts over all allowed sets of steps."""
    most = 0
    for k in range(1, E + 1):
        for chosen in combinations(range(T), k):
            if all(b - a > gap for a, b in pairwise(chosen)):
                most = max(most, sum(round(v) for v in _counts(T, chosen)))
    return most


def _counts(T: int, chosen: tuple[int, ...]) -> list[int]:
    marks = np.zeros(T, dtype=int)
    marks[list(chosen)] = 1
    squares: list[int] = []
    for height in range(T.bit_length()):
        whole = T >> height << height
        squares.extend((marks[:whole].reshape(-1, 1 << height).sum(1) ** 2).tolist())
    return squares


def program(T: int, gap: int, E: int) -> float:
    """Equation 17 as printed, with its base cases."""

    @cache
    def zeta(contrib: int, start: int, end: int, size: int) -> float:
        if start + contrib * (gap + 1) > size + end:
            return -math.inf
        if contrib == 0:
            return 0
        if size == 1:
            return 1
        k = 1 << ((size - 1).bit_length() - 1)
        whole = contrib**2 if size & (size - 1) == 0 else 0
        return whole + max(
            zeta(contrib - i, start, j, k) + zeta(i, j, end, size - k)
            for i in range(contrib + 1)
            for j in range(gap + 1)
        )

    return max(zeta(w, 0, gap, T) for w in range(E + 1))


def visits(run: Run) -> Iterator[Claim]:
    """Theorems D.2 and D.3: one tree, and units that come back."""
    cases = [(T, gap, E) for T in range(1, 9 if run.quick else 13) for gap in range(4) for E in range(1, 5)]
    exact = {case: brute(*case) for case in cases}
    bound = {case: algorithm3(*case) for case in cases}
    yield Claim(
        place="Theorem D.2",
        statement="Algorithm 3 is an upper bound on the squared sensitivity of a tree without restarts",
        theirs="never below",
        ours=(
            f"never below, at most {max(bound[c] / exact[c] for c in cases):.2f} times it, all {len(cases)} "
            f"cases of up to {cases[-1][0]} steps"
        ),
        verdict=judged(all(bound[c] >= exact[c] for c in cases)),
        value=max(bound[c] / exact[c] for c in cases),
    )
    large = [(2048, 127, 16), (1600, 99, 16), (10_000, 99, 100)]
    over = [
        algorithm3(T, gap, E) / sensitivity(Tree(T), MinSeparation(T, gap + 1, E)).value ** 2 for T, gap, E in large
    ]
    yield Claim(
        place="Theorem D.2",
        statement="At real sizes Algorithm 3 is loose, and dynamic programming is tighter",
        theirs="tighter, at a higher computation cost",
        ours=", ".join(f"{o:.3f}" for o in over)
        + " times the exact one at (steps, gap, visits) = "
        + ", ".join(str(c) for c in large),
        verdict=judged(all(o > 1 - 1e-9 for o in over) and max(over) > 1.001),
        value=over,
    )
    found = {(T, gap, E): program(T, gap, E) for T, gap, E in cases}
    ours = all(
        round(sensitivity(Tree(T), MinSeparation(T, g + 1, E)).value ** 2) == exact[T, g, E] for T, g, E in cases
    )
    equal, below = all(found[c] == exact[c] for c in cases), [c for c in cases if found[c] < exact[c]]
    why = (
        ""
        if equal
        else (f"Below it at (steps, gap, visits) = {below[0]}" if below else "Above it in some cases, never below.")
    )
    yield Claim(
        place="Theorem D.3",
        statement="Equation 17 is at least the largest squared sensitivity under a minimum separation",
        theirs="an upper bound",
        ours=(
            f"{'equal to' if equal else 'not always equal to'} brute force in {len(cases)} cases; "
            f"our exact count {'too' if ours else 'NOT'}"
        ),
        verdict=judged(not below),
        why=why,
        value=float(len(below)),
    )


def known(run: Run) -> Iterator[Claim]:
    """D.2.1 and D.3.1: a given order, and the restarts of 100 epochs."""
    order = KnownOrder([[1], [2], [3], [1], [4]])
    plain = np.round(unit_sensitivities(Tree(5), order) ** 2).astype(int).tolist()
    yield Claim(
        place="Appendix D.2.1",
        statement="For the order 1, 2, 3, 1, 4 the squared sensitivities of units 1 to 4 are 8, 3, 3, 1",
        theirs="8, 3, 3, 1",
        ours=", ".join(map(str, plain)),
        verdict=judged(plain == [8, 3, 3, 1]),
        value=plain,
    )
    longer = KnownOrder([[1], [2], [3], [1], [4], [5]])
    completed = (
        np.round(unit_sensitivities(Tree(6, restarts=[5], completion=True), longer) ** 2).astype(int)[:4].tolist()
    )
    yield Claim(
        place="Appendix D.3.1",
        statement="Completed to 8 leaves the same order has sqrt(12) for unit 1 and 2 for the others",
        theirs="12, 4, 4, 4, squared",
        ours=", ".join(map(str, completed)),
        verdict=judged(completed == [12, 4, 4, 4]),
        value=completed,
    )
    printed = {"every epoch": (1, 7.0), "every 5": (5, 8.5), "every 20": (20, 12.0), "never": (0, 32.0)}
    n, k = 10_000, 100
    sens = {}
    for name, (every, _) in printed.items():
        restarts = list(range(100 * every, n, 100 * every)) if every else []
        sens[name] = sensitivity(Tree(n, restarts=restarts), FixedOrder(n, k, 100)).value
    exact = [gdp_epsilon(sens[name] / noise, 1e-5) for name, (_, noise) in printed.items()]
    renyi = [gdp_epsilon(sens[name] / noise, 1e-5, "rdp") for name, (_, noise) in printed.items()]
    yield Claim(
        place="Appendix D.3",
        statement=(
            "CIFAR-10, 100 epochs of batch 500: restarts in each, every 5, every 20 epochs and none "
            "reach epsilon 23 with noise 7, 8.5, 12, 32"
        ),
        theirs="about 23.0 each",
        ours=", ".join(f"{e:.1f}" for e in renyi)
        + " by Renyi divergence, "
        + ", ".join(f"{e:.1f}" for e in exact)
        + " exactly",
        verdict=judged(all(abs(e / 23 - 1) < 0.15 for e in renyi)),
        why="With the order kept between restarts, delta 1e-5; noises are printed to two digits, 'about'.",
        value=renyi + exact,
    )


def thmC3(run: Run) -> Iterator[Claim]:
    """Two trees for least squares."""
    n = 1024
    stated, real = 2 * math.ceil(math.log2(n)), 2 * round(sensitivity(Tree(n), SingleEpoch(n)).value ** 2)
    yield Claim(
        place="Theorem C.3",
        statement="Least squares by two trees has Renyi divergence alpha ceil(log2 n) / sigma^2",
        theirs=f"squared sensitivity {stated} at n = {n}",
        ours=f"{real}",
        verdict=judged(real <= stated),
        why=(
            "ceil(log2 n) for Theorem 4.1's ceil(log2(n + 1)): one level too few where n is a power of two, nothing at"
            " all at n = 1."
        ),
        value=[stated, real],
    )
    delta = 1e-6
    end, exact, first = worst(mu_as_stated, delta)
    yield Claim(
        place="Theorem C.3",
        statement=(
            "Noise 2 sqrt(ceil(log2 n) ln(1/delta)) / epsilon is (epsilon, delta)-private for epsilon up to "
            "2 ln(1/delta)"
        ),
        theirs=f"epsilon {end:.1f} at the end of the range, delta 1e-6",
        ours=f"{exact:.1f}, with the levels as stated; too small a claim from epsilon {first:.2f} on",
        verdict=judged(exact <= end),
        why="As in Theorem 4.1, whose conversion it takes.",
        value=[end, exact, first],
    )


def gaussian(run: Run) -> Iterator[Claim]:
    """Section 3's constant."""
    delta = 1e-6
    sigmas = (0.5, 1.0, 2.0, 5.0, 10.0, 50.0)
    stated = [math.sqrt(1.25 * math.log(2 / delta)) / sigma for sigma in sigmas]
    exact = [gdp_epsilon(1 / sigma, delta) for sigma in sigmas]
    bad = [s for s, a, b in zip(sigmas, stated, exact, strict=True) if b > a]
    yield Claim(
        place="Section 3",
        statement="Gaussian noise sigma gives (sqrt(1.25 ln(2/delta)) / sigma, delta)-privacy",
        theirs=", ".join(f"{s:.3g}" for s in stated) + " for sigma " + ", ".join(f"{s:g}" for s in sigmas),
        ours=", ".join(f"{e:.3g}" for e in exact) + ", exactly (delta 1e-6)",
        verdict=judged(not bad),
        why="The classical constant is sqrt(2 ln(1.25/delta)), for epsilon below 1; the two numbers changed places."
        + (f" Too small at sigma {', '.join(f'{s:g}' for s in bad)}." if bad else ""),
        value=[stated, exact],
    )


def norms(run: Run) -> Iterator[Claim]:
    """The norm of the noise in prefix sums."""
    inside = float((2 * norm.cdf(math.sqrt(math.log(2 / 0.05))) - 1) ** 2)
    yield Claim(
        place="Section 4.1 and Theorem C.1",
        statement=(
            "All prefix sums have noise of norm at most sigma sqrt(p ceil(log2 n) ln(n/beta)), with "
            "probability 1 - beta"
        ),
        theirs="0.95 for beta 0.05",
        ours=f"{inside:.3f} at p = 1, n = 2",
        verdict=judged(inside >= 0.95),
        why=(
            "Exact: two independent normals of variance 1. The square of a norm exceeds p ln(n/beta) too often for"
            " small p."
        ),
        value=inside,
    )
    ratios = []
    for p in (10, 100, 1000, 10_000, 100_000):
        union = math.sqrt(10 * float(chi2.isf(0.05 / 1024, p)))  # variance at most log2 n, union over n = 1024 steps
        ratios.append((float(p), math.sqrt(p * 10 * math.log(1024 / 0.05)) / union))
    yield Claim(
        place="Section 4.1 and Theorem C.1",
        statement="The same in large dimensions",
        theirs="probability 1 - beta",
        ours=(
            f"{ratios[0][1]:.2f} to {ratios[-1][1]:.1f} times a chi-square quantile with a union over "
            "steps, p = 10 to 100 000, n = 1024, beta 0.05"
        ),
        verdict=judged(min(r for _, r in ratios) >= 1),
        why="Holds, and is loose: ln(n/beta) multiplies p, and need only be added to it.",
        value=ratios,
    )


def equal(run: Run) -> Iterator[Claim]:
    """Theorem B.1: noisy SGD with a = b_t - b_(t-1) is DP-FTRL."""
    n, d, rate = 64, 5, 0.3
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((n, d)), rng.choice([-1.0, 1.0], n)
    tree = Tree(n, estimator="online")
    noise = tree.noising_matrix() @ rng.standard_normal((tree.num_rows, d))

    def gradient(theta: NDArray[np.float64], t: int) -> NDArray[np.float64]:
        return -y[t] * x[t] / (1 + math.exp(y[t] * float(x[t] @ theta)))

    sgd, ftrl, total, apart = np.zeros(d), np.zeros(d), np.zeros(d), 0.0
    prefix = np.cumsum(noise, axis=0)
    for t in range(n):
        sgd = sgd - rate * (gradient(sgd, t) + noise[t])
        total = total + gradient(ftrl, t)
        ftrl = -rate * (total + prefix[t])
        apart = max(apart, float(np.abs(sgd - ftrl).max()))
    yield Claim(
        place="Theorem B.1",
        statement="Noisy SGD with noise b_t - b_(t-1) and rate 1/lambda is unconstrained DP-FTRL",
        theirs="equal at every step",
        ours=f"apart by at most {apart:.0e} over 64 steps of logistic regression",
        verdict=judged(apart < 1e-10),
        value=apart,
    )
