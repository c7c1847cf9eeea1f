"""What other libraries claim, attacked: Opacus, opake and jax_privacy in the orders that people use.

Each library trains a linear model in an environment of its own, with its defaults, as its documentation says
(`benchmarks/peers/audit_*.py`); three epochs, batches of 5 %, noise multiplier 1 (of correlated noise: as named). The
gradient of an example is the example itself. `one run`: every example is a canary in a coordinate of its own, there by
a secret coin. `many runs`: one canary; all others have the opposite gradient, so that a batch without one of them
shows. Scores are `anyorder.audit.from_rows`, or likelihood ratios where steps are secret (`order secret`).

Rows, epsilon at delta 1e-5 where no other is named:

    LIBRARY, ORDER: claimed      ours: what holds for this order by this package's accounting;  peer: what is printed;
                                 ratio: printed over held, 1 or more where the print can be relied on
    LIBRARY, ORDER: ATTACK       lower bounds at confidence 95 %;  ours: the same attack on this package's own run;
                                 peer: on theirs;  ratio: the bound on theirs over what they claim, above 1: broken
    LIBRARY, ORDER: ATTACK, p    the probability, at most, of what was seen if the claim holds, from "clopper_pearson"
                                 at delta 1e-5 and 1e-2 together; with the verdict, REFUTED where it is below 1e-6

One bound in twenty may lie above a true and tight claim; verdicts are those of p. "f_dp" is for Gaussian mechanisms
only, so not for secret steps. "clopper_pearson" asks that canaries do not disturb each other: true of many runs, and
here also of canaries in coordinates of their own, with the independent noise that these libraries state. Its thresholds
stand in this file, fixed beforehand. Where steps are secret the attack is the best test for one who knows the groups
and nothing else.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import logsumexp
from torch.utils.data import DataLoader, TensorDataset

import anyorder as ao
from anyorder.accounting.curves import Gaussian, Sampled
from anyorder.audit import epsilon_lower_bound, from_rows, p_value
from anyorder.audit.result import REFUTED
from benchmarks._peers import OPACUS, OPAKE, interpreter
from benchmarks._report import Row
from benchmarks.peers.one_hot import OneHot

JAX_PRIVACY = ("jax-privacy==2.0.0", "keras==3.15.*")
DELTAS = (1e-5, 1e-2)
EPOCHS, SHARE = 3, 20  # batches an epoch
MANY = DELTAS[1]  # where some hundred runs can tell anything


KNOWN = {1e-5: 2.7, 1e-2: 1.6}  # thresholds of a N(0 or sqrt(3), 1) score
SECRET = {1e-5: 3.0, 1e-2: 1.5}  # of a log likelihood ratio


@dataclass
class Attack:
    """Scores of one attack on both, the methods whose assumptions hold, thresholds."""

    name: str
    methods: tuple[str, ...]
    delta: float
    thresholds: dict[float, float]
    peer: np.ndarray
    coins: np.ndarray
    ours: np.ndarray | None = None
    our_coins: np.ndarray | None = None

    @property
    def both(self) -> tuple[tuple[np.ndarray | None, np.ndarray | None], tuple[np.ndarray, np.ndarray]]:
        """Scores and coins: ours, the peer's."""
        return (self.ours, self.our_coins), (self.peer, self.coins)


@dataclass
class Case:
    """A library in an order: its claims, what holds, and attacks."""

    name: str
    claimed: dict[float, float]
    holds: float | None
    attacks: list[Attack]
    our_claim: dict[float, float] = field(default_factory=dict)


def rows(quick: bool) -> Iterator[Row]:
    """Attack all."""
    os.environ.setdefault("KERAS_BACKEND", "jax")  # else importing Keras asks for another library
    for cases in (opacus, opake, jax_privacy):
        for case in cases(quick):
            yield from shown(case)


def shown(case: Case) -> Iterator[Row]:
    """The rows of a case."""
    claim = case.claimed[DELTAS[0]]
    yield Row(f"{case.name}: claimed", case.holds, claim, None if case.holds is None else claim / case.holds, "epsilon")
    for attack in case.attacks:
        at = "" if attack.delta == DELTAS[0] else f" at delta {attack.delta:g}"
        claim = case.claimed[attack.delta]
        for method in attack.methods:
            ours, peer = (_bound(attack, method, *pairs) for pairs in attack.both)
            name = f"{case.name}: {attack.name}, {method}{at} (claimed {claim:.2f})"
            yield Row(name, ours, peer, peer / claim, "epsilon")
        [ours, peer] = [
            _p(attack, claims, *pairs)
            for claims, pairs in zip((case.our_claim, case.claimed), attack.both, strict=True)
        ]
        verdict = "REFUTED" if peer < REFUTED else "not refuted"
        yield Row(f"{case.name}: {attack.name}, p: {verdict}", ours, peer, None, "probability")


def _bound(attack: Attack, method: str, scores: np.ndarray | None, coins: np.ndarray | None) -> float | None:
    if scores is None:
        return None
    options = {"threshold": attack.thresholds[attack.delta]} if method == "clopper_pearson" else {}
    return epsilon_lower_bound(scores, coins, attack.delta, method=method, **options)


def _p(
    attack: Attack, claimed: dict[float, float], scores: np.ndarray | None, coins: np.ndarray | None
) -> float | None:
    """The p-value of what is claimed at all deltas together."""
    if scores is None:
        return None
    found = [
        p_value(scores, coins, (epsilon, delta), method="clopper_pearson", threshold=attack.thresholds[delta])
        for delta, epsilon in claimed.items()
    ]
    return min(1.0, len(found) * min(found))


def opacus(quick: bool) -> Iterator[Case]:
    """Sequential and shuffled loaders with poisson_sampling=False, and its default, Poisson."""
    count, runs = (2000, 300) if quick else (8000, 4000)
    for order in ("sequential", "shuffled", "poisson"):
        coins, (released, known), said = trained(OPACUS, "opacus", "audit_opacus.py", order, count)
        ours = Ours(order, count)
        attacks = [one_run(order, released, known, coins, ours)]
        if order == "shuffled":
            attacks += many_runs(runs)
        yield Case(f"opacus {said['version']}, {order}", said["claimed"], ours.plan.epsilon, attacks, ours.claimed)


def one_run(order: str, released: np.ndarray, known: dict[str, np.ndarray], coins: np.ndarray, ours: "Ours") -> Attack:
    """Independent noise; steps as the loader had them, or secret ones."""
    secret = order in ("poisson", "plan")
    q = 1 / SHARE if secret else None
    steps = "all" if secret else known["steps"]
    claim = (1.0, DELTAS[0])  # scores do not depend on it
    common = {"noise_std": known.get("noise_std", 1.0), "claim": claim, "sampling_probability": q}
    peer = from_rows(released, canaries=np.arange(len(coins)), included=coins, steps=steps, **common)
    own = from_rows(
        ours.released, canaries=np.arange(ours.count), included=ours.coins, claim=claim,
        steps="all" if secret else ours.steps, noise_std=ours.plan.noise_std, sampling_probability=q,
    )  # fmt: skip
    name = "one run" if secret else "one run, order known"
    methods = ("one_run", "clopper_pearson") if secret else ("f_dp", "one_run", "clopper_pearson")
    # scores in standard deviations
    scale = 1.0 if secret else common["noise_std"]
    thresholds = SECRET if secret else KNOWN
    return Attack(name, methods, DELTAS[0], thresholds, peer.scores / scale, coins, own.scores / ours.std, ours.coins)


def many_runs(runs: int) -> list[Attack]:
    """Runs of a tiny model, a shuffled loader, one canary: for those who know the order, and for those who do not."""
    coins, (released, known), _ = trained(
        OPACUS, "opacus", "audit_opacus.py", "shuffled", runs, kind="many", examples=SHARE, batch_size=1
    )
    plan = Ours.planned("shuffled", SHARE)
    our_coins = np.random.default_rng().random(min(runs // 5, 300)) < 0.5
    own = [Ours.train(plan, "shuffled", line(coin), 1) for coin in our_coins]
    peer = two_scores(released, known["steps"])
    ours = two_scores(np.stack([rows[:, 0] for rows, _ in own]), np.stack([steps[0] for _, steps in own]))
    return [
        Attack(f"many runs, order {word}", ("clopper_pearson",), MANY, thresholds, theirs, coins, mine, our_coins)
        for word, thresholds, theirs, mine in zip(("known", "secret"), (KNOWN, SECRET), peer, ours, strict=True)
    ]


def line(coin: bool) -> TensorDataset:
    """All examples are -1 but the first, which is 1 or zero."""
    x = -torch.ones(SHARE, 1)
    x[0] = float(coin)
    return TensorDataset(x, torch.arange(SHARE))


def two_scores(released: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of (runs, n) released sums: for those who know the canary's (runs, epochs) steps, and for those who do not."""
    y = released + 1  # of the others: 0, but 1 at the step without one of them, and 2 where it is the canary
    known = (np.take_along_axis(y, steps, axis=1) - 1).sum(axis=1) / np.sqrt(EPOCHS)
    epochs = y.reshape(len(y), EPOCHS, SHARE)
    return known, (logsumexp(2 * epochs - 2, axis=2) - logsumexp(epochs - 0.5, axis=2)).sum(axis=1)


def opake(quick: bool) -> Iterator[Case]:
    """Its pairs of mechanism, sampler and accountant."""
    count = 2000 if quick else 4000
    names = {
        "sequential": ("BLT, sequential", 2.0), "poisson": ("independent, Poisson", 1.0),
        "cyclic": ("banded, cyclic Poisson", 1.0), "bins": ("banded inverse, balls in bins", 2.0),
    }  # fmt: skip
    for order, (name, sigma) in names.items():
        coins, (released, known), said = trained(OPAKE, "opake", "audit_opake.py", order, count, noise_multiplier=sigma)
        holds, scores = correlated(order, released, known, coins, sigma, said)
        open_order = order == "sequential"
        methods = (("f_dp",) if open_order else ()) + ("one_run", "clopper_pearson")
        label = "one run, order known" if open_order else "one run"
        attack = Attack(label, methods, DELTAS[0], KNOWN if open_order else SECRET, scores, coins)
        yield Case(f"opake {said['version']}, {name}, noise {sigma:g}", said["claimed"], holds, [attack])


def correlated(
    order: str,
    released: np.ndarray,
    known: dict[str, np.ndarray],
    coins: np.ndarray,
    sigma: float,
    said: dict[str, Any],
) -> tuple[float | None, np.ndarray]:
    """What holds, and scores, for correlated noise of a library, whitened by its own C."""
    n, count, c = len(released), len(coins), known.get("strategy")
    common = {
        "canaries": np.arange(count),
        "included": coins,
        "claim": (1.0, DELTAS[0]),
        "noise_std": sigma,
        "strategy": c,
    }
    match order:
        case "sequential":
            found = from_rows(released, steps=known["steps"], **common)
            return Gaussian(float(found.mus.max())).epsilon(DELTAS[0]), found.scores / sigma
        case "poisson" | "plan":
            return Sampled(sigma, 1 / SHARE, n).epsilon(DELTAS[0]), from_rows(
                released, steps="all", sampling_probability=1 / SHARE, **common
            ).scores
        case "cyclic":
            bands = said["bands"]
            steps = np.stack([np.arange(g, n, bands) for g in known["group"]])
            scores = from_rows(released, steps=steps, sampling_probability=bands / SHARE, **common).scores
            largest = np.linalg.norm(c, axis=0).max()
            return Sampled(sigma / largest, bands / SHARE, -(-n // bands)).epsilon(DELTAS[0]), scores
        case "bins":  # every step of the first epoch may be a canary's: a mixture over them
            pi = np.stack([np.arange(n) % SHARE == j for j in range(SHARE)], axis=1).astype(float)
            means, white = c @ pi / sigma, c @ released / sigma
            ratio = means.T @ white - np.square(means).sum(axis=0)[:, None] / 2
            return None, logsumexp(ratio, axis=0)  # this package has no accounting of it
        case other:
            raise ValueError(other)


def jax_privacy(quick: bool) -> Iterator[Case]:
    """Keras models made private, and the plans of its library."""
    count = 2000 if quick else 4000
    for order in ("sequential", "shuffled", "poisson"):
        coins, (released, known), said = trained(
            JAX_PRIVACY, "jax_privacy.keras_api", "audit_jax_privacy.py", order, count, epsilon=2.87
        )
        sigma = said["noise_multiplier"]
        ours = Ours(order, count, sigma)
        attack = one_run(order, released, known | {"noise_std": sigma}, coins, ours)
        name = f"jax_privacy {said['version']}, Keras, {order}, noise {sigma:.3g}"
        yield Case(name, said["claimed"], ours.plan.epsilon, [attack], ours.claimed)
    for order, name in (("plan", "plan, Poisson"), ("cyclic", "plan of 4 bands, cyclic Poisson")):
        coins, (released, known), said = trained(
            JAX_PRIVACY, "jax_privacy.keras_api", "audit_jax_privacy.py", order, count
        )
        holds, scores = correlated(order, released, known, coins, float(known.get("std", 1.0)), said)
        attack = Attack("one run", ("one_run", "clopper_pearson"), DELTAS[0], SECRET, scores, coins)
        yield Case(f"jax_privacy {said['version']}, {name}", said["claimed"], holds, [attack])
    coins, (released, known), said = trained(
        JAX_PRIVACY, "jax_privacy.keras_api", "audit_jax_privacy.py", "example", count, epsilon=2.87
    )
    found = from_rows(
        released, canaries=np.arange(count), included=coins, claim=(1.0, DELTAS[0]), steps=known["steps"],
        noise_std=said["std"], neighbours="replace-one",
    )  # fmt: skip
    holds, scores = Gaussian(float(found.mus.max())).epsilon(DELTAS[0]), found.scores / said["std"]
    attack = Attack("one run, order known", ("f_dp", "one_run", "clopper_pearson"), DELTAS[0], KNOWN, scores, coins)
    yield Case(f"jax_privacy {said['version']}, its example, shuffled", said["claimed"], holds, [attack])


class Ours:
    """The same training by this package: the linear model, one example a coordinate, in the order that is named."""

    def __init__(self, order: str, count: int, sigma: float = 1.0) -> None:
        self.count, self.coins = count, np.random.default_rng().random(count) < 0.5
        self.plan = self.planned(order, count, sigma)
        self.std = self.plan.noise_std
        self.claimed = {delta: self.plan.curve.epsilon(delta) for delta in DELTAS}
        self.released, self.steps = self.train(self.plan, order, OneHot(self.coins), count)

    @staticmethod
    def planned(order: str, count: int, sigma: float = 1.0) -> ao.Plan:
        """Independent noise in an order."""
        return ao.plan(
            dataset_size=count, batch_size=count // SHARE, epochs=EPOCHS, order=order, noise_multiplier=sigma,
            mechanism="auto" if order == "poisson" else "independent", delta=DELTAS[0],
        )  # fmt: skip

    @staticmethod
    def train(plan: ao.Plan, order: str, data: Any, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The loop of any user: released sums (steps, size), and the steps of each example (examples, epochs)."""
        model = torch.nn.Linear(size, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = len(data) // SHARE
        loader: Any = DataLoader(data, batch_size=batch, shuffle=order != "sequential")
        private, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
        released, steps, before = [], np.full((len(data), EPOCHS), -1), torch.zeros(size)
        for epoch in range(EPOCHS):
            for x, which in loader:
                steps[which, epoch] = len(released)
                optimizer.zero_grad()
                (-private(x)).mean().backward()
                optimizer.step()
                after = model.weight.detach()[0].clone()
                released.append((after - before).numpy() * batch)
                before = after
        return np.stack(released), steps


def trained(
    packages: tuple[str, ...], module: str, script: str, order: str, count: int, **settings: Any
) -> tuple[np.ndarray, tuple[np.ndarray, dict[str, np.ndarray]], dict[str, Any]]:
    """Coins, what the library released and what is known of its order, and what it said."""
    coins = np.random.default_rng().random(count) < 0.5
    task = {
        "kind": "one", "order": order, "batch_size": count // SHARE, "epochs": EPOCHS, "noise_multiplier": 1.0,
        "deltas": DELTAS,
    } | settings  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.npz"), Path(folder, "made.npz")
        np.savez(given, task=json.dumps(task), coins=coins)
        done = subprocess.run(
            [interpreter(*packages, module=module), Path(__file__).parents[1] / "peers" / script, given, made],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            done.check_returncode()
        with np.load(made) as found:
            known = {name: found[name] for name in found.files}
    said = json.loads(done.stdout.splitlines()[-1])
    said["claimed"] = {float(delta): epsilon for delta, epsilon in said["claimed"].items()}
    return coins, (known.pop("released"), known), said
