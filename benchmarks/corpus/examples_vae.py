"""A variational autoencoder whose loss is a sum, and whose decoder is called by itself."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "vae/main.py"
ARGS = ["--epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "optimizer = optim.Adam",
        """
        ...
        plan = ao.plan(loader=train_loader, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, train_loader = engine.make_private(model, optimizer, train_loader, loss_reduction="sum")
        """,
    ),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "optimizer = optim.Adam",
        """
        ...
        model, optimizer, train_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0,
            loss_reduction="sum")
        """,
    ),
    ("sample = model.decode(sample)", "sample = model._module.decode(sample).cpu()"),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder.parent / "data", test=128)
    (folder / "results").mkdir(exist_ok=True)
