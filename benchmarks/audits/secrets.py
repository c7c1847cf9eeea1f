"""The Secret Sharer on a word model of the Brown corpus: 2000 canaries of three words, half of them left out at random.

Three trainings with the same settings (5 epochs of batch 500, SGD with learning rate 1 and momentum 0.9): without
privacy; with each sequence's gradient clipped to norm 1 and noise of a millionth of that, which stands for none; and
with epsilon 8 at delta 1e-5 for a sequence, by correlated noise, in an order that is shuffled anew in each epoch. The
learning rate is nearly the best for held-out text in the private training; a larger one remembers more.

Ours is of the canaries in the text, the peer of those that were left out: chance, whatever the model. The whole part
(some ten minutes on one core) also rewrites the table in docs/experiments.md and docs/secrets.png. The corpus is read
from ../shared/data/brown beside the repository: a Parquet file with a column "sentences".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anyorder.app.charts import plot_ranks
from anyorder.app.secret_sharer import Shared, share
from anyorder.app.text import Text, read_text
from anyorder.app.word_model import train_words
from anyorder.audit import Memorised
from benchmarks._report import Row

ROOT = Path(__file__).resolve().parents[2]
BROWN = ROOT.parent / "shared" / "data" / "brown"
PAGE = ROOT / "docs" / "experiments.md"
BEGIN, END = "<!-- written by benchmarks/audits/secrets.py -->", "<!-- end of what it wrote -->"

REPEATS = (1, 3, 9, 15)
EPSILON = "epsilon 8"
WAYS: dict[str, dict[str, float]] = {
    "no privacy": {},
    "clipped, no noise": {"noise_multiplier": 1e-6},
    EPSILON: {"epsilon": 8.0},
}
KEY = bytes(32)  # of coins, positions and noise: the data are public, and the numbers come again


def rows(quick: bool) -> Iterator[Row]:
    if not BROWN.exists():
        raise SystemExit(f"the Brown corpus must be at {BROWN}: a Parquet file with a column 'sentences'")
    text, done = read_text(BROWN), {}
    for repeats in (3,) if quick else REPEATS:
        for way, settings in WAYS.items():
            found = _one(text, repeats, settings, epochs=2 if quick else 5)
            done[repeats, way] = found
            yield from _rows(f"{way}, {repeats} times", found, claimed=way == EPSILON)
    if not quick:
        _write(done)


def _one(text: Text, repeats: int, settings: dict[str, float], epochs: int) -> Shared:
    def train(corpus: Any, vocabulary: int) -> Any:
        found = train_words(corpus, vocabulary, epochs=epochs, key=KEY, **settings)  # type: ignore[arg-type]
        return found.log_prob, found.plan

    return share(text, train, repeats=repeats, key=KEY)


def _rows(name: str, found: Shared, claimed: bool) -> Iterator[Row]:
    inside, outside = found.inside, found.outside
    for what, measure in (("mean", np.mean), ("median", np.median), ("90 % quantile", _high)):
        mine, chance = float(measure(inside.exposure)), float(measure(outside.exposure))
        yield Row(f"{name}: exposure, {what}", mine, chance, chance / mine, "bits")
    mine, chance = inside.uniformity, outside.uniformity
    yield Row(f"{name}: chi-squared / count", mine.distance, chance.distance, chance.distance / mine.distance, "")
    yield Row(f"{name}: its p-value", mine.p_value, chance.p_value, None, "")
    yield Row(f"{name}: perplexity of held-out text", found.perplexity or np.nan, None, None, "")
    if claimed and found.claim is not None:
        claim = found.claim.epsilon(found.delta)
        for method in found.methods:
            bound = found.lower_bound(method)
            yield Row(f"{name}: epsilon at least, by {method}; peer: claimed", bound, claim, None, "epsilon")


def _high(values: Any) -> float:
    return float(np.quantile(values, 0.9))


# -- the page --------------------------------------------------------------------------------------------------------


def _write(done: dict[tuple[int, str], Shared]) -> None:
    """The table in docs/experiments.md, and docs/secrets.png."""
    table = [
        "| training | times | mean exposure | chi²/count (p) | perplexity | epsilon of a canary: at least, claimed |",
        "|---|---|---|---|---|---|",
        *(_line(way, repeats, found) for (repeats, way), found in sorted(done.items(), key=_by_way)),
        _chance([found.outside for found in done.values()]),
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{PAGE} has no place for the table: lines {BEGIN} and {END}")
    PAGE.write_text("\n".join([before + BEGIN, "", *table, "", END]) + after, encoding="utf-8")
    panels = {
        ("once" if repeats == 1 else f"{repeats} times"): {
            **{way: done[repeats, way].inside for way in WAYS},
            f"left out ({EPSILON})": done[repeats, EPSILON].outside,
        }
        for repeats in REPEATS
    }
    plot_ranks(panels, ROOT / "docs" / "secrets.png", "ranks of canaries: a word model of the Brown corpus")


def _by_way(item: tuple[tuple[int, str], Shared]) -> tuple[int, int]:
    repeats, way = item[0]
    return list(WAYS).index(way), repeats


def _line(way: str, repeats: int, found: Shared) -> str:
    exposure, test, bounds = found.inside.exposure, found.inside.uniformity, "-"
    if way == EPSILON and found.claim is not None:
        best = max(found.lower_bound(method) for method in found.methods)
        bounds = f"{best:.2g}, {found.claim.epsilon(found.delta):.3g}"
    p = "< 1e-99" if test.p_value < 1e-99 else f"{test.p_value:.1g}"
    return (
        f"| {way} | {repeats} | {exposure.mean():.2f} | {test.distance:.3g} ({p}) | {found.perplexity:.0f} | {bounds} |"
    )


def _chance(outside: list[Memorised]) -> str:
    """Canaries that were left out, of all trainings: the range of what chance gave."""
    means = [found.exposure.mean() for found in outside]
    distances = [found.uniformity.distance for found in outside]
    least = min(found.uniformity.p_value for found in outside)
    span = f"{min(means):.2f} to {max(means):.2f}"
    return f"| any, left out | 0 | {span} | {min(distances):.2g} to {max(distances):.2g} (p >= {least:.1g}) | | |"
