"""Laws of the noise of every strategy: its covariance is the claimed one, and it resumes and shards bit for bit."""

import numpy as np
import pytest

from anyorder.noise import NoiseSource, NoiseStream
from laws.cases import STRATEGIES
from noise.whitening import assert_white

SOURCE = NoiseSource(bytes(range(32)))

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@every_strategy
def test_covariance_is_what_was_accounted_for(name):
    """Over 10^6 draws. Half the noise, a row used twice, a term left out: each rejects."""
    assert_white(STRATEGIES[name](17))


@every_strategy
def test_saved_and_resumed_noise_is_the_same_bits(name):
    strategy = STRATEGIES[name](13)
    whole = NoiseStream(strategy, SOURCE, 1.5, 37)
    expected = [whole.next() for _ in range(13)]
    stream = NoiseStream(strategy, SOURCE, 1.5, 37)
    for t in range(13):
        saved, stream = stream.state_dict(), NoiseStream(strategy, SOURCE, 1.5, 37)
        stream.load_state_dict(saved)
        np.testing.assert_array_equal(stream.next(), expected[t])


@every_strategy
def test_shards_join_to_the_whole(name):
    strategy = STRATEGIES[name](9)
    whole = NoiseStream(strategy, SOURCE, 1.0, 50)
    shards = [NoiseStream(strategy, SOURCE, 1.0, b - a, start=a) for a, b in ((0, 7), (7, 40), (40, 50))]
    for _ in range(9):
        np.testing.assert_array_equal(np.concatenate([shard.next() for shard in shards]), whole.next())
