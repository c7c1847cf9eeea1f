"""The command line: which commands there are. Each is loaded when it is asked for, with what it needs and no more."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from anyorder.app.cli.exits import fail
from anyorder.app.version import version_lines

# The one list of commands, in the order of the help: where each stands, and the first paragraph of its own help, which
# a test holds against it.
COMMANDS = {
    "check": (
        "check:check",
        "Run a training script and say whether it is private: what it claims, what was seen, and what holds.",
    ),
    "train": (
        "training:train", "Train a model privately; leaves a folder with model, metrics, plots and certificate."
    ),
    "federated": (
        "federated:federated", "Simulate federated learning in which each user is protected as a whole."
    ),
    "fit": ("fitting:fit", "Fit a linear model to a CSV file privately, in one pass in the order it lies in."),
    "plan": ("plans:plan", "Find the mechanism and the noise for a data set, an order and a budget."),
    "planner": (
        "planner:planner",
        "Mechanisms side by side on a page: sliders for data, budget and order; on this machine alone.",
    ),
    "epsilon": ("plans:epsilon", "The epsilon that a run really has, in the order in which it saw the data."),
    "report-goals": (
        "plans:report_goals",
        "Epsilon against report goal: what more users in a round buy, for a population.",
    ),
    "tune": ("tuning:tune", "Search for settings of a private training; the whole search keeps epsilon."),
    "verify": ("verification:verify", "Recompute every claim of a certificate or plan from the file alone."),
    "publish": ("publishing:publish", "Copy the files of a run that may be shown into a folder of their own."),
    "withdraw": ("publishing:withdraw", "Withdraw a certificate: a note beside it, which verify finds."),
    "report": ("reporting:report", "Write the report of a run: one page to read, print and sign off."),
    "budget": (
        "budgets:budget", "What a data set may be used for, and was: every run is entered before it starts."
    ),
    "audit": ("audit:group", "Attack a training of your own, and see whether its claim holds."),
}  # fmt: skip
_OF_ANOTHER = {  # what follows is the command line of another program
    "check": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
}


class _Later(TyperCommand):
    """A command that the help names, and that is loaded when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the command itself."""
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """All commands, none of them loaded."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, (_, text) in COMMANDS.items():
            self.add_command(_Later(name, help=text, rich_markup_mode="rich"))


def load_command(name: str) -> Any:
    """The command of this name, loaded."""
    module, _, function = COMMANDS[name][0].partition(":")
    found = getattr(importlib.import_module(f"anyorder.app.cli.{module}"), function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, context_settings=_OF_ANOTHER.get(name))(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="anyorder", cls=_Commands, no_args_is_help=False, add_completion=False, rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Differentially private training for data that arrives in any order.\n\n"
    "$ anyorder check train.py\n\n"
    "$ anyorder train --dataset digits --epsilon 8\n\n"
    "$ anyorder plan --dataset-size 60000 --batch-size 500 --epochs 5 --epsilon 8\n\n"
    "$ anyorder epsilon --dataset-size 60000 --batch-size 3000 --noise-multiplier 1\n\n"
    "$ anyorder verify run.privacy.json\n\n"
    "$ anyorder report runs/digits-20250101-120000\n\n"
    "Exit codes: 0 ok, 1 a verification or a run failed, 2 bad usage, 3 and 4 see check, 130 stopped before it began.",
)  # fmt: skip


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
        print(version_lines())
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
