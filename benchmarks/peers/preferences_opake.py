"""DPO of `benchmarks.preferences` by opake's `DPOTrainer`, in an environment of its own. Prints time and memory.

    preferences_opake.py SETTINGS.json OUTPUT_FOLDER

The unit is a pair and batches are drawn by Poisson sampling, as its trainer does of itself; the model is a copy of the
one that the private DPO of this package begins with. In its favour: eager attention, for which torch.func has rules.
"""

# ruff: noqa: E402

import dataclasses
import json
import resource
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median

_dataclass = dataclasses.dataclass
if sys.version_info < (3, 12):  # its accountants name __weakref__ twice, which earlier Pythons refuse
    dataclasses.dataclass = lambda *args, weakref_slot=False, **options: _dataclass(*args, **options)

import transformers
from datasets import Dataset
from opake.transformers.trl import DPOConfig, DPOTrainer

ends = []


class Times(transformers.TrainerCallback):
    def on_step_end(self, *args: object, **options: object) -> None:
        ends.append(time.process_time())


def main() -> None:
    with open(sys.argv[1]) as file:
        told = json.load(file)
    load = transformers.GPT2LMHeadModel.from_pretrained
    model, reference = (load(told["model"], attn_implementation="eager") for _ in range(2))
    tokens = transformers.AutoTokenizer.from_pretrained(told["tokenizer"])
    arguments = DPOConfig(
        tempfile.mkdtemp(), per_device_train_batch_size=told["batch"], num_train_epochs=told["epochs"],
        learning_rate=told["rate"], lr_scheduler="constant", use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=10**6, max_length=told["longest"], clipping_norm=told["clip_norm"],
        privacy_target_epsilon=told["epsilon"], privacy_target_delta=told["delta"],
    )  # fmt: skip
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    data = Dataset.from_list(told["pairs"])
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=arguments, train_dataset=data, processing_class=tokens,
        callbacks=[Times()],
    )  # fmt: skip
    trainer.train()
    model.save_pretrained(sys.argv[2])
    found = {"steps": len(ends), "ms": 1000 * median(b - a for a, b in pairwise(ends)), "MB before": start}
    print(json.dumps(found | {"MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


if __name__ == "__main__":
    main()
