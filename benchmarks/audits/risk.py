"""What attackers reach under 1000 curves, by this package and by riskcal 1.5.1, whose values are in tests/refs.

A row is of one kind of curve: ours over theirs, the least and the most, of the advantage and of the true positive rates
at false positive rates of 0.1, 1 and 5 %. Gaussians and single pairs are closed forms. Of sampled ones `same` is
of riskcal's own loss distribution, read by this package; `ours` of this package's, whose finer grid is below it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from anyorder.accounting.curves import Gaussian, Sampled
from anyorder.accounting.risk import Reach, TradeOff, point_reach, reach
from benchmarks._report import Row

REFERENCES = Path(__file__).resolve().parents[2] / "tests" / "refs" / "riskcal.json"


class _Theirs(TradeOff):
    """A loss distribution of dp-accounting, as a curve."""

    mu = None

    def __init__(self, losses: object) -> None:
        self.delta = losses.get_delta_for_epsilon  # type: ignore[attr-defined]


def _apart(found: Reach, advantage: float, tprs: list[float]) -> tuple[float, float]:
    """(the lowest, the highest) of ours over theirs."""
    ratios = [a / b for a, b in zip([found.advantage, *found.tprs], [advantage, *tprs], strict=True)]
    return min(ratios), max(ratios)


def rows(quick: bool) -> Iterator[Row]:
    """One for each kind."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    data = json.loads(REFERENCES.read_text())
    ends: dict[str, list[tuple[float, float]]] = {}
    for kind, given, advantage, tprs in data["rows"]:
        if kind == "gaussian":
            ends.setdefault(kind, []).append(_apart(reach(Gaussian(*given)), advantage, tprs))
        elif kind == "point":
            ends.setdefault(kind, []).append(_apart(point_reach(*given), advantage, tprs))
        elif not quick or len(ends.get("sampled, ours", ())) < 10:
            sigma, q, n = given
            losses = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=data["interval"])
            same = reach(_Theirs(losses.self_compose(int(n))))
            ends.setdefault("sampled, same", []).append(_apart(same, advantage, tprs))
            ends.setdefault("sampled, ours", []).append(_apart(reach(Sampled(sigma, q, n)), advantage, tprs))
    for kind, found in ends.items():
        for name, ratio in (("least", min(one for one, _ in found)), ("most", max(one for _, one in found))):
            yield Row(f"{kind}, {len(found)} curves: {name}", ratio, 1.0, ratio, "of riskcal's")
