"""TRL's SFTTrainer on texts, with privacy for each author: adapters of PEFT, in micro-batches.

The data are made up: 40 authors write two lines each. A sampler keeps the lines of an author in one micro-batch, so
that an author is in one step of an epoch, always the same; the plan says so, and the ledger holds the run to it.

Run: python examples/sft.py (needs transformers, accelerate, datasets, peft, trl)
"""

import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import anyorder as ao
from anyorder.training.trainers.huggingface import PrivateTrainerMixin

AUTHORS, LINES, BATCH, MICRO_BATCHES, EPOCHS = 40, 2, 10, 2, 2
WORDS = ["tea", "rain", "moon", "sea", "wind", "snow", "salt", "bread"]


class PrivateSFTTrainer(PrivateTrainerMixin, SFTTrainer):  # type: ignore[misc]
    """`SFTTrainer` with the gradients of a `PrivacyEngine`."""


def texts() -> Dataset:
    """Lines of four words, with their authors."""
    rows = []
    for author in range(AUTHORS):
        for line in range(LINES):
            words = [WORDS[(author * (place + 1) + line) % len(WORDS)] for place in range(4)]
            rows.append({"text": " ".join(words), "author": author})
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    tokens = {word: i for i, word in enumerate(["<pad>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    """Plan for authors who come once in an epoch, and train the adapters."""
    data = texts()
    by_author = ao.sampling.UnitOrderSampler(data["author"], batch_size=BATCH, seed=1)
    steps = len(by_author) // MICRO_BATCHES
    plan = ao.plan(
        order=ao.participation.FixedOrder(EPOCHS * steps, k=EPOCHS, b=steps),
        batch_size=BATCH * MICRO_BATCHES,
        epsilon=8,
        delta=1e-5,
        unit="author",
    )
    print(plan)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 2,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    arguments = SFTConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES,
        num_train_epochs=EPOCHS,
        optim="sgd",  # correlated noise is fitted to it, and the default is AdamW
        learning_rate=1.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PrivateSFTTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        plan=plan,
        unit="author",
        batch_sampler=by_author,
    )
    trainer.train()
    print(f"\nsteps {trainer.engine.step}, (epsilon, delta) = ({plan.epsilon:.2f}, {plan.delta}) for each author")


if __name__ == "__main__":
    main()
