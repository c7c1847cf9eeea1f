"""Graph attention over one graph whose nodes are the examples."""

from benchmarks.corpus.examples_gcn import ARGS, COMMIT, REPOSITORY, RESULT, WHY, stand_in

__all__ = ["ARGS", "COMMIT", "REPOSITORY", "RESULT", "WHY", "stand_in"]

SCRIPT = "gat/main.py"
HERE = [("idx_test, idx_val, idx_train =", "idx_test, idx_val, idx_train = idx[:50], idx[50:100], idx[100:]")]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "for epoch in range(args.epochs)",
        """
        nodes = torch.utils.data.DataLoader(idx_train, batch_size=len(idx_train))
        plan = ao.plan(loader=nodes, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        gat_net, optimizer, nodes = ao.PrivacyEngine(plan).make_private(gat_net, optimizer, nodes)
        ...
            idx_train = next(iter(nodes))
        """,
    ),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "for epoch in range(args.epochs)",
        """
        nodes = torch.utils.data.DataLoader(idx_train, batch_size=len(idx_train))
        gat_net, optimizer, nodes = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=gat_net, optimizer=optimizer, data_loader=nodes, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False)
        ...
            idx_train = next(iter(nodes))
        """,
    ),
]
MODEL = "untouched"
