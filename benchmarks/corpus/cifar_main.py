"""A network of aggregated layers on CIFAR-10, with group normalisation."""

REPOSITORY, COMMIT = "https://github.com/kuangliu/pytorch-cifar", "49b7aa97b0c12fe0d4054e670403a16b6b834ddd"
SCRIPT = "main.py"
ARGS: list[str] = []
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ("net = SimpleDLA()", "net = ResNet18()"),
    ("trainset, batch_size=128", "trainset, batch_size=16, shuffle=True)"),
    ("testset, batch_size=100", "testset, batch_size=16, shuffle=False)"),
    ("root='./data', train=True", "64, (3, 32, 32), 10, transform_train)"),
    ("root='./data', train=False", "16, (3, 32, 32), 10, transform_test)"),
    ("trainset = torchvision.datasets.CIFAR10(", "trainset = torchvision.datasets.FakeData("),
    ("testset = torchvision.datasets.CIFAR10(", "testset = torchvision.datasets.FakeData("),
    ("from utils import progress_bar", "progress_bar = print  # which asks for the size of the terminal"),
    ("for epoch in range(start_epoch, start_epoch+200)", "for epoch in range(2):"),
]
EDITS = [
    ("import argparse", "import argparse\nimport anyorder as ao"),
    ("net = net.to(device)", "net = ao.clipping.convert(net).to(device)"),
    (
        "scheduler = torch.optim.lr_scheduler",
        """
        plan = ao.plan(loader=trainloader, epochs=2, epsilon=8, delta=1e-5, optimizer=optimizer)
        net, optimizer, trainloader = ao.PrivacyEngine(plan).make_private(net, optimizer, trainloader)
        ...
        """,
    ),
]
OPACUS = [
    ("import argparse", "import argparse\nimport opacus.validators"),
    ("net = net.to(device)", "net = opacus.validators.ModuleValidator.fix(net).to(device)"),
    (
        "scheduler = torch.optim.lr_scheduler",
        """
        net, optimizer, trainloader = opacus.PrivacyEngine().make_private(
            module=net, optimizer=optimizer, data_loader=trainloader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
MODEL = "changed: group normalisation"
RESULT, WHY = "runs", ""
