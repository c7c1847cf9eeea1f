"""The main job: train a model on a data set by name, privately, into a folder that says what was done."""

from anyorder.run.job import Observer, Result, resume, train
from anyorder.run.settings import Settings

__all__ = ["Observer", "Result", "Settings", "resume", "train"]
