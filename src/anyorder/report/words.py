"""What a claim means, in words for the person who signs it off."""

import math
from dataclasses import dataclass

from scipy.special import ndtr, ndtri

from anyorder.accounting.amplification import methods
from anyorder.accounting.amplification.methods import MonteCarlo
from anyorder.formatting import rounded_up
from anyorder.plan.certificate import Certificate
from anyorder.plan.compatibility import trusted_text
from anyorder.plan.plan import Plan

__all__ = ["MEANS", "Guess", "assumptions", "best_guess", "limits", "whom"]

MEANS = {
    "privacy": "the promise: a smaller epsilon says more, and delta is the chance that is left out of it",
    "beware": "delta is what the promise leaves out: far below one over the number of units it leaves out little",
    "realised": "the same promise for how often units really came, which may be less than was allowed",
    "search": "why the epsilon above is no price: who chooses among runs has used the data in all of them",
    "protects": "whose data is hidden as a whole, and what two neighbouring data sets differ in",
    "order": "in which order data came to the steps of training",
    "amplification": "whether the promise also rests on a secret draw of who is in which step",
    "if known": "what is left of the promise for somebody who learns that draw",
    "needs": "what the draw asks of the program that trains",
    "mechanism": "how the noise of different steps belongs together, so that most of it cancels in the model",
    "clipping": "how far one unit can move a step at most, whatever its data is",
    "sensitivity": "how far one unit can move all steps together; the noise is measured by it",
    "its own steps": "how much others learn who know in which steps a unit was; it differs from unit to unit",
    "selection": "which rows of a table are released is itself chosen with noise, and paid for",
    "trusts": "what is not done by the program, but trusted to the users' own devices",
    "arithmetic": "numbers are added so that no digit behind the noise can tell anything",
    "noise": "the size of the random noise, in units of the clip norm",
    "error": "the noise that is left in the trained model, on average over the steps",
    "memory": "what the mechanism keeps between steps; it says nothing of privacy",
    "steps": "how many of the planned steps were taken; fewer cost nothing",
    "runs": "how many trainings the search made: by chance where that is part of the promise",
    "each run": "what one training of the search costs",
    "score": "what the runs were compared by",
    "best": "the settings that the search chose",
    "alone": "what the chosen run would have cost by itself",
}
"""Name of a fact on a card -> what it means."""


@dataclass(frozen=True)
class Guess:
    """What the best possible attacker reaches, by the claim; both rounded up.

    Attributes:
        right: the probability to guess right whether one unit's data was used, where a coin decided.
        found: the share of units that are found out, if one in a hundred others may be accused wrongly.
    """

    right: float
    found: float


def best_guess(epsilon: float, delta: float, mu: float | None, known_mu: float | None = None) -> Guess:
    """The limits that a claim sets to every attacker: of two that hold, the smaller one.

        right = Phi(mu / 2),  found = Phi(Phi^-1(a) + mu)                            of a mu-GDP claim, a = 0.01
        right = (e^eps + delta) / (e^eps + 1)
        found = min(e^eps a + delta, 1 - e^-eps (1 - delta - a))                     of any other, at its own delta

    Both follow from what two neighbouring data sets allow any test between them [Dong, Roth, Su 2022, section 2].

    Args:
        epsilon, delta: the claim.
        mu: of the claim, where it has one. Or
        known_mu: of secret batches, should they become known: who does not know them can tell no more.
    """
    wrong = 0.01
    if mu is not None:
        return Guess(float(ndtr(mu / 2)), float(ndtr(ndtri(wrong) + mu)))
    if known_mu is not None:
        secret, known = best_guess(epsilon, delta, None), best_guess(epsilon, delta, known_mu)
        return Guess(min(secret.right, known.right), min(secret.found, known.found))
    if epsilon > 700:
        return Guess(1.0, 1.0)
    grown = math.exp(epsilon)
    right = (grown + delta) / (grown + 1)
    return Guess(right, min(1.0, grown * wrong + delta, 1 - (1 - delta - wrong) / grown))


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
            "Against anybody who has the trained model, every model on the way to it, the settings and this page, and "
            f"who knows the data of everybody else: the promise is that even they cannot tell well what one {unit} "
            "brought.",
            "Not against who runs the training: the program sees the data itself. Not against who has the checkpoint, "
            "which holds the key of the noise, or the evidence, which says who took part when.",
        ]),
        ("Who knows the order", _order_words(plan, searched)),
    ]  # fmt: skip


def _unit_words(plan: Plan) -> str:
    if plan.unit == "example":
        return (
            "Each single example (a row, an image, a text) of the training data. Somebody whose data is in several "
            "examples is protected less: each of them counts."
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
        return [
            "Everybody may know it, and who was in which step: the promise does not rest on any secret in the order."
        ]
    known = f"epsilon {rounded_up(plan.known_epsilon or 0.0)}"
    if (plan.known_epsilon or 0.0) <= plan.epsilon:
        return [
            "It was drawn by secret coins, and the promise would hold as well if everybody knew it: the secret is not "
            "counted."
        ]
    return [
        "Nobody but the sampler: who was in which step was drawn by secret coins, and the promise rests on "
        "their staying secret.",
        f"If the batches became known (from a log, from how long steps took, from who went offline), {known} is "
        f"what is left, at delta {plan.delta:g}"
        + (" of the chosen run alone; of the promise of the whole search less is left." if searched else "."),
    ]


def assumptions(plan: Plan, certificate: Certificate | None) -> list[str]:
    """What the claim rests on, and no file can show."""
    unit = plan.unit
    rests = [
        "The noise was added, and drawn from a key that nobody else has. Two reports with one key fingerprint used the "
        "same noise twice, and neither promise holds.",
        f"What one {unit} contributes was clipped as the card says, and depends on no other {unit}'s data.",
        f"The order, and who counts as one {unit}, are what the file says: one identity is one {unit}.",
        "Order, settings and the end of the run were not chosen by looking at the private data.",
    ]
    if plan.participation.secret:
        rests.append("The coins were fair, were drawn as the order says, and only the sampler has seen the batches.")
    if type(plan.method) is MonteCarlo:
        rests.append(f"The amplified epsilon is found {methods.describe(plan.method)}: their chance is inside delta.")
    if plan.on_device:
        rests.append(f"Users' devices are trusted: {trusted_text(plan.on_device)}.")
    if plan.grid is None:
        rests.append(
            "Numbers with a floating point stand for real numbers: an attack on the last digits of the noise is not "
            "covered (the exact arithmetic of a 'secure' plan is)."
        )
    if certificate is not None and certificate.realised is not None:
        rests.append(
            "For the realised number: neither who took part nor the end of the run was chosen by what was released. "
            "Where that is in doubt, go by the planned one."
        )
    return rests


def limits(plan: Plan) -> list[str]:
    """What the claim does not say."""
    unit = plan.unit
    return [
        "It does not say that the model reveals nothing of the data as a whole: what is true of many is learnt, and is "
        "meant to be.",
        f"It is about one {unit}. For a group of {unit}s that belong together the promise is weaker, the more so the "
        "larger the group.",
        "It is about this run. Other runs on the same data add to it: keep one budget for a data set.",
        "It is about confidentiality alone: it says nothing of fairness, of the right to use the data, or of how good "
        "the model is.",
    ]
