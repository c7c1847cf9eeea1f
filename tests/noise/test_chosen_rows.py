"""Rows and elements of the noise that are chosen are those of the whole, bit for bit."""

import numpy as np
import pytest

from anyorder.errors import ArgumentError
from anyorder.noise import NoiseStream, compiled
from anyorder.strategy import BLT, BandedInverse, Independent, ToeplitzBanded, Tree
from laws.cases import STRATEGIES
from noise.test_fused import PLAIN, SOURCE, N, _reference

pytestmark = pytest.mark.skipif(compiled.kernel() is None, reason="the compiled kernel is not there")


STATELESS = [name for name, make in STRATEGIES.items() if make(N).state_rows == 0]


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("source", [SOURCE, PLAIN], ids=["kernel", "reference"])
def test_chosen_rows_and_elements_are_those_of_the_whole(name, source):
    strategy, size, width, offset = STRATEGIES[name](N), 4001, 37, 19
    whole = _reference(strategy, size, 3)
    stream = NoiseStream(strategy, source, 1.5, size, start=3)
    table = (size - offset) // width
    for t in (0, 5, 12):
        chosen = [0, 7, 3, table - 1, 7]
        made = stream.rows(t, chosen, width, offset=offset)
        expected = whole[t][offset : offset + table * width].reshape(table, width)[chosen]
        assert made.tobytes() == expected.tobytes()
        single = np.array([0, 4000, 15, 16, 17, 1000])
        assert stream.elements(t, single).tobytes() == whole[t][single].tobytes()
    assert stream.rows(0, [], 5).shape == (0, 5)
    assert stream.t == 0


def test_chosen_rows_of_many():
    """More than a tile and a chunk of them."""
    stream = NoiseStream(BandedInverse([1.0, -0.5, -0.2], 9), SOURCE, 1.0, 100_000)
    whole = _reference(BandedInverse([1.0, -0.5, -0.2], 9), 100_000, std=1.0)[8]
    rows = np.arange(0, 10_000, 3)
    assert stream.rows(8, rows, 10).tobytes() == whole.reshape(-1, 10)[rows].tobytes()
    big = stream.rows(8, [1, 0], 50_000)
    assert big.tobytes() == whole.reshape(2, -1)[::-1].tobytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.rows(0, [4], 25), "rows must lie in 0 .. 3, got 4 .. 4"),
        (lambda s: s.rows(0, [-1], 25), "got -1"),
        (lambda s: s.rows(0, [3], 25, offset=1), "0 .. 2"),
        (lambda s: s.elements(0, [100]), "0 .. 99"),
        (lambda s: s.elements(0, [0.5]), "integers"),
        (lambda s: s.rows(3, [0], 25), "t must be"),
        (lambda s: s.rows(0, [0], 0), "width must be"),
    ],
)
def test_chosen_rows_outside_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(NoiseStream(Independent(3), SOURCE, 1.0, 100))


def test_chosen_rows_of_a_recurrence_are_refused():
    for strategy in (BLT([0.9], [0.1], 4), Tree(4, "online"), ToeplitzBanded([1, 0.5], 4)):
        with pytest.raises(ArgumentError, match="without a state"):
            NoiseStream(strategy, SOURCE, 1.0, 10).rows(0, [0], 2)
