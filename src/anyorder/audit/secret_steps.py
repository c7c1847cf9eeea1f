"""Canaries whose steps secret coins choose: how they draw them, and the best test of each.

Under secret sampling a unit is in the random steps S, with probability w_S each, and nobody knows S. A canary draws its
steps by the same law, with coins of its own. With y the whitened rows in its direction, in clip norms, m_S = C 1_S and
sigma = noise_std / clip_norm,

    y = m_S + sigma z if it is included, else sigma z;     score = log sum_S w_S exp((<m_S, y> - |m_S|^2 / 2) / sigma^2)

which is the best test there is [Neyman and Pearson]. All that it needs of the rows is <C e_t, y> for each step; and of
a rule whose steps are grouped (balls in bins) <m_j, y> for each group.
"""

from typing import assert_never

import numpy as np
import scipy  # its statistics, which take half a second to load, are loaded where they are asked for
from numpy.typing import NDArray
from scipy.special import bdtr, logsumexp

from anyorder import checks
from anyorder.audit.canaries import Canaries, forward
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource
from anyorder.participation import Participation
from anyorder.participation.sampled import (
    BallsInBins,
    CyclicPoisson,
    MinSeparationSampling,
    PoissonSampling,
    RandomAllocation,
    TruncatedPoisson,
)
from anyorder.strategy import Strategy

__all__ = ["SampledRule", "SecretScorer", "drawn_steps", "sampled_rule", "taken_probabilities"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SampledRule = (
    PoissonSampling | CyclicPoisson | TruncatedPoisson | BallsInBins | RandomAllocation | MinSeparationSampling
)
"""Orders that are drawn by secret coins."""


def drawn_steps(participation: Participation, count: int, source: NoiseSource) -> Bools:
    """(n, count) in which steps each of `count` canaries is, drawn by the law of the rule with coins of their own.

    Where units lie in groups, canary c lies in group c mod cycle. Under truncation a canary is in a step with the
    probability of a unit to be drawn and to stay, whoever else came.

    Args:
        participation: of secret sampling.
        count: number of canaries.
        source: where the coins come from: of nothing else.
    Raises: ArgumentError for a rule without secret coins.
    """
    rule, count = sampled_rule(participation), checks.integer("count", count, low=1)
    n, t = rule.n, np.arange(rule.n)[:, None]
    match rule:
        case PoissonSampling():
            return np.asarray(_uniforms(source, n, count) < rule.sampling_probability)
        case CyclicPoisson() | TruncatedPoisson():
            mine = t % rule.cycle == np.arange(count) % rule.cycle
            return np.asarray(mine & (_uniforms(source, n, count) < taken_probabilities(rule, count)))
        case BallsInBins():
            return np.asarray(t % rule.b == _below(source, 1, count, rule.b))
        case RandomAllocation():
            return np.asarray(t % rule.b == np.repeat(_below(source, rule.k, count, rule.b), rule.b, axis=0))
        case MinSeparationSampling():
            coins = _uniforms(source, n + 1, count)
            first = np.zeros(count, np.int64)
            if rule.warm_start:  # coins[n] / marginal is below b - 1 with probability (b - 1) marginal
                waits = np.floor(coins[n] / rule.marginal).astype(np.int64) + 1
                first = np.where(waits < rule.b, waits, 0)
            there = np.zeros((n, count), np.bool_)
            for step in range(n):
                there[step] = (first <= step) & (coins[step] < rule.sampling_probability)
                first = np.where(there[step], step + rule.b, first)
            return there
        case _:
            assert_never(rule)


def taken_probabilities(rule: CyclicPoisson | TruncatedPoisson, count: int) -> Floats:
    """(count,) the probability of unit c, of group c mod cycle, to be in a step of its group.

    Truncated: E min(B, batch_size) / group, B ~ Binomial(group, q), for as many units as its group has.
    """
    q = rule.sampling_probability
    if isinstance(rule, CyclicPoisson):
        return np.full(count, q)
    groups = np.arange(rule.cycle)
    sizes = (rule.dataset_size - groups + rule.cycle - 1) // rule.cycle
    return np.array([_stays(q, rule.batch_size, int(size)) for size in sizes])[np.arange(count) % rule.cycle]


def _stays(q: float, batch_size: int, group: int) -> float:
    """E min(B, batch_size) / group: all units of a group are alike."""
    if batch_size >= group:
        return q
    at_most = np.arange(batch_size + 1)
    within = float((at_most * scipy.stats.binom.pmf(at_most, group, q)).sum())
    return (within + batch_size * (1 - float(bdtr(batch_size, group, q)))) / group


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
        bins = self._rule.b if isinstance(self._rule, BallsInBins) else self._rule.n
        self._dots, self._squares = np.zeros((bins, canaries.count)), np.zeros(bins)
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
        rule, exponents = self._rule, (dots - self._squares[:, None] / 2) / self._sigma**2
        match rule:
            case PoissonSampling():
                return np.asarray(
                    _tossed(exponents, np.full(exponents.shape[1], rule.sampling_probability)).sum(axis=0)
                )
            case CyclicPoisson() | TruncatedPoisson():
                count = exponents.shape[1]
                mine = np.arange(rule.n)[:, None] % rule.cycle == np.arange(count) % rule.cycle
                tossed = _tossed(exponents, taken_probabilities(rule, count))
                return np.asarray(np.where(mine, tossed, 0.0).sum(axis=0))
            case BallsInBins():
                return np.asarray(logsumexp(exponents, axis=0) - np.log(rule.b))
            case RandomAllocation():
                epochs = exponents.reshape(rule.k, rule.b, -1)
                return np.asarray((logsumexp(epochs, axis=1) - np.log(rule.b)).sum(axis=0))
            case MinSeparationSampling():
                return _separated(exponents, rule)
            case _:
                assert_never(rule)


def _tossed(exponents: Floats, q: Floats) -> Floats:
    """log(1 - q + q e^x), of a coin for each step and canary."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + exponents))


def _separated(exponents: Floats, rule: MinSeparationSampling) -> Floats:
    """L_i = log((1 - p) e^L_(i+1) + p e^(x_i + L_(i+b))), from the last step to the first [Dong, Ganesh 2026]."""
    n, b, p = rule.n, rule.b, rule.sampling_probability
    logs = np.zeros((n + b + 1, exponents.shape[1]))
    with np.errstate(divide="ignore"):
        for i in range(n - 1, -1, -1):
            logs[i] = np.logaddexp(np.log1p(-p) + logs[i + 1], np.log(p) + exponents[i] + logs[i + b])
        if not rule.warm_start:
            return np.asarray(logs[0])
        weights = np.full(b, rule.marginal)
        weights[0] = max(0.0, 1 - (b - 1) * rule.marginal)
        return np.asarray(logsumexp(logs[:b], axis=0, b=weights[:, None]))


def sampled_rule(participation: Participation) -> SampledRule:
    """The rule, if it is drawn by secret coins. Raises: ArgumentError."""
    if not isinstance(participation, SampledRule):
        raise ArgumentError(f"participation must be drawn by secret coins, got {type(participation).__name__}")
    return participation


def _uniforms(source: NoiseSource, rows: int, count: int) -> Floats:
    """(rows, count) numbers in [0, 1), multiples of 2^-53."""
    words = np.stack([source.words(row, 0, 2 * count).view(np.uint64) for row in range(rows)])
    return np.asarray((words >> np.uint64(11)) * 2.0**-53)


def _below(source: NoiseSource, rows: int, count: int, number: int) -> NDArray[np.int64]:
    """(rows, count) integers from 0 to number - 1."""
    return np.floor(_uniforms(source, rows, count) * number).astype(np.int64)
