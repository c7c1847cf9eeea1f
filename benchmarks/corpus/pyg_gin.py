"""A graph isomorphism network on molecules: the graphs of a batch are padded to a public size, not joined."""

from pathlib import Path

from benchmarks.corpus import _graphs

REPOSITORY, COMMIT = "https://github.com/pyg-team/pytorch_geometric", "5c6461b2305ad068a6d61165b3c55852a11aaa41"
SCRIPT = "examples/mutag_gin.py"
ARGS = ["--epochs", "2", "--batch_size", "16"]
NEEDS = ("torch-geometric==2.8.1",)
PADDED = [
    (
        "from torch_geometric.loader import DataLoader",
        "import torch_geometric.transforms as T\nfrom torch_geometric.loader import DenseDataLoader as DataLoader",
    ),
    ("import MLP, GINConv, global_add_pool", "from torch_geometric.nn import MLP, DenseGINConv as GINConv"),
    (
        "dataset = TUDataset(path",
        """
        def padded(data):
            data = T.ToDense(12)(data)
            return type(data)(x=data.x, edge_index=data.adj, batch=data.mask, y=data.y)

        dataset = TUDataset(path, name=args.dataset, transform=padded).shuffle()
        """,
    ),
    ("mlp = MLP([in_channels, hidden", "mlp = MLP([in_channels, hidden_channels, hidden_channels], norm=None)"),
    ("x = conv(x, edge_index).relu()", "x = conv(x, edge_index, batch).relu()"),
    ("x = global_add_pool(x, batch)", "x = (x * batch[..., None]).sum(1)"),
    ("loss = F.cross_entropy(out, data.y)", "loss = F.cross_entropy(out, data.y[:, 0])"),
    ("total_loss += float(loss) * data.num_graphs", "total_loss += float(loss) * len(data.y)"),
    ("total_correct += int((pred == data.y)", "total_correct += int((pred == data.y[:, 0]).sum())"),
]
"""PyG's own dense layers, a mask of the nodes, and no batch normalisation."""
EDITS = [
    *PADDED,
    ("import argparse", "...\nimport anyorder as ao"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=train_loader, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        """,
    ),
    ("train_acc = test(train_loader)", ""),
    ("log(Epoch=epoch, Loss=loss", "log(Epoch=epoch, Test=test_acc)"),
]
OPACUS = [
    *PADDED,
    ("import argparse", "...\nimport opacus"),
    (
        "optimizer = torch.optim.Adam",
        """
        ...
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
    ("train_acc = test(train_loader)", ""),
    ("log(Epoch=epoch, Loss=loss", "log(Epoch=epoch, Test=test_acc)"),
]
MODEL = "changed: padded graphs, dense layers, no batch normalisation"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _graphs.tu(folder / "../data/TU", "MUTAG")
