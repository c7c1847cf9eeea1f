"""`anyorder planner`: the planner as a page."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.waiting import Steps
from anyorder.errors import ArgumentError

__all__ = ["planner"]

_OF = "Export, a list with commas. "


@one_line_errors
def planner(
    port: Annotated[int, typer.Option(help="Port of the page on 127.0.0.1; 0 for any free one.")] = 8017,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page that needs no server, and stop.")
    ] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Export: number of training examples.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help=_OF)] = None,
    epoch_counts: Annotated[str | None, typer.Option(help=_OF)] = None,
    epsilons: Annotated[str | None, typer.Option(help=_OF)] = None,
    deltas: Annotated[str | None, typer.Option(help=_OF)] = None,
    orders: Annotated[str | None, typer.Option(help=_OF + "Orders among shuffled, fixed, sequential, poisson.")] = None,
    memories: Annotated[str | None, typer.Option(help=_OF + "Memory limits in copies of the model, or any.")] = None,
    ratios: Annotated[str | None, typer.Option(help=_OF + "Ratios of noise to batch size in the sweeps.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Export: momentum of SGD.")] = None,
    as_json: Json = False,
) -> None:
    """Compare mechanisms on a page with sliders for data, budget and order, on
    this machine alone.

    $ anyorder planner

    .. --export plans.html for a page that anybody opens without a server: its
    answers are computed beforehand, for a grid of settings that --batch-sizes
    250,500 and the like say.
    """
    from anyorder.app.planner_page.export import Grid
    from anyorder.app.planner_page.export import export as write
    from anyorder.app.planner_page.server import serve

    asked: dict[str, Any] = {
        "dataset_size": dataset_size, "momentum": momentum, "batch_sizes": _listed("batch-sizes", batch_sizes, int),
        "epoch_counts": _listed("epoch-counts", epoch_counts, int), "epsilons": _listed("epsilons", epsilons, float),
        "deltas": _listed("deltas", deltas, float), "orders": _listed("orders", orders, str),
        "memories": _listed("memories", memories, _memory), "ratios": _listed("ratios", ratios, float),
    }  # fmt: skip
    given = {name: value for name, value in asked.items() if value is not None}
    if export is None:
        if given:
            listed = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ArgumentError(f"{listed} must come with --export; the served page has sliders for them")
        try:
            serve(port, partial(_tell, as_json))
        except OSError as problem:
            fail(f"port {port} cannot be used ({problem.strerror}); --port 0 takes any that is free", ExitCode.USAGE)
        return
    with Steps(*Steps.get_default_columns()) as bar:
        task = bar.add_task("answers computed", total=None)
        size = write(export, Grid(**given), lambda done, whole: bar.update(task, completed=done, total=whole))
    if as_json:
        print_json({"output": str(export), "bytes": size})
        return
    print(f"{export}: {size / 1e6:.2f} MB; open it in any browser")


def _tell(as_json: bool, address: str) -> None:
    print(json.dumps({"address": address}) if as_json else f"the planner is at {address} (Ctrl-C ends it)", flush=True)


def _listed(name: str, text: str | None, kind: Any) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError as problem:
        raise ArgumentError(f"--{name} must be numbers with commas between, got {text!r}") from problem


def _memory(text: str) -> int | None:
    return None if text == "any" else int(text)
