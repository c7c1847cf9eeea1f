"""Neural collaborative filtering, with privacy for each user: negatives are drawn from what the user did not rate."""

from pathlib import Path

from benchmarks.corpus import _recommenders

REPOSITORY, COMMIT = "https://github.com/guoyang9/NCF", "89ff06ffcd2bca6bb773b54925265c208a28d318"
SCRIPT = "main.py"
ARGS = ["--epochs", "2", "--batch_size", "256", "--factor_num", "8"]
NEEDS = ("tensorboardX==2.6.5",)
HERE = [
    ("config.py", "main_path = ", "main_path = './'"),
    ("model.cuda()", ""),
    ("user = user.cuda()", ""),
    ("item = item.cuda()", ""),
    ("label = label.float().cuda()", "label = label.float()"),
    ("evaluate.py", "user = user.cuda()", ""),
    ("evaluate.py", "item = item.cuda()", ""),
    ("torch.save(model", "torch.save(model.state_dict(),"),
]
EDITS = [
    ("import argparse", "import argparse\nimport anyorder as ao"),
    (
        "batch_size=args.batch_size, shuffle=True, num_workers=4)",
        "batch_sampler=ao.sampling.UnitOrderSampler([u for u, _ in train_data + [\n"
        "\tx for x in train_data for _ in range(args.num_ng)]], batch_size=args.batch_size, seed=0))",
    ),
    (
        "# writer = SummaryWriter()",
        """
        train_loader.dataset.ng_sample()
        plan = ao.plan(loader=train_loader, unit=0, epochs=args.epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, train_loader = engine.make_private(model, optimizer, train_loader, unit=0)
        """,
    ),
]
OPACUS = [
    ("import argparse", "import argparse\nimport opacus"),
    (
        "# writer = SummaryWriter()",
        """
        train_loader.dataset.ng_sample()
        model, optimizer, train_loader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
    ("model.zero_grad()", "optimizer.zero_grad()"),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _recommenders.ncf(folder)
