"""report.html of a folder, or of one file: read from public files alone, so that anybody makes the same bytes again."""

import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from anyorder.budget.claim import FORMAT as SEARCH_FORMAT
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search import BEST, REPORT, SHOWN, hide_times
from anyorder.budget.search import CERTIFICATE as SEARCH
from anyorder.errors import ArgumentError, CertificateError, LimitError
from anyorder.formats import mentions, printable, read_json
from anyorder.plan.certificate import verify
from anyorder.plan.plan import Plan, check_claims
from anyorder.report.html import Shown, html_refusal, html_report
from anyorder.run import audit_files, folder

__all__ = ["REPORT", "Made", "make", "write", "write_search"]

_SETTINGS = {  # those of a run that a reader asks for; no path, no seed
    "model": "model", "learner": "model", "optimizer": "optimizer", "server_optimizer": "server's optimizer",
    "lr": "learning rate", "server_lr": "server's learning rate", "client_lr": "clients' learning rate",
    "momentum": "momentum", "epochs": "epochs", "rounds": "rounds", "local_epochs": "epochs on a client",
    "availability": "who is there",
}  # fmt: skip
_WORD = re.compile(r"[\w.,:+ -]{1,80}", re.ASCII)
_NAME = re.compile(r"[\w.:+-]{1,60}", re.ASCII)  # no sentence: it stands at the head of the page
_ID = re.compile(r"[0-9a-f]{8,64}")
_MOST_POINTS = 10_000


@dataclass(frozen=True)
class Made:
    """A report.

    Attributes:
        text: the page.
        problem: why the claim is not shown; None for one that passed its checks.
        unread: whether that is for its size alone: it takes `large`, and nothing in it is known to be wrong.
    """

    text: str
    problem: str | None
    unread: bool = False


def write_search(path: Path) -> Made:
    """The same for the folder of a search, whose files then have one time again: it tells nothing of the runs."""
    made = write(path)
    hide_times(path)
    return made


def write(path: Path) -> Made:
    """Write report.html into the folder of a run that has ended, whose own files are read without bounds."""
    made = make(path, large=True)
    folder.replace(path / REPORT, lambda beside: beside.write_text(made.text, encoding="utf-8"))
    return made


def make(path: str | Path, *, large: bool = False) -> Made:
    """The report of a folder, or of one certificate or plan.

    Read are, where they are there: run.privacy.json or search.privacy.json, metrics.json, audit.json, budget.json. All
    are taken for a stranger's: claims are recomputed, texts escaped, nothing but known numbers and words is shown.

    Args:
        path: the folder of a run or a search that has ended, or a file.
        large: no bounds on time and memory: for what you trust.
    Raises: ArgumentError where there is nothing to report on.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise ArgumentError(f"there is no file or folder {path}: give the folder of a run, or its certificate")
        return _of_file(path, large)
    if (path / folder.CERTIFICATE).exists() and (path / SEARCH).exists():
        raise ArgumentError(f"{path} holds {folder.CERTIFICATE} and {SEARCH}: give the one file that the report is of")
    if (path / folder.CERTIFICATE).exists():
        return _of_run(path, large)
    if (path / SEARCH).exists():
        return _of_file(path / SEARCH, large)
    raise ArgumentError(
        f"{path} is not the folder of a run that has ended: it holds no {folder.CERTIFICATE} (anyorder train, "
        f"federated, fit) and no {SEARCH} (anyorder tune)"
    )


def _of_file(path: Path, large: bool) -> Made:
    try:
        if mentions(path, f'"{SEARCH_FORMAT}"', large=large):
            return Made(html_report(SearchCertificate.load(path, large=large)), None)
        found = verify(path, large=large)
    except CertificateError as problem:
        return _refused(path, problem, Shown())
    return Made(html_report(found.plan if found.certificate is None else found.certificate), None)


def _of_run(path: Path, large: bool) -> Made:
    file = path / folder.CERTIFICATE
    try:
        certificate = verify(file, large=large).certificate
    except CertificateError as problem:
        return _refused(file, problem, Shown())
    if certificate is None:
        return _refused(file, CertificateError("the file is a plan, which has not run, and not a certificate"), Shown())
    plan = certificate.plan
    shown = _with_metrics(_with_search(Shown(), path), path, plan, large)
    shown = _with_budget(shown, path, plan)
    if (path / audit_files.AUDIT).exists():
        try:
            attacked, refuted = audit_files.found(path / audit_files.AUDIT, plan)
        except CertificateError as problem:
            shown = _noted(shown, f"{audit_files.AUDIT} is in the folder and does not count: {_named(path, problem)}")
        else:
            if refuted is not None:
                return Made(html_refusal(refuted, Shown()), refuted)
            shown = replace(shown, audit=attacked)
    return Made(html_report(certificate, shown), None)


def _with_search(shown: Shown, path: Path) -> Shown:
    """That the run is one of a search, whose folder it lies in: by itself it promises less than it says."""
    whole = path.resolve()
    if (whole.name == BEST and (whole.parent / SEARCH).exists()) or (
        whole.parent.name == SHOWN and (whole.parent.parent / SEARCH).exists()
    ):
        told = f"the number below is of this run alone. What was chosen or shown by the search costs what {SEARCH} says"
        return _noted(shown, f"This run lies in the folder of a search, and {told}.")
    return shown


def _with_metrics(shown: Shown, path: Path, plan: Plan, large: bool) -> Shown:
    """What metrics.json says, if it is of a run of this plan that has ended."""
    if not (path / folder.METRICS).exists():
        return shown
    try:
        found = read_json(path / folder.METRICS, large=large)
        check_claims(plan, found.get("claims", {}))
        settings = found.get("settings")
        if found.get("finished") is not True or not isinstance(settings, dict):
            raise CertificateError("it is of a run that has not ended")
        points, label = _accuracy(found)
    except CertificateError as problem:
        return _noted(shown, f"{folder.METRICS} is in the folder and is not shown: {_named(path, problem)}")
    dataset = settings.get("dataset")
    title = (
        f"A training on {dataset}" if _is_word(dataset, _NAME) else "A model of a table" if "csv" in settings else ""
    )
    training = [(label, _told(settings.get(name))) for name, label in _SETTINGS.items()]
    told = tuple((name, text) for name, text in training if text)
    score = _score(found, settings)
    return replace(shown, title=title, training=told, accuracy=points, label=label, score=score)


def _accuracy(found: dict[str, Any]) -> tuple[tuple[tuple[int, float], ...], str]:
    """(epochs or rounds done, fraction) of train, which has fractions, and of federated, which has pairs."""
    given = found.get("test_accuracy", [])
    if not isinstance(given, list) or len(given) > _MOST_POINTS:
        raise CertificateError(f"test_accuracy must be a list of at most {_MOST_POINTS} fractions")
    paired = bool(given) and isinstance(given[0], list)
    pairs = given if paired else list(enumerate(given, start=1))
    points = []
    for pair in pairs:
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or type(pair[0]) is not int
            or not 0 <= pair[0] < 1 << 40
            or not _is_share(pair[1])
        ):
            raise CertificateError("test_accuracy must hold fractions from 0 to 1, each of an epoch or a round")
        points.append((pair[0], float(pair[1])))
    if any(b <= a for (a, _), (b, _) in pairwise(points)):
        raise CertificateError("test_accuracy must go forward in epochs or rounds")
    return tuple(points), "round" if paired else "epoch"


def _score(found: dict[str, Any], settings: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Of a fit, on the rows of a public table."""
    value, rows = found.get("test_score"), found.get("test_rows")
    if not isinstance(value, float) or type(rows) is not int:
        return ()
    regression = settings.get("learner") in ("linear", "poisson")
    told = f"R² {value:.4g}" if regression else f"{100 * value:.2f} % right"
    return (("test score", f"{told}, on {rows} rows of a table of nobody in need of protection"),)


def _with_budget(shown: Shown, path: Path, plan: Plan) -> Shown:
    """The id of the budget that the folder names; its place on the disk is nobody's concern."""
    if not (path / folder.BUDGET).exists():
        return shown
    try:
        found = read_json(path / folder.BUDGET)
        name = found.get("id")
        if found.get("plan") != plan.public().digest or not isinstance(name, str) or not _ID.fullmatch(name):
            raise CertificateError("it is of another plan")
    except CertificateError as problem:
        return _noted(shown, f"{folder.BUDGET} is in the folder and does not count: {_named(path, problem)}")
    return replace(shown, budget=name)


def _noted(shown: Shown, note: str) -> Shown:
    return replace(shown, notes=(*shown.notes, note))


def _refused(path: Path, problem: CertificateError, shown: Shown) -> Made:
    told = _named(path.parent, problem)
    unread = isinstance(problem, LimitError)
    return Made(html_refusal(told, shown, unread=unread), told, unread=unread)


def _named(path: Path, problem: Exception) -> str:
    """The problem, with files called by their names: where they lie is not for the page."""
    told = str(problem)
    return told if str(path) == "." else told.replace(f"{path}/", "").replace(f"{printable(str(path))}/", "")


def _told(value: Any) -> str:
    if type(value) is float:
        return f"{value:g}"
    if type(value) is int:
        return str(value)
    return value if _is_word(value) else ""


def _is_word(value: Any, form: re.Pattern[str] = _WORD) -> bool:
    return isinstance(value, str) and form.fullmatch(value) is not None


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1
