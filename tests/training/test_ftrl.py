"""FTRL against SGD (Theorem B.1), its own recurrence, and its saved state."""

import io

import pytest
import torch
from torch import nn

from anyorder.errors import ArgumentError, ModelError
from anyorder.training.optimizers import FTRL


def gradients(steps, dtype=torch.float64, seed=0):
    """Gradients of two parameters, with the increments b_t - b_{t-1} of a noise b_t as in a tree."""
    generator = torch.Generator().manual_seed(seed)
    result, last = [], (torch.zeros(3, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
    for _ in range(steps):
        noise = tuple(5 * torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in last)
        signal = tuple(torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in last)
        result.append([(g + b - a).to(dtype) for g, b, a in zip(signal, noise, last, strict=True)])
        last = noise
    return result


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    shapes = [(3, 2), (4,)]
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def take(optimizer, values):
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for p, g in zip(held, values, strict=True):
        p.grad = None if g is None else g.clone()
    optimizer.step()
    return [p.detach().clone() for p in held]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("lr", [0.01, 1.0])
def test_theorem_b1(lr, momentum):
    ftrl = FTRL(parameters(), lr=lr, momentum=momentum)
    sgd = torch.optim.SGD(parameters(), lr=lr, momentum=momentum)
    for values in gradients(60):
        for a, b in zip(take(ftrl, values), take(sgd, values), strict=True):
            assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max())


def test_algorithm_1():
    """theta_{t+1} = theta_0 - lr v_t is where the gradient of <v_t, theta> + ||theta - theta_0||^2 / (2 lr) is 0."""
    start = parameters()
    optimizer = FTRL(parameters(), lr=0.3, momentum=0.8)
    sums, velocity = [0.0, 0.0], [0.0, 0.0]
    for values in gradients(10):
        now = take(optimizer, values)
        for i, g in enumerate(values):
            sums[i] = sums[i] + g
            velocity[i] = 0.8 * velocity[i] + sums[i]
            torch.testing.assert_close(velocity[i] + (now[i] - start[i].detach()) / 0.3, torch.zeros_like(g))


def test_a_schedule_scales_the_whole_sum():
    start = [p.detach().clone() for p in parameters()]
    optimizer = FTRL(parameters(), lr=0.3)
    values = gradients(3)
    take(optimizer, values[0])
    take(optimizer, values[1])
    optimizer.param_groups[0]["lr"] = 0.0
    for now, first in zip(take(optimizer, values[2]), start, strict=True):
        assert torch.equal(now, first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_resume_is_bit_equal(dtype, momentum):
    whole = FTRL(parameters(dtype), lr=0.1, momentum=momentum)
    values = gradients(8, dtype)
    for v in values[:5]:
        middle = take(whole, v)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    resumed = FTRL([nn.Parameter(p) for p in middle], lr=7.0)
    saved = torch.load(file)
    resumed.load_state_dict(saved)
    for v in values[5:]:
        for a, b in zip(take(whole, v), take(resumed, v), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(saved["state"][0]["sum"], torch.load(file.seek(0) or file)["state"][0]["sum"]), "aliased"


def test_low_precision_parameters_are_summed_in_float32():
    """300 gradients of 2^-9 move a bfloat16 sum only to 2; the float32 sum is exact."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = FTRL([p], lr=1.0)
    for _ in range(1024):
        take(optimizer, [torch.full((1,), 2.0**-9, dtype=torch.bfloat16)])
    assert p.item() == -2.0


def test_groups_and_missing_gradients():
    a, b = parameters()
    optimizer = FTRL([{"params": [a], "momentum": 0.9}, {"params": [b], "lr": 0.5}], lr=0.1)
    c, d = parameters()
    sgd = torch.optim.SGD([{"params": [c], "momentum": 0.9}, {"params": [d], "lr": 0.5}], lr=0.1)
    for t, (g, h) in enumerate(gradients(6)):
        values = [g, None if t % 2 else h]
        for p, q in zip(take(optimizer, values), take(sgd, values), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_the_start_is_taken_at_the_first_step():
    p = nn.Parameter(torch.zeros(2))
    optimizer = FTRL([p], lr=1.0)
    with torch.no_grad():
        p.fill_(3.0)
    assert torch.equal(take(optimizer, [torch.ones(2)])[0], torch.full((2,), 2.0))


def test_closure_and_scheduler():
    p = nn.Parameter(torch.ones(2))
    optimizer = FTRL([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure():
        optimizer.zero_grad()
        loss = p.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    scheduler.step()
    optimizer.step(closure)
    assert torch.equal(p.detach(), torch.zeros(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"lr": -1.0}, "lr"), ({"lr": float("nan")}, "lr"), ({"lr": 1.0, "momentum": 1.0}, "momentum must be below 1")],
)
def test_bad_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        FTRL(parameters(), **options)
    optimizer = FTRL(parameters(), lr=1.0)
    with pytest.raises(ArgumentError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]} | options)
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match="dense"):
        FTRL(layer.parameters(), lr=1.0).step()
