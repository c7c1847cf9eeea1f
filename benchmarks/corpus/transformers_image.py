"""A vision transformer that tells classes of pictures."""

import random
from pathlib import Path

from benchmarks.corpus import _texts, _transformers

REPOSITORY, COMMIT = _transformers.REPOSITORY, _transformers.COMMIT
SCRIPT = "examples/pytorch/image-classification/run_image_classification_no_trainer.py"
ARGS = [
    "--dataset_name", "pictures", "--model_name_or_path", "vit", "--num_train_epochs", "2",
    "--per_device_train_batch_size", "16", "--output_dir", "kept", "--seed", "0", "--ignore_mismatched_sizes",
]  # fmt: skip
NEEDS = ("torchvision==0.28.0",)
HERE = [
    *_transformers.HERE,
    ("from_tf=bool(", ""),
    (
        "dataset = load_dataset(args.dataset_name",
        'dataset = load_dataset(args.dataset_name).rename_column("label", "labels")',
    ),
]
EDITS = _transformers.ours()
OPACUS = _transformers.OPACUS
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    import transformers
    from PIL import Image

    chance = random.Random(0)
    for part, count in (("train", 32), ("validation", 8)):
        for i in range(count):
            of_class = folder / "pictures" / part / f"class{i % 2}"
            of_class.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (20, 20), chance.randbytes(1200)).save(of_class / f"{i}.png")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "vit")
    _texts.metrics(folder)
