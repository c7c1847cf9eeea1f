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
from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.verdict_page import EXIT_CODES, clear_verdict, outcome_of, promise_of, save_verdict
from anyorder.audit.loader_check import NOTHING, UNSURE, WHAT_IF
from anyorder.errors import ArgumentError

__all__ = ["check"]

STYLES = {"holds": "green", "false": "red", "not proven": "yellow", NOTHING: "red", WHAT_IF: "cyan", UNSURE: "yellow"}
PROMISES = {"green": "green", "amber": "yellow", "red": "red"}  # of a claim that holds

_ENDS = {
    NOTHING: "epsilon is infinite",
    WHAT_IF: "no epsilon is claimed",
    UNSURE: "examples may change the gradients of others, or noise may come twice",
}


@one_line_errors
def check(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="A training script with its arguments behind it, or module:function.")],
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help='"What if": noise std over clip norm that a script without privacy, or a loader, would have.'
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs, for a function that returns a loader.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Batches of the loader per optimizer step.")] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Target delta. Default: that of the script's get_epsilon; else 1e-5, or 0.1 / examples if less."
        ),
    ] = None,
    unit: Annotated[str | None, typer.Option(help="Field name or position of the unit ids in a batch.")] = None,
    accountant: Annotated[
        str, typer.Option(help="Accountant of the claim where Opacus is not used: prv or rdp.")
    ] = "prv",
    out: Annotated[
        Path | None, typer.Option(help="Folder for verdict.html, verdict.json, verdict.md and badge.svg.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a training script and say whether it is private: what it claims, what was seen, and what holds.

    $ anyorder check train.py --batch-size 64

    $ anyorder check --out verdict train.py

    The script runs unchanged, to its end. The command watches whether each step
    clips and adds noise, the order of the data, and which epsilon the
    script claims. Put options of this command before the script, and its
    own arguments behind it.

    $ anyorder check --noise-multiplier 1 --epochs 3 --delta 1e-5 mydata:train_loader

    The loader that a function returns is read, and nothing is trained: "what if".

    Exit code 0: every claim holds. 1: a claim does not hold, or the script failed.
    3: no private training was seen. 4: nobody claims an epsilon ("what if"). 5: a claim,
    of which what was seen establishes neither that it holds nor that it does not.
    """
    given: dict[str, Any] = {
        "noise_multiplier": noise_multiplier, "epochs": epochs, "steps": steps, "accumulate": accumulate,
        "delta": delta, "accountant": accountant, "unit": int(unit) if unit is not None and unit.isdigit() else unit,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if ":" not in target and not Path(target).is_file():
        raise ArgumentError(f"the target must be a script that is there, or module:function, got {target!r}")
    if out is not None:
        clear_verdict(out)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        runner = [sys.executable, "-m", script_runner.__name__, str(report), json.dumps(given)]
        stdout = sys.stderr if as_json else None
        code = subprocess.run([*runner, target, *context.args], stdout=stdout, check=False).returncode
        found = json.loads(report.read_text()) if report.exists() else {"findings": [], "problem": None}
    if found["problem"] is not None:
        raise ArgumentError(found["problem"])
    findings = found["findings"]
    promises = [promise_of(one) for one in findings]
    facts = [
        one.pop("facts") + ([] if promise is None else [("promise", promise[1])])
        for one, promise in zip(findings, promises, strict=True)
    ]
    outcome = outcome_of(findings, code)
    if out is not None:
        save_verdict(out, target, code, findings, facts)
    if as_json:
        print_json({"target": target, "exit_code": code, "outcome": outcome, "findings": findings})
    console = Console()
    for one, rows, promise in zip(findings, facts, promises, strict=True):
        if not as_json:
            style = STYLES[one["verdict"]] if promise is None else PROMISES[promise[0]]
            console.print(facts_panel("check", [(name, text) for name, text in rows], style=style))
    if code != 0:
        fail(f"the script ended with exit code {code}; what is told is of the steps before", ExitCode.FAILED)
    if not findings:
        fail(
            "no private training was seen: no optimizer of torch stepped after a batch of a DataLoader. A script that "
            "finds its own finished checkpoint takes no step: move the checkpoint away, and check again",
            ExitCode.NOT_PRIVATE,
        )
    if outcome in _ENDS:
        fail(f"{outcome}: {_ENDS[outcome]}", EXIT_CODES[outcome])
    if EXIT_CODES[outcome]:
        raise typer.Exit(EXIT_CODES[outcome])
