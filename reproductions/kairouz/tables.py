"""Tables 4 and 5 and Figure 2(c): epsilons of the tree, recomputed by the printed analysis and exactly."""

import math
from collections.abc import Iterator

from anyorder.accounting import gdp_epsilon
from anyorder.accounting.curves import compose
from reproductions._claims import Claim, Run, judged

TABLE_4 = ((1.13, 18.71), (2.33, 7.83), (4.03, 4.19), (6.21, 2.60), (8.83, 1.77))
"""Noise of a node over the clip norm, and epsilon as printed: 1600 rounds, each user once, delta 1e-6."""

TABLE_5 = (
    (0.149, 100, 342_477, 363.66),
    (1.49, 1000, 342_477, 32.52),
    (7.53, 5060, 342_477, 9.76),
    (24.29, 16_300, 342_477, 4.11),
    (5.73, 3850, 1_000_000, 7.57),
    (15.29, 10_300, 1_000_000, 3.56),
)
"""Noise of a node, report goal, population, epsilon as printed: 1600 rounds, a new tree in each pass, delta 1e-6."""

DELTA = 1e-6
ROUNDS = 1600


def levels(leaves: int) -> int:
    """Nodes over a leaf, ceil(log2(leaves + 1)) [Theorem 4.1]."""
    return leaves.bit_length()


def table4(run: Run) -> Iterator[Claim]:
    """Each user once, one tree over 1600 rounds."""
    mus = [math.sqrt(levels(ROUNDS)) / sigma for sigma, _ in TABLE_4]
    printed = [epsilon for _, epsilon in TABLE_4]
    renyi = [round(gdp_epsilon(mu, DELTA, "rdp"), 2) for mu in mus]
    exact = [gdp_epsilon(mu, DELTA) for mu in mus]
    yield Claim(
        place="Table 4",
        statement="DP-FTRLM with noise 1.13, 2.33, 4.03, 6.21, 8.83 at each node has these epsilons (delta 1e-6)",
        theirs=listed(printed, 2),
        ours=listed(renyi, 2) + " by Renyi divergence",
        verdict=judged(renyi == printed),
        why="" if renyi == printed else "the digits differ",
        value=renyi,
    )
    yield Claim(
        place="Table 4",
        statement="Those epsilons are what the runs have",
        theirs=listed(printed, 2),
        ours=listed(exact, 3) + " by the exact conversion",
        verdict=judged(all(e <= p for e, p in zip(exact, printed, strict=True))),
        why="Safe; the same noise has 6 to 7 % less epsilon.",
        value=exact,
    )


def table5(run: Run) -> Iterator[Claim]:
    """A new tree in each pass of `population // report_goal` rounds."""
    renyi, exact = [], []
    for sigma, goal, population, _ in TABLE_5:
        epoch = min(ROUNDS, population // goal)
        mu = compose(*[math.sqrt(levels(epoch)) / sigma] * math.ceil(ROUNDS / epoch))
        renyi.append(gdp_epsilon(mu, DELTA, "rdp"))
        exact.append(gdp_epsilon(mu, DELTA))
    printed = [row[-1] for row in TABLE_5]
    off = max(abs(ours / theirs - 1) for ours, theirs in zip(renyi, printed, strict=True))
    yield Claim(
        place="Table 5",
        statement="Epsilon of DP-FTRLM at six pairs of noise and report goal, restarted in each pass (delta 1e-6)",
        theirs=listed(printed, 2),
        ours=listed(renyi, 2) + " by Renyi divergence",
        verdict=judged(off < 5e-3),
        why="Noise and report goal are printed to three digits: within 0.5 % everywhere.",
        value=renyi,
    )
    yield Claim(
        place="Table 5",
        statement="Those epsilons are what the runs have",
        theirs=listed(printed, 2),
        ours=listed(exact, 2) + " by the exact conversion",
        verdict=judged(all(e <= p for e, p in zip(exact, printed, strict=True))),
        why="Safe; 3 to 7 % above the exact ones.",
        value=exact,
    )


def listed(values: list[float], digits: int) -> str:
    """For a table."""
    return ", ".join(f"{value:.{digits}f}" for value in values)
