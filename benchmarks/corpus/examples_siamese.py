"""Pairs of images drawn anew whenever an item is read, compared by a ResNet-18."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "siamese_network/main.py"
ARGS = ["--epochs", "1", "--batch-size", "16"]
NEEDS = ("torchvision==0.28.0",)
PAIRS = """
...
places = torch.randperm(len(train_dataset)).view(2, -1)
(a, b), (first, second) = train_dataset.data[places].float(), train_dataset.dataset.targets[places]
train_dataset = torch.utils.data.TensorDataset(a, b, (first == second).float())
"""
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("train_dataset = APP_MATCHER", PAIRS),
    ("model = SiameseNetwork()", "model = ao.clipping.convert(SiameseNetwork()).to(device)"),
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
    ("train_dataset = APP_MATCHER", PAIRS),
    ("model = SiameseNetwork()", "model = opacus.validators.ModuleValidator.fix(SiameseNetwork()).to(device)"),
    (
        "scheduler = StepLR",
        """
        model, optimizer, train_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: BatchNorm became GroupNorm, by `convert`"
RESULT, WHY = (
    "runs",
    "each image is in one pair: the script draws both images of an item from the whole data",
)


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder.parent / "data", train=128)
