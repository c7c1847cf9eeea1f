"""What the verification of a search checked and could not see, in sentences."""

from anyorder.budget.claim import SearchCertificate
from anyorder.budget.laws import Fixed

__all__ = ["search_verdict"]


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
