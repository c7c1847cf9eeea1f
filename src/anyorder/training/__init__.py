"""The torch front end: the engine, the FTRL optimizer, public numbers, checkpoints."""

from anyorder.training.engine import PrivacyEngine
from anyorder.training.optimizers import FTRL, Public

__all__ = ["FTRL", "PrivacyEngine", "Public"]
