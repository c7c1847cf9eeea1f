"""Streaming noise of jax_privacy, added to a float32 vector. Runs in an environment of its own; prints JSON.

Arguments: number of coordinates, steps to time. Prints nanoseconds per element of each mechanism, of its best step.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import buffered_toeplitz, streaming_matrix, toeplitz

jax.config.update("jax_enable_x64", True)

CLOCK = time.process_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
DECAYS, SCALES = [0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1]


def main(size: int, steps: int, names: list[str]) -> None:
    """Time every mechanism."""
    found = {}
    for name in names:
        found[name] = measure(MECHANISMS[name](), size, steps)
    print(json.dumps(found))


def banded(p: int) -> streaming_matrix.StreamingMatrix:
    """The inverse of the first p bands of the square root of the prefix sum, in float32."""
    c = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, p))])
    return toeplitz.inverse_as_streaming_matrix(jnp.asarray(c, jnp.float32))


MECHANISMS = {
    "independent": streaming_matrix.identity,
    "BLT, 4 buffers": lambda: buffered_toeplitz.BufferedToeplitz.build(DECAYS, SCALES).inverse_as_streaming_matrix(),
    "banded, 16": lambda: banded(16),
    "banded, 64": lambda: banded(64),
}


def measure(matrix: streaming_matrix.StreamingMatrix, size: int, steps: int) -> float:
    """Nanoseconds per element of the best of some compiled steps, state donated."""
    adder = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=1, dtype=jnp.float32)
    gradient = jnp.zeros(size, jnp.float32)
    state = adder.init(gradient)
    update = jax.jit(adder.update, donate_argnums=(0, 1))
    times = []
    for _ in range(steps + 2):
        start = CLOCK()
        gradient, state = jax.block_until_ready(update(gradient, state))
        times.append(CLOCK() - start)
    return min(times[2:]) / size * 1e9


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(MECHANISMS))
