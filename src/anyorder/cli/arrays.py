"""`anyorder audit arrays`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.audit import from_file
from anyorder.audit.bounds import Method
from anyorder.cli.options import Json
from anyorder.cli.output import fail, print_json
from anyorder.errors import AnyorderError
from anyorder.report import AuditSummary
from anyorder.report.audits import METHODS, audit_panel

__all__ = ["arrays"]


def arrays(
    file: Annotated[
        Path,
        typer.Argument(
            help="An .npz file: released rows and canaries, or scores; coins; the claim. See docs/audit.md."
        ),
    ],
    released: Annotated[
        Path | None, typer.Option(help="The rows in an .npy file of their own; they may be larger than memory.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of each bound on its own; the verdict does not use it.")] = 0.95,
    as_json: Json = False,
) -> None:
    """Audit what any other program released, by the canaries that it may have used.

    $ anyorder audit arrays run.npz

    $ anyorder audit arrays run.npz --released rows.npy --json

    The file is written by numpy.savez with the fields of ao.audit.from_rows, or of
    ao.audit.from_scores for models alone. It holds secret coins: keep it as the
    data, and throw away the model that was attacked.

    Exit code 0 if the claim was not refuted, 1 if it was, 2 if there was no audit.
    """
    try:
        audited = from_file(file, released=released)
        methods: tuple[Method, ...] = tuple(METHODS) if audited.mus is not None else ("one_run", "clopper_pearson")
        summary = AuditSummary.of(audited, methods, confidence)
    except AnyorderError as problem:
        fail(str(problem), 2)  # 1 says that a claim was refuted
    if as_json:
        print_json(summary.to_dict())
    else:
        Console().print(audit_panel(summary))
    if summary.refuted:
        raise typer.Exit(1)
