"""Opacus' own classifier of reviews: words of a text averaged, padded to the longest text of a batch."""

import json
from pathlib import Path

from benchmarks.corpus import _made_up

REPOSITORY, COMMIT = "https://github.com/pytorch/opacus", "4d0ebc84613d214fbfd37fbfd1390e3747a625ce"
SCRIPT = "examples/imdb.py"
ARGS = ["--device", "cpu", "-b", "32", "-n", "2", "-j", "0", "--max-sequence-length", "32", "--disable-dp"]
HERE = [
    (
        "raw_dataset = load_dataset(",
        'raw_dataset = load_dataset("json", data_files=dict(train="train.json", test="test.json"))',
    ),
    ("tokenizer = BertTokenizerFast", 'tokenizer = BertTokenizerFast("vocabulary.txt")'),
]
EDITS = [
    ("import argparse", "import anyorder as ao\n..."),
    ("x = self.pool(x).squeeze()", "x = self.pool(x).squeeze(2)"),
    (
        "mean_accuracy = 0",
        """
        plan = ao.plan(loader=train_loader, epochs=args.epochs, noise_multiplier=args.sigma, delta=args.delta,
                       clip_norm=args.max_per_sample_grad_norm, optimizer=optimizer)
        engine = ao.PrivacyEngine(plan)
        model, optimizer, train_loader = engine.make_private(model, optimizer, train_loader, pad_to=(16, 32))
        ...
        """,
    ),
]
OPACUS = [("args = parser.parse_args()", "...\nargs.disable_dp = False")]
MODEL = "changed: `squeeze` names its dimension"
RESULT, WHY = "runs", "padded to public lengths; `squeeze()` drops the dimension of one example"


def stand_in(folder: Path) -> None:
    for part, count in (("train", 200), ("test", 20)):
        texts = [" ".join(_made_up.words(3 + i % 25, f"{part}{i}")) for i in range(count)]
        lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
        (folder / f"{part}.json").write_text("\n".join(lines))
    letters = [chr(97 + i) for i in range(26)]
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocabulary.txt").write_text("\n".join(known))
