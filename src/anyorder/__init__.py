"""anyorder: differentially private training for data that arrives in any order.

The rooms, in reading order: patterns (sets of steps), workload (A), strategy (C, its sensitivity and error), noise
(addressable), accounting (epsilon), participation (who takes part when), optimize (choose C), ledger (enforces the
claim), sampling (loaders and their order), plan (the claim, its certificate and receipts), release (carries it out),
clipping, audit (attacks it), sparse (wide tables), training (the engine), federated (users and owners), online (convex
learners), budget (across runs), app (command line, reports, pages).

Each name is loaded when it is first asked for: `import anyorder` itself loads neither NumPy nor torch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyorder import (
        accounting,
        audit,
        budget,
        clipping,
        errors,
        federated,
        noise,
        online,
        optimize,
        participation,
        sampling,
        sparse,
        strategy,
        training,
        workload,
    )  # fmt: skip
    from anyorder.accounting.curves import compose
    from anyorder.audit.loader_check import check
    from anyorder.budget.file import Budget
    from anyorder.budget.search import tune
    from anyorder.clipping.bounded import bounded_sum
    from anyorder.clipping.validate import check_model
    from anyorder.plan.certificate import Certificate, verify
    from anyorder.plan.options import SGD, Limits, mechanism, order
    from anyorder.plan.plan import Plan
    from anyorder.plan.planner import compare, plan
    from anyorder.release.release import Release
    from anyorder.sampling.samplers import FixedOrderSampler
    from anyorder.strategy.registry import rmse, sensitivity, unit_sensitivities
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

_MODULES = {
    "accounting.curves": ("compose",),
    "audit.loader_check": ("check",),
    "budget.file": ("Budget",),
    "budget.search": ("tune",),
    "clipping.bounded": ("bounded_sum",),
    "clipping.validate": ("check_model",),
    "plan.certificate": ("Certificate", "verify"),
    "plan.options": ("SGD", "Limits", "mechanism", "order"),
    "plan.plan": ("Plan",),
    "plan.planner": ("compare", "plan"),
    "release.release": ("Release",),
    "sampling.samplers": ("FixedOrderSampler",),
    "strategy.registry": ("rmse", "sensitivity", "unit_sensitivities"),
    "training.engine": ("PrivacyEngine",),
    "training.metrics": ("Metrics",),
    "training.optimizers": ("FTRL", "Public"),
}
"""Module -> the names that are from it; what is in `__all__` besides are packages."""

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def _module_of(name: str) -> ModuleType:
    """The module that a public name is from, or is, imported."""
    if name not in _MODULE_OF and name not in __all__:
        raise AttributeError(f"module 'anyorder' has no attribute {name!r}")
    try:
        return importlib.import_module(f"anyorder.{_MODULE_OF.get(name, name)}")
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        raise AttributeError(f"anyorder.{name} needs torch, which is not installed: pip install torch") from problem


if not TYPE_CHECKING:  # which sees the imports above, and tells of names that are none

    class _Package(ModuleType):
        """This package: the package `anyorder.plan`, when it is imported, does not take the place of the function."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name != "plan" or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Any, ...]:  # a function that names it is sent to another process with it
            return importlib.import_module, (self.__name__,)

    sys.modules[__name__].__class__ = _Package

    def __getattr__(name: str) -> Any:
        found = _module_of(name)
        return globals().setdefault(name, getattr(found, name) if name in _MODULE_OF else found)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
