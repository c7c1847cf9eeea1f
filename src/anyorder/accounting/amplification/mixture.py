"""The dominating pair of secret sampling: a mixture of Gaussians, one for each set of steps that the draws may give.

**Theorem.** Let a unit take part in the random steps S, by its own draws, independent of everything else, with
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

from functools import lru_cache
from typing import Any, Protocol, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.errors import ArgumentError, PlanError
from anyorder.formats import check_work
from anyorder.patterns import Participation, check_order
from anyorder.strategy import Strategy
from anyorder.strategy.registry import Structure, kind_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def absolute_columns(strategy: Strategy, steps: Any) -> Floats:
    """|C|[:, steps] of the C that the theorem is about: none of its rows looks at a step after its own release.

    That is the strategy's own C, but for trees whose estimates use nodes that end later ("full"): there C stands for
    all matrices with its C^T C, and the theorem is about the lower triangular one, whose noise has the same law.

    Args:
        steps: (m,) integers.
    Returns: (rows, m), not negative.
    Cost: that of `strategy.columns`; O(n^3) for a full tree.
    """
    kind = kind_of(strategy)
    match kind.structure:
        case Structure.RESCALED:
            inner: Any = strategy
            return np.asarray(absolute_columns(inner.strategy, steps) / inner.scales[np.asarray(steps)])
        case Structure.TREE:
            tree: Any = strategy
            if tree.estimator == "full":
                return np.asarray(np.abs(_causal(tree)[:, np.asarray(steps)]))
            return np.asarray(np.abs(strategy.columns(steps)))
        case _:
            return np.asarray(np.abs(strategy.columns(steps)))


@lru_cache(maxsize=1)  # asked for a few columns at a time
def _causal(strategy: Strategy) -> Floats:
    """The lower triangular L with L^T L = C^T C: a Cholesky factor from the last step to the first."""
    C = strategy.matrix()
    gram = C.T @ C
    return np.asarray(np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T)


class OneBin(Protocol):
    """Each unit is in one of b bins, the same in every epoch of b steps."""

    @property
    def b(self) -> int: ...

    @property
    def n(self) -> int: ...


def bins_gram(strategy: Strategy, participation: OneBin) -> Floats:
    """(b, b) the Gram matrix of m_j = sum over epochs e of |C| e_{j + e b}: all that balls in bins depends on.

    Args:
        strategy: C, of any signs; its absolute values are taken, see `absolute_columns`.
        participation: with the strategy's n.
    Cost: O(n^2) time, and O(n b) memory.
    Raises: ArgumentError for another number of steps.
    """
    if participation.n != strategy.n:
        raise ArgumentError(
            f"participation and strategy must have the same number of steps, got {participation.n} and {strategy.n}"
        )
    b = participation.b
    means = [absolute_columns(strategy, np.arange(j, strategy.n, b)).sum(axis=-1) for j in range(b)]
    found = np.array(means)
    return np.asarray(found @ found.T)


def check_fits(strategy: Strategy, participation: object) -> None:
    """Refuse a mechanism that a secret order is not accounted with; each order says which, in `check_mechanism`.

    Where columns of C do not overlap, the steps of a unit are so many mechanisms beside each other, and else what is
    drawn for one step would tell of others: balls in bins is accounted as a whole.

    Args:
        participation: an order with secret draws.
    Cost: O(n); O(n^2) for a C without a known form, which a file of a stranger may not ask for.
    Raises: PlanError with the reason; ArgumentError for an order without secret draws.
    """
    if not isinstance(participation, SecretOrder):
        told = participation.describe() if isinstance(participation, Participation) else repr(participation)
        raise ArgumentError(f"participation must be drawn in secret, got {told}")
    check_order(participation)
    participation.check_mechanism(strategy)
    if participation.n != strategy.n:
        raise PlanError(
            f"participation and strategy must have the same number of steps, got {participation.n} and {strategy.n}"
        )


def reach(strategy: Strategy) -> int:
    """The least distance from which on columns of C do not overlap; 1 where no two do."""
    first, last = support(strategy)
    return int((last - first).max()) + 1


def check_reach(strategy: Strategy, participation: Participation, distance: int, name: str) -> None:
    """Raise PlanError unless columns of C that are this distance apart or more do not overlap."""
    found = reach(strategy)
    if found > distance:
        raise PlanError(
            f"{type(participation).__name__} is accounted for a C whose columns do not overlap {name}={distance} steps "
            f"apart or more (at most {distance} bands), got {strategy!r}, whose columns do up to {found - 1} apart; "
            f"take {name}={found} or more, a mechanism of fewer bands, or BallsInBins, which is accounted with any C"
        )


def check_disjoint(strategy: Strategy) -> None:
    """Raise PlanError unless no two columns of C overlap."""
    if reach(strategy) > 1:
        raise PlanError(
            f"method 'pld' is for a C whose columns do not overlap, such as independent noise, got {strategy!r}: take "
            "'bound' or 'monte_carlo'"
        )


def support(strategy: Strategy) -> tuple[Integers, Integers]:
    """The first and the last step on which each row of C depends, of rows that do; perhaps more, never less."""
    n, rows = strategy.n, np.arange(strategy.n)
    found: Any = strategy
    match kind_of(strategy).structure:
        case Structure.IDENTITY:
            return rows, rows
        case Structure.RESCALED:
            return support(found.strategy)
        case Structure.BANDED | Structure.TOEPLITZ_BANDED:
            return np.maximum(rows - found.num_bands + 1, 0), rows
        case Structure.RESTARTED:
            return rows // found.steps_per_epoch * found.steps_per_epoch, rows
        case Structure.TOEPLITZ | Structure.BUFFERED:
            return np.zeros_like(rows), rows
        case Structure.DENSE | Structure.LOW_RANK | Structure.TREE:
            check_work("the form of a mechanism", numbers=2 * n * n)
            there = absolute_columns(strategy, rows) > 0
            there = there[there.any(axis=1)]  # completed trees have rows of nothing
            return there.argmax(axis=1), n - 1 - there[:, ::-1].argmax(axis=1)
        case structure:
            assert_never(structure)
