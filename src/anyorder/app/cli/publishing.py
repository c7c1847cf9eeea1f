"""`anyorder publish` and `anyorder withdraw`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.app import folder
from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.publishing import publish as copy
from anyorder.plan.certificate import Certificate, Evidence

__all__ = ["publish", "withdraw"]


@one_line_errors
def publish(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of train, federated or fit.")],
    to: Annotated[Path | None, typer.Option(help="The new folder. Default: RUN-public.")] = None,
    as_json: Json = False,
) -> None:
    """Copy the files of a run that may be shown into a folder of their own.

    $ anyorder publish runs/digits-20250101-120000

    The certificate is verified first, and must name the model next to it. Only
    files of known names are copied, and none that holds a key of the run.
    What is left behind is named.

    Exit code 0; 1 where the certificate does not hold or a secret was found, 2
    where there is nothing to publish: then nothing was copied.
    """
    named = run.resolve() if run.name in ("", "..") else run
    place = named.with_name(f"{run.resolve().name}-public") if to is None else to
    shown, left = copy(run, place)
    if as_json:
        print_json({"output": str(place), "copied": shown, "left": left})
        return
    console = Console()
    console.print(f"{place}: {', '.join(shown)}", highlight=False, markup=False, soft_wrap=True)
    if left:
        console.print(f"left in {run}: {', '.join(left)}", highlight=False, markup=False, soft_wrap=True)


@one_line_errors
def withdraw(
    certificate: Annotated[Path, typer.Argument(help="The certificate (run.privacy.json), where it is shown.")],
    reason: Annotated[str, typer.Option(help="The reason, which everybody can read.")],
    evidence: Annotated[
        Path | None, typer.Option(help="The run's secret evidence. Default: that in the folder of the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Withdraw a certificate: write a note next to it, which verify finds.

    $ anyorder withdraw runs/mine/run.privacy.json --reason "a person was in it twice"

    The note shows that the run's owner wrote it: the certificate has the hash
    of a number that follows from the evidence's key. Put a copy next to
    each certificate of the run, as run.privacy.withdrawn.json. From then on
    anyorder verify refuses them, and says why.

    Exit code 0; 1 where certificate and evidence do not belong together.
    """
    shown = Certificate.load(certificate, large=True)
    note = Evidence.load(evidence or certificate.parent / folder.EVIDENCE, shown, large=True).withdraw(
        certificate, reason
    )
    if as_json:
        print_json({"output": str(note)})
        return
    Console().print(f"withdrawn: {note}", highlight=False, markup=False, soft_wrap=True)
