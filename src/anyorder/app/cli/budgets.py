"""`anyorder budget`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from anyorder.accounting.curves import Gaussian
from anyorder.app import folder
from anyorder.app.cli.common import Json, one_line_errors, print_json
from anyorder.app.session import word_of
from anyorder.budget.account import Balance, Remaining
from anyorder.budget.claim import FORMAT as SEARCH
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.file import Budget, export
from anyorder.errors import ArgumentError
from anyorder.formats import printable, read_json
from anyorder.formatting import counted, rounded_up
from anyorder.plan.certificate import Certificate, Evidence
from anyorder.plan.certificate import verify as verify_file
from anyorder.plan.plan import Plan

__all__ = ["budget"]


class Action(StrEnum):
    """What is done with a budget."""

    show = "show"
    spend = "spend"
    settle = "settle"
    limit = "limit"
    export = "export"


_OPTIONS = {
    "name": {Action.spend}, "run": {Action.spend, Action.settle}, "epsilon": {Action.limit}, "delta": {Action.limit},
    "unit": {Action.limit}, "neighbours": {Action.limit}, "planned": {Action.limit}, "filter": {Action.limit},
    "format": {Action.export}, "output": {Action.export},
}  # fmt: skip
"""Option -> the actions that it is for."""

_FIRST = (
    "The first entry decides how entries are counted, for good: after a plain (Gaussian) plan, searches are refused "
    "and secret sampling counts as if there were none. Where these are to come too, make it with --filter renyi"
)
_GAUSSIAN = (
    "A Gaussian filter refuses searches, and counts secret sampling as if there were none; --filter renyi takes both"
)


@one_line_errors
def budget(
    file: Annotated[Path, typer.Argument(help="The budget of a data set.", show_default=False)],
    action: Annotated[Action, typer.Argument(help="What to do with it.")] = Action.show,
    what: Annotated[
        Path | None,
        typer.Argument(
            help="spend: a plan, or the certificate of a run or search; settle: of a run.", show_default=False
        ),
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="limit: the epsilon that must not be exceeded.")] = None,
    delta: Annotated[float | None, typer.Option(help="limit: the delta of that epsilon.")] = None,
    unit: Annotated[
        str | None, typer.Option(help="limit, new file: the privacy unit. Default: that of the first plan.")
    ] = None,
    neighbours: Annotated[
        str | None,
        typer.Option(
            help="limit, new file: neighbouring relation; zero-out takes all plans. Default: that of the first plan."
        ),
    ] = None,
    planned: Annotated[
        bool | None,
        typer.Option("--planned", help="limit, new file: you promise that all plans are chosen before any result."),
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(
            help="limit, new file: gaussian, which refuses searches, or renyi, which takes all. Default: what the "
            "first entry needs."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="spend: a name for people to read.")] = None,
    run: Annotated[
        str | None, typer.Option(help="spend, settle: a word that names the run; for a plan, one not used yet.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="export: opendp (deployments registry) or nist.")] = None,
    output: Annotated[Path | None, typer.Option(help="export: file to write. Default: stdout.")] = None,
    as_json: Json = False,
) -> None:
    """What a data set may be used for, and was: every run is entered before it starts.

    $ anyorder budget people.budget limit --epsilon 8 --delta 1e-6

    $ anyorder budget people.budget limit --epsilon 8 --delta 1e-6 --filter renyi

    $ anyorder budget people.budget spend plan.json

    $ anyorder budget people.budget show

    $ anyorder budget people.budget settle runs/digits/run.privacy.json

    $ anyorder budget people.budget export --format opendp

    With --filter renyi, searches and secret sampling can be entered next to
    plain plans, which then cost some per cent more. Without it the first
    entry decides, and after a plain plan they are refused.

    A plan that would exceed the limit is refused with exit code 1, and nothing
    is written. Settle a run that stopped early with its certificate and the
    evidence next to it: what it did not use is given back. Its entry is
    found by the word next to it, or by --run. train, federated, fit and
    tune enter their plans with --budget FILE.
    """
    is_new = not file.exists()
    given = {
        "epsilon": epsilon, "delta": delta, "unit": unit, "neighbours": neighbours, "planned": planned,
        "filter": filter, "name": name, "run": run, "format": format, "output": output,
    }  # fmt: skip
    _check_options(action, what, {key: value for key, value in given.items() if value is not None})
    match action:
        case Action.limit:
            left = _limit(file, epsilon, delta, unit, neighbours, planned, filter)
        case Action.spend:
            left = Budget(file).spend(_read(what), name or "", run=run)
        case Action.settle:
            found = _read(what)
            if type(found) is not Certificate:
                raise ArgumentError(f"settle needs the certificate of a run, and {what} is none")
            assert what is not None  # as the options were checked
            opened, beside = Budget(file), what.parent / folder.EVIDENCE
            word = run or word_of(what, opened)
            early = found.realised is None and found.steps < found.plan.n and beside.exists()
            left = opened.settle(Evidence.load(beside, found, large=True) if early else found, run=word)
        case Action.export:
            text = export(Budget(file), format or "opendp")
            if output is None:
                print(text)
            else:
                output.write_text(text + "\n", encoding="utf-8")
            return
        case Action.show:
            left = Budget(file).remaining()
    if as_json:
        print_json({**_numbers(left), "entries": [_entry(held) for held in Budget(file).entries()]})
    elif action is Action.show:
        _show(Budget(file), left)
    else:
        print(left)
        if action is Action.limit and is_new and planned is None and filter != "renyi":
            print(_GAUSSIAN if filter is not None else _FIRST)


def _check_options(action: Action, what: Path | None, given: dict[str, Any]) -> None:
    for name in given:
        if action not in _OPTIONS[name]:
            raise ArgumentError(f"--{name} is for {' and '.join(sorted(_OPTIONS[name]))}, not for {action.value}")
    needs_file = action in (Action.spend, Action.settle)
    if needs_file != (what is not None):
        told = "needs the file of a plan or certificate" if needs_file else f"takes no file, got {what}"
        raise ArgumentError(f"anyorder budget FILE {action.value} {told}")


def _limit(
    file: Path, epsilon: float | None, delta: float | None, unit: str | None, neighbours: str | None,
    planned: bool | None, filter: str | None,
) -> Remaining:  # fmt: skip
    if epsilon is None or delta is None:
        raise ArgumentError("anyorder budget FILE limit needs --epsilon and --delta")
    is_new = not file.exists()
    found = Budget(
        file, epsilon if is_new else None, delta if is_new else None, unit=unit, neighbours=neighbours,
        adaptive=None if planned is None else not planned, filter=filter,
    )  # fmt: skip
    return found.remaining() if is_new else found.limit(epsilon, delta)


def _read(path: Path | None) -> Plan | Certificate | SearchCertificate:
    """A plan or certificate, recomputed."""
    assert path is not None  # as the options were checked
    if read_json(path, large=True).get("format") == SEARCH:
        return SearchCertificate.load(path, large=True)
    found = verify_file(path, large=True)
    return found.plan if found.certificate is None else found.certificate


def _numbers(left: Remaining) -> dict[str, Any]:
    return {
        "spent": left.spent, "limit": left.limit, "delta": left.delta, "remaining": left.epsilon, "mu": left.mu,
        "rule": left.rule,
    }  # fmt: skip


def _entry(held: Balance) -> dict[str, Any]:
    spend, settled = held.spend, held.settled
    return {
        "number": spend.number, "name": spend.name, "what": spend.what, "time": spend.time, "plan": spend.plan,
        "run": spend.run, "parts": spend.parts, "by_unit": spend.units is not None,
        "settled": None if settled is None else {"steps": settled.steps, "mu": settled.mu},
    }  # fmt: skip


def _show(budget: Budget, left: Remaining) -> None:
    console = Console()
    table = Table("entry", "when", "name", "what", "epsilon alone", "as it counts", title=printable(str(budget.path)))
    for held in budget.entries():
        spend = held.spend
        now = "by unit" if held.rows is not None else "for everybody"
        if held.settled is not None:
            now = f"settled: mu {rounded_up(held.settled.mu)} after {counted(held.settled.steps, 'step')}"
        alone = rounded_up(held.now.epsilon(left.delta)) if type(held.now) is Gaussian else "amplified or drawn"
        table.add_row(str(spend.number), spend.time, spend.name, spend.what, alone, now)
    console.print(table)
    console.print(f"counted: {left.rule}", highlight=False)
    console.print(str(left), highlight=False, soft_wrap=True)
