"""Fused steps: for every strategy what `Strategy.step` gives, bit for bit, however it is added, kept or chosen from."""

import tracemalloc

import numpy as np
import pytest
import torch

from anyorder.errors import ArgumentError, StepsExhaustedError, TrainingError
from anyorder.noise import NoiseSource, NoiseStream, compiled
from anyorder.noise import stream as stream_module
from anyorder.strategy import BLT, BandedInverse, Dense, Independent, Tree
from anyorder.workload import prefix_sum
from laws.cases import STRATEGIES
from noise.made_up import MadeUp
from noise.steps import steps

pytestmark = pytest.mark.skipif(compiled.kernel() is None, reason="the compiled kernel is not there")

KEY = bytes(range(32))
SOURCE = NoiseSource(KEY)
PLAIN = NoiseSource(KEY, kernel="reference")
N = 13


def _reference(strategy, size, start=0, std=1.5):
    return steps(strategy, PLAIN, size, start, std)[0]


def test_fused_steps_are_the_strategys_own():
    """Odd ends, several tiles and chunks; with and without memory for rows."""
    for name in STRATEGIES:
        strategy = STRATEGIES[name](N)
        for start, size in ((5, 2083), (2**36 - 40, 100)):
            expected = _reference(strategy, size, start)
            for memory in (None, "1GB", 4 * 2304 * (strategy.state_rows + 2)):
                stream = NoiseStream(strategy, SOURCE, 1.5, size, start=start, memory=memory)
                for t in range(N):
                    assert stream.next().tobytes() == expected[t].tobytes(), (name, t, memory)


def test_any_number_of_threads(monkeypatch):
    for name in STRATEGIES:
        strategy, size = STRATEGIES[name](3), 150_000
        expected = [NoiseStream(strategy, SOURCE, 0.5, size) for _ in range(2)]
        monkeypatch.setattr(compiled, "_threads", lambda: 4)
        parallel = NoiseStream(strategy, SOURCE, 0.5, size)
        for _ in range(3):
            monkeypatch.setattr(compiled, "_threads", lambda: 1)
            one = expected[0].next()
            monkeypatch.setattr(compiled, "_threads", lambda: 4)
            assert parallel.next().tobytes() == one.tobytes()
            monkeypatch.setattr(compiled, "parallel", lambda: None)  # threads of its own in place of torch's
            assert expected[1].next().tobytes() == one.tobytes()
            monkeypatch.undo()


def _tensors():
    """Every type and awkward layout; 1033 elements in all."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(17, 3), (0,), (1,), (300,), (7, 11), (2, 3, 4, 5), (90,), (14,)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[3] = made[3].bfloat16()
    made[4] = made[4].half().T.contiguous().T  # column by column
    made[5] = made[5].to(memory_format=torch.channels_last)
    made[6] = made[6].double()
    made[7] = torch.randn(28, generator=generator).bfloat16()[::2]
    made.append(torch.randn(380, generator=generator).double()[:: -1 if False else 1])
    made[-1] = made[-1].numpy().astype(np.float16)[::-1]
    made.append(torch.randn((5, 3), generator=generator).double().numpy())
    return made


def _numbers(x):
    return (x.double().numpy() if isinstance(x, torch.Tensor) else x.astype(np.float64)).copy()


@pytest.mark.parametrize("path", [*compiled.PATHS, "reference"])
@pytest.mark.parametrize("scale", [1.0, 1 / 7])
def test_added_to_many_tensors_of_any_type(path, scale):
    try:
        source = NoiseSource(KEY, kernel=path)
    except ArgumentError as error:
        pytest.skip(str(error))
    tensors = _tensors()
    size = sum(_numbers(x).size for x in tensors)
    strategy = BLT([0.9, 0.4], [0.2, 0.1], 3)
    stream = NoiseStream(strategy, source, 1.5, size, start=9)
    for noise in _reference(strategy, size, 9):
        before = [x.clone() if isinstance(x, torch.Tensor) else x.copy() for x in tensors]
        stream.add_to(tensors, scale)
        at = 0
        for old, new in zip(before, tensors, strict=True):
            z = noise[at : at + _numbers(old).size].reshape(tuple(old.shape))
            at += z.size
            if isinstance(old, torch.Tensor):
                wide = old.double() if old.dtype == torch.float64 else old.float()
                factor = scale if wide.dtype == torch.float64 else np.float32(scale)
                expected = (wide + torch.from_numpy(z)) * factor
                expected = expected.to(old.dtype)
                assert torch.equal(expected, new), (old.dtype, path)
            else:
                double = old.dtype == np.float64
                wide = (old + z) * scale if double else (old.astype(np.float32) + z) * np.float32(scale)
                np.testing.assert_array_equal(wide.astype(old.dtype), new)


@pytest.mark.parametrize("path", compiled.PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_as_torch_does(path, dtype):
    """Every bit pattern, infinities and subnormal numbers among them, plus noise that leaves some as they are."""
    try:
        source = NoiseSource(KEY, kernel=path)
    except ArgumentError as error:
        pytest.skip(str(error))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for std in (1e-30, 1e-7, 1e-3, 1.0, 3e4):
        made = every.clone()
        NoiseStream(Independent(1), source, std, 2**16).add_to([made])
        noise = torch.from_numpy(NoiseStream(Independent(1), PLAIN, std, 2**16).next())
        expected = (every.float() + noise).to(dtype)
        same = (made == expected) | (made.isnan() & expected.isnan())
        assert same.all()
        assert (made.view(torch.int16) == expected.view(torch.int16))[~made.isnan()].all()


def test_tensors_that_do_not_fit_change_nothing():
    stream = NoiseStream(BLT([0.9], [0.2], 3), SOURCE, 1.0, 10)
    good = torch.zeros(10)
    frozen = np.zeros(10, np.float32)
    frozen.flags.writeable = False
    cases = [
        ([torch.zeros(9)], "10 coordinates, got 9"),
        ([torch.zeros(1).expand(10)], "share memory"),
        ([torch.zeros(10, dtype=torch.int32)], "float32, float64, float16 or bfloat16, got torch.int32"),
        ([np.zeros(10, np.uint32)], "got uint32"),
        ([frozen], "writeable"),
        ([[0.0] * 10], "torch tensors or NumPy arrays, got list"),
    ]
    for tensors, message in cases:
        with pytest.raises(ArgumentError, match=message):
            stream.add_to(tensors)
    with pytest.raises(ArgumentError, match="scale"):
        stream.add_to([good], float("nan"))
    assert stream.t == 0
    assert not good.any()
    stream.add_to([good])
    assert good.numpy().tobytes() == NoiseStream(BLT([0.9], [0.2], 3), PLAIN, 1.0, 10).next().tobytes()


def test_a_step_broken_off_is_not_gone_on_from(monkeypatch):
    stream = NoiseStream(BLT([0.9], [0.2], 5), SOURCE, 1.0, 100)
    stream.next()
    saved = stream.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(compiled.Kernel, "run", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.next()
    for use in (stream.next, stream.state_dict, lambda: stream.add_to([torch.zeros(100)])):
        with pytest.raises(TrainingError, match="broken off half way"):
            use()
    stream.load_state_dict(saved)
    expected = _reference(BLT([0.9], [0.2], 5), 100, std=1.0)
    assert stream.next().tobytes() == expected[1].tobytes()


def test_no_memory_for_tiles_leaves_the_stream_as_it_was(monkeypatch):
    stream = NoiseStream(BLT([0.9], [0.2], 5), SOURCE, 1.0, 100)
    with monkeypatch.context() as patch:
        patch.setattr(compiled.Kernel, "run", lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            stream.next()
    assert stream.next().tobytes() == _reference(BLT([0.9], [0.2], 5), 100, std=1.0)[0].tobytes()


@pytest.mark.parametrize("name", ["blt", "toeplitz banded", "tree online", "tree", "low rank"])
def test_the_state_moves_to_where_the_gradients_are(name, monkeypatch):
    """The CPU stands in for another device: its own class makes the steps there."""

    class Elsewhere(stream_module.Targets):
        def __init__(self, tensors, size):
            super().__init__(tensors, size)
            self.on_cpu = False

    strategy, size = STRATEGIES[name](N), 77
    expected = _reference(strategy, size, 5)
    stream = NoiseStream(strategy, SOURCE, 1.5, size, start=5)
    assert stream.next().tobytes() == expected[0].tobytes()
    monkeypatch.setattr(stream_module, "Targets", Elsewhere)
    for t in range(1, 6):
        gradients = [torch.zeros(70), torch.zeros(7)]
        stream.add_to(gradients, 0.5)
        assert torch.equal(torch.cat(gradients), torch.from_numpy(expected[t]) * 0.5)
    np.testing.assert_array_equal(stream.next(), expected[6])
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="on one device"):
        stream.add_to([np.zeros(77, np.float32)])
    saved = stream.state_dict()
    resumed = NoiseStream(strategy, SOURCE, 1.5, size, start=5)
    for either in (resumed, stream):
        either.load_state_dict(saved)
        for t in range(7, N):
            assert either.next().tobytes() == expected[t].tobytes()


@pytest.mark.parametrize(
    ("memory", "arrays"), [(None, 0), (0, 0), ("8KB", 1), (4 * 2048, 2), ("20KiB", 5), ("1GB", 9), ("16384 B", 4)]
)
def test_memory_holds_rows_of_z_and_no_more(memory, arrays):
    strategy = BandedInverse.from_square_root(prefix_sum(40), 8)
    stream = NoiseStream(strategy, SOURCE, 1.5, 1024, memory=memory)
    for expected in _reference(strategy, 1024):
        assert stream.next().tobytes() == expected.tobytes()
        assert len(stream._state.rows) + len(stream._state.free) <= arrays
        assert memory != "1GB" or len(stream._state.rows) == min(stream.t, 7, 39 if stream.t < 40 else 0)
    if arrays in (4, 5):
        assert len(stream._state.rows) + len(stream._state.free) == arrays


@pytest.mark.parametrize("memory", ["4 gallons", "GB", "-1GB", -1, 1.5, "nanGB"])
def test_memory_that_cannot_be_read(memory):
    with pytest.raises(ArgumentError, match="memory"):
        NoiseStream(Independent(3), SOURCE, 1.0, 10, memory=memory)


def test_memory_below_the_state_is_refused():
    with pytest.raises(ArgumentError, match="2 vectors of 1024 float32, 8192 bytes"):
        NoiseStream(BLT([0.9, 0.4], [0.2, 0.1], 3), SOURCE, 1.0, 1024, memory="8KB")
    NoiseStream(BLT([0.9, 0.4], [0.2, 0.1], 3), SOURCE, 1.0, 1024, memory=8192).next()


@pytest.mark.parametrize(
    "strategy",
    [Tree(64), BandedInverse.from_square_root(prefix_sum(64), 32), Dense(np.tri(9)), Independent(9)],
    ids=["tree", "banded inverse", "dense", "independent"],
)
def test_nothing_of_the_size_of_the_gradient_is_made(strategy):
    size = 1 << 20
    gradient = torch.zeros(size)
    stream = NoiseStream(strategy, SOURCE, 1.0, size)
    stream.add_to([gradient])
    tracemalloc.start()
    for _ in range(7):
        stream.add_to([gradient], 0.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size // 4  # a sixteenth of the gradient
    assert not stream._state.arrays


def test_state_is_written_in_place():
    """After the first steps no array is allocated: the state holds at most what the strategy says."""
    for name in STRATEGIES:
        strategy = STRATEGIES[name](N)
        stream = NoiseStream(strategy, SOURCE, 1.0, 5000)
        for _ in range(N):
            stream.next()
            state = stream._state
            assert len(state.arrays) + len(state.rows) + len(state.free) <= max(strategy.state_rows, len(state.arrays))


class _AnySteps(MadeUp):
    """Sums, differences, products and quotients at random, over rows and a state that is shuffled and dropped."""

    def __init__(self, seed, n=6):
        super().__init__(n)
        self.seed = seed
        self.most = seed % 5

    state_rows = property(lambda self: self.most)

    def init(self, size):
        return tuple(np.zeros(size, np.float32) for _ in range(self.most))

    def step(self, t, state, row):
        choose = np.random.default_rng([self.seed, t])  # which operations, no noise
        vectors = [row(int(r)) for r in choose.integers(t, t + 4, 3)] + list(state)
        for _ in range(int(choose.integers(1, 25))):
            x, y = (vectors[-1 - int(i)] for i in choose.integers(0, min(len(vectors), 5), 2))
            c = np.float32(choose.choice([1, -1, 0.5, 0.3, -0.7]))
            kind = choose.integers(0, 7)
            if kind == 0:
                vectors.append(x + y)
            elif kind == 1:
                vectors.append(x - c * y)
            elif kind == 2:
                vectors.append(x + (y - c * x))
            elif kind == 3:
                vectors.append((y * c + x) + x)
            elif kind == 4:
                vectors.append(x / np.float32(3) if choose.random() < 0.5 else np.zeros_like(x) + x * c)
            elif kind == 5:
                vectors.append(x * c)
            else:
                vectors.append(row(t) * c + y)
        places = choose.permutation(len(vectors))[: self.most]
        return vectors[-1] * np.float32(0.9), tuple(vectors[int(i)].copy() for i in places)


def test_any_steps_are_compiled_to_the_same_bits():
    for seed in (*range(40), 178):
        strategy = _AnySteps(seed)
        expected = _reference(strategy, 700, 3)
        for memory in (None, "40KB"):
            stream = NoiseStream(strategy, SOURCE, 1.5, 700, start=3, memory=memory)
            for t in range(strategy.n):
                assert stream.next().tobytes() == expected[t].tobytes(), (seed, t, memory)


class _Odd(MadeUp):
    """A step that no symbol can follow."""

    state_rows = property(lambda self: 1)

    def init(self, size):
        return (np.zeros(size, np.float32),)

    def step(self, t, state, row):
        noise = np.multiply(row(t) + state[0], np.float32(t + 1))
        return noise, (noise * np.float32(0.2),)


@pytest.mark.parametrize("source", [SOURCE, PLAIN], ids=["kernel", "numpy"])
def test_a_step_that_cannot_be_followed_is_refused_before_anything_is_done(source):
    """No path would make its noise. No strategy of the package is such a one: the laws run all their steps."""
    stream, gradient = NoiseStream(_Odd(4), source, 1.5, 300), torch.ones(300)
    for use in (stream.next, lambda: stream.add_to([gradient])):
        with pytest.raises(ArgumentError, match="step 0 of _Odd cannot be made a program"):
            use()
    assert stream.t == 0
    assert torch.equal(gradient, torch.ones(300))
    stream.load_state_dict(stream.state_dict())


@pytest.mark.parametrize("start", [0, 5, 1000])
def test_one_vector_is_noised_as_pieces_are(start):
    """By a call that was packed before; a new scale, and a step that was made in another way, change what is in it."""
    one, other = (NoiseStream(Independent(6), NoiseSource(KEY), 1.5, 700, start=start) for _ in range(2))
    for t, scale in enumerate([0.5, 0.5, 0.25, 0.25]):
        whole = torch.linspace(-1, 1, 700)
        pieces = [whole[:1].clone(), whole[1:333].clone(), whole[333:].clone()]
        if t == 2:
            assert one.next().tobytes() == other.next().tobytes()
        one.add_to([whole], scale)
        other.add_to(pieces, scale)
        assert torch.equal(whole, torch.cat(pieces))
    assert one.t == other.t == 5
    with pytest.raises(ArgumentError):
        one.add_to([torch.zeros(699)])
    one.add_to([torch.zeros(700)])
    with pytest.raises(StepsExhaustedError):
        one.add_to([torch.zeros(700)])
