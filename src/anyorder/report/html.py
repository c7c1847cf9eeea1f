"""The report of a run: one page in one file, a pure function of what may be shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import assert_never

from anyorder.budget.claim import SearchCertificate
from anyorder.formatting import counted, one_of, rounded_down, rounded_up
from anyorder.plan.certificate import Certificate, Verification
from anyorder.plan.cost import is_large
from anyorder.plan.plan import CANDIDATE, Plan
from anyorder.report.charts import accuracy_figure, curve_figure, figures, noise_figure, order_figure
from anyorder.report.markup import Html, document, join, tag
from anyorder.report.searches import search_verdict
from anyorder.report.verification import verdict
from anyorder.report.words import MEANS, assumptions, best_guess, limits, whom

__all__ = ["Attacked", "Shown", "html_refusal", "html_report"]


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What an audit of a run of the same plan found, which did not refute the claim.

    Attributes:
        canaries: gradients that were in or out by secret coins.
        p_value: of the claim.
        at_least: the largest lower bound on epsilon, at the audit's own delta; None where it gave none.
        claimed: the plan's epsilon at that delta; None where that is the plan's own.
        confidence: of the bound.
    """

    canaries: int
    p_value: float
    at_least: float | None = None
    claimed: float | None = None
    confidence: float = 0.95


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is public of a run beside its certificate; all of it may be left out.

    Attributes:
        title: of the page.
        training: (name, text): settings of the training.
        accuracy: (epochs or rounds done, fraction of a public test set that is right).
        label: what accuracy is counted by, "epoch" or "round".
        score: (name, text) of other results on public test rows.
        audit: of a run of the same plan.
        budget: id of the budget that the run was entered in.
        notes: what was found in the folder and is not shown, each in a sentence.
    """

    title: str = ""
    training: tuple[tuple[str, str], ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()
    label: str = "epoch"
    score: tuple[tuple[str, str], ...] = ()
    audit: Attacked | None = None
    budget: str | None = None
    notes: tuple[str, ...] = ()


def html_report(claim: Plan | Certificate | SearchCertificate, shown: Shown | None = None) -> str:
    """The report of a run, a plan or a search as a page of HTML in one text: no script, nothing from elsewhere.

    It says what is promised to whom, what that rests on, how to check it, and draws noise, order and curve. All text
    is escaped. A function of its arguments alone: the same bytes for the same claim.

    Args:
        claim: `Certificate.load(path)`, or what `engine.certificate()` gave: their numbers were recomputed.
        shown: public results and settings to show beside it.
    Returns: the text of a file, below 60 kB; no key, seed, path, name of a machine, time, count or id of a unit is in
        it, but what the certificate itself holds.
    Cost: about half a second for 1000 steps.
    """
    shown = shown or Shown()
    match claim:
        case Plan() | Certificate():
            return _run_page(claim, shown)
        case SearchCertificate():
            return _search_page(claim, shown)
        case _:
            assert_never(claim)


def html_refusal(problem: str, shown: Shown | None = None, *, unread: bool = False) -> str:
    """The report of what was not verified: a page that says so in red, why, and no claim.

    Args:
        problem: the first thing that does not hold.
        unread: whether that is no more than what the file asks for, which is more than a stranger's is given.
    """
    title = (shown or Shown()).title or "A file that claims privacy"
    if unread:
        head, what = "NOT CHECKED. Do not rely on this file yet.", "Why"
        told = "Nothing in it is known to be wrong, and it was not checked to its end, so no promise is shown here."
        todo = ["If you trust where the file comes from, make the report again with --large, and check it with it."]
    else:
        head, what = "NOT VERIFIED. Do not rely on this file.", "What did not hold"
        told = "What it claims did not pass its checks, so no promise is shown here."
        todo = [
            "Ask whoever gave you the file for the one that the run wrote: a file that was damaged or edited fails.",
            "If an audit refuted the claim, the noise was not what the plan says: do not publish the model.",
        ]
    box = tag("div", tag("p", tag("strong", head)), tag("p", told), class_="banner bad", role="alert")
    return document(
        f"{head.split('.')[0]}: {title}", tag("h1", "Privacy report"), box, tag("h2", what), tag("p", problem),
        tag("h2", "What to do"), tag("ul", *map(_item, todo)), _command(large=unread),
    )  # fmt: skip


# -- a run ------------------------------------------------------------------------------------------------------------


def _run_page(claim: Plan | Certificate, shown: Shown) -> str:
    plan = claim.plan if isinstance(claim, Certificate) else claim.public()
    certificate = claim if isinstance(claim, Certificate) else None
    checked, unseen = verdict(Verification(plan, certificate))
    if certificate is not None and certificate.realised is not None:
        unseen.append("how often units came and how far apart, which the realised number follows from")
    title = shown.title or ("A training run" if certificate is not None else "A plan, which has not run")
    drawn = [noise_figure(plan), curve_figure(plan), order_figure(plan)]
    if shown.accuracy:
        drawn.insert(0, accuracy_figure(shown.accuracy, shown.label))
    return document(
        f"Privacy report: {title}",
        tag("h1", "Privacy report"), tag("p", title, class_="soft"), _passed(certificate),
        _searched(plan), _nobody(certificate), _headline(plan, certificate), _notes(shown),
        tag("h2", "Who is protected, and from whom"), _list(whom(plan)),
        tag("h2", "Pictures"), figures(*drawn),
        tag("h2", "The privacy card"), _card(claim.facts() if certificate is not None else plan.facts()),
        _training(shown),
        tag("h2", "What the promise rests on"), tag("ul", *map(_item, assumptions(plan, certificate))),
        tag("h2", "What it does not say"), tag("ul", *map(_item, limits(plan))),
        tag("h2", "Audit"), _audit(shown.audit, plan.epsilon),
        tag("h2", "Budget and search"), _budget(shown),
        *_verifying(checked, unseen, large=is_large(plan.to_dict())), _digests(plan, certificate),
    )  # fmt: skip


def _passed(certificate: Certificate | SearchCertificate | None) -> Html:
    what = "plan" if certificate is None else "certificate"
    told = f"Checked: every number of the {what} was recomputed from what it fixes, and agrees. "
    rest = "That the program really did what the file says, no file can show: see what the promise rests on."
    return tag("div", tag("p", told, rest), class_="banner good")


def _searched(plan: Plan) -> Html:
    if plan.candidate_of is None:
        return Html()
    told = "The number below is of this run by itself: a run that was chosen among others costs more than it says."
    which = f"That certificate names the draws of the search {plan.candidate_of}."
    return tag("div", tag("p", f"This run is {CANDIDATE}. {told} {which}"), class_="banner bad")


def _of_nobody(certificate: Certificate) -> bool:
    return certificate.realised is not None and certificate.realised.says_nobody(certificate.steps)


def _nobody(certificate: Certificate | None) -> Html:
    if certificate is None or not _of_nobody(certificate):
        return Html()
    told = (
        f"The file says that nobody took part in any of {counted(certificate.steps, 'step')}. That is implausible of a "
        "run, and nothing here checks it: no realised epsilon is shown. Rest on the planned one, below. The evidence, "
        "or the receipt of somebody who took part, shows whether it is so."
    )
    return tag("div", tag("p", told), class_="banner bad")


def _headline(plan: Plan, certificate: Certificate | None) -> Html:
    guess = best_guess(plan.epsilon, plan.delta, plan.mu, plan.known_mu)
    number = _promise(plan.epsilon, plan.delta)
    cells = [
        _cell(f"{_percent(guess.right)} %", _right_text(plan.unit, plan.neighbours)),
        _cell(f"{_percent(guess.found)} of 100", f"{plan.unit}s that are found out at most, by somebody who accuses "
              "one of 100 others wrongly"),
    ]  # fmt: skip
    if plan.known_epsilon is not None and plan.known_epsilon > plan.epsilon:
        cells.append(
            _cell(f"epsilon {rounded_up(plan.known_epsilon)}", "what is left if the secret batches became known")
        )
    realised = None if certificate is None or _of_nobody(certificate) else certificate.realised
    if realised is not None and rounded_up(realised.epsilon) != rounded_up(plan.epsilon):
        cells.append(
            _cell(f"epsilon {rounded_up(realised.epsilon)}", f"realised: for how often {plan.unit}s really came, as "
                  "the file says and nothing here checks; it rests on more than the planned number does")
        )  # fmt: skip
    told = f"The promise, for one {plan.unit}: all that came out of this run tells others at most so much about it."
    if certificate is None:
        told = f"What a run of this plan would promise to one {plan.unit}."
    if plan.candidate_of is not None:
        told = f"Of this run by itself, for one {plan.unit}, had no other been looked at. What was spent is above this."
    return tag(
        "section", tag("div", number, class_="number"), tag("p", told),
        tag("p", "Epsilon limits how much more likely any conclusion about it can become: 0 is nothing, up to about 1 "
            "is strong, 8 is common in practice, and far above 10 little is promised by the number alone. Delta, here "
            f"1 in {1 / plan.delta:,.0f}, is the small chance that this limit is left out of.", class_="small soft"),
        tag("div", *cells, class_="cells"), class_="headline",
    )  # fmt: skip


def _training(shown: Shown) -> Html:
    rows = [*shown.score, *shown.training]
    if not rows:
        return Html()
    note = tag("p", "From the run's own metrics file, which the certificate does not cover.", class_="small soft")
    return join(tag("h2", "The training"), note, _list([(name, [text]) for name, text in rows]))


def _audit(found: Attacked | None, claimed: float) -> Html:
    if found is None:
        return tag(
            "p", "No audit is kept here. An audit attacks a run of the same plan with planted gradients, and sees "
            "whether the claim can be refuted: ", tag("code", "anyorder audit run FOLDER --out AUDIT"),
            ", then copy its ", tag("code", "audit.json"), " into the folder of the run and make the report again.",
        )  # fmt: skip
    told = "the attack saw nothing that the claim excludes. That is no proof of the claim."
    own = claimed if found.claimed is None else found.claimed
    if found.at_least is not None and found.at_least > own:
        told = (
            f"but it saw more than the claim, as up to one true claim of {one_of(found.confidence)} has it: audit "
            "again, with more canaries."
        )
    rows = [
        ("Verdict", [f"Not refuted: {told}"]),
        ("Attack", [f"{counted(found.canaries, 'planted gradient')}, each in or out by a secret coin"]),
        ("p-value of the claim", [f"{found.p_value:.2g}"]),
    ]
    if found.at_least is not None:
        rows.append(("Seen", [f"epsilon of at least {rounded_down(found.at_least, 3)}, at the audit's own delta"]))
    note = "By the audit's own file, which nobody signed; it may be of another run of the same plan."
    return join(_list(rows), tag("p", note, class_="small soft"))


def _budget(shown: Shown) -> Html:
    if shown.budget is None:
        return tag(
            "p", "No budget is named in the folder. Other runs on the same data, a search for settings among them, add "
            "to what is promised here: keep one budget for a data set (", tag("code", "anyorder budget"), ").",
        )  # fmt: skip
    return tag(
        "p", "The run was entered in a budget of its data set before its first step, as the folder says. Budget id: ",
        tag("code", shown.budget),
    )  # fmt: skip


def _digests(plan: Plan, certificate: Certificate | None) -> Html:
    rows = [("plan", [plan.digest, "names the plan; an audit of the same plan has it too"])]
    if certificate is not None:
        rows += [
            ("noise key", [certificate.key_fingerprint, "a fingerprint that leads to no key; no two runs share it"]),
            ("record", [certificate.record_digest, "who took part when, under a key that only the owner has: it tells "
                        "nothing, and holds the owner to one record"]),
            ("receipts", [certificate.receipt_root, "what each unit's own receipt leads to"]),
        ]  # fmt: skip
    listed = [(name, [tag("code", digest), tag("span", told, class_="small soft")]) for name, (digest, told) in rows]
    return join(tag("h2", "Digests"), _list(listed))


# -- a search ---------------------------------------------------------------------------------------------------------


def _search_page(found: SearchCertificate, shown: Shown) -> str:
    checked, unseen = search_verdict(found)
    unit, delta = found.claim.unit, found.claim.delta
    guess = best_guess(found.epsilon, delta, None)
    best = found.best
    cells = [_cell(f"{_percent(guess.right)} %", _right_text(unit, found.claim.neighbours))]
    if best is not None:
        cells.append(_cell(f"epsilon {rounded_up(best.plan.epsilon)}", "the chosen run by itself: it was chosen by "
                           "what came out, so this is no promise"))  # fmt: skip
    headline = tag(
        "section", tag("div", _promise(found.epsilon, delta), class_="number"),
        tag("p", f"The promise, for one {unit}, of the whole search: all that it shows, together."),
        tag("div", *cells, class_="cells"), class_="headline",
    )  # fmt: skip
    body: list[str] = []
    if best is not None:
        body = [
            tag("h2", "Who is protected, and from whom"), _list(whom(best.plan, searched=True)),
            tag("h2", "Pictures of the chosen run"), figures(noise_figure(best.plan), order_figure(best.plan)),
            tag("h2", "What the promise rests on"), tag("ul", *map(_item, assumptions(best.plan, None))),
            tag("h2", "What it does not say"), tag("ul", *map(_item, limits(best.plan))),
        ]  # fmt: skip
    digests = _digests(best.plan, best) if best is not None else Html()
    own = _list([("draws of the search", [tag("code", found.key_fingerprint)])])
    return document(
        "Privacy report: a search for settings",
        tag("h1", "Privacy report"), tag("p", shown.title or "A search for settings", class_="soft"), _passed(found),
        headline, _notes(shown), tag("h2", "The card of the search"), _card(found.facts()), *body,
        *_verifying(checked, unseen, "search.privacy.json", large=found.is_large), digests, own,
    )  # fmt: skip


# -- parts ------------------------------------------------------------------------------------------------------------


def _verifying(checked: list[str], unseen: list[str], name: str = "run.privacy.json", *, large: bool) -> list[Html]:
    head = tag("tr", tag("th", "what"), tag("th", "outcome"))
    rows = [tag("tr", tag("td", text), tag("td", "holds")) for text in checked]
    rows += [tag("tr", tag("td", text), tag("td", "not checked: no file shows it, or it needs one that is not public"))
             for text in unseen]  # fmt: skip
    return [
        tag("h2", "How to check it yourself"),
        _command(name, large),
        tag("table", tag("thead", head), tag("tbody", *rows)),
    ]


def _command(name: str = "run.privacy.json", large: bool = False) -> Html:
    option = " --large" if large else ""
    told = (
        "--large is there because this claim takes more time to recompute than a stranger's file is given: pass it if "
        "you trust where the file comes from."
    )
    return join(
        tag("p", "Whoever has the file needs nothing else: no data, no model, no key, no network."),
        tag("pre", join("pip install 'anyorder[cli]'", f"anyorder verify{option} {name}", between="\n")),
        tag("p", told) if large else Html(),
        tag("p", "It recomputes every claim from the file. Expected: the last line begins with ",
            tag("code", "verified:"), " and the exit code is 0; anything else is a reason not to rely on the file. ",
            tag("code", f"anyorder report{option} FOLDER"), " makes this page again, byte for byte."),
    )  # fmt: skip


def _card(facts: list[tuple[str, str]]) -> Html:
    return _list([(name, [text, tag("span", MEANS.get(name, ""), class_="small soft")]) for name, text in facts])


def _notes(shown: Shown) -> Html:
    return join(*(tag("div", tag("p", note), class_="banner bad") for note in shown.notes))


def _list(rows: Sequence[tuple[str, Sequence[str]]]) -> Html:
    return tag("dl", *(join(tag("dt", name), tag("dd", *(tag("p", text) for text in texts))) for name, texts in rows))


def _item(text: str) -> Html:
    return tag("li", text)


def _promise(epsilon: float, delta: float) -> Html:
    parts = (f"epsilon ≤ {rounded_up(epsilon)}", f"at delta {delta:g}")
    return join(*(tag("span", part, class_="whole") for part in parts), between=" ")


def _cell(number: str, told: str) -> Html:
    return tag("div", tag("b", number), tag("span", told, class_="small"), class_="cell")


def _right_text(unit: str, neighbours: str) -> str:
    about = "which of two things its data was" if neighbours == "replace-one" else "whether it was used"
    return (
        f"how often the best guesser is right about one {unit}, {about}, where a coin decided (50 % is blind guessing)"
    )


def _percent(share: float) -> str:
    """A share in percent, three digits, rounded up: an attack is never shown weaker than it may be."""
    percent = 100 * share
    digits = 1 if percent < 99.9 else 3
    return f"{min(100.0, ceil(percent * 10**digits - 1e-9) / 10**digits):g}"
