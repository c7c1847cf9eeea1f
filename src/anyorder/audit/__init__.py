"""The claim attacked: canaries with secret draws, scores that know the mechanism, bounds named by what they assume."""

from anyorder.audit.arrays import from_file, from_rows, from_scores
from anyorder.audit.bounds import epsilon_lower_bound, mu_estimate, p_value
from anyorder.audit.canaries import Canaries, scores
from anyorder.audit.loader_check import watch
from anyorder.audit.planted import plant
from anyorder.audit.secrets import Memorised, Secrets

__all__ = [
    "Canaries",
    "Memorised",
    "Secrets",
    "epsilon_lower_bound",
    "from_file",
    "from_rows",
    "from_scores",
    "mu_estimate",
    "p_value",
    "plant",
    "scores",
    "watch",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
