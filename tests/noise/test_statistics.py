"""The distribution of the noise, with fixed keys: every statistic within 4.5 of its standard deviations."""

import numpy as np
import pytest
from scipy import stats

from anyorder.noise import NoiseSource

N = 1 << 22
ROWS = 3
LIMIT = 4.5


@pytest.fixture(scope="module")
def samples():
    """(ROWS, N) normals. Of the least rounds: with more, keystreams are published and the transform is the same."""
    source = NoiseSource(b"a fixed key, 32 bytes, for tests")
    return np.stack([source.normal(row, 0, N) for row in range(ROWS)])


def _scores(made, expected, variance, count):
    return (made - expected) * np.sqrt(count / variance)


def test_moments(samples):
    z = samples.astype(np.float64).ravel()
    square = z * z
    moments = [np.mean(power) for power in (z, square, z * square, square * square)]
    scores = _scores(np.array(moments), np.array([0, 1, 0, 3]), np.array([1, 2, 15, 96]), z.size)
    assert np.abs(scores).max() < LIMIT


def test_moments_at_every_place_in_a_block(samples):
    z = samples.astype(np.float64).reshape(-1, 16)
    assert np.abs(_scores(z.mean(axis=0), 0, 1, len(z))).max() < LIMIT
    assert np.abs(_scores(np.square(z).mean(axis=0), 1, 2, len(z))).max() < LIMIT


def test_chi_square_over_a_thousand_bins(samples):
    edges = stats.norm.ppf(np.arange(1, 1024) / 1024)
    for row in samples:
        counts = np.bincount(np.searchsorted(edges, row), minlength=1024)
        assert 1e-5 < stats.chisquare(counts).pvalue < 1 - 1e-5


def test_tails(samples):
    for bound in (2, 3, 4, 4.5, 5):
        for sign in (-1, 1):
            count, expected = (sign * samples > bound).sum(), samples.size * stats.norm.sf(bound)
            assert abs(count - expected) < LIMIT * np.sqrt(expected) + 1


def test_neighbours_are_uncorrelated(samples):
    """Lag 8 is the other half of the same pair; squares would show a radius or an angle that is used twice."""
    for z in (samples[0].astype(np.float64), np.square(samples[0].astype(np.float64)) - 1):
        z /= z.std()
        scores = [np.dot(z[:-lag], z[lag:]) / np.sqrt(N - lag) for lag in [*range(1, 34), 4096, 16 * 4096, N // 2]]
        assert np.abs(scores).max() < LIMIT


def test_pairs_of_places_in_a_block_are_uncorrelated(samples):
    z = samples.astype(np.float64).reshape(-1, 16)
    for x in (z, np.square(z) - 1):
        x = x / x.std(axis=0)
        scores = (x.T @ x)[np.triu_indices(16, 1)] / np.sqrt(len(x))
        assert np.abs(scores).max() < LIMIT


def test_rows_keys_and_rounds_are_uncorrelated(samples):
    key = bytes(range(32))
    flipped = bytes([1]) + key[1:]
    others = [NoiseSource(key), NoiseSource(flipped), NoiseSource(key, 12), NoiseSource(key).derive(b"a")]
    rows = np.stack([*samples, *(source.normal(1, 0, N) for source in others)]).astype(np.float64)
    scores = (rows @ rows.T)[np.triu_indices(len(rows), 1)] / np.sqrt(N)
    assert np.abs(scores).max() < LIMIT


def test_raw_words_are_uniform():
    words = NoiseSource(bytes(32)).words(0, 0, N)
    assert stats.chisquare(np.bincount(words >> 20, minlength=4096)).pvalue > 1e-5
    assert stats.chisquare(np.bincount(words & 4095, minlength=4096)).pvalue > 1e-5
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 32).mean(axis=0)
    assert np.abs(_scores(bits, 0.5, 0.25, N)).max() < LIMIT
