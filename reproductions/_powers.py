"""Powers of experiments: reproductions/powers.toml, which stands before the runs, and the one rule of verdicts."""

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from scipy.stats import t

TABLE = Path(__file__).with_name("powers.toml")
Task = Literal["theirs", "smaller", "other"]
Decided = Literal["holds", "fails", "holds, scaled down", "fails, scaled down", "undecided"]


@dataclass(frozen=True)
class Power:
    """What an experiment can decide, whatever comes out.

    Args:
        paper, claim: those whose statement begins so.
        seeds: fewer decide nothing.
        least: the least difference that matters, in `unit`.
        task: "theirs"; "smaller", of the same kind; "other", so far from theirs that neither outcome tells of it.
        distance: in which way it is another or a smaller one.
    """

    paper: str
    claim: str
    seeds: int
    least: float
    unit: str
    task: Task
    distance: str

    @property
    def digest(self) -> str:
        """Of all that it says."""
        return _digest(asdict(self))

    def verdict(self, differences: list[list[float]]) -> Decided:
        """The same rule for successes and misses.

        It holds where every interval is above 0, and fails where one is below, or where all that is not above is known
        to be less than matters. Else, and on another task than theirs, the experiment could not decide.

        Args:
            differences: by place and seed, above 0 where the claim holds: a list for each place, of one number a seed.
                Where less is claimed than "above", the threshold is taken off them.
        """
        if self.task == "other" or min(map(len, differences)) < self.seeds:
            return "undecided"
        pairs = list(zip(map(mean, differences), map(half_width, differences), strict=True))
        holds = all(found > error for found, error in pairs)
        below = any(found < -error for found, error in pairs)
        nothing = any(abs(found) + error < self.least for found, error in pairs)
        if not (holds or below or nothing):
            return "undecided"
        if self.task == "smaller":
            return "holds, scaled down" if holds else "fails, scaled down"
        return "holds" if holds else "fails"

    def told(self, differences: list[list[float]]) -> str:
        """In words, for the reason."""
        seeds, width = min(map(len, differences)), max(map(half_width, differences))
        known = f"known to within {width:.2g} {self.unit} (95 %)" if width < inf else "of unknown spread"
        far = f" Another task than theirs: {self.distance}." if self.task == "other" else ""
        return f"Power: {seeds} seed{'s' if seeds > 1 else ''}, differences {known}, {self.least:g} matter.{far} "


def half_width(found: list[float]) -> float:
    """Of the 95 % interval of their mean, by Student's t; infinite for one seed."""
    return float(t.ppf(0.975, len(found) - 1)) * stdev(found) / len(found) ** 0.5 if len(found) > 1 else inf


@cache
def table() -> tuple[Power, ...]:
    """All that are stated."""
    return tuple(Power(**row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["power"])


def stated(paper: str, statement: str) -> Power | None:
    """That of the claim: the entry with the longest beginning of the statement; None for what has no chance in it."""
    fitting = [power for power in table() if power.paper == paper and statement.startswith(power.claim)]
    return max(fitting, key=lambda power: len(power.claim), default=None)


def decided(paper: str, statement: str, differences: list[list[float]]) -> tuple[Decided, str]:
    """The verdict by the power that is stated, and that power in words."""
    power = stated(paper, statement)
    if power is None:
        raise ValueError(f"{TABLE.name} states no power for {paper}: {statement}")
    return power.verdict(differences), power.told(differences)


def of_paper(paper: str) -> str:
    """The digest of all powers of a paper: what its runs keep."""
    return _digest([asdict(power) for power in table() if power.paper == paper])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
