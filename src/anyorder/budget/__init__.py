"""Across runs: what a search for settings costs, and what a data set has left."""

from anyorder.budget.bounds import calibrate_search, search_delta, search_epsilon
from anyorder.budget.laws import Fixed, Geometric, Law, Logarithmic, NegativeBinomial, Poisson

__all__ = [
    "Fixed",
    "Geometric",
    "Law",
    "Logarithmic",
    "NegativeBinomial",
    "Poisson",
    "calibrate_search",
    "search_delta",
    "search_epsilon",
]
