"""What people use: the main job, audits, the report, the command line and the planner's page.

Each name is loaded when it is asked for: the report, the charts and the plans of a command line need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyorder.app.audits import Setup, audit_inputs, audit_training, with_canaries
    from anyorder.app.charts import AuditSummary, plot_audit
    from anyorder.app.federation import by_key
    from anyorder.app.job import Settings, resume, train
    from anyorder.app.report import html_report

__all__ = [
    "AuditSummary", "Settings", "Setup", "audit_inputs", "audit_training", "by_key", "html_report",
    "plot_audit", "resume", "train", "with_canaries",
]  # fmt: skip

_MODULES = {
    "audits": ["Setup", "audit_inputs", "audit_training", "with_canaries"],
    "charts": ["AuditSummary", "plot_audit"],
    "federation": ["by_key"],
    "job": ["Settings", "resume", "train"],
    "report": ["html_report"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'anyorder.app' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anyorder.app.{_MODULE_OF[name]}"), name)
