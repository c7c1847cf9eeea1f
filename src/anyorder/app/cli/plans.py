"""`anyorder plan`, `anyorder epsilon` and `anyorder report-goals`."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder import checks
from anyorder.accounting.risk import RATES
from anyorder.accounting.selection import read_words
from anyorder.app import planning
from anyorder.app.cards import card, comparison_table
from anyorder.app.charts import can_draw, plot_noise, plot_report_goals
from anyorder.app.cli.common import (
    SELECTION,
    Batch,
    Clip,
    Completion,
    Delta,
    Epochs,
    Epsilon,
    Estimator,
    Json,
    MechanismName,
    Memory,
    Momentum,
    Noise,
    Order,
    RestartEvery,
    Size,
    one_line_errors,
    print_json,
)
from anyorder.app.waiting import Wait
from anyorder.errors import ArgumentError, MissingDependencyError
from anyorder.formatting import counted, rounded_up
from anyorder.plan.options import default_delta, from_flat
from anyorder.plan.planner import compare

# ----------------------------------------------------------------------------------------------------
# `anyorder plan` and `anyorder epsilon`.


@one_line_errors
def plan(
    dataset_size: Size,
    batch_size: Batch,
    epochs: Epochs = 1,
    epsilon: Epsilon = None,
    delta: Delta = None,
    noise_multiplier: Noise = None,
    risk: Annotated[
        str | None,
        typer.Option(
            help="In place of epsilon, what an attacker may reach: advantage:0.1, or tpr:0.01:0.05 (one who wrongly "
            "accuses 0.01 of the others finds at most 0.05)."
        ),
    ] = None,
    order: Order = None,
    mechanism: MechanismName = "auto",
    estimator: Estimator = "full",
    restart_every: RestartEvery = None,
    completion: Completion = "auto",
    memory: Memory = None,
    momentum: Momentum = 0.0,
    clip_norm: Clip = 1.0,
    selection: Annotated[str | None, typer.Option(help=SELECTION)] = None,
    compared: Annotated[bool, typer.Option("--compare", help="A table of all mechanisms at this budget.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan as JSON, for anyorder.Plan.load.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: the noise in the weights at each step.")] = None,
    as_json: Json = False,
) -> None:
    """Find the mechanism and the noise for a data set, an order and a budget.

    $ anyorder plan --dataset-size 60000 --batch-size 500 --epsilon 8 --epochs 5

    .. --compare for a table of mechanisms, --plot noise.png for a picture of
    their noise, --order fixed for a loader that shuffles once, --save
    plan.json for anyorder.Plan.load and anyorder verify.

    $ anyorder plan --dataset-size 60000 --batch-size 500 --epsilon 2 --order any

    This plans every order, shuffled and secret ones, and prints a table: error,
    needs, and epsilon if the batches became known. The
    card, --save and --plot are of the best. To choose orders, give a list with commas.
    """
    words = planning.mechanism_words(mechanism, estimator, restart_every, completion)
    several: Any = planning.orders_in(order)
    asked: dict[str, Any] = {
        "delta": delta, "epsilon": epsilon, "momentum": momentum, "dataset_size": dataset_size,
        "batch_size": batch_size, "epochs": epochs, "clip_norm": clip_norm, "memory": memory,
        "selection": None if selection is None else read_words(selection), **words,
    }  # fmt: skip
    orders = None
    if several is None:
        with Wait("fitting the mechanism and finding its noise"):
            chosen = planning.make_plan(noise_multiplier=noise_multiplier, risk=_risk(risk), order=order, **asked)
    else:
        with Wait("planning") as wait:
            refused = {"noise_multiplier": noise_multiplier, "risk": risk}
            asked |= {name: value for name, value in refused.items() if value is not None}
            orders = compare(several, progress=lambda word: wait.update(f"planning order {word}"), **from_flat(asked))
        chosen = orders.best
    with Wait("comparing mechanisms"):
        rows = planning.compare(chosen, memory) if compared else []
    if save is not None:
        chosen.save(save)
    if plot is not None:
        if orders is not None:
            lines = {row.order: row.plan for row in orders.rows}
        else:
            lines = planning.best_of_each_kind(rows) if compared else planning.noise_lines(chosen)
        promise = f"epsilon {rounded_up(chosen.epsilon, 3)}, delta {rounded_up(chosen.delta, 6)}"
        plot_noise(lines, plot, f"noise over {counted(chosen.n, 'step')}, {promise}")
    if as_json:
        described = {"plan": chosen.to_dict(), "claims": chosen.claims()}
        tables = {"compare": [row.to_dict() for row in rows]} if compared else {}
        print_json({**described, **tables, **({} if orders is None else orders.to_dict())})
        return
    console = Console()
    console.print(card(chosen))
    if orders is not None:
        console.print(planning.order_table(orders))
        for line in planning.order_needs(orders):
            console.print(line, markup=False, highlight=False)
        for word, why in orders.refused:
            console.print(f"{word} is not planned: {why}", markup=False)
    if compared:
        console.print(planning.comparison(rows))


def _risk(words: str | None) -> tuple[Any, ...] | None:
    """Of the words of an option. Raises: ArgumentError."""
    if words is None:
        return None
    name, *shares = words.split(":")
    try:
        return name, *map(float, shares)
    except ValueError:
        raise ArgumentError(f"risk must be advantage:SHARE or tpr:SHARE:SHARE, got {words!r}") from None


@one_line_errors
def epsilon(
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise std over clip norm in one step, as DP-SGD users (and Opacus) mean it.")
    ],
    dataset_size: Size,
    batch_size: Batch,
    epochs: Epochs = 1,
    delta: Delta = None,
    order: Order = None,
    mechanism: MechanismName = "independent",
    estimator: Estimator = "full",
    restart_every: RestartEvery = None,
    completion: Completion = "auto",
    as_json: Json = False,
) -> None:
    """The epsilon that a run really has, in the order in which it saw the data.

    $ anyorder epsilon --dataset-size 2000 --batch-size 100 --noise-multiplier 1

    .. --epochs 3 for three passes, --order poisson for secret sampling,
    --mechanism tree for DP-FTRL.

    It also says what that epsilon means: how many of those who took part the
    strongest attacker finds, at some rates of wrong accusations.

    For an ordinary DataLoader it also prints what an accountant for Poisson
    sampling would report, which does not apply to that run.
    """
    if order == "poisson" and mechanism == "independent":
        mechanism = "poisson"
    words = planning.mechanism_words(mechanism, estimator, restart_every, completion)
    with Wait("computing epsilon"):
        truth = planning.make_plan(
            **words, delta=delta, noise_multiplier=noise_multiplier, order=order,
            dataset_size=dataset_size, batch_size=batch_size, epochs=epochs,
        )  # fmt: skip
    claim = None
    if mechanism == "independent":
        with contextlib.suppress(MissingDependencyError):  # the truth needs no such accountant
            claim = planning.poisson_claim(noise_multiplier, batch_size, dataset_size, truth.n, truth.delta)
    if as_json:
        sampled = {"poisson_epsilon": claim, "poisson_epsilon_holds": truth.participation.secret}
        told = {"epsilon": truth.epsilon, "delta": truth.delta, "mu": truth.mu, "steps": truth.n}
        print_json({**told, "attacks": truth.reach.to_dict(), **sampled})
        return
    mu = "" if truth.mu is None else f"mu = {rounded_up(truth.mu)} (Gaussian DP), which is "
    promise = f"{mu}epsilon = {rounded_up(truth.epsilon)} at delta = {rounded_up(truth.delta, 6)}"
    print(f"{promise} ({truth.participation.describe()})")
    print("What it means: the strongest attacker who wrongly accuses")
    for fpr, tpr in zip(RATES, truth.reach.tprs, strict=True):
        print(
            f"{100 * fpr:>7g} % of those who took no part finds at most {rounded_up(100 * tpr, 3)} % of those who did"
        )
    if claim is not None:
        q = batch_size / dataset_size
        print(
            f"An accountant for Poisson sampling (q = {q:.4g}, {counted(truth.n, 'step')}) would print {claim:.4g} for "
            "this run. That does not hold: it needs a secret draw for each example at each step, and this order is "
            f"{order or 'shuffled'}."
        )


# ----------------------------------------------------------------------------------------------------
# `anyorder report-goals`.


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
        typer.Option(
            help="Noise std over clip norm over report goal at which the model is good enough, from public runs."
        ),
    ],
    goals: Annotated[
        str | None, typer.Option("--goals", help="Report goals, as 100,1000,5000. Default: ten of them, evenly in log.")
    ] = None,
    mechanism: Annotated[
        str,
        typer.Option(
            help="Mechanism of the noise ratio: tree (DP-FTRL, noise of a node), independent, poisson, 'blt', .."
        ),
    ] = "tree",
    compare: Annotated[
        list[str] | None, typer.Option(help="Another mechanism to compare at the same error. Repeat it for several.")
    ] = None,
    order: Annotated[
        str, typer.Option(help="timer (a user stays away for a pass) or shuffled (once anywhere in each pass).")
    ] = "timer",
    restart_every: Annotated[int, typer.Option(help="Tree: a fresh one every so many passes; 0 for never.")] = 1,
    momentum: Momentum = 0.0,
    delta: Delta = None,
    conversion: Annotated[
        str, typer.Option(help="Conversion to epsilon: exact, or rdp or zcdp to compare with papers.")
    ] = "exact",
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
    delta = default_delta(checks.integer("population", population, low=1)) if delta is None else delta
    chosen = _default(population) if goals is None else _numbers(goals)
    with Wait("planning each report goal"):
        first = epsilon_by_report_goal(
            population, rounds, noise_ratio, chosen, delta, mechanism=mechanism, order=order,
            restart_every=restart_every, momentum=momentum, conversion=conversion,
        )  # fmt: skip
        others = {name: at_same_error(first, name, restart_every=restart_every) for name in compare or ()}
    lines = {mechanism: first, **others}
    about = f"{counted(population, 'user')}, {counted(rounds, 'round')}, delta {rounded_up(delta, 6)}"
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
