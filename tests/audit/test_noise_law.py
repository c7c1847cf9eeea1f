"""The law of the noise: exact on what is honest, and each test finds what it is for."""

import numpy as np
import pytest
from scipy.special import ndtr

from anyorder.audit.canaries import whitener
from anyorder.audit.laws import NoiseLaw, echo, noise_law
from anyorder.errors import ArgumentError
from anyorder.strategy import BLT, Banded, Independent, Tree

N, SIZE, STD, DIVISOR = 12, 300, 0.7, 5.0
STRATEGIES = {
    "independent": Independent(N),
    "blt": BLT([0.9, 0.4], [0.3, 0.2], N),
    "banded": Banded(np.array([[1.0] * N, [0.6] * (N - 1) + [0.0]])),
    "tree": Tree(N),
    "online tree": Tree(N, "online"),
}


def run(seed, strategy, spoil=lambda Z: Z):
    generator = np.random.default_rng(seed)
    totals = 3 * generator.normal(size=(N, SIZE))
    Z = spoil(generator.normal(size=(strategy.num_rows, SIZE)))
    return (totals + STD * strategy.noising_matrix() @ Z) / DIVISOR, totals


def law(seed, strategy, spoil=lambda Z: Z, std=STD):
    released, totals = run(seed, strategy, spoil)
    return noise_law(released, totals, strategy, std, DIVISOR)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_whitener_makes_the_noise_white(name):
    strategy = STRATEGIES[name]
    K, A = strategy.noising_matrix(), whitener(strategy)
    np.testing.assert_allclose(A @ K @ K.T @ A.T, np.eye(N), atol=1e-12)
    if strategy.num_rows == N:
        np.testing.assert_allclose(A, strategy.matrix(), atol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_honest_noise_is_rejected_at_the_nominal_rate_and_no_more(name):
    """100 runs: each test's p-values lie above uniform ones, by Kolmogorov and Smirnov at 1e-6."""
    laws = [law(seed, STRATEGIES[name]).p_values for seed in range(100)]
    for test in laws[0]:
        above(np.array([one[test] for one in laws]), test)
    above(np.array([NoiseLaw(one).p_value for one in laws]), "all")


def above(p_values, name):
    ranks = np.arange(1, len(p_values) + 1) / len(p_values)
    excess = (ranks - np.sort(p_values)).max()
    assert excess < np.sqrt(np.log(1e6) / 2 / len(p_values)), name


@pytest.mark.parametrize("strategy", [Independent(4500), BLT([0.9, 0.4], [0.3, 0.2], 4500)], ids=["independent", "blt"])
def test_a_run_of_many_steps_is_made_white_row_by_row(strategy):
    generator = np.random.default_rng(3)
    Z, size = generator.normal(size=(4500, 20)), 20
    state = strategy.init(size)
    noise = np.zeros((4500, size))
    for t in range(4500):
        made, state = strategy.step(t, state, lambda i: Z[i])
        noise[t] = made
    honest = noise_law(STD * noise, np.zeros((4500, size)), strategy, STD)
    assert honest.p_value > 1e-6
    assert "a row used again" not in honest.p_values
    spoilt = noise.copy()
    spoilt[4400:] = 0.0  # steps without noise
    spoiled = noise_law(STD * spoilt, np.zeros((4500, size)), strategy, STD)
    assert spoiled.p_values["variance of a step"] < 1e-6
    assert noise_law(STD / 2 * noise, np.zeros((4500, size)), strategy, STD).p_value < 1e-6


def repeated_row(Z):
    Z[5] = Z[4]
    return Z


def halves(Z):
    Z[:, SIZE // 2 :] = Z[:, : SIZE // 2]
    return Z


def moved(Z):
    Z[6:, 7:] = Z[:-6, :-7]
    return Z


def one_coordinate(Z):
    Z[:, 17] = 0
    return Z


def one_step(Z):
    Z[3] *= 1.6
    return Z


def outlier(Z):
    Z[3, 4] = 9.0
    return Z


def uniform(Z):
    return np.random.default_rng(0).uniform(-np.sqrt(3), np.sqrt(3), Z.shape)


SPOILT = {
    "variance": lambda Z: 0.5 * Z,
    "variance of a step": one_step,
    "variance of a coordinate": one_coordinate,
    "a row used again": repeated_row,
    "correlation": moved,
    "largest": outlier,
    "shape": uniform,
}


@pytest.mark.parametrize("name", ["independent", "blt"])
@pytest.mark.parametrize("test", SPOILT)
def test_each_test_finds_what_it_is_for(test, name):
    assert law(1, STRATEGIES[name], SPOILT[test]).p_values[test] < 1e-6


def test_noise_that_two_halves_of_the_coordinates_share_is_found():
    assert law(1, STRATEGIES["blt"], halves).p_values["correlation"] < 1e-6


def test_too_much_noise_is_no_planned_noise_either():
    assert law(1, STRATEGIES["tree"], std=STD / 1.2).p_value < 1e-6


def test_noise_of_another_strategy_is_found():
    released, totals = run(1, STRATEGIES["blt"])
    other = BLT([0.9, 0.4], [0.1, 0.1], N)
    assert noise_law(released, totals, other, STD, DIVISOR).p_value < 1e-6


def test_a_released_nan_is_found():
    released, totals = run(1, STRATEGIES["blt"])
    released[3, 3] = np.nan
    assert noise_law(released, totals, STRATEGIES["blt"], STD, DIVISOR).p_value == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="released and totals"):
        noise_law(np.zeros((3, 4)), np.zeros((3, 4)), Independent(4), 1.0)
    with pytest.raises(ArgumentError, match="noise_std"):
        noise_law(np.zeros((4, 4)), np.zeros((4, 4)), Independent(4), 0.0)
    with pytest.raises(ArgumentError, match="4096 steps"):
        whitener(Independent(5000))


# -- echoes ------------------------------------------------------------------------------------------------------------

COUNT, CLIP = 60, 1.0


class Directions:
    """Orthonormal canaries, spread over all coordinates."""

    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, COUNT)))[0]

    def dot(self, row):
        return np.asarray(row) @ self.vectors


def planted(seed, strategy, leak=np.zeros_like, std=0.2):
    """Released rows, coins, steps and totals; `leak` gives what is added to what canaries add, (n, count)."""
    generator = np.random.default_rng(seed)
    steps = [sorted(generator.choice(N, 2, replace=False)) for _ in range(COUNT)]
    included = generator.random(COUNT) < 0.5
    own = np.zeros((N, COUNT))
    for c in np.flatnonzero(included):
        own[steps[c], c] = CLIP
    noise = std * strategy.noising_matrix() @ generator.normal(size=(strategy.num_rows, SIZE))
    totals = own @ Directions.vectors.T
    return (totals + leak(own) @ Directions.vectors.T + noise) / DIVISOR, included, steps, totals


def echoes(seed, strategy, leak=np.zeros_like, std=0.2, known=False):
    released, included, steps, own = planted(seed, strategy, leak, std)
    totals = own if known else None
    return echo(released, Directions(), included, steps, strategy, std, DIVISOR, totals=totals, clip_norm=CLIP)


@pytest.mark.parametrize("name", STRATEGIES)
def test_canaries_that_stay_where_they_are_have_no_echo(name):
    laws = [echoes(seed, STRATEGIES[name]).p_values for seed in range(100)]
    for test in laws[0]:
        above(np.array([one[test] for one in laws]), test)


def momentum(own):
    trace = np.zeros_like(own)
    for t in range(1, N):
        trace[t] = 0.5 * (own[t - 1] + trace[t - 1])
    return trace


def kept_step(own):
    later = np.zeros_like(own)
    later[7] = own[4]
    return later


def kept_unit(own):
    later = np.zeros_like(own)
    unit = np.flatnonzero(own[4] * (1 - own[7]))[0]
    later[7, unit] = own[4, unit]
    return later


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_echo_is_found(name, known):
    strategy = STRATEGIES[name]
    assert echoes(1, strategy, kept_unit, std=0.1, known=known).p_values["echo of a unit"] < 1e-6
    assert echoes(1, strategy, kept_step, std=0.3, known=known).p_values["echo of a step"] < 1e-6
    assert echoes(1, strategy, momentum, std=0.7, known=known).p_values["echo"] < 1e-6


def test_what_a_canary_leaves_at_its_own_steps_is_no_echo():
    """Canaries that are too long where they belong: scores of other steps do not see it under white noise."""
    for known in (True, False):
        laws = [echoes(seed, STRATEGIES["independent"], lambda own: 3 * own, known=known) for seed in range(5)]
        assert min(one.p_value for one in laws) > 1e-4


def test_an_echo_before_its_step_is_found():
    def early(own):
        return np.append(0.8 * own[1:], np.zeros((1, COUNT)), axis=0)

    assert echoes(1, STRATEGIES["independent"], early, std=0.7).p_values["echo"] < 1e-6


def test_the_largest_entry_counts_on_both_sides():
    W = np.random.default_rng(0).normal(size=(N, SIZE)).clip(-3, 3)
    W[3, 4] = -6.0
    found = noise_law(W, np.zeros((N, SIZE)), Independent(N), 1.0).p_values["largest"]
    assert found == pytest.approx(N * SIZE * 2 * ndtr(-6.0), rel=1e-9)


def test_an_echo_does_not_depend_on_units():
    strategy = STRATEGIES["blt"]
    released, included, steps, _ = planted(2, strategy)
    at_one = echo(released, Directions(), included, steps, strategy, 0.2, DIVISOR, clip_norm=CLIP)
    scaled = echo(2.5 * released, Directions(), included, steps, strategy, 0.5, DIVISOR, clip_norm=2.5 * CLIP)
    assert dict(scaled.p_values) == pytest.approx(dict(at_one.p_values), rel=1e-6)


def test_a_single_unit_is_lost_in_the_sum_of_squares():
    released, _, _, own = planted(1, STRATEGIES["blt"], kept_unit, std=0.1)
    assert noise_law(released, own, STRATEGIES["blt"], 0.1, DIVISOR).p_value > 1e-3


def test_coins_that_do_not_fit_are_refused():
    released, included, steps, _ = planted(1, Independent(N))
    with pytest.raises(ArgumentError, match="included"):
        echo(released, Directions(), included[1:], steps, Independent(N), 0.2)
    with pytest.raises(ArgumentError, match="at least one"):
        echo(released, Directions(), np.zeros(COUNT, bool), steps, Independent(N), 0.2)
