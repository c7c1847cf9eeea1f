"""[Zhang, Mironov, Hejazinia 2021] Fig. 1, Fig. 2 and Table 2, on the Brown corpus with the paper's settings.

A row is a training of one table of 1000 x 100 words: its loss on the test part, beside it that of a table of zeros,
9 ln 2 = 6.238. Or the chi-squared distance of its canaries' ranks, beside that of phrases never planted. What the paper
leaves open is stated in `zhang_task`. Runs are kept in benchmarks/results/zhang.jsonl, and only what is missing is
run; docs/experiments.md and its pictures are written from it.

    python -m benchmarks.wides.zhang --data-dir FOLDER     the same; FOLDER has Brown's Parquet file
    python -m benchmarks.wides.zhang --seeds 1             one seed: some fifteen minutes on one core
    python -m benchmarks.wides.zhang --write               the page alone
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._report import Row, show
from benchmarks.wides.zhang_select import Setting
from benchmarks.wides.zhang_task import ZERO_TABLE, Samples, Way, chance, planted_ranks, read_samples, train

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "zhang.jsonl"
DATA = os.environ.get("ANYORDER_BROWN", "brown")

TITLES = {
    Way("none"): "no privacy",
    Way("all", 0.32): "DP-SGD, sigma 0.32",
    Way("all", 0.5): "DP-SGD, sigma 0.5",
    **{
        Way(selector, 0.5, adam): f"sparse, {title}, {adam} Adam"
        for selector, title in (("em", "exponential"), ("svt", "sparse vector"), ("uniform", "uniform"))
        for adam in ("dense", "lazy")
    },
}
WAYS = tuple(TITLES)
SHARERS = (Way("none"), Way("all", 0.5), Way("em", 0.5))
REPEATS = (3, 9, 15)

Job = tuple[Way, int, int]
"""How, the seed, and how often each canary is planted."""


def jobs(seeds: int) -> Iterator[Job]:
    """All that is to be run, seed by seed: Fig. 1 from both first tables and Table 2, then the other selectors."""
    others = tuple(way for way in WAYS if way.selector in ("svt", "uniform"))
    for seed in range(seeds):
        for start in ("normal", "small"):
            yield from ((started(way, start), seed, 0) for way in WAYS if way not in others)
        yield from ((way, seed, repeats) for repeats in REPEATS for way in SHARERS)
        for start in ("normal", "small"):
            yield from ((started(way, start), seed, 0) for way in others)


def started(way: Way, start: str) -> Way:
    return Way(way.selector, way.sigma, way.adam, start)


def described(way: Way, seed: int, repeats: int, epochs: int) -> dict[str, Any]:
    """What names a run."""
    return {**asdict(way), "seed": seed, "repeats": repeats, "epochs": epochs}


# -- runs ------------------------------------------------------------------------------------------------------------


class Runs:
    """Lines of the file, or a run whose line is then added."""

    def __init__(self, folder: str, setting: Setting) -> None:
        self._folder, self._setting = folder, setting
        self._read: tuple[tuple[int, int], Samples] | None = None

    def line(self, job: Job) -> dict[str, Any]:
        wanted = described(*job, self._setting.epochs)
        for line in read_results():
            if wanted.items() <= line.items():
                return line
        line = {**wanted, **self.run(job)}
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def run(self, job: Job) -> dict[str, Any]:
        """The last losses, the curve, and what became of the canaries."""
        way, seed, repeats = job
        samples = self._samples(seed, repeats)
        start = time.process_time()
        found = train(samples, self._setting, way, seed)
        spent = time.process_time() - start
        line: dict[str, Any] = {
            "steps": self._setting.steps, "train": found.curve[-1][2], "test": found.curve[-1][3],
            "touched": found.touched, "cpu_seconds": round(spent, 1),
        }  # fmt: skip
        if samples.secrets is not None:
            inside = planted_ranks(found.table, samples.secrets)
            outside = chance(found.table, self._setting, seed)
            line |= {"canaries": inside.to_dict(), "chance": outside.to_dict()}
        line["curve"] = [[round(number, 3) for number in point] for point in found.curve]
        return line

    def _samples(self, seed: int, repeats: int) -> Samples:
        if self._read is None or self._read[0] != (seed, repeats):
            self._read = (seed, repeats), read_samples(self._folder, self._setting, seed, repeats)
        return self._read[1]


def read_results() -> list[dict[str, Any]]:
    """All runs on file."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def shown(job: Job, line: dict[str, Any]) -> Iterator[Row]:
    """The rows of a run."""
    way, seed, repeats = job
    title = f"{TITLES[started(way, 'normal')]}, first table {way.start}, seed {seed}"
    if not repeats:
        yield Row(f"{title}: test loss; peer: zeros", line["test"], ZERO_TABLE, ZERO_TABLE / line["test"], "nats")
        return
    inside, outside = line["canaries"]["distance"], line["chance"]["distance"]
    yield Row(f"{title}, canaries {repeats} times: distance; peer: chance", inside, outside, None, "chi2/1000")


def grid(folder: str, wanted: Iterable[Job]) -> Iterator[Row]:
    """What is missing, one after the other; the page is written anew."""
    runs = Runs(folder, Setting())
    for job in wanted:
        yield from shown(job, runs.line(job))
    from benchmarks.wides.zhang_page import write

    write()


def rows(quick: bool) -> Iterator[Row]:
    """Every way of training on a table of 100 words, one epoch, if quick; else all, as `main` runs them."""
    if quick:
        runs = Runs(DATA, Setting.tiny())
        for job in [*((way, 0, 0) for way in WAYS), *((way, 0, 9) for way in SHARERS)]:
            yield from shown(job, runs.run(job))
        return
    yield from grid(DATA, jobs(3))


def main() -> None:
    """The grid, or a part of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=DATA, help="folder with Brown's Parquet file; default: $ANYORDER_BROWN")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the page of what is on file, and run nothing")
    chosen = parser.parse_args()
    if chosen.write:
        from benchmarks.wides.zhang_page import write

        write()
        return
    show(grid(chosen.data_dir, jobs(chosen.seeds)), as_json=False)


if __name__ == "__main__":
    main()
