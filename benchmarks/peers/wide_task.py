"""What every program of `benchmarks/wides/speed.py` trains, and how its steps are timed. Needs numpy alone.

A table of V rows of width 100. An example is ten rows (centre, context, 8 negatives) drawn evenly, which leaves the
fewest rows twice in a batch; its loss is that of word2vec,

    - log s(e_centre . e_context) - sum over negatives of log s(- e_centre . e_negative)   [Mikolov et al. 2013, Eq. 4]

SGD with rate 1 on the mean of the batch, clip norm 1.
"""

import json
import resource
import time
from typing import Any

import numpy as np

WIDTH, IDS, CLIP, LR, NOISE = 100, 10, 1.0, 1.0, 1.0
WARM = 5  # first steps that are not looked at


def batches(rows: int, batch: int, count: int) -> Any:
    """(count, batch, 10) int64."""
    return np.random.default_rng(0).integers(0, rows, (count, batch, IDS))


class Clock:
    """Seconds of the processor for each step but the first ones, and the memory that came after the data."""

    def __init__(self, warm: int) -> None:
        self.warm, self.times, self.before = warm, [time.process_time()], resident()

    def tick(self) -> None:
        """A step is done."""
        self.times.append(time.process_time())

    def report(self, **more: Any) -> None:
        """Print the steps' seconds, how much the process grew at most in bytes, and what else is given."""
        steps = np.diff(self.times)[self.warm :]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before
        print(json.dumps({"seconds": steps.tolist(), "bytes": grown, **more}))


def resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
