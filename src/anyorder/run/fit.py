"""`anyorder fit`: a convex learner on a CSV file in the order it lies in, and the folder that says what was done."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.budget import Budget
from anyorder.errors import ArgumentError, CheckpointError
from anyorder.online import Hinge, Learner, Logistic, PoissonLoss, Softmax, Squared
from anyorder.online.regret import usual_regularization
from anyorder.participation import MinSeparation
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan as make_plan
from anyorder.run import folder, report_file
from anyorder.run.budgeted import charge, charge_again
from anyorder.run.fit_bounds import Bounds, Categories, Interval
from anyorder.run.fit_csv import Rows, Table
from anyorder.run.fit_model import LinearModel, check_test_table
from anyorder.run.job import Observer

__all__ = ["LEARNERS", "Fit", "FitSettings", "fit", "resume_fit"]

LEARNERS = ("linear", "logistic", "poisson", "softmax", "svc")
MODEL = "model.json"
_SAVES = 10  # checkpoints in the course of a run


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """What a fit does; all of it public.

    Attributes:
        csv: the table, one row on a line; see `Table`.
        target: column that is predicted.
        bounds: the bounds file's content.
        learner: one of `LEARNERS`; None for what the target asks for: two classes "logistic", more "softmax", numbers
            "linear".
        epsilon, delta: the target of the whole fit.
        rows: of the table, public; None to count them.
        batch_size: rows of a step.
        epochs: passes over the table in its order.
        mechanism: as `anyorder.plan` takes it.
        user_key: column that says whose a row is: then users are protected as a whole.
        max_participations: steps that a user's rows may be in; what comes after is left out. With user_key alone.
        regularization: lambda; None for `usual_regularization`, as of the estimators.
        test_csv: rows of nobody in need of protection, to measure accuracy on.
    """

    csv: str
    target: str
    bounds: dict[str, Any]
    learner: str | None = None
    epsilon: float = 1.0
    delta: float = 1e-6
    rows: int | None = None
    batch_size: int = 256
    epochs: int = 1
    mechanism: str = "auto"
    user_key: str | None = None
    max_participations: int = 1
    regularization: float | None = None
    test_csv: str | None = None


@dataclass(frozen=True)
class Fit:
    """What came of it.

    Attributes:
        path: the folder.
        plan: what was run.
        model: as in model.json.
        score: on the test table: the fraction of classes that are right, or R^2; None without one.
        test_rows, test_unreadable: of the test table, rows that the score is of, and rows that do not fit the bounds.
    """

    path: Path
    settings: FitSettings
    plan: Plan
    regularization: float
    model: LinearModel | None = field(default=None, repr=False)
    score: float | None = None
    test_rows: int | None = None
    test_unreadable: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what metrics.json holds. No time is in it: how long a row takes depends on the row."""
        return {
            "settings": asdict(self.settings),
            "claims": self.plan.claims(),
            "order": self.plan.participation.describe(),
            "mechanism": self.plan.strategy.describe(),
            "regularization": self.regularization,
            "test_score": self.score,
            "test_rows": self.test_rows,
            "test_unreadable": self.test_unreadable,
            "finished": self.model is not None,
        }


def fit(
    settings: FitSettings, output: str | Path | None = None, *, observer: Observer | None = None,
    key: bytes | None = None, budget: str | Path | None = None,
) -> Fit:  # fmt: skip
    """Fit a model to a table, one pass for each epoch, and write the folder of the run.

    The folder holds model.json, run.privacy.json (the certificate), plan.json, metrics.json and report.html, which may
    be shown; and checkpoint.pt with what lies beside it and run.evidence.json, which are as secret as the data, and
    which its .gitignore names.

    Guarantee: everything that is printed and written to be shown is a function of the released sums, the settings, the
    header, the number of lines, and with user_key of which lines name which user. Unit: the row, or the user;
    neighbours: zero-out.

    Args:
        budget: file of an `anyorder.Budget`, in which the plan is entered before the first step.
    Raises: ArgumentError, PlanError for settings, bounds or a header that do not fit, and where no row of test_csv can
        be read; BudgetError for a plan that the budget refuses.
    """
    work = _Work(settings)
    if settings.test_csv is not None:  # before anything is spent
        check_test_table(settings.test_csv, work.bounds, settings.target)
    plan = work.plan()
    regularization = work.regularization(plan)
    if budget is not None:
        Budget(budget).check(plan)
    with folder.fresh(output, Path(settings.csv).stem or "fit") as path:
        folder.hide_secrets(path)
        charge(path, budget, plan)
        folder.replace(path / folder.PLAN, plan.save)
        begun = Fit(path, work.settings, plan, regularization)
        folder.write_json(path / folder.METRICS, begun.to_dict())
        return _run(work, begun, observer or Observer(), key)


def resume_fit(path: str | Path, *, observer: Observer | None = None) -> Fit:
    """Go on with the fit in a folder, bit for bit as if never interrupted; the table must be as it was.

    Raises: CheckpointError if the folder holds no fit that can be resumed. ArgumentError if it is going on.
    """
    path = Path(path)
    found = folder.read_json(path / folder.METRICS)
    try:
        settings = FitSettings(**found["settings"])
        regularization = float(found["regularization"])
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path / folder.METRICS} holds no settings of a fit: {problem}") from problem
    with folder.held(path):
        if not (path / folder.CHECKPOINT).exists() and not folder.took_no_step(path):
            raise CheckpointError(f"{path} holds no {folder.CHECKPOINT}, and the run took steps: start a new one")
        plan = Plan.load(path / folder.PLAN, large=True)
        charge_again(path, plan)
        return _run(_Work(settings), Fit(path, settings, plan, regularization), observer or Observer(), None)


class _Work:
    """What settings ask for."""

    def __init__(self, settings: FitSettings) -> None:
        self.bounds = Bounds.of(settings.bounds)
        self.table = Table(settings.csv, self.bounds, settings.target, settings.user_key)
        counted = self.table.count()
        if counted == 0:
            raise ArgumentError(f"csv {settings.csv} has no rows under its header")
        rows = counted if settings.rows is None else checks.integer("rows", settings.rows, low=1)
        if rows > counted:
            raise ArgumentError(f"rows must be at most the number of lines under the header, {counted}, got {rows}")
        checks.integer("batch_size", settings.batch_size, low=1)
        checks.integer("epochs", settings.epochs, low=1)
        values = {**asdict(settings), "rows": rows, "learner": _learner(settings.learner, self.bounds)}
        values["batch_size"] = min(settings.batch_size, rows)
        self.settings = FitSettings(**values)
        if settings.user_key is None and settings.max_participations != 1:
            raise ArgumentError("max_participations is for user_key: without it each row is in one step of an epoch")
        if settings.user_key is not None and settings.epochs != 1:
            raise ArgumentError(f"epochs must be 1 with user_key, got {settings.epochs}: use max_participations")
        self.loss, self.steepest = self._loss()
        # A row and the constant 1 of the intercept.
        self.row_norm = math.hypot(self.bounds.row_norm, 1.0)

    def _loss(self) -> tuple[Logistic | Softmax | Squared | Hinge | PoissonLoss, float]:
        """And the bound on its slope, by which gradients are cut; where there is none, one that fits the bounds."""
        target = self.bounds.target
        match self.settings.learner, target:
            case "logistic", Categories():
                return Logistic(), 1.0
            case "svc", Categories():
                return Hinge(), 1.0
            case "softmax", Categories(words):
                return Softmax(len(words)), math.sqrt(2.0)
            case "poisson", Interval(_, high):
                return PoissonLoss(), max(1.0, high)
            case _:
                return Squared(), 2.0  # targets are mapped to [-1, 1]; no score need be longer

    def plan(self) -> Plan:
        """The order of the table, or of users who come when they come, and the mechanism."""
        settings, rows = self.settings, self.settings.rows or 0
        shared: dict[str, Any] = {
            "epsilon": settings.epsilon, "delta": settings.delta, "mechanism": settings.mechanism,
            "clip_norm": self.steepest * self.row_norm,
        }  # fmt: skip
        if settings.user_key is None:
            return make_plan(
                dataset_size=rows, batch_size=settings.batch_size, epochs=settings.epochs, order="sequential", **shared
            )
        steps = math.ceil(rows / settings.batch_size)
        most = checks.integer("max_participations", settings.max_participations, low=1, high=steps)
        rule = MinSeparation(steps, 1, most)
        return make_plan(order=rule, batch_size=settings.batch_size, unit="user", **shared)

    def regularization(self, plan: Plan) -> float:
        """As given, or by the default."""
        if (given := self.settings.regularization) is not None:
            return checks.positive("regularization", given)
        steep = math.isinf(self.loss.lipschitz)
        return usual_regularization(plan, self.row_norm, spread=1.0 if steep else 2.0, curvature=0.5 if steep else 0.0)

    def batches(self) -> Any:
        """All batches of all epochs."""
        size, rows = self.settings.batch_size, self.settings.rows or 0
        for _ in range(self.settings.epochs):
            yield from self.table.batches(size, rows)

    def labels(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        """For the loss: squared targets in [-1, 1]."""
        target = self.bounds.target
        if type(self.loss) is not Squared or not isinstance(target, Interval):
            return y
        return (y - target.low) / (target.high - target.low) * 2 - 1

    def model(self, theta: NDArray[np.float64]) -> LinearModel:
        """In units of the target."""
        coefficients, intercept = theta[:-1].copy(), theta[-1].copy()
        target = self.bounds.target
        if type(self.loss) is Squared and isinstance(target, Interval):
            half = (target.high - target.low) / 2
            coefficients, intercept = coefficients * half, intercept * half + target.low + half
        name = self.settings.learner or ""
        return LinearModel(name, self.bounds, self.settings.target, coefficients, intercept)


def _learner(name: str | None, bounds: Bounds) -> str:
    """The learner's name, fit for the target."""
    classes = len(bounds.target.words) if isinstance(bounds.target, Categories) else 0
    if name is None:
        return "linear" if not classes else "logistic" if classes == 2 else "softmax"
    checks.choice("learner", name, LEARNERS)
    fits = {"linear": not classes, "poisson": not classes, "softmax": classes >= 2}.get(name, classes == 2)
    if not fits:
        raise ArgumentError(
            f"learner {name!r} does not fit the target of the bounds file: logistic and svc need two classes, softmax "
            "two or more, linear and poisson [low, high]"
        )
    if name == "poisson" and isinstance(bounds.target, Interval) and bounds.target.low < 0:
        raise ArgumentError(f"learner 'poisson' needs a target of at least 0, got low {bounds.target.low:g}")
    return name


def _run(work: _Work, begun: Fit, observer: Observer, key: bytes | None) -> Fit:
    """All steps that are left, then the files."""
    path, plan, bounds = begun.path, begun.plan, work.bounds
    every = max(1, plan.n // _SAVES)
    shape = (len(bounds.names) + 1, work.loss.outputs)
    came: Counter[str] = Counter()
    with Learner(
        plan, shape, loss=work.loss, regularization=begun.regularization, checkpoint=path / folder.CHECKPOINT, key=key
    ) as learner:
        done = learner.steps_taken
        observer.started(plan, path, done)
        for step, rows in enumerate(work.batches()):
            units, kept = _units(rows, came, work.settings.max_participations)
            if step < done:
                continue
            X = np.hstack([rows.X[kept], np.ones((len(units), 1))])
            learner.step(units, X, work.labels(rows.y[kept]))
            if (step + 1) % every == 0:
                learner.save()
            observer.stepped(step + 1)
        if learner.steps_taken != plan.n:
            raise CheckpointError(
                f"the table has fewer rows than when the run began: it took {learner.steps_taken} of {plan.n} steps"
            )
        learner.save()
        model = work.model(learner.average)
        made = Fit(path, work.settings, plan, begun.regularization, model, None)
        folder.write_json(path / MODEL, model.to_dict())
        learner.evidence().save(path / folder.EVIDENCE)
        folder.replace(path / folder.CERTIFICATE, learner.certificate().save)
    if (test := work.settings.test_csv) is not None:
        found = model.test(test)
        made = replace(made, score=found.score, test_rows=found.rows, test_unreadable=found.unreadable)
    folder.write_json(path / folder.METRICS, made.to_dict())
    report_file.write(path)
    return made


def _units(rows: Rows, came: Counter[str], most: int) -> tuple[Any, NDArray[np.intp]]:
    """Whose the rows are that take part, and which these are. A user who came as often as allowed is left out."""
    if rows.users is None:
        everything = np.arange(len(rows.y))
        return rows.first + everything, everything
    here = {user for user in rows.users if user is not None and came[user] < most}
    came.update(here)
    kept = np.array([i for i, user in enumerate(rows.users) if user in here], dtype=np.intp)
    return [rows.users[i] for i in kept], kept
