"""What a paper says, what came out here, and the verdict; kept one JSON object a line in reproductions/results.

A paper is a module with a `TITLE` and `FIGURES`: a tuple of `Figure`, each a function of a `Run` that yields `Claim`s.
`python -m reproductions PAPER [FIGURE] --write` keeps them, `python -m reproductions --page` writes docs/papers.
"""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks._report import processor

from reproductions import _powers, _runs

RESULTS = Path(__file__).parent / "results"

Verdict = Literal["holds", "fails", "holds, scaled down", "fails, scaled down", "undecided", "not tried"]


@dataclass(frozen=True)
class Curves:
    """A figure run again: points (x, y) of each curve, and which axes are logarithmic ("", "x", "y", "xy")."""

    x: str
    y: str
    curves: dict[str, list[tuple[float, float]]]
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, and what became of it.

    Args:
        place: where it stands: "Table 4", "Theorem 4.1".
        statement: what is claimed, in our words.
        theirs, ours: their number and ours, as text for a table.
        verdict: "not tried" needs its reason in `why`; "scaled down" says there what is smaller; "fails" why;
            "undecided" what the experiment could have told: see `_powers`.
        paper, command: filled in by `found`.
        value: our numbers; what `ours` says, in full digits.
        seeds: of what is random; none for what is computed.
        measured: the command that measured it, where `command` only reads what that one kept.
        stored: the files of stored runs that it rests on; `--fresh` runs them anew.
        seconds: of processor time, of the kept runs that it rests on; None: what `command` took.
        curves: of a figure; drawn on the paper's page.
    Raises: ValueError for a verdict that is not one of these, or one without its reason.
    """

    place: str
    statement: str
    theirs: str
    ours: str = ""
    verdict: Verdict
    why: str = ""
    paper: str = ""
    command: str = ""
    value: float | list[Any] | dict[str, Any] | None = None
    seeds: tuple[int, ...] = ()
    measured: str = ""
    stored: tuple[str, ...] = ()
    seconds: float | None = None
    curves: Curves | None = None

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise ValueError(f"verdict must be one of {get_args(Verdict)}, not {self.verdict!r}")
        if self.verdict != "holds" and not self.why:
            raise ValueError(f"{self.place}: the verdict {self.verdict!r} needs its reason in why")
        if (self.verdict == "not tried") != (not self.ours):
            raise ValueError(f"{self.place}: ours must say what came out, and nothing where nothing was tried")


@dataclass(frozen=True)
class Run:
    """How a figure is run: small sizes or all of it, and the seeds of what is random."""

    quick: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Figure:
    """One part of a paper. `trains`: its command needs minutes or more, so that no test runs it, even with --quick."""

    name: str
    claims: Callable[[Run], Iterable[Claim]]
    trains: bool = False


@dataclass(frozen=True)
class Kept:
    """A line of the results: a claim, the figure it is part of, and how it was made.

    `power` is the digest of the power that was stated when it was made, "" where no chance is in it; `late` says that
    the runs it rests on were made before that power was stated.
    """

    figure: str
    claim: Claim
    cores: int
    seconds: float
    date: str
    versions: dict[str, str]
    power: str = ""
    late: bool = False


def judged(holds: bool, *, scaled: bool = False) -> Verdict:
    """The verdict on what was computed, or measured without chance; a smaller task is told of both outcomes."""
    return ("holds, scaled down" if holds else "fails, scaled down") if scaled else ("holds" if holds else "fails")


def found(paper: str, figure: Figure, run: Run) -> Iterator[Kept]:
    """Run the figure; each claim gets its command, and the seconds since the one before."""
    import torch

    versions = {name: version(name) for name in ("torch", "numpy", "scipy")} | {
        "python": platform.python_version(), "processor": processor()
    }  # fmt: skip
    before = time.perf_counter()
    _runs.READ.clear()
    _runs.POWERS.clear()
    for claim in figure.claims(run):
        command = f"python -m reproductions {paper} {figure.name}"
        claim = replace(claim, paper=paper, command=command, stored=tuple(sorted(_runs.READ)))
        now = time.perf_counter()
        seconds = round(now - before, 2) if claim.seconds is None else claim.seconds
        power = _powers.stated(paper, claim.statement)
        mark = ("", False) if power is None else (power.digest, _rests_on_older(claim))
        yield Kept(figure.name, claim, torch.get_num_threads(), seconds, date.today().isoformat(), versions, *mark)
        before = now


def _rests_on_older(claim: Claim) -> bool:
    """Whether a run that the claim rests on was made before the powers of its paper were stated as they are."""
    return bool(claim.measured) or bool(_runs.POWERS - {_powers.of_paper(claim.paper)})


def line(kept: Kept) -> str:
    """As JSON."""
    claim = asdict(kept.claim)
    value, seeds = claim.pop("value"), claim.pop("seeds")
    return json.dumps(
        {
            "figure": kept.figure,
            "claim": claim,
            "value": value,
            "seed": list(seeds),
            "cores": kept.cores,
            "seconds": kept.seconds,
            "date": kept.date,
            "versions": kept.versions,
            "power": kept.power,
            "late": kept.late,
        },
        allow_nan=False,
    )


def parsed(text: str) -> Kept:
    """The inverse of `line`."""
    row = json.loads(text)
    claim = row["claim"] | {"value": row["value"], "seeds": tuple(row["seed"])}
    claim["stored"] = tuple(claim.get("stored", ()))
    if claim["curves"] is not None:
        curves = {name: [(x, y) for x, y in points] for name, points in claim["curves"]["curves"].items()}
        claim["curves"] = Curves(**(claim["curves"] | {"curves": curves}))
    made = row["cores"], row["seconds"], row["date"], row["versions"], row["power"], row["late"]
    return Kept(row["figure"], Claim(**claim), *made)


def results(paper: str) -> list[Kept]:
    """What is kept of a paper; nothing before its first run."""
    path = RESULTS / f"{paper}.jsonl"
    return [parsed(text) for text in path.read_text().splitlines()] if path.exists() else []


def _seen(row: Kept, before: dict[tuple[str, str], Kept]) -> Kept:
    """A power that changed since the same seeds were run was stated after the run: what comes out again was known."""
    old = before.get((row.claim.place, row.claim.statement))
    known = old is not None and old.claim.seeds == row.claim.seeds and (old.late or old.power != row.power)
    return replace(row, late=bool(row.power) and (row.late or known))


def write(paper: str, figures: tuple[Figure, ...], fresh: dict[str, list[Kept]]) -> None:
    """Replace what is kept of the figures in `fresh`; the file is in the order of the paper's figures."""
    kept = {name: [row for row in results(paper) if row.figure == name] for name in (f.name for f in figures)}
    before = {(row.claim.place, row.claim.statement): row for row in results(paper)}
    fresh = {name: [_seen(row, before) for row in rows] for name, rows in fresh.items()}
    lines = [line(row) for rows in (kept | fresh).values() for row in rows]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{paper}.jsonl").write_text("".join(text + "\n" for text in lines))
