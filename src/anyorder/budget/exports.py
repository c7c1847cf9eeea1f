"""What a budget says of itself in two public forms: a registry of deployments, and a guide to evaluating them.

`opendp`: a record with the fields of the OpenDP deployments registry (opendp/deployments-registry-data, schema of July
2026). JSON, which is YAML too. What only the owner knows is empty, or what that registry's own template has where it
allows nothing empty; `administrative.notes` lists these fields. `nist`: answers to what NIST SP 800-226 ("Guidelines
for Evaluating Differential Privacy Guarantees", 2025) asks one to look at, layer by layer, with questions in our words.
Both are made from entries alone, which are public.
"""

import json
from typing import Any

from anyorder._words import counted
from anyorder.accounting.curves import Amplified, BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.budget import laws
from anyorder.budget.account import Held, Remaining
from anyorder.budget.entries import read_curve
from anyorder.budget.file import Budget
from anyorder.errors import ArgumentError

__all__ = ["FORMATS", "export", "nist", "opendp"]

FORMATS = ("nist", "opendp")
_ADJACENT = {
    "zero-out": "two data sets that differ in one {0}, all of whose contributions are replaced by zero in the other",
    "replace-one": "two data sets that differ in one {0}, replaced by any other in the same steps",
    "add-or-remove": "two data sets of which one has one {0} more",
}
_RULES = {
    "gaussian": "fully adaptive composition of Gaussian DP: the sum of mu^2 over all releases, held below that of "
    "the limit by a privacy filter (Smith and Thakurta 2022); exact",
    "renyi": "a Renyi filter at one order that was fixed beforehand (Feldman and Zrnic 2021)",
    "planned": "composition of privacy loss distributions of releases that were all chosen in advance",
}
_BLANK = [
    "basic.name", "basic.data_curators", "basic.intended_use", "basic.data_product_type", "basic.data_product_region",
    "basic.description", "basic.publication_date", "dp_variant.data_domain", "dp_variant.unprotected_quantities",
    "deployment_model.actors", "deployment_model.data_source_type_details", "deployment_model.access_type_details",
    "accounting.post_processing", "implementation.preprocessing_and_hyperparameter_tuning",
    "implementation.justification", "administrative.sources", "administrative.registry_authors",
]  # fmt: skip
"""What only the owner knows."""


def export(budget: Budget, format: str) -> str:
    """The text of an export. Raises: ArgumentError for another format than those of `FORMATS`; BudgetError."""
    match format:
        case "opendp":
            made = opendp(budget)
        case "nist":
            made = nist(budget)
        case _:
            raise ArgumentError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    return json.dumps(made, indent=1, allow_nan=False)


def opendp(budget: Budget) -> dict[str, Any]:
    """A record of the deployments registry, of its third tier, as a draft that the owner completes."""
    facts = _Facts(budget)
    return {
        "url_slug": "",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": "", "data_curators": [""], "intended_use": "", "data_product_type": "Machine learning model",
                "data_product_region": "", "description": "", "publication_date": "1900-01-01",
            },
            "dp_variant": {"variant_name": "Approximate DP", "data_domain": "", "unprotected_quantities": ""},
            "privacy_loss": {
                "privacy_unit": facts.unit,
                "privacy_unit_details": facts.adjacent,
                "privacy_parameters": {"epsilon": facts.left.spent, "delta": facts.left.delta},
                "privacy_parameters_details": facts.parameters,
            },
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": facts.trust,
                "actors": "",
                "release_type": "One release" if len(facts.entries) == 1 else "Many releases",
                "release_type_details": facts.releases,
                "data_source_type": "Static",
                "data_source_type_details": "",
                "access_type": "Non-interactive",
                "access_type_details": "",
            },
            "accounting": {"post_processing": "", "composition": facts.composition},
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": "",
                "mechanisms": facts.mechanisms,
                "justification": "",
            },
            "administrative": {
                "sources": "",
                "notes": f"Made from the entries of a budget file. To be filled in by the owner: {', '.join(_BLANK)}.",
                "registry_authors": [""],
            },
        },
    }  # fmt: skip


def nist(budget: Budget) -> dict[str, Any]:
    """Questions under the layers of the guide's pyramid, from its top, and what the entries answer; "" for none."""
    facts = _Facts(budget)
    asked = [
        ("privacy parameters", "Which definition of differential privacy holds?", "(epsilon, delta)-DP"),
        ("privacy parameters", "What is epsilon, for all releases together?", facts.left.spent),
        ("privacy parameters", "What is delta?", facts.left.delta),
        ("privacy parameters", "What is the most that epsilon may become?", facts.left.limit),
        ("privacy parameters", "What else is known of the loss?", facts.parameters),
        ("unit of privacy", "Whom or what does one unit stand for?", facts.unit),
        ("unit of privacy", "When are two data sets neighbours?", facts.adjacent),
        ("unit of privacy", "Are the contributions of one unit bounded, and how?", facts.bounded),
        ("algorithms", "Which mechanisms add the noise?", facts.mechanisms),
        ("algorithms", "How do several releases compose?", facts.composition),
        ("algorithms", "How many releases are there?", facts.releases),
        ("algorithms", "Is tuning of settings counted?", facts.tuning),
        ("implementation", "What is done against leaks through floating-point arithmetic?", facts.arithmetic),
        ("implementation", "What is done against leaks through timing and other side channels?", ""),
        ("trust model", "Whom must one trust with the data?", facts.trust),
        ("trust model", "Who may query, and how is the budget shared among them?", ""),
        ("utility and bias", "How accurate are the results, and for whom are they less so?", ""),
        ("security", "Who has access to the data, keys and records of participation?", ""),
        ("data collection", "How are the data collected, and how long are they kept?", ""),
    ]  # fmt: skip
    return {
        "guide": "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "budget": budget.id,
        "answers": [{"layer": layer, "question": question, "answer": answer} for layer, question, answer in asked],
    }


class _Facts:
    """Sentences and numbers that both forms need."""

    def __init__(self, budget: Budget) -> None:
        self.left: Remaining = budget.remaining()
        self.entries: list[Held] = budget.entries()
        first = self.entries[0] if self.entries else None
        self.unit = "" if first is None else first.curve.unit
        relation = "" if first is None else str(first.spend.about["neighbours"])
        self.adjacent = _ADJACENT[relation].format(self.unit) if relation else ""
        self.composition = _RULES[self.left.rule]
        self.mechanisms = "; ".join(f"{held.spend.number}. {_mechanism(held)}" for held in self.entries)
        self.releases = "; ".join(_release(held) for held in self.entries)
        self.bounded = "; ".join(sorted({
            f"a part in a step to L2 norm {held.spend.about['clip_norm']:g}, {held.spend.about['order']}"
            for held in self.entries if held.spend.plan is not None
        }))  # fmt: skip

    @property
    def parameters(self) -> str:
        """What is known beside epsilon and delta."""
        told = f"limit epsilon {self.left.limit:g} at the same delta"
        if self.left.rule == "gaussian" and self.entries:
            told += "; the loss is that of Gaussian DP, from which epsilon follows at every delta"
        if any(held.rows is not None for held in self.entries):
            told += "; summed unit by unit where orders were known, and said of the unit that has most"
        return told

    @property
    def trust(self) -> str:
        """Who sees what."""
        devices = sorted({one for held in self.entries for one in held.spend.about.get("on_device", [])})
        alone = f"; trusted to the users' devices: {', '.join(devices)}" if devices else ""
        return f"the curator holds the data and adds the noise before anything is released{alone}"

    @property
    def arithmetic(self) -> str:
        """Exact integers, or not."""
        exact = [held.spend.about.get("exact_integers") for held in self.entries if held.spend.plan is not None]
        if not exact:
            return ""
        if all(exact):
            return "noise in exact integers"
        return "noise in floating point" + (" in some releases, in exact integers in others" if any(exact) else "")

    @property
    def tuning(self) -> str:
        """Searches among the entries."""
        searches = sum(held.spend.what == "search" for held in self.entries)
        return f"{searches} of {len(self.entries)} entries are searches, counted as a whole" if searches else ""


def _mechanism(held: Held) -> str:
    about = held.spend.about
    noise = _law(read_curve(held.spend.parts))
    if held.spend.search is not None:
        return f"{laws.from_dict(held.spend.search).describe()}, each with: {noise}"
    if held.spend.plan is None:
        return noise
    std, steps = about["noise_multiplier"], about["steps"]
    return f"{noise}, as {about['mechanism']}, noise of std {std:.6g} clip norms over {counted(steps, 'step')}"


def _law(curve: Curve) -> str:
    match curve:
        case Gaussian():
            return f"Gaussian mechanism with mu = {curve.mu:.6g}"
        case BoundedRange():
            return f"{curve.draws} draws of the exponential mechanism with range {curve.e0:.6g}"
        case Sampled():
            sample = f"each on a secret sample at rate {curve.sampling_probability:.6g}"
            return f"{curve.n} Gaussian mechanisms with noise multiplier {curve.sigma:.6g}, {sample}"
        case Amplified():
            order = curve.participation.describe()
            noise = f"noise multiplier {curve.noise_multiplier:.6g}"
            return f"matrix mechanism {curve.strategy.describe()} with {noise}, {order}"
        case Composed():
            return " with ".join(_law(part) for part in curve.parts)


def _release(held: Held) -> str:
    spend, settled = held.spend, held.settled
    name = f" ({spend.name})" if spend.name else ""
    stopped = "" if settled is None else f", over after {counted(settled.steps, 'step')}"
    return f"{spend.number}. {spend.what}{name}, {spend.time[:10]}{stopped}"
