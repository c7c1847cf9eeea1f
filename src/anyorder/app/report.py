"""The report of a run: one page in one file, read from public files alone, so that anybody makes the same."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, assert_never

from anyorder.accounting.curves import Curve
from anyorder.accounting.gaussian import gdp_epsilon
from anyorder.accounting.risk import RATES, Reach, gaussian_tpr, point_reach
from anyorder.app import folder
from anyorder.app.cards import MEANS, assumptions, limits, search_verdict, verdict, whom
from anyorder.app.charts import (
    Html,
    accuracy_figure,
    curve_figure,
    document,
    figures,
    join,
    noise_figure,
    order_figure,
    tag,
)
from anyorder.app.form import (
    Form,
    Question,
    counted_units,
    nist_table,
    particulars,
    percent,
    questions,
    signatures,
    strength,
    strength_box,
    strength_of,
)
from anyorder.audit.result import REFUTED
from anyorder.budget.claim import FORMAT as SEARCH_FORMAT
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search import BEST, REPORT, SHOWN, hide_times
from anyorder.budget.search import CERTIFICATE as SEARCH
from anyorder.errors import ArgumentError, CertificateError, LimitError
from anyorder.formats import brief, load_json, mentions, printable, read_json, save_json
from anyorder.formatting import counted, one_of, rounded_down, rounded_up
from anyorder.plan.certificate import FORMAT as RUN_FORMAT
from anyorder.plan.certificate import Certificate, Verification, verify
from anyorder.plan.cost import is_large
from anyorder.plan.plan import CANDIDATE, Plan, check_claims
from anyorder.plan.plan import FORMAT as PLAN_FORMAT

# ----------------------------------------------------------------------------------------------------
# The report of a run: one page in one file, a pure function of what may be shown.


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """What an audit of a run of the same plan found, which did not refute the claim.

    Attributes:
        canaries: gradients that were in or out by secret draws.
        p_value: of the claim.
        at_least: the largest lower bound on epsilon, at the audit's own delta; None where it gave none.
        claimed: the plan's epsilon at that delta; None where that is the plan's own.
        confidence: of the bound.
        attack: (FPR, TPR) of an attack on its canaries; None where it has none.
    """

    canaries: int
    p_value: float
    at_least: float | None = None
    claimed: float | None = None
    confidence: float = 0.95
    attack: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is public of a run in addition to its certificate; all of it may be left out.

    Attributes:
        title: of the page.
        training: (name, text): settings of the training.
        accuracy: (epochs or rounds done, fraction of a public test set that is right).
        label: what accuracy is counted by, "epoch" or "round".
        score: (name, text) of other results on public test rows.
        audit: of a run of the same plan.
        budget: id of the budget that the run was entered in.
        notes: what was found in the folder and is not shown, each in a sentence.
        form: what the owner states.
        sha256: what the file of the claim says of itself, checked.
    """

    title: str = ""
    training: tuple[tuple[str, str], ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()
    label: str = "epoch"
    score: tuple[tuple[str, str], ...] = ()
    audit: Attacked | None = None
    budget: str | None = None
    notes: tuple[str, ...] = ()
    form: Form = field(default_factory=Form)
    sha256: str = ""


def html_report(
    claim: Plan | Certificate | SearchCertificate,
    shown: Shown | None = None,
    *,
    title: str = "",
    owner: str = "",
    purpose: str = "",
    data_set: str = "",
    prepared: str = "",
    units: int | None = None,
) -> str:
    """The report of a run, a plan or a search as a page of HTML in one text: no script, nothing from elsewhere.

    A form to sign: what is promised to whom and how strong that is, what it rests on, how to check it, what NIST SP
    800-226 asks for, and lines to sign on. It draws noise, order and curve. All text is escaped. A function of its
    arguments alone: the same bytes for the same claim. Print it from the browser, also to PDF.

    Args:
        claim: `Certificate.load(path)`, or what `engine.certificate()` gave: their numbers were recomputed.
        shown: public results and settings to show with it, as the files of a run have them.
        title: of the page, where nothing is shown with it.
        owner, purpose, data_set, prepared: what the owner states, where nothing is shown with it: at most 300
            characters each. "" leaves a line to fill in by hand. `prepared` is by whom and when: no clock is read.
        units: how many privacy units there are, where the file does not say it.
    Returns: the text of a file, below 60 kB; no key, seed, path, name of a machine, time, count or id of a unit is in
        it, but what the certificate itself holds.
    Cost: about half a second for 1000 steps.
    Raises: ArgumentError for a text that is too long, or units that are not those of the file.
    """
    form = Form(owner=owner, purpose=purpose, data_set=data_set, prepared=prepared, units=units)
    shown = shown or Shown(title=title, form=form)
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
            "Ask for the file that the run wrote: a file that was damaged or edited fails.",
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
        unseen.append("how often units appeared and how far apart, from which the realised number follows")
    title = shown.title or ("A training run" if certificate is not None else "A plan, which has not run")
    drawn = [noise_figure(plan), curve_figure(plan), order_figure(plan)]
    if shown.accuracy:
        drawn.insert(0, accuracy_figure(shown.accuracy, shown.label))
    units = counted_units(plan, shown.form)
    done = "A plan. Nothing was trained."
    if certificate is not None:  # a paper that is signed names its run
        done = f"{certificate.steps} of {plan.n} steps taken, with the noise key {certificate.key_fingerprint}"
    of = PLAN_FORMAT if certificate is None else RUN_FORMAT
    return document(
        f"Privacy report: {title}",
        tag("h1", "Privacy report"), tag("p", title, class_="soft"),
        strength_box(strength_of(claim, units), certificate is not None), _passed(certificate),
        _searched(plan), _nobody(certificate), _headline(plan, certificate), _notes(shown),
        particulars(plan.unit, plan, done, of, shown.form),
        _attacks(claim.reach, claim, plan.unit), _groups(claim),
        tag("h2", "Who is protected, and from whom"), _list(whom(plan)),
        tag("h2", "What the promise rests on"), tag("ul", *map(_item, assumptions(plan, certificate))),
        tag("h2", "What it does not say"), tag("ul", *map(_item, limits(plan))),
        tag("h2", "Audit"), _audit(shown.audit, plan.epsilon, plan.curve),
        tag("h2", "Budget and search"), _budget(shown),
        nist_table(questions(claim, units, _utility(shown), _audited(shown), _others(shown))),
        *_verifying(checked, unseen, large=is_large(plan.to_dict())), _model(certificate), signatures(),
        tag("h2", "Annex: pictures"), figures(*drawn),
        tag("h2", "Annex: the privacy card"), _card(claim.facts() if certificate is not None else plan.facts()),
        _training(shown), _digests(plan, certificate, shown.sha256),
    )  # fmt: skip


def _utility(shown: Shown) -> str:
    told = [f"{name}: {text}" for name, text in shown.score]
    if shown.accuracy:
        told.append(f"{100 * shown.accuracy[-1][1]:.1f} % right at the end, on test data that the owner calls public")
    return f"{'; '.join(told)}. For what that is enough, the owner says:" if told else ""


def _audited(shown: Shown) -> str:
    if shown.audit is None:
        return ""
    return f"An attack with {counted(shown.audit.canaries, 'planted gradient')} did not refute the claim. See: audit."


def _others(shown: Shown) -> str:
    return "" if shown.budget is None else f"What budget {shown.budget} lists. What is in none, the owner says:"


def _passed(certificate: Certificate | SearchCertificate | None) -> Html:
    what = "plan" if certificate is None else "certificate"
    told = f"Checked: every number of the {what} was recomputed from what it fixes, and agrees. "
    rest = (
        "This does not say how strong the promise is. No file can show that the program really did what it says: "
        "see what the promise rests on."
    )
    return tag("div", tag("p", tag("strong", "The file is consistent. "), told, rest), class_="banner note")


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
    claim = plan if certificate is None else certificate  # of all starts together
    number = _promise(claim.epsilon, plan.delta)
    cells = [
        _cell(f"{percent(_right(claim.reach))} %", _right_text(plan.unit, plan.neighbours)),
        _cell(f"{percent(claim.reach.found)} of 100", f"{plan.unit}s, at most, are found by the strongest "
              "attacker, if it wrongly accuses 1 of 100 others"),
    ]  # fmt: skip
    if plan.known_epsilon is not None and plan.known_epsilon > plan.epsilon:
        cells.append(
            _cell(f"epsilon {rounded_up(plan.known_epsilon)}", "what is left if the secret batches became known")
        )
    realised = None if certificate is None or _of_nobody(certificate) else certificate.realised
    if realised is not None and rounded_up(realised.epsilon) != rounded_up(plan.epsilon):
        cells.append(
            _cell(f"epsilon {rounded_up(realised.epsilon)}", "realised: the same promise, computed from how often "
                  f"{plan.unit}s really appeared in this run, where the planned number counts how often they may. Only "
                  "the file says how often it was, and nothing here checks it. If in doubt, use the planned number")
        )  # fmt: skip
    told = f"The promise for one {plan.unit}: everything that this run released reveals at most this much about it."
    if certificate is None:
        told = f"What a run of this plan would promise to one {plan.unit}."
    if plan.candidate_of is not None:
        told = f"Of this run by itself, for one {plan.unit}, had no other been looked at. What was spent is above this."
    return tag(
        "section", tag("div", number, class_="number"), tag("p", told),
        tag("p", "Epsilon limits how much more likely any conclusion about it can become. 0 reveals nothing, up to "
            "about 4 is strong, 8 is usual and moderate, and above about 12 the promise is weak. Delta, "
            f"here 1 in {1 / plan.delta:,.0f}, is the small chance that this limit leaves out.", class_="small soft"),
        tag("div", *cells, class_="cells"), class_="headline",
    )  # fmt: skip


def _training(shown: Shown) -> Html:
    rows = [*shown.score, *shown.training]
    if not rows:
        return Html()
    note = tag("p", "From the run's own metrics file, which the certificate does not cover.", class_="small soft")
    return join(tag("h2", "Annex: the training"), note, _list([(name, [text]) for name, text in rows]))


def _audit(found: Attacked | None, claimed: float, curve: Curve) -> Html:
    if found is None:
        return tag(
            "p", "There is no audit. An audit attacks a run of the same plan with planted gradients, and tests "
            "whether the claim can be refuted. Run ", tag("code", "anyorder audit run FOLDER --out AUDIT"),
            ", copy its ", tag("code", "audit.json"), " into the folder of the run, and make the report again.",
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
        ("Attack", [f"{counted(found.canaries, 'planted gradient')}, each in or out by a secret draw"]),
        ("p-value of the claim", [f"{found.p_value:.2g}"]),
    ]
    if found.at_least is not None:
        rows.append(("Seen", [f"epsilon of at least {rounded_down(found.at_least, 3)}, at the audit's own delta"]))
    if found.attack is not None:
        fpr, tpr = found.attack
        told = f"it wrongly accused {100 * fpr:.3g} % of those that were out, and found {100 * tpr:.3g} % of those in"
        most = f"the promise allows {percent(curve.tpr(fpr))} %, give or take the chance of so few"
        rows.append(("Compared with the limit", [f"{told}; {most}"]))
    note = "By the audit's own file, which nobody signed; it may be of another run of the same plan."
    return join(_list(rows), tag("p", note, class_="small soft"))


def _budget(shown: Shown) -> Html:
    if shown.budget is None:
        return tag(
            "p", "The folder names no budget. Other runs on the same data, a search for settings included, add to this "
            "epsilon. Keep one budget for each data set (", tag("code", "anyorder budget"), ").",
        )  # fmt: skip
    return tag(
        "p", "The run was entered in a budget of its data set before its first step, as the folder says. Budget id: ",
        tag("code", shown.budget),
    )  # fmt: skip


_WEIGHTS = 8  # digests that are shown: the file's own names all


def _digests(plan: Plan, certificate: Certificate | None, sha256: str = "") -> Html:
    rows = [("plan", [plan.digest, "names the plan; an audit of the same plan has it too"])]
    if sha256:
        rows.insert(0, ("the file", [sha256, "the sha256 that stands in the file: this report is of that file"]))
    if certificate is not None:
        rows += [
            ("noise key", [certificate.key_fingerprint, "a fingerprint that leads to no key; no two runs share it"]),
            ("record", [certificate.record_digest, "who took part when, under a key that only the owner has: it tells "
                        "nothing, and holds the owner to one record"]),
            ("receipts", [certificate.receipt_root, "what each unit's own receipt leads to"]),
            *(("weights", [one, "sha256 of a tensor, or of a file"]) for one in certificate.weights[:_WEIGHTS]),
        ]  # fmt: skip
        if more := len(certificate.weights[_WEIGHTS:]):
            rows.append(("weights", ["..", f"{counted(more, 'digest')} more, in the certificate"]))
    listed = [(name, [tag("code", digest), tag("span", told, class_="small soft")]) for name, (digest, told) in rows]
    return join(tag("h2", "Annex: digests"), _list(listed))


# -- a search ---------------------------------------------------------------------------------------------------------


def _search_page(found: SearchCertificate, shown: Shown) -> str:
    checked, unseen = search_verdict(found)
    unit, delta = found.claim.unit, found.claim.delta
    reached = point_reach(found.epsilon, delta)  # of a search its epsilon at delta is known, and no curve
    best = found.best
    cells = [_cell(f"{percent(_right(reached))} %", _right_text(unit, found.claim.neighbours))]
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
    plan = None if best is None else best.plan
    units = counted_units(plan, shown.form)
    asked = [] if best is None else [nist_table(_of_search(questions(best, units, "", "", ""), found))]
    own = _list([("draws of the search", [tag("code", found.key_fingerprint)])])
    return document(
        "Privacy report: a search for settings",
        tag("h1", "Privacy report"), tag("p", shown.title or "A search for settings", class_="soft"),
        strength_box(strength(reached, delta, units, unit), True), _passed(found), headline, _notes(shown),
        particulars(unit, plan, "A search for settings", SEARCH_FORMAT, shown.form),
        tag("h2", "The card of the search"), _card(found.facts()), *body, *asked,
        *_verifying(checked, unseen, "search.privacy.json", large=found.is_large), digests, own, signatures(),
    )  # fmt: skip


def _of_search(asked: list[Question], found: SearchCertificate) -> list[Question]:
    """The questions of the chosen run, with the answers of the whole search where they differ."""
    reached = strength(point_reach(found.epsilon, found.claim.delta), found.claim.delta, None, found.claim.unit)
    own = {
        "Which definition holds?": "(epsilon, delta)-DP, of the whole search.",
        "What are epsilon and delta?": f"Epsilon {rounded_up(found.epsilon)} at delta "
        f"{rounded_up(found.claim.delta, 6)}.",
        "What does that mean in practice?": reached.marks[0][2],
        "Was the choice of settings counted?": "Yes: the numbers are of the whole search.",
    }
    return [(subject, question, own.get(question, text)) for subject, question, text in asked]


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
        tag("p", "You need the file and ", tag("code", "anyorder"), " with its extra ", tag("code", "cli"),
            ": no data, no model, no key, no network."),
        tag("pre", f"anyorder verify{option} {name}"),
        tag("p", told) if large else Html(),
        tag("p", "This recomputes every claim from the file. The last line must begin with ",
            tag("code", "verified:"), ", and the exit code must be 0. Otherwise do not rely on the file. ",
            tag("code", f"anyorder report{option} FOLDER"), " with the same texts makes this page again."),
    )  # fmt: skip


def _model(certificate: Certificate | None) -> Html:
    if certificate is None or not certificate.weights:
        return Html()
    told = "The certificate names the weights of the model. To see whether a model file has them, run "
    return tag("p", told, tag("code", "anyorder verify run.privacy.json --model FILE"), ".")


def _card(facts: list[tuple[str, str]]) -> Html:
    return _list([(name, [text, tag("span", MEANS.get(name, ""), class_="small soft")]) for name, text in facts])


def _notes(shown: Shown) -> Html:
    return join(*(tag("div", tag("p", note), class_="banner bad") for note in shown.notes))


def _list(rows: Sequence[tuple[str, Sequence[str]]]) -> Html:
    return tag("dl", *(join(tag("dt", name), tag("dd", *(tag("p", text) for text in texts))) for name, texts in rows))


def _item(text: str) -> Html:
    return tag("li", text)


def _promise(epsilon: float, delta: float) -> Html:
    parts = (f"epsilon ≤ {rounded_up(epsilon)}", f"at delta {rounded_up(delta, 6)}")
    return join(*(tag("span", part, class_="whole") for part in parts), between=" ")


def _cell(number: str, told: str) -> Html:
    return tag("div", tag("b", number), tag("span", told, class_="small"), class_="cell")


def _right(found: Reach) -> float:
    """How often the best guesser is right, where a fair draw decided."""
    return (1 + found.advantage) / 2


def _attacks(found: Reach, claim: Plan | Certificate, unit: str) -> Html:
    """What the promise means, in a table of three rows."""
    head = tag("tr", tag("th", "of those who took no part, the attacker accuses"),
               tag("th", f"of the {unit}s that took part, it finds at most"))  # fmt: skip
    rows = [
        tag("tr", tag("td", f"{100 * fpr:g} %"), tag("td", f"{percent(tpr)} %"))
        for fpr, tpr in zip(RATES, found.tprs, strict=True)
    ]
    mu = claim.curve.mu if isinstance(claim, Certificate) else claim.mu
    whole = "" if mu is None else f"The guarantee is exactly Gaussian DP with mu = {rounded_up(mu)}. {_MU_MEANS} "
    return join(
        tag("h2", "What it means for an attacker"),
        tag("p", f"The strongest attacker knows the data of everybody else, and every model along the way. {whole}"
            "The attacker's advantage is the second share minus the first, at the rate where that is largest. It is at "
            f"most {rounded_up(found.advantage, 3)}. These limits are computed from the promise."),
        tag("table", head, *rows),
    )  # fmt: skip


def _groups(claim: Plan | Certificate) -> Html:
    """What is left for a person who has several examples; of mu, which is multiplied."""
    plan = claim.plan if isinstance(claim, Certificate) else claim
    mu, known = claim.curve.mu if isinstance(claim, Certificate) else claim.mu, ""
    if mu is None and not (isinstance(claim, Certificate) and claim.earlier):
        mu, known = plan.known_mu, " The table takes the secret batches as known, which can only raise these numbers."
    if plan.unit != "example":
        return Html()
    told = f"Epsilon {rounded_up(claim.epsilon)} is for a person with one example. One with more is easier to find."
    title = tag("h3", "If one person has several examples")
    if mu is None:
        return join(title, tag("p", f"{told} How much easier is not computed here: make the person the unit."))
    head = tag("tr", *(tag("th", name) for name in (
        "examples of one person", f"epsilon at delta {rounded_up(plan.delta, 6)}", "the attacker who accuses 1 of 100 "
        "others wrongly finds at most")))  # fmt: skip
    rows = [
        tag("tr", tag("td", f"{k}"), tag("td", rounded_up(gdp_epsilon(k * mu, plan.delta))),
            tag("td", f"{percent(gaussian_tpr(k * mu, 0.01))} of 100"))
        for k in (2, 3, 4)
    ]  # fmt: skip
    return join(title, tag("p", told, known), tag("table", head, *rows))


_MU_MEANS = (
    "This says: to tell whether somebody was in the data is as hard as to tell, from one measurement with a normal "
    "error of size 1, whether the true value is 0 or mu. At mu = 0 nobody can. At mu = 1 the attacker who accuses 1 of "
    "100 wrongly finds at most 10 of 100, at mu = 3 up to 75. Every epsilon here follows from mu."
)


def _right_text(unit: str, neighbours: str) -> str:
    about = "which of two things its data was" if neighbours == "replace-one" else "whether it was used"
    return (
        f"how often the strongest attacker is right about one {unit}, {about}, if a fair draw decided that "
        "(50 % is blind guessing)"
    )


# ----------------------------------------------------------------------------------------------------
# What an audit leaves: audit.json, its picture, and the certificate of the run that was audited.


AUDIT = "audit.json"
PICTURE = "audit.png"
FORMAT = "anyorder-audit/1"
NOTE = (
    "The audited run had canaries in it: the model that it trained is for the audit, not for use. Its certificate is "
    "that of the audited run, and holds for the units of the data."
)


def fresh(out: Path) -> Path:
    """The folder, made if it is not there. Raises ArgumentError if it holds files or cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ArgumentError(f"output folder {out} holds files already: choose another")
    except OSError as problem:
        raise ArgumentError(f"output folder {out} cannot be written: {problem.strerror or problem}") from problem
    return out


def save(path: Path, described: dict[str, Any]) -> None:
    """Write audit.json, with its sha256."""
    save_json(path, {"format": FORMAT, "note": NOTE, **described})


def read(path: str | Path, plan: Plan) -> str:
    """What an audit.json says of a plan, in a sentence. It may be of any run of the plan; nobody signed it.

    Raises: CertificateError if the file is none, was altered, is of another plan, or says that the claim was refuted.
    """
    attacked, refuted = found(path, plan)
    if refuted is not None:
        raise CertificateError(refuted)
    return (
        f"an audit of a run of this plan, with {counted(attacked.canaries, 'canary')}, did not refute its claim "
        f"(p = {attacked.p_value:.2g})"
    )


def found(path: str | Path, plan: Plan) -> tuple[Attacked, str | None]:
    """(what the attack found, how it refuted the claim or None), see `read`.

    Raises: CertificateError if the file is none, was altered, or is of another plan.
    """
    data = load_json(path, FORMAT)
    if data.get("plan_digest") != plan.public().digest:
        raise CertificateError(
            "the audit is of another plan, and says nothing of this claim: audit a training with this file's plan"
        )
    try:
        seen = data["audit"]
        refuted, p_value = seen["refuted"], float(seen["p_value"])
        counts = int(seen["canaries"]["in"]), int(seen["canaries"]["out"])
        bound = seen.get("epsilon_at_least", {}).get("one_run")
        at_least = None if bound is None else float(bound)
        delta = float(seen.get("claimed", {}).get("delta", plan.delta))
        confidence = float(seen.get("confidence", 0.95))
        rates = seen.get("attack")
        attack = None if rates is None else (float(rates["fpr"]), float(rates["tpr"]))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
        raise CertificateError(f"the audit has no verdict: {brief(problem)}") from problem
    agrees = refuted is not False or REFUTED <= p_value <= 1
    possible = min(counts) >= 0 and 0 < delta < 1 and 0 < confidence < 1 and not math.isnan(at_least or 0.0)
    possible = possible and (attack is None or (0 < attack[0] < 1 and 0 <= attack[1] <= 1))
    if not (agrees and possible):
        raise CertificateError(
            "the audit does not agree with itself: its verdict is not that of its p-value and counts"
        )
    count = sum(counts)
    claimed = None if delta == plan.delta else plan.curve.epsilon(delta)  # a bound says nothing at another delta
    attacked = Attacked(
        canaries=count, p_value=p_value, at_least=at_least, claimed=claimed, confidence=confidence, attack=attack,
    )  # fmt: skip
    if refuted is not False:
        canaries = counted(count, "canary")
        return attacked, f"an audit of this plan, with {canaries}, refuted its claim (p = {p_value:.2g})"
    return attacked, None


# ----------------------------------------------------------------------------------------------------
# report.html of a folder, or of one file: read from public files alone, so that anybody makes the same bytes again.


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


def make(path: str | Path, *, large: bool = False, form: Form | None = None) -> Made:
    """The report of a folder, or of one certificate or plan.

    Read are, where they are there: run.privacy.json or search.privacy.json, metrics.json, audit.json, budget.json. All
    are taken for a stranger's: claims are recomputed, texts escaped, nothing but known numbers and words is shown.

    Args:
        path: the folder of a run or a search that has ended, or a file.
        large: no bounds on time and memory: for what you trust.
        form: what the owner states.
    Raises: ArgumentError where there is nothing to report on, or the form does not fit the file.
    """
    path, shown = Path(path), Shown(form=form or Form())
    if not path.is_dir():
        if not path.exists():
            raise ArgumentError(f"there is no file or folder {path}: give the folder of a run, or its certificate")
        return _of_file(path, large, shown)
    if (path / folder.CERTIFICATE).exists() and (path / SEARCH).exists():
        raise ArgumentError(f"{path} holds {folder.CERTIFICATE} and {SEARCH}: give the one file that the report is of")
    if (path / folder.CERTIFICATE).exists():
        return _of_run(path, large, shown)
    if (path / SEARCH).exists():
        return _of_file(path / SEARCH, large, shown)
    raise ArgumentError(
        f"{path} is not the folder of a run that has ended: it holds no {folder.CERTIFICATE} (anyorder train, "
        f"federated, fit) and no {SEARCH} (anyorder tune)"
    )


def _of_file(path: Path, large: bool, shown: Shown) -> Made:
    try:
        if mentions(path, f'"{SEARCH_FORMAT}"', large=large):
            return Made(html_report(SearchCertificate.load(path, large=large), shown), None)
        found = verify(path, large=large)
        shown = replace(shown, sha256=str(read_json(path, large=large)["sha256"]))
    except CertificateError as problem:
        return _refused(path, problem, Shown())
    return Made(html_report(found.plan if found.certificate is None else found.certificate, shown), None)


def _of_run(path: Path, large: bool, shown: Shown) -> Made:
    file = path / folder.CERTIFICATE
    try:
        certificate = verify(file, large=large).certificate
        shown = replace(shown, sha256=str(read_json(file, large=large)["sha256"]))
    except CertificateError as problem:
        return _refused(file, problem, Shown())
    if certificate is None:
        return _refused(file, CertificateError("the file is a plan, which has not run, and not a certificate"), Shown())
    plan = certificate.plan
    shown = _with_metrics(_with_search(shown, path), path, plan, large)
    shown = _with_budget(shown, path, plan)
    if (path / AUDIT).exists():
        try:
            attacked, refuted = found(path / AUDIT, plan)
        except CertificateError as problem:
            shown = _noted(shown, f"{AUDIT} is in the folder and does not count: {_named(path, problem)}")
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
    return (("test score", f"{told}, on {rows} rows of a table that the owner calls public"),)


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
