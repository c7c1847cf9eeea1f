"""What a person reads: privacy cards, comparison tables and plots."""

from anyorder.report.audits import METHODS, AuditSummary, audit_panel, plot_audit
from anyorder.report.card import card, comparison_table, facts_panel
from anyorder.report.html import Attacked, Shown, html_refusal, html_report
from anyorder.report.plots import plot_accuracy, plot_noise, plot_report_goals
from anyorder.report.searches import search_verdict
from anyorder.report.secrets import exposure_phrase, plot_ranks
from anyorder.report.verification import receipt_facts, verdict

__all__ = [
    "METHODS", "Attacked", "AuditSummary", "Shown", "audit_panel", "card", "comparison_table", "exposure_phrase",
    "facts_panel", "html_refusal", "html_report",
    "plot_accuracy", "plot_audit", "plot_noise", "plot_ranks", "plot_report_goals", "receipt_facts", "search_verdict",
    "verdict",
]  # fmt: skip
