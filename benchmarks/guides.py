"""Numbers of the guides that no chance and no clock is in: a second each, the same on every machine.

python -m benchmarks.guides
"""

from collections.abc import Iterator

import anyorder as ao
from anyorder.accounting import Gaussian, gdp_epsilon
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.budget.search_privacy import Secret, renyi_search_epsilon
from benchmarks._report import Row, options, show

DELTA = 1e-6
LAWS: dict[str, Secret] = {
    "eta -0.5": ao.budget.NegativeBinomial(-0.5, 50),
    "logarithmic": ao.budget.Logarithmic(50),
    "geometric": ao.budget.Geometric(50),
    "eta 3": ao.budget.NegativeBinomial(3, 50),
    "Poisson": ao.budget.Poisson(50),
}


def rows() -> Iterator[Row]:
    """Accounting, three epochs in known and secret order, and searches of fifty runs."""
    for mu in (1.0, 2.0, 4.0, 6.0):
        exact, renyi = gdp_epsilon(mu, 1e-5), gdp_epsilon(mu, 1e-5, "rdp")
        yield Row(f"accounting: mu {mu:g}, exact and by Renyi divergence", exact, renyi, renyi / exact - 1, "epsilon")
    known = gdp_epsilon(ao.compose(1.0, 1.0, 1.0), 1e-5)
    secret = poisson_epsilon(1.0, 0.05, 60, 1e-5)
    yield Row("three epochs at sigma 1, batches of 5 %: any order, Poisson", known, secret, known / secret, "epsilon")
    for mu in (0.1, 0.5, 1.0, 2.0):
        run = Gaussian(mu)
        alone = run.epsilon(DELTA)
        for name, law in LAWS.items():
            epsilon = ao.budget.search_epsilon(law, run, DELTA)
            yield Row(f"search: mu {mu:g}, {name}, 50 runs; best run alone", epsilon, alone, epsilon / alone, "epsilon")
            renyi = renyi_search_epsilon(law, run, DELTA)
            yield Row(f"search: mu {mu:g}, {name}, 50 runs, by Renyi divergence", renyi, None, None, "epsilon")
        shown = ao.budget.search_epsilon(ao.budget.Fixed(50), run, DELTA)
        yield Row(f"search: mu {mu:g}, fixed, 50 runs, all shown", shown, None, None, "epsilon")
    few = ao.budget.search_epsilon(ao.budget.Poisson(10), Gaussian(1.0), DELTA)
    yield Row("search: mu 1, Poisson, 10 runs", few, None, None, "epsilon")
    for name, law in LAWS.items():
        yield Row(f"search: {name}: one of the best 5 % is tried", 1 - law.pgf(0.95), None, None, "chance")


if __name__ == "__main__":
    show(rows(), options(__doc__ or "").json)
