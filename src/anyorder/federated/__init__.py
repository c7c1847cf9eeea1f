"""Users and owners: each sends one message, which is clipped as a whole, and what is released protects the sender.

One set of server objects, on the release core, for simulation and for deployment. `anyorder.federated.flower` and
`.nvflare` bring them to Flower and NVFlare, and are imported when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from anyorder.federated.clients import LocalTraining
from anyorder.federated.cohorts import CheckIn, Diurnal
from anyorder.federated.device import DeviceRecord
from anyorder.federated.joint import owner_level, split, two_phase
from anyorder.federated.planning import epsilon_by_report_goal
from anyorder.federated.server import Layout, Server, clip_message
from anyorder.federated.simulation import assist, simulate

if TYPE_CHECKING:
    from anyorder.federated import flower as flower
    from anyorder.federated import nvflare as nvflare

__all__ = [
    "CheckIn", "DeviceRecord", "Diurnal", "Layout", "LocalTraining",
    "Server", "assist", "clip_message",
    "epsilon_by_report_goal",
    "owner_level", "simulate", "split", "two_phase",
]  # fmt: skip


if not TYPE_CHECKING:  # which sees the import above, and tells of names that are none

    def __getattr__(name: str) -> Any:
        if name not in ("flower", "nvflare"):
            raise AttributeError(f"module 'anyorder.federated' has no attribute {name!r}")
        return importlib.import_module(f"anyorder.federated.{name}")
