"""What jax_privacy makes of cyclic Poisson sampling with banded C. Runs in an environment of its own; prints JSON.

`optimize_coefs_for_amplifications` fits one banded Toeplitz C for each number of bands that divides the data set, and
calibrates each by Renyi divergences; here its fits are made once for all epsilons, with its settings, and calibrated by
Renyi divergences, as it does, and by privacy loss distributions, which it does not. Every number of bands is returned;
which is best under a workload is chosen outside, so that it is never behind for its choice.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import numpy as np
from jax_privacy.experimental.monte_carlo import delta_calculation
from jax_privacy.matrix_factorization import toeplitz

jax.config.update("jax_enable_x64", True)

DATASET = 50_000
SAMPLES = 10_000_000  # of its Monte Carlo


def main(n: int, b: int, delta: float, epsilons: list[float]) -> None:
    """The fits for all numbers of bands, batches of DATASET / b."""
    start = time.perf_counter()
    fits = []
    for bands in (p for p in range(1, b + 1) if DATASET % p == 0):
        coef = np.asarray(toeplitz.optimize_banded_toeplitz(n, bands, max_optimizer_steps=250))
        noise = {
            kind: [calibrated(make, n, bands, bands / b, epsilon, delta) for epsilon in epsilons]
            for kind, make in (("rdp", dp_accounting.rdp.RdpAccountant), ("pld", dp_accounting.pld.PLDAccountant))
        }
        fits.append({"bands": bands, "coef": coef.tolist(), **noise})
        print(bands, round(time.perf_counter() - start), file=sys.stderr, flush=True)
    base = delta_calculation.get_base_delta(SAMPLES, delta)
    print(json.dumps({"fits": fits, "base_delta": base, "seconds": time.perf_counter() - start}))


def calibrated(make: Callable[[], Any], n: int, bands: int, q: float, epsilon: float, delta: float) -> float:
    """The noise multiplier for columns of norm 1."""

    def event(
        sigma: float,
    ) -> dp_accounting.DpEvent:  # that of its accounting.amplified_bandmf_event, which the released package lacks
        one = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(one, math.ceil(n / bands))

    bracket = dp_accounting.ExplicitBracketInterval(0.3, 200)
    return float(dp_accounting.calibrate_dp_mechanism(make, event, epsilon, delta, bracket_interval=bracket))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), [float(word) for word in sys.argv[4:]])
