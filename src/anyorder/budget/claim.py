"""The claim of a search, in a file that is checked from the file alone: its space, its law and its epsilon."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from math import inf, nextafter
from pathlib import Path
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Curve, Gaussian, Sampled, compose
from anyorder.budget import search_privacy
from anyorder.budget.search_privacy import Fixed, Law, search_epsilon
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError, LimitError
from anyorder.formats import (
    MAX_STEPS,
    REMEDY,
    bounded,
    brief,
    canonical,
    check_names,
    hexadecimal,
    html_table,
    is_bounded,
    load_json,
    printable,
    quoted,
    save_json,
)
from anyorder.formatting import rounded_up
from anyorder.plan.certificate import Certificate
from anyorder.plan.cost import check_plan, is_large
from anyorder.plan.options import FLAT
from anyorder.plan.plan import checked_plan, close
from anyorder.plan.planner import plan

_KINDS: dict[str, type[Gaussian] | type[BoundedRange] | type[Sampled]] = {
    "gaussian": Gaussian, "bounded range": BoundedRange, "sampled": Sampled,
}  # fmt: skip
_MOST_PARTS = 3  # of a stranger's file: each is convolved
_LOUDEST = 0.4**-2  # mu^2 of a sampled step, or of all draws


def curve_to_dict(curve: Curve) -> dict[str, Any]:
    """The curve as JSON values."""
    match curve:
        case Composed():
            return {"kind": "composed", "parts": [curve_to_dict(part) for part in curve.parts]}
        case Gaussian() | BoundedRange() | Sampled():
            [kind] = [name for name, known in _KINDS.items() if known is type(curve)]
            data = {f.name: getattr(curve, f.name) for f in fields(curve) if f.init}
            if type(curve) is Sampled and curve.neighbours == "add-or-remove":
                del data["neighbours"]  # as files always had it
            return {"kind": kind, **data}
        case Amplified():
            return {"kind": "amplified", **curve.to_dict()}
        case _:
            assert_never(curve)


def curve_from_dict(data: Any) -> Curve:
    """The curve that `curve_to_dict` described. Raises: CertificateError."""
    if not isinstance(data, dict):
        raise CertificateError(f"a curve must be an object, got {quoted(data)}")
    kind = data.get("kind")
    try:
        if kind == "composed":
            parts = check_names("a curve", data, {"kind", "parts"})["parts"]
            if not isinstance(parts, list) or (is_bounded() and len(parts) > _MOST_PARTS):
                raise LimitError(f"a curve must have a list of up to {_MOST_PARTS} parts{REMEDY}")
            curve: Curve = Composed(tuple(_single(part) for part in parts))
        else:
            curve = _single(data)
        same = canonical(curve_to_dict(curve)) == canonical(data)
    except CertificateError:
        raise
    except Exception as problem:  # whatever the numbers break, no curve of this package was saved like that
        raise CertificateError(f"the curve in the file is malformed: {brief(problem)}") from problem
    if not same:
        raise CertificateError(
            "the curve in the file is malformed: some of it is not in the form that curves are saved"
        )
    return curve


def _single(data: Any) -> Gaussian | BoundedRange | Sampled | Amplified:
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "amplified":
        return _amplified({name: value for name, value in data.items() if name != "kind"})
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CertificateError(
            f"a curve must be of kind {', '.join(_KINDS)}, amplified or composed, got {quoted(kind)}"
        )
    made = _KINDS[kind]
    names = {"kind", *(f.name for f in fields(made) if f.init)}
    check_names("a curve", data, names - ({"neighbours"} - data.keys() if made is Sampled else set()))
    curve = made(**{name: value for name, value in data.items() if name != "kind"})
    if is_bounded() and not _is_quick(curve):
        raise LimitError(f"a curve of so many steps, or so little noise, takes more time than a file is given{REMEDY}")
    return curve


def _amplified(data: dict[str, Any]) -> Amplified:
    """Within the bounds of the plan that has this curve, before any part of it is made."""
    part, sigma = data.get("participation"), data.get("noise_multiplier")
    steps = None
    if isinstance(part, dict):
        epochs, bins = part.get("k"), part.get("b")
        steps = epochs * bins if type(epochs) is int and type(bins) is int and "n" not in part else part.get("n")
    check_plan({**data, "sigma": sigma, "workload": {"n": steps}})
    return Amplified.from_dict(data)


def _is_quick(curve: Gaussian | BoundedRange | Sampled) -> bool:
    """Whether its loss distribution takes a second at most; `check_plan` has the same bounds."""
    match curve:
        case Gaussian():
            return True
        case BoundedRange():
            return curve.e0**2 * curve.draws <= _LOUDEST
        case Sampled():
            return curve.n <= MAX_STEPS and curve.sigma**-2 + curve.e0**2 * curve.draws / 4 <= _LOUDEST
        case _:
            assert_never(curve)


# ----------------------------------------------------------------------------------------------------
# The settings that a search draws from: lists of values and ranges, or a list of whole settings; public, all of it.


Settings = dict[str, Any]

PLAN_NAMES = frozenset(inspect.signature(plan).parameters) | FLAT
"""Settings of these names go into the plan of a run."""

_OF_THE_SEARCH = {"epsilon", "delta", "noise_multiplier", "sigma"}  # the noise of a run follows from the whole search
_OF_ALL = {"unit", "neighbours"}  # a claim is about one of each
_MOST = 100_000  # settings of a list, or plans
_MOST_NAMES = 64


@final
@dataclass(frozen=True)
class Range:
    """Numbers from low to high, of which a setting is drawn evenly, or evenly in its logarithm."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low, high = checks.real("low", self.low), checks.real("high", self.high)
        if not low < high or not math.isfinite(high - low) or type(self.log) is not bool or (self.log and low <= 0):
            raise ArgumentError(
                f"a range must have low < high, and low above 0 where it is drawn by the logarithm (log is true or "
                f"false), got low={self.low!r}, high={self.high!r}, log={self.log!r}"
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def at(self, u: float) -> float:
        """The number at the share u of the way."""
        if self.log:
            between = math.exp(math.log(self.low) + u * (math.log(self.high) - math.log(self.low)))
            return min(max(between, self.low), self.high)
        return min(max(self.low + u * (self.high - self.low), self.low), self.high)


@final
@dataclass(frozen=True)
class Space:
    """What `read_space` made.

    Attributes:
        listed: whole settings; empty where `axes` say them.
        axes: name -> its values, or their range.
    """

    listed: tuple[Settings, ...]
    axes: dict[str, list[Any] | Range]

    @property
    def size(self) -> int | None:
        """How many settings there are; None where a range is among them."""
        if self.listed:
            return len(self.listed)
        sizes = [None if type(axis) is Range else len(axis) for axis in self.axes.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    @property
    def width(self) -> int:
        """Uniform numbers that a draw takes."""
        return 1 if self.listed else len(self.axes)

    def draw(self, shares: NDArray[np.float64]) -> Settings:
        """The settings of (width,) numbers in (0, 1): each listed one, each value, as likely as another.

        A copy to its last list, as `at` gives: what one run does to its settings, no other run and no certificate has.
        """
        if self.listed:
            return deepcopy(self.listed[_place(shares[0], len(self.listed))])
        return {
            name: axis.at(float(u)) if isinstance(axis, Range) else deepcopy(axis[_place(u, len(axis))])
            for (name, axis), u in zip(self.axes.items(), shares, strict=True)
        }

    def at(self, i: int) -> Settings:
        """The i-th of all settings, where there is no range."""
        if self.listed:
            return deepcopy(self.listed[i])
        settings = {}
        for name, axis in reversed(self.axes.items()):
            assert isinstance(axis, list)
            i, place = divmod(i, len(axis))
            settings[name] = deepcopy(axis[place])
        return dict(reversed(settings.items()))

    def plans(self) -> Iterable[Settings]:
        """The keywords of all the plans that a run may have, some of them more than once. No range is among them."""
        if self.listed:
            return (plan_settings(one) for one in self.listed)
        axes = {name: axis for name, axis in self.axes.items() if name in PLAN_NAMES}
        return (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for a digest."""
        axes = {
            name: {"low": axis.low, "high": axis.high, "log": axis.log} if isinstance(axis, Range) else axis
            for name, axis in self.axes.items()
        }
        return {"listed": list(self.listed), "axes": axes}


def read_space(given: Any) -> Space:
    """The space of an argument, or of a file.

    Args:
        given: {name: list of values, or (low, high), or (low, high, "log"), or {"low": .., "high": .., "log": ..}}; or
            a list of whole settings, {name: value} each. Values are JSON's: numbers, texts, booleans, None, lists.
    Raises: ArgumentError.
    """
    if isinstance(given, Mapping):
        if not 1 <= len(given) <= _MOST_NAMES:
            raise ArgumentError(f"space must name 1 to {_MOST_NAMES} settings, got {len(given)}")
        space = Space((), {_name(name): _axis(name, axis) for name, axis in given.items()})
        count = math.prod(
            len(axis) for name, axis in space.axes.items() if isinstance(axis, list) and name in PLAN_NAMES
        )
        if count > _MOST:
            raise ArgumentError(f"space must not have more than {_MOST} plans, got {count}: give fewer values")
        return space
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(one, Mapping) for one in given):
        raise ArgumentError(
            f"space must be names with their values, {{name: [..]}}, or a list of settings, [{{name: value}}, ..], "
            f"got {type(given).__name__}"
        )
    if len(given) > _MOST:
        raise ArgumentError(f"space must not list more than {_MOST} settings, got {len(given)}")
    return Space(tuple({_name(name): _value(name, value) for name, value in one.items()} for one in given), {})


def plan_settings(settings: Settings) -> Settings:
    """Those of the settings that are keywords of `anyorder.plan`."""
    return {name: value for name, value in settings.items() if name in PLAN_NAMES}


def uniforms(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """(k,) numbers strictly between 0 and 1, evenly spread, from (2 k,) words."""
    whole = words.astype(np.uint64)
    return np.asarray((((whole[::2] << np.uint64(32) | whole[1::2]) >> np.uint64(12)) + 0.5) * 2.0**-52, np.float64)


def _place(share: float, count: int) -> int:
    return min(int(share * count), count - 1)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or len(name) > 60:
        raise ArgumentError(f"a setting's name must be one of Python's, ASCII, up to 60 letters, got {name!r:.70}")
    if name in _OF_THE_SEARCH:
        raise ArgumentError(
            f"space must not have {name!r}: epsilon and delta are of the whole search, and each run has the noise that "
            "keeps them"
        )
    if name in _OF_ALL:
        raise ArgumentError(f"space must not have {name!r}, which must be the same in all runs: give it in plan=")
    return name


def _axis(name: str, given: Any) -> list[Any] | Range:
    if isinstance(given, Range):
        axis: list[Any] | Range = given
    elif isinstance(given, Mapping):
        if not {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
            raise ArgumentError(f"space[{name!r}] must be a list, or low, high and maybe log, got {sorted(given)!r}")
        axis = Range(given["low"], given["high"], given.get("log", False))
    elif isinstance(given, tuple):
        if len(given) not in (2, 3) or (len(given) == 3 and given[2] != "log"):
            raise ArgumentError(
                f"space[{name!r}] must be (low, high) or (low, high, 'log') where it is a tuple; values are a list, "
                f"got {given!r}"
            )
        axis = Range(given[0], given[1], len(given) == 3)
    elif isinstance(given, list) and given:
        axis = [_value(name, value) for value in given]
        if len(axis) > _MOST:
            raise ArgumentError(f"space[{name!r}] must not have more than {_MOST} values, got {len(axis)}")
    else:
        raise ArgumentError(f"space[{name!r}] must be a list of values, or a range (low, high), got {given!r:.70}")
    if isinstance(axis, Range) and name in PLAN_NAMES:
        raise ArgumentError(
            f"space[{name!r}] must be a list of values: all plans are made before the first run, got a range"
        )
    return axis


def _value(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    parts = value if isinstance(value, (list, tuple)) else [value]
    for part in parts:
        if type(part) not in (bool, int, float, str, type(None)) or (type(part) is float and not math.isfinite(part)):
            raise ArgumentError(
                f"values of {name!r} must be finite numbers, texts, booleans, None, or lists of those; whatever else a "
                f"run needs is looked up by them, got {type(part).__name__}"
            )
    return list(parts) if isinstance(value, (list, tuple)) else value


# ----------------------------------------------------------------------------------------------------
# What a search claims, before it begins and when it has ended: for everybody, in a file that can be recomputed.


FORMAT = "anyorder-search/1"
_SLACK = 1e-9  # of mu, as numerical libraries differ
_MOST_SHOWN = 1 << 16  # runs of a grid in a file


@final
@dataclass(frozen=True)
class ScoreNoise:
    """The Gaussian noise on each run's score, where scores are of private data: mu = sensitivity / std.

    Attributes:
        sensitivity: how far the score of one and the same model moves at most between neighbours.
        std: of the noise, in the score's unit.
    """

    sensitivity: float
    std: float

    def __post_init__(self) -> None:
        for name in ("sensitivity", "std"):
            object.__setattr__(self, name, checks.positive(name, getattr(self, name)))

    @property
    def mu(self) -> float:
        """Gaussian DP parameter of one score, rounded up."""
        return nextafter(self.sensitivity / self.std, inf)


@final
@dataclass(frozen=True)
class SearchClaim:
    """What a whole search costs, whatever its runs find: known before the first of them, and all public.

        epsilon = the least that is proven for a choice of the best among K runs, K ~ law, each of which keeps `curve`

    See `search_epsilon` for what is proven, and where.

    Attributes:
        law: of K, the number of runs. `Fixed`: all runs may be shown. Else the best alone.
        curve: of one run, together with its score where that is noisy, whichever settings it is of.
        delta: of the claim.
        score: the noise on scores; None where they are made of public data alone.
    Raises: ArgumentError.
    """

    law: Law
    curve: Curve
    delta: float
    score: ScoreNoise | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.law, Law):
            raise ArgumentError(f"law must be a Law, such as Geometric(50), got {type(self.law).__name__}")
        if not isinstance(self.curve, Curve):
            raise ArgumentError(f"curve must be a Curve, got {type(self.curve).__name__}")
        object.__setattr__(self, "delta", checks.probability("delta", self.delta))
        if self.score is not None and type(self.score) is not ScoreNoise:
            raise ArgumentError(f"score must be a ScoreNoise or None, got {type(self.score).__name__}")

    @property
    def unit(self) -> str:
        """What is protected, in a word."""
        return self.curve.unit

    @property
    def neighbours(self) -> str:
        """The relation of neighbours."""
        return self.curve.neighbours

    @cached_property
    def epsilon(self) -> float:
        """Of the whole search at `delta`, rounded up."""
        return search_epsilon(self.law, self.curve, self.delta)

    def covers(self, curve: Curve) -> bool:
        """Whether a run of this curve, with a score of the claim's noise, is one that the claim counts."""
        if (curve.unit, curve.neighbours) != (self.unit, self.neighbours):
            return False
        whole = curve
        if self.score is not None:
            whole = compose(curve, Gaussian(self.score.mu, neighbours=self.neighbours, unit=self.unit))
        if type(self.curve) is Gaussian:
            return type(whole) is Gaussian and whole.mu <= self.curve.mu * (1 + _SLACK)
        return whole == self.curve

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        score = None if self.score is None else {"sensitivity": self.score.sensitivity, "std": self.score.std}
        return {"law": self.law.to_dict(), "curve": curve_to_dict(self.curve), "delta": self.delta, "score": score}

    @classmethod
    def from_dict(cls, data: Any) -> "SearchClaim":
        """What `to_dict` described. Raises: CertificateError."""
        check_names("search", data, {"law", "curve", "delta", "score"})
        try:
            score = data["score"]
            if score is not None:
                score = ScoreNoise(**check_names("score", score, {"sensitivity", "std"}))
            claim = cls(search_privacy.from_dict(data["law"]), curve_from_dict(data["curve"]), data["delta"], score)
            same = canonical(claim.to_dict()) == canonical(data)
        except CertificateError:
            raise
        except Exception as problem:  # whatever the parts trip over, no search of this package was saved like that
            raise CertificateError(f"the search in the file is malformed: {brief(problem)}") from problem
        if not same:
            raise CertificateError("the search in the file is malformed: some of it is not in the form that is saved")
        return claim

    def facts(self) -> list[tuple[str, str]]:
        """(name, text): for cards."""
        score = "of public data alone, as its owner states"
        if self.score is not None:
            score = f"of private data, with noise of std {self.score.std:.5g} (sensitivity {self.score.sensitivity:g})"
        each = (
            f"mu = {rounded_up(self.curve.mu, 5)}"
            if self.curve.mu is not None
            else f"epsilon {rounded_up(self.curve.epsilon(self.delta))}"
        )
        return [
            (
                "privacy",
                f"epsilon <= {rounded_up(self.epsilon)} at delta = {rounded_up(self.delta, 6)}, of the whole search",
            ),
            ("protects", f"one {self.unit} ({self.neighbours})"),
            ("runs", self.law.describe()),
            ("each run", each if self.score is None else f"{each}, with its score"),
            ("score", score),
        ]


@final
@dataclass(frozen=True)
class SearchCertificate:
    """The claim of a search, and the run that it chose. It is public, and reveals nothing of other runs.

    Where the law is `Fixed` their number is public, and the fingerprint of each run's noise key is in it.

    Attributes:
        claim: law, curve of one run, delta; epsilon is that of the whole search.
        key_fingerprint: a hash of the key of the search's own draws; equal in two only if they were drawn twice.
        best: the certificate of the run that was chosen; None if the law gave no run.
        settings: of that run, as the function had them; None without a run.
        fingerprints: of the noise keys of all runs in their order, where the law is `Fixed`; empty elsewhere.
    Raises: ArgumentError where the parts do not belong together.
    """

    claim: SearchClaim
    key_fingerprint: str
    best: Certificate | None
    settings: dict[str, Any] | None
    fingerprints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.best is None) != (self.settings is None):
            raise ArgumentError("best and settings must be given together, or neither")
        fixed = self.claim.law.runs if type(self.claim.law) is Fixed else None
        if len(self.fingerprints) != (fixed or 0):
            raise ArgumentError(
                f"fingerprints must be of all {fixed or 0} runs that the law shows, got {len(self.fingerprints)}"
            )
        if len({self.key_fingerprint, *self.fingerprints}) != len(self.fingerprints) + 1:
            raise ArgumentError("fingerprints must all differ: of two that are equal one noise was used twice")
        if self.best is None:
            return
        if fixed is not None and self.best.key_fingerprint not in self.fingerprints:
            raise ArgumentError("fingerprints must have that of the best run")
        if self.best.key_fingerprint == self.key_fingerprint:
            raise ArgumentError("the best run's noise must not be of the search's own key")
        if self.best.plan.candidate_of not in (None, self.key_fingerprint):  # None: of before plans said so
            raise ArgumentError("the best run's plan says that it is a candidate of another search")
        if self.best.realised is not None:
            object.__setattr__(self, "best", replace(self.best, realised=None))  # of one run alone: it is not the price
        plan = self.best.plan
        if plan.delta != self.claim.delta or not self.claim.covers(plan.curve):
            raise ArgumentError("the best run's plan must be one that the search counts: its delta, and at most its mu")
        for name in ("batch_size", "clip_norm", "dataset_size"):
            if name in (self.settings or {}) and (self.settings or {})[name] != getattr(plan, name):
                raise ArgumentError(f"settings must be those of the best run's plan, and differ in {name}")

    @property
    def epsilon(self) -> float:
        """The epsilon of the whole search at the claim's delta: everything that it shows, together."""
        return self.claim.epsilon

    @property
    def best_epsilon(self) -> float | None:
        """Return the epsilon of the best run alone, as if chosen without looking. It is no claim of the search."""
        return None if self.best is None else self.best.plan.epsilon

    @property
    def is_large(self) -> bool:
        """True if a stranger's file is not given the time that its claim takes, and it is read with `large=True`."""
        by_chance = type(self.claim.law) is not Fixed and type(self.claim.curve) is not Gaussian
        return by_chance or (self.best is not None and is_large(self.best.plan.to_dict()))

    def claims(self) -> dict[str, Any]:
        """Return what follows from the rest; a verifier recomputes it."""
        return {"epsilon": self.epsilon, "mu": self.claim.curve.mu, "best_epsilon": self.best_epsilon}

    def facts(self) -> list[tuple[str, str]]:
        """(name, text): `print(certificate)` shows them."""
        rows = self.claim.facts()
        if self.best is None or self.settings is None:
            return [*rows, ("best", "none: the law gave no run")]
        shown = ", ".join(f"{name} = {value!r}" for name, value in self.settings.items())
        plan = self.best.plan
        alone = rounded_up(plan.epsilon)
        return [
            *rows,
            ("best", printable(shown if len(shown) <= 400 else f"{shown[:400]} ..")),
            ("alone", f"epsilon {alone}, had it been the only run; it was chosen, so this is no claim"),
            ("order", plan.participation.describe()),
            ("mechanism", plan.strategy.describe()),
            ("steps", f"{self.best.steps} of {plan.n} taken"),
        ]

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>14}  {text}" for name, text in self.facts())

    def save(self, path: str | Path) -> None:
        """Write the certificate as JSON."""
        best = self.best
        run = None
        if best is not None:
            run = {
                "plan": best.plan.to_dict(),
                "claims": best.plan.claims(),
                "run": best.run(),
                "settings": self.settings,
            }
        save_json(path, {
            "format": FORMAT,
            "search": self.claim.to_dict(),
            "key_fingerprint": self.key_fingerprint,
            "fingerprints": list(self.fingerprints),
            "best": run,
            "claims": self.claims(),
        })  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, *, large: bool = False) -> "SearchCertificate":
        """Read a certificate of a search; every claim is recomputed.

        Args:
            large: read files of one's own that are beyond the bounds on files of strangers, as are those of searches
                with secret sampling.
        Raises: CertificateError if a claim does not follow; within 2 seconds and 200 MB, unless `large`.
        """
        data = load_json(path, FORMAT, large=large)
        check_names("the file", data, {"format", "search", "key_fingerprint", "fingerprints", "best", "claims"})
        with bounded(not large), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that are absurd, and will be refused
            claim = SearchClaim.from_dict(data["search"])
            if not large and type(claim.law) is not Fixed and type(claim.curve) is not Gaussian:
                raise LimitError(f"a search among amplified runs takes more time than a file is given{REMEDY}")
            shown = data["fingerprints"]
            if not isinstance(shown, list) or (not large and len(shown) > _MOST_SHOWN):
                raise CertificateError(f"fingerprints must be a list of up to {_MOST_SHOWN}, got {quoted(shown)}")
            fingerprints = tuple(hexadecimal({"fingerprints": one}, "fingerprints", 32) for one in shown)
            best, settings = (None, None) if data["best"] is None else _best(data["best"], large)
            try:
                found = cls(claim, hexadecimal(data, "key_fingerprint", 32), best, settings, fingerprints)
                true = found.claims()
            except ArgumentError as problem:
                raise CertificateError(f"the search does not hold: {brief(problem)}") from None
            except CertificateError:
                raise
            except Exception as problem:  # parts that are well formed, and that nobody could search with
                raise CertificateError(f"the claims cannot be recomputed: {brief(problem)}") from problem
        claims = check_names("claims", data["claims"], set(true))
        for name, value in true.items():
            if not (claims[name] is None if value is None else close(claims[name], value)):
                raise CertificateError(f"the file claims {name} = {quoted(claims[name])}; recomputed it is {value!r}")
        return found


def _best(data: Any, large: bool) -> tuple[Certificate, dict[str, Any]]:
    check_names("best", data, {"plan", "claims", "run", "settings"})
    plan = checked_plan(data["plan"], data["claims"], large=large)
    run = check_names("run", data["run"], {"steps", "key_fingerprint", "record_digest", "receipt_root"})
    steps = run["steps"]
    if type(steps) is not int or not 0 <= steps <= plan.n:
        raise CertificateError(f"steps must be an integer from 0 to {plan.n}, the planned ones, got {quoted(steps)}")
    fingerprint, digest = hexadecimal(run, "key_fingerprint", 32), hexadecimal(run, "record_digest", 64)
    settings = data["settings"]
    if not isinstance(settings, dict):
        raise CertificateError(f"settings must be an object, got {quoted(settings)}")
    try:
        read_space([settings])  # names and values that a search can have
    except ArgumentError as problem:
        raise CertificateError(f"the settings in the file are malformed: {brief(problem)}") from None
    return Certificate(plan, steps, fingerprint, digest, hexadecimal(run, "receipt_root", 64)), settings
