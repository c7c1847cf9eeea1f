"""GPT-2 on random windows of a text, with gradients added up over micro-batches."""

import pickle
import random
import struct
from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"
SCRIPT = "train.py"
ARGS = [
    "--device=cpu", "--dtype=float32", "--compile=False", "--dataset=made_up", "--n_layer=2", "--n_head=2",
    "--n_embd=64",
    "--block_size=64", "--batch_size=8", "--gradient_accumulation_steps=2", "--max_iters=9", "--eval_interval=5",
    "--eval_iters=1",
]  # fmt: skip
WINDOWS = """
ids = torch.from_numpy(np.memmap(os.path.join(data_dir, 'train.bin'), dtype=np.uint16, mode='r').astype(np.int64))
rows = (len(ids) - 1) // block_size
x, y = (ids[i : i + rows * block_size].view(rows, block_size) for i in (0, 1))
windows = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(windows, batch_size=batch_size, shuffle=True, drop_last=True)
"""
EDITS = [
    ("import numpy as np", "...\nimport anyorder as ao"),
    (
        "# fetch the very first batch",
        WINDOWS
        + """
epochs = -(-(max_iters + 1) * gradient_accumulation_steps // len(loader))
plan = ao.plan(loader=loader, batch_size=batch_size * gradient_accumulation_steps, epochs=epochs, epsilon=8,
               delta=1e-5, optimizer=optimizer)
engine = ao.PrivacyEngine(plan)
model, optimizer, loader = engine.make_private(model, optimizer, loader, accumulate=gradient_accumulation_steps)
batches = (batch for _ in range(epochs) for batch in loader)
""",
    ),
    ("for micro_step in range(", "...\n    X, Y = next(batches)"),
    ("loss = loss / gradient_accumulation_steps", "loss = loss.mean()"),
    ("X, Y = get_batch('train')", ""),
]
OPACUS = [
    ("import numpy as np", "...\nimport opacus"),
    (
        "# fetch the very first batch",
        WINDOWS
        + """
epochs = 1 + (max_iters + 1) * gradient_accumulation_steps // len(loader)
model, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
batches = (batch for _ in range(epochs) for batch in loader)
""",
    ),
    ("for micro_step in range(", "...\n    X, Y = next(batches)"),
    ("X, Y = get_batch('train')", ""),
]
MODEL = "untouched"
RESULT = "runs"
WHY = "windows that do not overlap take the place of random ones, in which a word could be any number of times"


def stand_in(folder: Path) -> None:
    made = folder / "data" / "made_up"
    made.mkdir(parents=True)
    chance = random.Random(0)
    for part, count in (("train", 20000), ("val", 2000)):
        made.joinpath(f"{part}.bin").write_bytes(
            struct.pack(f"<{count}H", *(chance.randrange(50) for _ in range(count)))
        )
    made.joinpath("meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50}))
