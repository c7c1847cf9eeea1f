"""CPU seconds a round: 1000 users x 50 images, 50 users a round, beside a plain loop, pfl-research 0.6 and Flower 1.41.

The task is that of `benchmarks/peers/federated_task.py`, the same for all: the network for MNIST of Kairouz et al. 2021
(26 010 parameters), one local epoch in batches of 10. One thread each; user and system time, of all processes.

Rows: ours is `ao.federated.simulate`, with clipping, noise and ledger; the ratio is peer / ours. Every
program runs in a process of its own, all take turns, and a number is the median over the rounds of all turns but the
first ones of each. Peers run as their users run them, and once more with weights and images laid out channels last, as
our loop does of itself; Flower averages without privacy.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn import functional as F

import anyorder as ao
from anyorder.federated.clients import Examples
from anyorder.participation import MinSeparation
from benchmarks._peers import FLOWER, PFL, interpreter
from benchmarks._report import Row, judged
from benchmarks.peers.federated_task import BATCH, CLIP, COHORT, LR, USERS, cpu_seconds, data, network

PEERS = Path(__file__).parents[1] / "peers"
ROUNDS, APART = 200, 10
MECHANISMS = {"gaussian": "independent", "banded": "banded, 10 bands", "blt": "blt"}


def rows(quick: bool) -> Iterator[Row]:
    """Ours with each noise beside each peer, and what the server itself takes."""
    turns, rounds = (1, 4) if quick else (5, 8)
    pfl, flower = interpreter(*PFL, module="pfl"), interpreter(*FLOWER, module="flwr")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        us = [sys.executable, "-m", "benchmarks.federations.speed"]
        commands = {
            **{f"ours, {kind}": [*us, kind, str(rounds)] for kind in MECHANISMS},
            "ours, banded, checkpoint": [*us, "banded", str(rounds), folder],
            "server alone": [*us, "server", str(rounds)],
            "loop": [*us, "loop", str(rounds)],
            "loop, channels last": [*us, "loop", str(rounds), "channels_last"],
        }
        for layout, words in (([], ""), (["channels_last"], ", channels last")):
            for kind in ("gaussian", "banded"):
                script = str(PEERS / "federated_pfl.py")
                commands[f"pfl-research, {kind}{words}"] = [pfl, script, kind, str(rounds), folder, *layout]
            commands[f"Flower{words}"] = [flower, str(PEERS / "federated_flower.py"), str(rounds), *layout]
        found: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(turns):
            for name, command in commands.items():
                found[name] += _measured(command)[2:]
    yield from _rows({name: median(times) for name, times in found.items()})


def _rows(found: dict[str, float]) -> Iterator[Row]:
    unit = "CPU s a round"

    def row(name: str, ours: str, peer: str, target: float | None = None) -> Row:
        ratio = found[peer] / found[ours]
        title = f"{name}: {peer}"
        return Row(title if target is None else judged(title, target, ratio), found[ours], found[peer], ratio, unit)

    for words in ("", ", channels last"):
        yield row("banded noise", "ours, banded", f"loop{words}")
        yield row("Gaussian noise", "ours, gaussian", f"pfl-research, gaussian{words}", 1.25)
        yield row("banded noise", "ours, banded", f"pfl-research, banded{words}", 1.25)
        yield row("banded noise", "ours, banded", f"Flower{words}", 4.0)
    for name in ("ours, blt", "ours, banded, checkpoint", "server alone"):
        yield Row(f"{name}", found[name], None, None, unit)


def _measured(command: Sequence[str]) -> list[float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


# -- what runs in a process of its own ---------------------------------------------------------------------------------


def main() -> None:
    """KIND ROUNDS [FOLDER]: print the CPU seconds of each round as JSON."""
    torch.set_num_threads(1)
    kind, rounds, more = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    x, y = data(bool(more) and kind == "loop")
    users = [(x[i], y[i]) for i in range(USERS)]
    if kind == "loop":
        times, model, random = [cpu_seconds()], network(bool(more)), np.random.default_rng(0)
        for _ in range(rounds + 1):
            _plain(model, users, random)
            times.append(cpu_seconds())
    else:
        times = _ours(kind, rounds, users, Path(more[0]) / f"{time.time_ns()}.ckpt" if more else None)
    print(json.dumps([after - before for before, after in pairwise(times)]))


class _Enough(Exception):
    """The rounds that are timed are made."""


def _ours(kind: str, rounds: int, users: list[Examples], checkpoint: Path | None) -> list[float]:
    """What the processor had done after each round of a simulation; of the server alone, on changes that are there."""
    plan = ao.plan(
        batch_size=COHORT, order=MinSeparation(ROUNDS, APART), epsilon=8, delta=1e-6, clip_norm=CLIP,
        mechanism=MECHANISMS.get(kind, MECHANISMS["banded"]), unit="user",
    )  # fmt: skip
    model = network()
    server = ao.federated.Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0), checkpoint=checkpoint)
    times = [cpu_seconds()]
    if kind == "server":
        made = torch.randn(COHORT, server.layout.size)
        for step in range(rounds + 1):
            cohort = [(step * COHORT + i) % USERS for i in range(COHORT)]
            with server.open() as round:
                round.add_rows(cohort, made)
            times.append(cpu_seconds())
        return times

    def clock(step: int, _: torch.nn.Module) -> None:
        times.append(cpu_seconds())
        if step > rounds:
            raise _Enough

    training = ao.federated.LocalTraining(F.cross_entropy, lr=LR, batch_size=BATCH)
    with suppress(_Enough):
        ao.federated.simulate(server, users, training, over_selection=1.0, on_round=clock)
    return times


def _plain(model: torch.nn.Module, users: list[Examples], random: np.random.Generator) -> None:
    """Federated averaging as one writes it, without privacy."""
    sent = {name: value.clone() for name, value in model.state_dict().items()}
    mean = {name: torch.zeros_like(value) for name, value in sent.items()}
    for user in random.choice(USERS, COHORT, replace=False):
        model.load_state_dict(sent)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        x, y = users[user]
        for xb, yb in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            mean[name] += value / COHORT
    model.load_state_dict(mean)


if __name__ == "__main__":
    main()
