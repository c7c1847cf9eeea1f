"""Convex learners in one pass, of any order: an adapter of `anyorder.release`."""

from anyorder.online.ftrl import Learner
from anyorder.online.least_squares import LeastSquares
from anyorder.online.losses import Custom, Hinge, Logistic, Loss, Poisson, Softmax, Squared
from anyorder.online.regret import RegretBound, best_regularization, regret_bound, risk_bound
from anyorder.online.sets import Ball, Box, Everything, Set, Simplex
from anyorder.online.sums import ClippedSum, clipped_sum

__all__ = [
    "Ball", "Box", "ClippedSum", "Custom", "Everything", "Hinge", "Learner", "LeastSquares", "Logistic", "Loss",
    "Poisson", "RegretBound", "Set", "Simplex", "Softmax", "Squared", "best_regularization", "clipped_sum",
    "regret_bound", "risk_bound",
]  # fmt: skip
