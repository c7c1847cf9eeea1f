"""Plans from words: DP-SGD's noise multiplier, mechanisms by name, and comparisons at one budget."""

import math

import numpy as np
import pytest

import anyorder as ao
from anyorder.app.planning import best_of_each_kind, compare, make_plan, mechanism_words, noise_lines, poisson_claim
from anyorder.errors import AnyorderError, ArgumentError, PlanError
from anyorder.optimize import choose, fit
from anyorder.participation import PoissonSampling
from anyorder.strategy import Independent, Tree

SIZES = {"dataset_size": 2000, "batch_size": 100, "delta": 1e-5}


def test_the_noise_multiplier_is_that_of_dp_sgd():
    """q = 0.05, 3 epochs, noise multiplier 1: mu = sqrt(3), epsilon 8.385, for every loader without sampling."""
    for order in ("shuffled", "sequential", "fixed"):
        plan = make_plan(mechanism="independent", epochs=3, order=order, noise_multiplier=1.0, **SIZES)
        assert plan.noise_std == pytest.approx(1.0, rel=1e-12)
        assert plan.mu == pytest.approx(math.sqrt(3), rel=1e-12)
        assert plan.epsilon == pytest.approx(8.3854, abs=1e-4)
    tree = make_plan(mechanism="tree", epochs=3, noise_multiplier=2.5, clip_norm=4.0, **SIZES)
    assert tree.noise_std == pytest.approx(10.0, rel=1e-12)
    assert tree.noise_multiplier == pytest.approx(2.5)


def test_poisson_sampling_by_order_or_by_mechanism():
    by_order = make_plan(epochs=3, order="poisson", noise_multiplier=1.0, **SIZES)
    by_name = make_plan(mechanism="poisson", epochs=3, noise_multiplier=1.0, **SIZES)
    assert by_order == by_name
    assert by_order.amplified
    assert by_order.epsilon == poisson_claim(1.0, 100, 2000, 60, 1e-5)
    assert by_order.epsilon == pytest.approx(2.857, abs=0.002)  # 2.867 by Opacus 1.6's PRV accountant
    with pytest.raises(PlanError, match="mechanism 'poisson' only"):
        make_plan(mechanism="tree", epochs=3, order="poisson", noise_multiplier=1.0, **SIZES)


def test_tree_options_reach_the_tree_and_only_the_tree():
    words = mechanism_words("tree", "online", 1, "on")
    tree = make_plan(**words, epochs=3, epsilon=4.0, **SIZES).strategy
    assert tree == Tree(60, "online", restarts=(20, 40), completion=True)
    for option in ({"estimator": "online"}, {"restart_every": 2}, {"completion": "on"}):
        with pytest.raises(ArgumentError, match="'tree' only"):
            make_plan(**mechanism_words("independent", **option), epochs=3, epsilon=4.0, **SIZES)


def test_unknown_mechanisms_and_double_budgets_are_refused():
    with pytest.raises(ArgumentError, match="one of auto, poisson, .*blt, .*tree, .*got 'magic'"):
        make_plan(mechanism="magic", epochs=3, epsilon=4.0, **SIZES)
    for budget in ({}, {"epsilon": 1.0, "noise_multiplier": 1.0}):
        with pytest.raises(ArgumentError, match="exactly one of epsilon and noise_multiplier"):
            make_plan(epochs=3, **budget, **SIZES)
    with pytest.raises(AnyorderError, match="noise_multiplier must be above 0"):
        make_plan(mechanism="tree", epochs=3, noise_multiplier=0.0, **SIZES)


def test_a_kind_stands_for_its_best_size():
    chosen = make_plan(mechanism="tree", epochs=2, epsilon=4.0, **SIZES)
    candidates = choose(chosen.workload, chosen.participation)
    bands = [candidate for candidate in candidates if candidate.name.startswith("banded inverse,")]
    assert len(bands) > 1
    by_kind = make_plan(mechanism="banded inverse", epochs=2, epsilon=4.0, **SIZES)
    assert by_kind.strategy == bands[0].strategy
    by_name = make_plan(mechanism=bands[1].name, epochs=2, epsilon=4.0, **SIZES)
    assert by_name.strategy == bands[1].strategy


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("dense", "dense", {}),
        ("banded, 6 bands", "banded", {"bands": 6}),
        ("banded toeplitz, 5 bands", "toeplitz", {"bands": 5}),
        ("blt, 1 buffer", "blt", {"buffers": 1}),
        ("blt, 1 buffers", "blt", {"buffers": 1}),
        ("banded low rank, 3 bands, 2 rank", "banded_low_rank", {"bands": 3, "rank": 2}),
    ],
)
def test_a_kind_with_its_size_is_fitted_at_that_size(name, kind, size):
    chosen = make_plan(mechanism=name, epochs=2, epsilon=4.0, order="fixed", momentum=0.9, **SIZES)
    assert chosen.strategy == fit(kind, chosen.workload, chosen.participation, **size)
    assert chosen.epsilon <= 4.0


@pytest.mark.parametrize("name", ["banded, 6 buffers", "dense, 3 bands", "blt, 2 buffers, 3"])
def test_a_kind_with_a_wrong_size_is_refused(name):
    with pytest.raises(ArgumentError, match=r"needs the sizes|mechanism must be one of"):
        make_plan(mechanism=name, epochs=2, epsilon=4.0, order="sequential", **SIZES)


@pytest.mark.parametrize(
    ("name", "epochs", "instead"),
    [("blt, 500 buffers", 1, r"'blt, [1-9] buffers'"), ("banded, 30 bands", 2, "'banded, 20 bands'")],
)
def test_a_size_that_the_fit_does_not_use_is_refused(name, epochs, instead):
    with pytest.raises(PlanError, match=instead):
        make_plan(mechanism=name, epochs=epochs, epsilon=4.0, **SIZES)


def test_auto_is_the_plans_own_choice():
    ours = make_plan(epochs=3, epsilon=4.0, momentum=0.9, **SIZES)
    assert ours == ao.plan(epochs=3, epsilon=4.0, optimizer=ao.SGD(momentum=0.9), **SIZES)


def test_a_comparison_is_at_one_epsilon_least_error_first():
    chosen = make_plan(epochs=2, epsilon=4.0, **SIZES)
    rows = compare(chosen)
    assert {"tree", "independent", "poisson"} <= {row.name for row in rows}
    errors = [row.error for row in rows]
    assert errors == sorted(errors)
    bounds = [row.error / row.ratio for row in rows if row.ratio is not None]
    assert bounds == pytest.approx([bounds[0]] * len(bounds))
    assert bounds[0] <= errors[0]
    assert [row.ratio for row in rows if row.plan.amplified] == [None]
    strategies = [row.plan.strategy for row in rows if not row.plan.amplified]
    assert len(set(strategies)) == len(strategies)
    shown = best_of_each_kind(rows)
    assert {"tree", "independent", "poisson", "blt"} <= set(shown)
    assert next(iter(shown.values())) == rows[0].plan
    for row in rows:
        assert 4.0 * (1 - 1e-5) <= row.plan.epsilon <= 4.0
        assert row.plan.participation == chosen.participation or row.plan.amplified
    independent = next(row for row in rows if row.name == "independent")
    # The error of independent noise in closed form: std sqrt((n + 1) / 2), over n prefix sums.
    assert independent.error == pytest.approx(independent.plan.noise_std * math.sqrt(41 / 2))
    assert independent.last == pytest.approx(independent.plan.noise_std * math.sqrt(40))
    assert independent.to_dict()["vectors"] == 0
    with pytest.raises(ArgumentError, match="other than 'poisson'"):
        compare(rows[[row.name for row in rows].index("poisson")].plan)


@pytest.mark.parametrize("order", ["balls-in-bins", "truncated-poisson"])
def test_what_is_drawn_by_other_coins_is_compared_with_poisson_sampling_too(order, monkeypatch):
    if order != "cyclic-poisson":  # of the others, whose claims take seconds each, the row of Poisson sampling alone
        monkeypatch.setattr("anyorder.app.planning.choose", lambda *_, **__: [])
    chosen = make_plan(
        mechanism="independent", order=order, epochs=2, noise_multiplier=1.5, delta=1e-5, dataset_size=60, batch_size=20
    )
    rows = compare(chosen)
    assert (len(rows) > 1) == (order == "cyclic-poisson")
    sampled = next(row.plan for row in rows if row.name == "poisson")
    assert type(sampled.participation) is PoissonSampling
    assert (sampled.n, sampled.method) == (chosen.n, None)
    assert chosen.epsilon * (1 - 1e-5) <= sampled.epsilon <= chosen.epsilon


def test_the_plot_sets_independent_noise_of_the_same_privacy_beside_the_plan():
    tree = make_plan(mechanism="tree", epochs=2, epsilon=4.0, **SIZES)
    ours, independent = noise_lines(tree).values()
    assert ours is tree
    assert isinstance(independent.strategy, Independent)
    assert independent.epsilon == pytest.approx(tree.epsilon, rel=1e-6)
    assert tree.noise_profile()[-1] < independent.noise_profile()[-1]
    assert list(noise_lines(independent).values()) == [independent]
    np.testing.assert_allclose(independent.noise_profile(), independent.noise_std * np.sqrt(np.arange(1, 41)))
