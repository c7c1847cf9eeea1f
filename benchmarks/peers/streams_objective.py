"""Softmax regression by objective perturbation with Gaussian noise. Prints JSON.

    python streams_objective.py DATA.npz DELTA JOBS

JOBS: JSON list of [epsilon, seed, curvature share]. Rows have norm at most 1. Released is the minimiser of

    sum of losses + w/2 ||theta||^2 + <b, theta>,       b ~ N(0, s^2 I)

after [Kifer, Smith, Thakurta 2012], for a loss of K scores. Its claim, for adding or removing one row x, ||x|| <= 1.
The minimiser determines b = -(sum of gradients + w theta), a smooth bijection, so that log p(theta) - log p'(theta) is
the sum of two parts. Determinants: with H the Hessian without x and h that of x, positive semidefinite,
0 <= log det(H + w + h) - log det(H + w) <= tr(h) / w <= (1 - 1/K) / w. Gaussians: the row's gradient is x (outer) v,
v = p - e_y, ||v||^2 <= 2, its sum 0, and |<b, x v>| <= ||v|| ||P b' x||, where P takes the mean off: P b' x, given x,
has K - 1 coordinates N(0, s^2 ||x||^2). The part is at most sqrt 2 chi / s + 1 / s^2, chi with K - 1 degrees of
freedom. So the loss is at most W = (1 - 1/K)/w + sqrt 2 chi / s + 1/s^2, either way round, and
delta = E max(0, 1 - e^(epsilon - W)).

`share` of epsilon goes to the determinants. The claim is for the exact minimiser; the search ends at a gradient of norm
1e-6 of the noise, and is not charged for what is left, which helps this method.
"""

import json
import sys
import time

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import logsumexp
from scipy.stats import chi


def delta_of(s: float, part: float, classes: int, epsilon: float) -> float:
    """The claim's delta, rounded up: chi at the upper end of each of 20000 cells, and 1 beyond the last."""
    tails = np.concatenate([np.linspace(1, 1e-3, 10_000), np.geomspace(1e-3, 1e-12, 10_000)[1:]])
    upper = chi.isf(tails, classes - 1)
    loss = part + np.sqrt(2) * upper / s + 1 / s**2
    return float(np.sum(-np.diff(tails) * np.maximum(0, -np.expm1(epsilon - loss[1:]))) + tails[-1])


def noise(epsilon: float, delta: float, share: float, classes: int) -> tuple[float, float]:
    """(w, s): the least of both."""
    part = share * epsilon
    found = brentq(lambda log: delta_of(np.exp(log), part, classes, epsilon) - delta, np.log(0.05), np.log(1e4))
    return (1 - 1 / classes) / part, float(np.exp(found)) * 1.0001


def fit(x, y, classes, w, s, rng):  # noqa: ANN001, ANN201
    """The minimiser."""
    d = x.shape[1]
    b = rng.normal(0, s, (d, classes))

    def value(flat):  # noqa: ANN001, ANN202
        theta = flat.reshape(d, classes)
        scores = x @ theta.astype(x.dtype)
        norm = logsumexp(scores, axis=1)
        p = np.exp(scores - norm[:, None])
        loss = float(np.sum(norm - scores[np.arange(len(y)), y], dtype=np.float64))
        p[np.arange(len(y)), y] -= 1
        slope = (x.T @ p).astype(np.float64) + w * theta + b
        return loss + w / 2 * np.sum(theta**2) + np.sum(b * theta), slope.ravel()

    found = minimize(value, np.zeros(d * classes), jac=True, method="L-BFGS-B", options={"maxiter": 80, "maxcor": 20})
    return found.x.reshape(d, classes)


def main() -> None:
    data, delta, jobs = np.load(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
    x, y, tx, ty = (data[name] for name in ("x", "y", "tx", "ty"))
    classes = int(y.max()) + 1
    for epsilon, seed, share in jobs:
        started = time.process_time()
        w, s = noise(epsilon, delta, share, classes)
        theta = fit(x, y, classes, w, s, np.random.default_rng(seed))
        right = float(np.mean(np.argmax(tx @ theta, axis=1) == ty))
        print(json.dumps({"accuracy": right, "seconds": time.process_time() - started, "noise": s}), flush=True)


if __name__ == "__main__":
    main()
