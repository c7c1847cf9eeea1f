"""A small GPT tuned for users on text: SFT and then DPO of TRL, private and plain, with time, memory, report and audit.

A model of words is trained from nothing on public documents of the Brown corpus. The others are private: a passage of
so many sentences is a user. SFT is on their sentences; DPO on pairs of a sentence and the same with two neighbouring
words swapped. Each arm runs in a process of its own, and so does DPO by opake, for which a pair is the unit.

    python -m benchmarks.preferences --data-dir FOLDER --out FOLDER   FOLDER has Brown's Parquet file
    python -m benchmarks.preferences --data-dir FOLDER --quick        a fifth of the users, one epoch

`ours` is the private run and `peer` the plain one: processor time of a step, peak memory, perplexity of held-out
sentences, and the share of held-out pairs of which the sentence as it was written is the likelier one.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import anyorder as ao
from anyorder.accounting import Gaussian
from anyorder.app import AuditSummary, Setup, audit_training, html_report
from benchmarks._peers import OPAKE_TRAINERS, interpreter
from benchmarks._report import Row, add_options, show

PEERS = Path(__file__).parent / "peers"

ARMS = ("public", "sft plain", "sft private", "dpo plain", "dpo private", "dpo opake")
LONGEST, PASSAGE, PROMPT, PUBLIC = (
    16,
    5,
    3,
    150,
)  # words of a sentence, sentences of a user, words of a prompt, documents
VOCABULARY, EPSILON, DELTA, CLIP_NORM = 1000, 4.0, 1e-4, 0.5
SPECIAL = ["<pad>", "<eos>", "<unk>"]


@dataclass(frozen=True)
class Texts:
    """Sentences of public documents, of users, and of documents for testing; and the public vocabulary."""

    words: list[str]
    public: list[str]
    users: list[tuple[int, str]]
    held_out: list[str]


def read(folder: str, quick: bool) -> Texts:
    """Every tenth document is for testing, the first 150 others are public."""
    import pyarrow.parquet as parquet

    column = parquet.read_table(sorted(Path(folder).glob("*.parquet"))[0]).to_pydict()["sentences"]
    documents = [
        [words for each in sentences if len(words := each.lower().split()[:LONGEST]) > PROMPT + 2]
        for sentences in column
    ]
    inside = [document for i, document in enumerate(documents) if i % 10]
    counts = Counter(word for document in inside[:PUBLIC] for sentence in document for word in sentence)
    private = [d[i : i + PASSAGE] for d in inside[PUBLIC:] for i in range(0, len(d), PASSAGE)]
    private = private[: len(private) // 5 if quick else None]
    return Texts(
        SPECIAL + [word for word, _ in counts.most_common(VOCABULARY)],
        [" ".join(sentence) for document in inside[:PUBLIC] for sentence in document],
        [(user, " ".join(sentence)) for user, passage in enumerate(private) for sentence in passage],
        [" ".join(sentence) for document in documents[::10] for sentence in document][: 400 if quick else 2000],
    )


def swapped(sentence: str, chance: random.Random) -> dict[str, str]:
    """A pair: the sentence, and the same with two neighbouring words of its end swapped."""
    words = sentence.split()
    other, i = list(words), chance.randrange(PROMPT, len(words) - 1)
    other[i], other[i + 1] = other[i + 1], other[i]
    names = {"prompt": words[:PROMPT], "chosen": words[PROMPT:], "rejected": other[PROMPT:]}
    return {name: " ".join(part) + (" " if name == "prompt" else "") for name, part in names.items()}


def tokenizer(words: list[str]) -> Any:
    """A token for each word of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def gpt(words: list[str]) -> Any:
    """Two layers of width 64, with one table for words in and out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(words), n_positions=LONGEST + 2, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def log_likelihoods(model: Any, tokens: Any, sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """(sentences,) log likelihood of each, and how many words it has behind the first."""
    batch = tokens(sentences, return_tensors="pt", padding="max_length", max_length=LONGEST + 2, truncation=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    mask = batch["attention_mask"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return -(losses * mask).sum(1), mask.sum(1)


def judged(model: Any, tokens: Any, held_out: list[str]) -> dict[str, float]:
    """Perplexity of held-out sentences, and the share of them that are likelier than their swapped form."""
    own, counts = log_likelihoods(model, tokens, held_out)
    pairs = [swapped(sentence, random.Random(i)) for i, sentence in enumerate(held_out)]
    other, _ = log_likelihoods(model, tokens, [pair["prompt"] + pair["rejected"] for pair in pairs])
    equal = (own == other).float()  # words that are not of the vocabulary are one
    return {
        "perplexity": float((-own.sum() / counts.sum()).exp()),
        "right": float(((own > other).float() + equal / 2).mean()),
    }


def arm(name: str, folder: str, out: Path, quick: bool) -> dict[str, Any]:
    """One run."""
    import transformers
    import trl
    from datasets import Dataset, disable_progress_bars

    from anyorder.training.trainers.huggingface import PrivateTrainerMixin

    disable_progress_bars()
    if name == "dpo opake":
        return by_opake(folder, out, quick)
    texts, is_dpo, is_private = read(folder, quick), name.startswith("dpo"), name.endswith("private")
    tokens, ends = tokenizer(texts.words), []
    before = {"public": None, "sft": "public", "dpo": f"sft {'private' if is_private else 'plain'}"}[name.split()[0]]
    load = transformers.GPT2LMHeadModel.from_pretrained
    model = gpt(texts.words) if before is None else load(out / before)
    rows: list[Any] = [{"text": each, "user": 0} for each in texts.public]
    if before is not None:
        chance = random.Random(0)
        rows = [{**(swapped(each, chance) if is_dpo else {"text": each}), "user": user} for user, each in texts.users]
    data, batch = Dataset.from_list(rows), 64 if before is None else 256
    rate, epochs = (3e-3, 1 if quick else 4) if before is None else (1e-4 if is_dpo else 1e-3, 1 if quick else 3)
    kind, config = (trl.DPOTrainer, trl.DPOConfig) if is_dpo else (trl.SFTTrainer, trl.SFTConfig)
    options: dict[str, Any] = {"ref_model": load(out / str(before))} if is_dpo else {}
    arguments = config(
        tempfile.mkdtemp(), per_device_train_batch_size=batch, num_train_epochs=epochs, learning_rate=rate,
        lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=10**6, max_length=LONGEST + 2,
    )  # fmt: skip
    found: dict[str, Any] = {"arm": name, "rows": len(rows)}
    if is_private:
        by_user = ao.sampling.UnitOrderSampler(data["user"], batch_size=batch, seed=1)
        keys = DataLoader(data.select_columns("user"), batch_sampler=by_user)
        adam = torch.optim.AdamW([torch.zeros(1)], lr=rate)
        plan = ao.plan(
            loader=keys, unit="user", epochs=epochs, epsilon=EPSILON, delta=DELTA, clip_norm=CLIP_NORM, optimizer=adam,
            mechanism="blt",
        )  # fmt: skip
        kind = type("Private", (PrivateTrainerMixin, kind), {})
        options |= {"plan": plan, "unit": "user", "batch_sampler": by_user, "pad_to": (LONGEST + 2,)}
        found |= {"users": texts.users[-1][0] + 1, "mu": plan.mu, "epsilon": plan.epsilon}

    class Times(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.process_time())

    options |= {"callbacks": [Times()], "train_dataset": data, "processing_class": tokens}
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    trainer = kind(model=model, args=arguments, **options)
    trainer.train()
    found |= {"steps": len(ends), "ms": 1000 * median(b - a for a, b in pairwise(ends))}
    found["MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found["MB before"] = start
    found |= judged(model, tokens, texts.held_out)
    model.save_pretrained(out / name)
    if is_private:
        certificate = trainer.engine.certificate()
        certificate.save(out / f"{name}.privacy.json")
        ao.verify(out / f"{name}.privacy.json")
        (out / f"{name}.html").write_text(html_report(certificate, title=name, units=found["users"]))
        if not is_dpo:
            found["audit"] = audited(plan, load(out / str(before)), rate, data, tokens, by_user, quick)
    return found


def by_opake(folder: str, out: Path, quick: bool) -> dict[str, Any]:
    """The same pairs, epochs, rate and clip norm by opake's trainer, from the same model."""
    texts, chance = read(folder, quick), random.Random(0)
    tokens = tokenizer(texts.words)
    with tempfile.TemporaryDirectory() as own:
        tokens.save_pretrained(own)
        told = {
            "model": str(out / "sft private"), "tokenizer": own, "batch": 256, "rate": 1e-4,
            "epochs": 1 if quick else 3, "longest": LONGEST + 2, "clip_norm": CLIP_NORM,
            "epsilon": EPSILON, "delta": DELTA,
            "pairs": [swapped(each, chance) for _, each in texts.users],
        }  # fmt: skip
        settings = Path(own, "settings.json")
        settings.write_text(json.dumps(told))
        python, script = interpreter(*OPAKE_TRAINERS, module="opake"), PEERS / "preferences_opake.py"
        done = subprocess.run(
            [python, script, settings, out / "dpo opake"], stdout=subprocess.PIPE, text=True, check=True
        )
    from transformers import GPT2LMHeadModel

    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return (
        found
        | {"arm": "dpo opake"}
        | judged(GPT2LMHeadModel.from_pretrained(out / "dpo opake"), tokens, texts.held_out)
    )


def audited(plan: Any, model: Any, rate: float, data: Any, tokens: Any, by_user: Any, quick: bool) -> str:
    """The verdict on a copy of the training, with canaries."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        texts = [row["text"] for row in rows]
        made = tokens(texts, return_tensors="pt", padding="max_length", max_length=LONGEST + 2, truncation=True)
        return {"ids": made["input_ids"], "mask": made["attention_mask"], "user": [row["user"] for row in rows]}

    def loss(network: Any, batch: dict[str, Any]) -> torch.Tensor:
        logits, mask = network(input_ids=batch["ids"], attention_mask=batch["mask"])["logits"], batch["mask"][:, 1:]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
        return ((losses * mask).sum(1) / mask.sum(1)).mean()

    loader = DataLoader(data, batch_sampler=by_user, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    run = audit_training(Setup(plan, model, optimizer, loader, loss, unit="user"), canaries=100 if quick else 300)
    print(AuditSummary.of(run), file=sys.stderr)
    return "refuted" if AuditSummary.of(run).refuted else "not refuted"


def rows_of(found: dict[str, dict[str, Any]]) -> Iterator[Row]:
    """The table."""
    with_opake = "dpo, compared with opake, whose unit is a pair"
    for title, mine, other in (
        ("sft", "sft private", "sft plain"), ("dpo", "dpo private", "dpo plain"),
        (with_opake, "dpo private", "dpo opake"),
    ):  # fmt: skip
        ours, peer = found[mine], found[other]
        for name, unit in (
            ("ms", "ms of a processor a step"),
            ("MB", "MB at most"),
            ("perplexity", ""),
            ("right", "of pairs"),
        ):
            yield Row(f"{title}: {name}", ours[name], peer[name], peer[name] / ours[name], unit)
    for name in ("perplexity", "right"):
        yield Row(f"before: {name}", found["public"][name], None, None, "")
    both = Gaussian((found["sft private"]["mu"] ** 2 + found["dpo private"]["mu"] ** 2) ** 0.5)
    yield Row("epsilon of sft and dpo together", both.epsilon(DELTA), None, None, f"at delta {DELTA}")


def main() -> None:
    """Run the arms one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--data-dir", default=os.environ.get("ANYORDER_BROWN", "brown"))
    parser.add_argument("--out", default="preferences", help="for models, certificates and reports")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not list(Path(given.data_dir).glob("*.parquet")):
        parser.error(f"--data-dir must have Brown's Parquet file, and {given.data_dir} has none")
    if given.arm:
        print(json.dumps(arm(given.arm, given.data_dir, Path(given.out), given.quick)))
        return
    found = {}
    for name in ARMS:
        line = [sys.executable, "-m", "benchmarks.preferences", "--data-dir", given.data_dir, "--out", given.out]
        done = subprocess.run(
            [*line, "--arm", name, *(["--quick"] if given.quick else [])], stdout=subprocess.PIPE, text=True,
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        )  # fmt: skip
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(found[name], file=sys.stderr, flush=True)
    show(rows_of(found), given.json)


if __name__ == "__main__":
    main()
