"""What a budget says of an entry that it refuses."""

import math
from pathlib import Path
from typing import Any

from anyorder._words import rounded_up
from anyorder.accounting.curves import Gaussian
from anyorder.accounting.gaussian import gdp_epsilon
from anyorder.budget.account import Account, Totals
from anyorder.budget.filter import Cost
from anyorder.budget.found import SearchCertificate
from anyorder.certificate import Certificate

__all__ = ["refusal", "was_made"]


def was_made(what: Any) -> bool:
    """Whether it is the certificate of a run that took steps, or of a search: then it is too late to refuse the run."""
    return type(what) is SearchCertificate or (type(what) is Certificate and what.steps > 0)


def refusal(path: Path, account: Account, totals: Totals, curve: Cost, *, made: bool) -> str:
    """In a line: what it would come to, the limit, what is left, and what can be done.

    Args:
        totals: with what is refused.
        curve: of what is refused.
        made: see `was_made`.
    """
    spent, before = totals.epsilon(account.delta), account.totals()
    left = before.left_squared(account.epsilon, account.delta)
    with_it = f"with it epsilon {rounded_up(spent, 6)} would be spent at delta = {account.delta:g}"
    if not math.isfinite(spent):
        with_it = f"this budget has no bound of epsilon with it at delta = {account.delta:g}"
    after = "Nothing was entered, and it must not run"
    if made:
        after = (
            "Nothing was entered, but this run was already made: the limit is exceeded, whatever the file says. To "
            "have it in the file, raise the limit first (limit(epsilon, delta); limit --epsilon --delta)"
        )
    hint = ""
    if totals.rule == "gaussian" and type(curve) is not Gaussian:
        how = (
            "has no bound for a search"
            if not math.isfinite(spent)
            else "counts secret sampling and selections as if they were not"
        )
        hint = (
            f". This budget counts by a Gaussian filter, for good, which {how}: a budget that takes all is made with "
            "filter='renyi' (limit --filter renyi), or with adaptive=False (limit --planned) where all plans are "
            "chosen in advance"
        )
    return (
        f"refused: {with_it}, and the limit of the budget {path} is {account.epsilon:g}; "
        f"{rounded_up(before.epsilon(account.delta), 6)} are spent, and one Gaussian plan may have "
        f"{gdp_epsilon(float(left) ** 0.5, account.delta):.6g}. {after}{hint}"
    )
