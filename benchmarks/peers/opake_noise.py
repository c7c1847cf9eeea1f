"""Streaming noise of opake, added to a float32 vector. Runs in an environment of its own; prints JSON.

Arguments: number of coordinates, steps to time, threads. The matrices are given, not fitted; what adds the noise is the
engine behind `mf_gaussian_noise`. Prints nanoseconds per element and step, the best step.
"""

import json
import os
import sys
import time

import numpy as np
import torch
from opake.api.dpftrl.noise import _blt_math, _engine, _toeplitz
from opake.api.engine.random._engine import key

CLOCK = time.process_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
DECAYS, SCALES = [0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1]


def main(size: int, steps: int, threads: int) -> None:
    """Time both mechanisms."""
    torch.set_num_threads(threads)
    blt = _blt_math.BufferedToeplitz(torch.tensor(DECAYS).double(), torch.tensor(SCALES).double())
    c = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, 16))])
    matrices = {
        "BLT, 4 buffers": _blt_math.inverse_as_streaming_matrix(blt),
        "banded, 16": _toeplitz.inverse_as_streaming_matrix(torch.from_numpy(c).float()),
    }
    print(json.dumps({name: measure(matrix, size, steps) for name, matrix in matrices.items()}))


def measure(matrix: object, size: int, steps: int) -> float:
    """Nanoseconds per element of the best of some steps."""
    gradient = {"w": torch.zeros(size)}
    add, state = _engine._matrix_factorization_noise(gradient, matrix, key=key(1))
    times = []
    for _ in range(steps + 2):
        start = CLOCK()
        gradient, state = add(gradient, state, stddev=1.0)
        times.append(CLOCK() - start)
    return min(times[2:]) / size * 1e9


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
