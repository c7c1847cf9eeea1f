"""What the ranks of `test_shapes.py` do: texts of several lengths, of which each rank has others."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

import anyorder as ao

KEY = bytes(32)
LENGTHS = [8, 5, 20, 7, 8, 40, 3, 12]  # of the two ranks in turn


def texts():
    generator = torch.Generator()
    return [(torch.randint(1, 9, (n,), generator=generator.manual_seed(i)), i % 2) for i, n in enumerate(LENGTHS)]


def collate(rows):
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.gru, self.out = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.gru(self.words(x))[0][:, -1])


def trained():
    """The weights after one epoch of two steps."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model, data = Last(), texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = DistributedSampler(data, shuffle=False, drop_last=True) if ranks > 1 else None
    plan = ao.plan(
        dataset_size=8, batch_size=4, epochs=1, noise_multiplier=1e-6, delta=1e-5, mechanism="independent",
        order="fixed",
    )  # fmt: skip
    private, _, loader = ao.PrivacyEngine(plan, key=KEY).make_private(
        model, optimizer, DataLoader(data, 4 // ranks, sampler=sampler, collate_fn=collate), pad_to=(8, 16, 64)
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.save(trained(), f"{sys.argv[1]}.{dist.get_rank()}")
    dist.destroy_process_group()
