"""What a search over settings costs: epsilon of the whole, beside that of the best run alone, which people print.

The run is a digits run: 1500 images, 5 epochs in batches of 100, planned for epsilon 8 at delta 1e-5 by itself. Fifty
configurations, on average or exactly, by every law; `ours` is the search's epsilon by the profile, `peer` by Rényi
divergences [Papernot, Steinke 2022], and the ratio is of these two. Then how quiet each run must be for the search as a
whole to keep epsilon 8: `ours` its mu by the least bound, `peer` by composing all runs. And the seconds of one epsilon.
"""

from collections.abc import Iterator

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.budget import (
    Fixed,
    Geometric,
    Law,
    Logarithmic,
    NegativeBinomial,
    Poisson,
    calibrate_search,
    search_epsilon,
)
from benchmarks._report import Row, seconds

EPSILON, DELTA, RUNS = 8.0, 1e-5, 50
LAWS: tuple[Law, ...] = (
    NegativeBinomial(-0.5, RUNS), Logarithmic(RUNS), Geometric(RUNS), NegativeBinomial(3.0, RUNS), Poisson(RUNS),
    Poisson(10),
)  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    """Epsilons of searches, then the mu that each run may have, then the time."""
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
