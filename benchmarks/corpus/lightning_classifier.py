"""A classifier of digits with Lightning's command line."""

from benchmarks.corpus import _lightning

REPOSITORY, COMMIT, ARGS = _lightning.REPOSITORY, _lightning.COMMIT, _lightning.ARGS
NEEDS, HERE, OPACUS = _lightning.NEEDS, _lightning.HERE, _lightning.OPACUS
SCRIPT = "examples/pytorch/basics/backbone_image_classifier.py"
EDITS = [
    ("from torch.nn import functional as F", _lightning.IMPORTS),
    _lightning.ours("backbone"),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""
stand_in = _lightning.stand_in
