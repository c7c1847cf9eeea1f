"""A convolutional network on digits in a loop of its own, on Fabric."""

from pathlib import Path

from benchmarks.corpus import _lightning, _made_up

REPOSITORY, COMMIT = _lightning.REPOSITORY, _lightning.COMMIT
SCRIPT = "examples/fabric/image_classifier/train_fabric.py"
ARGS = ["--epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
HERE = [("fabric = Fabric()", 'fabric = Fabric(accelerator="cpu")')]
EDITS = [
    ("import argparse", "...\nimport anyorder as ao"),
    ("= fabric.setup_dataloaders(train_loader", "test_loader = fabric.setup_dataloaders(test_loader)"),
    (
        "for batch_idx, (data, target) in enumerate(train_loader)",
        "...\n    data, target = data.to(fabric.device), target.to(fabric.device)",
    ),
    (
        "model, optimizer = fabric.setup(model, optimizer)",
        """
        plan = ao.plan(loader=train_loader, epochs=hparams.epochs, epsilon=8, delta=1e-5)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        """,
    ),
]
OPACUS = [
    ("import argparse", "...\nimport opacus"),
    ("= fabric.setup_dataloaders(train_loader", "test_loader = fabric.setup_dataloaders(test_loader)"),
    (
        "for batch_idx, (data, target) in enumerate(train_loader)",
        "...\n    data, target = data.to(fabric.device), target.to(fabric.device)",
    ),
    (
        "model, optimizer = fabric.setup(model, optimizer)",
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
    _made_up.mnist(folder / "../../../Datasets")
