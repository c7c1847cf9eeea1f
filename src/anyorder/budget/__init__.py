"""Across runs: what a search for settings costs, and what a data set has left."""

from anyorder.budget.claim import SearchCertificate
from anyorder.budget.search import PrivateScore, Trial
from anyorder.budget.search_privacy import (
    Fixed,
    Geometric,
    Logarithmic,
    NegativeBinomial,
    Poisson,
    calibrate_search,
    search_epsilon,
)

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
