"""`anyorder fit`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.app.cards import facts_panel
from anyorder.app.cli.common import (
    PUBLIC_MECHANISM,
    BudgetFile,
    Json,
    one_line_errors,
    print_json,
    run_or_resume,
    verify_command,
)
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_up

__all__ = ["fit"]

_BOUNDS = (
    'JSON, written by you and public: {"features": {"age": [17, 90], "job": ["clerk", "nurse"]}, "target": ["no", '
    '"yes"]}. Two numbers are low and high; words are categories.'
)


@one_line_errors
def fit(
    csv: Annotated[Path | None, typer.Option(help="The table in UTF-8: a header, then one row per line.")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    bounds: Annotated[Path | None, typer.Option(help=_BOUNDS)] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon. Default: 1.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Target delta. Default: a tenth of 1 / rows, rounded down.")
    ] = None,
    learner: Annotated[
        str | None,
        typer.Option(help="logistic, softmax, linear, svc or poisson. Default: by the target's bounds."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows in a step. Default: 256.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the table, in its order. Default: 1.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows to use, from the top. Default: all.")] = None,
    user_key: Annotated[
        str | None, typer.Option(help="Column that names the user of a row: each user is protected with all rows.")
    ] = None,
    max_participations: Annotated[
        int | None, typer.Option(help="Most steps that one user's rows may be in; later rows are left out. Default: 1.")
    ] = None,
    mechanism: Annotated[str | None, typer.Option(help=PUBLIC_MECHANISM + " Default: auto.")] = None,
    regularization: Annotated[
        float | None,
        typer.Option(help="Lambda of the learner. Default: computed from batch, bounds and noise, which are public."),
    ] = None,
    test_csv: Annotated[Path | None, typer.Option(help="A public table on which to measure accuracy.")] = None,
    output: Annotated[Path | None, typer.Option(help="New folder. Default: runs/<name of the csv>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, with its settings.")] = None,
    budget: BudgetFile = None,
    as_json: Json = False,
) -> None:
    """Fit a linear model to a CSV file privately, in one pass in the order it lies in.

    $ anyorder fit --csv people.csv --target income --bounds bounds.json --epsilon 2

    $ anyorder fit --csv visits.csv --target count --bounds bounds.json --learner poisson --user-key person

    $ anyorder fit --resume runs/people-20250101-120000

    You state bounds, categories and classes, because they are not read from the
    data. A row that cannot be read, lacks a cell or has another target
    counts as zero, silently. model.json, run.privacy.json (the
    certificate), plan.json and metrics.json are public. The folder secret
    (the noise key, the record of who took part) is as secret as the data;
    anyorder publish copies the rest.
    """
    every: dict[str, Any] = {
        "csv": csv, "target": target, "bounds": bounds, "epsilon": epsilon, "delta": delta, "learner": learner,
        "batch_size": batch_size, "epochs": epochs, "rows": rows, "user_key": user_key,
        "max_participations": max_participations, "mechanism": mechanism, "regularization": regularization,
        "test_csv": test_csv,
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    from anyorder.app import fit as job  # with what loads slowly, which no other command needs
    from anyorder.app.fit import Bounds
    from anyorder.app.progress import PassBar

    def start() -> Any:
        if missing := [name for name in ("csv", "target", "bounds") if name not in given]:
            raise ArgumentError(f"{', '.join('--' + name for name in missing)} must be given, or --resume FOLDER")
        words = dict(given)
        for name in ("csv", "test_csv"):
            if name in given:
                words[name] = str(given[name].absolute())
        words["bounds"] = Bounds.load(given["bounds"]).to_dict()
        return job.fit(job.FitSettings(**words), output, observer=bar, budget=budget)

    console = Console(stderr=as_json)
    bar = PassBar(console)
    result = run_or_resume(
        "fit", bar, given, output, resume, budget=budget,
        start=start, go_on=lambda folder: job.resume_fit(folder, observer=bar),
    )  # fmt: skip
    if as_json:
        print_json({"output": str(result.path), **result.to_dict()})
        return
    console.print(facts_panel("result", _rows(result), style="green"))


def _rows(result: Any) -> list[tuple[str, str]]:
    """What came of it, for people."""
    plan, settings = result.plan, result.settings
    whom = "row" if settings.user_key is None else "user"
    rows = [
        ("model", f"{settings.learner}, {counted(len(result.model.bounds.names), 'feature')}, for {settings.target}"),
        ("privacy", f"epsilon <= {rounded_up(plan.epsilon)} at delta = {rounded_up(plan.delta, 6)}, for one {whom}"),
    ]
    if result.test_rows is not None:
        rows.append(("test", _tested(result)))
    return [
        *rows,
        ("files", str(result.path)),
        ("check it", verify_command(result.path, plan)),
    ]


def _tested(result: Any) -> str:
    """The score, and what it is of: the test table is of nobody in need of protection."""
    rows, lost, settings = result.test_rows, result.test_unreadable, result.settings
    numbers = settings.learner in ("linear", "poisson")
    if not rows:
        return f"no row of {settings.test_csv} fits the bounds"
    if result.score is None:
        words = "no R^2, as all targets are one number,"
    else:
        words = f"R^2 {result.score:.4f}" if numbers else f"{result.score:.2%} right"
    left_out = f"; {lost} of {rows + lost} could not be read" if lost else ""
    return f"{words} of {rows} {'row' if rows == 1 else 'rows'}{left_out}"
