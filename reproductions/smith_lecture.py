"""Smith 2025, lecture 14 of BU CS599, "DP-FTRL": its constants and bounds [S25]."""

import math
from collections.abc import Iterator

from anyorder.accounting import gdp_epsilon
from reproductions._claims import Claim, Figure, Run, judged

TITLE = "Smith 2025, Lecture 14: DP-FTRL"


def privacy(run: Run) -> Iterator[Claim]:
    """Sigma = 2 sqrt(log T log(1/delta)) / epsilon at each node is (epsilon, delta)-DP, and GDP."""
    worst, at = 0.0, (0.0, 0.0, 0)
    for T in (2**4, 2**10, 2**20):
        for delta in (1e-3, 1e-6, 1e-10):
            for epsilon in (0.1, 1.0, 4.0, 8.0):
                sigma = 2 * math.sqrt(math.log2(T) * math.log(1 / delta)) / epsilon
                exact = gdp_epsilon(math.sqrt(math.log2(T) + 1) / sigma, delta)
                if exact / epsilon > worst:
                    worst, at = exact / epsilon, (epsilon, delta, T)
    yield Claim(
        place="Tree mechanism, privacy",
        statement="Noise sigma = 2 sqrt(log2(T) ln(1/delta)) / epsilon at each node is (epsilon, delta)-DP",
        theirs="epsilon",
        ours=f"at most {worst:.2f} epsilon (at epsilon {at[0]:g}, delta {at[1]:g}, T = {at[2]})",
        verdict=judged(worst <= 1),
        why="Exact epsilon of log2(T) + 1 nodes over a leaf.",
        value=worst,
    )


FIGURES = (Figure("privacy", privacy),)
