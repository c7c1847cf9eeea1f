"""Integer noise: the rounding of exact normals, whatever the floats in between did."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import chi2

from anyorder.accounting import gdp_delta
from anyorder.errors import ArgumentError, CheckpointError, PlanError, StepsExhaustedError
from anyorder.noise import NoiseSource, discrete
from anyorder.noise.discrete import GridStream
from anyorder.strategy import BLT, BandedInverse, Dense, Independent, ToeplitzBanded, Tree
from anyorder.strategy.rescaled import Rescaled

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
STRATEGIES = [
    Independent(7),
    Tree(7, "vanilla"),
    Tree(12, "online", restarts=(5,), completion=True),
    Tree(12, "full", restarts=(5,), completion=True),
    BandedInverse([1.0, -0.5, 0.0, -0.25], 7),
    Dense(np.tril(np.full((5, 5), 0.3)) + np.eye(5)),
]
RECURRENCES = [BLT([0.5], [0.5], 7), ToeplitzBanded([1, 0.5], 7), Rescaled(Independent(7), np.ones(7))]
BY_KIND = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


def stream(strategy=None, std=3.0, grid=2.0**-10, size=50, **options):
    return GridStream(strategy or Independent(7), SOURCE, std, grid, size, **options)


def made(stream, steps):
    return np.stack([stream.next() for _ in range(steps)])


def normals(row, size, start=0):
    """Z by the layout, in floats, apart from the code under test."""
    words = SOURCE.derive(b"discrete").words(row, 2 * start, 2 * (start + size)).astype(object)
    w = [int(low) + 2**32 * int(high) for low, high in zip(words[0::2], words[1::2], strict=True)]
    return np.array([(-1) ** (1 - (x >> 63)) * ndtri((x % 2**63 + 0.5) / 2**64) for x in w])


def pmf(k, sigma):
    """P(round(sigma Z) = k), from the smaller tail."""
    k = np.abs(np.asarray(k, dtype=float))
    return ndtr(-(k - 0.5) / sigma) - ndtr(-(k + 0.5) / sigma)


# -- the law ---------------------------------------------------------------------------------------------------------


@BY_KIND
def test_renewed_rows_are_of_fresh_keys(strategy):
    """Row by row: what a step makes is what a stream of the one key makes, where all its rows are on one side."""
    row = strategy.num_rows // 2
    renewed = SOURCE.renewed(row, b"1" * 16)
    mixed, old, new = (
        made(GridStream(strategy, source, 3.0, 2.0**-10, 50), strategy.n)
        for source in (renewed, SOURCE, renewed.of(row))
    )
    K = strategy.noising_matrix()
    for t in range(strategy.n):
        before, after = K[t, :row].any(), K[t, row:].any()
        assert (mixed[t] == old[t]).all() == (not after)
        assert (mixed[t] == new[t]).all() == (not before)
    assert GridStream(strategy, renewed, 3.0, 2.0**-10, 50).state_dict()["source"] == SOURCE.fingerprint()


@BY_KIND
@pytest.mark.parametrize("grid", [2.0**-20, 1.0])
def test_noise_is_the_rounded_combination(strategy, grid):
    """Against the dense K and normals made by the layout: no element is further from its real value than 1/2."""
    std, size = 3.0, 40
    found = made(stream(strategy, std, grid, size), strategy.n)
    Z = np.stack([normals(r, size) for r in range(strategy.num_rows)])
    exact = std / grid * (1 + 2.0**-30) * (strategy.noising_matrix() @ Z)
    assert np.abs(found - exact).max() <= 0.5 + 1e-12 * np.abs(exact).max()
    assert found.dtype == np.int64


@pytest.mark.parametrize("sigma", [1.0, 2.7, 40.0])
def test_counts_follow_the_closed_form(sigma):
    size = 200_000
    x = stream(std=sigma, grid=1.0, size=size).next()
    edge = math.ceil(3.2 * sigma)  # beyond, one cell on each side
    inside = np.arange(-edge, edge + 1)
    expected = np.concatenate([[ndtr(-(edge + 0.5) / sigma)], pmf(inside, sigma), [ndtr(-(edge + 0.5) / sigma)]]) * size
    counts = np.bincount(np.clip(x, -edge - 1, edge + 1) + edge + 1, minlength=2 * edge + 3)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, len(expected) - 1) > 1e-6


def test_half_the_noise_would_show():
    x = stream(std=1.5, grid=2.0**-20, size=100_000).next()
    assert x.std() * 2.0**-20 == pytest.approx(1.5, rel=5 / math.sqrt(2e5))


def test_neighbouring_coordinates_and_rows_are_unrelated():
    x = made(stream(size=20_000), 2) / (3 * 2**10)
    bound = 5 / math.sqrt(20_000)
    assert abs((x[0] * x[1]).mean()) < bound
    assert abs((x[0, 1:] * x[0, :-1]).mean()) < bound


@pytest.mark.parametrize("sigma", [1.0, 1.7, 8.0])
@pytest.mark.parametrize("change", [(1,), (3,), (2, 1), (1, 1, 1)])
def test_neighbours_keep_the_gaussian_curve(sigma, change):
    """Enumerated, over all outputs: delta(eps) of integer data plus this noise is at most that of Gaussian DP."""
    assert_curve(sigma, sigma, change)


def test_the_curve_sees_half_the_noise():
    with pytest.raises(AssertionError):
        assert_curve(1.0, 2.0, (1,))


def assert_curve(sigma, claimed, change):
    k = np.arange(-80, 81)
    p = q = np.ones(1)
    for m in change:
        p = np.multiply.outer(p, pmf(k, sigma)).reshape(-1)
        q = np.multiply.outer(q, pmf(k - m, sigma)).reshape(-1)
        keep = np.maximum(p, q) > 1e-25
        p, q = p[keep], q[keep]
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
        delta = np.maximum(p - math.exp(epsilon) * q, 0).sum()
        assert delta <= gdp_delta(math.hypot(*change) / claimed, epsilon) + 1e-15


# -- exactness -------------------------------------------------------------------------------------------------------

# Q(t) from mpmath 1.3, erfc(t / sqrt 2) / 2 at 60 digits.
TAILS = {
    "0.001": "0.499601057786088937415409677555673058731496752",
    "1": "0.158655253931457051414767454367962077522087033",
    "6": "9.8658764503769814070086413239804201866979125e-10",
    "12": "1.77648211207767899769617100184555709239266643e-33",
    "25": "3.05669670638256091640274867126154453323450358e-138",
}


@pytest.mark.parametrize("t", TAILS)
def test_digits_of_the_tail(t):
    expected = Decimal(TAILS[t])
    with discrete._digits():
        tail = discrete._tail(Decimal(t))
        assert abs(tail / expected - 1) < Decimal("1e-43")
        assert abs(discrete._quantile(2 * tail) - Decimal(t)) < Decimal("1e-40")


def test_estimates_lie_within_a_hundredth_of_their_error():
    """At every size of v, and about the places where ndtri changes formula."""
    rng = np.random.default_rng(1)
    changes = [2 * math.exp(-2) * (1 + rng.uniform(-1e-6, 1e-6, 20)), 2 * ndtr(-np.sqrt(np.arange(2, 64, 8)))]
    v = np.concatenate([np.exp(-rng.uniform(0, 41, 60)), 1 - np.exp(-rng.uniform(0, 36, 20)), *changes])
    w = (v * 2.0**63).astype(np.uint64)
    z, error = discrete._estimate(w)
    with discrete._digits():
        for j, estimate, bound in zip(w.tolist(), z.tolist(), error.tolist(), strict=True):
            middle = discrete._quantile((Decimal(j) + Decimal("0.5")) / 2**63)
            ends = [discrete._quantile((Decimal(j) + e) / 2**63) for e in (Decimal("1e-150"), Decimal(1))]
            assert abs(Decimal(estimate) - middle) < Decimal(2.0**-44) * (1 + middle) / 100
            assert all(abs(Decimal(estimate) - end) < Decimal(bound) for end in ends)


def test_the_last_bits_of_floats_do_not_count(monkeypatch):
    """Another machine's ndtri, wrong by ten times what ours is, gives the same integers; without margin it does not."""
    plain = made(stream(std=1.0, grid=2.0**-31, size=30_000), 2)
    monkeypatch.setattr(discrete, "ndtri", lambda p: ndtri(p) * (1 + 2.0**-48))
    assert np.array_equal(made(stream(std=1.0, grid=2.0**-31, size=30_000), 2), plain)
    monkeypatch.setattr(discrete, "_ERROR", 0.0)
    assert not np.array_equal(made(stream(std=1.0, grid=2.0**-31, size=30_000), 2), plain)


@BY_KIND
def test_the_slow_path_agrees_with_the_fast_one(strategy, monkeypatch):
    plain = made(stream(strategy, size=4), strategy.n)
    monkeypatch.setattr(discrete, "_ERROR", 1.0)  # leaves every element to the digits
    assert np.array_equal(made(stream(strategy, size=4), strategy.n), plain)


@pytest.mark.parametrize(("word", "t"), [(0, 9.1), (1, 9.0), (2**63, 9.1), (2**63 - 1, 0.0)])
def test_the_ends_of_the_first_63_bits_are_refined(word, t, monkeypatch):
    """Where the first word says least: v in [0, 2^-63) has t from 9.08 on, by the further bits."""

    def words(self, row, start, stop):
        pair = [word % 2**32, word >> 32]
        return np.array((pair if stop - start == 2 else [2**31] * 16), dtype=np.uint32)

    monkeypatch.setattr(NoiseSource, "words", words)
    x = stream(std=1.0, grid=2.0**-20, size=1).next()[0]
    v = (word % 2**63 + 0.5) / 2**63
    expected = -ndtri(v / 2) * (-1) ** (word >> 63)
    assert abs(x) * 2.0**-20 == pytest.approx(t, abs=0.2)
    assert x * 2.0**-20 == pytest.approx(expected, abs=1e-6)


def test_golden_values():
    """The layout is final."""
    assert stream(Tree(4, "full"), 3.0, 2.0**-20, 3).next().tolist() == [2064550, 768764, -22525]


def test_every_element_has_further_bits_of_its_own(monkeypatch):
    asked, plain = set(), NoiseSource.words

    def words(self, row, start, stop):
        if stop - start == 16:
            asked.add((self.key, row, start))
        return plain(self, row, start, stop)

    monkeypatch.setattr(NoiseSource, "words", words)
    monkeypatch.setattr(discrete, "_ERROR", 1.0)
    made(stream(Independent(2), size=3, start=5), 2)
    key = SOURCE.derive(b"discrete, further").key
    assert asked == {(key, row, 16 * element) for row in (0, 1) for element in (5, 6, 7)}


def test_sigma_covers_the_rounding_of_coefficients():
    assert stream(std=3.0, grid=2.0**-10)._sigma / 3072 - 1 == pytest.approx(2.0**-30, rel=1e-3)


# -- addresses, resume, refusals -------------------------------------------------------------------------------------


@BY_KIND
def test_ranges_and_resumption_change_nothing(strategy):
    whole = made(stream(strategy), strategy.n)
    assert np.array_equal(made(stream(strategy, size=13, start=20), strategy.n), whole[:, 20:33])
    begun = stream(strategy)
    made(begun, 3)
    resumed = stream(strategy)
    resumed.load_state_dict(begun.state_dict())
    assert resumed.t == 3
    assert np.array_equal(made(resumed, strategy.n - 3), whole[3:])


def test_chunks_change_nothing(monkeypatch):
    whole = made(stream(Tree(7, "full")), 7)
    monkeypatch.setattr(discrete, "_CHUNK", 7)
    assert np.array_equal(made(stream(Tree(7, "full")), 7), whole)


def test_many_rows_are_made_again(monkeypatch):
    whole = made(stream(Dense(np.tri(5))), 5)
    monkeypatch.setattr(discrete, "_KEPT", 1)
    assert np.array_equal(made(stream(Dense(np.tri(5))), 5), whole)


def test_the_words_are_not_those_of_other_purposes():
    own = {SOURCE.derive(b"discrete").key, SOURCE.derive(b"discrete, further").key}
    assert len(own | {SOURCE.key, SOURCE.derive(b"sampling").key, SOURCE.derive(b"order").key}) == 5


def test_steps_end():
    noise = stream(Independent(2))
    made(noise, 2)
    before = noise.state_dict()
    with pytest.raises(StepsExhaustedError):
        noise.next()
    assert noise.state_dict() == before


@pytest.mark.parametrize("change", [{"grid": 2.0**-11}, {"std": 3.1}, {"t": 8}, {"t": 1.0}, {"kind": "Independent"}])
def test_other_states_are_refused(change):
    noise = stream()
    noise.next()
    before = noise.state_dict()
    with pytest.raises(CheckpointError):
        noise.load_state_dict({**before, **change})
    assert noise.state_dict() == before


@pytest.mark.parametrize("strategy", RECURRENCES, ids=repr)
def test_recurrences_are_refused(strategy):
    with pytest.raises(PlanError, match="recurrence in floating point"):
        stream(strategy)


@pytest.mark.parametrize(("std", "grid"), [(1.0, 2.0), (1.0, 2.0**-33)])
def test_grids_beyond_the_sampler_are_refused(std, grid):
    with pytest.raises(ArgumentError, match="std / grid"):
        stream(std=std, grid=grid)


def test_pi():
    with localcontext() as context:
        context.prec = 60
        pi = discrete._root_two_pi() ** 2 / 2
    assert str(pi).startswith("3.14159265358979323846264338327950288419716939937510")


@pytest.mark.parametrize(("factor", "n", "fits"), [(1.7, 20, True), (1.7, 40, False), (1.9, 30, False)])
def test_a_matrix_whose_inverse_is_no_inverse_is_refused(factor, n, fits):
    """Of K C - I, 2^-31 is covered; the ones here are 1.1e-12, 7.1e-8 and 5.1e-9."""
    strategy = Dense(np.eye(n) - factor * np.eye(n, k=-1))
    if fits:
        stream(strategy)
    else:
        with pytest.raises(PlanError, match=r"K C = I to 2\^-31"):
            stream(strategy)


def test_few_elements_take_the_slow_path(monkeypatch):
    """The nearest integer is known but for the few that lie within the error of a half."""
    slow, exact = [], GridStream._exact
    monkeypatch.setattr(GridStream, "_exact", lambda self, *given: slow.append(given) or exact(self, *given))
    made(stream(Tree(8, "full"), size=2000), 8)
    assert len(slow) <= 2
