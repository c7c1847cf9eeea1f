"""LoRA for a BLOOM that writes the label behind a text."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
SCRIPT = "examples/causal_language_modeling/peft_lora_clm_accelerate_ds_zero3_offload.py"
ARGS: list[str] = []
HERE = [
    ("num_epochs = 20", "num_epochs = 2"),
    ("class TorchTracemalloc:", "...\n    begin = used = peaked = cpu_begin = cpu_used = cpu_peaked = 0"),
    ("self.device_type = torch.accelerator", "return self"),
    ("self.peak_monitoring = False", "return"),
    ('"train": f"hf://', '"train": "texts.parquet",'),
    ('"test": f"hf://', '"test": "texts.parquet",'),
]
EDITS = [
    ("from tqdm import tqdm", "...\nimport anyorder as ao"),
    (
        "# lr scheduler",
        """
        for block in model.base_model.model.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU(approximate="tanh")
        plan = ao.plan(loader=train_dataloader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_dataloader)
        """,
    ),
    ("accelerator.backward(loss)", "accelerator.backward(loss.mean())"),
    ("total_loss += loss.detach().float()", "total_loss += loss.detach().float().mean()"),
]
OPACUS = [
    ("from tqdm import tqdm", "...\nimport opacus"),
    (
        "# lr scheduler",
        """
        model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        """,
    ),
]
MODEL = "changed: torch's own GELU"
RESULT, WHY = "runs", "BLOOM's GELU is an `autograd.Function` that torch cannot map over examples."


def stand_in(folder: Path) -> None:
    _texts.bloom(folder / "bigscience/bloomz-7b1")
    _texts.complaints(folder / "texts.parquet")
