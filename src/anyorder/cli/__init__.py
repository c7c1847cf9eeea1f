"""The command line: train, plan, epsilon, verify, audit."""

from importlib.util import find_spec
from typing import Annotated

import typer

from anyorder import __version__
from anyorder.cli.audit import group as audit
from anyorder.cli.budgets import budget
from anyorder.cli.check import check
from anyorder.cli.federated import federated
from anyorder.cli.fitting import fit
from anyorder.cli.output import fail
from anyorder.cli.planner import planner
from anyorder.cli.plans import epsilon, plan
from anyorder.cli.report_goals import report_goals
from anyorder.cli.reporting import report
from anyorder.cli.training import train
from anyorder.cli.tuning import tune
from anyorder.cli.verification import verify
from anyorder.noise.compiled import describe as noise_kernel

__all__ = ["app", "run"]

app = typer.Typer(
    name="anyorder", no_args_is_help=False, add_completion=False, rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Differentially private training for data that arrives in any order.\n\n"
    "$ anyorder train --dataset digits --epsilon 8\n\n"
    "$ anyorder plan --dataset-size 60000 --batch-size 500 --epochs 5 --epsilon 8\n\n"
    "$ anyorder epsilon --dataset-size 60000 --batch-size 3000 --noise-multiplier 1\n\n"
    "$ anyorder verify run.privacy.json\n\n"
    "$ anyorder report runs/digits-20250101-120000\n\n"
    "$ anyorder check train.py\n\n"
    "Exit codes: 0 ok, 1 a verification or a run failed, 2 bad usage, 130 stopped before it began.",
)  # fmt: skip
# One file for each command or two; this is the one list of them, in the order of the help.
app.command()(train)
app.command()(federated)
app.command()(fit)
app.command()(plan)
app.command()(planner)
app.command()(epsilon)
app.command()(report_goals)
app.command()(tune)
app.command()(verify)
app.command()(report)
app.command()(budget)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)(check)
app.add_typer(audit)


def run(arguments: list[str] | None = None) -> int:
    """Run a command line (sys.argv by default); returns the exit code. A usage error is one line on stderr."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="anyorder", standalone_mode=False)
    except Exception as problem:
        # Usage errors; their class has moved between versions of typer, what they carry has not.
        if not hasattr(problem, "format_message"):
            raise
        fail(f"{problem.format_message()} (see anyorder --help)", 2)
    return int(code or 0)


def _version(value: bool) -> None:
    if value:
        print(f"{__version__}\nnoise: {noise_kernel()}")
        if find_spec("torch") is not None:
            from anyorder.clipping.native import describe as clipping_kernel

            print(f"clipping: {clipping_kernel()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print it, and which compiled libraries are used."
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
