"""A sentence encoder trained on how alike two sentences are, by the trainer of sentence-transformers."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/UKPLab/sentence-transformers", "85ec64559f4414aa536eca4bf53538291e0a333f"
SCRIPT = "examples/sentence_transformer/training/sts/training_stsbenchmark.py"
ARGS = ["bert"]
NEEDS = ("sentence-transformers==6.2.0",)
HERE = [
    ("num_epochs = 4", "num_epochs = 2"),
    ("warmup_ratio=0.1", "use_cpu=True,"),
    ("bf16=False", "remove_unused_columns=False,"),
    ("fp16=True", 'report_to=["none"],'),
    ('evaluation_strategy="steps"', 'eval_strategy="no",'),
    ('save_strategy="steps"', 'save_strategy="no",'),
    ('model.push_to_hub(f"{model_name}-sts")', "pass"),
]
EDITS = [
    ("from datasets import load_dataset", "...\nimport torch\nimport anyorder as ao"),
    (
        "trainer = SentenceTransformerTrainer(",
        """
        from anyorder.training.trainers.huggingface import PrivateTrainerMixin

        class PrivateOne(PrivateTrainerMixin, SentenceTransformerTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                features, labels = self.collect_features(inputs)
                tensors = [{k: v for k, v in each.items() if torch.is_tensor(v)} for each in features]
                one, other = (model(each)["sentence_embedding"] for each in tensors)
                return torch.nn.functional.mse_loss(torch.cosine_similarity(one, other), labels)

        plan = ao.plan(
            dataset_size=len(train_dataset), batch_size=train_batch_size, epochs=num_epochs, epsilon=8, delta=1e-5,
            optimizer=torch.optim.AdamW([torch.zeros(1)]))
        trainer = PrivateOne(
            plan=plan, pad_to=(16, 32), public_evaluation=True,
        """,
    ),
]
OPACUS = "The trainer makes loader and optimizer itself, and Opacus has none for it."
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    for name, count in (("train", 64), ("validation", 16), ("test", 16)):
        _texts.rows(folder / f"sentence-transformers/stsb/{name}.jsonl", count, _texts.alike)
