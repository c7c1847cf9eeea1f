"""A graph convolution over one graph whose nodes are the examples."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "gcn/main.py"
ARGS = ["--epochs", "5"]
HERE = [
    ("with requests.get(cora_url", ""),
    ("with tarfile.open(fileobj", ""),
    ("tgz_object.extractall()", ""),
    ("idx_test, idx_val, idx_train =", "idx_test, idx_val, idx_train = idx[:50], idx[50:100], idx[100:]"),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "for epoch in range(args.epochs)",
        """
        nodes = torch.utils.data.DataLoader(idx_train, batch_size=len(idx_train))
        plan = ao.plan(loader=nodes, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        gcn, optimizer, nodes = ao.PrivacyEngine(plan).make_private(gcn, optimizer, nodes)
        ...
            idx_train = next(iter(nodes))
        """,
    ),
]
OPACUS = "no layer rule for a layer that multiplies by the whole graph; a node has no gradient of its own"
MODEL = "untouched"
RESULT = "refused"
WHY = "right: the output of a node is made of its neighbours' features, so one node changes the gradients of many"


def stand_in(folder: Path) -> None:
    _made_up.cora(folder / "cora")
