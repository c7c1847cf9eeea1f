"""`anyorder tune`."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.app import report as report_file
from anyorder.app.cards import facts_panel
from anyorder.app.cli.common import BudgetFile, Delta, Json, one_line_errors, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.text import load_function
from anyorder.budget.file import Budget
from anyorder.budget.search import CERTIFICATE, REPORT, PrivateScore, Search, Trial
from anyorder.budget.search import tune as search
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import read_json
from anyorder.plan.options import default_delta

__all__ = ["tune"]

_SHOWN = 400  # characters of a result


@one_line_errors
def tune(
    function: Annotated[str, typer.Option(help="module:function (settings, plan, folder) -> anyorder.budget.Trial.")],
    space: Annotated[Path, typer.Option(help="JSON: {'space': {name: values}, 'plan': {keyword of ao.plan: value}}.")],
    output: Annotated[Path, typer.Option(help="Folder of the search; the same command continues there after a kill.")],
    epsilon: Annotated[float, typer.Option(help="Target epsilon of the whole search.")],
    delta: Delta = None,
    runs: Annotated[
        int | None,
        typer.Option(help="Mean number of runs; with law fixed, the exact number. Default: 50; all settings."),
    ] = None,
    law: Annotated[
        str,
        typer.Option(
            help="Law of the number of runs: [bold]geometric[/bold], [bold]logarithmic[/bold], [bold]poisson[/bold]; "
            "or [bold]fixed[/bold], which shows all runs and pays for that."
        ),
    ] = "geometric",
    public_score: Annotated[
        bool,
        typer.Option(
            "--public-score", help="You state that scores are made of the released model and public data alone."
        ),
    ] = False,
    sensitivity: Annotated[
        float | None,
        typer.Option(help="How far one unit can move a score on private data; noise is added to such scores."),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of each run's mu^2 that its private score gets.")] = 0.1,
    budget: BudgetFile = None,
    as_json: Json = False,
) -> None:
    """Search for settings of a private training; the whole search keeps epsilon.

    $ anyorder tune --function mine:trial --space space.json --runs 50
    --law geometric --epsilon 8 --delta 1e-5 --public-score
    --output searches/mine

    The best run and the claim of the search are shown. How many runs there
    were, what they gave and how long each took is as secret as the data: no
    progress is shown, and what the function prints goes to a secret file,
    which is removed at the end. With law fixed all runs are shown.

    Exit code 0 for a search that ended, also where the law gave no run, 1 for one
    that failed or was stopped, 2 for a wrong command.
    """
    if public_score == (sensitivity is not None):
        raise ArgumentError(
            "a search needs --public-score, which states that scores are made without private data, or --sensitivity, "
            f"how far one person moves a score of private data; got {'both' if public_score else 'neither'}"
        )
    asked = _asked(space)
    if delta is None:
        units = asked.get("plan", {}).get("dataset_size")
        if type(units) is not int or units < 1:
            raise ArgumentError(
                "--delta must be given where the plan of --space has no dataset_size that it follows from"
            )
        delta = default_delta(units)
    made = load_function(function, "--function")
    console = Console(stderr=as_json)
    if law != "fixed":
        told = "how many runs there are, and how many are done, is not told"
        console.print(f"Searching in {output}; {told}.", highlight=False, markup=False, soft_wrap=True)
    try:
        found = search(
            made, asked["space"], epsilon=epsilon, delta=delta, plan=asked.get("plan", {}), runs=runs, law=law,
            score="public" if sensitivity is None else PrivateScore(sensitivity, share), folder=output,
            budget=None if budget is None else Budget(budget),
        )  # fmt: skip
    except KeyboardInterrupt:
        fail(f"stopped, with nothing shown: the same command goes on in {output}", ExitCode.FAILED)
    report_file.write_search(output)
    if as_json:
        print_json(_as_dict(found, output))
        return
    console.print(facts_panel("search", found.certificate.facts()))
    if found.best is not None:
        score = "noisy score" if found.certificate.claim.score is not None else "score"
        console.print(f"best: {score} {found.best.score:.6g}, in {found.best.folder}", highlight=False, markup=False)
        if found.best.result is not None:
            console.print(f"result: {_brief(found.best.result)}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"certificate: {output / CERTIFICATE}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"report: {output / REPORT}", highlight=False, markup=False, soft_wrap=True)


def _brief(result: Any) -> str:
    """What the best run kept, or where it is."""
    text = json.dumps(result)
    return text if len(text) <= _SHOWN else f"{len(text)} characters of JSON, which the same command prints with --json"


def _asked(path: Path) -> dict[str, Any]:
    try:
        data = read_json(path, large=True)
    except CertificateError as problem:
        raise ArgumentError(f"--space must be a file of JSON: {problem}") from problem
    if not {"space"} <= data.keys() <= {"space", "plan"}:
        raise ArgumentError(
            f"--space must hold an object with 'space' and maybe 'plan', got {', '.join(map(repr, sorted(data)[:5]))}"
        )
    return data


def _as_dict(found: Search, output: Path) -> dict[str, Any]:
    def run(trial: Trial) -> dict[str, Any]:
        score = trial.score if math.isfinite(trial.score) else None
        return {"settings": trial.settings, "score": score, "result": trial.result, "folder": str(trial.folder)}

    return {
        "search": found.certificate.claim.to_dict(),
        "claims": found.certificate.claims(),
        "best": None if found.best is None else run(found.best),
        "trials": None if found.trials is None else [run(trial) for trial in found.trials],
        "certificate": str(output / CERTIFICATE),
    }
