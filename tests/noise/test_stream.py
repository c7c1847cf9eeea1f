"""NoiseStream: std * K Z, whitened, sharded, resumed; and the whitening test sees noise that is not."""

import copy
import itertools
import pickle

import numpy as np
import pytest

from anyorder.errors import ArgumentError, CheckpointError, StepsExhaustedError, TrainingError
from anyorder.noise import NoiseSource, NoiseStream, compiled
from anyorder.noise.compiled import Targets
from anyorder.strategy import BLT, Banded, Independent, ToeplitzBanded
from anyorder.strategy.base import Combination, Strategy, Terms
from noise.steps import steps
from noise.whitening import KEY, assert_white

SOURCE = NoiseSource(KEY)


class Difference(Combination):
    """C = the prefix sum, K = its inverse: row t less row t - 1."""

    def __init__(self, n):
        self._n = n

    n = property(lambda self: self._n)

    def matrix(self):
        return np.tri(self._n)

    def terms(self, t):
        return Terms(np.array([t, t - 1][: t + 1]), np.array([1.0, -1.0][: t + 1]))

    def to_dict(self):
        return {"kind": "difference", "n": self._n}


class Recurrence(Strategy):
    """y_t = z_t - y_{t-1} / 2, with the last output as the state."""

    def __init__(self, n):
        self._n = n

    n = property(lambda self: self._n)
    state_rows = 1

    def matrix(self):
        return np.eye(self._n) + 0.5 * np.eye(self._n, k=-1)

    def noising_matrix(self):
        return np.linalg.inv(self.matrix())

    def init(self, size):
        return (np.zeros(size, np.float32),)

    def step(self, t, state, row):
        noise = row(t) - np.float32(0.5) * state[0]
        return noise.copy(), (noise,)

    def to_dict(self):
        return {"kind": "recurrence", "n": self._n}


STRATEGIES = [Independent, Difference, Recurrence]


@pytest.mark.parametrize("make", STRATEGIES)
def test_noise_is_white(make):
    assert_white(make(16))


@pytest.mark.parametrize("make", STRATEGIES)
def test_stream_is_the_dense_product(make):
    strategy, size, start = make(7), 100, 1000
    stream = NoiseStream(strategy, SOURCE, 2.5, size, start=start)
    Z = np.stack([SOURCE.normal(r, start, start + size) for r in range(7)]).astype(np.float64)
    made = np.stack([stream.next() for _ in range(7)])
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, 2.5 * strategy.noising_matrix() @ Z, rtol=0, atol=3e-6)


@pytest.mark.parametrize("make", STRATEGIES)
def test_shards_make_what_one_rank_makes(make):
    whole = NoiseStream(make(5), SOURCE, 0.3, 1000)
    cuts = [0, 0, 1, 333, 334, 1000]
    shards = [NoiseStream(make(5), SOURCE, 0.3, b - a, start=a) for a, b in itertools.pairwise(cuts)]
    for _ in range(5):
        assert np.concatenate([shard.next() for shard in shards]).tobytes() == whole.next().tobytes()


def test_std_is_never_rounded_down():
    for std in (0.1, 0.7, 1.0, 1 / 3, 1e-30, 1e30):
        made = NoiseStream(Independent(1), SOURCE, std, 1000).next()
        factor = float(np.median(made.astype(np.float64) / SOURCE.normal(0, 0, 1000)))
        assert std * (1 - 1e-9) <= factor <= std * (1 + 1.2e-7)


def test_steps_end():
    stream = NoiseStream(Independent(2), SOURCE, 1.0, 10)
    assert stream.t == 0
    stream.next(), stream.next()
    for _ in range(2):
        with pytest.raises(StepsExhaustedError, match="2 steps"):
            stream.next()
        assert stream.t == 2


def test_a_step_that_fails_changes_nothing(monkeypatch):
    plain = NoiseSource(KEY, kernel="reference")
    stream, other = (NoiseStream(Recurrence(4), plain, 1.0, 10) for _ in range(2))
    stream.next(), other.next()
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "normal", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stream.next()
    assert stream.t == 1
    assert stream.next().tobytes() == other.next().tobytes()


def test_a_step_that_fails_in_its_last_piece_changes_nothing(monkeypatch):
    """By NumPy coordinates are made in pieces, of which the first have been made by then."""
    plain, normal = NoiseSource(KEY, kernel="reference"), NoiseSource.normal
    size = compiled._PIECE + 10
    stream, other = (NoiseStream(BLT([0.9, 0.5], [0.1, 0.2], 4), plain, 1.0, size) for _ in range(2))
    assert stream.next().tobytes() == other.next().tobytes()

    def fails_late(self, row, start, stop):
        return 1 / 0 if start >= compiled._PIECE else normal(self, row, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "normal", fails_late)
        with pytest.raises(ZeroDivisionError):
            stream.next()
    assert all(
        np.array_equal(a, b) for a, b in zip(stream.state_dict()["state"], other.state_dict()["state"], strict=True)
    )
    assert stream.next().tobytes() == other.next().tobytes()


@pytest.mark.parametrize("make", STRATEGIES)
def test_resume_is_bit_exact(make):
    stream = NoiseStream(make(6), SOURCE, 0.9, 50, start=3)
    for _ in range(3):
        stream.next()
    saved = pickle.loads(pickle.dumps(stream.state_dict()))
    rest = [stream.next().tobytes() for _ in range(3)]
    resumed = NoiseStream(make(6), NoiseSource(KEY), 0.9, 50, start=3)
    resumed.load_state_dict(saved)
    assert resumed.t == 3
    assert [resumed.next().tobytes() for _ in range(3)] == rest
    stream.load_state_dict(resumed.state_dict())  # after the last step too
    assert stream.t == 6
    with pytest.raises(StepsExhaustedError, match="6 steps"):
        stream.next()


BANDS = np.linspace(1, 0.1, 17).astype(np.float32).astype(float)
MOVING = np.outer(BANDS, np.linspace(1, 2, 31)) * (np.add.outer(np.arange(17), np.arange(31)) < 31)


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("memory", [None, 16 * 1024, 18 * 1024, "1MB"])
@pytest.mark.parametrize("strategy", [ToeplitzBanded(BANDS, 31), Banded(MOVING)], ids=str)
def test_steps_that_are_made_at_once_are_those_of_one_by_one(strategy, memory, renewed):
    """Wherever a run is cut, or its key renewed in the middle of such steps: the same noise, and the same state."""
    source = SOURCE.renewed(23, b"n" * 16) if renewed else SOURCE
    expected, state = steps(strategy, source, 200, start=7)
    stream = NoiseStream(strategy, source, 1.5, 200, start=7, memory=memory)
    for t, noise in enumerate(expected):
        if t in (18, 21, 30):
            saved = stream.state_dict()
            stream = NoiseStream(strategy, source, 1.5, 200, start=7, memory=memory)
            stream.load_state_dict(saved)
        into = np.ones(200, np.float32)
        stream.add_to([into])
        assert into.tobytes() == (1 + noise).tobytes(), t
    saved = stream.state_dict()["state"]
    assert [array.tobytes() for array in saved] == [array.tobytes() for array in state]


def test_saved_state_is_a_copy_and_holds_no_key():
    stream, twin = (NoiseStream(Recurrence(6), SOURCE, 0.9, 50) for _ in range(2))
    stream.next(), twin.next()
    saved = stream.state_dict()
    assert KEY not in pickle.dumps(saved)
    saved["state"][0][:] = 0
    assert stream.next().tobytes() == twin.next().tobytes()
    saved = twin.state_dict()
    stream.load_state_dict(saved)
    saved["state"][0][:] = 0
    assert stream.next().tobytes() == twin.next().tobytes()


def _saved():
    stream = NoiseStream(Recurrence(6), SOURCE, 0.9, 50)
    stream.next()
    return stream.state_dict()


@pytest.mark.parametrize(
    "other",
    [
        NoiseStream(Recurrence(7), SOURCE, 0.9, 50),
        NoiseStream(Independent(6), SOURCE, 0.9, 50),
        NoiseStream(Recurrence(6), SOURCE, 0.9, 51),
        NoiseStream(Recurrence(6), SOURCE, 0.9, 50, start=1),
        NoiseStream(Recurrence(6), SOURCE, 0.8, 50),
        NoiseStream(Recurrence(6), SOURCE.derive(b"other"), 0.9, 50),
    ],
    ids=["n", "kind", "size", "start", "std", "source"],
)
def test_state_of_another_stream_is_refused(other, request):
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match=request.node.callspec.id):
        other.load_state_dict(_saved())
    np.testing.assert_equal(other.state_dict(), before)


@pytest.mark.parametrize(
    "change",
    [
        {"t": -1},
        {"t": 7},
        {"t": 1.0},
        {"t": True},
        {"t": None},
        {"state": None},
        {"state": [np.zeros(50)]},
        {"state": [np.zeros(49, np.float32)]},
        {"state": [[0.0] * 50]},
        {"size": None},
    ],
)
def test_malformed_state_is_refused(change):
    stream = NoiseStream(Recurrence(6), SOURCE, 0.9, 50)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        stream.load_state_dict(_saved() | change)
    assert stream.t == 0
    with pytest.raises(CheckpointError):
        stream.load_state_dict({})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"std": 0.0}, "std"),
        ({"std": -1.0}, "std"),
        ({"std": float("nan")}, "std"),
        ({"std": 1e39}, "std"),
        ({"size": -1}, "size"),
        ({"size": 1.5}, "size"),
        ({"start": -1}, "start"),
    ],
)
def test_bad_arguments(change, name):
    arguments = {"std": 1.0, "size": 10, "start": 0} | change
    with pytest.raises(ArgumentError, match=f"{name} must be"):
        NoiseStream(Independent(3), SOURCE, **arguments)


class _Broken(NoiseSource):
    """A source whose `normal` is passed through a function (row, start, stop, true normal)."""

    def __init__(self, fault):
        super().__init__(KEY, kernel="reference")
        self._fault = fault

    def normal(self, row, start, stop):
        return self._fault(row, start, stop, super().normal)


HALVED = np.float32(0.5)
FAULTS = {
    "row ignored": lambda row, start, stop, normal: normal(0, start, stop),
    "rows used twice": lambda row, start, stop, normal: normal(row // 2, start, stop),
    "variance halved": lambda row, start, stop, normal: normal(row, start, stop) * np.sqrt(HALVED),
    "two percent less": lambda row, start, stop, normal: normal(row, start, stop) * np.float32(0.98),
    "one row of zeros": lambda row, start, stop, normal: normal(row, start, stop) * np.float32(row != 5),
    "half the coordinates reused": lambda row, start, stop, normal: np.tile(normal(row, start, (start + stop) // 2), 2),
    "each coordinate twice": lambda row, start, stop, normal: np.repeat(normal(row, start, (start + stop) // 2), 2),
    "half the coordinates silent": lambda row, start, stop, normal: (
        normal(row, start, stop) * (np.arange(start, stop) % 2 * np.sqrt(2)).astype(np.float32)
    ),
    "a bias": lambda row, start, stop, normal: normal(row, start, stop) + np.float32(0.05),
    "uniform": lambda row, start, stop, normal: np.sign(normal(row, start, stop)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whitening_sees(fault):
    for make in STRATEGIES:
        with pytest.raises((AssertionError, np.linalg.LinAlgError)):
            assert_white(make(16), size=16_384, source=_Broken(FAULTS[fault]))


def test_whitening_sees_a_wrong_combination():
    class Wrong(Difference):
        def step(self, t, state, row):
            return row(t) - np.float32(0.97) * row(max(t - 1, 0)) * (t > 0), state

    with pytest.raises(AssertionError):
        assert_white(Wrong(16))


def test_a_stream_is_for_one_thread_at_a_time(monkeypatch):
    stream, segments = NoiseStream(Independent(3), SOURCE, 1.0, 4), Targets.segments

    def meanwhile(*args):
        with pytest.raises(TrainingError, match="another thread"):
            stream.next()
        return segments(*args)

    monkeypatch.setattr(Targets, "segments", meanwhile)
    stream.add_to([np.zeros(4, np.float32)])
    assert stream.t == 1


def test_a_step_whose_noise_was_lost_half_way_is_the_last(monkeypatch):
    stream = NoiseStream(Independent(3), SOURCE, 1.0, 4)
    monkeypatch.setattr(Targets, "take_back", _interrupt)
    monkeypatch.setattr(Targets, "add", _interrupt)
    with pytest.raises(MemoryError):
        stream.add_to([np.zeros((2, 4), np.float32)[:, ::2]])
    with pytest.raises(TrainingError, match="half way"):
        stream.next()


def _interrupt(*_):
    raise MemoryError


def test_coordinates_beyond_the_layout_are_refused():
    with pytest.raises(ArgumentError, match="start"):
        NoiseStream(Independent(1), SOURCE, 1.0, 100, start=2**62 - 100)


def test_a_stream_of_no_coordinates_counts_its_steps() -> None:
    empty, other = (NoiseStream(Independent(3), NoiseSource(bytes(32)), 1.0, size) for size in (0, 1))
    for _ in range(3):
        empty.skip()
    assert empty.t == 3
    with pytest.raises(StepsExhaustedError):
        empty.skip()
    with pytest.raises(ArgumentError, match="size 0"):
        other.skip()
