"""The claim attacked: canaries with secret draws, scores that know the mechanism, bounds named by what they assume."""

from anyorder.audit.arrays import from_file, from_rows, from_scores
from anyorder.audit.bounds import epsilon_lower_bound, mu_estimate, p_value
from anyorder.audit.canaries import Canaries, as_released, random_steps, scores, worst_steps
from anyorder.audit.loader_check import watch
from anyorder.audit.planted import plant
from anyorder.audit.secrets import Memorised, Secrets, group_curve

__all__ = [
    "Canaries",
    "Memorised",
    "Secrets",
    "as_released",
    "epsilon_lower_bound",
    "from_file",
    "from_rows",
    "from_scores",
    "group_curve",
    "mu_estimate",
    "p_value",
    "plant",
    "random_steps",
    "scores",
    "watch",
    "worst_steps",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
