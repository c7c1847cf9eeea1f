"""`anyorder train`."""

from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.app.cards import facts_panel
from anyorder.app.cli.common import (
    COMPLETION,
    ESTIMATOR,
    MECHANISM,
    ORDER,
    BudgetFile,
    Epsilon,
    Json,
    Noise,
    RestartEvery,
    one_line_errors,
    print_json,
    run_or_resume,
    verify_command,
)
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_up

__all__ = ["train"]


@one_line_errors
def train(
    dataset: Annotated[
        str | None,
        typer.Option(
            help="digits, mnist, fashion_mnist, cifar10, or module:function -> (train, test). Default: digits."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="patches, scattering, mlp, cnn, linear, or module:function, called with (input_shape, num_classes). "
            "Default: by the data set."
        ),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the data set's parquet files.")] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes of your own data set; a row with another label adds zero.")
    ] = None,
    epsilon: Epsilon = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Target delta. Default: 1e-5 for data sets by name; for your own 0.1 / examples, rounded down."
        ),
    ] = None,
    noise_multiplier: Noise = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples in a step. Default: by the data set; 100 for your own.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data. Default: by the data set; 5 for your own.")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate. Default: by data set and model; 0.1 for your own.")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD or FTRL. Default: 0.9.")] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="L2 bound on one example's gradient. Default: 1; 0.02 for patches and scattering."),
    ] = None,
    mechanism: Annotated[str | None, typer.Option(help=MECHANISM + " Default: auto.")] = None,
    estimator: Annotated[str | None, typer.Option(help=ESTIMATOR + " Default: full.")] = None,
    restart_every: RestartEvery = None,
    completion: Annotated[str | None, typer.Option(help=COMPLETION + " Default: auto.")] = None,
    order: Annotated[
        str | None, typer.Option(help=ORDER + " Default: fixed for digits, patches and scattering, else shuffled.")
    ] = None,
    secure: Annotated[
        bool | None, typer.Option("--secure", help="Exact integers in place of floating-point noise; not with poisson.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or ftrl. Default: sgd.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule of the learning rate: constant, or linear down to 0. Default: constant; linear for "
            "patches and scattering."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of initial weights and data order; never of the noise. Default: 0.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, .. Default: cpu.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: the end of each epoch.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New folder. Default: runs/<dataset>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, with its settings.")] = None,
    start_over: Annotated[
        bool,
        typer.Option(
            "--start-over",
            help="With --resume: where the checkpoint is lost or cannot be replayed, begin again with other noise. "
            "Certificate and budget count what was released before, as a whole run.",
        ),
    ] = False,
    budget: BudgetFile = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard event files.")] = None,
    as_json: Json = False,
) -> None:
    """Train a model privately; leaves a folder with model, metrics, plots and certificate.

    $ anyorder train --dataset digits --epsilon 8

    $ anyorder train --dataset mnist --data-dir data/mnist --epsilon 8

    $ anyorder train --dataset mydata:load --classes 5 --model mymodels:build
    --epsilon 2

    $ anyorder train --resume runs/digits-20250101-120000

    No loss or accuracy on training data is shown: it would be a release that
    the guarantee does not cover. model.pt, run.privacy.json (the
    certificate), plan.json, metrics.json and the pictures are public. The
    folder secret (the noise key, who was in which step) is as secret as the
    data; anyorder publish copies the rest.
    """
    every: dict[str, Any] = {
        "dataset": dataset, "model": model, "data_dir": data_dir, "classes": classes, "epsilon": epsilon,
        "delta": delta, "noise_multiplier": noise_multiplier, "batch_size": batch_size, "epochs": epochs, "lr": lr,
        "momentum": momentum, "clip_norm": clip_norm, "mechanism": mechanism, "estimator": estimator,
        "restart_every": restart_every, "completion": completion, "order": order, "secure": secure,
        "optimizer": optimizer, "schedule": schedule,
        "seed": seed, "device": device, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    from anyorder import app as job  # with torch, which no other command needs
    from anyorder.app.progress import ProgressBar

    if start_over and resume is None:
        raise ArgumentError("--start-over begins the run of a folder again: give --resume FOLDER")
    console = Console(stderr=as_json)
    observer = ProgressBar(console)
    result = run_or_resume(
        "train", observer, given, output, resume, budget=budget,
        start=lambda: job.train(
            job.Settings.of(**given), output, observer=observer, tensorboard=tensorboard, budget=budget
        ),
        go_on=lambda folder: job.resume(folder, observer=observer, tensorboard=tensorboard, start_over=start_over),
    )  # fmt: skip
    if as_json:
        print_json({"output": str(result.path), **result.to_dict()})
        return
    rows = [
        ("test accuracy", f"{100 * result.accuracy[-1]:.2f} %"),
        ("privacy", f"epsilon <= {rounded_up(result.epsilon)} at delta = {rounded_up(result.plan.delta, 6)}"),
        ("time", f"{counted(ceil(result.seconds), 'second')} for {counted(result.steps, 'step')}"),
        ("files", str(result.path)),
        ("check it", verify_command(result.path, result.plan)),
    ]
    console.print(facts_panel("result", rows, style="green"))
