"""A U-Net that finds cars in pictures; its dice loss is one ratio over the whole batch."""

import random
from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/milesial/Pytorch-UNet", "21d7850f2af30a9695bbeea75f3136aa538cfc4a"
SCRIPT, COPIED = "train.py", "."
ARGS = ["--epochs", "2", "--batch-size", "4", "--scale", "1", "--validation", "25"]
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ("loader_args = dict(batch_size", "loader_args = dict(batch_size=batch_size)"),
    ("histograms['Gradients/' + tag] =", "pass"),
    ("if not (torch.isinf(value.grad)", "if True:"),
]
EDITS = [
    ("import argparse", "...\nimport anyorder as ao"),
    ("model = UNet(n_channels=3", "...\nmodel = ao.clipping.convert(model)"),
    (
        "# 5. Begin training",
        """
        plan = ao.plan(loader=train_loader, epochs=epochs, epsilon=8, delta=1e-5)
        channels, classes = model.n_channels, model.n_classes
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        model.n_channels, model.n_classes = channels, classes
        """,
    ),
    (
        "utils/dice_score.py",
        "return 1 - fn(input, target",
        """
        rows = [fn(a[None], b[None], reduce_batch_first=True) for a, b in zip(input, target)]
        return 1 - torch.stack(rows).mean()
        """,
    ),
    ("state_dict = model.state_dict()", "state_dict = dict(model.state_dict())"),
]
OPACUS = [
    ("import argparse", "...\nimport opacus.validators"),
    ("model = UNet(n_channels=3", "...\nmodel = opacus.validators.ModuleValidator.fix(model)"),
    (
        "# 5. Begin training",
        """
        channels, classes = model.n_channels, model.n_classes
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        model.n_channels, model.n_classes = channels, classes
        """,
    ),
]
MODEL = "changed: group normalisation"
RESULT, WHY = "runs", "Its dice loss is refused as it stands: one ratio of sums over the batch."


def stand_in(folder: Path) -> None:
    from PIL import Image

    chance = random.Random(0)
    for name, mode in (("imgs", "RGB"), ("masks", "L")):
        (folder / "data" / name).mkdir(parents=True)
        for i in range(16):
            size = 32 * 32 * len(mode) if mode == "RGB" else 32 * 32
            pixels = chance.randbytes(size) if mode == "RGB" else bytes(chance.choices((0, 255), k=size))
            Image.frombytes(mode, (32, 32), pixels).save(folder / "data" / name / f"{i}.png")
    (folder / "wandb.py").write_text(WANDB.lstrip())


WANDB = '''
"""In the place of wandb."""

from unittest.mock import MagicMock

init, Histogram, Image = MagicMock(), MagicMock(), MagicMock()
'''
