"""Adapters of PEFT on a small language model, with privacy for each author.

The data are made up: 24 authors with a few lines each, every author with favourite words. The lines of an author stand
in one step of an epoch, so that an author costs no more noise than a line would.

Run: python examples/adapters.py (needs transformers, accelerate, datasets, peft)
"""

import tempfile
from collections.abc import Iterator

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import anyorder as ao
from anyorder.training.trainers.huggingface import PrivateTrainer

AUTHORS, WORDS, LENGTH, BATCH, EPOCHS = 24, 32, 10, 16, 3


def lines() -> Iterator[dict[str, object]]:
    """Yield lines with their authors, two to five of each."""
    generator = torch.Generator().manual_seed(0)
    for author in range(AUTHORS):
        favourites = torch.randint(WORDS, (4,), generator=generator)
        for _ in range(2 + author % 4):
            words = favourites[torch.randint(4, (LENGTH,), generator=generator)].tolist()
            yield {"author": f"author {author}", "input_ids": words, "labels": words}


def main() -> None:
    """Plan for the order of authors, and train the adapters."""
    data = Dataset.from_list(list(lines()))
    by_author = ao.sampling.UnitOrderSampler(data["author"], batch_size=BATCH, seed=1)
    keys = torch.utils.data.DataLoader(data.select_columns("author"), batch_sampler=by_author)
    plan = ao.plan(loader=keys, unit="author", epochs=EPOCHS, epsilon=8, delta=1e-5)
    print(plan)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        optim="sgd",  # correlated noise is fitted to it, and the default is AdamW
        learning_rate=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PrivateTrainer(
        model, arguments, train_dataset=data, plan=plan, unit="author", batch_sampler=by_author, chunk_size=8
    )
    trainer.train()
    assert trainer.engine is not None
    print(f"\nsteps {trainer.engine.step}, (epsilon, delta) = ({plan.epsilon:.2f}, {plan.delta}) for each author")


if __name__ == "__main__":
    main()
