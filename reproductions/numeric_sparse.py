"""Algorithm 1 of Zhang, Mironov and Hejazinia 2021 (NumericSparse) as printed, its order bias, and Lemmas 4 and 5.

    eps1 = 0.95 eps,  eps2 = 0.05 eps,  sigma(e) = s sqrt(32 c1 log(2 / delta)) / e
    bar = alpha + Lap(sigma(eps1));  count = 0;  v = 0
    for i = 1 .. p:   if |u_i| + Lap(2 sigma(eps1)) >= bar:
                          v_i = u_i + Lap(2 sigma(eps2));  count += 1;  bar = alpha + Lap(sigma(eps1))
                      if count >= c1: break

The scan begins at the first coordinate and ends at the c1-th hit. Rows of a table of words are in the order of their
frequencies, so a bar that noise passes often spends all c1 hits on frequent words, and rare ones are never looked at.
In the paper's experiment (1000 words of 100 numbers, |u_i| <= 0.1) the queries' noise is 30 times the largest number:
what is chosen is noise in any case.

Lemma 4 says that, for at most c1 coordinates other than 0 and alpha = 20 s (log p + log(4 c1 / beta)) sqrt(c1 log(2 /
delta)) / eps, with probability 1 - beta: the scan does not halt, |v_i - u_i| <= alpha where v_i is not 0, and |u_i| <=
2 alpha where it is. But v_i has Laplace noise of scale 2 sigma(eps2) = 226 s sqrt(c1 log(2 / delta)) / eps, 11.3 times
alpha / (log p + log(4 c1 / beta)); with c1 coordinates above the bar, the scan also halts at the last of them. Lemma 5,
|u - v| <= 2.5 alpha sqrt(c1), is a corollary; it holds where that logarithm is large, and fails where it is small.

eps and delta are inputs. No epsilon is claimed: the paper's own Lemma 2 is evaluated for what the noise is, and told.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reproductions._show import Finding, main

Floats = NDArray[np.float64]

ROWS, WIDTH, CLIP = 1000, 100, 0.1
"""The paper's table, and the bound of its coordinates."""
EPSILON, DELTA, CHOSEN = 16.0, 1.25e-7, 100
"""What one step of its experiment hands to a selector: inputs, no claim."""


class Scan(NamedTuple):
    """What NumericSparse gives: its vector, how many coordinates it looked at, and how often one passed the bar."""

    found: Floats
    seen: int
    hits: int


def sigma(epsilon: float, delta: float, c1: int, s: float) -> float:
    """As printed."""
    return s * math.sqrt(32 * c1 * math.log(2 / delta)) / epsilon


def printed_alpha(p: int, c1: int, epsilon: float, delta: float, s: float, beta: float) -> float:
    """Of Lemma 4."""
    return 20 * s * (math.log(p) + math.log(4 * c1 / beta)) * math.sqrt(c1 * math.log(2 / delta)) / epsilon


def numeric_sparse(
    u: Floats, alpha: float, c1: int, epsilon: float, delta: float, s: float, rng: np.random.Generator
) -> Scan:
    """Algorithm 1: every coordinate has one query noise, and every bar its own."""
    first, second = sigma(0.95 * epsilon, delta, c1, s), sigma(0.05 * epsilon, delta, c1, s)
    noisy = np.abs(u) + rng.laplace(scale=2 * first, size=len(u))
    found, at = np.zeros(len(u)), 0
    for hits in range(c1):
        passed = noisy[at:] >= alpha + rng.laplace(scale=first)
        if not passed.any():
            return Scan(found, len(u), hits)
        at += int(np.argmax(passed))
        found[at] = u[at] + rng.laplace(scale=2 * second)
        at += 1
    return Scan(found, at, c1)


def by_lemma_2(epsilon: float, delta: float, c1: int) -> float:
    """The paper's composition of what the noise is: c1 scans of the sparse vector technique and c1 Laplace outputs.

    A scan with noise Lap(2 s / e0) on its bar and Lap(4 s / e0) on its queries is e0-private [Dwork and Roth 2014,
    Theorem 3.23], an output with Lap(s / e0) too. Each of the two sums gets delta / 2, as log(2 / delta) says.
    """
    total = 0.0
    for e0 in (2 / sigma(0.95 * epsilon, delta, c1, 1.0), 0.5 / sigma(0.05 * epsilon, delta, c1, 1.0)):
        total += c1 * e0 * math.expm1(e0) + e0 * math.sqrt(2 * c1 * math.log(2 / delta))
    return total


def table(rng: np.random.Generator) -> Floats:
    """A gradient as the experiment has it: 18 % of the rows are touched, frequent words more likely."""
    often = 1 / np.arange(1, ROWS + 1)
    touched = rng.choice(ROWS, size=180, replace=False, p=often / often.sum())
    u = np.zeros((ROWS, WIDTH))
    u[touched] = rng.uniform(-CLIP, CLIP, size=(180, WIDTH))
    return u.reshape(-1)


def lemmas_hold(
    p: int, c1: int, beta: float, trials: int, rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """How often each part of Lemma 4, and Lemma 5, fails: c1 coordinates of 5 alpha at random places, the others 0.

    Returns: the shares of trials in which the scan halts before the end; an output is more than alpha off; a coordinate
        above 2 alpha is missed; |u - v| is above 2.5 alpha sqrt(c1).
    """
    alpha = printed_alpha(p, c1, EPSILON, DELTA, CLIP, beta)
    failed = np.zeros(4)
    for _ in range(trials):
        u = np.zeros(p)
        u[rng.choice(p, size=c1, replace=False)] = 5 * alpha
        scan = numeric_sparse(u, alpha, c1, EPSILON, DELTA, CLIP, rng)
        shown = scan.found != 0
        failed += (
            scan.seen < p,
            (np.abs(scan.found - u)[shown] > alpha).any(),
            (np.abs(u[~shown]) > 2 * alpha).any(),
            np.linalg.norm(scan.found - u) > 2.5 * alpha * math.sqrt(c1),
        )
    halts, off, missed, apart = (failed / trials).tolist()
    return halts, off, missed, apart


def run(quick: bool) -> Iterator[Finding]:
    """The noise of the paper's experiment, how far its scan comes, and the lemmas."""
    rng = np.random.default_rng(0)
    yield Finding("|u_i| at most", CLIP)
    yield Finding("scale of the noise on a query, 2 sigma(eps1)", 2 * sigma(0.95 * EPSILON, DELTA, CHOSEN, CLIP))
    outputs = 2 * sigma(0.05 * EPSILON, DELTA, CHOSEN, CLIP)
    yield Finding("scale of the noise on an output, 2 sigma(eps2)", outputs, "> 100 |u_i|", outputs > 100 * CLIP)
    yield from _order_bias(5 if quick else 25, rng)
    alpha = printed_alpha(ROWS * WIDTH, CHOSEN, EPSILON, DELTA, CLIP, 0.01)
    yield Finding("alpha of Lemma 4, beta 0.01", alpha, "> 2 |u_i|: nothing need be chosen", alpha > 2 * CLIP)
    hits = [
        numeric_sparse(table(rng), alpha, CHOSEN, EPSILON, DELTA, CLIP, rng).hits for _ in range(5 if quick else 25)
    ]
    yield Finding("coordinates chosen with that alpha, the most of all trials", max(hits), "0", max(hits) == 0)
    yield from _lemmas(quick, rng)


def _order_bias(trials: int, rng: np.random.Generator) -> Iterator[Finding]:
    for alpha, told in ((5.0, 15), (10.0, 67), (15.0, 392)):
        rows, touched, chance = [], 0.0, 0.0
        for _ in range(trials):
            u = table(rng)
            scan = numeric_sparse(u, alpha, CHOSEN, EPSILON, DELTA, CLIP, rng)
            rows.append(math.ceil(scan.seen / WIDTH))
            touched += (u[scan.found != 0] != 0).sum()
            chance += scan.hits * (u[: scan.seen] != 0).mean()
        seen = float(np.median(rows))
        near = 0.7 * told <= seen <= 1.4 * told
        yield Finding(f"alpha {alpha:g}: word rows of 1000 that the scan looks at, median", seen, f"about {told}", near)
        ratio = touched / chance
        name = f"alpha {alpha:g}: touched coordinates among its choices, over those by chance in these rows"
        yield Finding(name, ratio, "1: it chooses noise", abs(ratio - 1) < 0.1)


def _lemmas(quick: bool, rng: np.random.Generator) -> Iterator[Finding]:
    total = by_lemma_2(EPSILON, DELTA, CHOSEN)
    expected = f"<= {EPSILON:g}: what the inputs ask for"
    yield Finding("Lemma 4, privacy: Lemma 2 of the printed noise", total, expected, total <= EPSILON)
    for p, c1, beta, trials in ((ROWS * WIDTH, CHOSEN, 0.01, 10 if quick else 40), (10, 1, 0.1, 2000)):
        halts, off, missed, apart = lemmas_hold(p, c1, beta, trials, rng)
        name = f"p {p}, c1 {c1}, beta {beta:g}"
        fails = "> beta: does not hold as printed"
        yield Finding(f"Lemma 4, {name}: halts before the end", halts, fails, halts > beta)
        yield Finding(f"Lemma 4, {name}: an output is more than alpha off", off, fails, off > beta)
        yield Finding(f"Lemma 4, {name}: a coordinate above 2 alpha is missed", missed, "<= beta", missed <= beta)
        if p > 10:
            yield Finding(f"Lemma 5, {name}: |u - v| > 2.5 alpha sqrt(c1)", apart, "<= beta", apart <= beta)
        else:
            yield Finding(f"Lemma 5, {name}: |u - v| > 2.5 alpha sqrt(c1)", apart, fails, apart > beta)


if __name__ == "__main__":
    main(__doc__ or "", run)
