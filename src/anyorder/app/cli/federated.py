"""`anyorder federated`."""

from math import ceil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anyorder.app.cards import facts_panel
from anyorder.app.cli.common import (
    PUBLIC_MECHANISM,
    BudgetFile,
    Epsilon,
    Json,
    Noise,
    one_line_errors,
    print_json,
    run_or_resume,
)
from anyorder.formatting import counted, rounded_up

__all__ = ["federated"]

_AVAILABILITY = (
    "Who is there: [bold]uniform[/bold] (the same chance in every round), [bold]diurnal[/bold] (a daily wave), or "
    "[bold]check-in[/bold] (a timer on each device, so that rounds between two of a user are known only afterwards)."
)


@one_line_errors
def federated(
    dataset: Annotated[
        str | None,
        typer.Option(help="digits, mnist, .., or module:function -> (users {id: (x, y)}, test (x, y), make_model)."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="mlp, cnn, linear, or module:function.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the data set's parquet files.")] = None,
    users: Annotated[
        int | None,
        typer.Option(
            help="Number of users that a named data set is split among. Default: 300 for digits, 1000 for MNIST."
        ),
    ] = None,
    user_key: Annotated[
        str | None, typer.Option(help="Column that names the user of a row, in place of a split.")
    ] = None,
    classes_per_user: Annotated[
        int | None, typer.Option(help="Classes per user in the split; 0 for a random split. Default: 2.")
    ] = None,
    epsilon: Epsilon = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Target delta. Default: 1e-5 for data sets by name; for your own 0.1 / users, rounded down."),
    ] = None,
    noise_multiplier: Noise = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the plan. Default: 100.")] = None,
    report_goal: Annotated[
        int | None,
        typer.Option(help="Users in a round; sums are divided by it. Default: by the data set; 20 for your own."),
    ] = None,
    clip_norm: Annotated[
        float | None,
        typer.Option(help="L2 bound on one user's change of the model. Default: by the data set; 0.3 for your own."),
    ] = None,
    mechanism: Annotated[str | None, typer.Option(help=PUBLIC_MECHANISM + " Default: auto.")] = None,
    min_separation: Annotated[
        int | None,
        typer.Option(
            help="Least number of rounds between two of one user. Default: what population and availability keep."
        ),
    ] = None,
    max_participations: Annotated[
        int | None, typer.Option(help="Most rounds of one user. Default: as many as fit.")
    ] = None,
    availability: Annotated[str | None, typer.Option(help=_AVAILABILITY)] = None,
    available: Annotated[
        float | None,
        typer.Option(help="Chance that a device is available: uniform, or diurnal at the peak. Default: 1."),
    ] = None,
    timer_hours: Annotated[float | None, typer.Option(help="Hours of the check-in timer. Default: 24.")] = None,
    round_hours: Annotated[
        float | None, typer.Option(help="Hours from round to round, for diurnal and check-in. Default: 1.")
    ] = None,
    over_selection: Annotated[float | None, typer.Option(help="Devices asked per device wanted. Default: 1.3.")] = None,
    drop_out: Annotated[float | None, typer.Option(help="Chance that a device dies in a round. Default: 0.1.")] = None,
    client_lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of the clients' SGD. Default: by the data set; 0.1 for your own."),
    ] = None,
    client_batch: Annotated[
        int | None, typer.Option(help="Examples in a client's step. Default: by the data set; 16 for your own.")
    ] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Passes of a client over its examples. Default: 1.")] = None,
    max_examples: Annotated[int | None, typer.Option(help="Examples of a user in a round. Default: 256.")] = None,
    server_optimizer: Annotated[str | None, typer.Option(help="sgd, ftrl or adam. Default: sgd.")] = None,
    server_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the server. Default: by the data set; 1 for your own.")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of the server. Default: 0.9.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, split, availability and cohorts; never of the noise. Default: 0."),
    ] = None,
    processes: Annotated[
        int, typer.Option(help="Processes that compute clients; the result is the same for any number.")
    ] = 1,
    budget: BudgetFile = None,
    output: Annotated[Path | None, typer.Option(help="New folder. Default: runs/<dataset>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, with its settings.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate federated learning in which each user is protected as a whole.

    $ anyorder federated --output DIR

    $ anyorder federated --dataset mnist --data-dir data/mnist --users 2000 --epsilon 4

    $ anyorder federated --availability check-in --timer-hours 24 --rounds 200

    $ anyorder federated --dataset mydata:users --epsilon 8 --report-goal 50

    $ anyorder federated --resume runs/digits-20250101-120000

    The server is that of a deployment: it clips each message, records who took
    part, and releases by the plan. Epsilon is for one user,
    all examples together. It is printed twice: as planned, and as realised by
    the rounds that users were really in. Accuracy is of test examples that
    belong to no user. The folder secret (the noise key, the record of who took
    part) is as secret as the data; anyorder publish copies the rest.
    """
    every: dict[str, Any] = {
        "dataset": dataset, "model": model, "data_dir": data_dir, "users": users, "user_key": user_key,
        "classes_per_user": classes_per_user, "epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier,
        "rounds": rounds, "report_goal": report_goal, "clip_norm": clip_norm, "mechanism": mechanism,
        "min_separation": min_separation, "max_participations": max_participations, "availability": availability,
        "available": available, "timer_hours": timer_hours, "round_hours": round_hours,
        "over_selection": over_selection, "drop_out": drop_out, "client_lr": client_lr, "client_batch": client_batch,
        "local_epochs": local_epochs, "max_examples": max_examples, "server_optimizer": server_optimizer,
        "server_lr": server_lr, "momentum": momentum, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    from anyorder.app.federation import (  # with torch, which no other command needs
        FederatedSettings,
        federate,
        resume_federation,
    )
    from anyorder.app.progress import RoundsBar

    console = Console(stderr=as_json)
    observer = RoundsBar(console)
    result = run_or_resume(
        "federated", observer, given, output, resume, budget=budget,
        start=lambda: federate(
            FederatedSettings.of(**given), output, observer=observer, processes=processes, budget=budget
        ),
        go_on=lambda folder: resume_federation(folder, observer=observer, processes=processes),
    )  # fmt: skip
    if as_json:
        print_json({"output": str(result.path), **result.to_dict()})
        return
    console.print(facts_panel("result", _rows(result), style="green"))


def _rows(result: Any) -> list[tuple[str, str]]:
    """What came of it, for people."""
    made, settings = result.outcome, result.settings
    (k, b), delta = made.planned, f"at delta = {rounded_up(made.delta, 6)}"
    planned, times, done = rounded_up(made.planned_epsilon), counted(k, "round"), counted(made.rounds, "round")
    (_, last), earlier = result.accuracy[-1], result.accuracy[-6:-1]
    before = ", ".join(f"{100 * right:.1f} % after {done}" for done, right in earlier)
    rows = [
        ("test accuracy", f"{100 * last:.2f} %" + (f" ({before})" if before else "")),
        ("separation", result.separation),
        ("planned", f"epsilon <= {planned} {delta}, for one user in at most {times}, {b} apart"),
    ]
    if made.realised is not None:
        most, least = made.realised
        came = f"nobody was in more than {counted(most, 'round')}, or in two less than {least} apart"
        rows.append(("realised", f"epsilon <= {rounded_up(made.realised_epsilon)} {delta}: {came}"))
    seconds = counted(ceil(result.seconds), "second")
    return [
        *rows,
        ("time", f"{seconds} for {done} of up to {counted(settings.report_goal, 'user')}"),
        ("files", str(result.path)),
        ("check it", f"anyorder verify {result.path / 'run.privacy.json'}"),
    ]
