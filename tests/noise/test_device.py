"""Noise made where the gradients are: every strategy's own bits, on the CPU and, where there is one, on a GPU."""

import numpy as np
import pytest
import torch

from anyorder.errors import ArgumentError, TrainingError
from anyorder.noise import NoiseSource, NoiseStream, torch_path
from anyorder.noise.compiled import CompiledPath, Targets
from anyorder.noise.torch_path import TorchPath
from anyorder.strategy import BLT, Banded, BandedInverse, Dense, Independent, Strategy, ToeplitzBanded, Tree
from anyorder.strategy.rescaled import Rescaled
from anyorder.strategy.restarted_blt import RestartedBLT
from noise.steps import Steps
from noise.steps import steps as all_steps

SOURCE = NoiseSource(bytes(range(32)), 12)
N, SIZE, START, STD = 9, 1003, 2**36 - 5, 1.7
RANDOM = np.random.default_rng(0)  # inputs, no noise
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def _lower(n):
    return np.tril(RANDOM.uniform(-0.4, 0.4, (n, n)), -1) + np.diag(RANDOM.uniform(0.8, 1.3, n))


def _banded(n, p):
    bands = RANDOM.uniform(-0.4, 0.4, (p, n))
    bands[0] = RANDOM.uniform(0.8, 1.3, n)
    return Banded(np.where(np.arange(p)[:, None] + np.arange(n) < n, bands, 0.0))


BLT_OF_3 = BLT([1 - 1e-9, 0.9, -0.3], [0.2, 0.1, 0.05], N)
RESCALED = Rescaled(BLT([0.9], [0.2], N), np.linspace(0.5, 1.5, N))
INVERSE = BandedInverse([1.0, -0.6, 0.2], N)
STRATEGIES = [  # of every kind of state; the laws have all strategies
    Independent(N),
    Dense(_lower(N)),
    INVERSE,
    BLT_OF_3,
    ToeplitzBanded([1.1, 0.4, 0.2, 0.1], N),
    RESCALED,
    RestartedBLT([[0.9, 0.5]] * 3, [[0.2, 0.1]] * 3, [0.5] * 3, [1.0, 0.9, 0.8], N, 3),
    Tree(N, "full"),
    Tree(N, "online", restarts=[3], completion=True),
]


def _reference(strategy, steps):
    """What NumPy makes: the noise of every step, and the state after the last."""
    return all_steps(strategy, SOURCE, SIZE, START, STD, steps)


def _tensors(place, dtypes=(torch.float32,)):
    """Gradients of a small model: odd sizes, one of them empty."""
    shapes = [(1,), (3, 5), (0,), (17, 2, 3), (885,)]
    return [
        torch.from_numpy(RANDOM.standard_normal(shape, np.float32)).to(place, dtypes[i % len(dtypes)])
        for i, shape in enumerate(shapes)
    ]


def _noise(strategy, source, place):
    return Steps(TorchPath(source, np.float32(STD), START, SIZE, place), strategy, SIZE)


def _add(noise, tensors, scale=1.0):
    noise.add(Targets(tensors, SIZE), scale)


def _flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).cpu().numpy()


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("strategy", [INVERSE, BLT_OF_3, _banded(N, 3), RESCALED], ids=repr)
def test_mixed_types_are_each_rounded_by_themselves(strategy, place):
    exact, _ = _reference(strategy, 2)
    noise = _noise(strategy, SOURCE, place)
    for t in range(2):
        tensors = _tensors(place, (torch.bfloat16, torch.float32, torch.float64, torch.float16))
        before = [tensor.clone() for tensor in tensors]
        _add(noise, tensors, 1 / 24)
        at = 0
        for old, new in zip(before, tensors, strict=True):
            part = torch.from_numpy(exact[t][at : at + old.numel()]).view(old.shape).to(place)
            wide = old.double() if old.dtype == torch.float64 else old.float()
            exactly = (wide + part) * torch.tensor(1 / 24, dtype=wide.dtype, device=place)
            assert torch.equal(new, exactly.to(old.dtype))
            at += old.numel()


@pytest.mark.parametrize("place", DEVICES)
def test_strides_do_not_matter(place):
    exact, _ = _reference(BLT_OF_3, 1)
    first, second = torch.zeros(17, 59, device=place).T, torch.zeros(2, SIZE - 17 * 59 + 5, device=place)[0]
    assert first.numel() + second.numel() - 5 == SIZE
    _add(_noise(BLT_OF_3, SOURCE, place), [first, second[5:]])
    assert np.array_equal(_flat([first, second[5:]]), exact[0])
    assert not second[:5].any()


class Own(Strategy):
    """A strategy that the device has no form of: its steps are taken as they are written."""

    n = N
    state_rows = 0

    def matrix(self):
        return np.eye(N)

    def noising_matrix(self):
        return np.eye(N)

    def init(self, size):
        return ()

    def to_dict(self):
        return {}


class Doubled(Own):
    def init(self, size):
        return BLT([0.9], [0.2], N).init(size)

    def step(self, t, state, row):
        noise, state = BLT([0.9], [0.2], N).step(t, state, row)
        return 2 * noise, state


def test_a_step_of_its_own_is_taken():
    strategy = Doubled()
    exact, _ = _reference(strategy, 2)
    noise = _noise(strategy, SOURCE, "cpu")
    for t in range(2):
        out = torch.zeros(SIZE)
        _add(noise, [out])
        assert np.array_equal(out.numpy(), exact[t])


class Recurrence(Own):
    """A step whose noise is its state."""

    def init(self, size):
        return (np.zeros(size, np.float32),)

    def step(self, t, state, row):
        noise = row(t) - np.float32(0.5) * state[0]
        return noise.copy(), (noise,)


def test_the_noise_handed_out_is_not_the_state():
    exact, last = _reference(Recurrence(), 3)
    noise = _noise(Recurrence(), SOURCE, "cpu")
    for t in range(3):
        out = torch.zeros(SIZE)
        _add(noise, [out])
        assert np.array_equal(out.numpy(), exact[t])
    assert np.array_equal(noise.save()[0], last[0])


class Wide(Own):
    """A step in float64."""

    def step(self, t, state, row):
        return row(t) * np.float64(0.5), state


def test_a_step_in_float64_is_refused():
    noise = _noise(Wide(), SOURCE, "cpu")
    out = torch.zeros(SIZE)
    with pytest.raises(ArgumentError, match="step 0 of Wide cannot be made a program"):
        _add(noise, [out])
    assert not out.any()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(SIZE - 1)], "1003 coordinates, got 1002"),
        ([torch.zeros(3), torch.zeros(SIZE - 3, device="meta")], "has no memory"),
        ([torch.zeros(3), torch.zeros(SIZE - 3, dtype=torch.int64)], "float32, float64, float16 or bfloat16, got"),
    ],
)
def test_bad_tensors_change_nothing(tensors, message):
    noise = _noise(BLT_OF_3, SOURCE, "cpu")
    with pytest.raises(ArgumentError, match=message):
        _add(noise, tensors)
    assert not tensors[0].any()
    assert not any(vector.any() for vector in noise.save())


def test_a_gradient_that_requires_gradients_is_written():
    parameter = torch.zeros(SIZE, requires_grad=True)
    _add(_noise(STRATEGIES[0], SOURCE, "cpu"), [parameter])
    exact, _ = _reference(STRATEGIES[0], 1)
    assert np.array_equal(parameter.detach().numpy(), exact[0])


@pytest.fixture(params=DEVICES)
def elsewhere(request, monkeypatch):
    """A device that streams take for another than the CPU."""
    make = Targets.__init__

    def init(self, tensors, size):
        make(self, tensors, size)
        self.on_cpu = False

    monkeypatch.setattr(Targets, "__init__", init)
    monkeypatch.setattr(CompiledPath, "add_to_vector", lambda *arguments: False)  # it looks at the tensor itself
    return request.param


def _stream(strategy):
    return NoiseStream(strategy, SOURCE, STD, SIZE, start=START)


def test_a_stream_goes_to_the_device_and_back(elsewhere):
    for strategy in STRATEGIES:
        ordinary, stream = _stream(strategy), _stream(strategy)
        for t in range(N):
            exact = ordinary.next()
            if t in (2, 6):
                assert np.array_equal(stream.next(), exact)
                continue
            tensors = _tensors(elsewhere)
            before = _flat(tensors)
            stream.add_to(tensors, 1 / 24)
            assert np.array_equal(_flat(tensors), (before + exact) * np.float32(1 / 24))
            saved = stream.state_dict()
            assert saved["t"] == t + 1
            if t == 4:
                stream = _stream(strategy)
                stream.load_state_dict(saved)


def test_a_stream_comes_back_to_the_cpu_with_its_tensors(elsewhere, monkeypatch):
    pairs = [(_stream(strategy), _stream(strategy)) for strategy in STRATEGIES]
    for t in range(N):
        if t == 4:
            monkeypatch.undo()  # from here on the CPU is the CPU
        for ordinary, stream in pairs:
            out = torch.zeros(SIZE, device=elsewhere if t < 4 else "cpu")
            stream.add_to([out])
            assert np.array_equal(_flat([out]), ordinary.next())
            assert type(stream._path) is (TorchPath if t < 4 else CompiledPath)


def test_a_stream_goes_back_to_a_saved_state(elsewhere):
    stream, first, second = _stream(BLT_OF_3), *torch.zeros(2, SIZE, device=elsewhere)
    stream.add_to([torch.zeros_like(first)])
    saved = stream.state_dict()
    stream.add_to([first])
    stream.load_state_dict(saved)
    stream.add_to([second])
    assert torch.equal(first, second)


def test_tensors_of_two_devices_change_nothing(elsewhere):
    stream, zeros = _stream(BLT_OF_3), torch.zeros(SIZE, device=elsewhere)
    for tensors in ([zeros[3:], torch.zeros(3, device="meta")], [zeros[3:], np.zeros(3, np.float32)]):
        with pytest.raises(ArgumentError, match="tensors must be on one device|has no memory"):
            stream.add_to(tensors)
    assert not zeros.any()
    assert stream.t == 0
    stream.add_to([zeros])
    assert np.array_equal(_flat([zeros]), _stream(BLT_OF_3).next())


def test_the_default_type_does_not_matter():
    for strategy in STRATEGIES:
        exact, _ = _reference(strategy, 4)
        torch.set_default_dtype(torch.float64)
        try:
            noise = _noise(strategy, SOURCE, "cpu")
            for t in range(4):
                assert noise.next().tobytes() == exact[t].tobytes()
        finally:
            torch.set_default_dtype(torch.float32)


def test_memory_holds_rows_on_a_device_too():
    for strategy in STRATEGIES:
        exact, _ = _reference(strategy, N)
        noise = Steps(TorchPath(SOURCE, np.float32(STD), START, SIZE, "cpu"), strategy, SIZE, strategy.state_rows + 3)
        kept = 0
        for t in range(N):
            assert noise.next().tobytes() == exact[t].tobytes()
            assert len(noise.state.arrays) + len(noise.state.rows) + len(noise.state.free) <= strategy.state_rows + 3
            kept += len(noise.state.rows)
        assert kept or not isinstance(strategy, Dense | BandedInverse)


@pytest.mark.parametrize("fails", ["normal_piece", "add"])
def test_a_step_broken_off_on_a_device_is_not_gone_on_from(fails, monkeypatch, elsewhere):
    stream = _stream(BLT_OF_3)
    with monkeypatch.context() as patch:
        patch.setattr(torch_path, fails, lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            stream.add_to([torch.zeros(SIZE, device=elsewhere)])
    with pytest.raises(TrainingError, match="broken off half way"):
        stream.next()


def test_the_state_follows_the_tensors(elsewhere):
    for strategy in STRATEGIES:
        ordinary, stream, out = _stream(strategy), _stream(strategy), torch.zeros(SIZE, device=elsewhere)
        for _ in range(4):
            out.zero_()
            stream.add_to([out])
            assert np.array_equal(_flat([out]), ordinary.next())
            stream._path.device = torch.device("meta")  # as if the state were on another device than the next tensors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_moves_from_the_device_to_the_cpu():
    ordinary, stream = _stream(BLT_OF_3), _stream(BLT_OF_3)
    for place in ("cpu", "cuda", "cpu", "cuda"):
        out = torch.zeros(SIZE, device=place)
        stream.add_to([out])
        assert np.array_equal(_flat([out]), ordinary.next())
