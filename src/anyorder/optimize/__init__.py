"""Choose a strategy for a workload, an order and a claim; certified lower bounds of what any strategy could reach.

What fits one kind stands in the file of the kind, in `anyorder.strategy`. Here is what needs several of them, and the
fits to secret orders, which stand on `accounting`.
"""

from anyorder.optimize.candidates import Candidate, choose, fit, fit_named
from anyorder.strategy.bounds import lower_bound
from anyorder.strategy.dense import Optimum, fit_dense
from anyorder.strategy.rescaled import rescale

__all__ = ["Candidate", "Optimum", "choose", "fit", "fit_dense", "fit_named", "lower_bound", "rescale"]
