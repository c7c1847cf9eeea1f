"""Canaries whose steps secret draws choose: how they draw them, and the best test of each.

Under secret sampling a unit is in the random steps S, with probability w_S each, and nobody knows S. A canary draws its
steps by the same law, with draws of its own. With y the whitened rows in its direction, in clip norms, m_S = C 1_S and
sigma = noise_std / clip_norm,

    y = m_S + sigma z if it is included, else sigma z;     score = log sum_S w_S exp((<m_S, y> - |m_S|^2 / 2) / sigma^2)

which is the best test there is [Neyman and Pearson]. All that it needs of the rows is <C e_t, y> for each step; and of
a rule whose steps are grouped (balls in bins) <m_j, y> for each group.
"""

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.secret_order import SecretOrder
from anyorder.audit.canaries import Canaries, forward
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.patterns import Participation
from anyorder.strategy import Strategy

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def drawn_steps(participation: Participation, count: int, source: NoiseSource) -> Bools:
    """(n, count) in which steps each of `count` canaries is, drawn by the law of the rule with draws of their own.

    Where units lie in groups, canary c lies in group c mod cycle. Under truncation a canary is in a step with the
    probability of a unit to be drawn and to stay, whoever else came.

    Args:
        participation: of secret sampling.
        count: number of canaries.
        source: where the draws come from: of nothing else.
    Raises: ArgumentError for a rule without secret draws.
    """
    return sampled_rule(participation).canary_steps(checks.integer("count", count, low=1), source)


class SecretScorer:
    """The log likelihood ratio of each canary, as rows come: `add` each row in turn, then ask.

    Of the steps so far, if asked before the last.

    Args:
        strategy: C, with `as_released` where that matters.
        participation: of secret sampling.
        canaries: the directions.
        clip_norm: the norm with which canaries were added.
        noise_std: of every coordinate.
        signed: whether one that is not included is there with the opposite sign ("replace-one"), not left out.
    Cost: a column of the strategy's state for each canary, and for each bin or else each step; and as many inner
        products for each canary.
    """

    def __init__(
        self,
        strategy: Strategy,
        participation: Participation,
        canaries: Canaries,
        clip_norm: float,
        noise_std: float,
        *,
        signed: bool = False,
    ) -> None:
        self._rule, self._canaries, self._signed = sampled_rule(participation), canaries, signed
        if strategy.n != self._rule.n:
            raise ArgumentError(f"strategy must have n={self._rule.n} steps as the participation, got {strategy.n}")
        self._clip_norm = checks.positive("clip_norm", clip_norm)
        self._sigma = checks.positive("noise_std", noise_std) / self._clip_norm
        means = self._rule.means
        self._dots, self._squares = np.zeros((means, canaries.count)), np.zeros(means)
        self._stream, self._t = forward(strategy), 0

    def add(self, row: object) -> None:
        """Take the next released row."""
        if self._t == self._rule.n:
            raise ArgumentError(f"released must have n={self._rule.n} rows, one for each step, and has more")
        count, own = self._canaries.count, np.zeros(len(self._squares))
        own[self._t % len(own)] = 1.0
        for z in self._stream.push(np.concatenate([self._canaries.dot(row) / self._clip_norm, own])):
            there = np.flatnonzero(z[count:])
            mean = z[count:][there]
            self._dots[there] += np.outer(mean, z[:count])
            self._squares[there] += np.square(mean)
        self._t += 1

    def scores(self) -> Floats:
        """(count,) scores so far."""
        ratios = self._log_ratios(self._dots)
        return ratios - self._log_ratios(-self._dots) if self._signed else ratios

    def _log_ratios(self, dots: Floats) -> Floats:
        """Log of the mixture's density over that of the noise alone."""
        return self._rule.log_ratios((dots - self._squares[:, None] / 2) / self._sigma**2)


def sampled_rule(participation: Participation) -> SecretOrder:
    """The order, if it is drawn in secret. Raises: ArgumentError."""
    if not isinstance(participation, SecretOrder):
        raise ArgumentError(f"participation must be drawn in secret, got {type(participation).__name__}")
    return participation
