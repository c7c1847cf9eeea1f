"""Small federations, and a script that simulates one on several ranks.

python -m torch.distributed.run --standalone --nproc-per-node 2 simulated.py FOLDER
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anyorder.errors import TrainingError
from anyorder.federated import LocalTraining, Server, assist, simulate, simulation
from anyorder.federated.cohorts import UniformAvailability
from anyorder.participation import MinSeparation

sys.path.insert(0, str(Path(__file__).parents[1]))  # where this is run by itself

from plans import flat_plan

KEY = bytes(range(32))
USERS, ROUNDS, GOAL, APART = 60, 6, 24, 2


def examples(num_users=USERS, seed=0):
    """{id: (x, y)}: users have 1 to 9 examples of two classes."""
    chance = torch.Generator().manual_seed(seed)
    users = {}
    for i in range(num_users):
        x = torch.randn(1 + i % 9, 5, generator=chance)
        users[f"user {i}"] = (x, (x.sum(1) > 0).long())
    return users


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


TRAINING = LocalTraining(nn.functional.cross_entropy, lr=0.3, batch_size=4)


class Shifted(nn.Module):
    """Adds a buffer to its inputs."""

    def __init__(self, shift):
        super().__init__()
        self.layers = network()
        self.register_buffer("shift", torch.full((5,), shift))

    def forward(self, x):
        return self.layers(x + self.shift)


def start(checkpoint=None, model=None, **others):
    rule = MinSeparation(ROUNDS, APART)
    options = {"batch_size": GOAL, "epsilon": 8, "delta": 1e-5, "mechanism": "tree", "clip_norm": 0.5, "unit": "user"}
    plan = flat_plan(participation=rule, **{"momentum": 0.9, **options, **others})
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return Server(plan, model, optimizer, report_goal=plan.batch_size, checkpoint=checkpoint, key=KEY)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def whole_run(**options):
    """The released models of all rounds, (rounds, size), and the server."""
    server, seen = start(), []
    options = {"availability": UniformAvailability(0.8), "drop_out": 0.2, "seed": 3, **options}
    simulate(server, examples(), TRAINING, on_round=lambda done, model: seen.append(weights(model)), **options)
    return torch.stack(seen), server


def many_blocks():
    """As `whole_run`, in blocks of four clients, of a model with a buffer."""
    server, seen, usual = start(model=Shifted(0.5)), [], simulation._BLOCK
    simulation._BLOCK = 4
    try:
        simulate(server, examples(), TRAINING, seed=3, on_round=lambda done, model: seen.append(weights(model)))
    finally:
        simulation._BLOCK = usual
    return torch.stack(seen)


class Failing(nn.Module):
    """A loss that raises on the second rank, and nowhere else."""

    def forward(self, output, target):
        if dist.get_rank() == 1:
            raise ValueError("no such loss on this rank")
        return nn.functional.cross_entropy(output, target)


def scenario_same_bits(folder):
    if dist.get_rank():
        other = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))  # the first rank's weights count
        assist(other, examples(), TRAINING)
        return
    torch.save(whole_run()[0], folder / "models")


def scenario_same_bits_of_many_blocks(folder):
    if dist.get_rank():
        assist(Shifted(-3.0), examples(), TRAINING)  # the first rank's buffers count too
        return
    torch.save(many_blocks(), folder / "models of many blocks")


def scenario_a_failure_is_everybodys(folder):
    failing = LocalTraining(Failing(), lr=0.3, batch_size=4)
    if dist.get_rank():
        with pytest.raises(ValueError, match="no such loss"):
            assist(network(), examples(), failing)
        return
    server = start()
    with pytest.raises(TrainingError, match="rank 1: ValueError: no such loss"):
        simulate(server, examples(), failing)
    assert server.step == 0
    assert torch.equal(weights(server.model), weights(network()))
    server.round({})  # and nothing is in its way
    assert server.step == 1


def scenario_what_the_first_rank_refuses_ends_the_others(folder):
    """on_round raises, as Ctrl-C would: the helpers leave, and the next simulation begins."""
    if dist.get_rank():
        assist(network(), examples(), TRAINING)
        return

    def stop(done, model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(start(), examples(), TRAINING, on_round=stop)


def scenario_one_dies(folder):
    dist.barrier()
    if dist.get_rank():
        os.kill(os.getpid(), 9)
    with pytest.raises(TrainingError, match="another process of this simulation ended"):
        simulate(start(folder / "run.ckpt"), examples(), TRAINING)
    (folder / "noticed").touch()


def main(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    scenario_same_bits(folder)
    scenario_same_bits_of_many_blocks(folder)
    scenario_what_the_first_rank_refuses_ends_the_others(folder)
    scenario_a_failure_is_everybodys(folder)
    (folder / f"done {dist.get_rank()}").touch()
    dist.barrier()
    scenario_one_dies(folder)
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's own end (pytorch/pytorch, issue 190489)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
