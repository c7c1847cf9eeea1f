"""The torch front end: the engine, the FTRL optimizer, checkpoints."""

from anyorder.training.engine import PrivacyEngine
from anyorder.training.optimizers import FTRL

__all__ = ["FTRL", "PrivacyEngine"]
