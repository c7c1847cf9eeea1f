"""A Wasserstein GAN on digits, the weights of its critic clipped after each step."""

from benchmarks.corpus import _gans

REPOSITORY, COMMIT, ARGS, NEEDS = _gans.REPOSITORY, _gans.COMMIT, _gans.ARGS, _gans.NEEDS
SCRIPT = "implementations/wgan/wgan.py"
EDITS = [_gans.IMPORT, _gans.ours("RMSprop")]
OPACUS = _gans.opacus("RMSprop")
MODEL = "untouched"
RESULT, WHY = "runs", ""
stand_in = _gans.stand_in
