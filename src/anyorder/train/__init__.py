"""The torch front end: the engine, the FTRL optimizer, checkpoints."""

from anyorder.train.engine import PrivacyEngine
from anyorder.train.ftrl import FTRL

__all__ = ["FTRL", "PrivacyEngine"]
