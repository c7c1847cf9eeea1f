"""What the server takes for a round's messages: one by one with `Round.add`, and all at once with `Round.add_rows`.

The cohort and the network of `speed`: 50 messages of 26 010 numbers. Milliseconds of the processor, the least of some
rounds, from `open` to the end of `close`; noise, optimizer and ledger are in both.
"""

import time
from collections.abc import Iterator

import torch

import anyorder as ao
from anyorder.participation import MinSeparation
from benchmarks._report import Row
from benchmarks.federations.speed import APART, MECHANISMS, ROUNDS
from benchmarks.peers.federated_task import CLIP, COHORT, USERS, network


def rows(quick: bool) -> Iterator[Row]:
    """One row: a ratio of 1 is that a message by itself costs what a row costs."""
    torch.set_num_threads(1)
    plan = ao.plan(
        batch_size=COHORT, order=MinSeparation(ROUNDS, APART), epsilon=8, delta=1e-6, clip_norm=CLIP,
        mechanism=MECHANISMS["banded"], unit="user",
    )  # fmt: skip
    model = network()
    server = ao.federated.Server(plan, model, torch.optim.SGD(model.parameters(), lr=1.0))
    made = torch.randn(COHORT, server.layout.size)
    messages = [{name: part.clone() for name, part in server.layout.named(row).items()} for row in made]
    found: dict[bool, list[float]] = {True: [], False: []}
    for step in range(8 if quick else 40):
        cohort = [(step * COHORT + i) % USERS for i in range(COHORT)]
        alone = step % 2 == 0
        start = time.process_time()
        with server.open() as opened:
            if alone:
                for user, message in zip(cohort, messages, strict=True):
                    opened.add(user, message)
            else:
                opened.add_rows(cohort, made)
        found[alone].append(1e3 * (time.process_time() - start))
    one, all_ = min(found[True]), min(found[False])
    yield Row(f"{COHORT} messages by add; peer: add_rows once", one, all_, all_ / one, "CPU ms a round")
