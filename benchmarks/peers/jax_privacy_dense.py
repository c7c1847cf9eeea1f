"""The dense optimizer of jax_privacy on momentum with a cooldown. Runs in an environment of its own; prints JSON.

One participation, mean error. `target` is the error per row that ends the run: what the other side reached.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import dense

jax.config.update("jax_enable_x64", True)


class Reached(Exception):
    """The target is met."""


def main(n: int, target: float, limit_s: float) -> None:
    """Optimise until the target or the time is reached."""
    flat = int(0.75 * n)
    rates = np.concatenate([np.ones(flat), np.linspace(1.0, 0.05, n - flat)])
    u, s = np.arange(n)[:, None], np.arange(n)
    A = np.cumsum(rates[:, None] * np.where(u >= s, 0.95 ** np.maximum(u - s, 0), 0.0), axis=0)
    start = time.perf_counter()
    best = {"loss": float("inf"), "seconds": 0.0, "steps": 0}

    def watch(info: object) -> bool:
        best["steps"] += 1
        loss = float(info.loss)
        if loss < best["loss"]:
            best.update(loss=loss, seconds=time.perf_counter() - start)
        return loss <= target or time.perf_counter() - start > limit_s

    C = np.asarray(dense.optimize(n, A=jnp.asarray(A), max_optimizer_steps=100_000, callback=watch))
    seconds = time.perf_counter() - start
    error = np.square(np.linalg.solve(C.T, A.T)).sum() / n * np.square(C).sum(axis=0).max()
    print(
        json.dumps(
            {"error": float(error), "seconds": seconds, "steps": best["steps"], "reached": bool(error <= target)}
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
