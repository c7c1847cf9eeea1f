"""`anyorder audit canaries`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyorder.cli.options import Json
from anyorder.cli.output import attacking, print_json
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_down, rounded_up
from anyorder.report.audits import not_refuted
from anyorder.report.card import facts_panel
from anyorder.report.plots import can_draw
from anyorder.report.secrets import exposure_phrase, plot_ranks
from anyorder.run import secret_sharer
from anyorder.run.secret_sharer import Shared, Train

__all__ = ["canaries"]


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
        float | None, typer.Option(help="Of the built-in model, for one sequence. Default: none.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Of the built-in model. Default: 5.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of the built-in model. Default: 1.")] = None,
    repeats: Annotated[int, typer.Option(help="How often each canary stands in the text.")] = 9,
    count: Annotated[int, typer.Option(help="Canaries; about half of them stay out, by secret coins.")] = 2000,
    words: Annotated[int, typer.Option(help="In a canary; the first is given to the model.")] = 3,
    candidates: Annotated[int, typer.Option(help="Phrases that a canary is ranked among.")] = 10_000,
    vocabulary: Annotated[int, typer.Option(help="Words that are kept of the text.")] = 1000,
    leave_out: Annotated[int, typer.Option(help="Most frequent words, which are dropped first.")] = 100,
    delta: Annotated[float, typer.Option(help="Of claim and bound.")] = 1e-5,
    seed: Annotated[int, typer.Option(help="Of canaries, candidates and weights; never of coins or noise.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG: ranks of canaries that were in and out.")] = None,
    as_json: Json = False,
) -> None:
    """The Secret Sharer: hide random phrases in a text, train, and see which of them the model favours.

    $ anyorder audit canaries --text brown --repeats 9

    $ anyorder audit canaries --text brown --epsilon 8 --plot ranks.png

    $ anyorder audit canaries mymodel:train --text mytext:load

    A function of your own is called with (corpus, vocabulary): a list of
    integer arrays and the number of words. It trains on the corpus and returns
    log_prob(contexts, next_words), natural logs of probabilities; or that and
    the anyorder Plan that it ran, whose claim is then tested too. An empty
    array is an example that was zeroed out.

    The claim is for one sequence; for a canary that stands in R of them it is
    R times mu, and so is tested as that.

    Exit code 0 if no claim was refuted (less than one true claim in a million
    is), 1 if it was, 2 if there was no audit.
    """
    console = Console(stderr=as_json)
    bar = _Bar(console)
    with attacking(bar.stop):
        if plot is not None:
            can_draw(plot)
        train = _training(training, {"epsilon": epsilon, "epochs": epochs, "lr": lr}, delta, seed, bar)
        corpus = secret_sharer.read_text(text, vocabulary=vocabulary, leave_out=leave_out)
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
        raise typer.Exit(1)


def _training(name: str | None, built_in: dict[str, Any], delta: float, seed: int, bar: "_Bar") -> Train:
    """What trains: a function of one's own, or the built-in model with its settings."""
    given = {option: value for option, value in built_in.items() if value is not None}
    if name is not None:
        if given:
            extra = ", ".join(f"--{option}" for option in given)
            raise ArgumentError(f"a training of your own has its own settings: leave out {extra}")
        return secret_sharer.own_training(name)
    from anyorder.run.word_model import train_words  # with torch, which no model of one's own may need

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
    bound = f"{bounds} (95 %, for a canary, delta = {done.delta:g})"
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


class _Bar(secret_sharer.Observer):
    """Steps of the built-in training, then canaries that are ranked."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._tasks: dict[str, Any] = {}

    def planted(self, sequences: int, canaries: int) -> None:
        self._progress.console.print(
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
