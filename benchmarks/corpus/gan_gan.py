"""A GAN on digits: the discriminator alone sees data."""

from benchmarks.corpus import _gans

REPOSITORY, COMMIT, ARGS, NEEDS = _gans.REPOSITORY, _gans.COMMIT, _gans.ARGS, _gans.NEEDS
SCRIPT = "implementations/gan/gan.py"
EDITS = [_gans.IMPORT, _gans.ours()]
OPACUS = _gans.opacus()
MODEL = "untouched"
RESULT, WHY = "runs", ""
stand_in = _gans.stand_in
