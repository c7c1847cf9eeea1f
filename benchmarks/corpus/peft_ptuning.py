"""Prompts that are learnt for a BERT that tells paraphrases (p-tuning)."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
SCRIPT = "examples/sequence_classification/peft_no_lora_accelerate.py"
ARGS = [
    "--model_name_or_path", "bert", "--num_train_epochs", "2", "--per_device_train_batch_size", "16",
    "--num_virtual_tokens", "4", "--encoder_hidden_size", "16", "--output_dir", "kept",
]  # fmt: skip
EDITS = [
    ("import evaluate", "...\nimport anyorder as ao"),
    (
        "# Instantiate scheduler",
        """
        plan = ao.plan(
            loader=train_dataloader, epochs=args.num_train_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(
            model, optimizer, train_dataloader, pad_to=(16, 32))
        """,
    ),
    ("accelerator.backward(loss)", "accelerator.backward(loss.mean())"),
    ("unwrapped_model.save_pretrained(", "unwrapped_model.save_pretrained(args.output_dir)"),
]
OPACUS = [
    ("import evaluate", "...\nimport opacus"),
    (
        "# Instantiate scheduler",
        """
        model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    _texts.metrics(folder)
    _texts.mrpc(folder / "glue")
