"""What the scripts of TRL have in common: each makes a trainer, whose arguments stay as they are."""

REPOSITORY, COMMIT = "https://github.com/huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8"
ARGS = [
    "--model_name_or_path", "gpt2", "--dataset_name", "pairs", "--output_dir", "kept", "--num_train_epochs", "2",
    "--per_device_train_batch_size", "16", "--max_length", "32", "--bf16", "false", "--gradient_checkpointing", "false",
    "--use_cpu", "true", "--report_to", "none", "--save_strategy", "no",
]  # fmt: skip
OPACUS = "TRL's trainer makes loader and optimizer itself, and Opacus has no trainer for it."


def ours(trainer: str) -> list[tuple[str, ...]]:
    """Edits that make one private."""
    return [
        ("import argparse", "...\nfrom torch import optim, zeros\nimport anyorder as ao"),
        (
            "# Initialize the ",
            f"""
            from anyorder.training.trainers.huggingface import PrivateTrainerMixin

            class PrivateOne(PrivateTrainerMixin, {trainer}):
                pass

            plan = ao.plan(
                dataset_size=len(dataset[script_args.dataset_train_split]), epochs=int(training_args.num_train_epochs),
                batch_size=training_args.per_device_train_batch_size, epsilon=8, delta=1e-5,
                optimizer=optim.AdamW([zeros(1)]))
            """,
        ),
        (f"trainer = {trainer}(", "trainer = PrivateOne(plan=plan, pad_to=(16, 32),"),
    ]
