"""The same sums, masks and bound on a GPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping, GhostClipping
from clipping.brute import assert_close, norm, run
from clipping.test_layers_by_loop import Attention, Recurrent

Clipping = FunctionalClipping


@pytest.fixture(params=[FunctionalClipping, GhostClipping], autouse=True)
def engine(request, monkeypatch):
    """Every test of this file holds for both engines."""
    monkeypatch.setitem(globals(), "Clipping", request.param)


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODULES = {
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), (1, 8, 8)),
    "attention": (Attention, (5, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 3, batch_first=True)), (5, 8)),
    "gru": (lambda: Recurrent(nn.GRU(8, 3, batch_first=True)), (5, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_cpu_and_gpu_agree(name):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    module = make().double()
    x = torch.randn(9, *shape, dtype=torch.float64)
    y = torch.randn_like(module(x))
    groups = torch.tensor([4, 0, 4, 2, 2, 7, 4, 0, 4])
    outputs, sums = run(Clipping(module, 4), x, y, F.mse_loss, groups=groups, clip_norm=0.1)
    on_gpu = Clipping(copy.deepcopy(module).cuda(), 4)
    gpu_outputs, gpu_sums = run(on_gpu, x.cuda(), y.cuda(), F.mse_loss, groups=groups, clip_norm=0.1)
    torch.testing.assert_close(gpu_outputs.cpu(), outputs)
    assert_close({k: v.cpu() for k, v in gpu_sums.items()}, sums, 1e-10)


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), Attention(dropout=0.4)])
@pytest.mark.parametrize("chunk_size", [2, None])
def test_backward_draws_the_same_masks(layer, chunk_size):
    """The last layer is linear in its weight, so that <gradient, weight> is the sum of the outputs."""
    torch.manual_seed(0)
    module = nn.Sequential(layer, nn.Linear(8, 8, bias=False)).cuda()
    x = torch.randn(5, 3, 8, device="cuda")
    received = []
    outputs = Clipping(module, chunk_size).forward(
        (x,), {}, groups=torch.tensor([1, 0, 1, 0, 2]), clip_norm=1e6, scale=1.0, receive=received.append
    )
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    outputs.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    product = (received[0]["1.weight"] * module[1].weight).sum()
    torch.testing.assert_close(product, outputs.sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_reduced_matrix_precision_keeps_the_bound(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.manual_seed(0)
        module = nn.Linear(500, 300).cuda()
        x, y = torch.randn(6, 500, device="cuda"), torch.randint(0, 300, (6,), device="cuda")
        for i in range(6):
            _, sums = run(Clipping(module), x[i : i + 1], y[i : i + 1], F.cross_entropy, clip_norm=1e-2)
            assert 0.999e-2 < norm(sums) <= 1e-2
    finally:
        torch.set_float32_matmul_precision(before)
