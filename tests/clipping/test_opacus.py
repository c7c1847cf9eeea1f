"""Our clipped sums are Opacus's: who comes from it finds the same gradients."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anyorder.clipping.per_example import FunctionalClipping
from clipping.brute import assert_close, run

opacus = pytest.importorskip("opacus", reason="opacus is not installed")
ENGINES = [FunctionalClipping]


class TextNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x)).tanh().mean(1))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: torch.randn(7, 8)),
    "convolutional": (convolutional, lambda: torch.randn(7, 1, 8, 8)),
    "text": (TextNet, lambda: torch.randint(0, 11, (7, 5))),
}


def opacus_sums(model, x, y, clip_norm):
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its hooks are of a kind that torch deprecated
        private = opacus.GradSampleModule(model)
        optimizer = opacus.optimizers.DPOptimizer(
            torch.optim.SGD(private.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=clip_norm,
            expected_batch_size=len(x),
        )  # fmt: skip
        F.cross_entropy(private(x), y).backward()
        optimizer.clip_and_accumulate()
    return {name: p.summed_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("clip_norm", [0.05, 1.0, 100.0])
def test_clipped_sums_equal_those_of_opacus(engine, name, clip_norm):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, x, y = make(), inputs(), torch.randint(0, 3, (7,))
    _, ours = run(engine(model), x, y, F.cross_entropy, clip_norm=clip_norm)
    assert_close(ours, opacus_sums(model, x, y, clip_norm), 1e-5)
