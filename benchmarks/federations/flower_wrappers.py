"""What Flower's own wrappers for differential privacy do to epsilon, each beside the server here, in the same scenario.

`python -m benchmarks.federated --only flower_wrappers`. Flower's strategies aggregate real messages of Flower; no
network is needed for that. A row's unit says what is counted:

- "sigma": the true noise multiplier, noise_std / sensitivity, where 1 was asked for. noise_std is measured from what
  was released, the sensitivity as how far one client moves the mean. Less than 1 is less privacy than was asked for.
- "epsilon >=": a lower bound at delta 1e-5, with 95 % confidence, that an attack shows against a claim of epsilon 4.4
  (sigma 1, one round): one client is there or sends zeros, by a coin, and one looks at its direction in the result.
- "rounds": of ten, lost. "norm": how far one message moves the model's sum, where 1 is the clip norm.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.participation import SingleEpoch
from anyorder.plan.planner import plan_at_sigma
from benchmarks._report import Row

SIZE, CLIENTS, DELTA = 20_000, 10, 1e-5

Update = dict[str, np.ndarray[Any, Any]]
Released = np.ndarray[Any, Any]


def rows(quick: bool) -> Iterator[Row]:
    """Each wrapper beside the server."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    trials = 200 if quick else 1000
    yield from _weights(trials)
    yield _compared("server-side fixed, equal counts", "sigma", _sigma(ours), _sigma(fixed))
    yield _compared(
        "server-side fixed, one of ten answers", "sigma", _sigma(ours, CLIENTS - 1), _sigma(fixed, CLIENTS - 1)
    )
    noise, norm = _adaptive(20)
    yield _compared("server-side adaptive, all messages longer, rate 0.2", "sigma", _sigma(ours), noise)
    yield Row("the same: its norm after 20 rounds, 0.4 at first", None, norm, None, "norm")
    yield _compared("a client whose change is zero", "rounds", _lost(ours, [_zeros()]), _lost(fixed, [_zeros()]))
    yield _compared("a client that fails", "rounds", _lost(ours, [None]), _lost(fixed, [None]))
    nan = {"w": np.full(SIZE, np.nan, np.float32)}
    yield _compared(
        "a client whose change is NaN: the model is lost", "rounds", _lost(ours, [nan]), _lost(fixed, [nan])
    )
    yield _compared("a counter (int64 scalar) that moves by 1000", "norm", _counter(ours), _counter(fixed))
    yield _compared("client-side fixed, a client without the mod", "norm", _unclipped(ours), _unclipped(client_side))
    yield _compared("client-side fixed, a change of zero: clients that fail", "rounds", _mod_ours(), _mod_theirs())


# -- one round of ours and of theirs -----------------------------------------------------------------------------------


def ours(updates: list[Update | None], counts: list[int], seed: int) -> Released | None:
    """The change of the model in one round of the server here; counts are never told."""
    model = torch.nn.Module()
    first = updates[0] or updates[1] or {}
    names = [name for name in first if name != "steps"]
    for name in names:
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(len(first[name]))))
    plan = plan_at_sigma(
        1.0, order=SingleEpoch(1), batch_size=CLIENTS, delta=DELTA, mechanism="independent", unit="user"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    server = ao.federated.Server(plan, model, optimizer, key=seed.to_bytes(32, "big"))
    shared = {i: {name: u[name] for name in names} for i, u in enumerate(updates) if u is not None}
    server.round(shared)
    return torch.cat([p.detach() for p in model.parameters()]).numpy()


def fixed(updates: list[Update | None], counts: list[int], seed: int) -> Released | None:
    """Server-side fixed clipping around FedAvg."""
    return _theirs(DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, CLIENTS), updates, counts, seed)


def client_side(updates: list[Update | None], counts: list[int], seed: int) -> Released | None:
    """Client-side fixed clipping: what the server does with messages as they come."""
    return _theirs(DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, CLIENTS), updates, counts, seed)


def _theirs(strategy: Any, updates: list[Update | None], counts: list[int], seed: int) -> Released | None:
    np.random.seed(seed)  # noqa: NPY002 - where their noise comes from
    names = list(updates[0] or updates[1] or {})
    start = {name: np.zeros_like((updates[0] or updates[1] or {})[name]) for name in names}
    strategy.current_arrays = ArrayRecord({name: Array(value) for name, value in start.items()})
    replies = [_reply(node, u, n) for node, (u, n) in enumerate(zip(updates, counts, strict=True))]
    arrays, _ = strategy.aggregate_train(1, replies)
    if arrays is None:
        return None
    return np.concatenate([np.atleast_1d(array).ravel() for array in arrays.to_numpy_ndarrays()])


_NUMBERS = count(1)


def _reply(node: int, update: Update | None, examples: int) -> Message:
    if update is None:
        asked = Message(RecordDict(), node, "train")
        return Message(Error(code=2, reason="failed"), reply_to=asked)
    arrays = ArrayRecord({name: Array(np.asarray(value)) for name, value in update.items()})
    metrics = MetricRecord({"num-examples": examples, "train_loss": 0.5})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), node, "train")


# -- what is measured --------------------------------------------------------------------------------------------------


def _zeros() -> Update:
    return {"w": np.zeros(SIZE, np.float32)}


def _direction() -> Released:
    return np.full(SIZE, SIZE**-0.5, np.float32)


def _others(number: int) -> list[Update]:
    """Clients of norm 1/2, so that nobody is cut but by the norm that is asked about."""
    source = np.random.default_rng(5)
    made = source.standard_normal((number, SIZE)).astype(np.float32)
    return [{"w": 0.5 * row / np.linalg.norm(row)} for row in made]


def _sigma(one: Callable[..., Released | None], missing: int = 0, counts: list[int] | None = None) -> float:
    """noise_std / sensitivity: the same noise with the client's whole message and with zeros, and without either."""
    number = CLIENTS - 1 - missing
    counts = counts or [1] * (number + 1)
    small = {"w": np.full(SIZE, 1e-6 * SIZE**-0.5, np.float32)}  # zeros would be a division by zero there
    with_it = one([{"w": 5 * _direction()}, *_others(number)], counts, 1)
    without = one([small, *_others(number)], counts, 1)
    assert with_it is not None
    assert without is not None
    moved = float(np.linalg.norm(with_it - without))
    spread = one([{"w": 5 * _direction()}, *_others(number)], counts, 2)
    assert spread is not None
    noise = float(np.std(spread - with_it)) / 2**0.5  # the same messages and other noise: the noise alone
    return noise / moved


def _weights(trials: int) -> Iterator[Row]:
    counts = [910] + [10] * (CLIENTS - 1)
    yield _compared(
        "server-side fixed, counts 910 and 9 x 10", "sigma", _sigma(ours, 0, counts), _sigma(fixed, 0, counts)
    )
    yield _compared(
        "the same, attacked", "epsilon >=", _attacked(ours, counts, trials), _attacked(fixed, counts, trials)
    )


def _attacked(one: Callable[..., Released | None], counts: list[int], trials: int) -> float:
    """The lower bound of epsilon that the score along the client's direction shows."""
    coins = np.random.default_rng(9).integers(0, 2, trials).astype(bool)
    direction = np.array([1.0, 0.0], np.float32)
    small = {"w": 1e-6 * direction}
    scores = []
    for trial, there in enumerate(coins):
        seen = one([{"w": direction} if there else small, *[small] * (CLIENTS - 1)], counts, 100 + trial)
        assert seen is not None
        scores.append(float(seen[0]))
    audited = ao.audit.from_scores(scores, included=coins, claim=Gaussian(1.0), delta=DELTA, independent=True)
    return float(audited.lower_bound())


def _adaptive(rounds: int) -> tuple[float, float]:
    """(sigma of the first round, the norm after some rounds) where all messages are longer than the norm.

    A message is cut at the norm of its round, which the noise of the round is no more for; with the default rate.
    """
    clients, size, norm, sigma = 100, 4000, 0.4, []
    updates: list[Update | None] = [{"w": 2 * update["w"][:size]} for update in _others(clients)]
    for seed in range(10):
        strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, clients, initial_clipping_norm=norm)
        released = _theirs(strategy, updates, [1] * clients, seed)
        assert released is not None
        cut = [norm / np.linalg.norm(u["w"]) * u["w"] for u in updates if u is not None]
        noise = float(np.std(released - np.mean(cut, axis=0)))
        sigma.append(noise / (norm / clients))
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, clients, initial_clipping_norm=norm)
    for seed in range(rounds):
        _theirs(strategy, updates, [1] * clients, seed)
    return float(np.mean(sigma)), float(strategy.clipping_norm)


def _lost(one: Callable[..., Released | None], bad: list[Update | None]) -> float:
    """Of ten rounds with such a client, how many end without a finite new model."""
    lost = 0
    for seed in range(10):
        try:
            released = one([*bad, *_others(CLIENTS - len(bad))], [1] * CLIENTS, seed)
        except ZeroDivisionError:
            released = None
        lost += released is None or not np.isfinite(released).all()
    return float(lost)


def _counter(one: Callable[..., Released | None]) -> float:
    """How far a counter of one client moves the mean, times the clients: BatchNorm's, say, which training raises."""

    def total(moves: int) -> float:
        updates: list[Update | None] = [{**u, "steps": np.asarray(0, np.int64)} for u in _others(CLIENTS)]
        first = updates[0]
        assert first is not None
        first["steps"] = np.asarray(moves, np.int64)
        released = one(updates, [1] * CLIENTS, 3)
        assert released is not None
        return float(released[-1]) if len(released) > SIZE else 0.0

    return abs(total(1000) - total(0)) * CLIENTS


def _unclipped(one: Callable[..., Released | None]) -> float:
    """How far a message of norm 50, which no device has cut, moves the sum."""
    with_it = one([{"w": 50 * _direction()}, *_others(CLIENTS - 1)], [1] * CLIENTS, 4)
    without = one([{"w": 1e-6 * _direction()}, *_others(CLIENTS - 1)], [1] * CLIENTS, 4)
    assert with_it is not None
    assert without is not None
    return float(np.linalg.norm(with_it - without)) * CLIENTS


def _mod_theirs() -> float:
    """Ten clients whose training changes nothing, through Flower's mod."""
    from flwr.app import ConfigRecord, Context

    failed = 0
    for node in range(10):
        arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
        asked = Message(RecordDict({"arrays": arrays, "config": ConfigRecord({"clipping_norm": 1.0})}), node, "train")

        def unchanged(message: Message, context: Context) -> Message:
            return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

        try:
            fixedclipping_mod(asked, Context(1, node, {}, RecordDict(), {}), unchanged)
        except ZeroDivisionError:
            failed += 1
    return float(failed)


def _mod_ours() -> float:
    """The same through ours: a change of zero is zero."""
    clipped = ao.federated.clip_message({"w": torch.zeros(4)}, 1.0)
    return 0.0 if not clipped["w"].any() else 10.0


def _compared(name: str, unit: str, own: float, peer: float) -> Row:
    return Row(name, own, peer, peer / own if own else None, unit)
