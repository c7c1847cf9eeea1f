"""What a terminal shows of a run."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn

from anyorder.app.cards import card
from anyorder.app.job import Observer
from anyorder.app.waiting import Steps, Wait
from anyorder.plan.plan import Plan

__all__ = ["PassBar", "ProgressBar", "RoundsBar", "StepsBar"]


class ProgressBar(Observer):
    """A progress bar on stderr and the privacy card.

    Args:
        console: of the card.
    """

    _what = "steps"
    _columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.fields[epoch]} epochs,"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TimeRemainingColumn(), TextColumn("{task.fields[accuracy]}"),
    )  # fmt: skip

    def __init__(self, console: Console) -> None:
        self.path: Path | None = None
        self._console = console
        self._bar = Steps(*self._columns, what=self._what)
        self._wait = Wait("reading the data set, fitting the mechanism and finding its noise")

    def planning(self) -> None:
        self._wait.start()

    def started(self, plan: Plan, path: Path, step: int) -> None:
        self.path = path
        self._wait.stop()
        self._console.print(card(plan))
        self._console.print(f"{'Going on' if step else 'Writing'} in {path}", highlight=False, markup=False)
        self._bar.start()
        self._task = self._bar.add_task("", total=plan.n, completed=step, epoch=0, accuracy="")

    def stepped(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def epoch_ended(self, epoch: int, accuracy: float) -> None:
        text = f"test accuracy {100 * accuracy:.1f} %"
        self._bar.update(self._task, epoch=epoch, accuracy=text)
        self._bar.note(text)

    def stop(self) -> None:
        self._wait.stop()
        if self.path is not None:  # a bar that never started would print an empty line
            self._bar.stop()


class RoundsBar(ProgressBar):
    """The same for the rounds of a federation: their number and the accuracy on public examples, nothing else."""

    _what = "rounds"
    _columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeRemainingColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )  # fmt: skip


class PassBar(ProgressBar):
    """The same for a table that is read once: steps alone, no time, which depends on what stands in the rows."""

    _columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"))


class StepsBar:
    """The privacy card of what is audited, and a bar of its steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Steps(
            TextColumn("auditing,"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn()
        )
        self._began = False

    def started(self, plan: Plan) -> None:
        """The training begins."""
        self._console.print(card(plan))
        self._bar.start()
        self._began = True
        self._task = self._bar.add_task("", total=plan.n)

    def stepped(self, step: int) -> None:
        """`step` steps are done."""
        self._bar.update(self._task, completed=step)

    def stop(self) -> None:
        """The bar stays as it is."""
        if self._began:  # a bar that never started would print an empty line
            self._bar.stop()
