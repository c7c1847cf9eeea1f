"""Lightning's Transformer on pieces of a text."""

import random
from pathlib import Path

from benchmarks.corpus import _lightning, _texts

REPOSITORY, COMMIT = _lightning.REPOSITORY, _lightning.COMMIT
SCRIPT = "examples/pytorch/basics/transformer.py"
ARGS: list[str] = []
HERE = [
    (
        "random_split(dataset, [n - 4000, 2000, 2000])",
        "train_dataset, val_dataset, test_dataset = random_split(dataset, [n - 40, 20, 20])",
    ),
    (
        "trainer = L.Trainer(",
        'trainer = L.Trainer(gradient_clip_val=0.25, max_epochs=2, accelerator="cpu", logger=False)',
    ),
]
EDITS = [
    (
        "import torch.nn.functional as F",
        "...\nimport anyorder as ao\nfrom anyorder.training.trainers.lightning import PrivacyCallback",
    ),
    (
        "class LanguageModel(L.LightningModule)",
        """
        class ByRow(Transformer):
            def forward(self, inputs, target, mask=None):
                words = super().forward(inputs, target, mask)
                return words.view(*target.shape, -1).transpose(1, 2) if self.training else words


        ...
        """,
    ),
    (
        "def training_step(",
        """
        def training_step(self, batch, batch_idx):
            input, target = batch
            return F.nll_loss(self.model(input, target), target)

        def over_all_words(self, batch, batch_idx):
        """,
    ),
    ("self.model = Transformer(", "self.model = ByRow(vocab_size=vocab_size)"),
    (
        "trainer.fit(model",
        """
        plan = ao.plan(
            loader=train_dataloader, epochs=trainer.max_epochs, epsilon=8, delta=1e-5,
            optimizer=model.configure_optimizers())
        privacy = PrivacyCallback(plan, network="model")
        model, train_dataloader = privacy.make_private(model, train_dataloader)
        trainer.callbacks.append(privacy)
        ...
        """,
    ),
]
OPACUS = "Lightning makes the optimizer itself, and Opacus has no callback for it."
MODEL = "changed: a row of its output for each row"
RESULT = "runs"
WHY = "A piece of text is protected, not its author; the vocabulary is made of the private text."


def stand_in(folder: Path) -> None:
    chance = random.Random(0)
    (folder / "data").mkdir()
    (folder / "data/wikitext-2.txt").write_text("".join(_texts.text(chance, 30, 40) + "\n" for _ in range(150)))
