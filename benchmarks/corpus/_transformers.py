"""What the no-trainer scripts of transformers have in common."""

REPOSITORY, COMMIT = "https://github.com/huggingface/transformers", "ef10dbce5cbc9a8b6a0a90b04378ca96f4023aa1"
ARGS = [
    "--train_file", "train.json", "--validation_file", "test.json", "--num_train_epochs", "2",
    "--per_device_train_batch_size", "16", "--output_dir", "kept", "--seed", "0",
]  # fmt: skip
HERE = [
    ("from huggingface_hub import Repository", "from huggingface_hub import create_repo"),
    ("import check_min_version, send_example", "check_min_version = send_example_telemetry = lambda *_: None"),
]
"""Names that newer versions lack."""
TPU = ("DistributedType.TPU", "if False:")


def ours(pad_to: str = "") -> list[tuple[str, ...]]:
    """Edits that make one private; `pad_to` as `make_private` takes it."""
    return [
        ("import argparse", "...\nimport anyorder as ao"),
        (
            "eval_dataloader, lr_scheduler = accelerator.prepare(",
            f"""
            plan = ao.plan(
                loader=train_dataloader, epochs=args.num_train_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
            model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(
                model, optimizer, train_dataloader{pad_to and f", pad_to={pad_to}"})
            ...
            """,
        ),
        ("accelerator.backward(loss)", "accelerator.backward(loss.mean())"),
    ]


OPACUS = [
    ("import argparse", "...\nimport opacus"),
    (
        "eval_dataloader, lr_scheduler = accelerator.prepare(",
        """
        model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
]
