"""Across runs: what a search for settings costs, and what a data set has left."""

from anyorder.budget.account import Balance, Remaining
from anyorder.budget.claim import ScoreNoise, SearchCertificate, SearchClaim
from anyorder.budget.file import Budget
from anyorder.budget.laws import (
    Fixed,
    Geometric,
    Law,
    Logarithmic,
    NegativeBinomial,
    Poisson,
    calibrate_search,
    search_delta,
    search_epsilon,
)
from anyorder.budget.log import Settle, Spend
from anyorder.budget.search import PrivateScore, Search, Trial, tune

__all__ = [
    "Balance",
    "Budget",
    "Fixed",
    "Geometric",
    "Law",
    "Logarithmic",
    "NegativeBinomial",
    "Poisson",
    "PrivateScore",
    "Remaining",
    "ScoreNoise",
    "Search",
    "SearchCertificate",
    "SearchClaim",
    "Settle",
    "Spend",
    "Trial",
    "calibrate_search",
    "search_delta",
    "search_epsilon",
    "tune",
]
