"""The claim attacked: canaries with secret coins, scores that know the mechanism, bounds named by what they assume."""

from anyorder.audit.arrays import from_file, from_rows, from_scores
from anyorder.audit.bounds import epsilon_lower_bound, mu_estimate, p_value
from anyorder.audit.canaries import Canaries
from anyorder.audit.checking import Finding, Seen, Watch, Watched, check, watch
from anyorder.audit.patterns import random_steps, worst_steps
from anyorder.audit.planted import PlantedCanaries, plant
from anyorder.audit.result import Audited, Stated
from anyorder.audit.scores import sampled_scores, scores, visible
from anyorder.audit.secrets import Memorised, Planted, Secrets, Uniformity, chi_squared, exposure, group_curve
from anyorder.audit.whiten import as_released

__all__ = [
    "Audited",
    "Canaries",
    "Finding",
    "Memorised",
    "Planted",
    "PlantedCanaries",
    "Secrets",
    "Seen",
    "Stated",
    "Uniformity",
    "Watch",
    "Watched",
    "as_released",
    "check",
    "chi_squared",
    "epsilon_lower_bound",
    "exposure",
    "from_file",
    "from_rows",
    "from_scores",
    "group_curve",
    "mu_estimate",
    "p_value",
    "plant",
    "random_steps",
    "sampled_scores",
    "scores",
    "visible",
    "watch",
    "worst_steps",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
