"""The dominating pair of secret sampling: a mixture of Gaussians, one for each set of steps that the coins may give.

**Theorem.** Let a unit take part in the random steps S, drawn by its own coins, independent of everything else, with
probability w_S each. Let C be lower triangular, of any signs, and let what is released be y = C G + sigma Z, step by
step, where the rows of G may depend on all that was released before, and the unit's own rows are vectors of norm <= 1
in the steps of S, else 0. Then for both directions of neighbours (with the unit, without it) and every epsilon

    delta(eps) <= delta of   P = sum_S w_S N(m_S, sigma^2 I),   Q = N(0, sigma^2 I),   m_S = sum over t in S of |C| e_t

**Proof.** Write D_t^S for what the unit adds to row t if its steps are S: D_t^S = sum over s <= t in S of C_ts x_s. It
is known from what was released before t, and so is what all others add. Without the unit, y minus what the others add
is white noise, and the likelihood ratio with it against without is

    L = sum_S w_S M^S,    M^S = prod_t exp(<D_t^S, z_t> / sigma^2 - |D_t^S|^2 / 2 sigma^2),    z_t ~ N(0, sigma^2 I)

Both hockey sticks are E phi(L) for a convex phi: (L - e^eps)_+ and (1 - e^eps L)_+. Given the past, the exponents of
step t are Gaussian with covariances <D_t^S, D_t^R> / sigma^2, and as |x_s| <= 1, none of them is above
k_t[S, R] / sigma^2 with k_t[S, R] = (|C| 1_S)_t (|C| 1_R)_t. Now Kahane's inequality, as a step of an induction from
the last step to the first. Let F(w) = E phi(sum_S w_S xi_S) for random xi_S >= 0: all its second derivatives,
E phi'' xi_S xi_R, are >= 0 (in the sense of measures). For Gaussian vectors X, Y with covariances K_X <= K_Y in every
entry, and W_u = sqrt(1 - u) X + sqrt(u) Y,

    d/du E F(w exp(W_u - var / 2)) = 1/2 sum_SR (K_Y - K_X)[S, R] E [d^2F/dw_S dw_R w_S w_R exp(..)] >= 0

So to replace the exponents of the last step by Gaussians with covariances k_t / sigma^2, whatever the past, can only
raise E phi(L), and leaves a function of the same kind of the steps before. After the first step all exponents have
covariances sum_t k_t[S, R] / sigma^2 = <m_S, m_R> / sigma^2: those of the pair above.  QED

Two consequences that bounds rest on. (1) *Monotone in every entry*: a larger Gram matrix <m_S, m_R>, entry by entry,
never lowers delta, in either direction [Kahane 1985]. (2) The pair depends on the Gram matrix alone.
"""

import numpy as np
from numpy.typing import NDArray

from anyorder.errors import ArgumentError
from anyorder.participation.sampled import BallsInBins
from anyorder.strategy import Strategy

__all__ = ["bins_gram"]

Floats = NDArray[np.float64]


def bins_gram(strategy: Strategy, participation: BallsInBins) -> Floats:
    """(b, b) the Gram matrix of m_j = sum over epochs e of |C| e_{j + e b}: all that balls in bins depends on.

    Args:
        strategy: C, of any signs; its absolute values are taken.
        participation: with the strategy's n.
    Cost: O(n^2) time, and O(n b) memory.
    Raises: ArgumentError for another number of steps.
    """
    if participation.n != strategy.n:
        raise ArgumentError(
            f"participation and strategy must have the same number of steps, got {participation.n} and {strategy.n}"
        )
    b = participation.b
    means = [np.abs(strategy.columns(np.arange(j, strategy.n, b))).sum(axis=-1) for j in range(b)]
    found = np.array(means)
    return np.asarray(found @ found.T)
