"""Claim and evidence: what a run promises, in a file for everybody, and who took part when, in a file for its owner."""

import base64
import hmac
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from hashlib import sha256
from itertools import pairwise
from math import inf, nextafter, sqrt
from pathlib import Path
from typing import Any

from anyorder.accounting.curves import Curve, Gaussian, compose
from anyorder.accounting.gaussian import NEIGHBOURS, compose_mus
from anyorder.accounting.risk import Reach, reach
from anyorder.accounting.selection import step_mu
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import (
    bounded,
    brief,
    canonical,
    check_names,
    hexadecimal,
    html_table,
    load_json,
    quoted,
    save_json,
)
from anyorder.formatting import counted, rounded_up
from anyorder.ledger import Ledger
from anyorder.participation import MinSeparation
from anyorder.participation.known_order import with_names, without_names
from anyorder.patterns import Participation
from anyorder.plan.cost import check_plan
from anyorder.plan.plan import FORMAT as PLAN_FORMAT
from anyorder.plan.plan import Plan, attack_text, checked_plan, close, plan_of, promised
from anyorder.plan.receipt import Receipt, ReceiptTree, receipt_key, receipt_root, receipts
from anyorder.strategy.registry import sensitivity

# ----------------------------------------------------------------------------------------------------
# How a run keeps what one unit brings apart from the vectors of all others, in four words.


CONSTRUCTED = "by construction"
PROVED = "proved"
MAPPED = "mapped"
EITHER = "proved or mapped"
PROMISED = "promised"
_WEAKER = (CONSTRUCTED, PROVED, EITHER, MAPPED, PROMISED)  # each says less than those before it

_MEANING = {
    "dataset": {
        CONSTRUCTED: "example i is row i of the data",
        PROMISED: "the code of the data set makes each example of that example's own data, and keeps and draws nothing "
        "that reaches others",
    },
    "collation": {
        CONSTRUCTED: "rows are stacked, or collated one by one",
        PROMISED: "each row of a batch is made of one example alone, and is not padded by the length of others",
    },
    "model": {
        CONSTRUCTED: "it runs on each example alone, and was tried on made-up data for what it keeps between batches",
        PROMISED: "it runs on each example alone, and what it keeps of one batch for the next could not be tried",
    },
    "loss": {
        PROVED: "in every batch each operation maps rows to rows",
        MAPPED: "what has no proof was run again for each row alone",
        EITHER: "each batch was proved row by row or run again for each row alone; which one is not told",
        PROMISED: "each example's loss depends on that example alone",
    },
}
"""Part -> word -> what it says. No other words are read."""


@dataclass(frozen=True)
class Isolation:
    """How each part of a training keeps units apart: "by construction", "proved", "mapped", or "promised" by its owner.

    The words follow from the types of data set, loader and collation, from a trial on made-up data, and from the
    operations of the loss: never from numbers of the data. Where the sizes of batches are secret, or tell the
    neighbours apart, the loss is "proved or mapped", since which one may follow from a size.

    Attributes:
        dataset: how an example is read and drawn.
        collation: how examples become a batch.
        model: how the model runs on a batch.
        loss: how the loss of a batch is that of single rows.
    """

    dataset: str
    collation: str
    model: str
    loss: str

    def to_dict(self) -> dict[str, str]:
        """As a certificate has it."""
        return asdict(self)

    def and_before(self, before: "Isolation") -> "Isolation":
        """What holds of a run whose first steps had `before`, and later ones this: of each part the weaker word."""
        pairs = zip(self.to_dict().items(), before.to_dict().values(), strict=True)
        return Isolation(**{part: max(own, other, key=_WEAKER.index) for (part, own), other in pairs})

    def facts(self) -> list[tuple[str, str]]:
        """(name, sentence) of each part, for the card."""
        return [(_WORDS[part], f"{word}: {_MEANING[part][word]}") for part, word in self.to_dict().items()]

    def promises(self) -> list[str]:
        """What the owner states, and nothing checks."""
        return [
            f"of the {_WORDS[part]}, that {_MEANING[part][PROMISED]}"
            for part, word in self.to_dict().items()
            if word == PROMISED
        ]


_WORDS = {"dataset": "data set", "collation": "collation", "model": "model", "loss": "loss"}
UNKNOWN = Isolation(PROMISED, PROMISED, PROMISED, PROMISED)
"""Of steps that were taken before this was kept."""


def sizes_are_public(plan: Plan) -> bool:
    """Whether the numbers of examples in batches are the same for neighbours, and no secret."""
    return not plan.participation.secret and plan.neighbours in ("zero-out", "replace-one")


def read_isolation(plan: Plan, data: Any) -> Isolation:
    """What a certificate says. Raises: CertificateError for what this package does not write of such a plan."""
    check_names("isolation", data, set(_MEANING))
    for part, words in _MEANING.items():
        known = [word for word in words if part != "loss" or sizes_are_public(plan) or word in (EITHER, PROMISED)]
        if type(data[part]) is not str or data[part] not in known:
            raise CertificateError(
                f"isolation: {part} must be one of {', '.join(map(repr, known))}, got {quoted(data[part])}"
            )
    return Isolation(**data)


# ----------------------------------------------------------------------------------------------------
# What a run turned out to cost, from how often units came and how far apart: for its certificate, beside the plan's.
#
# The plan's epsilon is that of the worst steps that its participation allows. Afterwards it is known that no unit took
# part more than k times, nor twice within less than b steps. With the noise as planned,
#
#     mu = mu_plan min(1, sens(C, S) / sens(C, participation)),     S = MinSeparation(n, b, k)
#
# **Why it may be claimed.** Let pi say who is in which step, of the steps that were taken. Under `zero-out` and
# `replace-one` neighbours, pi is the same for both. Let it, and the step after which the run ended, be chosen without
# looking at what was released: by a calendar, at random, by who is at hand. Then a run is one draw of pi, the same for
# neighbours, and after it a Gaussian matrix mechanism whose steps are those of pi, and whose noise was fixed
# beforehand: mu-GDP with mu = f clip_norm sens(C, pi) / noise_std for this pi, whatever else might have been drawn.
# Every unit's steps in pi are a pattern of S, and float32 coefficients move sens(C, S) by no larger share than that of
# the plan, which allows no fewer participations. So mu above is at least that of pi. And it is a function of pi alone:
# to show it shows nothing in which neighbours differ.
#
# A selection of rows (`Plan.selection`) in k steps counts beside the release: mu^2 is the sum of both.
#
# **Where it may not.** Where what was released decided who came, or when to stop, the smaller number is no claim: a
# run that ends when its releases happen to say much about somebody has lost more than its length tells. The plan's
# epsilon holds there too; to stop early costs it nothing. So a run of fewer steps than planned has a realised claim
# only where its owner states, in the file, that the stop was not chosen by what was released (`PUBLIC_STOP`).
# Under `add-or-remove`, pi differs between neighbours by the
# very unit, so that k and b would tell of it. Under secret sampling the batches are secret, and the claim rests on
# that. Where the record is on users' devices, nobody has pi. In all of these `realised_claim` is None.


_NAMES = ("max_participations", "min_separation", "mu", "epsilon")


@final
@dataclass(frozen=True)
class Realised:
    """What holds of those who took part, if neither they nor the end of the run were chosen by what was released.

    Attributes:
        max_participations: k, the most steps of a unit.
        min_separation: b, the smallest distance between two steps of one; n where none came twice.
        mu: Gaussian DP parameter, at most the plan's.
        epsilon: at the plan's delta, at most the plan's.
    """

    max_participations: int
    min_separation: int
    mu: float
    epsilon: float

    def to_dict(self) -> dict[str, Any]:
        """As a certificate has it."""
        return {name: getattr(self, name) for name in _NAMES}

    def says_nobody(self, steps: int) -> bool:
        """Whether nobody took part in a run of so many steps: it follows, and is implausible; see `describe`."""
        return steps > 0 and self.max_participations == 0

    def describe(self, steps: int) -> str:
        """In a phrase, for the card of a run of so many steps.

        Where nobody took part no number is said: a run does not train on nobody, and who edits k in a file to 0 has one
        that agrees with itself.
        """
        k, b = self.max_participations, self.min_separation
        if self.says_nobody(steps):
            return (
                f"nobody took part in any of {counted(steps, 'step')}, it says: implausible, and unchecked without the "
                "evidence. Rest on the planned epsilon"
            )
        apart = f", at least {counted(b, 'step')} apart" if k > 1 else ""
        return f"epsilon <= {rounded_up(self.epsilon)} of who took part: at most {counted(k, 'time')}{apart}"


def is_claimable(plan: Plan) -> bool:
    """Whether who took part is the same for neighbours, and known here."""
    same = plan.neighbours in ("zero-out", "replace-one") and not plan.participation.secret
    return same and "record" not in plan.on_device


def realised_claim(plan: Plan, max_participations: int, min_separation: int) -> Realised | None:
    """The claim for units that came at most k times, at least b steps apart; None where there is none.

    Args:
        plan: that was run.
        max_participations, min_separation: k and b, as `Ledger.realised_bounds` has them.
    Returns: None also where it would take so long to check that a stranger could not verify the certificate for it.
    Guarantee: mu is never below that of the true steps, and never above the plan's.
    """
    k, b = max_participations, min_separation
    if not is_claimable(plan) or plan.mu is None:
        return None
    if k == 0:
        return Realised(0, b, 0.0, 0.0)
    mu = plan.mu
    if k < plan.participation.max_participations or b > plan.participation.min_separation:
        order = MinSeparation(plan.n, b, k)
        if _is_dear(plan, order) and not _is_dear(plan, plan.participation):
            return None
        check_plan(_described(plan, order))
        share = sensitivity(plan.strategy, order).value / plan.sensitivity.value
        if plan.selection is None:
            mu = min(mu, nextafter(mu * nextafter(share, inf), inf))
        else:
            mu = min(mu, _of_both(plan, nextafter(share, inf), k))
    curve = Gaussian(mu, neighbours=plan.neighbours, unit=plan.unit)
    return Realised(k, b, mu, min(curve.epsilon(plan.delta), plan.epsilon))


def _of_both(plan: Plan, share: float, k: int) -> float:
    """The mu of a selection in k steps and of the release of this share of the plan's sensitivity."""
    released = NEIGHBOURS[plan.neighbours] / plan.sigma * share
    selected = step_mu(plan.selection, plan.neighbours, plan.selection_std) * sqrt(k)
    return nextafter(compose_mus(nextafter(released, inf), nextafter(selected, inf)), inf)


def _is_dear(plan: Plan, order: Participation) -> bool:
    """Whether a file of a stranger would be given less time than the plan's claims take, in this order."""
    try:
        with bounded(True):
            check_plan(_described(plan, order))
    except CertificateError:
        return True
    return False


def _described(plan: Plan, order: Participation) -> dict[str, Any]:
    return {**plan.to_dict(), "participation": order.to_dict()}


def read_realised(plan: Plan, steps: int, data: Any) -> Realised:
    """What a certificate claims, recomputed. Raises: CertificateError if it does not follow.

    Args:
        steps: that were taken.
    """
    check_names("realised", data, set(_NAMES))
    k, b = data["max_participations"], data["min_separation"]
    rule, n = plan.participation, plan.n
    if not is_claimable(plan):
        raise CertificateError(
            "the certificate has a realised epsilon, which cannot be claimed where neighbours differ in who took part, "
            "nor where the record is secret or on devices"
        )
    if type(k) is not int or not 0 <= k <= min(steps, rule.max_participations):
        raise CertificateError(
            f"max_participations must be an integer from 0 to {min(steps, rule.max_participations)}, got {quoted(k)}"
        )
    low, high = (rule.min_separation, (steps - 1) // (k - 1)) if k > 1 else (n, n)
    if type(b) is not int or not low <= b <= high:
        raise CertificateError(
            f"min_separation must be an integer from {low} to {high}, where units appeared {k} times, got {quoted(b)}"
        )
    found = realised_claim(plan, k, b)
    if found is None:
        raise CertificateError("the certificate's realised epsilon is one that this package does not write")
    for name, value in (("mu", found.mu), ("epsilon", found.epsilon)):
        if not close(data[name], value):
            raise CertificateError(
                f"the certificate claims a realised {name} = {quoted(data[name])}; recomputed it is {value!r}"
            )
    return found


FORMAT = "anyorder-certificate/2"
PUBLIC_STOP = "the run ended before its last planned step for a reason that was not read off what it released"
"""What an owner states of a run that stopped early: no file can show it."""
PUBLIC_RESTART = "the starts before this one ended for reasons that were not read off what they released"
"""What an owner states of a run that was started over: then each earlier start counts by its steps."""
_MOST_STARTS = 100
EVIDENCE_FORMAT = "anyorder-evidence/1"
_MOST_WEIGHTS = 10_000
_NOTE = ".withdrawn.json"  # run.privacy.withdrawn.json
_NOTE_FORMAT = "anyorder-withdrawal/1"
_LONGEST_REASON = 500
_OLD = {
    "anyorder-certificate/1": "it holds who was in which step, which is as secret as the data. Write a new one with "
    "engine.certificate().save(..), from the run's checkpoint, and do not pass the old one on"
}


@dataclass(frozen=True)
class Certificate:
    """The claim of a run. It is public: it names nobody, and reveals nothing of any batch.

    Attributes:
        plan: the plan that was run; a known order's units are numbers in it.
        steps: steps taken; at most plan.n. Stopping early costs nothing.
        key_fingerprint: a hash of the noise key; equal in two certificates only if noise was used twice.
        record_digest: HMAC-SHA256 of plan, steps, the ledger's history and the words of `isolation`, under a key that
            only the run's owner has: it tells nothing to others, and holds the owner to one record.
        receipt_root: what every unit's `Receipt` leads to; to those who have none it tells nothing.
        realised: how often units appeared at most, how far apart, and the epsilon of that; see `Realised` for what it
            rests on. It follows from the record that the digest stands for, so that certificates are compared
            without it. None where it cannot be claimed or was not shown.
        stated: what the owner says of the run and no file can show: `PUBLIC_STOP`, or nothing.
        isolation: how units are kept apart in data set, collation, model and loss; None where the engine did not run
            them (a release, a server, tables by hand), and in older certificates. Record digest and receipts are bound
            to them: evidence, and any unit's receipt, show that a word was edited.
        weights: SHA-256 of each released tensor, or of the file of a model: which model this is the certificate of.
            Empty where nobody said it, and in older certificates.
        withdrawal: SHA-256 of what only the run's owner can show: a note that shows it withdraws the certificate, see
            `Evidence.withdraw`. Empty in older certificates.
        earlier: (fingerprint of the noise key, steps) of each start whose place this run took, on the same data with
            the same plan: what they released counts in `curve` and `epsilon`. The record digest and receipts are bound
            to it.
        seal: HMAC-SHA256 of `weights` under the key of the record digest: evidence shows that one was edited.
    """

    plan: Plan
    steps: int
    key_fingerprint: str
    record_digest: str
    receipt_root: str
    realised: Realised | None = field(default=None, compare=False)
    stated: tuple[str, ...] = field(default=(), compare=False)
    isolation: Isolation | None = field(default=None, compare=False)
    weights: tuple[str, ...] = field(default=(), compare=False)
    withdrawal: str = field(default="", compare=False)
    earlier: tuple[tuple[str, int], ...] = ()
    seal: str = field(default="", compare=False)

    @property
    def curve(self) -> Curve:
        """Return the curve of the plan and all starts before, for `anyorder.compose` with runs on the same people.

        An earlier start counts as a whole run of the plan: what it released may have decided on its end, and then the
        curve of its steps alone is no claim. Where the owner states `PUBLIC_RESTART`, it counts by its steps.
        """
        return compose(*self.curves_before, self.plan.curve) if self.earlier else self.plan.curve

    @property
    def curves_before(self) -> list[Curve]:
        """Return the curve of each earlier start."""
        by_steps = PUBLIC_RESTART in self.stated
        return [_curve_of_start(self.plan, steps) if by_steps else self.plan.curve for _, steps in self.earlier]

    @property
    def epsilon(self) -> float:
        """At `plan.delta`: the plan's, or with starts before this one that of all together: the claim of the run.

        What was realised may be less: `realised.epsilon`.
        """
        return max(self.plan.epsilon, self.curve.epsilon(self.plan.delta)) if self.earlier else self.plan.epsilon

    @property
    def reach(self) -> Reach:
        """Return what the strongest attacker reaches by the claim of the run: computed here, and in no file."""
        return reach(self.curve) if self.earlier else self.plan.reach

    def save(self, path: str | Path) -> None:
        """Write the certificate as JSON."""
        save_json(path, {
            "format": FORMAT,
            "plan": self.plan.to_dict(),
            "claims": self.plan.claims(),
            "run": self.run(),
            **({} if self.realised is None else {"realised": self.realised.to_dict()}),
            **({"stated": list(self.stated)} if self.stated else {}),
            **_words(self.isolation),
            **({"weights": list(self.weights)} if self.weights else {}),
            **({"withdrawal": self.withdrawal} if self.withdrawal else {}),
            **({"seal": self.seal} if self.seal else {}),
            **({"earlier": {"starts": _starts(self.earlier), "epsilon": self.epsilon}} if self.earlier else {}),
        })  # fmt: skip

    def facts(self) -> list[tuple[str, str]]:
        """(name, text): the plan's, and what is known after the run. `print(certificate)` shows them."""
        first, attacks, *rest = self.plan.facts()
        if self.earlier:
            steps = ", ".join(str(one) for _, one in self.earlier)
            together = promised(self.epsilon, self.plan.delta, self.curve.mu)
            attacks = ("attacks", attack_text(self.reach))
            first, rest = ("privacy", f"{together}, of this run and of what was released before it was started over"), [
                ("started over", f"{counted(len(self.earlier), 'time')}, after {steps} step(s)"),
                ("one run", first[1]),
                *rest,
            ]  # fmt: skip
        realised = [] if self.realised is None else [("realised", self.realised.describe(self.steps))]
        stated = [("stated", f"by the owner: {text}") for text in self.stated]
        apart = [] if self.isolation is None else self.isolation.facts()
        of = [("weights", f"named, by {counted(len(self.weights), 'digest')}")] if self.weights else []
        return [
            first,
            attacks,
            *realised,
            *rest,
            *apart,
            ("steps", f"{self.steps} of {self.plan.n} taken"),
            *of,
            *stated,
        ]

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>14}  {text}" for name, text in self.facts())

    def run(self) -> dict[str, Any]:
        """Return what the file says of the run, in addition to its plan."""
        return {
            "steps": self.steps, "key_fingerprint": self.key_fingerprint, "record_digest": self.record_digest,
            "receipt_root": self.receipt_root,
        }  # fmt: skip

    def check(self, receipt: Receipt, *, large: bool = False) -> None:
        """Raise CertificateError unless the receipt is one of this run's, its steps keep to the plan, and mu follows.

        Its steps must also be no more, and no nearer, than the certificate says of all units.

        Args:
            large: compute mu, however long it takes, for files of one's own.
        """
        claim = _claim(self.plan, self.steps, self.key_fingerprint, self.isolation, self.earlier)
        receipt.check(self.plan, self.steps, claim, self.receipt_root, large=large)
        if self.realised is not None:
            nearest = min((b - a for a, b in pairwise(receipt.steps)), default=self.plan.n)
            if len(receipt.steps) > self.realised.max_participations or nearest < self.realised.min_separation:
                raise CertificateError(
                    "the receipt's steps are more, or nearer, than the certificate says of all units: what it claims "
                    "as realised does not hold"
                )

    @classmethod
    def load(cls, path: str | Path, *, large: bool = False) -> "Certificate":
        """Read a certificate; every claim is recomputed. Raises CertificateError if one does not follow."""
        return cls._of(load_json(path, FORMAT, old=_OLD, large=large), large)

    @classmethod
    def _of(cls, data: dict[str, Any], large: bool) -> "Certificate":
        optional = {
            "realised",
            "stated",
            "isolation",
            "weights",
            "withdrawal",
            "earlier",
            "seal",
        } & data.keys()  # an owner may not show them, and older ones have none
        check_names("certificate", data, {"format", "plan", "claims", "run"} | optional)
        run = check_names("run", data["run"], {"steps", "key_fingerprint", "record_digest", "receipt_root"})
        fingerprint, digest = hexadecimal(run, "key_fingerprint", 32), hexadecimal(run, "record_digest", 64)
        root = hexadecimal(run, "receipt_root", 64)
        plan = checked_plan(data["plan"], data["claims"], large=large)
        steps = run["steps"]
        if type(steps) is not int or not 0 <= steps <= plan.n:
            raise CertificateError(
                f"steps must be an integer from 0 to {plan.n}, the planned ones, got {quoted(steps)}"
            )
        starts = _read_starts(plan, fingerprint, data["earlier"]) if "earlier" in optional else ()
        stated = _read_stated(plan, steps, bool(starts), data["stated"]) if "stated" in optional else ()
        isolation = read_isolation(plan, data["isolation"]) if "isolation" in optional else None
        realised = None
        if "realised" in optional:
            with bounded(not large):
                realised = read_realised(plan, steps, data["realised"])
            if starts:
                raise CertificateError("the certificate has a realised epsilon, and its run was started over")
            if steps < plan.n and not stated:
                raise CertificateError(
                    f"the certificate has a realised epsilon, and its run took {steps} of {plan.n} steps: that may be "
                    "claimed only where the owner states that the stop was not chosen by what was released. Make it "
                    "again with certificate(public_stop=True) if that is so, else with certificate()"
                )
        weights = _read_weights(data["weights"]) if "weights" in optional else ()
        withdrawal = hexadecimal(data, "withdrawal", 64) if "withdrawal" in optional else ""
        seal = hexadecimal(data, "seal", 64) if "seal" in optional else ""
        made = cls(
            plan, steps, fingerprint, digest, root, realised, stated, isolation, weights, withdrawal, starts, seal
        )
        if starts:
            with bounded(not large):
                epsilon = made.epsilon
            if not close(data["earlier"]["epsilon"], epsilon):
                raise CertificateError(
                    f"the certificate claims epsilon = {quoted(data['earlier']['epsilon'])} with the starts before it; "
                    f"recomputed it is {epsilon!r}"
                )
        return made


def _starts(earlier: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
    return [{"key_fingerprint": fingerprint, "steps": steps} for fingerprint, steps in earlier]


def _read_starts(plan: Plan, own: str, data: Any) -> tuple[tuple[str, int], ...]:
    """The starts before a run; what they come to is recomputed by the caller."""
    found = check_names("earlier", data, {"starts", "epsilon"})["starts"]
    if type(found) is not list or not 0 < len(found) <= _MOST_STARTS:
        raise CertificateError(f"starts must be a list of 1 to {_MOST_STARTS}, got {quoted(found, 70)}")
    starts = []
    for one in found:
        check_names("a start", one, {"key_fingerprint", "steps"})
        if type(one["steps"]) is not int or not 0 < one["steps"] <= plan.n:
            raise CertificateError(
                f"steps of a start must be an integer from 1 to {plan.n}, got {quoted(one['steps'])}"
            )
        starts.append((hexadecimal(one, "key_fingerprint", 32), one["steps"]))
    if len({own, *(fingerprint for fingerprint, _ in starts)}) <= len(starts):
        raise CertificateError("two starts of the run are of one noise key: of them nothing can be claimed")
    return tuple(starts)


def _curve_of_start(plan: Plan, steps: int) -> Curve:
    """Of the first steps of a plan, whose number nobody chose by what they released.

    What they released is a part of what all steps do, so that the plan's curve holds. A unit is in no more of them than
    fit at the plan's distance, and where units come k times in fewer steps, k is all that is used: mu of
    MinSeparation(n, b, k) bounds the mu of any such pattern.
    """
    order = plan.participation
    k = min(order.max_participations, 1 + (steps - 1) // order.min_separation)
    found = realised_claim(plan, k, order.min_separation if k > 1 else plan.n) if is_claimable(plan) else None
    return plan.curve if found is None else Gaussian(found.mu, neighbours=plan.neighbours, unit=plan.unit)


def _read_weights(data: Any) -> tuple[str, ...]:
    if type(data) is not list or not 0 < len(data) <= _MOST_WEIGHTS:
        raise CertificateError(f"weights must be a list of 1 to {_MOST_WEIGHTS} digests, got {quoted(data, 70)}")
    return tuple(hexadecimal({"a digest of weights": one}, "a digest of weights", 64) for one in data)


def _read_stated(plan: Plan, steps: int, has_starts: bool, data: Any) -> tuple[str, ...]:
    """What the owner states; only what this package writes, and only of a run that it can be true of."""
    if (data != [PUBLIC_STOP] or steps == plan.n) and (data != [PUBLIC_RESTART] or not has_starts):
        raise CertificateError(
            "stated must be what this package writes of a run that stopped early, or was started over, got "
            f"{quoted(data)}"
        )
    return tuple(data)


@dataclass(frozen=True)
class Evidence:
    """Who took part in which step of a run: what backs its certificate. Secret, as the data is.

    Under secret sampling the batches must stay secret for the claim to hold; elsewhere ids of units are in it.

    Attributes:
        plan: the plan that was run, with the names of a known order.
        ledger: which unit took part at which step.
        key_fingerprint: as in the certificate.
        record_key: 32 bytes, the key of record digest and receipts; the noise key does not follow from it.
        isolation: how units were kept apart, as the certificate has it.
        earlier: what was started over, as the certificate has it.
    """

    plan: Plan
    ledger: Ledger
    key_fingerprint: str
    record_key: bytes = field(repr=False)
    isolation: Isolation | None = None
    earlier: tuple[tuple[str, int], ...] = ()
    _made: dict[str, Certificate] = field(default_factory=dict, init=False, repr=False, compare=False)
    _trees: dict[str, ReceiptTree] = field(default_factory=dict, init=False, repr=False, compare=False)
    _realised: dict[tuple[int, int], Realised | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def certificate(self) -> Certificate:
        """The claim that this evidence backs. Cost: 0.7 us for each unit that took part, once for a record."""
        record = self._record()
        if record not in self._made:  # the ledger of a run that goes on has another record then
            self._made.clear()
            self._made[record] = self._certificate(record)
        return self._made[record]

    @property
    def realised(self) -> Realised | None:
        """What is known of how often units came, and its epsilon; None where it is no claim, see
        `anyorder.plan.certificate`.

        `Release.certificate()` shows it, of a run that took all its steps or whose owner states `PUBLIC_STOP`. The
        certificate of evidence alone does not: it tells nothing of the record.
        """
        bounds = self.ledger.realised_bounds()
        if bounds not in self._realised:
            self._realised.clear()
            self._realised[bounds] = realised_claim(self.plan, *bounds)
        return self._realised[bounds]

    def _certificate(self, record: str) -> Certificate:
        shown, steps = self.plan.public(), self.ledger.step
        digest = hmac.new(self.record_key, record.encode(), sha256).hexdigest()
        claim = _claim(shown, steps, self.key_fingerprint, self.isolation, self.earlier)
        root = receipt_root(self.ledger, receipt_key(self.record_key, record), claim)
        withdrawal = sha256(self._withdrawal_secret).hexdigest()
        return Certificate(
            shown, steps, self.key_fingerprint, digest, root, isolation=self.isolation, withdrawal=withdrawal,
            earlier=self.earlier,
        )  # fmt: skip

    def naming(self, certificate: Certificate, weights: tuple[str, ...]) -> Certificate:
        """The certificate of this run with the digests of its weights, sealed: an edited one is found with evidence."""
        return replace(certificate, weights=weights, seal=self._seal(weights)) if weights else certificate

    def _seal(self, weights: tuple[str, ...]) -> str:
        text = canonical({"weights": list(weights), "record": self._record()})
        return hmac.new(self.record_key, f"anyorder weights 1\n{text}".encode(), sha256).hexdigest()

    @property
    def _withdrawal_secret(self) -> bytes:
        """Of the run, whatever its step: who withdraws shows it, and all its certificates are withdrawn."""
        return hmac.digest(self.record_key, f"anyorder withdrawal 1\n{self.key_fingerprint}".encode(), "sha256")

    def withdraw(self, certificate: str | Path, reason: str) -> Path:
        """Withdraw a certificate: write a note beside it, which `verify` finds and everybody can check.

        The note shows a number of which the certificate has the SHA-256, and which nobody else can know. It holds for
        all certificates of the run: publish it wherever one of them lies. The reason is shown, and is not signed.

        Args:
            certificate: the file; it must be of this run.
            reason: public.
        Returns: the note's file. Raises: CertificateError; ArgumentError.
        """
        path = Path(certificate)
        if not isinstance(reason, str) or not 0 < len(reason) <= _LONGEST_REASON or not reason.isprintable():
            raise ArgumentError(f"reason must be one line of at most {_LONGEST_REASON} characters, got {reason!r:.70}")
        shown = Certificate.load(path, large=True)
        if shown.key_fingerprint != self.key_fingerprint or not shown.withdrawal:
            raise CertificateError(
                "the certificate is not of this evidence's run, or is of a version in which none could be withdrawn"
            )
        note = path.with_suffix(_NOTE)
        save_json(note, {
            "format": _NOTE_FORMAT, "key_fingerprint": self.key_fingerprint, "shown": self._withdrawal_secret.hex(),
            "date": date.today().isoformat(), "reason": reason,
        })  # fmt: skip
        return note

    def with_isolation(self, isolation: Isolation) -> "Evidence":
        """The same, of a run that kept units apart in this way. It shares what was computed."""
        if isolation == self.isolation:
            return self
        other = replace(self, isolation=isolation)
        for shared in ("_made", "_trees", "_realised"):
            object.__setattr__(other, shared, getattr(self, shared))
        return other

    def shown(self, *, public_stop: bool = False) -> Certificate:
        """The certificate with what was realised, where that may be claimed.

        Args:
            public_stop: the owner states that a run of fewer steps than planned ended for a reason that was not read
                off what it released. The certificate says so. After all steps there is nothing to state. Of a run that
                was started over: that the starts before it ended so. Nothing is realised then, and each counts by its
                steps.
        """
        if self.earlier:
            return replace(self.certificate, stated=(PUBLIC_RESTART,) if public_stop else ())
        early = self.ledger.step < self.plan.n
        realised = self.realised if public_stop or not early else None
        stated = (PUBLIC_STOP,) if early and realised is not None else ()
        return replace(self.certificate, realised=realised, stated=stated)

    def receipt(self, unit: int | str) -> Receipt:
        """For this unit: its steps and its own mu, to be held against the certificate of the same step.

        Raises: ArgumentError if it took part in no step: for whoever may ask who took part, not for logs; and where
            the record is on devices.
        """
        return self.receipts([unit])[0]

    def receipts(self, units: Iterable[Any]) -> list[Receipt]:
        """The receipts of many units, in their order.

        Cost: the tree of all units once for a record, 0.9 s and 300 MB for 10^6, which is kept; then 1 ms a unit.
        """
        if "record" in self.plan.on_device:
            raise ArgumentError("there are no receipts where the record is on devices: this one names nobody")
        record = self._record()
        if record not in self._trees:
            self._trees.clear()
            self._trees[record] = ReceiptTree(self.ledger, receipt_key(self.record_key, record))
        return receipts(self._trees[record], self.plan, units)

    def _record(self) -> str:
        text = {"plan": self.plan.public().digest, "steps": self.ledger.step, "key": self.key_fingerprint}
        return canonical({**text, "history": self.ledger.digest(), **_words(self.isolation, self.earlier)})

    def save(self, path: str | Path) -> None:
        """Write the evidence as JSON, readable by the owner of the file only."""
        shown = self.certificate
        save_json(path, {
            "format": EVIDENCE_FORMAT,
            "plan_digest": shown.plan.digest,
            **shown.run(),
            "record_key": self.record_key.hex(),
            "names": without_names(self.plan.participation)[1],
            "ledger": base64.b64encode(self.ledger.to_bytes()).decode(),
            **_words(self.isolation),
        }, secret=True)  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, certificate: Certificate, *, large: bool = False) -> "Evidence":
        """Read the evidence of a certificate; its history is replayed under the plan's rule.

        Raises: CertificateError if it belongs to another certificate, or a unit broke the rule; the message names none.
        """
        data = load_json(path, EVIDENCE_FORMAT, large=large)
        check_names("evidence", data, {
            "format", "plan_digest", "steps", "key_fingerprint", "record_digest", "receipt_root", "record_key",
            "names", "ledger", *({"isolation"} & data.keys()),
        })  # fmt: skip
        if data.get("isolation") != _words(certificate.isolation).get("isolation"):
            raise CertificateError(
                "the certificate's words on how units were kept apart in data set, collation, model and loss are not "
                "those of its evidence: one of them was altered, or they were written by an earlier version"
            )
        for name, value in {"plan_digest": certificate.plan.digest, **certificate.run()}.items():
            if type(data[name]) is not type(value) or data[name] != value:
                raise CertificateError(
                    f"the evidence is not that of this certificate: its {name} is {quoted(data[name], 70)}, and the "
                    f"certificate's is {value}"
                )
        key = bytes.fromhex(hexadecimal(data, "record_key", 64))
        try:
            order = with_names(certificate.plan.participation, data["names"])
            with bounded(not large):
                ledger = Ledger.from_bytes(order, base64.b64decode(data["ledger"], validate=True))
        except CertificateError:
            raise
        except Exception as problem:  # whatever the decoder trips over, the file does not hold
            raise CertificateError(f"the evidence does not hold: {brief(problem)}") from problem
        if "record" in certificate.plan.on_device and any(map(len, ledger.history())):
            raise CertificateError("the evidence names units, and the plan leaves the record to devices")
        evidence = cls(
            replace(certificate.plan, participation=order), ledger, certificate.key_fingerprint, key,
            certificate.isolation, certificate.earlier,
        )  # fmt: skip
        with bounded(not large):
            same = evidence.certificate == certificate
        if not same:
            raise CertificateError("the evidence holds another record than the one that the certificate was made of")
        if certificate.weights and not hmac.compare_digest(certificate.seal, evidence._seal(certificate.weights)):
            raise CertificateError(
                "the weights that the certificate names are not those that the run's owner named: a digest was altered"
            )
        shown = certificate.realised
        if shown is not None and (shown.max_participations, shown.min_separation) != ledger.realised_bounds():
            raise CertificateError(
                "the certificate's realised participations are not those of the evidence: units appeared more often or "
                "nearer, or less so, than it says"
            )
        return evidence


@dataclass(frozen=True)
class Verification:
    """What was checked: the plan, the certificate where the file was one, evidence and receipt where given.

    `note`: whether a note of withdrawal lies beside the certificate of which it does not follow who wrote it.
    """

    plan: Plan
    certificate: Certificate | None
    evidence: Evidence | None = None
    receipt: Receipt | None = None
    note: bool = False

    def facts(self) -> list[tuple[str, str]]:
        """(name, text): what holds, what nobody checked, and the claim. `print(verification)` shows them."""
        what = "plan, which has not run" if self.certificate is None else "certificate"
        unseen = ["that the noise was added, and that order, units and clipping were what the file says"]
        checked = [f"every number of the {what}, recomputed"]
        if self.evidence is not None:
            checked.append("who took part, by the evidence")
        elif self.certificate is not None:
            unseen.append("who took part in which step")
        if self.receipt is not None:
            checked.append("the receipt of one unit")
        if self.note:
            unseen.append("the note of withdrawal beside the file")
        claim = self.plan if self.certificate is None else self.certificate
        return [("verified", "; ".join(checked)), ("not checked", "; ".join(unseen)), *claim.facts()]

    def _repr_html_(self) -> str:
        return html_table(self.facts())

    def __str__(self) -> str:
        return "\n".join(f"{name:>14}  {text}" for name, text in self.facts())

    def __repr__(self) -> str:
        claim = self.plan if self.certificate is None else self.certificate
        what = "plan" if self.certificate is None else f"certificate of {self.certificate.steps} steps"
        return (
            f"Verification({what}: epsilon <= {rounded_up(claim.epsilon)} at delta = {rounded_up(self.plan.delta, 6)})"
        )


def verify(
    path: str | Path, *, evidence: str | Path | None = None, receipt: str | Path | None = None, large: bool = False
) -> Verification:
    """Recompute every claim of a plan or certificate file. With evidence or a receipt, check who took part as well.

    Checked from the public file alone: its own hash; sensitivity, noise, mu and epsilon from the strategy's numbers.
    With the evidence: that it is the certificate's, and that every unit's steps obey the participation. With a
    receipt: that the certificate is bound to these steps of this unit, which obey the participation, and its own mu.
    Not checked, because no file can show it: that the program which wrote the files added the noise, and that order,
    units and clipping were what it says.

    Args:
        path: a certificate or a plan.
        evidence: the certificate's evidence, a file that its owner keeps secret.
        receipt: one unit's, a file that the unit has from the owner.
        large: read files of one's own that are beyond the bounds on files of strangers.
    Raises: CertificateError with the first thing that does not hold, or if the owner withdrew the certificate; within
        2 seconds and 200 MB, unless `large`.
    """
    data = load_json(path, FORMAT, PLAN_FORMAT, old=_OLD, large=large)
    if data["format"] == PLAN_FORMAT:
        if evidence is not None:
            raise CertificateError("the file is a plan, which has not run: evidence belongs to a certificate")
        if receipt is not None:
            raise CertificateError("the file is a plan, which has not run: a receipt belongs to a certificate")
        return Verification(plan_of(data, large=large), None)
    certificate = Certificate._of(data, large)
    note = _check_withdrawn(certificate, Path(path).with_suffix(_NOTE))
    found = None if evidence is None else Evidence.load(evidence, certificate, large=large)
    own = None if receipt is None else Receipt.load(receipt, large=large)
    if own is not None:
        certificate.check(own, large=large)
    return Verification(certificate.plan, certificate, found, own, note)


def _check_withdrawn(certificate: Certificate, path: Path) -> bool:
    """Whether a note lies there that withdraws nothing. Raises: CertificateError for one that does."""
    if not path.exists():
        return False
    try:
        note = check_names("note", load_json(path, _NOTE_FORMAT), {
            "format", "key_fingerprint", "shown", "date", "reason"
        })  # fmt: skip
        shown = bytes.fromhex(hexadecimal(note, "shown", 64))
    except CertificateError:
        return True  # whoever put it there, it is not the owner's
    if not certificate.withdrawal or sha256(shown).hexdigest() != certificate.withdrawal:
        return True
    when, reason = quoted(note["date"], 12), quoted(note["reason"], _LONGEST_REASON)
    raise CertificateError(f"the owner withdrew this certificate on {when}: {reason}. Do not rely on it")


def _claim(
    shown: Plan, steps: int, fingerprint: str, isolation: Isolation | None, earlier: tuple[tuple[str, int], ...]
) -> str:
    """What the root of the receipts is bound to: a certificate that claims anything else has other receipts."""
    return canonical({"plan": shown.digest, "steps": steps, "key": fingerprint, **_words(isolation, earlier)})


def _words(isolation: Isolation | None, earlier: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
    """What record digest and receipts are bound to besides."""
    words = {} if isolation is None else {"isolation": isolation.to_dict()}
    return words | ({"earlier": _starts(earlier)} if earlier else {})
