"""Balls in bins on digits: what an attacker sees who does not know the bins, and one to whom they became known.

A network of 2410 parameters, 20 epochs of 12 steps, delta 1e-5, noise for an epsilon of 12 if the bins are known. 1500
canaries a run, each in the steps of a bin that it drew; scores of all runs, whose noise is their own, are put together.
Ours is a lower bound at confidence 0.95, the peer's what it must not be above, the ratio claim / bound.

The amplified claim is that of a certificate of chance, at its default number of samples.

secret       the largest of "one_run" and "clopper_pearson", of likelihood ratios over all bins, beside the amplified
             claim
p            the p-value of that claim
known        by the Gaussian law of scores that know the steps, beside the plan's `known_epsilon`
above        the same bound beside the amplified claim: where it is above, the claim rests on the secrecy of bins
mu known     the middle of the interval for mu, beside the mean over the canaries' own bins
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.accounting import gdp_mu
from anyorder.accounting.amplification.monte_carlo import mc_epsilon
from anyorder.app import Setup
from anyorder.app import data as datasets
from anyorder.app import job as parts
from anyorder.app.audits import Attack, attack
from anyorder.audit import epsilon_lower_bound, mu_estimate
from anyorder.audit.result import Audited, Stated
from anyorder.participation import BallsInBins, FixedOrder
from anyorder.strategy import BandedInverse, Strategy, ToeplitzBanded
from anyorder.strategy.registry import known_sensitivity
from anyorder.workload import prefix_sum
from benchmarks._report import Row

DELTA, KNOWN, RULE = 1e-5, 12.0, BallsInBins(20, 12)
STRATEGIES: dict[str, Strategy] = {
    "banded, 4 bands": ToeplitzBanded.from_square_root(prefix_sum(RULE.n), 4),
    "banded inverse, 4 bands": BandedInverse.from_square_root(prefix_sum(RULE.n), 4),
    "blt, 2 buffers": ao.optimize.fit("blt", prefix_sum(RULE.n), FixedOrder(RULE.n, RULE.k, RULE.b), buffers=2),
}


def rows(quick: bool) -> Iterator[Row]:
    """A few rows for each strategy."""
    for name, strategy in STRATEGIES.items():
        setup = _setup(strategy)
        done = [attack(setup, canaries=1500) for _ in range(1 if quick else 5)]
        yield from _rows(name, setup.plan, done)


def _setup(strategy: Strategy) -> Setup:
    data = datasets.load("digits")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    plan = ao.Plan(
        participation=RULE, strategy=strategy, workload=prefix_sum(RULE.n), clip_norm=1.0,
        sigma=known_sensitivity(strategy, RULE).value / gdp_mu(KNOWN, DELTA), delta=DELTA, batch_size=120,
    )  # fmt: skip
    loss = functools.partial(parts.loss, device=torch.device("cpu"))
    return Setup(plan, model, torch.optim.SGD(model.parameters(), lr=0.5), DataLoader(data.train, batch_size=120), loss)


def _rows(name: str, plan: ao.Plan, done: list[Attack]) -> Iterator[Row]:
    secret, known = _together([one.audited for one in done]), _together([one.known for one in done if one.known])
    claim = mc_epsilon(plan.strategy, RULE, plan.noise_multiplier, DELTA)
    secret = replace(secret, curve=Stated(claim, DELTA), epsilon=claim)
    bound = max(secret.lower_bound(method) for method in ("one_run", "clopper_pearson"))
    yield _beside(f"secret: {name}", bound, claim)
    yield Row(f"p: {name}", secret.p_value(), None, None, "p-value")
    seen = epsilon_lower_bound(known.scores, known.included, DELTA, 0.95, "gaussian")
    yield _beside(f"known: {name}", seen, known.epsilon)
    yield _beside(f"above: {name}", seen, claim)
    assert known.mus is not None
    middle = float(np.mean(mu_estimate(known.scores, known.included)))
    yield Row(f"mu known: {name}", middle, float(known.mus.mean()), float(known.mus.mean()) / middle, "mu")


def _together(runs: list[Audited]) -> Audited:
    """Of runs with noise of their own, as if they were one."""
    scores = np.concatenate([run.scores for run in runs])
    included = np.concatenate([run.included for run in runs])
    mus = None if runs[0].mus is None else np.concatenate([run.mus for run in runs if run.mus is not None])
    return replace(runs[0], scores=scores, included=included, mus=mus)


def _beside(name: str, bound: float, claim: float) -> Row:
    return Row(name, bound, claim, claim / bound if bound else None, "epsilon")
