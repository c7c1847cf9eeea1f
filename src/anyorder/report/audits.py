"""What an audit saw: its verdict beside the claim, and the picture of its scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyorder import checks
from anyorder.accounting.amplification.claims import Amplified
from anyorder.accounting.curves import BoundedRange, Composed, Sampled
from anyorder.audit.bounds import Method
from anyorder.audit.laws import NoiseLaw
from anyorder.audit.result import REFUTED, Audited, check_public, t_statistic
from anyorder.formatting import counted, one_of, rounded_down, rounded_up
from anyorder.plan.plan import Plan
from anyorder.report.card import facts_panel
from anyorder.report.plots import new_axes, save_figure

__all__ = ["METHODS", "AuditSummary", "audit_panel", "plot_audit"]

METHODS: dict[Method, str] = {
    "one_run": "whatever the mechanism is",
    "f_dp": "of any mechanism whose curve is a Gaussian's",
    "gaussian": "an estimate: if scores are normal",
    "clopper_pearson": "if canaries do not disturb each other",
}
"""Method of a bound -> what it rests on, in words, beside fair coins."""

LAW, KNOWN = "noise", "known"
_TESTS: dict[str, str] = {
    "f_dp": "the scores, whatever the mechanism is",
    "gaussian": "the scores, independent and normal",
    "clopper_pearson": "the scores, independent",
    KNOWN: "of what is promised if batches become known: the scores that know them",
    LAW: "the noise itself, sums known",
}

Floats = NDArray[np.float64]

_OUT, _IN = "#0072B2", "#D55E00"  # blue and vermilion: told apart by all kinds of eyes, and in grey


@dataclass(frozen=True)
class AuditSummary:
    """What an audit saw, in numbers that may be shown; of an informed audit only if its run was discarded.

    The verdict does not use the bounds: at 95 % each lies above a true claim that is tight in up to one run of twenty.
    It is that of one or more p-values, each at most the probability of a result as strong if the claim is true: of the
    scores, by the method that the canaries allow ("gaussian" where they are orthogonal, see `Audited.method`);
    "noise", by the law of the noise of a run whose sums are known, see `anyorder.audit.laws`; and under secret
    sampling "known", of the scores of one who knows the steps, against what the plan promises then: noise that keeps
    the claim keeps that too.

    Attributes:
        audited: of which.
        confidence: of each bound and of the interval, each on its own.
        bounds: method -> lower bound on epsilon at the audit's delta.
        unfit: method -> why it gives no bound here.
        mu_seen: interval of the mu of the scores; None where no score is normal, or they are too few.
        p_values: method of the scores' test, "noise" or "known", -> p-value.
        known: under secret sampling, what is seen by one to whom all batches became known; None where that was not
            asked. The bounds in it may lie above the claim: what is left then is what is promised then.
    """

    audited: Audited
    confidence: float
    bounds: dict[Method, float]
    unfit: dict[Method, str]
    mu_seen: tuple[float, float] | None
    p_values: dict[str, float]
    known: "AuditSummary | None" = None

    @classmethod
    def of(
        cls,
        audited: Audited,
        methods: Sequence[Method] = tuple(METHODS),
        confidence: float = 0.95,
        law: NoiseLaw | None = None,
        known: Audited | None = None,
    ) -> "AuditSummary":
        """Compute bounds by these methods, and the p-values. Raises ArgumentError for an unknown method."""
        for method in methods:
            checks.choice("method", method, METHODS)
        checks.probability("confidence", confidence)
        unfit: dict[Method, str] = {}
        t = t_statistic(audited)
        if isinstance(audited.curve, (BoundedRange, Sampled, Amplified, Composed)):
            unfit["gaussian"] = "under secret sampling no score is normal"
        elif not 1 < audited.included.sum() < len(audited.included) - 1:
            unfit["gaussian"] = "it needs two canaries that are in, and two that are out"
        elif t is None or math.isinf(t):
            unfit["gaussian"] = "scores do not spread, as those of any noise do"
        bounds = {method: audited.lower_bound(method, confidence) for method in methods if method not in unfit}
        tests: tuple[Method, ...] = audited.methods if audited.method not in unfit or t == math.inf else ("f_dp",)
        p_values: dict[str, float] = {test: audited.p_value(test) for test in tests}
        others = None if known is None else cls.of(known, methods, confidence)
        if others is not None:
            p_values[KNOWN] = others.p_value
        if law is not None:
            p_values[LAW] = law.p_value
        seen = None if "gaussian" in unfit else audited.mu_estimate(confidence)
        unfit = {method: reason for method, reason in unfit.items() if method in methods}
        return cls(audited, confidence, bounds, unfit, seen, p_values, others)

    @property
    def above(self) -> tuple[Method, ...]:
        """Methods whose bound lies above the claim, of those that hold for what is known of these scores."""
        audited = self.audited
        holds: dict[Method, bool] = {
            "one_run": True,
            "f_dp": audited.curve.mu is not None or audited.mus is not None,
            "gaussian": audited.independent and audited.mus is not None,
            "clopper_pearson": audited.independent,
        }
        return tuple(method for method, bound in self.bounds.items() if holds[method] and bound > audited.epsilon)

    @property
    def p_value(self) -> float:
        """Of all tests together, by Bonferroni."""
        return min(1.0, len(self.p_values) * min(self.p_values.values()))

    @property
    def refuted(self) -> bool:
        """Whether less than one run in a million of those that keep the claim looks like this."""
        return self.p_value < REFUTED

    def to_dict(self) -> dict[str, Any]:
        """JSON values. No coins, no scores.

        Raises: ArgumentError where the audit is informed and its run was not discarded: see `anyorder.audit.plant`.
        """
        check_public(self.audited)
        audited, included = self.audited, int(self.audited.included.sum())
        known = {} if self.known is None else {"known": self.known.to_dict()}
        return {
            "claimed": {"epsilon": audited.epsilon, "delta": audited.delta, "mu": audited.curve.mu},
            "canaries": {"in": included, "out": len(audited.included) - included, "mu": _range(audited.mus)},
            "confidence": self.confidence,
            "epsilon_at_least": dict(self.bounds),
            "no_bound": dict(self.unfit),
            "mu_seen": None if self.mu_seen is None else {"low": self.mu_seen[0], "high": self.mu_seen[1]},
            "p_values": dict(self.p_values),
            "p_value": self.p_value,
            "refuted": self.refuted,
            **known,
        }

    def __str__(self) -> str:
        """The card, as text; nothing of it where that would be as secret as the data."""
        if self.audited.informed and not self.audited.run_discarded:
            return str(self.audited)
        return "\n".join(f"{label:>17}  {text}" for label, text in _rows(self, None))


def not_refuted(above: int, confidence: float = 0.95) -> str:
    """The verdict in words, where so many of the bounds lie above a claim that was not refuted."""
    if not above:
        return "not refuted: this run does not speak against the claim, which is no proof of it"
    lie = "lies" if above == 1 else "lie"
    return (
        f"not refuted at {REFUTED:g}, but {above} of the bounds {lie} above the claim, as they do in up to one true "
        f"claim of {one_of(confidence)}: audit again, with more canaries"
    )


def _range(mus: Floats | None) -> dict[str, float] | None:
    return None if mus is None else {"smallest": float(mus.min()), "largest": float(mus.max())}


def audit_panel(summary: AuditSummary, plan: Plan | None = None) -> Any:
    """A rich panel: the verdict beside what was claimed.

    Args:
        plan: the claim's, for its order and mechanism.
    """
    return facts_panel("audit", _rows(summary, plan), style="red" if summary.refuted else "green")


def _rows(summary: AuditSummary, plan: Plan | None) -> list[tuple[str, str]]:
    audited, percent = summary.audited, f"{100 * summary.confidence:.6g} %"
    mu = "" if audited.curve.mu is None else f"; mu = {audited.curve.mu:.4g}"
    rows = [("claimed", f"epsilon <= {rounded_up(audited.epsilon)} at delta = {audited.delta:g}{mu}")]
    if plan is not None:
        rows += [("order", plan.participation.describe()), ("mechanism", plan.strategy.describe())]
    count, included = len(audited.included), int(audited.included.sum())
    rows.append(("canaries", f"{count}: {included} in, {count - included} out, by secret coins"))
    if audited.mus is not None:
        rows.append(("mu of their steps", f"{_span(audited.mus)}, by the claim"))
    if summary.mu_seen is not None:
        rows.append(("mu seen", f"{summary.mu_seen[0]:.4g} to {summary.mu_seen[1]:.4g} (interval, {percent})"))
    rows.append(("each bound holds", f"in {percent} of all runs, where what it rests on does"))
    label = "epsilon at least"
    for method, bound in summary.bounds.items():
        rows.append((label, f"{rounded_down(bound)}  {method}: {METHODS[method]}"))
        label = ""
    for method, reason in summary.unfit.items():
        rows.append((label, f"none  {method}: {reason}"))
        label = ""
    if summary.known is not None:
        rows += _known_rows(summary.known, percent)
    label = "p-value of claim"
    for test, p in summary.p_values.items():
        rows.append((label, f"{p:.2g}  {_TESTS[test]}"))
        label = ""
    return [*rows, ("verdict", _verdict(summary))]


def _known_rows(known: AuditSummary, percent: str) -> list[tuple[str, str]]:
    audited = known.audited
    canaries = counted(len(audited.included), "canary")
    rows = [("if known", f"epsilon <= {rounded_up(audited.epsilon)}; {canaries}, their steps known")]
    if known.mu_seen is not None and audited.mus is not None:
        seen = f"{known.mu_seen[0]:.4g} to {known.mu_seen[1]:.4g} ({percent})"
        rows.append(("", f"mu seen {seen}, of their steps {_span(audited.mus)}"))
    told = ", ".join(f"{rounded_down(bound)} {method}" for method, bound in known.bounds.items())
    return [*rows, ("", f"epsilon at least {told}")]


def _verdict(summary: AuditSummary) -> str:
    if not summary.refuted and summary.audited.alike is not None:
        return f"not refuted, and {summary.audited.alike}"
    if not summary.refuted:
        return not_refuted(len(summary.above), summary.confidence)
    seen = [p for test, p in summary.p_values.items() if test != LAW]
    if len(summary.p_values) * min(seen) < REFUTED:
        return "REFUTED: of true claims less than one in a million would look like this"
    return "REFUTED: what was added is not the noise of the plan"


def plot_audit(audited: Audited, path: str | Path, title: str | None = None) -> None:
    """Draw the scores of canaries that were in and out, beside the two laws that the claim allows, as a PNG.

        out: N(0, 1)        in: N(mu, 1), the mean over the canaries' own mu

    in units of the noise that is claimed; under "replace-one" N(-mu/2, 1) and N(mu/2, 1). Histograms that lie further
    apart than the lines, or are narrower, are what too small a claim looks like; wider ones are those of canaries which
    disturb each other, or share their coordinates with gradients that the attacker does not know. Under secret sampling
    scores are log likelihood ratios, which have no such law, and no lines are drawn.
    """
    scores = np.asarray(audited.scores) / (audited.noise_std or 1.0)
    figure, axes = new_axes(title or _title(audited))
    laws = _laws(audited)
    edges = _edges(scores, [] if laws is None else [*laws[0], *laws[1]])
    for i, (word, colour, hatch) in enumerate((("out", _OUT, ""), ("in", _IN, "////"))):
        own = scores[audited.included == bool(i)]
        if len(own):
            axes.hist(
                own, edges, density=True, histtype="stepfilled", facecolor=(colour, 0.22), edgecolor=(colour, 0.8),
                linewidth=0.8, hatch=hatch, label=f"seen: {len(own)} canaries that were {word}",
            )  # fmt: skip
    for i, (word, colour, line) in enumerate((("out", _OUT, "--"), ("in", _IN, "-"))):
        if laws is not None:
            grid = np.linspace(edges[0], edges[-1], 600)
            label = f"claimed, {word}: N({_span(laws[i], 3)}, 1)"
            axes.plot(grid, _density(grid, laws[i]), line, color=colour, linewidth=2, label=label)
    told = "log likelihood ratio" if laws is None else "standard deviations of the claimed noise"
    axes.set_xlabel(f"score of a canary ({told})")
    axes.set_ylabel("density")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, path)


def _title(audited: Audited) -> str:
    claim = f"epsilon {rounded_up(audited.epsilon, 3)} at delta {audited.delta:g}"
    return f"scores of {len(audited.scores)} canaries beside the claim of {claim}"


def _laws(audited: Audited) -> tuple[Floats, Floats] | None:
    """Centres of the laws that the claim allows, of canaries that were out and in, in standard deviations."""
    if audited.mus is None:
        return None
    if audited.curve.neighbours == "replace-one":  # out is the opposite canary
        return -audited.mus / 2, audited.mus / 2
    return np.zeros(1), audited.mus


def _span(values: Floats, digits: int = 4) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{high:.{digits}g}" if high - low <= 1e-6 * abs(high) else f"{low:.{digits}g} to {high:.{digits}g}"


def _edges(scores: Floats, centres: Sequence[float]) -> Floats:
    """Edges of bins, over all scores and both laws."""
    low, high = min([*scores, *(c - 3.5 for c in centres)]), max([*scores, *(c + 3.5 for c in centres)])
    width = float(np.clip(3.5 * len(scores) ** (-1 / 3), 0.05, 1.0))  # Scott's rule, for a standard deviation of one
    return np.linspace(low, high, min(200, int(np.ceil((high - low) / width))) + 1)


def _density(at: Floats, means: Floats) -> Floats:
    """Of the mixture of unit Gaussians at these means, each distinct one once."""
    centres, counts = np.unique(means, return_counts=True)
    total = np.zeros_like(at)
    for centre, count in zip(centres, counts, strict=True):
        total += count * np.exp(-0.5 * (at - centre) ** 2)
    return np.asarray(total / (len(means) * np.sqrt(2 * np.pi)))
