"""Budgets: never below a direct composition, nothing lost to kills and writers at once, and the time of one entry.

`below`: random sequences of plans (Gaussian, or sampled besides) under a filter, and of these how many had less spent
than their direct composition, or more than the limit. (Draws of bounded range are left out: their Rényi bound is at
places below that of their loss distributions, and both are bounds.) `kills`: writers, two at once, that are killed with
signal 9: entries that they were told of and that are not there, and whether more than the limit was spent. `spend`:
milliseconds of one spend where so many entries are there: of an object that has read them, and of a new one.
"""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import anyorder as ao
from anyorder.accounting import Gaussian, Sampled
from anyorder.accounting.curves import Curve, compose
from anyorder.budget.account import Account, UnitFile
from anyorder.budget.filter import best_order
from anyorder.budget.log import Begin, Spend, encode, write_curve
from anyorder.errors import BudgetError
from benchmarks._report import Row

_DELTA = 1e-5
_WRITER = """
import sys
import anyorder as ao
from anyorder.accounting import Gaussian
budget = ao.Budget(sys.argv[1])
print("ready", flush=True)
for number in range(10**9):
    try:
        budget.spend(Gaussian(float(sys.argv[2])), run=f"{sys.argv[3]}x{number}")
    except ao.errors.BudgetError:
        break
    print(number, flush=True)
"""


def rows(quick: bool) -> Iterator[Row]:
    """Of the three parts."""
    yield from _below(200 if quick else 10_000)
    yield from _kills(8 if quick else 200)
    for entries in (1000,) if quick else (1000, 100_000):
        yield from _spend(entries)


def _below(sequences: int) -> Iterator[Row]:
    for rule, mixed in (("gaussian", False), ("renyi", True), ("renyi", False)):
        count = sequences if not mixed else max(sequences // 50, 20)  # each compares with loss distributions
        rng, wrong, over, above, refused = np.random.default_rng(0), 0, 0, 0.0, 0
        for _ in range(count):
            epsilon = float(np.exp(rng.uniform(np.log(0.5), np.log(16))))
            account = _account(rule, epsilon)
            entered: list[Curve] = []
            for _ in range(int(rng.integers(1, 12))):
                curve = _random(rng, mixed)
                if account.totals_with(curve, None).epsilon(_DELTA) > epsilon:
                    refused += 1
                    continue
                account.take(_line(account.number, curve))
                entered.append(curve)
            if not entered:
                continue
            spent, direct = account.totals().epsilon(_DELTA), compose(*entered).epsilon(_DELTA)
            wrong, over = wrong + (spent < direct), over + (spent > epsilon)
            above += spent / direct - 1 if direct else 0.0
        kind = f"below: {rule} filter, {'sampled too' if mixed else 'Gaussian'}, {count} sequences"
        yield Row(f"{kind}, below their composition", wrong, None, None, "sequences")
        yield Row(f"{kind}, over the limit", over, None, None, "sequences")
        yield Row(f"{kind}, refused", refused, None, None, "plans")
        yield Row(f"{kind}, epsilon above direct composition", 100 * above / count, None, None, "%")


def _random(rng: np.random.Generator, mixed: bool) -> Curve:
    if not mixed or rng.random() < 0.5:
        return Gaussian(float(rng.gamma(1.0, 0.4)), neighbours="add-or-remove")
    return Sampled(float(rng.choice([1.0, 2.0])), float(rng.choice([0.01, 0.05])), int(rng.integers(1, 200)))


def _account(rule: str, epsilon: float) -> Account:
    begin = Begin(
        id="0" * 32, epsilon=epsilon, delta=_DELTA, unit=None, neighbours=None, adaptive=True, filter=rule,
        order=best_order(epsilon, _DELTA), time="",
    )  # fmt: skip
    return Account(begin, UnitFile(Path("none")))


def _line(number: int, curve: Curve) -> Spend:
    about = {"neighbours": curve.neighbours}
    return Spend(number=number, name="", what="curve", parts=write_curve(curve), about=about, time="")


def _kills(kills: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path, told, trial = Path(folder) / "budget", set[str](), 0
        limit = (
            Gaussian(0.01 * 200**0.5).epsilon(_DELTA) if kills < 20 else Gaussian(0.01 * 20_000**0.5).epsilon(_DELTA)
        )
        ao.Budget(path, limit, _DELTA)
        chance = random.Random(0)
        while trial < kills:
            running = []
            for _ in range(2):  # at once
                command = [sys.executable, "-c", _WRITER, str(path), "0.01", f"t{trial}"]
                running.append((f"t{trial}", subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
                trial += 1
            for _, process in running:
                assert process.stdout is not None
                process.stdout.readline()
            time.sleep(chance.uniform(0.0, 0.3))
            for word, process in running:
                process.send_signal(signal.SIGKILL)
                told |= {f"{word}x{line}" for line in process.communicate()[0].split("\n")[:-1]}
        budget = ao.Budget(path)
        entered = [held.spend.run for held in budget.entries()]
        full = False
        while not full:  # up to the limit
            try:
                budget.spend(Gaussian(0.01))
            except BudgetError:
                full = True
        for what, count in (
            ("entries told of", len(told)), ("of these lost", len(told - set(entered))),
            ("entered twice", len(entered) - len(set(entered))), ("over the limit", budget.remaining().spent > limit),
        ):  # fmt: skip
            yield Row(f"kills: {trial} of writers, two at once, {what}", count, None, None, "entries")


def _spend(entries: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "budget"
        budget = ao.Budget(path, 1000.0, _DELTA)
        _fill(budget, entries)
        began = time.perf_counter()
        ao.Budget(path).spend(Gaussian(0.001))
        fresh = time.perf_counter() - began
        budget.spend(Gaussian(0.001))
        times = []
        for _ in range(20):
            began = time.perf_counter()
            budget.spend(Gaussian(0.001))
            times.append(time.perf_counter() - began)
        size = path.stat().st_size
    yield Row(f"spend: {entries} entries, read before", 1e3 * float(np.median(times)), None, None, "ms")
    yield Row(f"spend: {entries} entries, new object", 1e3 * fresh, None, None, "ms")
    yield Row(f"spend: {entries} entries, size of the file", size / 1e6, None, None, "MB")


def _fill(budget: ao.Budget, entries: int) -> None:
    """Write many lines at once: nobody waits for the disk after each."""
    log = budget._log
    with log.locked(write=True), open(log.path, "ab") as file:
        chain = log._chain
        for number in range(1, entries + 1):
            raw, chain = encode(_line(number, Gaussian(0.001)), chain)
            file.write(raw)
