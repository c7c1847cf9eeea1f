"""Private training steps: one beside the plain step, vmap, Opacus 1.6 and opake.

    python -m benchmarks.clipping                         medians of 15 steps, and peak memory above model and inputs
    python -m benchmarks.clipping --quick                 medians of 5, without the largest
    python -m benchmarks.clipping --only small            one model; may be repeated

`python -m benchmarks.step` has whole steps of more methods in turns, by the clock.

Rows of a "whole step" go from the loader to the end of `optimizer.step()`, clipping, noise and SGD included, and say
whether the target, so many times the plain step, is met. Rows of "clipping" stop at the clipped sum.

Every measurement is a process of its own, in torch's number of threads; ours and the plain step take turns, and the
best of three medians counts. Opacus and opake run in environments of their own, made on first use. Time is the
processor's, over all threads: other work on the machine disturbs it less than it does the clock. Settings of the C
library let every process keep all memory that it frees for its next step, ours and the peers' alike, except in the
rows that say so: those show what a process pays that gives memory back to the system.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks._peers import OPACUS, OPAKE, interpreter
from benchmarks._report import Row, options, show

MODELS = {  # in words, and the target of a whole step in plain ones
    "small": ("MLP 64-64-10, batch 32", 4.0),
    "mlp": ("MLP 784-512-512-10, batch 128", 1.3),
    "mnist": ("MNIST CNN, batch 250", None),
    "cifar": ("CIFAR CNN, batch 500", None),
    "gpt": ("GPT 4 x 256, 64 tokens, batch 32", 1.25),
    "lstm-16": ("LSTM 670, 10004 words, batch 16", 1.3),
    "lstm-64": ("LSTM 670, 10004 words, batch 64", 1.3),
    "cbow": ("CBOW 100000 x 100, batch 64", 1.5),
}
LARGEST = ("cifar", "cbow", "lstm-64")
METHODS = {"training_step": ("hooks", "ghost"), "clipping_step": ("vmap", "hooks", "ghost", "opake")}
TOO_LARGE = {("cbow", "hooks")}  # a gradient for each example takes 5 GB
ROUNDS = 3
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62), "MALLOC_TOP_PAD_": str(2**26)}


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "", only=MODELS)
    names = chosen.only or [name for name in MODELS if not (chosen.quick and name in LARGEST)]
    show((row for name in names for row in rows(name, repeats=5 if chosen.quick else 15)), chosen.json)


def rows(name: str, *, repeats: int) -> Iterator[Row]:
    """Time and memory of a model, ours and each peer's."""
    words, target = MODELS[name]
    repeats = 20 * repeats if name == "small" else repeats
    for script, part in (("training_step", "whole step"), ("clipping_step", "clipping")):
        label = f"{words}, {part}; peer: "
        ours, plain = _in_turns(script, name, repeats)
        if ours is None or plain is None:
            continue
        over = ours["cpu"] / plain["cpu"]
        missed = "" if target is None else f" (target {target}: {'met' if over <= target else 'MISSED'}, {over:.2f})"
        yield _time(label + "plain" + (missed if script == "training_step" else ""), ours, plain)
        for method in METHODS[script]:
            peer = None if (name, method) in TOO_LARGE else _measured(script, name, method, repeats)
            if peer is None:
                continue
            yield _time(label + method, ours, peer)
            if "mib" in ours:
                ratio = peer["mib"] / max(1.0, ours["mib"])
                yield Row(f"{label}{method}: memory", ours["mib"], peer["mib"], ratio, "MiB")
    ours, plain = _in_turns("training_step", name, repeats, keep=False)
    if ours is not None and plain is not None:
        yield _time(f"{words}, whole step, freed memory not kept; peer: plain", ours, plain)


def _time(label: str, ours: dict[str, float], peer: dict[str, float]) -> Row:
    return Row(label, ours["cpu"] * 1e3, peer["cpu"] * 1e3, peer["cpu"] / ours["cpu"], "ms")


def _in_turns(
    script: str, name: str, repeats: int, *, keep: bool = True
) -> tuple[dict[str, float] | None, dict[str, float] | None]:
    """Ours and the plain step, each the best of some turns."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    for _ in range(ROUNDS):
        for method, results in found.items():
            one = _measured(script, name, method, repeats, keep=keep)
            results += [] if one is None else [one]
    best = [min(results, key=lambda one: one["cpu"], default=None) for results in found.values()]
    return best[0], best[1]


def _measured(script: str, name: str, method: str, repeats: int, *, keep: bool = True) -> dict[str, float] | None:
    """What a process measured; None, and the last line of its error told, where it failed."""
    match method:
        case "hooks" | "ghost":
            python = interpreter(*OPACUS, module="opacus")
        case "opake":
            python = interpreter(*OPAKE, module="opake")
        case _:
            python = sys.executable
    file = Path(__file__).parent / "peers" / f"{script}.py"
    command = [python, "-W", "ignore", str(file), name, method, str(repeats)]
    return _told(command, os.environ | (MEMORY if keep else {}))


def _told(command: list[str], environment: Mapping[str, str]) -> dict[str, float] | None:
    """What a process printed; None, and the last line of its error told, where it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environment))
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["killed"])[-1]
        print(f"{' '.join(command[3:])}: {reason}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
