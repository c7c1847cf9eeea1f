"""Across runs: what a search for settings costs, and what a data set has left."""

from anyorder.budget.claim import SearchCertificate
from anyorder.budget.laws import (
    Fixed,
    Geometric,
    Logarithmic,
    NegativeBinomial,
    Poisson,
    calibrate_search,
    search_epsilon,
)
from anyorder.budget.search import PrivateScore, Trial

__all__ = [
    "Fixed",
    "Geometric",
    "Logarithmic",
    "NegativeBinomial",
    "Poisson",
    "PrivateScore",
    "SearchCertificate",
    "Trial",
    "calibrate_search",
    "search_epsilon",
]
