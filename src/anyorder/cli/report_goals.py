"""`anyorder report-goals`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anyorder.cli.options import Json, Momentum
from anyorder.cli.output import one_line_errors, print_json
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_up
from anyorder.report.card import comparison_table
from anyorder.report.plots import can_draw, plot_report_goals

__all__ = ["report_goals"]

_COLUMNS = {
    "mechanism": "left", "goal": "right", "times": "right", "apart": "right", "noise": "right", "error": "right",
    "epsilon": "right",
}  # fmt: skip


@one_line_errors
def report_goals(
    population: Annotated[int, typer.Option(help="Number of users.")],
    rounds: Annotated[int, typer.Option(help="Rounds of training.")],
    noise_ratio: Annotated[
        float,
        typer.Option(help="Noise std over clip norm over report goal, at which the model is good enough: public runs."),
    ],
    delta: Annotated[float, typer.Option(help="Target delta, below 1 / population.")],
    goals: Annotated[
        str | None, typer.Option("--goals", help="Report goals, as 100,1000,5000. Default: ten of them, evenly in log.")
    ] = None,
    mechanism: Annotated[
        str, typer.Option(help="Of the noise ratio: tree (DP-FTRL, noise of a node), independent, poisson, 'blt', ..")
    ] = "tree",
    compare: Annotated[
        list[str] | None, typer.Option(help="Another mechanism, with as much noise as gives the same error; repeat it.")
    ] = None,
    order: Annotated[
        str, typer.Option(help="timer (a user stays away for a pass) or shuffled (once in each pass, anywhere).")
    ] = "timer",
    restart_every: Annotated[int, typer.Option(help="Tree: a fresh one every so many passes; 0 for never.")] = 1,
    momentum: Momentum = 0.0,
    conversion: Annotated[str, typer.Option(help="exact; rdp or zcdp to compare with papers.")] = "exact",
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: epsilon against report goal.")] = None,
    as_json: Json = False,
) -> None:
    """Epsilon against report goal: what more users in a round buy, for a population.

    $ anyorder report-goals --population 342477 --rounds 1600 --noise-ratio 0.00149 --delta 1e-6 --goals 100,1000,5060

    .. --compare 'blt, 2 buffers' --compare independent for the epsilon that other
    mechanisms need for the same error, --plot goals.png for a picture.

    The noise ratio comes from simulations on public data: the largest at
    which the model is still good enough, for one report goal.
    """
    from anyorder.federated.planning import at_same_error, epsilon_by_report_goal  # its room loads torch

    if plot is not None:
        can_draw(plot)
    chosen = _default(population) if goals is None else _numbers(goals)
    first = epsilon_by_report_goal(
        population, rounds, noise_ratio, chosen, delta, mechanism=mechanism, order=order,
        restart_every=restart_every, momentum=momentum, conversion=conversion,
    )  # fmt: skip
    others = {name: at_same_error(first, name, restart_every=restart_every) for name in compare or ()}
    lines = {mechanism: first, **others}
    about = f"{counted(population, 'user')}, {counted(rounds, 'round')}, delta {delta:g}"
    if plot is not None:
        plot_report_goals(
            {name: [(point.report_goal, point.epsilon) for point in points] for name, points in lines.items()},
            plot, f"{about}: the same noise in the model",
        )  # fmt: skip
    if as_json:
        described = {name: [point.to_dict() for point in points] for name, points in lines.items()}
        print_json({"population": population, "rounds": rounds, "noise_ratio": noise_ratio, "mechanisms": described})
        return
    rows = [
        (name, str(point.report_goal), str(point.max_participations), str(point.min_separation),
         f"{point.noise_multiplier:.4g}", f"{point.error:.3g}", rounded_up(point.epsilon))
        for name, points in lines.items()
        for point in points
    ]  # fmt: skip
    console = Console()
    console.print(comparison_table(about, _COLUMNS, rows))
    console.print(
        "goal: users in a round; times: rounds of one user at most, so many rounds apart; noise: std over clip norm of "
        "a round or a tree's node; error: that of a weight, root mean square over rounds, for learning rate 1. "
        "The error tells how good the model is: with a fresh tree in each pass it grows with the number of passes; "
        "--restart-every 0 keeps one tree."
    )


def _numbers(goals: str) -> list[int]:
    try:
        return [int(goal) for goal in goals.split(",")]
    except ValueError as problem:
        rule = "whole numbers with commas between, such as 100,1000"
        raise ArgumentError(f"--goals must be {rule}, got {goals!r}") from problem


def _default(population: int) -> list[int]:
    """Ten or fewer, from 100 (1 where there are fewer users than 1000) to a tenth of the population."""
    low, high = (100, population // 10) if population >= 1000 else (1, max(1, population // 10))
    return sorted({round(low * (high / low) ** (i / 9)) for i in range(10)})
