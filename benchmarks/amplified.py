"""Secret orders beside open ones, and beside jax_privacy: error of the iterates at one epsilon and delta.

    python -m benchmarks.factorize --only amplified            what is missing in benchmarks/results/amplified.jsonl
    python -m benchmarks.factorize --only amplified --write    the same, then docs/amplified.md from the file
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
from anyorder import error
from anyorder import workload as W
from anyorder.accounting import calibrate_gaussian, calibrate_poisson
from anyorder.accounting.amplification.monte_carlo import MonteCarlo, bins_interval
from anyorder.accounting.amplification.mixture import bins_gram
from anyorder.optimize import choose, fit
from anyorder.optimize.amplified import Judge
from anyorder.optimize.fits import kind_in
from anyorder.participation import (
    BallsInBins,
    CyclicPoisson,
    EpochShuffle,
    FixedOrder,
    Participation,
    PoissonSampling,
)
from anyorder.strategy import Independent, Strategy, ToeplitzBanded
from benchmarks._peers import interpreter
from benchmarks._report import Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "amplified.jsonl"
PAGE = ROOT / "docs" / "amplified.md"
PACKAGE = "jax-privacy==2.0.0"
DELTA = 1e-5
SETTINGS = ((20, 100), (50, 40))
QUICK = ((5, 40),)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
WORKLOADS: dict[str, Callable[[int], W.Workload]] = {"prefix sum": W.prefix_sum, "momentum 0.9": lambda n: W.momentum(n, 0.9)}
KINDS = {"BLT": "blt", "banded": "toeplitz", "banded inverse": "banded inverse", "tree": "tree"}
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
