"""What commands share: options, errors in one line with an exit code, JSON on stdout, runs that start or go on."""

import functools
import json
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from anyorder.app.exits import ExitCode, fail
from anyorder.errors import AnyorderError, ArgumentError, LoaderError, MissingDependencyError, ModelError, PlanError
from anyorder.participation.registry import WORDS
from anyorder.plan.cost import is_large
from anyorder.plan.plan import Plan

# ----------------------------------------------------------------------------------------------------
# What every command prints: one line of a problem on stderr with its exit code, one JSON object on stdout.


P = ParamSpec("P")
_USAGE = (ArgumentError, PlanError, LoaderError, ModelError, MissingDependencyError)


def verify_command(folder: Path, plan: Plan) -> str:
    """What checks the run in a folder."""
    return f"anyorder verify{' --large' if is_large(plan.to_dict()) else ''} {folder / 'run.privacy.json'}"


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The package's own errors become one line on stderr and an exit code."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except AnyorderError as problem:
            fail(str(problem), ExitCode.USAGE if isinstance(problem, _USAGE) else ExitCode.FAILED)

    return guarded


@contextmanager
def attacking(stop: Callable[[], object] = lambda: None) -> Iterator[None]:
    """An audit, in which code runs that is not ours: whatever goes wrong leaves with 2, as 1 says "refuted".

    Args:
        stop: ends the bar of progress, before anything is printed and at the end; may be called twice.
    """
    try:
        yield
    except AnyorderError as problem:
        stop()
        fail(str(problem), ExitCode.USAGE)
    except KeyboardInterrupt:
        stop()
        fail("stopped: there is no audit of half a run", ExitCode.USAGE)
    except SystemExit as problem:  # of the code that is audited; its own code may be 1, or 0
        stop()
        fail(
            f"the code that is audited left the process, by sys.exit({problem.code!r}): there is no audit",
            ExitCode.USAGE,
        )
    except Exception as problem:  # of the code that is audited, where the traceback says more than a line
        stop()
        if isinstance(problem, ModuleNotFoundError) and problem.name == "torch":
            fail("this audit needs torch, which is not installed: pip install torch", ExitCode.USAGE)
        traceback.print_exc()
        raise SystemExit(ExitCode.USAGE) from problem
    finally:
        stop()


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


# ----------------------------------------------------------------------------------------------------
# Options that commands share.


Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
Epsilon = Annotated[float | None, typer.Option(help="Target epsilon. This or --noise-multiplier.")]
Delta = Annotated[
    float | None,
    typer.Option(help="Target delta. Default: a tenth of one over the number of units, rounded down to one digit."),
]
Noise = Annotated[
    float | None,
    typer.Option(help="Noise std over clip norm in one step, as DP-SGD users mean it (for the tree: at each node)."),
]
BudgetFile = Annotated[
    Path | None,
    typer.Option("--budget", help="File of the data set's budget; the plan is entered first, or the run is refused."),
]
Size = Annotated[int, typer.Option(help="Number of training examples.")]
Batch = Annotated[int, typer.Option(help="Examples per step; sums of gradients are divided by it.")]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
ORDER = (
    "Order of the data: "
    + ", ".join(f"[bold]{word}[/bold] ({row.meaning})" for word, (row, _) in WORDS.items() if row.meaning)
    + "; or secret random sampling, by this package's sampler: "
    + ", ".join(f"[bold]{word}[/bold]" for word, (row, _) in WORDS.items() if not row.meaning)
    + "."
)
MECHANISM = (
    "Noise: [bold]auto[/bold] (least error), [bold]tree[/bold] (DP-FTRL), [bold]independent[/bold] (DP-SGD without "
    "amplification), [bold]poisson[/bold] (DP-SGD with amplification), a name from plan --compare, or a kind and its "
    "size: dense, 'banded, 64 bands', 'blt, 5 buffers'."
)
PUBLIC_MECHANISM = MECHANISM.replace("[bold]poisson[/bold] (DP-SGD with amplification), ", "")
"""Where the order is not drawn in secret."""
ESTIMATOR = "Tree: [bold]full[/bold], [bold]online[/bold] or [bold]vanilla[/bold] estimates of prefix sums."
RESTART = "Tree: a fresh tree every so many epochs; 0 for never. Default: what gives least error."
SELECTION = (
    "Rows of sparse tables that get noise, chosen privately at each step: [bold]counts:THRESHOLD[/bold], "
    "[bold]top:ROWS[/bold] or [bold]uniform:ROWS[/bold]; the first two with [bold]:SHARE[/bold] of the budget behind."
)
COMPLETION = "Tree: complete each tree before a restart: [bold]auto[/bold], [bold]on[/bold] or [bold]off[/bold]."
Order = Annotated[str | None, typer.Option(help=ORDER + " Default: shuffled; with mechanism poisson, poisson.")]
MechanismName = Annotated[str, typer.Option(help=MECHANISM)]
Estimator = Annotated[str, typer.Option(help=ESTIMATOR)]
RestartEvery = Annotated[int | None, typer.Option(help=RESTART)]
Completion = Annotated[str, typer.Option(help=COMPLETION)]
Momentum = Annotated[float, typer.Option(help="Momentum of SGD, to which the mechanism is fitted.")]
Memory = Annotated[
    int | None, typer.Option(help="Memory limit for the noise, in copies of the model. Default: unlimited.")
]
Clip = Annotated[float, typer.Option(help="L2 bound on one example's gradient.")]


# ----------------------------------------------------------------------------------------------------
# What commands share that train: a new run or one that goes on, with a bar that stops however it ends.


T = TypeVar("T")


def run_or_resume(
    command: str,
    bar: Any,
    given: dict[str, Any],
    output: Path | None,
    resume: Path | None,
    *,
    start: Callable[[], T],
    go_on: Callable[[Path], T],
    budget: Path | None = None,
) -> T:
    """What `start` gives, or `go_on` with the folder of an earlier run. Stopped by a key it leaves with exit code 1.

    Args:
        command: its name, for what is to be typed to go on.
        bar: a `ProgressBar`.
        given: the settings that were given, by name.
        output: the folder that was given, for a new run.
        resume: the folder of the run to go on with.
        budget: the file that was given, for a new run.
    Raises: ArgumentError for settings beside `resume`, which has its own.
    """
    try:
        if resume is None:
            return start()
        beside = [name for name, value in (("output", output), ("budget", budget)) if value is not None]
        if given or beside:
            names = [*given, *beside]
            extra = ", ".join("--" + name.replace("_", "-") for name in names)
            raise ArgumentError(f"--resume takes the settings from its folder: leave out {extra}")
        return go_on(resume)
    except KeyboardInterrupt:
        bar.stop()
        hint = "" if bar.path is None else f"; go on with: anyorder {command} --resume {bar.path}"
        fail(f"stopped{hint}", ExitCode.FAILED)
    finally:
        bar.stop()
