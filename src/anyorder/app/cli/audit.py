"""`anyorder audit`: attacks on runs and models of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from anyorder.app import secret_sharer
from anyorder.app.cards import facts_panel
from anyorder.app.charts import METHODS, AuditSummary, audit_panel, can_draw, exposure_phrase, not_refuted, plot_ranks
from anyorder.app.cli import WholeCommand
from anyorder.app.cli.common import Json, attacking, print_json
from anyorder.app.exits import ExitCode, fail
from anyorder.app.secret_sharer import Shared, Train
from anyorder.app.text import read_text
from anyorder.app.waiting import Steps
from anyorder.audit import from_file
from anyorder.audit.bounds import Method
from anyorder.errors import AnyorderError, ArgumentError
from anyorder.formatting import counted, rounded_down, rounded_up
from anyorder.plan.options import careful_delta

# ----------------------------------------------------------------------------------------------------
# `anyorder audit arrays`.


def arrays(
    file: Annotated[
        Path,
        typer.Argument(
            help="An .npz file: released rows and canaries, or scores; draws; the claim. See docs/audit.md."
        ),
    ],
    released: Annotated[
        Path | None, typer.Option(help="The rows in an .npy file of their own; they may be larger than memory.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence of each single bound; the verdict does not use it.")
    ] = 0.95,
    as_json: Json = False,
) -> None:
    """Audit what any other program released, by the canaries that it may have used.

    $ anyorder audit arrays run.npz

    $ anyorder audit arrays run.npz --released rows.npy --json

    The file is written by numpy.savez with the fields of ao.audit.from_rows, or of
    ao.audit.from_scores for models alone. It holds secret draws: keep it as the
    data, and throw away the model that was attacked.

    Exit code 0 if the claim was not refuted, 1 if it was, 2 if there was no audit.
    """
    try:
        audited = from_file(file, released=released)
        methods: tuple[Method, ...] = tuple(METHODS) if audited.mus is not None else ("one_run", "clopper_pearson")
        summary = AuditSummary.of(audited, methods, confidence)
    except AnyorderError as problem:
        fail(str(problem), ExitCode.USAGE)  # 1 says that a claim was refuted
    if as_json:
        print_json(summary.to_dict())
    else:
        Console().print(audit_panel(summary))
    if summary.refuted:
        raise typer.Exit(ExitCode.FAILED)


# ----------------------------------------------------------------------------------------------------
# `anyorder audit run`.


def run(
    target: Annotated[
        str, typer.Argument(help="module:function -> anyorder.app.Setup, or the folder of a run of anyorder train.")
    ],
    canaries: Annotated[int, typer.Option(help="Gradients at the clip norm, each in or out by a secret draw.")] = 1000,
    coordinates: Annotated[
        int | None, typer.Option(help="Number of gradient coordinates that canaries use. Default: all.")
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="Confidence of each single bound; the verdict does not use it.")
    ] = 0.95,
    delta: Annotated[float | None, typer.Option(help="Delta of the claim and the bounds. Default: the plan's.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"Bounds to compute: {', '.join(METHODS)}. Repeat it for several. Default: all."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: the scores, and the two laws of the claim.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for audit.json, audit.png and the run's certificate.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train your own set-up with canaries in it, and see whether its claim holds.

    $ anyorder audit run mytraining:setup

    $ anyorder audit run runs/digits-20250101-120000 --out audits/digits

    The function returns an anyorder.app.Setup: plan, model, optimizer, loader,
    loss. All planned steps are trained. The run of a folder is repeated
    with other noise, and the folder stays as it is. The trained model has
    seen canaries and is thrown away. Who was in, and each score, stay in
    memory.

    Exit code 0 if the claim was not refuted (less than one true claim in a
    million is), 1 if it was, 2 if there was no audit.
    """
    with attacking():
        from anyorder.app import audits as audit_job  # with torch
        from anyorder.app.progress import StepsBar

    console = Console(stderr=as_json)
    bar = StepsBar(console)
    with attacking(bar.stop):
        asked = audit_job.Request(
            target=target, canaries=canaries, coordinates=coordinates, confidence=confidence, delta=delta,
            methods=cast(Sequence[Method], tuple(method or METHODS)), plot=plot, out=out,
        )  # fmt: skip
        done = audit_job.run(asked, bar)
    if as_json:
        print_json(done.to_dict())
    else:
        console.print(done.panel())
    if done.summary.refuted:
        raise typer.Exit(ExitCode.FAILED)


# ----------------------------------------------------------------------------------------------------
# `anyorder audit canaries`.


def canaries(
    text: Annotated[
        str,
        typer.Option(
            help="Text or Parquet file, a folder of them, or module:function -> (sequences, vocabulary). A word is "
            "letters alone, between spaces."
        ),
    ],
    training: Annotated[
        str | None,
        typer.Argument(help="module:function, see below. Default: a small model of the next word, with --epsilon."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Target epsilon of the built-in model, for one sequence. Default: none.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the built-in model. Default: 5.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the built-in model. Default: 1.")] = None,
    repeats: Annotated[int, typer.Option(help="How often each canary is put into the text.")] = 9,
    count: Annotated[int, typer.Option(help="Number of canaries; secret draws leave about half of them out.")] = 2000,
    words: Annotated[int, typer.Option(help="Words in a canary; the model is given the first.")] = 3,
    candidates: Annotated[int, typer.Option(help="Number of phrases among which a canary is ranked.")] = 10_000,
    vocabulary: Annotated[int, typer.Option(help="Number of different words to keep.")] = 1000,
    leave_out: Annotated[int, typer.Option(help="Number of most frequent words to drop first.")] = 100,
    delta: Annotated[
        float | None, typer.Option(help="Delta of the claim and the bound. Default: 1e-5, or 0.1 / sequences if less.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of canaries, candidates and weights; never of draws or noise.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: ranks of canaries that were in and out.")] = None,
    as_json: Json = False,
) -> None:
    """The Secret Sharer: hide random phrases in a text, train, and see which of them the model favours.

    $ anyorder audit canaries --text brown --repeats 9

    $ anyorder audit canaries --text brown --epsilon 8 --plot ranks.png

    $ anyorder audit canaries mymodel:train --text mytext:load

    Your own function is called with (corpus, vocabulary): a list of
    integer arrays and the number of words. It trains on the corpus and returns
    log_prob(contexts, next_words), natural logs of probabilities; or that and
    the anyorder Plan that it ran, whose claim is then tested too. An empty
    array is an example that was zeroed out.

    The claim is for one sequence. A canary in R sequences is tested at R times
    mu.

    Exit code 0 if no claim was refuted (less than one true claim in a million
    is), 1 if it was, 2 if there was no audit.
    """
    console = Console(stderr=as_json)
    bar = _Bar(console)
    with attacking(bar.stop):
        if plot is not None:
            can_draw(plot)
        corpus = read_text(text, vocabulary=vocabulary, leave_out=leave_out)
        if delta is None:
            delta = careful_delta(1e-5, len(corpus.train) + count * repeats)
        train = _training(training, {"epsilon": epsilon, "epochs": epochs, "lr": lr}, delta, seed, bar)
        done = secret_sharer.share(
            corpus, train, count=count, words=words, repeats=repeats, candidates=candidates, delta=delta, seed=seed,
            observer=bar,
        )  # fmt: skip
        bar.stop()
        if plot is not None:
            row = counted(repeats, "time")
            plot_ranks({row: {"in the text": done.inside, "left out": done.outside}}, plot, "ranks of canaries")
    if as_json:
        print_json(done.to_dict())
    else:
        console.print(facts_panel("secret sharer", _rows(done), "red" if done.refuted else "green"))
    if done.refuted:
        raise typer.Exit(ExitCode.FAILED)


def _training(name: str | None, built_in: dict[str, Any], delta: float, seed: int, bar: "_Bar") -> Train:
    """What trains: a function of one's own, or the built-in model with its settings."""
    given = {option: value for option, value in built_in.items() if value is not None}
    if name is not None:
        if given:
            extra = ", ".join(f"--{option}" for option in given)
            raise ArgumentError(f"a training of your own has its own settings: leave out {extra}")
        return secret_sharer.own_training(name)
    from anyorder.app.word_model import train_words  # with torch, which no model of one's own may need

    def train(corpus: Any, vocabulary: int) -> Any:
        trained = train_words(corpus, vocabulary, delta=delta, seed=seed, stepped=bar.stepped, **given)
        return trained.log_prob, trained.plan

    return train


def _rows(done: Shared) -> list[tuple[str, str]]:
    claim, p = done.claim, done.p_value()
    rows = [
        ("in the text", f"{counted(len(done.inside.ranks), 'canary')}, {counted(done.repeats, 'time')} each"),
        ("", exposure_phrase(done.inside)),
        ("left out", counted(len(done.outside.ranks), "canary")),
        ("", exposure_phrase(done.outside)),
    ]
    if done.perplexity is not None:
        rows.append(("perplexity", f"{done.perplexity:.1f} on text that was held out"))
    bounds = ", ".join(f"{rounded_down(done.lower_bound(method))} by {method}" for method in done.methods)
    bound = f"{bounds} (95 %, for a canary, delta = {rounded_up(done.delta, 6)})"
    if done.plan is None or claim is None or p is None:
        return [*rows, ("epsilon at least", bound), ("claimed", "nothing")]
    above = sum(done.lower_bound(method) > claim.epsilon(done.delta) for method in done.methods)
    seen = "REFUTED" if done.refuted else not_refuted(above)
    return [
        *rows,
        ("claimed", f"epsilon <= {rounded_up(done.plan.curve.epsilon(done.delta))} for one sequence"),
        ("", f"epsilon <= {rounded_up(claim.epsilon(done.delta))} for a canary: a group of {done.repeats}"),
        ("epsilon at least", bound),
        ("p-value of the claim", f"{p:.2g}"),
        ("verdict", seen),
    ]


class _Bar(secret_sharer.SharerObserver):
    """Steps of the built-in training, then canaries that are ranked."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Steps(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._tasks: dict[str, Any] = {}

    def planted(self, sequences: int, canaries: int) -> None:
        self._console.print(
            f"{counted(canaries, 'canary')} in {counted(sequences, 'sequence')}; training",
            highlight=False,
            markup=False,
        )

    def stepped(self, step: int, total: int) -> None:
        self._show("steps", step, total)

    def ranked(self, done: int, count: int) -> None:
        self._show("canaries ranked", done, count)

    def _show(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done)

    def stop(self) -> None:
        if self._tasks:  # a bar that never started would print an empty line
            self._progress.stop()


# ----------------------------------------------------------------------------------------------------
# `anyorder audit ..`: attacks on runs and models of one's own.


group = typer.Typer(
    name="audit", no_args_is_help=False, add_completion=False, rich_markup_mode="rich",
    help="Attack your own training, and see whether its claim holds.\n\n"
    "Exit codes: 0 the claim was not refuted, 1 it was, 2 there was no audit.",
)  # fmt: skip
# One file for each command; this is the one list of them, in the order of the help.
for _command in (run, canaries, arrays):
    group.command(cls=WholeCommand)(_command)


@group.callback(invoke_without_command=True)
def _main(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(ExitCode.USAGE)
