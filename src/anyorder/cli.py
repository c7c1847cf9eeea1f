"""The command line: train, plan, epsilon, verify."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from rich.console import Console

from anyorder import __version__
from anyorder._sealed import printable
from anyorder.certificate import verify as verify_file
from anyorder.errors import AnyorderError, ArgumentError, LoaderError, MissingDependencyError, ModelError, PlanError
from anyorder.noise.native import describe as noise_kernel
from anyorder.report import card, facts_panel, plot_noise, receipt_facts, verdict
from anyorder.run import planning

__all__ = ["app", "run"]

app = typer.Typer(
    name="anyorder", no_args_is_help=False, add_completion=False, rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Differentially private training for data that arrives in any order.\n\n"
    "$ anyorder train --dataset digits --epsilon 8\n\n"
    "$ anyorder plan --dataset-size 60000 --batch-size 500 --epochs 5 --epsilon 8\n\n"
    "$ anyorder epsilon --dataset-size 60000 --batch-size 3000 --noise-multiplier 1\n\n"
    "$ anyorder verify run.privacy.json\n\n"
    "Exit codes: 0 ok, 1 a verification or a run failed, 2 bad usage.",
)  # fmt: skip

P = ParamSpec("P")
_USAGE = (ArgumentError, PlanError, LoaderError, ModelError, MissingDependencyError)


def run(arguments: list[str] | None = None) -> int:
    """Run a command line (sys.argv by default); returns the exit code. A usage error is one line on stderr."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="anyorder", standalone_mode=False)
    except Exception as problem:
        # Usage errors; their class has moved between versions of typer, what they carry has not.
        if not hasattr(problem, "format_message"):
            raise
        _fail(f"{problem.format_message()} (see anyorder --help)", 2)
    return int(code or 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"anyorder: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(code)


def _one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The package's own errors become one line on stderr and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AnyorderError as problem:
            _fail(str(problem), 2 if isinstance(problem, _USAGE) else 1)

    return guarded


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, allow_nan=False))


def _version(value: bool) -> None:
    if value:
        print(f"{__version__}\nnoise: {noise_kernel()}")
        if find_spec("torch") is not None:
            from anyorder.clipping.native import describe as clipping_kernel

            print(f"clipping: {clipping_kernel()}")
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
        raise typer.Exit(2)


# -- options that commands share -------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
Epsilon = Annotated[float | None, typer.Option(help="Target epsilon. This or --noise-multiplier.")]
Delta = Annotated[float, typer.Option(help="Target delta.")]
Noise = Annotated[
    float | None,
    typer.Option(help="Noise std over clip norm in one step, as DP-SGD users mean it (for the tree: at each node)."),
]
Size = Annotated[int, typer.Option(help="Number of training examples.")]
Batch = Annotated[int, typer.Option(help="Examples in a step; sums of gradients are divided by it.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
ORDER = (
    "Order of the data: [bold]shuffled[/bold] (anew in each epoch), [bold]fixed[/bold] (shuffled once, then kept), "
    "[bold]sequential[/bold] (as stored), or [bold]poisson[/bold] (secret random sampling, by this package's sampler)."
)
MECHANISM = (
    "Noise: [bold]auto[/bold] (least error), [bold]tree[/bold] (DP-FTRL), [bold]independent[/bold] (DP-SGD without "
    "amplification), [bold]poisson[/bold] (DP-SGD with amplification), a name from plan --compare, or a kind and its "
    "size: dense, 'banded, 64 bands', 'blt, 5 buffers'."
)
ESTIMATOR = "Tree: [bold]full[/bold], [bold]online[/bold] or [bold]vanilla[/bold] estimates of prefix sums."
RESTART = "Tree: a fresh tree every so many epochs; 0 for never. Default: what gives least error."
COMPLETION = "Tree: complete each tree before a restart: [bold]auto[/bold], [bold]on[/bold] or [bold]off[/bold]."
Order = Annotated[str | None, typer.Option(help=ORDER + " Default: shuffled; with mechanism poisson, poisson.")]
MechanismName = Annotated[str, typer.Option(help=MECHANISM)]
Estimator = Annotated[str, typer.Option(help=ESTIMATOR)]
RestartEvery = Annotated[int | None, typer.Option(help=RESTART)]
Completion = Annotated[str, typer.Option(help=COMPLETION)]
Momentum = Annotated[float, typer.Option(help="Of SGD; the mechanism is fitted to it.")]
Clip = Annotated[float, typer.Option(help="L2 bound on one example's gradient.")]


# -- train -----------------------------------------------------------------------------------------------------------


@app.command()
@_one_line_errors
def train(
    dataset: Annotated[
        str | None, typer.Option(help="digits, mnist, fashion_mnist, cifar10, or module:function -> (train, test).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="mlp, cnn, linear, or module:function, called with (input_shape, num_classes).")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the data set's parquet files.")] = None,
    epsilon: Epsilon = None,
    delta: Annotated[float | None, typer.Option(help="Target delta. Default: 1e-5.")] = None,
    noise_multiplier: Noise = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a step.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of SGD or FTRL. Default: 0.9.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="L2 bound on one example's gradient.")] = None,
    mechanism: Annotated[str | None, typer.Option(help=MECHANISM)] = None,
    estimator: Annotated[str | None, typer.Option(help=ESTIMATOR)] = None,
    restart_every: RestartEvery = None,
    completion: Annotated[str | None, typer.Option(help=COMPLETION)] = None,
    order: Annotated[str | None, typer.Option(help=ORDER + " Default: fixed for digits, else shuffled.")] = None,
    secure: Annotated[
        bool | None, typer.Option("--secure", help="Exact integers in place of floating-point noise; not with poisson.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or ftrl.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and data order; never of the noise.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, .. Default: cpu.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps from one checkpoint to the next. Default: each epoch's end.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New folder. Default: runs/<dataset>-<time>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder; it has the settings.")] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for TensorBoard event files.")] = None,
    as_json: Json = False,
) -> None:
    """Train a model privately; leaves a folder with model, metrics, plots and certificate.

    $ anyorder train --dataset digits --epsilon 8

    $ anyorder train --dataset mnist --data-dir data/mnist --epsilon 8

    $ anyorder train --dataset mydata:load --model mymodels:build --epsilon 2

    $ anyorder train --resume runs/digits-20250101-120000

    No loss or accuracy on training data is shown: it would be a release that
    the guarantee does not cover. Secret, as the data is: checkpoint.pt (the
    noise key), its journal, and run.evidence.json (who was in which step); the
    folder's .gitignore names them. Public: model.pt, run.privacy.json (the
    certificate), plan.json, metrics.json and the pictures.
    """
    every: dict[str, Any] = {
        "dataset": dataset, "model": model, "data_dir": data_dir, "epsilon": epsilon, "delta": delta,
        "noise_multiplier": noise_multiplier, "batch_size": batch_size, "epochs": epochs, "lr": lr,
        "momentum": momentum, "clip_norm": clip_norm, "mechanism": mechanism, "estimator": estimator,
        "restart_every": restart_every, "completion": completion, "order": order, "secure": secure,
        "optimizer": optimizer,
        "seed": seed, "device": device, "checkpoint_every": checkpoint_every,
    }  # fmt: skip
    given = {name: value for name, value in every.items() if value is not None}
    from anyorder import run as job  # with torch, which no other command needs
    from anyorder.run.progress import ProgressBar

    console = Console(stderr=as_json)
    observer = ProgressBar(console)
    try:
        if resume is None:
            result = job.train(job.Settings.of(**given), output, observer=observer, tensorboard=tensorboard)
        else:
            if given or output is not None:
                names = [*given, "output"] if output is not None else list(given)
                extra = ", ".join("--" + name.replace("_", "-") for name in names)
                raise ArgumentError(f"--resume takes the settings from its folder: leave out {extra}")
            result = job.resume(resume, observer=observer, tensorboard=tensorboard)
    except KeyboardInterrupt:
        observer.stop()
        hint = "" if observer.path is None else f"; go on with: anyorder train --resume {observer.path}"
        _fail(f"stopped{hint}", 1)
    finally:
        observer.stop()
    if as_json:
        _print_json({"output": str(result.path), **result.to_dict()})
        return
    rows = [
        ("test accuracy", f"{100 * result.accuracy[-1]:.2f} %"),
        ("privacy", f"epsilon <= {result.plan.epsilon:.4g} at delta = {result.plan.delta:g}"),
        ("time", f"{result.seconds:.1f} s for {result.steps} steps"),
        ("files", str(result.path)),
        ("check it", f"anyorder verify {result.path / 'run.privacy.json'}"),
    ]
    console.print(facts_panel("result", rows, style="green"))


# -- plan and epsilon ------------------------------------------------------------------------------------------------


@app.command()
@_one_line_errors
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
    momentum: Momentum = 0.0,
    clip_norm: Clip = 1.0,
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
    """
    words = planning.Mechanism(name=mechanism, estimator=estimator, restart_every=restart_every, completion=completion)
    chosen = planning.make_plan(
        words, delta=delta, epsilon=epsilon, noise_multiplier=noise_multiplier, order=order, momentum=momentum,
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs, clip_norm=clip_norm,
    )  # fmt: skip
    rows = planning.compare(chosen) if compared else []
    if save is not None:
        chosen.save(save)
    if plot is not None:
        lines = planning.best_of_each_kind(rows) if compared else planning.noise_lines(chosen)
        plot_noise(lines, plot, f"noise over {chosen.n} steps, epsilon {chosen.epsilon:.3g}, delta {chosen.delta:g}")
    if as_json:
        described = {"plan": chosen.to_dict(), "claims": chosen.claims()}
        _print_json({**described, **({"compare": [row.to_dict() for row in rows]} if compared else {})})
        return
    console = Console()
    console.print(card(chosen))
    if compared:
        console.print(planning.comparison(rows))


@app.command()
@_one_line_errors
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
    words = planning.Mechanism(name=mechanism, estimator=estimator, restart_every=restart_every, completion=completion)
    truth = planning.make_plan(
        words, delta=delta, noise_multiplier=noise_multiplier, order=order,
        dataset_size=dataset_size, batch_size=batch_size, epochs=epochs,
    )  # fmt: skip
    claim = None
    if mechanism == "independent":
        with contextlib.suppress(MissingDependencyError):  # the truth needs no such accountant
            claim = planning.poisson_claim(noise_multiplier, batch_size, dataset_size, truth.n, delta)
    if as_json:
        sampled = {"poisson_epsilon": claim, "poisson_epsilon_holds": truth.participation.secret}
        _print_json({"epsilon": truth.epsilon, "delta": delta, "mu": truth.mu, "steps": truth.n, **sampled})
        return
    print(f"epsilon = {truth.epsilon:.4g} at delta = {delta:g} ({truth.participation.describe()})")
    if claim is not None:
        q = batch_size / dataset_size
        print(
            f"An accountant for Poisson sampling (q = {q:.4g}, {truth.n} steps) would print {claim:.4g} for this run. "
            f"That does not hold: it needs secret random sampling, and this order is {order or 'shuffled'}."
        )


# -- verify ----------------------------------------------------------------------------------------------------------


@app.command()
@_one_line_errors
def verify(
    file: Annotated[Path, typer.Argument(help="A certificate (run.privacy.json) or a plan (plan.json): public files.")],
    evidence: Annotated[
        Path | None,
        typer.Option(
            help="The certificate's evidence (run.evidence.json), which its owner keeps as secret as the data."
        ),
    ] = None,
    receipt: Annotated[
        Path | None, typer.Option(help="One unit's receipt, which it has from the run's owner: its steps, its own mu.")
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="No bounds on time and memory: for files that you trust, of long runs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Recompute every claim of a certificate or plan from the file alone.

    $ anyorder verify runs/digits-20250101-120000/run.privacy.json

    $ anyorder verify run.privacy.json --evidence run.evidence.json

    $ anyorder verify run.privacy.json --receipt mine.receipt.json

    With the evidence it also checks that the two belong together, and that
    every unit kept to the order; with a receipt, that the certificate is bound
    to this unit's steps, and its own mu. What no file can show: that the noise was
    added, and that order, units and clipping were what the file says.

    Exit code 0 if all holds, 1 if anything does not or the file cannot be read.
    """
    try:
        found = verify_file(file, evidence=evidence, receipt=receipt, large=large)
    except AnyorderError as problem:
        if as_json:
            _print_json({"ok": False, "file": str(file), "problem": str(problem)})
            raise typer.Exit(1) from problem
        _fail(f"NOT verified: {problem}", 1)
    checked, unseen = verdict(found)
    plan, certificate, own = found.plan, found.certificate, found.receipt
    if as_json:
        steps = None if certificate is None else certificate.steps
        outcome = {"ok": True, "file": str(file), "claims": plan.claims(), "checked": checked, "not_checked": unseen}
        mine = None if own is None else {"unit": own.unit, "steps": own.steps, "mu": own.mu}
        _print_json({**outcome, "steps": steps, **({} if mine is None else {"receipt": mine})})
        return
    console = Console()
    console.print(card(plan))
    for text in checked:
        console.print(f"ok  {text}", highlight=False, markup=False)
    for text in unseen:
        console.print(f"--  not checked: {text}", highlight=False, markup=False)
    if own is not None:
        console.print(facts_panel("receipt", receipt_facts(own, plan)))
    kind = "plan" if certificate is None else "certificate"
    promise = f"epsilon <= {plan.epsilon:.4g} at delta = {plan.delta:g}"
    console.print(f"verified: this {kind} claims {promise}", style="green")
