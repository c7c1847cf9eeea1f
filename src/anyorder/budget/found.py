"""What a search claims, before it begins and when it has ended: for everybody, in a file that can be recomputed."""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np

from anyorder import _check
from anyorder._closed import final
from anyorder._limits import REMEDY, bounded
from anyorder._sealed import brief, canonical, check_names, hexadecimal, load_json, printable, quoted, save_json
from anyorder._words import rounded_up
from anyorder.accounting import compose
from anyorder.accounting.curves import Curve, Gaussian
from anyorder.budget import laws
from anyorder.budget.bounds import search_epsilon
from anyorder.budget.curves import curve_from_dict, curve_to_dict
from anyorder.budget.laws import Fixed, Law
from anyorder.budget.space import read_space
from anyorder.certificate import Certificate
from anyorder.errors import ArgumentError, CertificateError, LimitError
from anyorder.plan import checked_plan, close
from anyorder.sensitivity.cost import is_large

__all__ = ["FORMAT", "ScoreNoise", "SearchCertificate", "SearchClaim"]

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
            object.__setattr__(self, name, _check.positive(name, getattr(self, name)))

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
        object.__setattr__(self, "delta", _check.probability("delta", self.delta))
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
            claim = cls(laws.from_dict(data["law"]), curve_from_dict(data["curve"]), data["delta"], score)
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
        score = "from public data alone"
        if self.score is not None:
            score = f"of private data, with noise of std {self.score.std:.5g} (sensitivity {self.score.sensitivity:g})"
        each = (
            f"mu = {self.curve.mu:.5g}"
            if self.curve.mu is not None
            else f"epsilon {rounded_up(self.curve.epsilon(self.delta))}"
        )
        return [
            ("privacy", f"epsilon <= {rounded_up(self.epsilon)} at delta = {self.delta:g}, of the whole search"),
            ("protects", f"one {self.unit} ({self.neighbours})"),
            ("runs", self.law.describe()),
            ("each run", each if self.score is None else f"{each}, with its score"),
            ("score", score),
        ]


@final
@dataclass(frozen=True)
class SearchCertificate:
    """What a search claims, and which run it chose. Public: of the other runs it tells nothing, not even their number.

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
        """Of the whole search at the claim's delta: everything that it shows, together."""
        return self.claim.epsilon

    @property
    def best_epsilon(self) -> float | None:
        """What the best run would have cost alone, had it been chosen without looking: it is no claim of the search."""
        return None if self.best is None else self.best.plan.epsilon

    @property
    def is_large(self) -> bool:
        """Whether a stranger's file is not given the time that its claim takes, and it is read with `large=True`."""
        by_chance = type(self.claim.law) is not Fixed and type(self.claim.curve) is not Gaussian
        return by_chance or (self.best is not None and is_large(self.best.plan.to_dict()))

    def claims(self) -> dict[str, Any]:
        """What follows from the rest; a verifier recomputes it."""
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
