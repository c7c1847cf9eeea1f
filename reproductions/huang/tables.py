"""Tables 1, 2 and 4 and Fig. 1 of Huang et al. 2023, judged from runs that are kept.

Their joint DP is not private as printed (`theory`), so what stands beside it is `anyorder.federated.two_phase`: the
shared layers by DP-SGD on all records, then each owner's head at home. Runs of 16 to 256 owners are those of
`benchmarks.federations.joint`, the others of `runs`.
"""

from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.federations import joint as kept_joint

from reproductions._claims import Claim, Curves, Run, judged
from reproductions._powers import decided
from reproductions.huang.runs import (
    ALL_OWNERS,
    DATASETS,
    EPSILONS,
    FED_AVG,
    FULL,
    JOINT,
    MEASURED,
    ONLY_JOINT,
    SEEDS,
    SILO,
    Found,
    kept,
    run_missing,
    told,
)

PRINTED = {
    ("mnist", SILO): (0.9445, 0.9457, 0.9209, 0.8639, 0.7678, 0.7240),
    ("mnist", FED_AVG): (0.9602, 0.9468, 0.9402, 0.9376, 0.9196, 0.9326),
    ("mnist", FULL): (0.4444, 0.2926, 0.6982, 0.8081, 0.7399, 0.6023),
    ("mnist", JOINT): (0.4658, 0.3207, 0.7651, 0.8169, 0.7835, 0.7423),
    ("fashion_mnist", SILO): (0.8888, 0.8575, 0.8498, 0.7506, 0.6489, 0.6355),
    ("fashion_mnist", FED_AVG): (0.8759, 0.8301, 0.8232, 0.7676, 0.8010, 0.8242),
    ("fashion_mnist", FULL): (0.4560, 0.4044, 0.5354, 0.6593, 0.6749, 0.6484),
    ("fashion_mnist", JOINT): (0.4533, 0.4205, 0.5564, 0.6719, 0.6908, 0.6667),
}
"""Table 1 at epsilon 1."""
TABLE_4 = {  # n = 256: m/r -> full DP at epsilon 1, joint at 1, 3, 8
    1: (0.7399, 0.7835, 0.8124, 0.8896),
    2: (0.2606, 0.3930, 0.6962, 0.8160),
    5: (0.1700, 0.2517, 0.3715, 0.7020),
    10: (0.1450, 0.1603, 0.2764, 0.4703),
    20: (0.1089, 0.1297, 0.2400, 0.2941),
}


def printed(mode: str, dataset: str) -> str:
    """Percent, of the paper."""
    return f"{dataset}, {mode}: " + ", ".join(
        f"{n}: {100 * x:.1f}" for n, x in zip(ALL_OWNERS, PRINTED[dataset, mode], strict=True)
    )


PAPER = "huang2023"
NOTE = "Their joint DP is not private as printed; ours is two phases, at the same epsilon and delta"
HERE = f"4 and 512 owners are of `{MEASURED}`"
COMMON: dict[str, Any] = {"seeds": (0, 1, 2), "measured": ONLY_JOINT}


def table1(run: Run) -> Iterator[Claim]:
    """What is said of Table 1."""
    yield from judge1(Found(kept()))
    yield from own_rows()


def judge1(found: Found) -> Iterator[Claim]:
    """From the runs, at the numbers of owners that are measured."""
    owners = found.owners((JOINT, FULL), ALL_OWNERS)
    gains = apart(found, JOINT, FULL, owners)
    yield claim(
        "Table 1",
        "at epsilon 1 joint DP is better than full DP, at every number of owners",
        list(gains.values()),
        (JOINT, FULL),
        found,
        ALL_OWNERS,
    )

    def best(mode: str, others: tuple[str, ...], owners: tuple[int, ...]) -> list[list[float]]:
        return [gaps for other in others for gaps in apart(found, mode, other, owners).values()]

    yield claim(
        "Table 1",
        "with more than 128 owners joint DP is better than owners alone and than full DP",
        best(JOINT, (SILO, FULL), found.owners((JOINT, SILO, FULL), (256, 512))),
        (JOINT, SILO, FULL),
        found,
        (256, 512),
    )
    yield claim(
        "Table 1",
        "with at most 128 owners each does better alone than under either DP",
        best(SILO, (JOINT, FULL), found.owners((JOINT, SILO, FULL), ALL_OWNERS[:4])),
        (SILO, JOINT, FULL),
        found,
        ALL_OWNERS[:4],
    )
    both = found.owners((FED_AVG, SILO), ALL_OWNERS)
    shared = apart(found, FED_AVG, SILO, both)
    yield claim(
        "Table 1",
        "without DP, collaboration is about as good as owners alone for n <= 64, and better beyond",
        [[3.5 - abs(gap) if n <= 64 else gap - 1 for gap in gaps] for (_, n), gaps in shared.items()],
        (FED_AVG, SILO),
        found,
        ALL_OWNERS,
    )
    yield claim(
        "Section 4.1.2",
        "at small epsilon joint DP gains more over full DP the more owners there are",
        [
            [later - sooner for sooner, later in zip(gains[dataset, a], gains[dataset, b], strict=True)]
            for dataset in DATASETS
            for a, b in pairwise(owners)
        ],
        (JOINT, FULL),
        found,
        ALL_OWNERS,
        "Here it gains less: a head fitted on fewer records adds less",
    )
    far = {
        (dataset, n): [100 * (value - theirs) for value in found.of(dataset, n, FULL)]
        for dataset in DATASETS
        for n, theirs in zip(ALL_OWNERS, PRINTED[dataset, FULL], strict=True)
    }
    yield claim(
        "Table 1",
        "the accuracies of full DP at epsilon 1, clip norm 15",
        [[5 - abs(gap) for gap in gaps] for gaps in far.values()],
        (FULL,),
        found,
        ALL_OWNERS,
        "DP-SGD on all records does not depend on who owns them, and is above theirs at every n, by up to "
        f"{max(map(mean, far.values())):.0f} points. Optimiser, rate, batch, noise multiplier, accountant and what is "
        "clipped are not told, so what they ran cannot be run again",
    )


def apart(found: Found, one: str, other: str, owners: tuple[int, ...]) -> dict[tuple[str, int], list[float]]:
    """Points by which one way is above the other, by data set and owners, and seed."""
    return {
        (dataset, n): [
            100 * (a - b) for a, b in zip(found.of(dataset, n, one), found.of(dataset, n, other), strict=True)
        ]
        for dataset in DATASETS
        for n in owners
    }


def claim(
    place: str,
    statement: str,
    differences: list[list[float]],
    modes: tuple[str, ...],
    found: Found,
    wanted: tuple[int, ...],
    more: str = "",
) -> Claim:
    """A claim with the rows of both tables, on the numbers of owners that are measured."""
    owners = found.owners(modes, wanted)
    left = [n for n in wanted if n not in owners]
    verdict, power = decided(PAPER, statement, differences)
    notes = [more] if more else []
    notes += [NOTE] if JOINT in modes else []
    notes += [f"without n = {', '.join(map(str, left))}, which `{MEASURED}` runs"] if left else []
    notes += [HERE] if {4, 512} & set(owners) and JOINT in modes else []
    return Claim(
        place=place,
        statement=statement,
        verdict=verdict,
        why=power + ". ".join(notes),
        theirs="; ".join(printed(mode, dataset) for dataset in DATASETS for mode in modes),
        ours="; ".join(found.row(mode, dataset, owners) for dataset in DATASETS for mode in modes),
        value={
            f"{dataset}, {mode}": [found.mean(dataset, n, mode) for n in owners]
            for dataset in DATASETS
            for mode in modes
        },
        **COMMON,
    )


def own_rows() -> Iterator[Claim]:
    """What their tables say of their sentences."""
    rows = {
        (dataset, n): b - a
        for dataset in DATASETS
        for n, a, b in zip(ALL_OWNERS, PRINTED[dataset, FULL], PRINTED[dataset, JOINT], strict=True)
    }
    ahead = sum(gain > 0 for gain in rows.values())
    yield Claim(
        place="Section 4.1.2",
        statement="in their own Table 1 joint DP is consistently better than full DP",
        theirs="consistently",
        ours=f"in {ahead} of {len(rows)} rows; the least gain {100 * min(rows.values()):+.1f} points",
        verdict=judged(ahead == len(rows)),
        why="" if ahead == len(rows) else "not with 4 owners on FashionMNIST, within their deviation",
        value=list(rows.values()),
    )
    rise = all(rows[dataset, a] < rows[dataset, b] for dataset in DATASETS for a, b in pairwise(ALL_OWNERS))
    yield Claim(
        place="Section 4.1.2",
        statement="in their own Table 1 the gain of joint DP grows with the number of owners",
        theirs="larger for larger n",
        verdict=judged(rise),
        ours="; ".join(f"{d}: " + ", ".join(f"{100 * rows[d, n]:+.1f}" for n in ALL_OWNERS) for d in DATASETS)
        + " points",
        why="" if rise else "it goes up and down",
        value=list(rows.values()),
    )


# -- Table 2 -----------------------------------------------------------------------------------------------------------


def table2(run: Run) -> Iterator[Claim]:
    """Which layers are personal."""
    yield from judge2({own: layers(own) for own in kept_joint.TABLE_2})


def layers(own: tuple[str, ...]) -> list[float]:
    """Accuracies of the benchmark, mnist, 128 owners."""
    mode = {(): FULL, ("fc1",): JOINT}.get(own, f"personal {'+'.join(own)}")
    return kept_joint._values("mnist", 128, mode)


def judge2(found: dict[tuple[str, ...], list[float]]) -> Iterator[Claim]:
    """From the runs."""
    theirs = dict(zip(kept_joint.TABLE_2, kept_joint.PAPER_2, strict=True))

    def name(own: tuple[str, ...]) -> str:
        return "+".join(own) or "none"

    common: dict[str, Any] = {
        "place": "Table 2",
        "theirs": ", ".join(f"{name(own)} {100 * x:.1f}" for own, x in theirs.items()),
        "ours": ", ".join(f"{name(own)} {told(x)}" for own, x in found.items()),
        "seeds": (0, 1, 2),
        "measured": ONLY_JOINT,
        "value": {name(own): x for own, x in found.items()},
    }
    means = {own: mean(x) for own, x in found.items()}

    def above(one: tuple[str, ...], other: tuple[str, ...]) -> list[float]:
        return [100 * (a - b) for a, b in zip(found[one], found[other], strict=True)]

    statement = "of all choices of personal layers FC1 alone is best"
    verdict, power = decided(PAPER, statement, [above(("fc1",), own) for own in found if own != ("fc1",)])
    yield Claim(**common, statement=statement, verdict=verdict, why=power + NOTE)
    statement = "accuracy is poor where personal layers come before shared ones"
    first = [own for own in found if "conv1" in own or "conv2" in own]
    verdict, power = decided(PAPER, statement, [[gap - 5 for gap in above((), own)] for own in first])
    yield Claim(
        **common,
        statement=statement,
        verdict=verdict,
        why=f"{power}All choices are within {100 * (max(means.values()) - min(means.values())):.1f} points here",
    )
    same = {own: x for own, x in theirs.items() if own in ((), ("fc1",))}
    n128 = PRINTED["mnist", FULL][3], PRINTED["mnist", JOINT][3]
    holds = tuple(same.values()) == n128
    yield Claim(
        place="Table 2",
        statement="its rows 'none' and 'FC1' are Table 1's full and joint DP at n = 128",
        theirs="n = 128 in the caption",
        ours=f"they are {', '.join(f'{x:.4f}' for x in same.values())}; Table 1 has {n128[0]:.4f}, "
        f"{n128[1]:.4f} at n = 128, and "
        f"{PRINTED['mnist', FULL][4]:.4f}, {PRINTED['mnist', JOINT][4]:.4f} at n = 256",
        verdict=judged(holds),
        why="" if holds else "equal to n = 256 to the digit: the caption or the rows are of another n",
        value=list(same.values()),
    )


# -- Table 4, Fig. 1 ---------------------------------------------------------------------------------------------------


def table4(run: Run) -> Iterator[Claim]:
    """Users with several records."""
    yield from judge4(Found(kept()))
    beats = [
        (k, eps) for k, row in TABLE_4.items() if k > 1 for eps, x in zip((1, 3, 8), row[1:], strict=True) if x > 0.7678
    ]
    yield Claim(
        place="Appendix C",
        statement="in their own Table 4, n = 256, epsilon above 1 and m/r above 1, joint DP could occasionally "
        "outperform "
        "owners alone",
        theirs="occasionally",
        ours=f"at (m/r, epsilon) = {beats}, of {2 * (len(TABLE_4) - 1)}",
        verdict=judged(len(beats) > 0),
        why="" if beats else "nowhere",
        value=[list(pair) for pair in beats],
    )
    yield Claim(
        place="Table 4",
        statement="users with several records at epsilon 3 and 8, and with 4 owners",
        theirs="accuracies from 0.17 to 0.82",
        verdict="not tried",
        why="what is clipped, and by which accountant, is not told; epsilon 1 at n = 256 shows the trend",
    )


def judge4(found: Found) -> Iterator[Claim]:
    """From the runs: n = 256, mnist, epsilon 1."""
    sizes = (1, 5, 20)
    common: dict[str, Any] = {
        "place": "Table 4",
        "theirs": "m/r: full, joint: "
        + "; ".join(f"{k}: {100 * TABLE_4[k][0]:.1f}, {100 * TABLE_4[k][1]:.1f}" for k in sizes),
    }
    joint = {k: found.of("mnist", 256, JOINT, records=k) for k in sizes}
    means = [mean(x) for x in joint.values()]
    measured = COMMON | {"value": means, "ours": "joint: " + "; ".join(f"{k}: {told(x)}" for k, x in joint.items())}
    statement = "n = 256, epsilon 1: accuracy under joint DP falls with the records of a user"
    falls = [[100 * (a - b) for a, b in zip(joint[x], joint[y], strict=True)] for x, y in pairwise(sizes)]
    verdict, power = decided(PAPER, statement, falls)
    yield Claim(
        **common,
        **measured,
        statement=statement,
        verdict=verdict,
        why=f"{power}Three of the five m/r; one clipped gradient a user, users drawn at random. {NOTE}",
    )
    statement = "n = 256, epsilon 1: with 20 records a user nothing is learned under joint DP"
    verdict, power = decided(PAPER, statement, [[5 - 100 * abs(x - TABLE_4[20][1]) for x in joint[20]]])
    yield Claim(
        **common,
        **measured,
        statement=statement,
        verdict=verdict,
        why=f"{power}Clipping a user's gradient as one, and drawing users, keeps most of the accuracy here",
    )
    statement = "n = 256, epsilon 1: joint DP outperforms full DP at every number of records of a user"
    if any(found.seeds("mnist", 256, FULL, records=k) < SEEDS for k in sizes):
        yield missing(**common, statement=statement)
        return
    full = {k: found.of("mnist", 256, FULL, records=k) for k in sizes}
    ahead = [[100 * (a - b) for a, b in zip(joint[k], full[k], strict=True)] for k in sizes]
    verdict, power = decided(PAPER, statement, ahead)
    yield Claim(
        **common,
        **(measured | {"ours": f"full: {'; '.join(f'{k}: {told(x)}' for k, x in full.items())}; {measured['ours']}"}),
        statement=statement,
        verdict=verdict,
        why=power + NOTE,
    )


def missing(place: str, statement: str, theirs: str) -> Claim:
    """Of runs that nobody has made yet."""
    return Claim(
        place=place,
        statement=statement,
        theirs=theirs,
        verdict="not tried",
        why=f"its runs are not made yet: `{MEASURED}` makes them, and they take minutes",
    )


def figure1(run: Run) -> Iterator[Claim]:
    """Accuracy against epsilon; what is missing of all tables is run first."""
    run_missing(run.seeds)
    yield from judge_epsilons(Found(kept()))


def judge_epsilons(found: Found) -> Iterator[Claim]:
    """From the runs: mnist, 256 owners."""
    small, large = (
        "for epsilon <= 10 joint DP is better than full DP (mnist)",
        "at large epsilon full DP is better (mnist)",
    )
    if any(found.seeds("mnist", 256, mode, epsilon=e) < SEEDS for mode in (FULL, JOINT) for e in EPSILONS):
        yield missing("Fig. 1", small, "consistently")
        yield missing("Fig. 1", large, "as noise is no bottleneck any more")
        return

    def of(mode: str, epsilon: float) -> float:
        return found.mean("mnist", 256, mode, epsilon=epsilon)

    def gap(epsilon: float) -> list[float]:
        """Points by which joint DP is above full DP."""
        joint, full = (found.of("mnist", 256, mode, epsilon=epsilon) for mode in (JOINT, FULL))
        return [100 * (a - b) for a, b in zip(joint, full, strict=True)]

    curves = {mode: [(epsilon, round(of(mode, epsilon), 4)) for epsilon in EPSILONS] for mode in (FULL, JOINT)}
    alone = round(found.mean("mnist", 256, SILO), 4)
    text = "; ".join(
        f"{epsilon:g}: {', '.join(told(found.of('mnist', 256, mode, epsilon=epsilon)) for mode in (FULL, JOINT))}"
        for epsilon in EPSILONS
    )
    common: dict[str, Any] = {
        "place": "Fig. 1",
        "ours": f"n = 256, epsilon: full, joint: {text}",
        **COMMON,
        "value": curves,
    }
    part = f"One of the six numbers of owners, epsilons {', '.join(f'{x:g}' for x in EPSILONS)}. {NOTE}"
    verdict, power = decided(PAPER, small, [gap(epsilon) for epsilon in EPSILONS if epsilon <= 10])
    yield Claim(
        **common,
        statement=small,
        theirs="consistently",
        verdict=verdict,
        why=power + part,
        curves=Curves("epsilon", "test accuracy", {**curves, "owners alone": [(x, alone) for x in (1.0, 100.0)]}, "x"),
    )
    verdict, power = decided(PAPER, large, [[-x for x in gap(100.0)]])
    yield Claim(
        **common,
        statement=large,
        theirs="as noise is no bottleneck any more",
        verdict=verdict,
        why=power + part,
    )
