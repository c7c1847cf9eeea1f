"""DoRA for a Llama by the Trainer, as many of PEFT's newer examples are written."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
SCRIPT = "examples/dora_finetuning/dora_finetuning.py"
ARGS = [
    "--base_model", "llama", "--data_path", "texts", "--output_dir", "kept", "--batch_size", "4", "--num_epochs", "2",
    "--cutoff_len", "16", "--use_dora", "--device", "cpu", "--lora_target_modules", "q_proj,v_proj",
]  # fmt: skip
HERE = [
    ("gradient_accumulation_steps=16", "gradient_accumulation_steps=2,"),
    ("fp16=True", 'use_cpu=True, report_to=[], save_strategy="no",'),
    ('logging_dir="./logs"', ""),
    ("hub_token=hf_token", ""),
    ("hub_model_id=hub_model_id,", ""),
]
EDITS = [
    ("import torch", "...\nimport anyorder as ao\nfrom anyorder.training.trainers.huggingface import PrivateTrainer"),
    (
        "# Initialize the Trainer",
        """
        plan = ao.plan(
            dataset_size=len(tokenized_datasets["train"]), batch_size=2 * batch_size, epochs=num_epochs, epsilon=8,
            delta=1e-5, optimizer=torch.optim.AdamW([torch.zeros(1)]))
        """,
    ),
    ("trainer = Trainer(", "trainer = PrivateTrainer(\n    plan=plan,"),
]
OPACUS = "The Trainer makes loader and optimizer itself, and Opacus has none for it."
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.llama(folder / "llama")
    for name, count in (("train", 32), ("test", 8)):
        _texts.rows(folder / f"texts/{name}.jsonl", count, lambda chance, i: {"text": _texts.text(chance)})
