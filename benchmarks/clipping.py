"""Clipped gradients: one step beside the plain step, vmap, Opacus 1.6 and opake.

    python -m benchmarks.clipping            medians of 15 steps, and peak memory above the model and its inputs
    python -m benchmarks.clipping --quick    medians of 5, without the largest

Every measurement is a process of its own, in torch's number of threads. Opacus and opake run in environments of their
own, made on first use. Time is the processor's, over all threads: other work on the machine disturbs it less than it
does the clock. Settings of the C library keep freed memory for the next step; all methods have them, except in the
rows that say so: those show what a process pays that gives memory back to the system.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks._peers import OPACUS, OPAKE, interpreter
from benchmarks._report import Row, options, show

MODELS = {
    "mnist": "MNIST CNN, batch 250",
    "cifar": "CIFAR CNN, batch 500",
    "gpt": "GPT 4 x 256, 64 tokens, batch 32",
    "lstm-16": "LSTM 670, 10004 words, batch 16",
    "lstm-64": "LSTM 670, 10004 words, batch 64",
    "cbow": "CBOW 100000 x 100, batch 64",
}
METHODS = ("plain", "vmap", "hooks", "ghost", "opake")
LARGE = {("cbow", "hooks")}  # a gradient for each example takes 5 GB
MEMORY = {"MALLOC_TOP_PAD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "", only=MODELS)
    names = chosen.only or [name for name in MODELS if not (chosen.quick and name in ("cifar", "cbow", "lstm-64"))]
    show(rows(names, repeats=5 if chosen.quick else 15), chosen.json)


def rows(names: list[str], *, repeats: int) -> Iterator[Row]:
    """Time and memory of every model, ours and each peer's."""
    for name in names:
        ours = _measured(name, "ours", repeats)
        for method in METHODS:
            label = f"{MODELS[name]}; peer: {method}"
            peer = None if (name, method) in LARGE else _measured(name, method, repeats)
            if isinstance(ours, str) or peer is None or isinstance(peer, str):
                reason = "needs too much memory" if peer is None else peer if isinstance(peer, str) else ours
                print(f"{label}: {reason}", file=sys.stderr)
                continue
            yield Row(f"{label}: time", ours["cpu"] * 1e3, peer["cpu"] * 1e3, peer["cpu"] / ours["cpu"], "ms")
            yield Row(f"{label}: memory", ours["mib"], peer["mib"], peer["mib"] / max(1.0, ours["mib"]), "MiB")
        given_back = [_measured(name, method, repeats, keep=False) for method in ("ours", "plain")]
        if not any(isinstance(one, str) for one in given_back):
            mine, plain = (one["cpu"] * 1e3 for one in given_back if not isinstance(one, str))
            yield Row(f"{MODELS[name]}; peer: plain, freed memory not kept: time", mine, plain, plain / mine, "ms")


def _measured(name: str, method: str, repeats: int, *, keep: bool = True) -> dict[str, float] | str:
    """What a process measured, or the last line of its error."""
    match method:
        case "hooks" | "ghost":
            python = interpreter(*OPACUS, module="opacus")
        case "opake":
            python = interpreter(*OPAKE, module="opake")
        case _:
            python = sys.executable
    script = Path(__file__).parent / "peers" / "clipping_step.py"
    done = subprocess.run(
        [python, "-W", "ignore", str(script), name, method, str(repeats)],
        capture_output=True, text=True, check=False, env=os.environ | (MEMORY if keep else {}),
    )  # fmt: skip
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["killed"])[-1]
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
