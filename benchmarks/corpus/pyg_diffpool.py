"""Graphs that are pooled by learnt clusters, dense as PyG writes it, padded to 150 nodes."""

from pathlib import Path

from benchmarks.corpus import _graphs

REPOSITORY, COMMIT = "https://github.com/pyg-team/pytorch_geometric", "5c6461b2305ad068a6d61165b3c55852a11aaa41"
SCRIPT = "examples/proteins_diff_pool.py"
ARGS: list[str] = []
NEEDS = ("torch-geometric==2.8.1",)
HERE = [("max_nodes = 150", "max_nodes = 16"), ("for epoch in range(1, 151)", "for epoch in range(1, 3):")]
EDITS = [
    ("import os.path as osp", "...\nimport anyorder as ao"),
    ("model = Net().to(device)", "model = ao.clipping.convert(Net()).to(device)"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=train_loader, epochs=2, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        """,
    ),
]
OPACUS = [
    ("import os.path as osp", "...\nimport opacus.validators"),
    ("model = Net().to(device)", "model = opacus.validators.ModuleValidator.fix(Net()).to(device)"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "changed: group normalisation"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _graphs.tu(folder / "../data/PROTEINS_dense", "PROTEINS")
