"""anyorder: differentially private training for data that arrives in any order.

The rooms, in reading order: workload (A), participation (who takes part when), strategy (C), sensitivity, error,
optimize (choose C), accounting (epsilon), noise (addressable), sampling (loaders and their order), plan (the claim),
clipping, ledger (enforces the claim), receipt (a unit's own part in it), certificate (shows it),
train (the engine).
"""

from anyorder import (
    accounting,
    clipping,
    errors,
    noise,
    optimize,
    participation,
    sampling,
    strategy,
    train,
    workload,
)
from anyorder.certificate import Certificate, Evidence, verify
from anyorder.clipping import check_model
from anyorder.error import last_loss, max_loss, rmse
from anyorder.plan import Plan, plan
from anyorder.receipt import Receipt
from anyorder.sampling import FixedOrderSampler
from anyorder.sensitivity import Bound, sensitivity, unit_sensitivities
from anyorder.train import FTRL, PrivacyEngine

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "Bound",
    "Certificate",
    "Evidence",
    "FixedOrderSampler",
    "Plan",
    "PrivacyEngine",
    "Receipt",
    "accounting",
    "check_model",
    "clipping",
    "errors",
    "last_loss",
    "max_loss",
    "noise",
    "optimize",
    "participation",
    "plan",
    "rmse",
    "sampling",
    "sensitivity",
    "strategy",
    "train",
    "unit_sensitivities",
    "verify",
    "workload",
]
