"""Choose a strategy for a workload, an order and a claim; certified lower bounds of what any strategy could reach.

What fits one kind stands in the file of the kind, in `anyorder.strategy`. Here is what needs several of them, and the
fits to secret orders, which stand on `accounting`.
"""

from anyorder.optimize.candidates import choose, fit
from anyorder.strategy.lower_bounds import lower_bound

__all__ = ["choose", "fit", "lower_bound"]
