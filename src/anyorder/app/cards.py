"""What a person reads in a terminal: privacy cards, tables, and what a verification checked, in sentences."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyorder import checks
from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search_privacy import Fixed
from anyorder.formats import printable, quoted
from anyorder.formatting import rounded_up
from anyorder.plan.certificate import Certificate, Verification
from anyorder.plan.plan import Plan, trusted_text
from anyorder.plan.receipt import Receipt

# ----------------------------------------------------------------------------------------------------
# What a claim means, in words for the person who signs it off.


MEANS = {
    "privacy": "the promise: a smaller epsilon is stronger, and delta is the chance that it does not cover",
    "attacks": "what the promise means: the share of those who took part that the strongest attacker finds",
    "delta": "the chance that the promise does not cover, and where its size comes from",
    "beware": "delta is what the promise leaves out; it should be far below one over the number of units",
    "realised": "the same promise for how often units really appeared, which may be less than was allowed",
    "search": "why the epsilon above is not the whole cost: choosing among runs uses the data of all of them",
    "protects": "whose data is hidden as a whole, and what two neighbouring data sets differ in",
    "order": "how often, and when, one unit may be used",
    "amplification": "whether the promise also rests on a secret draw of who is in which step",
    "if known": "what is left of the promise if somebody learns that draw",
    "needs": "what the draw asks of the program that trains",
    "mechanism": "how the noise of different steps is correlated, so that most of it cancels in the model",
    "clipping": "how much one unit can change a step at most, whatever its data",
    "sensitivity": "how much one unit can change all steps together; the noise is scaled to it",
    "its own steps": "how much is learned about a unit whose steps are known; it differs from unit to unit",
    "selection": "which rows of a table are released is itself chosen with noise, which the epsilon counts",
    "trusts": "what is not done by the program, but trusted to the users' own devices",
    "arithmetic": "numbers are added exactly, so that the last digits of the noise reveal nothing",
    "noise": "the size of the random noise, in units of the clip norm",
    "error": "the noise that is left in the trained model, on average over the steps",
    "memory": "what the mechanism keeps between steps; it does not affect privacy",
    "data set": "how an example is kept apart from others where it is read",
    "collation": "how examples are kept apart where they are joined to a batch",
    "model": "how examples are kept apart where the model runs",
    "loss": "how examples are kept apart where the loss is computed",
    "steps": "how many of the planned steps were taken; fewer cost nothing",
    "weights": "which model this is of: each digest is of one trained tensor, or of the model's file",
    "runs": "how many trainings the search made: by chance where that is part of the promise",
    "each run": "what one training of the search costs",
    "score": "what the runs were compared by",
    "best": "the settings that the search chose",
    "alone": "what the chosen run would have cost by itself",
}
"""Name of a fact on a card -> what it means."""


def whom(plan: Plan, *, searched: bool = False) -> list[tuple[str, list[str]]]:
    """(question, answers): who is protected, against whom, and who may know the order.

    Args:
        searched: whether the plan is that of the run that a search chose, whose promise is the search's.
    """
    unit = plan.unit
    return [
        ("Who is protected", [_unit_words(plan)]),
        ("What is compared", [_neighbour_words(plan)]),
        ("Against whom", [
            "Against anybody who has the trained model, every model along the way, the settings and this page, and who "
            f"knows the data of everybody else. Even they cannot tell much about what one {unit} contributed.",
            "Not against the party that runs the training, because the program sees the data. Not against anybody who "
            "has the checkpoint, which holds the noise key, or the evidence, which says who took part when.",
        ]),
        ("Who knows the order", _order_words(plan, searched)),
    ]  # fmt: skip


def _unit_words(plan: Plan) -> str:
    if plan.unit == "example":
        return (
            "Each single example (a row, an image, a text) of the training data. A person whose data is in several "
            "examples is protected less."
        )
    return f"Each {plan.unit} as a whole, with all data that belongs to the {plan.unit}, in all steps together."


def _neighbour_words(plan: Plan) -> str:
    unit = plan.unit
    match plan.neighbours:
        case "zero-out":
            return (
                f"The run as it was, and the same run with everything that one {unit} contributes replaced by "
                "nothing. From what came out, nobody can tell the two apart better than the promise says."
            )
        case "replace-one":
            return (
                f"The run as it was, and the same run with the data of one {unit} replaced by any other data. From "
                "what came out, nobody can tell the two apart better than the promise says."
            )
        case "add-or-remove":
            return (
                f"The run as it was, and the same run without one {unit}. From what came out, nobody can tell the two "
                "apart better than the promise says; not even whether somebody was there."
            )
        case _:
            raise AssertionError(plan.neighbours)


def _order_words(plan: Plan, searched: bool) -> list[str]:
    if not plan.participation.secret:
        return ["Everybody may know it, and who was in which step. The promise does not rest on a secret order."]
    known = f"epsilon {rounded_up(plan.known_epsilon or 0.0)}"
    if (plan.known_epsilon or 0.0) <= plan.epsilon:
        return [
            "It was drawn in secret, but the promise does not rest on that: it is the same if everybody knows the "
            "order."
        ]
    return [
        "Nobody but the sampler. Who was in which step was drawn in secret, and the promise rests on this "
        "staying secret.",
        f"If the batches became known (from a log, from how long steps took, from who went offline), {known} is "
        f"what is left, at delta {rounded_up(plan.delta, 6)}"
        + (" of the chosen run alone; of the promise of the whole search less is left." if searched else "."),
    ]


def assumptions(plan: Plan, certificate: Certificate | None) -> list[str]:
    """What the claim rests on, and no file can show."""
    unit = plan.unit
    rests = [
        "The noise was added, and was made from a key that nobody else has. If two reports have the same key "
        "fingerprint, they used the same noise twice, and neither promise is valid.",
        f"What one {unit} contributes was clipped as the card says, and depends on no other {unit}'s data.",
        f"The order was what the file says, and one identity is one {unit}.",
        f"What the data set reads for one {unit} is the data of this {unit} alone. If it also reads that of others (a "
        f"negative of a triplet, a pair of people), one person's data is in several {unit}s, and that person is not "
        "protected as this page says.",
        "Order, settings and the end of the run were not chosen by looking at the private data.",
    ]
    if plan.participation.secret:
        rests.append("The draws were fair, were made as the order says, and only the sampler has seen the batches.")
    if type(plan.method) is MonteCarlo:
        rests.append(f"The amplified epsilon is found {methods.describe(plan.method)}: their chance is inside delta.")
    if plan.on_device:
        rests.append(f"Users' devices are trusted: {trusted_text(plan.on_device)}.")
    if plan.grid is None:
        rests.append(
            "Floating-point numbers are treated as real numbers. An attack on the last digits of the noise is not "
            "covered (ao.mechanism(secure=True) covers it)."
        )
    if certificate is not None and certificate.realised is not None:
        rests.append(
            "For the realised number: released results did not decide who took part"
            + (", nor when the run ended, as its owner states. " if certificate.stated else ". ")
            + "If in doubt, use the planned one."
        )
    return rests + [f"The owner states, {told}." for told in _promises(certificate)]


def _promises(certificate: Certificate | None) -> list[str]:
    """What the owner states of how units are kept apart."""
    return [] if certificate is None or certificate.isolation is None else certificate.isolation.promises()


def limits(plan: Plan) -> list[str]:
    """What the claim does not say."""
    unit = plan.unit
    return [
        "It does not say that the model reveals nothing of the data as a whole. The model learns what is true of many, "
        "as it should.",
        f"It is about one {unit}. For several {unit}s that belong together the promise is weaker, and weaker the more "
        "there are.",
        "It is about this run. Other runs on the same data add to its epsilon: keep one budget for each data set.",
        "It is about confidentiality alone. It says nothing about fairness, the right to use the data, or the quality "
        "of the model.",
    ]


# ----------------------------------------------------------------------------------------------------
# What a verification checked and could not see, in sentences.


_SHOWN = 40  # steps


def verdict(found: Verification, fresh: bool = False) -> tuple[list[str], list[str]]:
    """(what was checked, and holds; what no file, or none that was given, can show).

    Args:
        fresh: whether fresh samples were drawn for a claim by samples, beside its own.
    """
    checked = ["the file's hash", "sensitivity, noise, mu and epsilon, recomputed from the plan"]
    if found.plan.method is not None:
        checked += [f"the amplified epsilon, {methods.describe(found.plan.method)}; and the one if batches were known"]
    unseen = ["that the noise was added, and that order, units and clipping were what the file says"]
    if type(found.plan.method) is MonteCarlo and not fresh:
        unseen += [
            "that the samples, which salt and settings decide, are not the luckiest of more than 256 tries: --fresh "
            "draws others"
        ]
    if found.certificate is None:
        unseen += ["that anything was trained: this is a plan, and not the certificate of a run"]
    if found.plan.candidate_of is not None:
        unseen += ["what the search spent, of which this is one candidate: verify the search's certificate"]
    if found.plan.participation.secret:
        unseen += ["that the draws were those of the order, and that nobody but the sampler knows the batches"]
    if found.certificate is not None and found.certificate.realised is not None:
        checked += ["the realised mu and epsilon, recomputed from how often units appeared and how far apart"]
        unseen += [
            "that participation and stopping did not depend on released results: the realised epsilon needs this"
        ]
    if found.certificate is not None and found.certificate.earlier:
        checked += ["epsilon with what was released before the run was started over, recomputed"]
        unseen += ["that there were no other starts, and that those were of this plan"]
        unseen += ["that how often it was started over was not chosen by what was released"]
        unseen += [f"stated by the owner: {told}" for told in found.certificate.stated]
    unseen += [f"stated by the owner: {told}" for told in _promises(found.certificate)]
    if found.certificate is not None and found.certificate.isolation is not None:
        unseen += ["that examples were kept apart as the card says, by code that keeps nothing of one for another"]
    if found.note:
        unseen += ["the note of withdrawal beside it, which does not show that the run's owner wrote it"]
    named = "record" not in found.plan.on_device
    if found.plan.on_device:
        unseen += [f"what the plan trusts: {trusted_text(found.plan.on_device)}"]
    if found.evidence is not None:
        steps = found.evidence.ledger.step
        kept = f"that every unit kept to the order in {'its one step' if steps == 1 else f'all {steps} steps'}"
        checked += [
            kept if named else "that the evidence names nobody",
            "that the evidence is the one that the certificate was made of",
        ]
        if found.certificate is not None and found.certificate.realised is not None:
            checked += ["that no unit appeared more often, or closer together, than the realised participation says"]
    elif found.certificate is not None and named:
        realised = found.certificate.realised
        if realised is not None and realised.says_nobody(found.certificate.steps):
            unseen += [
                "that nobody took part in any step, as the file says: it is implausible, and the planned epsilon counts"
            ]
        unseen += ["who took part in which step: pass --evidence, if you are the owner or the auditor"]
    if found.receipt is not None:
        checked += ["that the certificate is bound to the receipt's steps, which keep to the order, and their mu"]
    return checked, unseen


def receipt_facts(own: Receipt, plan: Plan) -> list[tuple[str, str]]:
    """(name, text) rows of a unit's own receipt, for `facts_panel`."""
    shown = ", ".join(map(str, own.steps[:_SHOWN])) + (", .." if len(own.steps) > _SHOWN else "")
    mu = f"{rounded_up(own.mu, 5)}"
    if plan.participation.secret:
        mu += " against those who know these steps; the plan's claim is against all others"
    elif plan.mu is not None:
        mu += f" (the plan's: {rounded_up(plan.mu, 5)})"
    return [("unit", quoted(own.unit)), ("steps", f"{len(own.steps)}: {shown}"), ("its own mu", mu)]


# ----------------------------------------------------------------------------------------------------
# What the verification of a search checked and could not see, in sentences.


def search_verdict(found: SearchCertificate) -> tuple[list[str], list[str]]:
    """(what was checked, and holds; what no file can show)."""
    checked = ["the file's hash", "epsilon of the whole search, recomputed from the law, the curve of a run and delta"]
    unseen = []
    if found.best is not None:
        checked += ["that the best run's plan, recomputed from its own numbers, tells no more than the search counts"]
    if type(found.claim.law) is Fixed:
        checked += ["that no two runs have the same noise key"]
    else:
        unseen += ["that the number of runs was drawn from the law, and that nothing of the other runs was shown"]
    unseen += ["that each run added its noise, and used the data in no other way"]
    if found.claim.score is None:
        unseen += ["that scores were made without private data"]
    else:
        unseen += ["that scores have the sensitivity that is stated"]
    return checked, unseen


# ----------------------------------------------------------------------------------------------------
# The privacy card and tables, for a terminal.


def card(claim: Plan | Certificate, title: str = "privacy card") -> Any:
    """A plan, or the certificate of its run, as a rich panel."""
    return facts_panel(title, claim.facts())


def facts_panel(title: str, rows: Iterable[tuple[str, str]], style: str = "cyan") -> Any:
    """(name, text) rows as a rich panel."""
    table = _rich("table").Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold")
    table.add_column(overflow="fold")
    plain = _rich("text").Text  # text of a file or of a user is never read as markup
    for name, text in rows:
        table.add_row(plain(printable(name)), plain(printable(text)))
    return _rich("panel").Panel(table, title=plain(title, style="bold"), border_style=style, expand=False)


def comparison_table(title: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]]) -> Any:
    """A rich table.

    Args:
        columns: heading -> "left" or "right".
        rows: one text for each column.
    """
    table = _rich("table").Table(title=title, title_justify="left")
    for heading, justify in columns.items():
        table.add_column(heading, justify=justify, overflow="fold")
    plain = _rich("text").Text
    for row in rows:
        table.add_row(*(plain(printable(cell)) for cell in row))
    return table


def _rich(module: str) -> Any:
    return checks.optional(f"rich.{module}", extra="cli", purpose="printing a privacy card")
