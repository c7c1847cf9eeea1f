"""A small convolutional network on MNIST, in order."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "mnist/main.py"
ARGS = ["--epochs", "2", "--test-batch-size", "64"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "scheduler = StepLR",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, epsilon=8, delta=1e-5)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        ...
        """,
    ),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "scheduler = StepLR",
        """
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder.parent / "data")
