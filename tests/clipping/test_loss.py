"""A criterion that is given one example at a time."""

import numpy as np
import pytest
import torch
from torch import nn

from anyorder.clipping import ExampleLoss
from anyorder.errors import ArgumentError, ModelError

LENGTHS = [1, 4, 2]
MASKED = -100


def tokens(seed=0):
    """(3, 5, 4) scores and their (3, 5) labels, of which only the first few of each example count."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (3, 5), generator=generator)
    for row, length in zip(labels, LENGTHS, strict=True):
        row[length:] = MASKED
    return scores, labels


def token_loss(scores, labels):
    """The usual one: the mean over the unmasked tokens of the batch."""
    return nn.functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=MASKED)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_a_loop(reduction):
    scores, labels = tokens()
    scores.requires_grad_()
    parts = torch.stack([token_loss(scores[i : i + 1], labels[i : i + 1]) for i in range(3)])
    expected = getattr(parts, reduction)()
    loss = ExampleLoss(token_loss, reduction)(scores, labels)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(value, scores)[0] for value in (loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_an_example_does_not_change_the_gradient_of_another():
    def gradient_of_first(loss, length):
        scores, labels = tokens()
        labels[1, length:] = MASKED
        scores.requires_grad_()
        return torch.autograd.grad(loss(scores, labels), scores)[0][0]

    alone = ExampleLoss(token_loss)
    assert torch.equal(gradient_of_first(alone, 4), gradient_of_first(alone, 1))
    assert not torch.allclose(gradient_of_first(token_loss, 4), gradient_of_first(token_loss, 1))


def test_a_loss_that_compares_examples_has_nothing_to_compare():
    x = torch.randn(4, 3, requires_grad=True)
    loss = ExampleLoss(lambda x: (x[:, None] - x[None, :]).abs().sum())(x)
    assert loss == 0
    assert not torch.autograd.grad(loss, x)[0].any()


def test_nested_batches_and_settings():
    outputs = {"mean": torch.randn(3, 2), "rest": (torch.ones(3), None)}
    loss = ExampleLoss(lambda out, y, factor: factor * (out["mean"].sum(1) * out["rest"][0] - y).square().mean())
    y = torch.randn(3)
    torch.testing.assert_close(loss(outputs, y, 2.0), 2 * (outputs["mean"].sum(1) - y).square().mean())


@pytest.mark.parametrize("targets", [np.zeros(3), [0.0, 1.0, 2.0], {"y": [0.0, 1.0, 2.0]}, {1: 0.0}, object()])
def test_what_cannot_be_split_by_example_is_refused(targets):
    """Every example would see all of it, labels of others too."""
    with pytest.raises(ModelError, match="make it a tensor with one row for each example"):
        ExampleLoss(lambda p, t: p.square().mean())(torch.zeros(3, 1), targets)


class Running(nn.Module):
    """Keeps a mean over what it was given, as an attribute or as a buffer."""

    def __init__(self, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("mean", torch.zeros(()))
        else:
            self.mean = torch.zeros(())

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return (x / (1 + self.mean)).square().mean()


@pytest.mark.parametrize("buffer", [False, True])
def test_a_criterion_that_keeps_a_batch_for_the_next_is_refused(buffer):
    with pytest.raises(ModelError, match=r"the criterion itself \(Running\) keeps a tensor of the batch"):
        ExampleLoss(Running(buffer))(torch.randn(3, 1, requires_grad=True))


def test_refusals():
    with pytest.raises(ArgumentError, match="reduction"):
        ExampleLoss(nn.CrossEntropyLoss(), "none")
    with pytest.raises(ModelError, match="batches of one length"):
        ExampleLoss(nn.MSELoss())(torch.zeros(2, 1), torch.zeros(3, 1))
    with pytest.raises(ModelError, match=r"one number .* got \(1, 4\)"):
        ExampleLoss(nn.MSELoss(reduction="none"))(torch.zeros(2, 4), torch.zeros(2, 4))
