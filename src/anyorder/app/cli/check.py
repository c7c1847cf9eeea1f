"""`anyorder check`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.app import script_runner
from anyorder.app.cards import facts_panel
from anyorder.app.cli.exits import fail
from anyorder.app.cli.output import Json, one_line_errors, print_json
from anyorder.errors import ArgumentError

__all__ = ["check"]

STYLES = {"holds": "green", "false": "red", "not proven": "yellow"}


@one_line_errors
def check(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A training script, with its arguments behind it, or module:function.")],
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise std over clip norm; Opacus's own where a script uses it, else 1.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes; for a function that returns a loader.")] = None,
    steps: Annotated[int | None, typer.Option(help="Or its number of optimizer steps.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches of that loader in a step.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Target delta; that of the script's get_epsilon where it asks, else 1e-5.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="Where a batch keeps the ids of its units: a field's name, or a position.")
    ] = None,
    accountant: Annotated[str, typer.Option(help="Of the claim, without Opacus: prv or rdp.")] = "prv",
    as_json: Json = False,
) -> None:
    """Which order a training really uses, the epsilon that is printed for it, and the one that holds.

    $ anyorder check train.py --batch-size 64

    $ anyorder check --noise-multiplier 1 --epochs 3 --delta 1e-5 mydata:train_loader

    A script runs as Python would run it, to its end, and is watched: the order that
    its samplers say, who really came when, and what Opacus's accountant makes of it.
    Options of this command stand before the script, the script's own behind it.
    A function that returns a loader has that loader checked; nothing is trained.

    Exit code 0 if every claim holds, 1 if one does not, or the script failed.
    """
    given: dict[str, Any] = {
        "noise_multiplier": noise_multiplier, "epochs": epochs, "steps": steps, "accumulate": accumulate,
        "delta": delta, "accountant": accountant, "unit": int(unit) if unit is not None and unit.isdigit() else unit,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if ":" not in target and not Path(target).is_file():
        raise ArgumentError(f"the target must be a script that is there, or module:function, got {target!r}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        runner = [sys.executable, "-m", script_runner.__name__, str(report), json.dumps(given)]
        stdout = sys.stderr if as_json else None
        code = subprocess.run([*runner, target, *context.args], stdout=stdout, check=False).returncode
        found = json.loads(report.read_text()) if report.exists() else {"findings": [], "problem": None}
    if found["problem"] is not None:
        raise ArgumentError(found["problem"])
    findings = found["findings"]
    facts = [one.pop("facts") for one in findings]
    if as_json:
        print_json({"target": target, "exit_code": code, "findings": findings})
    console = Console()
    for one, rows in zip(findings, facts, strict=True):
        if not as_json:
            console.print(facts_panel("check", [(name, text) for name, text in rows], style=STYLES[one["verdict"]]))
    if code != 0:
        fail(f"the script ended with exit code {code}; what is told is of the steps before", 1)
    if not findings:
        fail("no batch of a torch DataLoader was followed by an optimizer's step: there is nothing to check", 1)
    if not all(one["holds"] for one in findings):
        raise typer.Exit(1)
