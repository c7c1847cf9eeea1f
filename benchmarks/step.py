"""Private training steps in plain ones: Opacus by hooks and by ghost norms, ours with independent and correlated noise.

    python -m benchmarks.step                    every model; some minutes a model where it is large
    python -m benchmarks.step --quick            three small ones, a minute; Opacus only where it is installed here
    python -m benchmarks.step --only small       one model; may be repeated

Whole steps, from the loader to the end of `optimizer.step()`, by the clock, on one thread. Each method is a process of
its own; they take turns, a few steps at a time, so that what else the machine does meets all, and the median over
rounds of (a method's steps over the plain ones of the same round) is printed: "1.6" is 1.6 plain steps. The C library
lets each process keep the memory that it frees; "unset" is ours over plain without that, as the C library comes: where
it gives large blocks back, page faults are a good part of both. `blt` has 4 buffers. Opacus runs in an environment of
its own, made on first use, without Poisson sampling, as our loader has none. "bare" is what such a step takes at least
in Python: the operations of ours, written by hand for a fully connected model, without any check, ledger or watch. "-":
it does not run the model.

Peak memory, of the whole process, and the time of the first step are those of two GPTs with adapters of rank 8 (LoRA),
as multiples of a plain process and a plain later step; there the C library gives every large block back at once, so
that the peak is of what is in use, and not of the gaps that it keeps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks._peers import OPACUS, interpreter
from benchmarks._report import Row, options, show
from benchmarks.clipping import MEMORY

METHODS = ("plain", "hooks", "ghost", "ours", "blt", "bare")
CHILD = Path(__file__).parent / "peers" / "steps_in_turns.py"


class Model(NamedTuple):
    """One row of the table: in words, the goal of ours in plain steps, and how many steps a turn has."""

    words: str
    goal: float
    steps: int
    without: tuple[str, ...] = ("bare",)


MODELS = {
    "small": Model("MLP 64-64-10, batch 32", 1.6, 100, ()),
    "own": Model("the same in a class of its own", 1.6, 100),
    "logistic": Model("logistic regression 64-10, batch 32", 1.9, 100, ()),
    "wide": Model("MLP 784-512-512-10, batch 512", 1.10, 4),
    "mnist": Model("MNIST CNN, batch 250", 1.12, 10),
    "cifar": Model("CIFAR CNN, batch 500", 1.10, 1),
    "cbow": Model("CBOW 100000 x 100, batch 64", 1.4, 2, ("hooks", "bare")),  # a gradient for each example takes 5 GB
    "table": Model("lazy table 10^6 x 8, 1024 x 4 rows, over a sparse one", 2.0, 100, ("hooks", "ghost", "bare")),
    "lstm-16": Model("LSTM 670, 10004 words, batch 16", 1.2, 2),
    "gpt": Model("GPT 4 x 256, 64 tokens, batch 32", 1.12, 1),
    "lora": Model("GPT 4 x 256, adapters alone, 10000 words, 8 x 128", 1.0, 1),
    "lora-100": Model("GPT 12 x 768, the same", 1.0, 1),
}
QUICK = ("small", "logistic", "mnist", "table")
ROUNDS = 9
QUICK_ROUNDS = 4


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "", only=MODELS)
    names = chosen.only or (QUICK if chosen.quick else list(MODELS))
    if not chosen.json:
        cells = "".join(f"{name:>8}" for name in METHODS[1:])
        print(f"{'':<52}{'plain ms':>10}{cells}{'unset':>8}{'goal':>8}")
    for row in rows(names, quick=chosen.quick):
        if chosen.json:
            show(_compared(row), as_json=True)
        else:
            print(_line(row), flush=True)


def rows(names: Any, *, quick: bool) -> Iterator[dict[str, Any]]:
    """What each method takes, of each model, in plain steps; then peak memory and the first step of adapters."""
    pythons = _pythons(quick)
    for name in names:
        model = MODELS[name]
        methods = [method for method in METHODS if method in pythons and method not in model.without]
        rounds = QUICK_ROUNDS if quick else ROUNDS
        found = in_turns(name, methods, pythons, model.steps, rounds, os.environ | MEMORY)
        over, plain = _over(found), found["plain"]
        unset = _over(in_turns(name, ["plain", "ours"], pythons, model.steps, rounds, dict(os.environ)))["ours"]
        yield {
            "name": model.words, "plain": 1e3 * median(one["step"] for one in plain), "unit": "ms", "goal": model.goal,
            "unset": unset, **{method: over.get(method) for method in METHODS[1:]},
        }  # fmt: skip
    for name in sorted({"lora", "lora-100"}.intersection(names)):
        yield from _memory(name, pythons)


def _over(found: dict[str, list[dict[str, float]]]) -> dict[str, float | None]:
    """Of each method, the median over rounds of its steps over the plain ones of the same round."""
    return {
        method: median(one["step"] / base["step"] for one, base in zip(told, found["plain"], strict=True))
        if told
        else None
        for method, told in found.items()
    }


def _memory(name: str, pythons: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Peak memory and the first step, of a plain process and a plain later step."""
    methods = [method for method in METHODS if method in pythons and method not in MODELS[name].without]
    found = in_turns(name, methods, pythons, 2, 1, os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"})
    size = MODELS[name].words.split(",")[0]
    for key, words, unit, goal in (("mib", "peak memory", "MiB", 1.05), ("first", "first step", "ms", 1.5)):
        base = found["plain"][0]["mib" if key == "mib" else "step"]
        yield {
            "name": f"{words}, {size} with adapters, 8 x 128", "plain": base * (1 if key == "mib" else 1e3),
            "unit": unit, "goal": goal, "unset": None,
            **{method: found[method][0][key] / base if found.get(method) else None for method in METHODS[1:]},
        }  # fmt: skip


def in_turns(
    name: str, methods: list[str], pythons: dict[str, str], steps: int, rounds: int, environment: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """What each method's process told in each round; nothing of one that failed, whose last words go to stderr."""
    running = {
        method: subprocess.Popen(
            [pythons[method], "-W", "ignore", str(CHILD), name, method, str(steps), str(rounds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for method in methods
    }  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for method, process in running.items():  # one begins at a time: the first step is timed too
        _ask(process, found[method])
    for place in range(1, rounds):
        order = list(running)
        for method in order if place % 2 else order[::-1]:
            if found[method]:
                _ask(running[method], found[method])
    for method, process in running.items():
        told = process.communicate()[1].strip().splitlines()
        if process.returncode:
            print(f"{name} {method}: {(told or ['killed'])[-1]}", file=sys.stderr)
            found[method] = []
    return found


def _ask(process: "subprocess.Popen[str]", told: list[dict[str, float]]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return
    line = process.stdout.readline()
    if line:
        told.append(json.loads(line))


def _pythons(quick: bool) -> dict[str, str]:
    """The interpreter of each method that is measured."""
    found = dict.fromkeys(METHODS, sys.executable)
    if not quick:
        opacus = interpreter(*OPACUS, module="opacus")
        return found | {"hooks": opacus, "ghost": opacus}
    here = find_spec("opacus") is not None
    return {method: python for method, python in found.items() if here or method not in ("hooks", "ghost")}


def _compared(row: dict[str, Any]) -> Iterator[Row]:
    """Each of ours beside plain training and each peer, all in plain steps (or in plain's peak memory)."""
    for own in ("ours", "blt"):
        for peer in ("plain", "hooks", "ghost"):
            ours, other = row[own], 1.0 if peer == "plain" else row[peer]
            ratio = None if ours is None or other is None else other / ours
            yield Row(f"{row['name']}: {own}, {peer}", ours, other, ratio, f"plain's {row['plain']:.4g} {row['unit']}")
    if row["unset"] is not None:
        yield Row(f"{row['name']}: ours, plain, memory unset", row["unset"], 1.0, 1 / row["unset"], "plain's step")


def _line(row: dict[str, Any]) -> str:
    cells = "".join("       -" if row[name] is None else f"{row[name]:8.2f}" for name in (*METHODS[1:], "unset"))
    return f"{row['name']:<52}{row['plain']:>7.4g} {row['unit']:<3}{cells[1:]}{row['goal']:8.2f}"


if __name__ == "__main__":
    main()
