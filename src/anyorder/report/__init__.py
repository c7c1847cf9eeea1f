"""What a person reads: privacy cards, comparison tables and plots."""

from anyorder.report.card import card, comparison_table, describe_strategy, fact_rows, facts_panel
from anyorder.report.plots import noise_profile, plot_accuracy, plot_noise

__all__ = [
    "card",
    "comparison_table",
    "describe_strategy",
    "fact_rows",
    "facts_panel",
    "noise_profile",
    "plot_accuracy",
    "plot_noise",
]
