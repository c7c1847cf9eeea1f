"""Opacus' own adversarial network, on the images of one digit."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/opacus", "4d0ebc84613d214fbfd37fbfd1390e3747a625ce"
SCRIPT = "examples/dcgan.py"
ARGS = ["--device", "cpu", "--data-root", "data", "--epochs", "1", "--workers", "0", "--ndf", "8", "--ngf", "8",
        "--batch-size", "16", "--disable-dp"]  # fmt: skip
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "optimizerG = optim.Adam",
        """
        plan = ao.plan(loader=dataloader, epochs=opt.epochs, noise_multiplier=opt.sigma, delta=opt.delta,
                       clip_norm=opt.max_per_sample_grad_norm, optimizer=optimizerD)
        netD, optimizerD, dataloader = ao.PrivacyEngine(plan).make_private(netD, optimizerD, dataloader)
        ...
        """,
    ),
]
OPACUS = [("opt = parser.parse_args()", "...\nopt.disable_dp = False")]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "data", train=1280)
