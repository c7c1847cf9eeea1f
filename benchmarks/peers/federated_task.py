"""The task that simulators are timed on, the same for all: 1000 users of 50 images, 50 of them a round.

The model is the network for MNIST of Kairouz et al. 2021, Table 2 (26 010 parameters); clients go once through their
examples, in batches of 10. Images are random numbers: nothing but time is looked at.
"""

import os
import resource
from pathlib import Path

import torch
from torch import nn

USERS, EXAMPLES, COHORT, BATCH, LR = 1000, 50, 50, 10, 0.05
CLIP, NOISE = 1.0, 1.0


def network(channels_last: bool = False) -> nn.Sequential:
    """The model; with its weights laid out channels last, for whoever is faster so."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip
    return layers.to(memory_format=torch.channels_last) if channels_last else layers


def data(channels_last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (users, examples, 1, 28, 28) and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(USERS, EXAMPLES, 1, 28, 28, generator=generator)
    y = torch.randint(10, (USERS, EXAMPLES), generator=generator)
    return (x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if channels_last else x), y


def cpu_seconds() -> float:
    """User and system seconds of this process, and of the processes that it has ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def cpu_seconds_of_tree() -> float:
    """As `cpu_seconds`, with every process below this one that is still alive."""
    ticks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    inside, own = {os.getpid()}, 0
    while len(inside) > own:
        own = len(inside)
        inside |= {pid for pid, parent in parents.items() if parent in inside}
    return sum(ticks[pid] for pid in inside) / os.sysconf("SC_CLK_TCK")
