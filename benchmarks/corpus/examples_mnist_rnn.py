"""An LSTM over the rows of digits, with BatchNorm behind it."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "mnist_rnn/main.py"
ARGS = ["--epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("model = Net()", "model = ao.clipping.convert(Net()).to(device)"),
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
    ("model = Net()", "model = opacus.validators.ModuleValidator.fix(Net()).to(device)"),
    (
        "scheduler = StepLR",
        """
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: BatchNorm became GroupNorm, by `convert`"
RESULT, WHY = "runs", "BatchNorm mixes the examples of a batch"


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder.parent / "data")
