"""A private subset of the parameters: those that the optimizer holds are the run, the others stay out of it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.errors import ArgumentError, CheckpointError, TrainingError
from anyorder.training.optimizers import FTRL

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer does not hold")  # test_boundary.py

KEY = bytes(range(32))
X, Y = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def private(model, parameters, make=torch.optim.SGD, **options):
    secure = options.pop("secure", False)
    plan = ao.plan(
        dataset_size=16,
        batch_size=4,
        epochs=1,
        epsilon=8,
        delta=1e-5,
        mechanism=ao.mechanism("tree", secure=secure),
        clip_norm=0.3,
    )
    engine = ao.PrivacyEngine(plan, key=KEY, **options)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    return engine, *engine.make_private(model, make(parameters, lr=0.5), loader)


def backward(model, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def trained(engine, model, optimizer, loader):
    for batch in loader:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return [p.detach().clone() for p in model.module.parameters()]


@pytest.mark.parametrize("make", [torch.optim.SGD, FTRL])
@pytest.mark.parametrize("secure", [False, True])
def test_what_the_optimizer_does_not_hold_is_as_if_it_had_been_frozen(make, secure):
    left_out, frozen = network(), network()
    frozen[0].requires_grad_(False)
    run = private(left_out, left_out[2].parameters(), make, secure=secure)
    assert run[0].release.size == sum(p.numel() for p in left_out[2].parameters())
    made = trained(*run)
    expected = trained(*private(frozen, frozen[2].parameters(), make, secure=secure))
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(made[:2], network()[0].parameters(), strict=True))
    assert all(p.grad is None for p in left_out[0].parameters())
    assert not torch.equal(made[2], network()[2].weight)


def test_units_are_cut_by_the_norm_of_what_is_held():
    """Of the whole model the norm is larger, and less would be left."""
    model = network()
    engine, private_model, *_ = private(model, model[2].parameters())
    backward(private_model, next(iter(engine.loader)))
    held = engine.training._waiting.sums
    assert set(held) == {"2.weight", "2.bias"}
    one = network()
    each = []
    for i in range(4):
        one.zero_grad()
        nn.functional.cross_entropy(one(X[i : i + 1]), Y[i : i + 1]).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in one[2].parameters()])
        each.append(gradient * min(1.0, 0.3 / gradient.norm()))
    torch.testing.assert_close(torch.cat([x.reshape(-1) for x in held.values()]), torch.stack(each).sum(0))


@pytest.mark.parametrize("how", ["held", "left out", "frozen before"])
def test_what_is_frozen_or_trained_later_is_refused(how):
    model = network()
    model[0].bias.requires_grad_(False)
    run = private(model, model[2].parameters())
    engine, private_model, optimizer, loader = run
    batches = iter(loader)
    backward(private_model, next(batches))
    before = engine.release._noise.state_dict()["t"], engine.step
    p = {"held": model[2].bias, "left out": model[0].weight, "frozen before": model[0].bias}[how]
    p.requires_grad_(how != "held")
    match = "was frozen after make_private" if how == "held" else "was left out"
    with pytest.raises(TrainingError, match=match):
        optimizer.step()
    with pytest.raises(TrainingError, match=match):
        backward(private_model, next(batches))
    assert (engine.release._noise.state_dict()["t"], engine.step) == before
    p.requires_grad_(how == "held")
    optimizer.step()
    assert engine.step == 1


def test_a_second_optimizer_on_gradients_of_private_data_is_refused():
    model = network()
    _, private_model, optimizer, loader = private(model, model[2].parameters())
    second = torch.optim.SGD(model[0].parameters(), lr=0.5)
    batch = next(iter(loader))
    backward(private_model, batch)
    assert all(p.grad is None for p in model[0].parameters())
    second.step()  # nothing to step on
    model[0].weight.grad = torch.ones_like(model[0].weight)  # of the model itself, by torch.autograd.grad perhaps
    with pytest.raises(TrainingError, match="no noise covers it"):
        optimizer.step()
    model[0].weight.grad = None
    optimizer.step()


def test_a_parameter_that_the_optimizer_gets_later_is_refused_when_it_is_trained():
    model = network()
    _, private_model, optimizer, loader = private(model, model[2].parameters())
    optimizer.add_param_group({"params": list(model[0].parameters())})
    backward(private_model, next(iter(loader)))
    optimizer.step()  # they are frozen: nothing comes to them
    assert all(torch.equal(a, b) for a, b in zip(model[0].parameters(), network()[0].parameters(), strict=True))
    model[0].requires_grad_(True)
    with pytest.raises(TrainingError, match="was left out"):
        backward(private_model, next(iter(loader)))


def test_a_refused_set_up_leaves_the_model_as_it_was(tmp_path):
    model = network()
    for parameters, options, kind in (
        (nn.Linear(3, 3).parameters(), {}, ArgumentError),
        (model[2].parameters(), {"checkpoint": tmp_path / "no" / "run.ckpt"}, CheckpointError),
    ):
        with pytest.raises(kind):
            private(model, parameters, **options)
        assert all(p.requires_grad for p in model.parameters())
    model[2].requires_grad_(False)
    with pytest.raises(ArgumentError, match="optimizer must hold parameters of the model that require gradients"):
        private(model, model[2].parameters())
    assert model[0].weight.requires_grad


def test_a_checkpoint_of_a_subset_is_resumed_on_the_same_one(tmp_path):
    whole = trained(*private(m := network(), m[2].parameters()))
    model = network()
    run = private(model, model[2].parameters(), checkpoint=tmp_path / "run.ckpt")
    for batch, _ in zip(run[3], range(2), strict=False):
        run[2].zero_grad()
        backward(run[1], batch)
        run[2].step()
    run[0].save()
    run[0].close()
    model = network()
    made = trained(*private(model, model[2].parameters(), checkpoint=tmp_path / "run.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(made, whole, strict=True))
    model = network()
    with pytest.raises(CheckpointError, match="size = 10"):
        private(model, model.parameters(), checkpoint=tmp_path / "run.ckpt")
