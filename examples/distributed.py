"""Several processes train one private model: each has its part of the data, of the noise, and of nothing else's work.

Run: torchrun --nproc-per-node 2 examples/distributed.py          (data parallel, gloo on the CPU or NCCL on GPUs)
     torchrun --nproc-per-node 2 examples/distributed.py --shard  (FSDP2: parameters and optimizer sharded too)
     python examples/distributed.py                               (one process: the same loop)
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import anyorder as ao

EXAMPLES, BATCH, EPOCHS = 512, 64, 3


def main() -> None:
    """Train a small network on two clouds of points."""
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    generator = torch.Generator().manual_seed(0)
    y = torch.arange(EXAMPLES) % 2
    data = TensorDataset(torch.randn(EXAMPLES, 8, generator=generator) + 2.0 * y[:, None], y)
    sampler = DistributedSampler(data, ranks, rank, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH // ranks, sampler=sampler)

    plan = ao.plan(
        loader=loader, epochs=EPOCHS, epsilon=8, delta=1e-5, mechanism="tree", optimizer=ao.SGD(momentum=0.9)
    )
    engine = ao.PrivacyEngine(plan)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    if "--shard" in sys.argv:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = engine.make_private(model, optimizer, loader)

    for _ in range(EPOCHS):
        for x, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), target.to(device)).backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        right = (model(data.tensors[0].to(device)).argmax(1).cpu() == y).float().mean().item()
    if rank == 0:
        print(f"{ranks} process(es), {engine.step} steps, accuracy {right:.2f} at epsilon {plan.epsilon:.2f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
