"""What the GANs of one repository have in common: the discriminator alone sees data, and is made private."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e"
ARGS = ["--n_epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
IMPORT = ("import argparse", "import argparse\nimport anyorder as ao")


def ours(optimizer: str = "Adam", network: str = "discriminator", made: str = "discriminator") -> tuple[str, str]:
    """The edit behind the line that makes the optimizer; noise is fitted to it where `ao.plan` can read it."""
    fitted = ", optimizer=optimizer_D" if optimizer == "Adam" else ""
    return (
        f"optimizer_D = torch.optim.{optimizer}",
        f"""
        ...
        plan = ao.plan(loader=dataloader, epochs=opt.n_epochs, epsilon=8, delta=1e-5{fitted})
        engine = ao.PrivacyEngine(plan)
        {network}, optimizer_D, dataloader = engine.make_private({made}, optimizer_D, dataloader)
        """,
    )


def opacus(optimizer: str = "Adam") -> list[tuple[str, str]]:
    """All edits for Opacus."""
    return [
        ("import argparse", "import argparse\nimport opacus"),
        (
            f"optimizer_D = torch.optim.{optimizer}",
            """
        ...
        discriminator, optimizer_D, dataloader = opacus.PrivacyEngine().make_private(
            module=discriminator, optimizer=optimizer_D, data_loader=dataloader,
            noise_multiplier=1.0, max_grad_norm=1.0)
        """,
        ),
    ]


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data/mnist")
