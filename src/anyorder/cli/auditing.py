"""`anyorder audit run`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from anyorder.audit.bounds import Method
from anyorder.cli.options import Json
from anyorder.cli.output import attacking, print_json
from anyorder.report.audits import METHODS

__all__ = ["run"]


def run(
    target: Annotated[
        str, typer.Argument(help="module:function -> anyorder.run.Setup, or the folder of a run of anyorder train.")
    ],
    canaries: Annotated[int, typer.Option(help="Gradients at the clip norm, each in or out by a secret coin.")] = 1000,
    coordinates: Annotated[
        int | None, typer.Option(help="Coordinates of the gradient that the canaries live on. Default: all.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of each bound on its own; the verdict does not use it.")] = 0.95,
    delta: Annotated[float | None, typer.Option(help="Of claim and bounds. Default: the plan's.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"Bound: {', '.join(METHODS)}; may be given again. Default: all.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: scores beside the two laws of the claim.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for audit.json, audit.png and the run's certificate.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a set-up of your own with canaries in it, and see whether its claim holds.

    $ anyorder audit run mytraining:setup

    $ anyorder audit run runs/digits-20250101-120000 --out audits/digits

    The function returns an anyorder.run.Setup: plan, model, optimizer, loader,
    loss. All planned steps are trained; a folder's run is repeated, with noise
    of its own, and stays as it is. The model that was trained is thrown away:
    it has seen canaries. Who was in, and each one's score, stay in memory.

    Exit code 0 if the claim was not refuted (less than one true claim in a
    million is), 1 if it was, 2 if there was no audit.
    """
    with attacking():
        from anyorder.run import audit_job  # with torch
        from anyorder.run.progress import StepsBar

    console = Console(stderr=as_json)
    bar = StepsBar(console)
    with attacking(bar.stop):
        asked = audit_job.Request(
            target=target, canaries=canaries, coordinates=coordinates, confidence=confidence, delta=delta,
            methods=cast(Sequence[Method], tuple(method or METHODS)), plot=plot, out=out,
        )  # fmt: skip
        done = audit_job.run(asked, bar)
    if as_json:
        print_json(done.to_dict())
    else:
        console.print(done.panel())
    if done.summary.refuted:
        raise typer.Exit(1)
