"""A GAN of linear layers on digits, its discriminator first in each step."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/yunjey/pytorch-tutorial", "0500d3df5a2a8080ccfccbc00aca0eacc21818db"
SCRIPT = "tutorials/03-advanced/generative_adversarial_network/main.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
HERE = [("num_epochs = 200", "num_epochs = 2")]
EDITS = [
    ("import torch.nn as nn", "...\nimport anyorder as ao"),
    (
        "d_optimizer = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=data_loader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=d_optimizer)
        D, d_optimizer, data_loader = ao.PrivacyEngine(plan).make_private(D, d_optimizer, data_loader)
        """,
    ),
    ("d_loss_fake = criterion(", "outputs = D(fake_images.detach())\n..."),
]
OPACUS = [
    ("import torch.nn as nn", "...\nimport opacus"),
    (
        "d_optimizer = torch.optim.Adam",
        """
        ...
        D, d_optimizer, data_loader = opacus.PrivacyEngine().make_private(
            module=D, optimizer=d_optimizer, data_loader=data_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data", train=500)
