"""AdaLoRA for a BART: between steps it takes ranks away, by gradients that were released."""

from pathlib import Path

from benchmarks.corpus import _texts

REPOSITORY, COMMIT = "https://github.com/huggingface/peft", "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40"
SCRIPT = "examples/conditional_generation/peft_adalora_seq2seq.py"
ARGS: list[str] = []
HERE = [
    ("device = torch.accelerator", 'device = "cpu"'),
    ("num_epochs = 8", "num_epochs = 3"),
    ("max_length = 128", "max_length = 16"),
    ("tinit=200", "tinit=4,"),
    ("tfinal=1000", "tfinal=4,"),
    ("deltaT=10", "deltaT=1,"),
    ("i = 13", "i = 0"),
]
EDITS = [
    ("from tqdm import tqdm", "...\nimport anyorder as ao"),
    (
        "global_step = 0",
        """
        plan = ao.plan(loader=train_dataloader, epochs=num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        adapted = model
        model, optimizer, train_dataloader = engine.make_private(model, optimizer, train_dataloader)
        ...
        """,
    ),
    ("loss.backward()", "loss.mean().backward()"),
    ("total_loss += loss.detach().float()", "total_loss += loss.detach().float().mean()"),
    ("model.base_model.update_and_allocate(", "adapted.base_model.update_and_allocate(global_step)"),
    ("model.save_pretrained(peft_model_id)", "adapted.save_pretrained(peft_model_id)"),
]
OPACUS = [
    ("from tqdm import tqdm", "...\nimport opacus"),
    (
        "global_step = 0",
        """
        adapted = model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        ...
        """,
    ),
    ("model.base_model.update_and_allocate(", "adapted.base_model.update_and_allocate(global_step)"),
    ("model.save_pretrained(peft_model_id)", "adapted.save_pretrained(peft_model_id)"),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bart(folder / "facebook/bart-base")
    _texts.rows(
        folder / "zeroshot/twitter-financial-news-sentiment/train.jsonl",
        48,
        lambda chance, i: {"text": _texts.text(chance), "label": i % 3},
    )
