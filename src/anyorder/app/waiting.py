"""What a person sees of work that takes long, on stderr: a bar on a terminal, and in a pipe a line now and then."""

import threading
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

__all__ = ["Steps", "Wait"]

_SECONDS = 10.0
_LINES = 10  # of all steps


class Wait:
    """Work whose length nobody knows: a spinner; in a pipe a line every ten seconds, and one for each new text.

    Args:
        text: what is being done.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._console = Console(stderr=True)
        self._spinner = self._console.status(text)
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin to show it."""
        if self._console.is_terminal:
            self._spinner.start()
        else:
            threading.Thread(target=self._tell, daemon=True).start()

    def update(self, text: str) -> None:
        """What is being done now."""
        self._text = text
        if self._console.is_terminal:
            self._spinner.update(text)
        else:
            _line(self._console, text)

    def stop(self) -> None:
        """Show it no more; may be called twice."""
        self._ended.set()
        self._spinner.stop()

    def _tell(self) -> None:
        passed = 0.0
        while not self._ended.wait(_SECONDS):
            passed += _SECONDS
            _line(self._console, f"{self._text} ({passed:g} s)")

    def __enter__(self) -> "Wait":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: object, trace: TracebackType | None) -> None:
        self.stop()


class Steps(Progress):
    """A bar of steps; in a pipe a line for every tenth of them. No line depends on how long a step took.

    Args:
        columns: of the bar.
        what: what is counted.
    """

    def __init__(self, *columns: str | ProgressColumn, what: str = "steps", **options: Any) -> None:
        console = Console(stderr=True)
        super().__init__(*columns, console=console, disable=not console.is_terminal, **options)
        self._what = what
        self._told: dict[TaskID, int] = {}

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """As of every bar."""
        super().update(task_id, **fields)
        task = self._tasks[task_id]
        if not self.disable or not task.total:
            return
        tenth = int(_LINES * task.completed / task.total)
        if tenth > self._told.get(task_id, 0):
            self._told[task_id] = tenth
            _line(self.console, f"{task.completed:g} of {task.total:g} {task.description or self._what}")

    def note(self, text: str) -> None:
        """What a column shows; in a pipe a line."""
        if self.disable:
            _line(self.console, text)


def _line(console: Console, text: str) -> None:
    console.print(f"anyorder: {text}", highlight=False, markup=False, soft_wrap=True)
