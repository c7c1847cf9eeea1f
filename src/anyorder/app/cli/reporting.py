"""`anyorder report`."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.app import report as report_file
from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.form import Form
from anyorder.budget.search import REPORT
from anyorder.errors import ArgumentError

__all__ = ["report"]


@one_line_errors
def report(
    path: Annotated[
        Path,
        typer.Argument(help="Folder of a run or a search that has ended, or one certificate or plan: public files."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The page. Default: report.html in the folder; of a file, next to it with .html at the end."),
    ] = None,
    owner: Annotated[str, typer.Option(help="Who answers for data and training.")] = "",
    purpose: Annotated[str, typer.Option(help="What the model is for.")] = "",
    data_set: Annotated[str, typer.Option(help="The data's name.")] = "",
    prepared: Annotated[str, typer.Option(help="By whom and when the report was prepared.")] = "",
    units: Annotated[
        int | None, typer.Option(help="Number of privacy units, where the file does not say it.", min=1)
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="No bounds on time and memory: for files that you trust, of long runs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the report of a run: one page to read, print and sign.

    $ anyorder report runs/digits-20250101-120000

    $ anyorder report runs/mine --owner "Registry, Dr. Lee" --purpose triage --data-set visits

    $ anyorder report run.privacy.json --output report.html

    It marks the promise green, amber or red by what an attacker finds and by
    delta times the number of units, apart from whether the file is
    consistent. Give owner, purpose, data set and who prepared it, or fill
    them in by hand. For a PDF, print the page in a browser.

    It uses public files alone: the certificate, whose claims are recomputed,
    and next to it metrics.json, audit.json and budget.json. The page needs
    no network and no script. Runs write it at their end; made again it is
    the same, byte for byte.

    Exit code 0, or 1 where the claim did not pass: the page then says so in red,
    and shows no claim. 2 where there is nothing to report on, and where a page is
    there already and the claim takes --large to read: it is left as it is.
    """
    form = Form(owner=owner, purpose=purpose, data_set=data_set, prepared=prepared, units=units)
    made = report_file.make(path, large=large, form=form)
    place = output or (path / REPORT if path.is_dir() else path.with_suffix(".html"))
    if place.exists() and os.path.samefile(place, path):
        raise ArgumentError(f"output must be another file than {path}, which is what the report is of")
    if made.unread and place.exists():
        raise ArgumentError(f"{place} is there, and is left as it is: {made.problem}. For a page of it, pass --large")
    try:
        with open(place, "w", encoding="utf-8", opener=_own if output is None else None) as file:
            file.write(made.text)
    except OSError as problem:
        raise ArgumentError(f"cannot write the report {place}: {problem.strerror or problem}") from problem
    if as_json:
        print_json({"ok": made.problem is None, "output": str(place), "problem": made.problem})
        if made.problem is not None:
            raise typer.Exit(ExitCode.FAILED)
        return
    if made.problem is not None:
        fail(f"NOT {'checked' if made.unread else 'verified'}, as {place} says: {made.problem}", ExitCode.FAILED)
    Console().print(f"report: {place}", highlight=False, markup=False, soft_wrap=True)


def _own(place: str, flags: int) -> int:
    """Open a place that nobody named: a link or a pipe that a stranger's folder has there is not followed."""
    return os.open(place, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
