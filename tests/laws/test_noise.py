"""Laws of the noise of every strategy: its covariance is the claimed one, and it resumes and shards bit for bit."""

import itertools

import numpy as np

from anyorder.noise import NoiseSource, NoiseStream
from anyorder.noise.stream import first_new_row
from laws.cases import STRATEGIES, over
from noise.whitening import assert_white

SOURCE = NoiseSource(bytes(range(32)))

every_strategy = over("name", STRATEGIES)


@every_strategy
def test_covariance_is_what_was_accounted_for(name):
    """Over half a million draws. Half the noise, a row used twice, a term left out: each rejects."""
    assert_white(STRATEGIES[name](17))


@every_strategy
def test_saved_and_resumed_noise_is_the_same_bits(name):
    """By the kernel and by NumPy in turn, with memory for rows of Z or without: a saved state holds none."""
    strategy, sources = STRATEGIES[name](13), (SOURCE, NoiseSource(SOURCE.key, kernel="reference"))
    whole = NoiseStream(strategy, SOURCE, 1.5, 37)
    expected = [whole.next() for _ in range(13)]
    for first in (0, 1):
        stream = NoiseStream(strategy, SOURCE, 1.5, 37, memory="1MB")
        for t in range(13):
            saved = stream.state_dict()
            assert len(saved["state"]) <= max(strategy.state_rows, 1)
            memory = "1MB" if t % 3 else None
            stream = NoiseStream(strategy, sources[(first + t // 2) % 2], 1.5, 37, memory=memory)
            stream.load_state_dict(saved)
            np.testing.assert_array_equal(stream.next(), expected[t])


def test_shards_join_to_the_whole():
    for name in STRATEGIES:
        strategy = STRATEGIES[name](9)
        whole = NoiseStream(strategy, SOURCE, 1.0, 50)
        shards = [NoiseStream(strategy, SOURCE, 1.0, b - a, start=a) for a, b in ((0, 7), (7, 40), (40, 50))]
        for _ in range(9):
            np.testing.assert_array_equal(np.concatenate([shard.next() for shard in shards]), whole.next(), name)


def test_fresh_rows_have_nothing_to_do_with_the_steps_before():
    """Nor their rows with later steps: two runs that share a beginning are then two mechanisms."""
    for name, n in itertools.product(STRATEGIES, (1, 8, 13)):
        strategy = STRATEGIES[name](n)
        K, C = strategy.noising_matrix(), strategy.matrix()
        places = [first_new_row(strategy, t) for t in range(n)]
        assert places[0] == 0
        for t, r in enumerate(places):
            if r is None:
                assert "full" in name
                continue
            assert not K[:t, r:].any(), (name, n, t)
            assert not C[:r, t:].any(), (name, n, t)
        if "full" not in name:
            assert None not in places


@every_strategy
def test_renewed_rows_change_the_steps_from_there_on_and_no_others(name):
    """The same bits before; after, the dense product with the new rows; saved and resumed in between."""
    strategy = STRATEGIES[name](13)
    starts = [t for t in (5, 7, 9) if first_new_row(strategy, t) is not None]
    for t in starts:
        row = first_new_row(strategy, t)
        renewed = SOURCE.renewed(row, b"n" * 16)
        Z = np.stack([(SOURCE if r < row else renewed.of(r)).normal(r, 0, 37) for r in range(strategy.num_rows)])
        assert not (renewed.normal(row, 0, 37) == SOURCE.normal(row, 0, 37)).any()
        expected = 1.5 * strategy.noising_matrix() @ Z.astype(np.float64)
        plain, stream = (NoiseStream(strategy, source, 1.5, 37) for source in (SOURCE, renewed))
        reference = NoiseStream(strategy, NoiseSource(SOURCE.key, kernel="reference").renewed(row, b"n" * 16), 1.5, 37)
        for s in range(13):
            if s == t:  # as on a resume: the state comes from a stream that knew nothing of the renewal
                stream.load_state_dict(plain.state_dict())
            made = stream.next()
            np.testing.assert_allclose(made, expected[s], rtol=0, atol=1e-4)
            np.testing.assert_array_equal(made, reference.next())
            if s < t:
                np.testing.assert_array_equal(made, plain.next())
