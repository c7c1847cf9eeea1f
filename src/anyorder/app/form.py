"""What makes a report a form to sign: how strong the promise is, particulars, NIST's questions, signature lines."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Literal

from anyorder import __version__, checks
from anyorder.accounting.gaussian import gdp_mu
from anyorder.accounting.risk import Reach, gaussian_tpr
from anyorder.app.charts import Html, join, tag
from anyorder.errors import ArgumentError
from anyorder.formatting import counted, rounded_up
from anyorder.plan.certificate import Certificate
from anyorder.plan.plan import Plan, number_of_units

_LONGEST = 300  # characters of what an owner states


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the owner states on the page, and no file holds; a line to fill in by hand where it is left out.

    Attributes:
        owner: who answers for data and training.
        purpose: what the model is for.
        data_set: the data's name.
        prepared: by whom, and when; no clock is read.
        units: how many privacy units there are, where the file does not say it.
    """

    owner: str = ""
    purpose: str = ""
    data_set: str = ""
    prepared: str = ""
    units: int | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "units":
                if value is not None:
                    checks.integer("units", value, low=1)
            elif not isinstance(value, str) or len(value) > _LONGEST:
                raise ArgumentError(f"{one.name} must be a text of at most {_LONGEST} characters, got {value!r:.60}")


# -- how strong a promise is -----------------------------------------------------------------------------------------

Level = Literal["green", "amber", "red"]
_ORDER: tuple[Level, ...] = ("green", "amber", "red")
_WORDS = {
    "green": "STRONG PROMISE (green)", "amber": "MODERATE PROMISE (amber)", "red": "WEAK PROMISE (red)",
}  # fmt: skip
_MEANS = {
    "green": "Even the strongest attacker finds few people, and delta is small for this number of them.",
    "amber": "Sign only if you accept what the lines below allow.",
    "red": "Do not rely on this promise alone. It allows almost everything.",
}
_CLASSES = {"green": "good", "amber": "mid", "red": "bad"}
FOUND = (0.1, 0.5)
"""Shares of units that are found at a false positive rate of 1 %: green up to the first, amber up to the second."""
LEFT_OUT = (0.1, 1.0)
"""delta times the number of units: green up to the first, red from the second."""


@dataclass(frozen=True)
class Strength:
    """How strong a promise is.

    Attributes:
        level: the worst of all marks.
        marks: (level, what was looked at, what was found).
    """

    marks: tuple[tuple[Level, str, str], ...]

    @property
    def level(self) -> Level:
        """The worst of all marks."""
        return max((mark for mark, _, _ in self.marks), key=_ORDER.index)


def strength_of(claim: Plan | Certificate, units: int | None) -> Strength:
    """Of a run, or of a plan that has not run."""
    plan = claim.plan if isinstance(claim, Certificate) else claim
    made = strength(claim.reach, plan.delta, units, plan.unit)
    marks = list(made.marks)
    if plan.known_mu is not None and plan.known_epsilon is not None and plan.known_epsilon > plan.epsilon:
        known = _level(gaussian_tpr(plan.known_mu, 0.01), FOUND)
        if _ORDER.index(known) > _ORDER.index(made.level):
            found = f"{percent(gaussian_tpr(plan.known_mu, 0.01))} of 100 would be found if the batches became known"
            marks.append(("amber", "Secret draws", f"The promise rests on them: {found}."))
    if plan.candidate_of is not None:
        marks.append(("red", "Search", "This run was chosen from several, and its number does not count the others."))
    return Strength(tuple(marks))


def strength(reach: Reach, delta: float, units: int | None, unit: str) -> Strength:
    """By how many an attacker finds, and how many delta leaves out."""
    attack = (
        f"The strongest attacker finds at most {percent(reach.found)} of 100 {unit}s, if it accuses 1 of 100 wrongly."
    )
    return Strength(((_level(reach.found, FOUND), "Attack", attack), _mark_of_delta(delta, units, unit)))


def _mark_of_delta(delta: float, units: int | None, unit: str) -> tuple[Level, str, str]:
    if units is None:
        told = f"Whether {rounded_up(delta, 6)} is small enough is not known: "
        told += f"the file does not say how many {unit}s there are."
        return "amber", "Delta", told
    left = delta * units
    told = f"{rounded_up(delta, 6)} times {counted(units, unit)} is {rounded_up(left, 3)}"
    if left >= LEFT_OUT[1] * (1 - 1e-9):
        return "red", "Delta", f"{told}: a program that publishes one {unit}, drawn by lot, keeps this promise."
    return _level(left, LEFT_OUT), "Delta", f"{told}."


def level_of(epsilon: float, delta: float) -> Level:
    """The mark of the Gaussian mechanism that has this pair, by what an attacker finds: a colour, and no bound."""
    return "red" if epsilon > 700 else _level(gaussian_tpr(gdp_mu(epsilon, delta), 0.01), FOUND)


def _level(value: float, ends: tuple[float, float]) -> Level:
    """By two ends, which belong to the better side up to the rounding of floats: 0.1 / n times n is 0.1."""
    near = 1 + 1e-9
    return "green" if value <= ends[0] * near else "amber" if value <= ends[1] * near else "red"


def percent(share: float) -> str:
    """A share in percent, three digits, rounded up: an attack is never shown weaker than it may be."""
    value = 100 * share
    digits = 1 if value < 99.9 else 3
    return f"{min(100.0, ceil(value * 10**digits - 1e-9) / 10**digits):g}"


def strength_box(found: Strength, ran: bool) -> Html:
    """The mark in colour and in words, with what it follows from."""
    rows = [
        tag("tr", tag("th", name), tag("td", told), tag("td", mark, class_=f"mark {_CLASSES[mark]}"))
        for mark, name, told in found.marks
    ]
    ends = (
        f"Attack: green up to {percent(FOUND[0])} of 100, red above {percent(FOUND[1])}. Delta times the number of "
        f"units: green up to {LEFT_OUT[0]:g}, red from {LEFT_OUT[1]:g}. The worse mark counts."
    )
    return tag(
        "div", tag("p", tag("strong", f"How strong: {_WORDS[found.level]}")),
        tag("p", _MEANS[found.level], "" if ran else " This is what a run of the plan would promise."),
        tag("table", *rows), tag("p", ends, class_="small"), class_=f"banner {_CLASSES[found.level]}",
    )  # fmt: skip


# -- particulars and signatures --------------------------------------------------------------------------------------


def counted_units(plan: Plan | None, form: Form) -> int | None:
    """The number of privacy units, from the file or else from the owner. Raises: ArgumentError where they differ."""
    known = None if plan is None else number_of_units(plan.participation, plan.dataset_size)
    if known is not None and form.units is not None and form.units != known:
        raise ArgumentError(f"units must be {known}, as the file says, or left out, got {form.units}")
    return form.units if known is None else known


def particulars(unit: str, plan: Plan | None, steps: str, of: str, form: Form) -> Html:
    """The head of the form: what it is about, who answers for it, and when.

    Args:
        steps: what was done, in words.
        of: the format of the file.
    """
    units = counted_units(plan, form)
    whose = "as the owner states" if form.units is not None else "by the file"
    rows = [
        ("Data set", form.data_set), (f"Number of {unit}s", "" if units is None else f"{units} ({whose})"),
        ("Privacy unit", f"one {unit}"), ("Purpose", form.purpose), ("Owner", form.owner),
        ("Prepared by, on", form.prepared), ("Trained, from and to", ""), ("What was done", steps),
        ("Versions", f"anyorder {__version__} made this page; the file has the format {of}"),
    ]  # fmt: skip
    told = "The owner states data set, purpose and owner. No file shows them. Fill in empty lines by hand."
    return join(
        tag("h2", "What this report is about"),
        tag("dl", *(join(tag("dt", name), tag("dd", answer(text))) for name, text in rows)),
        tag("p", told, class_="small soft"),
    )


def answer(text: str) -> Html:
    """A text, or a line to fill in where there is none."""
    return tag("p", text) if text else tag("p", class_="fill")


def signatures() -> Html:
    """The decision, and who takes it."""
    lines = ("Name", "Role", "Date", "Signature")
    people = [
        tag("div", tag("h3", who), tag("dl", *(join(tag("dt", line), tag("dd", answer(""))) for line in lines)))
        for who in ("For the owner", "Data protection officer")
    ]
    choices = [
        tag("p", f"☐ {choice}")
        for choice in ("The model may be released.", "It may be released on these conditions:", "It is not released.")
    ]
    told = (
        "By signing, the owner states that everything under 'What the promise rests on' is true, and that the "
        "questions left to the owner are answered above, or in a document that is named there."
    )
    return tag(
        "section", tag("h2", "Decision"), *choices, answer(""), answer(""), tag("p", told),
        tag("div", *people, class_="cells"), class_="sign",
    )  # fmt: skip


# -- what NIST SP 800-226 asks for -----------------------------------------------------------------------------------

Question = tuple[str, str, str]
"""Subject of the guide, question in our words, answer; "" where it is left to the owner."""


def questions(claim: Plan | Certificate, units: int | None, utility: str, audit: str, budget: str) -> list[Question]:
    """What the guide asks to look at, from the top of its pyramid to the bottom, and what a run answers.

    Args:
        utility: how good the model is, as far as it is public; "" where it is not known.
        audit: of an attack on the run; "" for none.
        budget: of other releases on the same data; "" where nothing says it.
    """
    plan = claim.plan if isinstance(claim, Certificate) else claim
    mu = claim.curve.mu if isinstance(claim, Certificate) else claim.mu
    exactly = "" if mu is None else f", and exactly Gaussian DP with mu = {rounded_up(mu)} (see: for an attacker)"
    small = strength(claim.reach, plan.delta, units, plan.unit)
    chosen = "Settings were chosen by a search. Its own certificate says what that cost." if plan.candidate_of else ""
    exact = plan.grid is not None
    devices = f", but for what devices do: {', '.join(plan.on_device)}" if plan.on_device else ""
    return [
        ("Privacy parameters", "Which definition holds?", f"(epsilon, delta)-DP{exactly}."),
        ("Privacy parameters", "What are epsilon and delta?",
         f"Epsilon {rounded_up(claim.epsilon)} at delta {rounded_up(plan.delta, 6)}."),
        ("Privacy parameters", "What does that mean in practice?", small.marks[0][2]),
        ("Privacy parameters", "Is delta small for this many units?", small.marks[1][2] if units is not None else ""),
        ("Unit of privacy", "Whose data counts as one?", f"One {plan.unit}. See: who is protected."),
        ("Unit of privacy", "Is that one person, with everything about them?",
         "One example is protected. What is left for a person with several: see the table above. In how many examples "
         "one person can be, at most, the owner says:" if plan.unit == "example" else
         f"All data of one {plan.unit}. That one {plan.unit} is one identity, the owner states."),
        ("Unit of privacy", "When are two data sets neighbours (bounded or unbounded)?",
         f"{_RELATIONS[plan.neighbours]} See: what is compared."),
        ("Unit of privacy", "Is the contribution of one unit bounded?",
         f"Clipped to L2 norm {plan.clip_norm:g} in a step; {plan.participation.describe()}."),
        ("Algorithms and correctness", "Which mechanism adds the noise?", f"Gaussian: {plan.strategy.describe()}."),
        ("Algorithms and correctness", "Do several releases compose?",
         f"Yes: all {counted(plan.n, 'step')} of the run are counted together, with every model along the way."),
        ("Algorithms and correctness", "What else is released from the same data?", budget),
        ("Algorithms and correctness", "Was the choice of settings counted?", chosen),
        ("Algorithms and correctness", "Was the program tested or audited?", audit),
        ("Utility", "How good are the results, and for what?", utility),
        ("Bias", "For which groups are they worse?", ""),
        ("Access control", "Who can reach the data, the noise key and the record of who took part?", ""),
        ("Trust models", "Who must be trusted with the data?",
         f"Central model: the party that runs the training sees the data{devices}."),
        ("Side channels", "Can rounding of numbers leak?", "No: noise and sums are exact integers." if exact else
         "Not covered: the proof treats floating-point noise as real numbers."),
        ("Side channels", "Can timing, logs or memory leak?",
         "Epsilon does not cover this. Who can watch the training, the owner says:"),
        ("Data collection exposure", "How are the data collected, kept and deleted?", ""),
    ]  # fmt: skip


_RELATIONS = {
    "zero-out": "One unit's contributions are there, or replaced by zero; the batches stay as they are.",
    "replace-one": "One unit's data is replaced by any other (bounded).",
    "add-or-remove": "One unit is there or not (unbounded).",
}


def nist_table(asked: Sequence[Question]) -> Html:
    """The questions, each with its answer or a line to fill in."""
    rows: list[Html] = []
    for i, (subject, question, text) in enumerate(asked):
        if i == 0 or asked[i - 1][0] != subject:
            rows.append(tag("tr", tag("th", subject, colspan=2, scope="rowgroup")))
        rows.append(tag("tr", tag("td", question), tag("td", _told(text))))
    left = sum(not text or text.endswith(":") for _, _, text in asked)
    told = (
        "NIST Special Publication 800-226, Guidelines for Evaluating Differential Privacy Guarantees (2025), names "
        f"these subjects. The questions are in our words. The owner must answer {left} of {len(asked)}, wholly or in "
        "part."
    )
    return join(
        tag("h2", "What NIST SP 800-226 asks for"), tag("p", told),
        tag("table", *rows, class_="nist"),
    )  # fmt: skip


def _told(text: str) -> Html:
    if text.endswith(":"):
        return join(text, answer(""))
    return join(text) if text else join("Left to the owner:", answer(""))
