"""What observers of an engine see: every release, nothing else, and they change nothing."""

import numpy as np
import pytest
import torch

from anyorder.clipping import Adaptive
from anyorder.errors import TrainingError
from anyorder.strategy import Independent
from training.test_engine import EPOCHS, STEPS, backward, gradients, planned, private


def run(steps, *observers, rule=None):
    engine, model, optimizer, loader = private(planned(mechanism=Independent(EPOCHS * STEPS)), rule=rule)
    for observer in observers:
        engine.on_release(observer)
    released = []
    for _, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        released.append(torch.cat([g.reshape(-1) for g in gradients(model)]))
    return engine, released


@pytest.mark.parametrize("rule", [None, Adaptive()])
def test_an_observer_sees_the_private_gradients_of_every_step(rule):
    seen = []
    _, released = run(3, lambda step, private: seen.append((step, private.clone())), rule=rule)
    assert [step for step, _ in seen] == [0, 1, 2]
    for (_, private_), gradient in zip(seen, released, strict=True):
        counts = 0 if rule is None else 1  # the noised count is a release too
        assert len(private_) == len(gradient) + counts
        np.testing.assert_array_equal(private_[: len(gradient)].float(), gradient)


def test_what_an_observer_writes_reaches_nobody():
    seen = []
    spoil = lambda _, private: private.zero_()  # noqa: E731
    _, released = run(2, spoil, lambda _, private: seen.append(private.clone()))
    _, plain = run(2)
    for a, b, c in zip(released, plain, seen, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_an_observer_that_raises_leaves_the_step_taken_and_the_gradients_private():
    def fail(step, private):
        raise ValueError("no room for logs")

    engine, model, optimizer, loader = private(planned(mechanism=Independent(EPOCHS * STEPS)))
    end = engine.on_release(fail)
    batches = iter(loader)
    backward(model, next(batches))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="no room"):
        optimizer.step()
    assert engine.step == 1
    step, released = engine.release.unreturned
    assert step == 0
    assert torch.equal(released, torch.cat([g.reshape(-1) for g in gradients(model)]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(TrainingError, match="without a backward pass"):
        optimizer.step()  # the same sum is not released twice
    end()
    optimizer.zero_grad()
    backward(model, next(batches))
    optimizer.step()
    assert engine.step == 2
