"""What people use: the main job, federations, audits, the report, the command line and the planner's page.

Each name is loaded when it is asked for: the report, the charts and the plans of a command line need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyorder.app.audits import Setup, audit_inputs, audit_training, with_canaries
    from anyorder.app.cards import card, comparison_table, facts_panel, receipt_facts, search_verdict, verdict
    from anyorder.app.charts import (
        METHODS,
        AuditSummary,
        audit_panel,
        exposure_phrase,
        plot_accuracy,
        plot_audit,
        plot_noise,
        plot_ranks,
        plot_report_goals,
    )
    from anyorder.app.federation import (
        FederatedResult,
        FederatedSettings,
        by_key,
        federate,
        resume_federation,
        split_by_class,
    )
    from anyorder.app.job import Observer, Result, Settings, resume, train
    from anyorder.app.report import Attacked, Shown, html_refusal, html_report

_MODULES = {
    "audits": ["Setup", "audit_inputs", "audit_training", "with_canaries"],
    "cards": ["card", "comparison_table", "facts_panel", "receipt_facts", "search_verdict", "verdict"],
    "charts": [
        "METHODS", "AuditSummary", "audit_panel", "exposure_phrase", "plot_accuracy", "plot_audit", "plot_noise",
        "plot_ranks", "plot_report_goals",
    ],
    "federation": [
        "FederatedResult", "FederatedSettings", "by_key", "federate", "resume_federation", "split_by_class",
    ],
    "job": ["Observer", "Result", "Settings", "resume", "train"],
    "report": ["Attacked", "Shown", "html_refusal", "html_report"],
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "METHODS", "Attacked", "AuditSummary", "FederatedResult", "FederatedSettings", "Observer", "Result", "Settings",
    "Setup", "Shown", "audit_inputs", "audit_panel", "audit_training", "by_key", "card", "comparison_table",
    "exposure_phrase", "facts_panel", "federate", "html_refusal", "html_report", "plot_accuracy", "plot_audit",
    "plot_noise", "plot_ranks", "plot_report_goals", "receipt_facts", "resume", "resume_federation", "search_verdict",
    "split_by_class", "train", "verdict", "with_canaries",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'anyorder.app' has no attribute {name!r}")
    return getattr(importlib.import_module(f"anyorder.app.{_MODULE_OF[name]}"), name)
