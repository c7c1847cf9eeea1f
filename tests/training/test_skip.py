"""A batch that is left out adds nothing to its step, and the steps stay those of the loader."""

import pytest
import torch
from torch.utils.data import DataLoader

from anyorder.clipping import Adaptive
from anyorder.errors import TrainingError
from anyorder.noise import NoiseSource, NoiseStream
from anyorder.strategy import Independent
from training.test_engine import EPOCHS, KEY, STEPS, B, N, backward, data, gradients, planned, private, train, weights


def test_a_shuffled_run_with_batches_left_out_reaches_its_end():
    """Without the steps of noise, the first batch of an epoch would be in the steps of the one before."""
    engine, model, optimizer, loader = private()
    for epoch in range(EPOCHS):
        for i, batch in enumerate(loader):
            optimizer.zero_grad()
            try:
                if (epoch, i) in ((0, 2), (1, 0), (2, STEPS - 1)):
                    model(batch[0])
                    raise torch.OutOfMemoryError
                backward(model, batch)
            except torch.OutOfMemoryError:
                engine.skip()
            optimizer.step()
    assert engine.step == EPOCHS * STEPS
    sizes = [len(units) for units in engine.ledger.history()]
    assert [t for t, size in enumerate(sizes) if size == 0] == [2, STEPS, 3 * STEPS - 1]
    assert sum(sizes) == (3 * STEPS - 3) * B


@pytest.mark.parametrize(("secure", "rule"), [(False, None), (True, None), (False, Adaptive())])
def test_a_step_without_batches_releases_its_noise_alone(secure, rule):
    """As a loss of zero does."""
    plan = planned(mechanism=Independent(EPOCHS * STEPS), clip_norm=0.3, secure=secure)
    released, norms = [], []
    for left_out in (True, False):
        engine, model, optimizer, loader = private(plan, rule=rule)
        batches = iter(loader)
        backward(model, next(batches))
        optimizer.step()
        x, _ = next(batches)
        if left_out:
            engine.skip()
        else:
            (model(x) * 0).sum().backward()
        optimizer.step()
        released.append(gradients(model))
        norms.append(engine.clip_norm)
    assert torch.equal(*released)
    assert norms[0] == norms[1]
    if not secure and rule is None:
        source = NoiseSource(KEY).derive(plan.digest.encode())
        noise = NoiseStream(plan.strategy, source, plan.noise_std, len(released[0]))
        noise.next()
        torch.testing.assert_close(released[0] * plan.batch_size, torch.from_numpy(noise.next()), rtol=1e-5, atol=1e-6)


def test_the_other_micro_batches_of_the_step_count():
    whole = private(loader=DataLoader(data(), batch_size=B // 2), accumulate=2, loss_reduction="mean")
    engine, model, optimizer, loader = whole
    batches = iter(loader)
    backward(model, next(batches))
    before = {name: value.clone() for name, value in engine.training._waiting.sums.items()}
    next(batches)
    engine.skip()
    assert all(torch.equal(value, before[name]) for name, value in engine.training._waiting.sums.items())
    optimizer.step()
    next(batches)
    engine.skip()
    backward(model, next(batches))
    optimizer.step()
    assert [units.tolist() for units in engine.ledger.history()] == [[0, 1], [6, 7]]


def test_only_a_batch_that_waits_is_left_out():
    engine, model, optimizer, loader = private()
    with pytest.raises(TrainingError, match="before the private loader gave a batch"):
        engine.skip()
    batches = iter(loader)
    batch = next(batches)
    engine.skip()
    for call in (engine.skip, lambda: backward(model, batch)):
        with pytest.raises(TrainingError, match="already used"):
            call()
    optimizer.step()
    first, _ = next(batches), next(batches)
    with pytest.raises(TrainingError, match="several batches"):
        engine.skip()
    loader.use(first)
    engine.skip()
    before = weights(model)
    optimizer.zero_grad()  # takes the step that was not taken back
    with pytest.raises(TrainingError, match=r"without a backward.*skip"):
        optimizer.step()
    assert torch.equal(weights(model), before)


def test_a_batch_is_left_out_of_its_own_step():
    """Not of one whose batches are all there: steps would no longer be those of the loader."""
    engine, model, optimizer, loader = private()
    batches = iter(loader)
    backward(model, next(batches))
    next(batches)
    with pytest.raises(TrainingError, match="wait for optimizer"):
        engine.skip()
    optimizer.step()
    engine.skip()
    optimizer.step()
    assert [len(units) for units in engine.ledger.history()] == [B, 0]


def test_a_batch_that_was_called_and_failed_needs_no_name():
    """An error in the middle, and the loop goes on: copies of the next batch are the next batch's."""
    engine, model, optimizer, loader = private(loader=DataLoader(data(), batch_size=B))
    for i, (x, y) in enumerate(loader):
        outputs = model(x.clone())
        if i == 1:
            engine.skip()
        else:
            torch.nn.functional.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert [len(units) for units in engine.ledger.history()] == [4, 0, 4, 4, 4, 4]
    train(engine, model, optimizer, loader, epochs=EPOCHS - 1)
    assert engine.step == EPOCHS * N // B
