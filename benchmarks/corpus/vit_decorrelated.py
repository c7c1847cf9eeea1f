"""A vision transformer whose tokens are decorrelated over the batch."""

from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/lucidrains/vit-pytorch", "69d24fe9e3024c0d4b02761123b8583a24ebed1e"
SCRIPT, COPIED = "train_vit_decorr.py", "."
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0", "einops==0.8.2")
HERE = [
    ("EPOCHS = 10", "EPOCHS = 2"),
    ("depth = 6", "depth = 2,"),
    (
        "from torchvision.datasets import CIFAR100",
        """
        from torchvision.datasets import FakeData

        CIFAR100 = lambda transform, **_: FakeData(64, (3, 32, 32), 100, transform)
        """,
    ),
]
EDITS = [
    ("import torch.nn.functional as F", "...\nimport anyorder as ao"),
    (
        "optim = Adam(",
        """
        ...
        plan = ao.plan(loader=dataloader, epochs=EPOCHS, epsilon=8, delta=1e-5, optimizer=optim)
        vit, optim, dataloader = ao.PrivacyEngine(plan).make_private(vit, optim, dataloader)
        """,
    ),
    ("logits, decorr_aux_loss = vit(images)", "...\ndecorr_aux_loss = decorr_aux_loss.mean()"),
]
OPACUS = [
    ("import torch.nn.functional as F", "...\nimport opacus"),
    (
        "optim = Adam(",
        """
        ...
        vit, optim, dataloader = opacus.PrivacyEngine().make_private(
            module=vit, optimizer=optim, data_loader=dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", "Its loss of tokens is one number for each example, as the model runs on each alone."


def stand_in(folder: Path) -> None:
    (folder / "wandb.py").write_text(
        "from types import SimpleNamespace\n\nrun = SimpleNamespace()\n\n\ndef init(**settings):\n    pass\n\n\n"
        "log = print\n"
    )
