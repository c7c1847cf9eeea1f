"""Fit a strategy to a workload and a participation; certified lower bounds; choose the best within a budget."""

from anyorder.optimize.bounds import lower_bound
from anyorder.optimize.candidates import Candidate, choose
from anyorder.optimize.dense import Optimum
from anyorder.optimize.fits import fit_named
from anyorder.optimize.rescale import rescale
from anyorder.optimize.structured import fit, fit_dense

__all__ = ["Candidate", "Optimum", "choose", "fit", "fit_dense", "fit_named", "lower_bound", "rescale"]
