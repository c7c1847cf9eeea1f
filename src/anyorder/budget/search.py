"""A search for settings as one release: K private runs, K from a public law, the best shown, one claim for it all."""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import _check
from anyorder._closed import final
from anyorder._sealed import canonical
from anyorder.budget.file import Budget
from anyorder.budget.found import SearchCertificate
from anyorder.budget.laws import Fixed, Geometric, Law, Logarithmic, Poisson
from anyorder.budget.prepared import Prepared, prepare
from anyorder.budget.search_folder import BEST, CERTIFICATE, SHOWN, SearchFolder, searching
from anyorder.budget.space import Settings, Space, read_space, uniforms
from anyorder.certificate import Certificate
from anyorder.errors import ArgumentError, BudgetError, CheckpointError, TrainingError
from anyorder.noise import NoiseSource
from anyorder.plan import Plan

__all__ = ["PrivateScore", "Search", "Trial", "tune"]

_LAWS = ("fixed", "geometric", "logarithmic", "poisson")
_RUNS = 50
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
        object.__setattr__(self, "sensitivity", _check.positive("sensitivity", self.sensitivity))
        object.__setattr__(self, "share", _check.probability("share", self.share))


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
    score: str | PrivateScore = "public",
    folder: str | Path | None = None,
    key: bytes | None = None,
    budget: Budget | None = None,
) -> Search:
    """Search for settings privately: the whole search keeps (epsilon, delta), not the best run alone.

        K ~ law;   settings_1 .. settings_K by coins;   each run and its score keep one curve;   the best is shown

    The noise of the runs is found so that `search_epsilon(law, curve, delta)` is at most epsilon. What is released is
    the best run: settings, score, certificate, result, folder. K, all other runs and how long they took are as secret
    as the data, unless the law is `Fixed`, which pays for showing all of them.

    **What the function promises.** It uses private data through a release of the plan that it is handed, once, with a
    fresh key, and in no other way; a public score is made without private data. Beyond that nothing of a run shows: it
    prints, logs and writes nowhere but in its folder. The search checks that the certificate is of that plan, and that
    no two runs have the same noise; what the function does beside its certificate no check can see.

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
        score: "public" or a `PrivateScore`.
        folder: where the search can be resumed after a kill, by the same call: the same K and settings, finished runs
            are not made again. None: nothing is kept but what is returned, and runs have folders that are removed.
        key: 32 bytes, of the search's own draws, in tests; by default from the operating system. Keep it secret, and
            give it to one search: two have the same draws, and a budget refuses the second.
        budget: what the data set has left; the whole search is charged before its first run, and if that was not asked
            for then, when it is.
    Returns: `Search`.
    Raises: ArgumentError, PlanError before any run for settings that make no plan; BudgetError; CheckpointError where
        the folder is of another search; TrainingError where a run failed: then nothing is shown, and not which it was.
    Cost: K runs and one calibration, some seconds.
    """
    epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)
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
        _check.choice("law", law, _LAWS)
        if law == "fixed":
            count = space.size if runs is None and space.size is not None else runs
            chosen = Fixed(_RUNS if count is None else count)
        else:
            mean = _RUNS if runs is None else runs
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
            raise ArgumentError(f"score must be 'public' or a PrivateScore(sensitivity=..), got {score!r:.70}")


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
        self._charge(state, source.fingerprint(), budget)
        return self._ended(source, self._records(source), state)

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

    def _records(self, source: NoiseSource) -> list[tuple[str, dict[str, Any]]]:
        """(name, what it left) of all runs in the order of their draws; those that are not finished are made."""
        count = self._claim.law.draw(source.derive(b"runs"))
        coins = source.derive(b"settings")
        shuffled = self._shuffled(coins) if self._fixed else None
        done: list[tuple[str, dict[str, Any]]] = []
        for i in range(count):
            # Of nothing that tells i, and known to nobody without the key.
            name = source.derive(f"folder {i}".encode()).fingerprint()
            record = self._files.record(name)
            if record is None:
                if shuffled is None:
                    settings = self._space.draw(uniforms(coins.words(i, 0, 2 * self._space.width)))
                else:
                    settings = self._space.at(int(shuffled[i]))
                record = self._made(name, settings, source, i, {one["run"]["key_fingerprint"] for _, one in done})
            done.append((name, record))
        return done

    def _shuffled(self, coins: NoiseSource) -> Sequence[int] | None:
        """An order of all settings, for a fixed number of runs; None where there are too many, or a range."""
        size = self._space.size
        if size is None or size > _MOST_SHUFFLED:
            return None
        if size == self._claim.law.mean:
            return range(size)
        return [int(i) for i in np.argsort(uniforms(coins.words(0, 0, 2 * size)), kind="stable")]

    def _made(self, name: str, settings: Settings, source: NoiseSource, i: int, used: set[str]) -> dict[str, Any]:
        plan = self._prepared.plan(settings)
        problem, stopped = None, False
        try:
            trial = self._function(deepcopy(settings), plan, self._files.run_folder(name))
            record = self._checked(trial, plan, settings, used | {source.fingerprint()})
            record["score"] = self._noisy(trial.score, source, i)
            record["coin"] = float(uniforms(source.derive(b"ties").words(i, 0, 2))[0])
            self._files.save_record(name, record)
        except KeyboardInterrupt:
            stopped = True
        except (Exception, SystemExit):  # a run's own code: whatever it was, only its owner may know
            problem = f"settings: {settings!r}\nfolder: {name}\n\n{traceback.format_exc()}"
        if stopped:
            raise KeyboardInterrupt  # a fresh one: its traceback does not tell where in which run it came
        if problem is not None:
            path = self._files.failure(problem)
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
            raise ArgumentError("the run's certificate is of another plan than the one that the function was handed")
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
    """By the score, and among equals by a coin, which no data moves."""
    return -math.inf if record["score"] is None else record["score"], record["coin"]
