"""`anyorder plan` and `anyorder epsilon`."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.accounting.selection import read_words
from anyorder.cli.options import (  # fmt: skip
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
)
from anyorder.cli.output import one_line_errors, print_json
from anyorder.errors import MissingDependencyError
from anyorder.formatting import counted, rounded_up
from anyorder.plan.options import from_flat
from anyorder.plan.planner import compare
from anyorder.report import card
from anyorder.report.plots import plot_noise
from anyorder.run import planning

__all__ = ["epsilon", "plan"]


@one_line_errors
def plan(
    dataset_size: Size,
    batch_size: Batch,
    epochs: Epochs = 1,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    noise_multiplier: Noise = None,
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
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: the noise in each iterate.")] = None,
    as_json: Json = False,
) -> None:
    """Find the mechanism and the noise for a data set, an order and a budget.

    $ anyorder plan --dataset-size 60000 --batch-size 500 --epsilon 8 --epochs 5

    .. --compare for a table of mechanisms, --plot noise.png for a picture of
    their noise, --order fixed for a loader that shuffles once, --save
    plan.json for anyorder.Plan.load and anyorder verify.

    $ anyorder plan --dataset-size 60000 --batch-size 500 --epsilon 2 --order any

    .. plans every order that there is, shuffled and secret ones, and prints a
    table: error, what each needs, epsilon if the batches became known. The
    card, --save and --plot are of the best; name some with commas between.
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
        chosen = planning.make_plan(noise_multiplier=noise_multiplier, order=order, **asked)
    else:
        with Console(stderr=True).status("planning ..") as status:
            if noise_multiplier is not None:
                asked["noise_multiplier"] = noise_multiplier  # which is refused
            orders = compare(
                several, progress=lambda word: status.update(f"planning order {word} .."), **from_flat(asked)
            )
        chosen = orders.best
    rows = planning.compare(chosen, memory) if compared else []
    if save is not None:
        chosen.save(save)
    if plot is not None:
        if orders is not None:
            lines = {row.order: row.plan for row in orders.rows}
        else:
            lines = planning.best_of_each_kind(rows) if compared else planning.noise_lines(chosen)
        promise = f"epsilon {rounded_up(chosen.epsilon, 3)}, delta {chosen.delta:g}"
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


@one_line_errors
def epsilon(
    noise_multiplier: Annotated[
        float, typer.Option(help="Noise std over clip norm in one step, as DP-SGD users (and Opacus) mean it.")
    ],
    dataset_size: Size,
    batch_size: Batch,
    epochs: Epochs = 1,
    delta: Delta = 1e-5,
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

    For an ordinary DataLoader it also says what an accountant for Poisson
    sampling would print for the same run, which is not true of it.
    """
    if order == "poisson" and mechanism == "independent":
        mechanism = "poisson"
    words = planning.mechanism_words(mechanism, estimator, restart_every, completion)
    truth = planning.make_plan(
        **words, delta=delta, noise_multiplier=noise_multiplier, order=order,
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs,
    )  # fmt: skip
    claim = None
    if mechanism == "independent":
        with contextlib.suppress(MissingDependencyError):  # the truth needs no such accountant
            claim = planning.poisson_claim(noise_multiplier, batch_size, dataset_size, truth.n, delta)
    if as_json:
        sampled = {"poisson_epsilon": claim, "poisson_epsilon_holds": truth.participation.secret}
        print_json({"epsilon": truth.epsilon, "delta": delta, "mu": truth.mu, "steps": truth.n, **sampled})
        return
    print(f"epsilon = {rounded_up(truth.epsilon)} at delta = {delta:g} ({truth.participation.describe()})")
    if claim is not None:
        q = batch_size / dataset_size
        print(
            f"An accountant for Poisson sampling (q = {q:.4g}, {counted(truth.n, 'step')}) would print {claim:.4g} for "
            "this run. That does not hold: it needs a secret coin for each example at each step, and this order is "
            f"{order or 'shuffled'}."
        )
