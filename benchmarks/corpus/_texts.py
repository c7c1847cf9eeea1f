"""Made-up texts, and small models with random weights and a tokenizer, in the files that scripts read."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = [f"word{i}" for i in range(50)]
LETTERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def text(chance: random.Random, least: int = 4, most: int = 12) -> str:
    """So many words."""
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))


def rows(path: Path, count: int, row: Callable[[random.Random, int], dict[str, Any]]) -> None:
    """A file with a JSON object in each line."""
    chance = random.Random(path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(chance, i)) + "\n" for i in range(count)))


def tokenizer(folder: Path) -> int:
    """Of words, as BERT's: with places for one text or two. Returns: its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", eos_token="[SEP]", bos_token="[CLS]", model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    return len(vocabulary)


def bert(folder: Path, kind: str = "BertForMaskedLM", **sizes: Any) -> None:
    """A small BERT with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.BertConfig(vocab_size=size, max_position_embeddings=128, **{**LETTERS, **sizes})
    getattr(transformers, kind)(config).save_pretrained(folder)


def gpt2(folder: Path) -> None:
    """A small GPT-2 with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


METRIC = '''
"""In the place of evaluate, which fetches metrics: each is zero."""

from collections import defaultdict


class Metric:
    def add_batch(self, predictions, references):
        assert len(predictions) == len(references)

    def compute(self, predictions=(), references=(), **settings):
        return defaultdict(float, score=0.0)


def load(*names, **settings):
    return Metric()
'''


def metrics(folder: Path) -> None:
    """A module `evaluate` beside the script."""
    (folder / "evaluate.py").write_text(METRIC.lstrip())


def marian(folder: Path) -> None:
    """A small encoder and decoder with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.MarianConfig(
        vocab_size=size, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0, forced_eos_token_id=3,
    )  # fmt: skip
    transformers.MarianMTModel(config).save_pretrained(folder)


def mrpc(folder: Path) -> None:
    """Pairs of sentences, as GLUE's paraphrases."""

    def row(chance: random.Random, i: int) -> dict[str, Any]:
        return {"sentence1": text(chance), "sentence2": text(chance), "label": i % 2, "idx": i}

    for name, count in (("train", 64), ("validation", 16), ("test", 16)):
        rows(folder / f"mrpc/{name}.jsonl", count, row)
    files = "".join(f"  - split: {name}\n    path: mrpc/{name}.jsonl\n" for name in ("train", "validation", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")


def preferences(chance: random.Random, i: int) -> dict[str, Any]:
    """A prompt with a chosen and a rejected answer."""
    return {"prompt": text(chance), "chosen": " " + text(chance), "rejected": " " + text(chance)}


def judgements(chance: random.Random, i: int) -> dict[str, Any]:
    """A prompt with one answer, and whether it is good."""
    return {"prompt": text(chance), "completion": " " + text(chance), "label": bool(i % 2)}


def bart(folder: Path) -> None:
    """A small BART with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.BartConfig(
        vocab_size=size, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)


def bloom(folder: Path) -> None:
    """A small BLOOM with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.BloomConfig(
        vocab_size=size, hidden_size=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3, pad_token_id=0
    )
    transformers.BloomForCausalLM(config).save_pretrained(folder)


def complaints(path: Path) -> None:
    """Short texts of three classes."""
    from datasets import ClassLabel, Dataset, Features, Value

    chance = random.Random(0)
    made = {"Tweet text": [text(chance) for _ in range(48)], "Label": [i % 3 for i in range(48)]}
    kinds = Features({"Tweet text": Value("string"), "Label": ClassLabel(names=["Unlabeled", "complaint", "none"])})
    Dataset.from_dict(made, features=kinds).to_parquet(path)


def alike(chance: random.Random, i: int) -> dict[str, Any]:
    """Two sentences, and how alike they are."""
    return {"sentence1": text(chance), "sentence2": text(chance), "score": chance.random()}


def llama(folder: Path) -> None:
    """A small Llama with its tokenizer."""
    import transformers

    size = tokenizer(folder)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
