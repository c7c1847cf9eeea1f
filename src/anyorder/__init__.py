"""anyorder: differentially private training for data that arrives in any order.

The rooms, in reading order: workload (A), participation (who takes part when), strategy (C), sensitivity, error,
optimize (choose C), accounting (epsilon), noise (addressable), sampling (loaders and their order), plan (the claim),
ledger (enforces the claim), receipt (a unit's own part in it), certificate (shows it), release (carries it out),
audit (attacks it), clipping, sparse (wide tables), training (the engine), federated (users and owners),
online (convex learners), budget (across runs).

What a planner needs is here at once; audits, and what needs torch, are loaded when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anyorder import accounting, errors, noise, optimize, participation, strategy, workload
from anyorder.accounting.curves import compose
from anyorder.plan.certificate import Certificate, verify
from anyorder.plan.options import SGD, Limits, mechanism, order
from anyorder.plan.plan import Plan
from anyorder.plan.planner import compare, plan
from anyorder.strategy.error import RENAMED, renamed, rmse
from anyorder.strategy.sensitivity import sensitivity, unit_sensitivities

if TYPE_CHECKING:
    from anyorder import audit, budget, clipping, federated, online, sampling, sparse, training
    from anyorder.audit.loader_check import check
    from anyorder.budget.file import Budget
    from anyorder.budget.search import tune
    from anyorder.clipping.bounded import bounded_sum
    from anyorder.clipping.validate import check_model
    from anyorder.release.release import Release
    from anyorder.sampling.samplers import FixedOrderSampler
    from anyorder.training.engine import PrivacyEngine
    from anyorder.training.metrics import Metrics
    from anyorder.training.optimizers import FTRL, Public

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "SGD",
    "Budget",
    "Certificate",
    "FixedOrderSampler",
    "Limits",
    "Metrics",
    "Plan",
    "PrivacyEngine",
    "Public",
    "Release",
    "accounting",
    "audit",
    "bounded_sum",
    "budget",
    "check",
    "check_model",
    "clipping",
    "compare",
    "compose",
    "errors",
    "federated",
    "mechanism",
    "noise",
    "online",
    "optimize",
    "order",
    "participation",
    "plan",
    "rmse",
    "sampling",
    "sensitivity",
    "sparse",
    "strategy",
    "training",
    "tune",
    "unit_sensitivities",
    "verify",
    "workload",
]

# `plan` and `sensitivity` are functions beside modules of that name. They are bound above, after the import of those
# modules has bound the modules themselves; bound lazily, a name would stay the module.
_LAZY = {
    "Budget": "budget.file",
    "FTRL": "training.optimizers",
    "FixedOrderSampler": "sampling.samplers",
    "Metrics": "training.metrics",
    "PrivacyEngine": "training.engine",
    "Public": "training.optimizers",
    "Release": "release.release",
    "audit": "",
    "bounded_sum": "clipping.bounded",
    "budget": "",
    "check": "audit.loader_check",
    "check_model": "clipping.validate",
    "clipping": "",
    "federated": "",
    "online": "",
    "sampling": "",
    "sparse": "",
    "training": "",
    "tune": "budget.search",
}
"""Name -> the module it is from, or "" for a room itself."""


if not TYPE_CHECKING:  # which sees the imports above, and tells of names that are none

    def __getattr__(name: str) -> Any:
        if name in RENAMED:
            return renamed(name)
        if name not in _LAZY:
            raise AttributeError(f"module 'anyorder' has no attribute {name!r}")
        room = _LAZY[name]
        try:
            found = importlib.import_module(f"anyorder.{room or name}")
        except ModuleNotFoundError as problem:
            if problem.name != "torch":
                raise
            raise AttributeError(f"anyorder.{name} needs torch, which is not installed: pip install torch") from problem
        value = getattr(found, name) if room else found
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
