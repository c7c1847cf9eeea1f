"""A Wasserstein GAN on digits, the weights of its critic clipped after each step."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e"
SCRIPT = "implementations/wgan/wgan.py"
ARGS = ["--n_epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import argparse\nimport anyorder as ao"),
    (
        "optimizer_D = torch.optim.RMSprop",
        """
        ...
        plan = ao.plan(loader=dataloader, epochs=opt.n_epochs, epsilon=8, delta=1e-5)
        engine = ao.PrivacyEngine(plan)
        discriminator, optimizer_D, dataloader = engine.make_private(discriminator, optimizer_D, dataloader)
        """,
    ),
]
OPACUS = [
    ("import argparse", "import argparse\nimport opacus"),
    (
        "optimizer_D = torch.optim.RMSprop",
        """
        ...
        discriminator, optimizer_D, dataloader = opacus.PrivacyEngine().make_private(
            module=discriminator, optimizer=optimizer_D, data_loader=dataloader,
            noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data/mnist")
