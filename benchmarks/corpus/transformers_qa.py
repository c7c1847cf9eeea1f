"""A BERT that finds answers, with privacy for each question: a long text gives several windows of one question."""

import json
import random
from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/question-answering/run_qa_no_trainer.py"
ARGS = [
    *_transformers.ARGS,
    "--model_name_or_path", "bert", "--max_seq_length", "24", "--doc_stride", "4", "--n_best_size", "2",
]  # fmt: skip
HERE = [
    *_transformers.HERE,
    ("from_tf=bool(", ""),
    ("pad_to_multiple_of=(8 if accelerator.use_fp16", "data_collator = DataCollatorWithPadding(tokenizer)"),
]
EDITS = [
    ("import argparse", "...\nimport anyorder as ao"),
    (
        'tokenized_examples["start_positions"] = []',
        """
        ...
        tokenized_examples["question"] = [int(examples["id"][i], 16) % 2**62 for i in sample_mapping]
        """,
    ),
    (
        "train_dataset, shuffle=True, collate_fn=data_collator",
        """
        train_dataset, collate_fn=data_collator, batch_sampler=ao.sampling.UnitOrderSampler(
            train_dataset["question"], batch_size=args.per_device_train_batch_size, seed=0)
        """,
    ),
    (
        "eval_dataloader, lr_scheduler = accelerator.prepare(",
        """
        plan = ao.plan(
            loader=train_dataloader, unit="question", epochs=args.num_train_epochs, epsilon=8, delta=1e-5,
            optimizer=optimizer)
        model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(
            model, optimizer, train_dataloader, unit="question", pad_to=(16, 32))
        ...
        """,
    ),
    ("with accelerator.accumulate(model):", '...\n    del batch["question"]'),
    ("accelerator.backward(loss)", "accelerator.backward(loss.mean())"),
]
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    _texts.bert(folder / "bert")
    _texts.metrics(folder)
    chance = random.Random(0)
    for name, count in (("train.json", 64), ("test.json", 8)):
        asked = []
        for i in range(count):
            context = _texts.text(chance, 8, 30)
            answer = context.split()[3]
            answers = {"text": [answer], "answer_start": [context.index(answer)]}
            asked.append(
                {"id": f"{i:024x}", "question": _texts.text(chance, 3, 5), "context": context, "answers": answers}
            )
        (folder / name).write_text(json.dumps({"data": asked}))
