"""A search for settings as one release: K private runs, K from a public law, the best shown, one claim for it all."""

import contextlib
import math
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import sha256
from math import inf, nextafter, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import checks, durable
from anyorder.accounting import gdp_mu
from anyorder.accounting.curves import Curve, Gaussian, compose
from anyorder.accounting.gaussian import NEIGHBOURS
from anyorder.budget.claim import (
    PLAN_NAMES,
    ScoreNoise,
    SearchCertificate,
    SearchClaim,
    Settings,
    Space,
    plan_settings,
    read_space,
    uniforms,
)
from anyorder.budget.file import Budget
from anyorder.budget.search_privacy import Fixed, Geometric, Law, Logarithmic, Poisson, calibrate_search
from anyorder.budget.trials import TrialError, Trials
from anyorder.checks import final
from anyorder.errors import (
    AnyorderError,
    ArgumentError,
    BudgetError,
    CertificateError,
    CheckpointError,
    PlanError,
    TrainingError,
)
from anyorder.formats import canonical, load_json, save_json
from anyorder.noise import NoiseSource
from anyorder.plan.certificate import Certificate
from anyorder.plan.options import from_flat
from anyorder.plan.plan import Plan
from anyorder.plan.planner import plan_at_sigma, with_budget

# ----------------------------------------------------------------------------------------------------
# The plans of a search, all of them made before its first run, with the noise that keeps the target of the whole.


_NOISE = {"epsilon", "delta", "noise_multiplier", "sigma"}
_ATTEMPTS = 64


@final
@dataclass(frozen=True)
class Prepared:
    """What is fixed, and public, before the first run.

    Attributes:
        claim: of the whole search.
        plans: the canonical text of a plan's settings -> the plan.
    """

    claim: SearchClaim
    plans: dict[str, Plan]

    def plan(self, settings: Settings) -> Plan:
        """That of a run with these settings."""
        return self.plans[canonical(plan_settings(settings))]

    def named(self, fingerprint: str) -> "Prepared":
        """With plans that say which search they are candidates of, wherever their runs' certificates are taken."""
        named = {text: replace(plan, candidate_of=fingerprint) for text, plan in self.plans.items()}
        return replace(self, plans=named)


def prepare(
    space: Space, given: Mapping[str, Any], law: Law, epsilon: float, delta: float, score: tuple[float, float] | None
) -> Prepared:
    """Make every plan that a run may have, with equal noise against its sensitivity, so that the search keeps epsilon.

        mu_run^2 + mu_score^2 = mu^2,   mu_score^2 = share mu^2,   mu the most for which search_epsilon <= epsilon

    **One curve for all runs.** A run draws its settings s at random and shows them with its outcome, so for neighbours
    D and D' its hockey-stick divergence is sum_s p(s) delta_s(eps), which is at most that of a curve that no delta_s
    exceeds. Of Gaussian curves that is the one with the largest mu. For other curves the largest at each epsilon may be
    that of no mechanism at all, so they must be equal.

    Args:
        given: keywords of `anyorder.plan` that all runs share.
        score: (sensitivity, share) of a score of private data.
    Raises: ArgumentError; PlanError for settings that make no plan, and for plans that have no curve in common.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"plan must be keywords of ao.plan, {{name: value}}, got {type(given).__name__}")
    if strange := sorted(set(given) - PLAN_NAMES):
        raise ArgumentError(f"plan must be keywords of ao.plan, which has no {', '.join(map(repr, strange[:3]))}")
    if noise := sorted(set(given) & _NOISE):
        raise ArgumentError(
            f"plan must not have {noise[0]!r}: epsilon= and delta= of the search say the noise of all runs"
        )
    bases = {}
    for own in space.plans():
        if both := sorted(set(own) & set(given)):
            raise ArgumentError(f"{both[0]!r} must be in plan= or in the space, not in both")
        text = canonical(own)
        if text not in bases:
            bases[text] = _base(given, own, delta)
    relations = {(base.neighbours, base.unit) for base in bases.values()}
    if len(relations) != 1:
        raise PlanError(
            f"all plans of a search must be about one relation of neighbours and one unit, got {sorted(relations)}: a "
            "claim is about one of each. Do not search over what changes them, such as order 'poisson' next to others"
        )
    noisy = _Noisy(list(bases.values()), delta, score)
    claim, sigma = noisy.calibrated(law, epsilon)
    return Prepared(claim, {text: with_budget(base, sigma=sigma) for text, base in bases.items()})


def _base(given: Mapping[str, Any], own: Settings, delta: float) -> Plan:
    try:
        return plan_at_sigma(1.0, **from_flat({**given, **own}), delta=delta)
    except AnyorderError as problem:
        raise PlanError(f"the settings {own!r} make no plan, so nothing was run: {problem}") from problem


@final
@dataclass(frozen=True)
class _Noisy:
    """Plans as a function of sigma, which they share."""

    bases: Sequence[Plan]
    delta: float
    score: tuple[float, float] | None

    def calibrated(self, law: Law, epsilon: float) -> tuple[SearchClaim, float]:
        """(the claim, sigma): the least noise whose claim, recomputed from the plans themselves, is at most epsilon."""
        plain = all(type(base.curve) is Gaussian and base.selection is None for base in self.bases)
        if plain:
            mu = calibrate_search(law, epsilon, self.delta)
            factor = NEIGHBOURS[self.bases[0].neighbours]
            sigma = nextafter(factor / (mu * sqrt(1 - (self.score[1] if self.score else 0.0))), inf)
        else:
            sigma = 1 / calibrate_search(law, epsilon, self.delta, lambda mu: self.at(1 / mu)[0])
        for attempt in range(_ATTEMPTS):  # the roundings of the parts, each up, may be above by some last digits
            curve, noise = self.at(sigma)
            claim = SearchClaim(law, curve, self.delta, noise)
            if claim.epsilon <= epsilon:
                return claim, sigma
            sigma *= 1 + 2.0 ** (attempt - 50)
        raise PlanError(f"no noise was found that keeps epsilon {epsilon:g} for this search")

    def at(self, sigma: float) -> tuple[Curve, ScoreNoise | None]:
        """(the curve of any one run with its score; the noise of the score)."""
        run = _common([with_budget(base, sigma=sigma).curve for base in self.bases])
        if self.score is None:
            return run, None
        sensitivity, share = self.score
        mu = run.mu if run.mu is not None else gdp_mu(run.epsilon(self.delta), self.delta)
        noise = ScoreNoise(sensitivity, nextafter(sensitivity / (mu * sqrt(share / (1 - share))), inf))
        return compose(run, Gaussian(noise.mu, neighbours=run.neighbours, unit=run.unit)), noise


def _common(curves: list[Curve]) -> Curve:
    """One that bounds all."""
    gaussian = [curve for curve in curves if type(curve) is Gaussian]
    if len(gaussian) == len(curves):
        return max(gaussian, key=lambda curve: curve.mu)
    if any(curve != curves[0] for curve in curves):
        raise PlanError(
            "the plans of a search must all be Gaussian, or all have the same curve, and these differ: search over "
            "batch_size, epochs and the like in orders without secret sampling (order='shuffled'), and with secret "
            "sampling over what leaves its draws alone, such as clip_norm and learning rates"
        )
    return curves[0]


# ----------------------------------------------------------------------------------------------------
# The folder of a search: what is shown of it, and what is as secret as the data until the end, when it is removed.


CERTIFICATE = "search.privacy.json"
REPORT = "report.html"  # a page of the search, as each run has one of its own
BEST = "best"  # the folder of the run that was chosen
SHOWN = "runs"  # the folders of all runs, where the law shows them
_RUNS_FOLDER = ".runs"  # secret: a folder and a record for each run
_STATE = ".search.json"  # secret: the key of the draws; after the end, what is shown
_FAILURE = ".failure.txt"  # secret: which run failed, and how
PRINTED = ".printed.txt"  # secret: what runs print
_LOCK = ".lock"
_BEGINNING = {".gitignore", _LOCK, _STATE, _RUNS_FOLDER, PRINTED}

_STATE_FORMAT = "anyorder-search-state/1"
_RUN_FORMAT = "anyorder-search-run/1"

_IGNORED = f"""# A search: its state, its runs and what they print are as secret as the data. Its certificate is public.
# Of the best run's folder show what the run itself says may be shown: it may hold a checkpoint or evidence.
*
!.gitignore
!{CERTIFICATE}
!{REPORT}
"""


class SearchFolder:
    """The files of a search that is going on in this process, which has locked them.

    Args:
        path: where they are.
        kept: whether the search can be resumed from there; else records stay in memory.
    """

    def __init__(self, path: Path, kept: bool) -> None:
        self.path, self.kept = path, kept
        self._records: dict[str, dict[str, Any]] = {}

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """What was saved last; None for a search that has not begun. Raises: CheckpointError."""
        if not self.kept or not (self.path / _STATE).exists():
            return None
        return self._read(self.path / _STATE, _STATE_FORMAT)

    def save_state(self, **state: Any) -> None:
        """Replace it, whole, on the disk when this returns."""
        if self.kept:
            self._write(self.path / _STATE, {"format": _STATE_FORMAT, **state})

    # -- runs --------------------------------------------------------------------------------------------------------

    def run_folder(self, name: str) -> Path:
        """The folder of a run, for its owner's eyes; with what a killed attempt left in it."""
        folder = self.path / _RUNS_FOLDER / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def record(self, name: str) -> dict[str, Any] | None:
        """What a finished run left; None if it is not finished."""
        if not self.kept:
            return self._records.get(name)
        path = self._record_path(name)
        return self._read(path, _RUN_FORMAT) if path.exists() else None

    def save_record(self, name: str, record: dict[str, Any]) -> None:
        """A run is finished. Raises: ArgumentError where its result is not of JSON values and the folder is kept."""
        if not self.kept:
            self._records[name] = record
            return
        try:
            self._write(self._record_path(name), {"format": _RUN_FORMAT, **record})
        except (TypeError, ValueError, RecursionError) as problem:
            if isinstance(problem, CertificateError):
                raise
            raise ArgumentError(
                "the result of a run must be finite numbers, texts, lists and the like where the search has a folder, "
                f"in which it is kept: write all else into the run's own folder ({problem})"
            ) from problem

    def failure(self, text: str) -> Path:
        """Where the owner finds what went wrong."""
        if self.kept:
            path = self.path / _FAILURE
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        else:
            descriptor, name = tempfile.mkstemp(prefix="anyorder-search-", suffix=".txt")  # mode 0600
            path = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path

    # -- the end -----------------------------------------------------------------------------------------------------

    def show(self, names: dict[str, str]) -> None:
        """Give the folders of runs that are shown their names: {run: place}. May be repeated after a kill."""
        if not self.kept:
            return
        for name, place in names.items():
            source, target = self.path / _RUNS_FOLDER / name, self.path / place
            if source.exists() and not target.exists():
                (source / REPORT).unlink(missing_ok=True)  # a run's own promise is not that of a chosen one
                target.parent.mkdir(exist_ok=True)
                os.rename(_copied(source), target)
                durable.sync_folder(target.parent)

    def clean(self) -> None:
        """Remove all runs that were not shown, and their records; what is left has the time at which it all began."""
        if self.kept and (self.path / _RUNS_FOLDER).exists():
            shutil.rmtree(self.path / _RUNS_FOLDER)
        if self.kept:
            begun = self.path.glob(f".{_STATE}.*")  # of a state that a kill came into: the key may be in it
            for path in (self.path / _FAILURE, self.path / PRINTED, *begun):
                path.unlink(missing_ok=True)
            hide_times(self.path)

    def _record_path(self, name: str) -> Path:
        return self.path / _RUNS_FOLDER / f"{name}.json"

    def _write(self, path: Path, data: dict[str, Any]) -> None:
        save_json(path, data, secret=True)

    def _read(self, path: Path, format_: str) -> dict[str, Any]:
        try:
            return load_json(path, format_, large=True)
        except CertificateError as problem:
            raise CheckpointError(
                f"{self.path} is not the folder of a search that can be resumed: {problem}"
            ) from problem


def _copied(folder: Path) -> Path:
    """A copy beside it, on the disk: when the files of a run were made, and their inodes, tell which of K it was, and
    no program can set that.
    """
    copy = folder.with_suffix(".copy")
    shutil.rmtree(copy, ignore_errors=True)  # of a search that was killed here
    shutil.copytree(folder, copy, symlinks=True, copy_function=_copy_file)
    for where, _, _ in os.walk(copy):
        durable.sync_folder(Path(where))
    return copy


def _copy_file(source: str, target: str) -> str:
    with open(source, "rb") as old, open(target, "wb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())
    shutil.copystat(source, target)
    return target


@contextlib.contextmanager
def searching(folder: str | Path | None) -> Iterator[SearchFolder]:
    """The folder of a search, held while it goes on; without one, a folder that is removed at the end.

    Raises: ArgumentError if it holds other files, is in use, or cannot be written.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="anyorder-search-") as made:  # mode 0700
            (Path(made) / _RUNS_FOLDER).mkdir(mode=0o700)
            yield SearchFolder(Path(made), kept=False)
        return
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = os.listdir(path)
        strange = [name for name in names if name not in _BEGINNING and not name.startswith(f".{_STATE}.")]
        if _STATE not in names and strange:
            raise ArgumentError(f"folder {path} holds files already: choose another, or resume the search in it")
        descriptor = durable.lock_file(path / _LOCK)
    except BlockingIOError as problem:
        raise ArgumentError(f"a search is going on in folder {path}: wait for its end, or choose another") from problem
    except OSError as problem:
        raise ArgumentError(f"folder {path} cannot be written: {problem.strerror or problem}") from problem
    try:
        (path / ".gitignore").write_text(_IGNORED, encoding="utf-8")  # before anything secret is there
        (path / _RUNS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        yield SearchFolder(path, kept=True)
    finally:
        os.close(descriptor)


def hide_times(folder: Path) -> None:
    """Give all files one time, that of the lock: when they were written tells how long the search went on."""
    began = (folder / _LOCK).stat().st_mtime_ns
    for where, _, names in os.walk(folder, topdown=False):
        for name in [*names, "."]:
            os.utime(os.path.join(where, name), ns=(began, began), follow_symlinks=False)


_LAWS = ("fixed", "geometric", "logarithmic", "poisson")
_MOST_GRID_RUNS = 50
_MOST_SHUFFLED = 1_000_000
_ROUNDED = 2.0**-10  # of the noise's std: what a noisy score is rounded to


@final
@dataclass(frozen=True)
class PrivateScore:
    """Scores are made of private data: the function gives the exact score, and the search adds Gaussian noise to it.

    Attributes:
        sensitivity: how far the score of one and the same model moves at most between neighbours, of the plan's
            relation and unit, in the score's unit. The share of right answers among m held-out people: 1 / m. Whether a
            score is finite must depend on the model alone.
        share: of mu^2 of a run with its score, what the score gets; strictly between 0 and 1.
    Raises: ArgumentError.
    """

    sensitivity: float
    share: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "sensitivity", checks.positive("sensitivity", self.sensitivity))
        object.__setattr__(self, "share", checks.probability("share", self.share))


@final
@dataclass(frozen=True)
class Trial:
    """One run: what the function of `tune` returns, and what a search shows.

    Attributes:
        score: the higher the better; what is not finite, or no float holds, counts as worst. Shown, it has its noise
            where it is private.
        certificate: of the run: `engine.certificate()`, `release.certificate()`, `learner.certificate()`.
        result: whatever else is to be kept, made from the run's releases alone, and that no later run changes. Numbers,
            texts, lists and dicts of them where the search has a folder, in which it is kept; more goes into the run's
            own folder.
        settings: of a run that is shown; the function leaves it out.
        folder: of a run that is shown, where the search has one; the function leaves it out.
    """

    score: float
    certificate: Certificate
    result: Any = None
    settings: Settings | None = None
    folder: Path | None = None


@final
@dataclass(frozen=True)
class Search:
    """What a search shows.

    Attributes:
        best: the run with the highest score; None if the law gave no run, as Poisson's may.
        certificate: the claim of the whole search, and of the best run's plan.
        trials: all runs, where the law is `Fixed`; None elsewhere, where not even their number is shown.
    """

    best: Trial | None
    certificate: SearchCertificate
    trials: tuple[Trial, ...] | None = None

    def __str__(self) -> str:
        return str(self.certificate)


def tune(
    function: Callable[[Settings, Plan, Path], Trial],
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    epsilon: float,
    delta: float,
    plan: Mapping[str, Any],
    runs: int | None = None,
    law: str | Law = "geometric",
    score: str | PrivateScore,
    folder: str | Path | None = None,
    key: bytes | None = None,
    budget: Budget | None = None,
) -> Search:
    """Search for settings privately. The whole search keeps (epsilon, delta), and not the best run alone.

        K ~ law;   settings_1 .. settings_K at random;   each run and its score keep one curve;   the best is shown

    The noise of the runs is found so that `search_epsilon(law, curve, delta)` is at most epsilon. What is released is
    the best run: settings, score, certificate, result, folder. K, all other runs and how long they took are as secret
    as the data, unless the law is `Fixed`, which pays for showing all of them.

    **What the function promises.** It uses private data through a release of the plan that it is given, once, with a
    fresh key, and in no other way; a public score is made without private data. Beyond that nothing of a run shows: it
    logs and writes nowhere but in its folder. The search checks that the certificate is of that plan, and that no two
    runs have the same noise; what the function does besides its certificate no check can see.

    **A process for each run.** The function is sent to another process when the search begins, and each run is made in
    a fresh copy of that: what a run changes in memory, in modules or in global generators no other run and no caller
    sees, so that nothing of the best run tells how many came before it. The global generators of Python, NumPy and
    torch are seeded from the search's key. What a run prints goes to a secret file, or, where the law is `Fixed`, to
    standard error. A function of a script or a notebook needs cloudpickle (the extra `tune`).

    Args:
        function: (settings, plan, folder) -> `Trial`; one private training under `plan`. The folder is the run's own.
            It is empty, or holds what a killed attempt of the same run left there.
        space: {name: values}, where values are a list, a range (low, high), or one that is drawn by its logarithm,
            (low, high, "log"); or a list of whole settings. Settings that are keywords of `anyorder.plan` (batch_size,
            epochs, clip_norm, ..) make the run's plan; they must be lists. Public.
        epsilon, delta: of the whole search.
        plan: keywords of `anyorder.plan` that all runs share, without its noise.
        runs: the mean of K for a law by name, 50 if not given; for "fixed" the number of runs, by itself that of all
            settings.
        law: "geometric", "logarithmic", "poisson", "fixed", or a `Law`. Under "fixed" settings of a list or of lists
            are taken without repetition, and all of them are run where `runs` is their number.
        score: "public", by which you state that scores are made of the released model and of public data alone; or a
            `PrivateScore`. The certificate shows it as stated by the owner.
        folder: where the search can be resumed after a kill, by the same call: the same K and settings, finished runs
            are not made again. None: nothing is kept but what is returned, and runs have folders that are removed.
        key: 32 bytes, of the search's own draws, in tests; by default from the operating system. Keep it secret, and
            give it to one search: two have the same draws, and a budget refuses the second.
        budget: what the data set has left; the whole search is charged before its first run, and if that was not asked
            for then, when it is.
    Returns: `Search`.
    Raises: ArgumentError, PlanError before any run for settings that make no plan; BudgetError; CheckpointError where
        the folder is of another search; TrainingError where a run failed: then nothing is shown, and not which it was.
    Cost: K runs, one calibration, some seconds, and the start of one interpreter.
    """
    epsilon, delta = checks.positive("epsilon", epsilon), checks.probability("delta", delta)
    searched = read_space(space)
    chosen = _law(law, runs, searched)
    private = _score(score)
    prepared = prepare(searched, plan, chosen, epsilon, delta, private)
    asked = {"space": searched.to_dict(), "search": prepared.claim.to_dict()}
    plans = sorted(one.public().digest for one in prepared.plans.values())
    spec = sha256(canonical({**asked, "plans": plans}).encode()).hexdigest()
    with searching(folder) as files:
        return _Searcher(function, searched, prepared, files, spec).run(key, budget)


def _law(law: str | Law, runs: int | None, space: Space) -> Law:
    chosen: Law
    if isinstance(law, Law):
        if runs is not None:
            raise ArgumentError(f"runs must not be given together with a Law, which says it, got runs={runs!r}")
        chosen = law
    elif not isinstance(law, str):
        raise ArgumentError(f"law must be a Law, or one of {', '.join(map(repr, _LAWS))}, got {type(law).__name__}")
    else:
        checks.choice("law", law, _LAWS)
        if law == "fixed":
            count = space.size if runs is None and space.size is not None else runs
            chosen = Fixed(_MOST_GRID_RUNS if count is None else count)
        else:
            mean = _MOST_GRID_RUNS if runs is None else runs
            named: dict[str, type[Geometric] | type[Logarithmic] | type[Poisson]] = {
                "geometric": Geometric, "logarithmic": Logarithmic, "poisson": Poisson,
            }  # fmt: skip
            chosen = named[law](mean)
    if type(chosen) is Fixed and space.size is not None and chosen.runs > space.size:
        raise ArgumentError(
            f"a fixed number of runs must be at most that of the settings, {space.size}, got {chosen.runs}: the same "
            "settings twice tell nothing new, and are paid for"
        )
    return chosen


def _score(score: str | PrivateScore) -> tuple[float, float] | None:
    match score:
        case PrivateScore():
            return score.sensitivity, score.share
        case "public":
            return None
        case _:
            raise ArgumentError(
                "score must be 'public', which states that scores are made without private data, or a "
                f"PrivateScore(sensitivity=..), got {score!r:.70}"
            )


class _Searcher:
    """One search in one process."""

    def __init__(
        self, function: Callable[..., Trial], space: Space, prepared: Prepared, files: SearchFolder, spec: str
    ) -> None:
        self._function, self._space, self._prepared, self._files, self._spec = function, space, prepared, files, spec
        self._claim = prepared.claim
        self._fixed = type(self._claim.law) is Fixed

    def run(self, key: bytes | None, budget: Budget | None) -> Search:
        state = self._files.state()
        if state is not None and state.get("spec") != self._spec:
            raise CheckpointError(
                f"{self._files.path} holds another search: its space, plans, law, target or score differ from these, "
                "or another version made its plans. Give what it was begun with, or choose another folder"
            )
        state = None if state is None else {name: value for name, value in state.items() if name != "format"}
        if state is not None and "shown" in state:
            self._name(state["shown"], state["key_fingerprint"])
            try:
                self._charge(state, state["key_fingerprint"], budget)
            finally:
                self._files.clean()  # where it was killed between its end and this
            return self._found(state["shown"], state["key_fingerprint"])
        state = self._begun(state, key)
        source = NoiseSource(bytes.fromhex(state["key"])).derive(b"anyorder search " + self._spec.encode())
        self._name(state, source.fingerprint())
        with contextlib.closing(Trials(self._function, None if self._fixed else self._files.path / PRINTED)) as trials:
            self._charge(state, source.fingerprint(), budget)
            records = self._records(source, trials)
        return self._ended(source, records, state)

    def _name(self, state: dict[str, Any], fingerprint: str) -> None:
        """Have each plan say that it is a candidate of this search; not in one that was begun when none did."""
        if state.get("named", False):
            self._prepared = self._prepared.named(fingerprint)

    def _charge(self, state: dict[str, Any], fingerprint: str, budget: Budget | None) -> None:
        """Spend the whole search, once under its word, however often it is asked for.

        The word follows from the key, and a key that the caller gives may have made another search: of the same K,
        settings and noise of scores, which no composition covers. An entry under the word is this search's only where
        its folder says so.
        """
        if budget is None:
            return
        word, charged = f"search {fingerprint}", state.setdefault("charged", [])
        if budget.id not in charged:
            if any(held.spend.run == word for held in budget.entries()):
                raise BudgetError(
                    "the budget has an entry of a search with this key, which this folder does not know of: two "
                    "searches with one key have the same draws, and no budget covers both. Leave key= out; or, if the "
                    "entry is of this very search, budget="
                )
            charged.append(budget.id)
            self._files.save_state(**state)  # first: after a kill between these two the same call spends
        budget.spend(self._claim, name="search", run=word)

    def _begun(self, state: dict[str, Any] | None, key: bytes | None) -> dict[str, Any]:
        """The state, saved before anything follows from it."""
        if state is None:
            own = NoiseSource.random() if key is None else NoiseSource(key)
            state = {"spec": self._spec, "key": own.key.hex(), "named": True}
            self._files.save_state(**state)
        elif key is not None and key.hex() != state["key"]:
            raise CheckpointError(
                "key= is not the key of the search in the folder, which goes on with its own; leave it out"
            )
        return state

    # -- runs --------------------------------------------------------------------------------------------------------

    def _records(self, source: NoiseSource, trials: Trials) -> list[tuple[str, dict[str, Any]]]:
        """(name, what it left) of all runs in the order of their draws; those that are not finished are made."""
        count = self._claim.law.draw(source.derive(b"runs"))
        draws = source.derive(b"settings")
        shuffled = self._shuffled(draws) if self._fixed else None
        done: list[tuple[str, dict[str, Any]]] = []
        for i in range(count):
            # Of nothing that tells i, and known to nobody without the key.
            name = source.derive(f"folder {i}".encode()).fingerprint()
            record = self._files.record(name)
            if record is None:
                if shuffled is None:
                    settings = self._space.draw(uniforms(draws.words(i, 0, 2 * self._space.width)))
                else:
                    settings = self._space.at(int(shuffled[i]))
                used = {one["run"]["key_fingerprint"] for _, one in done}
                record = self._made(trials, name, settings, source, i, used)
            done.append((name, record))
        return done

    def _shuffled(self, draws: NoiseSource) -> Sequence[int] | None:
        """An order of all settings, for a fixed number of runs; None where there are too many, or a range."""
        size = self._space.size
        if size is None or size > _MOST_SHUFFLED:
            return None
        if size == self._claim.law.mean:
            return range(size)
        return [int(i) for i in np.argsort(uniforms(draws.words(0, 0, 2 * size)), kind="stable")]

    def _made(
        self, trials: Trials, name: str, settings: Settings, source: NoiseSource, i: int, used: set[str]
    ) -> dict[str, Any]:
        plan = self._prepared.plan(settings)
        seed = source.derive(f"generators {i}".encode()).key
        problem, stopped = "", False
        try:
            trial = trials.run(deepcopy(settings), plan, self._files.run_folder(name), seed)
            record = self._checked(trial, plan, settings, used | {source.fingerprint()})
            record["score"] = self._noisy(trial.score, source, i)
            record["coin"] = float(uniforms(source.derive(b"ties").words(i, 0, 2))[0])
            self._files.save_record(name, record)
        except KeyboardInterrupt:
            stopped = True
        except TrialError as error:  # of a run's own code: whatever it was, only its owner may know
            problem = str(error)
        except Exception:  # of what the run returned
            problem = traceback.format_exc()
        if stopped:
            raise KeyboardInterrupt  # a fresh one: its traceback does not tell where in which run it came
        if problem:
            path = self._files.failure(f"settings: {settings!r}\nfolder: {name}\n\n{problem}")
            raise TrainingError(
                "a run of the search failed, so nothing of the search is shown: which, when and why is as secret as "
                f"the data. Its owner finds it in {path}. Mend the function, and resume the search by the same call"
            )
        return record

    def _checked(self, trial: Any, plan: Plan, settings: Settings, used: set[str]) -> dict[str, Any]:
        """What is kept of a run. Raises: ArgumentError where it is not what the search can count."""
        if type(trial) is not Trial:
            raise ArgumentError(f"function must return a Trial(score, certificate), got {type(trial).__name__}")
        shown = trial.certificate
        if type(shown) is not Certificate:
            raise ArgumentError(
                f"a Trial's certificate must be the run's Certificate, which says that its plan was carried out, got "
                f"{type(shown).__name__}"
            )
        if shown.plan.digest != plan.public().digest:
            raise ArgumentError("the run's certificate is of another plan than the one that the function was given")
        if type(shown.steps) is not int or not 0 <= shown.steps <= plan.n:
            raise ArgumentError(f"the run's certificate must have from 0 to {plan.n} steps, got {shown.steps!r}")
        if shown.key_fingerprint in used:
            raise ArgumentError(
                "two runs have the same noise key: the difference of what they release is free of noise. Leave key= "
                "out, so that each draws its own"
            )
        return {"settings": settings, "run": shown.run(), "result": trial.result}

    def _noisy(self, score: Any, source: NoiseSource, i: int) -> float | None:
        """The score that is compared, and shown; None for the worst: what is not finite, or too large for a float.

        Noise is added to the score as it is, of whatever size and type: a float between would move scores of
        neighbours apart, and what overflowed would tell of them.
        """
        exact = _exact(score)
        if exact is None:
            return None
        noise = self._claim.score
        if noise is not None:
            grid = Fraction(2.0 ** math.floor(math.log2(noise.std * _ROUNDED)))
            z = float(source.derive(b"scores").normal(i, 0, 1)[0])
            exact = round((exact + Fraction(noise.std) * Fraction(z)) / grid) * grid
        try:
            return float(exact)
        except OverflowError:
            return None

    # -- the end -----------------------------------------------------------------------------------------------------

    def _ended(self, source: NoiseSource, records: list[tuple[str, dict[str, Any]]], state: dict[str, Any]) -> Search:
        """Choose, and show; what is not shown is removed, K and the key of the draws as well."""
        best = max(range(len(records)), key=lambda i: _rank(records[i][1]), default=None)
        places: dict[str, str] = {}
        if self._fixed:
            places = {name: f"{SHOWN}/{i + 1}" for i, (name, _) in enumerate(records)}
        elif best is not None:
            places = {records[best][0]: BEST}
        shown = {
            "runs": [{k: v for k, v in record.items() if k not in ("format", "coin")} | {"folder": places[name]}
                     for name, record in records if name in places],
            "best": None if best is None else best if self._fixed else 0,
            "named": state.get("named", False),
        }  # fmt: skip
        found = self._found(shown, source.fingerprint())
        self._files.show(places)
        if self._files.kept:
            found.certificate.save(self._files.path / CERTIFICATE)
        also = {"charged": state["charged"]} if state.get("charged") else {}
        self._files.save_state(spec=self._spec, shown=shown, key_fingerprint=source.fingerprint(), **also)
        self._files.clean()
        return found

    def _found(self, shown: dict[str, Any], fingerprint: str) -> Search:
        trials = tuple(self._trial(record) for record in shown["runs"])
        best = None if shown["best"] is None else trials[shown["best"]]
        run, settings = (None, None) if best is None else (best.certificate, best.settings)
        all_shown = tuple(one.certificate.key_fingerprint for one in trials) if self._fixed else ()
        certificate = SearchCertificate(self._claim, fingerprint, run, deepcopy(settings), all_shown)
        return Search(best, certificate, trials if self._fixed else None)

    def _trial(self, record: dict[str, Any]) -> Trial:
        certificate = Certificate(self._prepared.plan(record["settings"]).public(), **record["run"])
        folder = self._files.path / record["folder"] if self._files.kept else None
        score = -math.inf if record["score"] is None else record["score"]
        return Trial(score, certificate, record["result"], record["settings"], folder)


def _exact(score: Any) -> Fraction | None:
    """The very number, of Python, numpy or torch; None if it is not finite."""
    number = score.item() if hasattr(score, "item") else score
    if isinstance(number, (str, bytes)):
        raise ArgumentError(f"score must be a number, got {type(score).__name__}")
    try:
        if not hasattr(number, "as_integer_ratio"):
            number = float(number)
        return Fraction(*(int(part) for part in number.as_integer_ratio()))
    except (OverflowError, ValueError):  # of infinities, of NaN
        return None


def _rank(record: dict[str, Any]) -> tuple[float, float]:
    """By the score, and among equals by a draw, which no data moves."""
    return -math.inf if record["score"] is None else record["score"], record["coin"]
