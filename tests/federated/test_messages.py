"""Messages: clipped as a whole, and zeros where they are none."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from anyorder.federated import Layout, clip_message

LAYOUT = Layout({"w": (2, 3), "b": (2,)})
GOOD = {"w": torch.ones(2, 3), "b": torch.ones(2)}


def norm(message):
    return float(torch.cat([value.double().reshape(-1) for value in message.values()]).norm())


@pytest.mark.parametrize("size", [1e-30, 0.1, 1.0, 7.0, 1e30])
def test_cut_over_all_parameters_together(size):
    update = {name: size * value for name, value in GOOD.items()}
    cut = clip_message(update, 1.0)
    assert norm(cut) <= 1.0
    assert norm(cut) == pytest.approx(min(1.0, norm(update)), rel=1e-5)
    assert all(torch.equal(update[name], size * GOOD[name]) for name in GOOD)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_zero_everywhere(bad):
    update = {"w": torch.ones(2, 3), "b": torch.tensor([bad, 0.0])}
    assert norm(clip_message(update, 1.0)) == 0.0
    assert not LAYOUT.flat(update).any()


def test_zero_stays_zero():
    assert norm(clip_message({"w": torch.zeros(3)}, 1.0)) == 0.0


def test_integers_never_leave():
    update = {"w": np.ones(3, np.float32), "steps": np.array([7]), "mask": torch.tensor([True])}
    assert clip_message(update, 1.0).keys() == {"w"}
    assert clip_message({"steps": torch.tensor(3)}, 1.0) == {}


@pytest.mark.parametrize(
    "message",
    [
        None, [], {}, {"w": torch.ones(2, 3)}, {**GOOD, "more": torch.ones(1)}, {**GOOD, "b": torch.ones(3)},
        {**GOOD, "b": torch.ones(2, dtype=torch.int64)}, {**GOOD, "b": [1.0, 1.0]}, {**GOOD, "b": np.array(["1", "2"])},
        {**GOOD, "b": torch.ones(2, dtype=torch.complex64)}, {**GOOD, "b": torch.ones(2).to_sparse()},
        {**GOOD, "b": torch.ones(2, device="meta")}, {**GOOD, "w": torch.full((2, 3), 1e300, dtype=torch.float64)},
    ],
)  # fmt: skip
def test_what_is_no_message_is_zeros(message):
    vector = LAYOUT.flat(message)
    assert vector.shape == (8,)
    finite_but_large = isinstance(message, dict) and message.get("w", torch.ones(1)).dtype == torch.float64
    assert vector.any() == finite_but_large


def test_there_and_back():
    vector = torch.arange(8.0)
    named = LAYOUT.named(vector)
    assert torch.equal(LAYOUT.flat(named), vector)
    assert named["w"].shape == (2, 3)


class Answers(Mapping):
    """A mapping that does what it likes."""

    def __init__(self, length=lambda: 2, get=lambda name: GOOD[name]):
        self._length, self._get = length, get

    def __len__(self):
        return self._length()

    def __iter__(self):
        return iter(GOOD)

    def __getitem__(self, name):
        return self._get(name)


def fails(*_):
    raise RuntimeError("never look at me")


def turns(name):
    """Another answer at each look."""
    turns.count += 1
    return GOOD[name] if turns.count < 3 else "nothing"


turns.count = 0


class Lying(torch.Tensor):
    """Says that it is finite and small, whatever it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return torch.tensor(True)


class Array(np.ndarray):
    shape = property(fails)


HOSTILE = {
    "length raises": Answers(length=fails),
    "value raises": Answers(get=fails),
    "deep": Answers(get=lambda name: HOSTILE["deep"][name]),
    "subclass of tensors": {**GOOD, "b": torch.full((2,), 9.0).as_subclass(Lying)},
    "subclass of arrays": {**GOOD, "b": np.ones(2, np.float32).view(Array)},
    "masked": {**GOOD, "b": np.ma.masked_array(np.ones(2), [True, False])},
    "objects": {**GOOD, "b": np.array([fails, None], object)},
    "texts": {**GOOD, "b": np.array(["1", "2"])},
    "long doubles": {**GOOD, "b": np.ones(2, np.longdouble)},
    "lazy": {**GOOD, "b": nn.UninitializedParameter()},
    "nested": {**GOOD, "b": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(1)])},
    "quantized": {**GOOD, "b": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    "number": {**GOOD, "b": 1.0},
    "a million names": dict.fromkeys(range(10**6)),
    "names of other kinds": {1: GOOD["w"], (2,): GOOD["b"]},
    "huge": {**GOOD, "b": torch.ones(1).expand(10**12)},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*quantize")
def test_no_object_stops_a_server():
    for kind in HOSTILE:
        message = HOSTILE[kind]
        if kind in ("nested", "quantized"):  # making them warns
            message = {**message, "b": message["b"]()}
        vector = LAYOUT.flat(message)
        assert vector.shape == (8,)
        assert not vector.any()


def test_what_is_checked_is_what_is_taken():
    turns.count = 0
    assert torch.equal(LAYOUT.flat(Answers(get=turns)), torch.ones(8))


@pytest.mark.parametrize(
    "b",
    [
        nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 1, np.ones(2, ">f4"), np.ones(2, np.float16),
        np.broadcast_to(np.float32(1), 2), torch.ones(4)[::2], torch.ones(2, dtype=torch.bfloat16), np.ones(4)[::-2],
    ],
)  # fmt: skip
def test_kinds_of_numbers(b):
    vector = LAYOUT.flat({**GOOD, "b": b})
    assert torch.equal(vector.float(), torch.ones(8))
    assert not vector.requires_grad
    assert LAYOUT.problem({**GOOD, "b": b}) is None


def test_a_message_that_is_written_later_is_not_changed():
    message = {name: value.clone() for name, value in GOOD.items()}
    vector = LAYOUT.flat(message)
    message["w"].zero_()
    assert torch.equal(vector, torch.ones(8))
    one = Layout({"w": (2, 3)})
    vector = one.flat(message)
    message["w"].fill_(7)
    assert not vector.any()


def test_a_client_can_ask_what_is_wrong():
    assert LAYOUT.problem(GOOD) is None
    assert "shape" in LAYOUT.problem({**GOOD, "b": torch.ones(3)})
    assert "finite" in LAYOUT.problem({**GOOD, "b": torch.full((2,), float("nan"))})
    assert "names" in LAYOUT.problem({"w": torch.ones(2, 3)})
    assert "dict" in LAYOUT.problem(None)


def test_a_problem_of_names_says_which():
    assert LAYOUT.problem(GOOD) is None
    assert LAYOUT.problem({"module.w": GOOD["w"], "b": GOOD["b"]}).endswith("got missing w; extra module.w")
    assert LAYOUT.problem({**GOOD, **{f"n{i}": 0 for i in range(5)}}).endswith("got extra n0, n1, n2 and 2 more")
    assert LAYOUT.problem({}).endswith("got missing w, b")
