"""A transformer that makes up names, from batches drawn with replacement without end."""

from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4"
SCRIPT = "makemore.py"
ARGS = ["--max-steps", "12", "--num-workers", "0"]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    (
        "batch_loader = InfiniteDataLoader",
        """
        loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
        epochs = -(-args.max_steps // len(loader))
        plan = ao.plan(loader=loader, epochs=epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, loader = ao.PrivacyEngine(plan).make_private(model, optimizer, loader)
        batches = (batch for _ in range(epochs) for batch in loader)
        """,
    ),
    ("batch = batch_loader.next()", "batch = next(batches)"),
    ("model.zero_grad(set_to_none", "loss = loss.mean()\n..."),
]
OPACUS = [
    ("import argparse", "import opacus\n..."),
    (
        "batch_loader = InfiniteDataLoader",
        """
        loader = DataLoader(train_dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
        epochs = 1 + args.max_steps // len(loader)
        model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
        batches = (batch for _ in range(epochs) for batch in loader)
        """,
    ),
    ("batch = batch_loader.next()", "batch = next(batches)"),
]
MODEL = "untouched"
RESULT, WHY = "runs", "a pass over shuffled data takes the place of draws with replacement without end"


def stand_in(folder: Path) -> None:
    (folder / "names.txt").write_text("\n".join(_made_up.words(800, "names")))
