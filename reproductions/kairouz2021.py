"""Kairouz et al. 2021, "Practical and private (deep) learning without sampling or shuffling" [K21].

Figures that are computed run in seconds. Those that train need MNIST, CIFAR-10 and Brown in the folder ANYORDER_DATA;
their runs are lines of results/kairouz2021_runs.jsonl and kairouz2021_text_runs.jsonl, and only what is missing is run.
"""

from reproductions._claims import Figure
from reproductions.kairouz import accuracies, goals, missing, regret, tables, text, theorems, trees

TITLE = "Kairouz et al. 2021, Practical and private (deep) learning without sampling or shuffling"

FIGURES = (
    Figure("section3", theorems.gaussian),
    Figure("thm4_1", theorems.thm4_1),
    Figure("thmB1", theorems.equal),
    Figure("variance", trees.variance),
    Figure("against_n", trees.against_n),
    Figure("norms", theorems.norms),
    Figure("table1", regret.table1),
    Figure("thm5_1", regret.thm5_1),
    Figure("thmC1", regret.thmC1),
    Figure("thmC3", theorems.thmC3),
    Figure("thmD1", theorems.thmD1),
    Figure("thmD2", theorems.visits),
    Figure("known_order", theorems.known),
    Figure("fig1_network", accuracies.fig1_network),
    Figure("fig1_mnist", accuracies.fig1("mnist"), trains=True),
    Figure("fig1_cifar10", accuracies.fig1("cifar10"), trains=True),
    Figure("fig2a", text.fig2a),
    Figure("fig2c", goals.fig2c),
    Figure("table3", goals.table3),
    Figure("fig3", accuracies.fig3, trains=True),
    Figure("fig4", accuracies.fig4, trains=True),
    Figure("fig5", text.momentum, trains=True),
    Figure("fig6", accuracies.fig6, trains=True),
    Figure("fig7", goals.fig7c),
    Figure("fig7_text", text.estimator, trains=True),
    Figure("fig8_noise", trees.completion),
    Figure("fig8", accuracies.fig8, trains=True),
    Figure("fig9_noise", trees.schedules),
    Figure("fig9", accuracies.fig9, trains=True),
    Figure("table4", tables.table4),
    Figure("table4_sgd", goals.sampled),
    Figure("table5", tables.table5),
    Figure("not_tried", missing.missing),
)
