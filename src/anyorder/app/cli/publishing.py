"""`anyorder publish`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.app.cli.output import Json, one_line_errors, print_json
from anyorder.app.publishing import publish as copy

__all__ = ["publish"]


@one_line_errors
def publish(
    run: Annotated[Path, typer.Argument(help="Folder of a run that has ended, as train, federated and fit leave it.")],
    to: Annotated[Path | None, typer.Option(help="The new folder. Default: RUN-public.")] = None,
    as_json: Json = False,
) -> None:
    """Copy what of a run may be shown into a folder of its own.

    $ anyorder publish runs/digits-20250101-120000

    The certificate is verified first, and must be of the model beside it. Only
    files of known names are copied, and none that holds a key of the run; what is
    left behind is named. Nothing of the folder secret is copied.

    Exit code 0; 1 where the certificate does not hold or a secret was found, 2
    where there is nothing to publish: then nothing was copied.
    """
    place = run.with_name(f"{run.resolve().name}-public") if to is None else to
    shown, left = copy(run, place)
    if as_json:
        print_json({"output": str(place), "copied": shown, "left": left})
        return
    console = Console()
    console.print(f"{place}: {', '.join(shown)}", highlight=False, markup=False, soft_wrap=True)
    if left:
        console.print(f"left in {run}: {', '.join(left)}", highlight=False, markup=False, soft_wrap=True)
