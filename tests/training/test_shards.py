"""What a step does to the vector of all parameters: it passes over it for the noise, and for nothing else."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.training.engine import pieces_of

WIDTH = 4096


class Passes(TorchDispatchMode):
    """Names of the functions that read or write as many numbers as a large parameter has."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        touched = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.numel() >= WIDTH]
        if touched and not func.is_view:
            self.names.append(func.__name__)
        return result


def test_between_sums_and_gradients_only_the_noise_passes_over_the_parameters():
    model = nn.Sequential(nn.Linear(WIDTH // 8, 8), nn.Tanh(), nn.Linear(8, WIDTH // 8))
    plan = ao.plan(dataset_size=8, batch_size=4, epochs=1, epsilon=8, delta=1e-5, mechanism="independent")
    loader = DataLoader(TensorDataset(torch.randn(8, WIDTH // 8)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = ao.PrivacyEngine(plan)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with Passes() as passes:
            engine.training._make_gradients()
        assert passes.names == []
        break


def test_one_process_keeps_the_sums_where_they_are_and_widens_where_types_differ():
    large = {"a": torch.arange(2.0**18).view(512, 512), "b": torch.ones(4)}
    pieces = pieces_of(large, large)
    assert [x.data_ptr() for x in pieces] == [x.data_ptr() for x in large.values()]
    assert all(torch.equal(x, value.reshape(-1)) for x, value in zip(pieces, large.values(), strict=True))
    parameters = {"a": nn.Parameter(torch.zeros(2, 3)), "b": nn.Parameter(torch.zeros(4))}
    sums = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    (copied,) = pieces_of(sums, parameters)
    assert copied.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    assert copied.data_ptr() != sums["a"].data_ptr()
    vector = torch.arange(10.0)
    views = {"a": vector[:6].view(2, 3), "b": vector[6:]}
    assert pieces_of(views, parameters)[0] is vector
    for other in ({"a": views["a"], "b": vector[5:9]}, {"a": vector[4:].view(2, 3), "b": vector[:4]}):
        (copied,) = pieces_of(other, parameters)  # other places, or another order
        assert torch.equal(copied, torch.cat([x.reshape(-1) for x in other.values()]))
    wide = pieces_of({**sums, "b": torch.ones(4, dtype=torch.float64)}, parameters)
    assert [x.dtype for x in wide] == [torch.float64, torch.float64]
    # Sums that lie in memory in another order come as the coordinates do.
    turned = pieces_of({"a": torch.arange(6.0).view(3, 2).t(), "b": torch.ones(4)}, parameters)
    assert turned[0].tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 1.0, 1.0, 1.0, 1.0]
