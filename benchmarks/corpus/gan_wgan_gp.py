"""A Wasserstein GAN with a gradient penalty, which the critic takes of each example inside of its forward."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/eriklindernoren/PyTorch-GAN", "36d3c77e5ff20ebe0aeefd322326a134a279b93e"
SCRIPT = "implementations/wgan_gp/wgan_gp.py"
ARGS = ["--n_epochs", "2"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import argparse\nimport anyorder as ao"),
    (
        "# Loss weight for gradient penalty",
        """
        class Critic(nn.Module):
            def __init__(self, validity):
                super().__init__()
                self.validity = validity

            def forward(self, real, fake, alpha):
                slope = torch.func.grad(lambda x: self.validity(x).sum())(alpha * real + (1 - alpha) * fake)
                penalty = (slope.flatten(1).norm(2, dim=1) - 1) ** 2
                return self.validity(fake)[:, 0] - self.validity(real)[:, 0] + lambda_gp * penalty

        """,
    ),
    (
        "optimizer_D = torch.optim.Adam",
        """
        ...
        plan = ao.plan(loader=dataloader, epochs=opt.n_epochs, epsilon=8, delta=1e-5, optimizer=optimizer_D)
        engine = ao.PrivacyEngine(plan)
        critic, optimizer_D, dataloader = engine.make_private(Critic(discriminator), optimizer_D, dataloader)
        """,
    ),
    ("real_validity = discriminator(real_imgs)", ""),
    ("gradient_penalty = compute_gradient_penalty", "alpha = torch.rand(len(imgs), 1, 1, 1)"),
    ("d_loss = -torch.mean(real_validity)", "d_loss = critic(real_imgs, fake_imgs.detach(), alpha).mean()"),
]
OPACUS = [
    ("import argparse", "import argparse\nimport opacus"),
    (
        "optimizer_D = torch.optim.Adam",
        """
        ...
        discriminator, optimizer_D, dataloader = opacus.PrivacyEngine().make_private(
            module=discriminator, optimizer=optimizer_D, data_loader=dataloader,
            noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "changed: the penalty is taken in `forward`"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "../../data/mnist")
