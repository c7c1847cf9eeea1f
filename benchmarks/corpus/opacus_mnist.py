"""Opacus' own MNIST example."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/opacus", "4d0ebc84613d214fbfd37fbfd1390e3747a625ce"
SCRIPT = "examples/mnist.py"
ARGS = ["--device", "cpu", "--data-root", "data", "-n", "2", "--disable-dp"]
NEEDS = ("torchvision==0.28.0",)
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "for epoch in range(1, args.epochs + 1)",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, noise_multiplier=args.sigma, delta=args.delta,
                       clip_norm=args.max_per_sample_grad_norm, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        ...
        """,
    ),
]
OPACUS = [("args = parser.parse_args()", "...\nargs.disable_dp = False")]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _made_up.mnist(folder / "data")
