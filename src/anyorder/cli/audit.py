"""`anyorder audit ..`: attacks on runs and models of one's own."""

import typer

from anyorder.cli.arrays import arrays
from anyorder.cli.auditing import run
from anyorder.cli.secrets import canaries

__all__ = ["group"]

group = typer.Typer(
    name="audit", no_args_is_help=False, add_completion=False, rich_markup_mode="rich",
    help="Attack a training of your own, and see whether its claim holds.\n\n"
    "Exit codes: 0 the claim was not refuted, 1 it was, 2 there was no audit.",
)  # fmt: skip
# One file for each command; this is the one list of them, in the order of the help.
group.command()(run)
group.command()(canaries)
group.command()(arrays)


@group.callback(invoke_without_command=True)
def _main(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
