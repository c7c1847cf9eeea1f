"""The command line: which commands there are. Each is loaded when it is asked for, with what it needs and no more."""

import importlib
import re
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from anyorder.app.exits import ExitCode, fail
from anyorder.app.version import version_lines

CHECK, TRAIN, PLAN = "Check what is there", "Train privately", "Plan before training"
FEDERATE, ACCOUNT = "Federate", "Report, publish and keep account"

# The one list of commands, in the order of the help: its group, where it stands, and the first paragraph of its own
# help, which a test holds against it.
COMMANDS = {
    "check": (
        CHECK, "check:check",
        "Run a training script and say whether it is private: what it claims, what was seen, and what holds.",
    ),
    "verify": (CHECK, "verification:verify", "Recompute every claim of a certificate or plan from the file alone."),
    "epsilon": (CHECK, "plans:epsilon", "The epsilon that a run really has, in the order in which it saw the data."),
    "audit": (CHECK, "audit:group", "Attack your own training, and see whether its claim holds."),
    "train": (
        TRAIN, "training:train",
        "Train a model privately; leaves a folder with model, metrics, plots and certificate.",
    ),
    "fit": (TRAIN, "fitting:fit", "Fit a linear model to a CSV file privately, in one pass in the order it lies in."),
    "tune": (TRAIN, "tuning:tune", "Search for settings of a private training; the whole search keeps epsilon."),
    "plan": (PLAN, "plans:plan", "Find the mechanism and the noise for a data set, an order and a budget."),
    "planner": (
        PLAN, "planner:planner",
        "Compare mechanisms on a page with sliders for data, budget and order, on this machine alone.",
    ),
    "federated": (
        FEDERATE, "federated:federated", "Simulate federated learning in which each user is protected as a whole."
    ),
    "report-goals": (
        FEDERATE, "plans:report_goals",
        "Epsilon against report goal: what more users in a round buy, for a population.",
    ),
    "report": (
        ACCOUNT, "reporting:report", "Write the report of a run: one page to read, print and sign."
    ),
    "publish": (
        ACCOUNT, "publishing:publish", "Copy the files of a run that may be shown into a folder of their own."
    ),
    "withdraw": (
        ACCOUNT, "publishing:withdraw", "Withdraw a certificate: write a note next to it, which verify finds."
    ),
    "budget": (
        ACCOUNT, "budgets:budget",
        "What a data set may be used for, and was: every run is entered before it starts.",
    ),
}  # fmt: skip
_OF_ANOTHER = {  # what follows is the command line of another program
    "check": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
}


class WholeCommand(TyperCommand):
    """A command that tells all that is wrong with its options at once."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of every command, but for the message."""
        try:
            return super().parse_args(ctx, list(args))
        except Exception as problem:  # whose class has moved between versions of typer, what it carries has not
            if not hasattr(problem, "format_message") or ctx.resilient_parsing:
                raise
            told = _problems(self, ctx, args)
            if told:
                problem.format_message = lambda: "; ".join(told)
            raise


def _problems(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """All that is wrong: options that there are not, those that are missing, values that are none."""
    told: list[str] = []
    while True:
        try:
            given, rest, _ = command.make_parser(ctx).parse_args(args=list(args))
            break
        except Exception as problem:
            if not hasattr(problem, "format_message"):
                raise
            told.append(problem.format_message().rstrip("."))
            name = getattr(problem, "option_name", None)
            kept = [word for word in args if word.partition("=")[0] != name]
            if len(kept) == len(args):
                return told
            args = kept
    missing = []
    for one in command.get_params(ctx):
        try:
            one.handle_parse_result(ctx, given, rest)
        except Exception as problem:
            if not hasattr(problem, "format_message"):
                raise
            if getattr(problem, "param_type", None) is None and type(problem).__name__ == "MissingParameter":
                missing.append(one.opts[-1] if one.param_type_name == "option" else one.metavar or one.name.upper())
            else:
                told.append(problem.format_message().rstrip("."))
    if missing:
        kind = "option" if all(name.startswith("-") for name in missing) else "argument"
        told.append(f"Missing {kind}{'s' if len(missing) > 1 else ''} {', '.join(missing)}")
    return told


class _Later(TyperCommand):
    """A command that the help names, and that is loaded when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the command itself."""
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """All commands, none of them loaded."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, (group, _, text) in COMMANDS.items():
            self.add_command(_Later(name, help=text, rich_markup_mode="rich", rich_help_panel=group))


def load_command(name: str) -> Any:
    """The command of this name, loaded."""
    module, _, function = COMMANDS[name][1].partition(":")
    found = getattr(importlib.import_module(f"anyorder.app.cli.{module}"), function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=WholeCommand, context_settings=_OF_ANOTHER.get(name))(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="anyorder", cls=_Commands, no_args_is_help=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
    help="Differentially private training for data that arrives in any order.\n\n"
    "$ anyorder check train.py\n\n"
    "$ anyorder train --dataset digits --epsilon 8\n\n"
    "$ anyorder plan --dataset-size 60000 --batch-size 500 --epochs 5 --epsilon 8\n\n"
    "$ anyorder epsilon --dataset-size 60000 --batch-size 3000 --noise-multiplier 1\n\n"
    "$ anyorder verify run.privacy.json\n\n"
    "$ anyorder report runs/digits-20250101-120000\n\n"
    "Exit codes: 0 ok, 1 a verification or a run failed, 2 bad usage, 3 to 5 see check, 130 stopped before it began.",
)  # fmt: skip


def run(arguments: list[str] | None = None) -> int:
    """Run a command line (sys.argv by default); returns the exit code. A usage error is one line on stderr."""
    warnings.showwarning = _one_line_warning
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="anyorder", standalone_mode=False)
    except Exception as problem:
        # Usage errors; their class has moved between versions of typer, what they carry has not.
        if not hasattr(problem, "format_message"):
            raise
        place = getattr(problem, "ctx", None)
        command = "anyorder" if place is None else place.command_path
        sentences = dict.fromkeys(re.findall(r"\S.*?[.?](?= |$)|\S.*$", problem.format_message()))  # typer repeats some
        told = " ".join(sentences)
        fail(f"{told}{'' if told.endswith(('.', '?')) else '.'} See {command} --help", ExitCode.USAGE)
    return int(code or 0)


def _one_line_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """One of this package's own is for the person at the terminal, who has not written the line that it came from."""
    if category.__module__ != "anyorder.errors":
        return _SHOWN(message, category, *place, **more)
    print(f"anyorder: warning: {' '.join(str(message).split())}", file=sys.stderr)


_SHOWN = warnings.showwarning


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
        raise typer.Exit(ExitCode.USAGE)
