"""Bounds on regret: against naive learners under adversaries, against steps of their proofs, and the paper."""

from math import ceil, log, log2, sqrt

import numpy as np
import pytest
from scipy.stats import norm

import anyorder as ao
from anyorder.errors import ArgumentError, PlanError
from anyorder.online.regret import best_regularization, regret_bound, risk_bound
from anyorder.plan.planner import plan_at_sigma
from plans import flat_plan

MECHANISMS = ("tree", "blt, 2 buffers", "banded inverse, 4 bands", "dense", "independent")


def plan_for(n, mechanism="tree", batch_size=1, epsilon=2.0, **options):
    return flat_plan(
        dataset_size=n, batch_size=batch_size, epochs=1, epsilon=epsilon, delta=1e-6, mechanism=mechanism, **options
    )


def noise_of_sums(plan, dimension, generator):
    """(n, dimension) b_1, .., b_n, by the dense matrices."""
    K = plan.strategy.noising_matrix()
    return plan.noise_std * np.tril(np.ones((plan.n, plan.n))) @ K @ generator.normal(size=(K.shape[1], dimension))


def in_ball(theta, radius):
    length = np.linalg.norm(theta)
    return theta if length <= radius else theta * (radius / length)


# -- what it says ------------------------------------------------------------------------------------------------------


def test_without_noise_it_is_the_textbook_bound():
    bound = regret_bound(400, 3, lipschitz=2.0, radius=5.0, noise=0.0, beta=None)
    assert bound.value == pytest.approx(2 * 5 / sqrt(400))
    assert bound.regularization == pytest.approx(2 * sqrt(400) / 5)
    batches = regret_bound(400, 3, lipschitz=2.0, radius=5.0, noise=0.0, beta=None, batch_size=4)
    assert batches.value == pytest.approx(2 * bound.value)  # a batch of 4 is an example of 4 times the gradient


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_terms_are_those_of_the_dense_matrices(mechanism):
    n, d, L, R, at, beta, m = 46, 3, 0.8, 2.0, 7.0, 0.1, 4
    plan = plan_for(n, mechanism, m)
    bound = regret_bound(n, d, lipschitz=L, radius=R, plan=plan, regularization=at, beta=beta)
    K = plan.strategy.noising_matrix()
    stds = plan.noise_std * np.linalg.norm(np.tril(np.ones((plan.n, plan.n))) @ K, axis=1)
    counts = [4.0] * 11 + [2.0]
    chi = sqrt(8 / np.pi)  # the mean length of three normals
    noise = sum(m * L * s * (chi + sqrt(2 * log(1 / beta))) / at for m, s in zip(counts[1:], stds, strict=False)) / n
    learning = sum(m * m for m in counts) * L * L / 2 / at / n
    assert bound.terms == pytest.approx({"learning": learning, "noise": noise, "comparator": at * R * R / 2 / n})
    assert bound.value == pytest.approx(sum(bound.terms.values()))
    assert bound.analysis == "deviation"
    by_numbers = regret_bound(
        n, d, lipschitz=L, radius=R, noise=stds, batch_size=m, regularization=at, beta=beta
    )  # fmt: skip
    assert by_numbers.terms == pytest.approx(bound.terms)


@pytest.mark.parametrize("options", [{}, {"l2": 0.003}, {"l1": 0.1}, {"beta": None}, {"diameter": 4.0, "l2": 0.1}])
@pytest.mark.parametrize("mechanism", ["blt, 2 buffers", "independent"])
def test_best_regularization_is_the_least_over_a_grid(mechanism, options):
    n, rest = 300, {"lipschitz": 1.0, "radius": 2.0, "plan": plan_for(300, mechanism)}
    best = regret_bound(n, 5, **rest, **options)
    grid = best.regularization * np.geomspace(1e-3, 1e3, 601)
    values = [regret_bound(n, 5, **rest, **options, regularization=at).value for at in grid]
    assert best.value <= min(values) * (1 + 1e-9)
    assert best.value >= min(values) * (1 - 1e-3)
    at = best_regularization(n, 5, **rest, **{"beta": 0.05, **options})
    assert at == pytest.approx(best.regularization)


def test_half_the_noise_halves_its_term():
    plan = plan_for(200)
    whole, half = (
        regret_bound(200, 5, lipschitz=1, radius=1, plan=p, regularization=50)
        for p in (plan, plan_at_sigma(plan.sigma / 2, dataset_size=200, batch_size=1, epochs=1, delta=1e-6,
                                mechanism="tree"))
    )  # fmt: skip
    assert half.terms["noise"] == pytest.approx(whole.terms["noise"] / 2)


# -- that it holds, and is not vacuous ---------------------------------------------------------------------------------


def regret_of(adversary, plan, d, radius, at, generator, l2=0.0, drawn=None):
    """Mean regret, against the best model of norm <= radius, of naive FTRL with the dense noise on linear losses.

    The adversary is given (theta_t, the noise in it, generator) and gives a gradient of norm <= 1. It may know all
    that was played, and in a run without constraint that is all of the noise.
    """
    noise = noise_of_sums(plan, d, generator) if drawn is None else drawn
    total, paid = np.zeros(d), 0.0
    for t in range(plan.n):
        behind = noise[t - 1] if t else np.zeros(d)
        theta = -(total + behind) / (at + l2 * t)
        g = adversary(theta, behind, generator)
        assert np.linalg.norm(g) <= 1 + 1e-9
        paid += g @ theta
        total = total + g
    return (paid + radius * np.linalg.norm(total)) / plan.n


def against_the_noise(theta, behind, generator):
    length = np.linalg.norm(behind)
    return -behind / length if length else np.eye(len(behind))[0]


def along_the_model(theta, behind, generator):
    length = np.linalg.norm(theta)
    return theta / length if length else np.eye(len(theta))[0]


def a_coin_each(theta, behind, generator):
    g = generator.normal(size=len(theta))
    return g / np.linalg.norm(g)


@pytest.mark.parametrize("mechanism", ["blt, 2 buffers", "independent"])
def test_no_adversary_exceeds_it_and_some_come_near(mechanism):
    n, d, radius, beta = 128, 4, 1.0, 0.05
    plan = plan_for(n, mechanism)
    most = {}
    for name, adversary in (("noise", against_the_noise), ("model", along_the_model), ("coins", a_coin_each)):
        for scale in (0.3, 1.0, 3.0):
            best = best_regularization(n, d, lipschitz=1, radius=radius, plan=plan) * scale
            bound = regret_bound(n, d, lipschitz=1, radius=radius, plan=plan, beta=beta, regularization=best)
            generator = np.random.default_rng(7)
            runs = [regret_of(adversary, plan, d, radius, best, generator) for _ in range(40)]
            ratios = np.array(runs) / bound.value
            assert (ratios > 1).mean() <= beta
            most[name] = max(most.get(name, 0.0), float(np.median(ratios)))
    print(mechanism, {name: round(ratio, 3) for name, ratio in most.items()})
    assert max(most.values()) > 0.35  # the bound is within three times what can happen


def test_mean_bound_holds_in_the_mean_with_l2():
    n, d, radius, l2 = 200, 3, 1.0, 0.02
    plan = plan_for(n, "blt, 2 buffers")
    at = best_regularization(n, d, lipschitz=1, radius=radius, plan=plan, l2=l2)
    bound = regret_bound(n, d, lipschitz=1, radius=radius, plan=plan, beta=None, regularization=at, l2=l2)
    generator = np.random.default_rng(3)
    runs = [regret_of(against_the_noise, plan, d, radius, at, generator, l2) for _ in range(60)]
    assert 0.1 * bound.value < np.mean(runs) < bound.value


@pytest.mark.parametrize("beta", [None, 0.1])
def test_martingale_bound_of_independent_noise_holds_and_is_less(beta):
    """For a comparator that is chosen when all is over, and for one that is not: risk_bound's, which is less."""
    n, d, radius = 500, 3, 1.0
    plan = plan_for(n, "independent", epsilon=16.0)
    chosen, fixed = (
        bound(n, d, lipschitz=1, radius=radius, plan=plan, beta=beta, diameter=2 * radius)
        for bound in (regret_bound, risk_bound)
    )
    other = regret_bound(n, d, lipschitz=1, radius=radius, plan=plan, beta=beta or 0.1)
    assert [chosen.analysis, fixed.analysis, other.analysis] == ["martingale", "martingale", "deviation"]
    assert fixed.value < chosen.value < other.value
    generator, of_chosen, of_fixed = np.random.default_rng(5), [], []
    for xi in plan.noise_std * generator.normal(size=(60, n, d)):
        total, private, paid = np.zeros(d), np.zeros(d), 0.0
        for t in range(n):
            theta = in_ball(-private / chosen.regularization, radius)
            g = along_the_model(theta, None, generator)
            paid += g @ theta
            total, private = total + g, private + g + xi[t]
        of_chosen.append((paid + radius * np.linalg.norm(total)) / n)
        of_fixed.append((paid - radius * total[0]) / n)
    for bound, runs in ((chosen, of_chosen), (fixed, of_fixed)):
        above = np.mean(runs) > bound.value if beta is None else np.mean(np.array(runs) > bound.value) > beta
        assert not above
        print(f"{bound.analysis}, beta {beta}: {np.median(runs) / bound.value:.3f}")
    assert np.median(of_chosen) > 0.2 * chosen.value


@pytest.mark.parametrize("d", [1, 20])
@pytest.mark.parametrize("mechanism", ["tree", "dense", "independent"])
def test_sums_of_noise_norms_concentrate_as_the_proof_says(mechanism, d):
    """sum ||b_t|| <= sum s_t (sqrt d + sqrt(2 ln 1/beta)), in 4000 draws for each of some beta."""
    plan = plan_for(64, mechanism)
    generator = np.random.default_rng(d)
    stds = plan.clip_norm * plan.noise_profile(sums=True)
    K = plan.strategy.noising_matrix()
    draws = (plan.noise_std * np.cumsum(K, axis=0)) @ generator.normal(size=(4000, K.shape[1], d))
    sums = np.linalg.norm(draws, axis=2).sum(axis=1)
    for beta in (0.3, 0.1, 0.01):
        assert (sums > stds.sum() * (sqrt(d) + sqrt(2 * log(1 / beta)))).mean() <= beta
    assert sums.mean() > 0.75 * stds.sum() * sqrt(d)


# -- beside the paper --------------------------------------------------------------------------------------------------


def test_published_bound_is_theorem_c1():
    n, d, at, beta, L, R = 1000, 20, 100.0, 0.05, 0.5, 2.0
    plan = plan_for(n)
    bound = regret_bound(n, d, lipschitz=L, radius=R, plan=plan, beta=beta, regularization=at)
    sigma = plan.noise_std / L
    expected = (L * L * sigma * sqrt(d * ceil(log2(n)) * log(n / beta)) + L * L) / at + at / (2 * n) * R * R
    assert bound.published == pytest.approx(expected)
    assert bound.terms["noise"] < (bound.published - bound.terms["comparator"]) / 4
    assert regret_bound(64, d, lipschitz=L, radius=R, plan=plan_for(64, "dense"), beta=beta).published is None


def test_the_papers_norm_of_the_noise_fails_in_one_dimension():
    """Two steps, beta 0.05: nodes of a step and of both have sigma each, and |b| <= sigma sqrt(ln(2 / 0.05)) in both
    steps has a probability of 0.893, not 0.95."""
    tree = ao.strategy.Tree(2, "vanilla")
    assert np.allclose(tree.prefix_variance(), 1.0)
    both = (2 * norm.cdf(sqrt(log(2 / 0.05))) - 1) ** 2
    assert both == pytest.approx(0.893, abs=1e-3)


# -- risk --------------------------------------------------------------------------------------------------------------


def test_risk_counts_a_short_last_batch_as_a_whole_one():
    plan = plan_for(46, "tree", 4)
    rest = {"lipschitz": 1, "radius": 1, "plan": plan}
    assert risk_bound(46, 3, **rest).value == regret_bound(48, 3, **rest).value
    both = risk_bound(46, 3, **rest, beta_data=0.1, diameter=2.0)
    assert both.terms["sampling"] == pytest.approx(2 * sqrt(2 * log(10) / 48))
    assert both.value == pytest.approx(sum(both.terms.values()))


def test_risk_of_the_average_stays_below():
    """Linear losses <g, theta> with g = -e_1 or e_1 by a biased coin: risk is linear, and known."""
    n, d, bias, radius = 300, 3, 0.3, 1.0
    plan = plan_for(n, "blt, 2 buffers", epsilon=8)
    at = best_regularization(n, d, lipschitz=1, radius=radius, plan=plan)
    bound = risk_bound(n, d, lipschitz=1, radius=radius, plan=plan, regularization=at, beta=None)
    generator, excess = np.random.default_rng(0), []
    for _ in range(60):
        noise = noise_of_sums(plan, d, generator)
        g = np.where(generator.random(n) < (1 + bias) / 2, -1.0, 1.0)[:, None] * np.eye(d)[0]
        before = np.concatenate([np.zeros((1, d)), np.cumsum(g, 0)[:-1] + noise[:-1]])
        average = np.mean([in_ball(-s / at, radius) for s in before], axis=0)
        excess.append(bias * (radius - average[0]))
    assert 0.1 * bound.value < np.mean(excess) < bound.value


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_refusals():
    plan = plan_for(100, "tree", 5)
    ok = {"lipschitz": 1, "radius": 1, "plan": plan}
    with pytest.raises(ArgumentError, match="exactly one of plan and noise"):
        regret_bound(100, 2, lipschitz=1, radius=1)
    with pytest.raises(ArgumentError, match="n must be at most 100"):
        regret_bound(101, 2, **ok)
    with pytest.raises(PlanError, match="clip norm 1, got 1.5"):
        regret_bound(100, 2, **{**ok, "lipschitz": 1.5})
    with pytest.raises(PlanError, match="secret sampling"):
        regret_bound(
            100,
            2,
            **{
                **ok,
                "plan": plan_at_sigma(1, dataset_size=100, batch_size=10, epochs=1, delta=1e-6, mechanism="poisson"),
            },
        )
    with pytest.raises(ArgumentError, match="noise must be 3 numbers"):
        regret_bound(3, 2, lipschitz=1, radius=1, noise=[1.0, 2.0])
    with pytest.raises(ArgumentError, match="diameter"):
        risk_bound(100, 2, **ok, beta_data=0.1)
    with pytest.raises(PlanError, match="grid"):
        regret_bound(100, 2, **{**ok, "plan": plan_for(100, "tree", 5, secure=True)})
    twice = ao.plan(dataset_size=100, batch_size=5, epochs=2, epsilon=1, delta=1e-6, mechanism="tree")
    with pytest.raises(PlanError, match="fresh examples"):
        risk_bound(100, 2, **{**ok, "plan": twice})
    for name in ("lipschitz", "radius"):
        with pytest.raises(ArgumentError, match=name):
            regret_bound(100, 2, **{**ok, name: 0.0})
