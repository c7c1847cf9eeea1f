"""[Zhang, Mironov, Hejazinia 2021]: the epsilon that its experiment was planned for, and the one that it has.

Batches of 20 of 200 000 by Poisson sampling, 200 000 steps (20 passes), delta 1e-5; epsilon 30 was claimed. A row is
a mechanism: the epsilon of its setting, exact (`ours`), the paper's 30 (`peer`), and how many times too large that is.

add or remove   neighbours differ by one example that is there or not: what Poisson sampling is amplified for. The sum
                of a batch moves by S1 at most: sigma is the std over S1, as the paper has it.
replaced        one example is another: it leaves and the other comes, each by a coin of its own, and the sum moves by
                2 S1 if both do. As a bound: two neighbours of the first kind in a row, so that twice the epsilon of
                delta / (1 + e^epsilon) holds. No row where that is above 60, and says nothing.
Selection is 100 draws of the exponential mechanism (Algorithm 4, its 100 000 parameters times gamma = .001) with
epsilon'' = 16 / sqrt(2 100 ln(1 / 1.25e-7)): weights exp(epsilon'' |g| / (2 S0)) of |g| <= S0 have range epsilon''. As
printed, its loop makes one draw more. It is amplified as a pair with the noise: one batch, one coin.

    python -m benchmarks.wides.zhang_epsilon      some ten seconds
"""

import math
from collections.abc import Iterator

from anyorder.accounting import Sampled
from benchmarks._report import Row, options, show

COIN, STEPS, DELTA, CLAIMED = 20 / 200_000, 200_000, 1e-5, 30.0
DRAWS, RANGE = 100, 16 / math.sqrt(2 * 100 * math.log(1 / 1.25e-7))


def rows(quick: bool) -> Iterator[Row]:
    """Each mechanism of Fig. 1 under both relations of neighbours."""
    curves = {
        "DP-SGD, sigma 0.32": Sampled(0.32, COIN, STEPS),
        "DP-SGD, sigma 0.5": Sampled(0.5, COIN, STEPS),
        "selection and sigma 0.5": Sampled(0.5, COIN, STEPS, e0=RANGE, draws=DRAWS),
        "selection as printed and sigma 0.5": Sampled(0.5, COIN, STEPS, e0=RANGE, draws=DRAWS + 1),
    }
    for name, curve in curves.items():
        found = curve.epsilon(DELTA)
        yield Row(f"{name}, add or remove", found, CLAIMED, CLAIMED / found, "epsilon")
        if not quick and (twice := replaced(curve)) is not None:
            yield Row(f"{name}, replaced (a bound)", twice, CLAIMED, CLAIMED / twice, "epsilon")


def replaced(curve: Sampled) -> float | None:
    """An epsilon for one example that is another, of two neighbours in a row; None where this bound says nothing."""
    once, before = curve.epsilon(DELTA), 0.0
    while once - before > 1e-3:
        before, once = once, curve.epsilon(DELTA / (1 + math.exp(once)))
        if once > CLAIMED:
            return None
    return 2 * (once + 1e-2) if (1 + math.exp(once + 1e-2)) * curve.delta(once + 1e-2) <= DELTA else None


def main() -> None:
    """Print the rows."""
    chosen = options(__doc__ or "")
    show(rows(chosen.quick), chosen.json)


if __name__ == "__main__":
    main()
