"""Messages: clipped as a whole, and zeros where they are none."""

import numpy as np
import pytest
import torch

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
