"""Any network of torchvision on ImageNet: a ResNet-18 on images that the script makes up itself."""

REPOSITORY, COMMIT = "https://github.com/pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
SCRIPT = "imagenet/main.py"
ARGS = ["--dummy", "-a", "resnet18", "-b", "4", "--epochs", "1", "-j", "0"]
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ("datasets.FakeData(1281167", "train_dataset = datasets.FakeData(24, (3, 64, 64), 1000, transforms.ToTensor())"),
    ("datasets.FakeData(50000", "val_dataset = datasets.FakeData(4, (3, 64, 64), 1000, transforms.ToTensor())"),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("models.__dict__[args.arch]()", "model = ao.clipping.convert(models.__dict__[args.arch]())"),
    (
        "for epoch in range(args.start_epoch",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_loader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_loader)
        ...
        """,
    ),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    ("models.__dict__[args.arch]()", "model = opacus.validators.ModuleValidator.fix(models.__dict__[args.arch]())"),
    (
        "for epoch in range(args.start_epoch",
        """
        model, optimizer, train_loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: BatchNorm became GroupNorm, by `convert`"
RESULT, WHY = "runs", "BatchNorm mixes the examples of a batch"
