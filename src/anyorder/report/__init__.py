"""What a person reads: privacy cards, comparison tables and plots."""

from anyorder.report.audits import AuditSummary, plot_audit
from anyorder.report.card import card
from anyorder.report.html import Shown, html_report

__all__ = ["AuditSummary", "Shown", "card", "html_report", "plot_audit"]
