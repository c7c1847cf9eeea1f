"""A Wasserstein GAN with a gradient penalty, which the critic takes of each example inside of its forward."""

from benchmarks.corpus import _gans

REPOSITORY, COMMIT, ARGS, NEEDS = _gans.REPOSITORY, _gans.COMMIT, _gans.ARGS, _gans.NEEDS
SCRIPT = "implementations/wgan_gp/wgan_gp.py"
EDITS = [
    _gans.IMPORT,
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
    _gans.ours(network="critic", made="Critic(discriminator)"),
    ("real_validity = discriminator(real_imgs)", ""),
    ("gradient_penalty = compute_gradient_penalty", "alpha = torch.rand(len(imgs), 1, 1, 1)"),
    ("d_loss = -torch.mean(real_validity)", "d_loss = critic(real_imgs, fake_imgs.detach(), alpha).mean()"),
]
OPACUS = _gans.opacus()
MODEL = "changed: the penalty is taken in `forward`"
RESULT, WHY = "runs", ""
stand_in = _gans.stand_in
