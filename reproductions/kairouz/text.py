"""Next words by users, on Brown in place of Stack Overflow: what a benchmark measured, momentum, the vanilla tree.

The setting is that of docs/experiments.md: 5361 users, 214 rounds of 25, an LSTM of 32, one pass, delta 1e-4. Runs of
this file are lines of results/kairouz2021_text_runs.jsonl.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from benchmarks.federations.next_word import Brown, WordLSTM, accuracy, read_brown, word_loss
from benchmarks.federations.words import DELTA, RESULTS, SMALL

import anyorder as ao
from anyorder.federated import LocalTraining, Server
from anyorder.participation import SingleEpoch
from reproductions import _runs
from reproductions._claims import RESULTS as OURS
from reproductions._claims import Claim, Curves, Run
from reproductions._powers import decided

RUNS = OURS / "kairouz2021_text_runs.jsonl"
PAPER = "kairouz2021"
MEASURED = "python -m benchmarks.federated --only words"
SCALED = "On Brown: 5361 users, 214 rounds of 25, 23 432 weights, delta 1e-4 (docs/experiments.md)."


def measured(mechanism: str, epsilon: float) -> dict[int, float]:
    """Accuracies of one pass in percent by seed, as the benchmark kept them: of the rate that ran with most seeds."""
    rates: dict[float, dict[int, float]] = {}
    for row in map(json.loads, RESULTS.read_text().splitlines()):
        if (row["mechanism"], row["epsilon"], row["passes"], row["size"]["hidden"]) == (mechanism, epsilon, 1, 32):
            rates.setdefault(row["lr"], {})[row["seed"]] = 100 * row["accuracy"]
    return max(rates.values(), key=lambda found: (len(found), mean(found.values())))


def _is_level(differences: list[float]) -> bool:
    """Whether their mean is not above 0 by two standard errors."""
    return mean(differences) < 2 * stdev(differences) / len(differences) ** 0.5


def fig2a(run: Run) -> Iterator[Claim]:
    """Figure 2(a), 10 and the order of Table 4."""
    runs = {(name, e): measured(name, e) for name in ("tree", "poisson", "independent") for e in (2.0, 8.0)}
    seeds = sorted(set.intersection(*map(set, runs.values())))
    table = {cell: mean(found[seed] for seed in seeds) for cell, found in runs.items()}
    lead = [table["tree", e] - table["poisson", e] for e in (2.0, 8.0)]
    above = [table["tree", e] - table["independent", e] for e in (2.0, 8.0)]
    under = [table["poisson", e] - table["independent", e] for e in (2.0, 8.0)]
    names = {"tree": "DP-FTRLM", "poisson": "DP-SGDM", "independent": "DP-SGDM (no amplification)"}
    curves = {title: [(e, round(table[name, e], 2)) for e in (2.0, 8.0)] for name, title in names.items()}
    common: dict[str, Any] = {"seeds": tuple(seeds), "measured": MEASURED, "why": SCALED}

    def by_seed(one: str, other: str) -> list[list[float]]:
        return [[runs[one, e][s] - runs[other, e][s] for s in seeds] for e in (2.0, 8.0)]

    same = [e for e in (2.0, 8.0) if _is_level([runs["poisson", e][s] - runs["independent", e][s] for s in seeds])]
    statement = "Text: DP-FTRLM is above DP-SGDM without amplification"
    verdict, power = decided(PAPER, statement, by_seed("tree", "independent"))
    yield Claim(
        place="Figure 2(a)",
        statement=statement,
        theirs="at every epsilon",
        ours=", ".join(f"{a:+.2f}" for a in above) + " points at epsilon 2, 8",
        verdict=verdict,
        value=above,
        curves=Curves("epsilon (delta 1e-4)", "words right (%)", curves, log="x"),
        **{**common, "why": power + SCALED},
    )
    level = (
        f"Level with it, within two standard errors, at epsilon {', '.join(f'{e:g}' for e in same)}. " if same else ""
    )
    statement = "Text: DP-SGDM without amplification never matches amplified DP-SGDM"
    verdict, power = decided(PAPER, statement, by_seed("poisson", "independent"))
    yield Claim(
        place="Figure 2(a)",
        statement=statement,
        theirs="never",
        ours=", ".join(f"{a:+.2f}" for a in under) + " points between them at epsilon 2, 8",
        verdict=verdict,
        value=under,
        **{**common, "why": power + level + SCALED},
    )
    low, high = by_seed("tree", "poisson")
    statement = "Text: DP-FTRLM is above amplified DP-SGDM at large epsilon and below it at small epsilon (below 2.6)"
    verdict, power = decided(PAPER, statement, [[-x for x in low], high])
    yield Claim(
        place="Table 4 and Figure 10",
        statement=statement,
        theirs="+2.4, +1.9, +0.6, +0.1, -0.6 points at epsilon 18, 7.5, 3.9, 2.4, 1.6",
        ours=", ".join(f"{a:+.2f}" for a in lead) + " points at epsilon 2, 8",
        verdict=verdict,
        value=lead,
        **{**common, "why": power + SCALED},
    )


def momentum(run: Run) -> Iterator[Claim]:
    """Table 3 and Figure 5: FTRL with momentum 0.9 and without, vanilla tree; one seed each where one is asked for."""
    for epsilon, theirs in ((None, "+4.0 points (25.15, 21.12)"), (8.0, "+3.4 points (18.86, 15.46)")):
        rates = ((3.0, 10.0), (3.0, 10.0, 30.0)) if epsilon is None else ((1.0, 3.0), (1.0, 3.0, 10.0))
        quick, late = (
            max(([right(epsilon, lr, m, "vanilla", seed) for seed in run.seeds] for lr in tried), key=mean)
            for m, tried in zip((0.9, 0.0), rates, strict=True)
        )
        fast, slow = mean(quick), mean(late)
        level = "without noise" if epsilon is None else f"at epsilon {epsilon:g}"
        statement = f"Text {level}: DP-FTRLM is above DP-FTRL"
        verdict, power = decided(PAPER, statement, [[a - b for a, b in zip(quick, late, strict=True)]])
        yield Claim(
            place="Table 3 and Figure 5",
            statement=statement,
            theirs=theirs,
            ours=f"{fast - slow:+.1f} points ({fast:.1f}, {slow:.1f})",
            verdict=verdict,
            why=f"{power}{SCALED} Two server rates with momentum, three without, vanilla tree.",
            value=[fast, slow],
            seeds=run.seeds,
            seconds=spent(),
        )


def estimator(run: Run) -> Iterator[Claim]:
    """Figure 7(a)."""
    gains, by_seed = [], []
    for epsilon, rates in ((2.0, (0.3, 1.0)), (8.0, (1.0, 3.0))):
        better, plain = (
            max(([right(epsilon, lr, 0.9, name, seed) for seed in run.seeds] for lr in rates), key=mean)
            for name in ("online", "vanilla")
        )
        by_seed.append([a - b for a, b in zip(better, plain, strict=True)])
        gains.append(mean(by_seed[-1]))
    statement = "Text: efficient tree aggregation is above the vanilla one"
    verdict, power = decided(PAPER, statement, by_seed)
    yield Claim(
        place="Figure 7",
        statement=statement,
        theirs="at every epsilon",
        ours=", ".join(f"{gain:+.2f}" for gain in gains) + " points at epsilon 2, 8",
        verdict=verdict,
        why=f"{power}{SCALED} Two server rates each.",
        value=gains,
        seeds=run.seeds,
        seconds=spent(),
    )


@functools.cache
def brown() -> Brown:
    """From the folder brown of ANYORDER_DATA, or the one that ANYORDER_BROWN names."""
    root = os.environ.get("ANYORDER_DATA")
    folder = str(Path(root) / "brown") if root else os.environ.get("ANYORDER_BROWN", "brown")
    return read_brown(folder, vocabulary=SMALL.vocabulary, passage=SMALL.passage)


def spent() -> float:
    """Processor seconds of all runs of this file."""
    return round(sum(row["cpu_seconds"] for row in _runs.kept(RUNS)), 1)


def right(epsilon: float | None, lr: float, momentum: float, estimator: str, seed: int) -> float:
    """Words right in percent: from the file of runs, or by a run that is then added to it."""
    wanted = {"epsilon": epsilon, "lr": lr, "momentum": momentum, "estimator": estimator, "seed": seed}
    for row in _runs.kept(RUNS):
        if wanted.items() <= row.items():
            return float(row["accuracy"])
    before = time.process_time()
    found = 100 * trained(**wanted)
    row = wanted | {"accuracy": found, "cpu_seconds": round(time.process_time() - before, 1)}
    _runs.keep(RUNS, row | {"date": date.today().isoformat()})
    return found


def trained(epsilon: float | None, lr: float, momentum: float, estimator: str, seed: int) -> float:
    """One pass, users in a shuffled order; epsilon None is with next to no noise."""
    data = brown()
    names = list(data.users)
    names = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()]
    goal = SMALL.report_goal
    budget: dict[str, Any] = {"noise_multiplier": 1e-6} if epsilon is None else {"epsilon": epsilon}
    plan = ao.plan(
        order=SingleEpoch(len(names) // goal),
        mechanism=ao.mechanism("tree", estimator=estimator),
        delta=DELTA,
        clip_norm=SMALL.clip_norm,
        optimizer=ao.SGD(momentum=momentum),
        batch_size=goal,
        dataset_size=len(names),
        unit="user",
        **budget,
    )
    model = WordLSTM(data.words, embedding=SMALL.embedding, hidden=SMALL.hidden, seed=seed)
    training = LocalTraining(word_loss, lr=SMALL.client_lr, batch_size=16, epochs=1, max_examples=256)
    key = hashlib.sha256(f"text {epsilon} {lr} {momentum} {estimator} {seed}".encode()).digest()  # no secret here
    server = Server(plan, model, ao.FTRL(model.parameters(), lr=lr, momentum=momentum), key=key)
    for t in range(plan.n):
        cohort = names[t * goal : (t + 1) * goal]
        rows = training.changes(model, server.layout, [data.users[name] for name in cohort], [t] * len(cohort))
        with server.open() as opened:
            opened.add_rows(cohort, rows)
    server.close()
    return accuracy(model, data.test)
