"""Across runs: what a search for settings costs, and what a data set has left."""

from anyorder.budget.account import Held, Remaining
from anyorder.budget.bounds import calibrate_search, search_delta, search_epsilon
from anyorder.budget.entries import Settle, Spend
from anyorder.budget.file import Budget
from anyorder.budget.found import ScoreNoise, SearchCertificate, SearchClaim
from anyorder.budget.laws import Fixed, Geometric, Law, Logarithmic, NegativeBinomial, Poisson
from anyorder.budget.search import PrivateScore, Search, Trial, tune

__all__ = [
    "Budget",
    "Fixed",
    "Geometric",
    "Held",
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
