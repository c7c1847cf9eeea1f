"""Opacus' own CIFAR-10 example."""

REPOSITORY, COMMIT = "https://github.com/pytorch/opacus", "4d0ebc84613d214fbfd37fbfd1390e3747a625ce"
SCRIPT = "examples/cifar10.py"
ARGS = ["--device", "cpu", "--batch-size", "32", "--epochs", "2", "-j", "0", "--disable-dp"]
NEEDS = ("torchvision==0.28.0",)
HERE = [
    (
        "from torchvision.datasets import CIFAR10",
        """
        from torchvision.datasets import FakeData
        CIFAR10 = lambda root, train, download, transform: FakeData(256, (3, 32, 32), 10, transform)
        """,
    )
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "for epoch in range(args.start_epoch",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, noise_multiplier=args.sigma, delta=args.delta,
                       clip_norm=args.max_per_sample_grad_norm, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        ...
        """,
    ),
]
OPACUS = [("args = parse_args()", "...\nargs.disable_dp = False")]
MODEL = "untouched"
RESULT, WHY = "runs", ""
