"""What a search over settings costs: epsilon of the whole, beside that of the best run alone, which people print.

`digits`: searches by `ao.tune`, fifty configurations on average or exactly: a linear model of 1500 images in 5 passes,
over batch size, clip norm and regularization. The score is on 297 images that are taken as public. `whole 8`: the whole
search keeps epsilon 8 at delta 1e-5. `alone 8`: each run by itself has epsilon 8, which is what people print. `ours` is
epsilon of the whole search, `peer` of the best run alone, and the next row has the accuracies of the best runs on those
images. All numbers are means over searches with keys of their own. The search has seen those images: their accuracy is
for comparing laws. The best run's settings, and how many runs there were, are printed nowhere.

`search`: what the same fifty cost by each law if each run is planned for epsilon 8 by itself: `ours` is the search's
epsilon by the profile, `peer` by Rényi divergences [Papernot, Steinke 2022], and the ratio is of these two. Then how
quiet each run must be for the search as a whole to keep epsilon 8: `ours` its mu by the least bound, `peer` by
composing all runs. And the seconds of one epsilon.
"""

import functools
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.budget import Fixed, Geometric, Logarithmic, NegativeBinomial, Poisson, calibrate_search, search_epsilon
from anyorder.budget.search_privacy import Law
from benchmarks._report import Row, seconds

EPSILON, DELTA, RUNS = 8.0, 1e-5, 50
LAWS: tuple[Law, ...] = (
    NegativeBinomial(-0.5, RUNS), Logarithmic(RUNS), Geometric(RUNS), NegativeBinomial(3.0, RUNS), Poisson(RUNS),
    Poisson(10),
)  # fmt: skip
SEARCHED: tuple[Law, ...] = (Logarithmic(RUNS), Geometric(RUNS), Poisson(RUNS), Fixed(RUNS))
IMAGES, CUT = 1500, 3.0
PLAN = {"dataset_size": IMAGES, "epochs": 5, "mechanism": "tree"}
SPACE = {"batch_size": [50, 75, 100, 150, 300], "clip_norm": [0.25, 0.5, 1.0], "regularization": (0.3, 300.0, "log")}


class Found(NamedTuple):
    """Of searches by one law: epsilons, and mean and standard deviation of the accuracy of the best runs."""

    law: Law
    target: str
    whole: float
    alone: float
    right: float
    spread: float
    searches: int


_FOUND: list[Found] = []


def rows(quick: bool) -> Iterator[Row]:
    """Searches by `ao.tune`, then epsilons of searches, then the mu that each run may have, then the time."""
    yield from _digits((Geometric(RUNS),) if quick else SEARCHED, 1 if quick else 3)
    yield from _bounds(quick)


def _digits(laws: tuple[Law, ...], searches: int) -> Iterator[Row]:
    mu = calibrate_search(Fixed(1), EPSILON, DELTA)
    _FOUND.clear()
    for law in laws:
        targets = {"whole 8": EPSILON, "alone 8": search_epsilon(law, Gaussian(mu), DELTA)}
        for target, epsilon in targets.items():
            found = [
                ao.tune(
                    _trial,
                    SPACE,
                    plan=PLAN,
                    law=law,
                    epsilon=epsilon,
                    delta=DELTA,
                    score="public",
                    key=bytes([seed]) * 32,
                )
                for seed in range(searches)
            ]
            best = [one.best for one in found if one.best is not None]
            scores = [one.score for one in best]
            whole = max(one.certificate.epsilon for one in found)
            alone = max(one.certificate.plan.epsilon for one in best)
            _FOUND.append(Found(law, target, whole, alone, float(np.mean(scores)), float(np.std(scores)), searches))
            yield Row(f"digits, {target}: {law.describe()}", whole, alone, alone / whole, "epsilon")
            yield Row(f"digits, {target}: accuracy of the best", 100 * _FOUND[-1].right, None, None, "%")


@functools.cache
def _images() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = x / 16
    return x * np.minimum(1, CUT / np.linalg.norm(x, axis=1, keepdims=True)) / CUT, y


def _trial(settings: dict[str, Any], plan: ao.Plan, folder: Path) -> ao.budget.Trial:
    x, y = _images()
    key = sha256(folder.name.encode()).digest()  # the same numbers in every measurement: never so on private data
    learner = ao.online.Learner(plan, (64, 10), loss="softmax", regularization=settings["regularization"], key=key)
    for step in range(plan.n):
        here = np.arange(step * plan.batch_size, (step + 1) * plan.batch_size) % IMAGES
        learner.step(here.tolist(), x[here], y[here])
    right = ((x[IMAGES:] @ learner.theta).argmax(axis=1) == y[IMAGES:]).mean()
    return ao.budget.Trial(float(right), learner.certificate())


def tables() -> Iterator[tuple[str, str, list[str]]]:
    """For docs/compared.md."""
    lines = [
        "| law | planned for | epsilon of the whole search | of the best run alone | right, % |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.law.describe()} | {'the search' if one.target.startswith('whole') else 'each run alone'} "
        f"| {one.whole:.2f} | {one.alone:.2f} | {100 * one.right:.1f} ± {100 * one.spread:.1f} |"
        for one in _FOUND
    ]
    yield "compared.md", "tuning", lines


def _bounds(quick: bool) -> Iterator[Row]:
    plan = ao.plan(dataset_size=1500, batch_size=100, epochs=5, epsilon=EPSILON, delta=DELTA, mechanism="independent")
    curve = plan.curve
    assert isinstance(curve, Gaussian)
    yield Row("epsilon people print, of the best run alone", curve.epsilon(DELTA), None, None, "epsilon")
    together = search_epsilon(Fixed(RUNS), curve, DELTA)
    yield Row(f"search: {Fixed(RUNS).describe()}", together, None, None, "epsilon")
    for law in LAWS:
        ours, peer = (search_epsilon(law, curve, DELTA, bound) for bound in ("profile", "renyi"))
        yield Row(f"search: {law.describe()}", ours, peer, peer / ours, "epsilon")
    composed = calibrate_search(Fixed(RUNS), EPSILON, DELTA)
    for law in LAWS[2:3] if quick else LAWS:
        mu = calibrate_search(law, EPSILON, DELTA)
        yield Row(f"mu of one run for epsilon {EPSILON:g}: {law.describe()}", mu, composed, mu / composed, "mu")
    taken = seconds(lambda: search_epsilon(Geometric(RUNS), curve, DELTA), 1 if quick else 5)
    yield Row("one epsilon, Gaussian run", taken, None, None, "s")
