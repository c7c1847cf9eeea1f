"""The claim attacked: canaries with secret coins, scores that know the mechanism, bounds named by what they assume."""

from anyorder.audit.bounds import epsilon_lower_bound, mu_estimate, p_value
from anyorder.audit.checking import Finding, check
from anyorder.audit.secrets import Memorised, Planted, Secrets, Uniformity, chi_squared, exposure, group_curve

__all__ = [
    "Finding",
    "Memorised",
    "Planted",
    "Secrets",
    "Uniformity",
    "check",
    "chi_squared",
    "epsilon_lower_bound",
    "exposure",
    "group_curve",
    "mu_estimate",
    "p_value",
]
