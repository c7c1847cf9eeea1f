"""Figures 2(c) and 7(c), and the rows of Tables 3 to 5 for amplified DP-SGDM: epsilon against report goal."""

import logging
import math
from collections.abc import Iterator

import numpy as np

from anyorder.accounting import gdp_epsilon
from anyorder.accounting.curves import compose
from anyorder.accounting.poisson import poisson_epsilon
from anyorder.strategy import Tree, registry
from anyorder.workload import momentum
from reproductions._claims import Claim, Curves, Run, judged
from reproductions._powers import decided
from reproductions.kairouz.tables import DELTA, ROUNDS, levels, listed

POPULATION = 342_477
SGD_4 = ((0.3, 18.20), (0.4, 7.51), (0.5, 3.93), (0.6, 2.40), (0.7, 1.61))
"""Noise multiplier and epsilon of Table 4: rounds of 100 of 342 477 users."""
SGD_5 = (
    (0.007, 100, 342_477, 1.78e7),
    (0.07, 1000, 342_477, 7.71e4),
    (23.97, 342_477, 342_477, 9.42),
    (0.67, 9560, 1_000_000, 8.11),
    (1.20, 17_100, 1_000_000, 3.70),
)
"""Of Table 5: noise multiplier, report goal, population, epsilon."""
RATIOS = {"24.5 %": (0.007, 0.149), "23 %": (0.035, 0.387)}
"""Largest noise at 100 users a round that reaches an accuracy: DP-SGDM, DP-FTRLM. [7.3]"""
VANILLA = {"24.5 %": 0.067, "23 %": 0.268}
"""The same with the vanilla tree. [E.3]"""


def renyi(noise: float, rate: float, *, old: bool = False) -> float:
    """Epsilon of ROUNDS sampled Gaussians by Renyi divergence; `old`: by the first conversion of TensorFlow Privacy."""
    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # orders at which its series does not converge are left out, safely
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    accountant = RdpAccountant(orders)
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), ROUNDS))
    if not old:
        return float(accountant.get_epsilon(DELTA))
    divergences = np.asarray(accountant._rdp)
    return float(np.min(divergences + math.log(1 / DELTA) / (np.asarray(orders) - 1)))


def tree_epsilon(noise: float, goal: int, population: int = POPULATION, *, exact: bool = True) -> float:
    """A new tree in each pass, the unfinished last one counted as a whole one. [D.1]"""
    epoch = min(ROUNDS, population // goal)
    mu = compose(*[math.sqrt(levels(epoch)) / noise] * math.ceil(ROUNDS / epoch))
    return gdp_epsilon(mu, DELTA, "exact" if exact else "rdp")


def sampled(run: Run) -> Iterator[Claim]:
    """Epsilons of amplified DP-SGDM."""
    printed = [epsilon for _, epsilon in SGD_4]
    theirs = [renyi(noise, 100 / POPULATION) for noise, _ in SGD_4]
    yield Claim(
        place="Table 4",
        statement="Amplified DP-SGDM with noise 0.3, 0.4, 0.5, 0.6, 0.7 has these epsilons (delta 1e-6)",
        theirs=listed(printed, 2),
        ours=listed(theirs, 2) + " by Renyi divergence",
        verdict=judged(all(abs(o / t - 1) < 0.01 for o, t in zip(theirs, printed, strict=True))),
        why="Poisson sampling, 1600 rounds at rate 100 / 342 477, with or without a user.",
        value=theirs,
    )
    if run.quick:
        return
    exact = [poisson_epsilon(noise, 100 / POPULATION, ROUNDS, DELTA) for noise, _ in SGD_4]
    yield Claim(
        place="Table 4",
        statement="Those epsilons of amplified DP-SGDM are what the runs have",
        theirs=listed(printed, 2),
        ours=listed(exact, 2) + " by privacy loss distributions",
        verdict=judged(all(o <= t for o, t in zip(exact, printed, strict=True))),
        why=(
            "Safe for Poisson sampling. Their rounds took 100 users of a fixed-size sample, which needs another"
            " accountant."
        ),
        value=exact,
    )
    theirs = [renyi(noise, min(1.0, goal / population)) for noise, goal, population, _ in SGD_5]
    printed = [row[-1] for row in SGD_5]
    off = [abs(o / t - 1) for o, t in zip(theirs, printed, strict=True)]
    yield Claim(
        place="Table 5",
        statement="Epsilons of amplified DP-SGDM at five report goals (delta 1e-6)",
        theirs=", ".join(f"{v:.3g}" for v in printed),
        ours=", ".join(f"{v:.3g}" for v in theirs) + " by Renyi divergence",
        verdict=judged(max(off) < 0.05),
        why=f"Noise is printed to two or three digits; within {100 * max(off):.1f} %.",
        value=theirs,
    )


def table3(run: Run) -> Iterator[Claim]:
    """Two epsilons for one run."""
    new, old = renyi(0.4, 100 / POPULATION), renyi(0.4, 100 / POPULATION, old=True)
    mu = math.sqrt(levels(ROUNDS)) / 2.33
    tree_new, tree_old = gdp_epsilon(mu, DELTA, "rdp"), mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / DELTA))
    yield Claim(
        place="Table 3",
        statement=(
            "Appendix E.2 says epsilon 8.53 and 8.5 for noise 0.4 (DP-SGDM) and 2.33 (DP-FTRLM), its Table 3 says "
            "7.51 and 7.83"
        ),
        theirs="8.53, 8.5; 7.51, 7.83",
        ours=f"{old:.2f}, {tree_old:.2f}; {new:.2f}, {tree_new:.2f}",
        verdict=judged(
            round(new, 2) == 7.51
            and round(tree_new, 2) == 7.83
            and abs(old - 8.53) < 0.02
            and abs(tree_old - 8.5) < 0.1
        ),
        why=(
            "Both are bounds of the same runs: the text by the first conversion of Renyi divergence, the table by the"
            " later one."
        ),
        value=[old, tree_old, new, tree_new],
    )


def fig2c(run: Run) -> Iterator[Claim]:
    """Noise over report goal is kept, so that accuracy is; epsilon falls."""
    goals = [round(g) for g in np.geomspace(500, POPULATION, 12 if run.quick else 36)]
    curves: dict[str, list[tuple[float, float]]] = {}
    for accuracy, (sgd, ftrl) in RATIOS.items():
        curves[f"DP-FTRLM, {accuracy}"] = [(g, tree_epsilon(ftrl * g / 100, g, exact=False)) for g in goals]
        curves[f"DP-SGDM, {accuracy}"] = [(g, renyi(sgd * g / 100, g / POPULATION)) for g in goals]
    for accuracy, low in (("24.5 %", 0.0), ("23 %", 8.8)):
        ftrl, sgd = curves[f"DP-FTRLM, {accuracy}"], curves[f"DP-SGDM, {accuracy}"]
        behind = [e for (g, e), (_, other) in zip(ftrl, sgd, strict=True) if e < 50 and other < e]
        crossing = max(behind, default=0.0)
        yield Claim(
            place="Figure 2(c)",
            statement=(
                f"At accuracy {accuracy} DP-FTRLM needs fewer users a round than amplified DP-SGDM for every "
                f"epsilon {'up to' if not low else 'from 8.8 to'} 50"
            ),
            theirs="lower computation" if not low else "above epsilon 8.8",
            ours="at every report goal" if not behind else f"above epsilon {crossing:.1f}",
            verdict=judged(crossing <= low + 0.5),
            value=crossing,
            why=(
                "By Renyi divergence, as there."
                if crossing <= low + 0.5
                else (
                    f"Below {crossing:.1f} DP-SGDM needs "
                    "fewer; report goals up to the whole population, by Renyi divergence, as there."
                )
            ),
            curves=(
                Curves(
                    "report goal (of 342 477 users, 1600 rounds)",
                    "epsilon (delta 1e-6)",
                    {name: [(g, e) for g, e in points if e < 300] for name, points in curves.items()},
                    log="xy",
                )
                if not low
                else None
            ),
        )


def fig7c(run: Run) -> Iterator[Claim]:
    """What the better estimator buys."""
    n = 256 if run.quick else ROUNDS
    workload = momentum(n, 0.9)
    mean, late = [], []
    for name in ("vanilla", "online"):
        found = registry.row_variances(Tree(n, name), workload)
        mean.append(math.sqrt(found.mean()))
        late.append(math.sqrt(found.max()))
    ratio = mean[0] / mean[1]
    stated = [RATIOS[a][1] / VANILLA[a] for a in RATIOS]
    statement = (
        "With the estimator from below the noise that still reaches 23 % and 24.5 % grows from 0.268 to 0.387 and"
        " from 0.067 to 0.149"
    )
    verdict, power = decided("kairouz2021", statement, [[ratio - 1]])
    yield Claim(
        place="Figure 7",
        statement=statement,
        theirs=f"factors {stated[1]:.2f} and {stated[0]:.2f}",
        ours=(
            f"the same noise in the iterates allows a factor {ratio:.2f} (mean over steps), {late[0] / late[1]:.2f}"
            " (worst step)"
        ),
        verdict=verdict,
        value=[ratio, late[0] / late[1]],
        why=(
            f"{power}1600 steps, momentum 0.9. The noise explains most of the factor at 23 %, and not that at 24.5 "
            "%, on a"
            " grid of noises that is coarse there."
        ),
    )
    epsilons = [tree_epsilon(v * 50, 5000) for v in (VANILLA["23 %"], RATIOS["23 %"][1])]
    yield Claim(
        place="Figure 7",
        statement="At one report goal and accuracy the better estimator lowers epsilon",
        theirs="Figure 7(c), no numbers",
        ours=f"{epsilons[0]:.2f} to {epsilons[1]:.2f} at 5000 users a round, 23 %",
        verdict=judged(epsilons[1] < epsilons[0]),
        value=epsilons,
        why="From their noise multipliers; exactly, delta 1e-6.",
    )
