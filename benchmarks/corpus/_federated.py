"""Made-up parts of clients, in the place of flwr-datasets, which fetches them."""

from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/adap/flower", "fdef7afb1dca3030553be302366cfd285ed6632c"
PARTS = '''
"""In the place of flwr-datasets."""


class FederatedDataset:
    def __init__(self, dataset, partitioners):
        pass

    def load_partition(self, part, split="train"):
        return DATA


'''
PARTITIONERS = """
class IidPartitioner:
    def __init__(self, num_partitions):
        pass
"""


def _package(folder: Path, made: str) -> None:
    package = folder / "flwr_datasets"
    package.mkdir()
    (package / "__init__.py").write_text(PARTS.lstrip() + made.lstrip())
    (package / "partitioner.py").write_text(PARTITIONERS.lstrip())


def images(folder: Path) -> None:
    """Noise of CIFAR-10's shape."""
    _package(
        folder,
        """
import numpy
from datasets import Dataset
from PIL import Image

chance = numpy.random.default_rng(0)
pictures = [Image.fromarray(x) for x in chance.integers(0, 256, (160, 32, 32, 3), dtype=numpy.uint8)]
DATA = Dataset.from_dict({"img": pictures, "label": [i % 10 for i in range(160)]})
""",
    )


def texts(folder: Path) -> None:
    """Words and a class."""
    _package(
        folder,
        """
import random

from datasets import Dataset

chance = random.Random(0)
words = [" ".join(f"word{chance.randrange(50)}" for _ in range(chance.randint(4, 12))) for _ in range(80)]
DATA = Dataset.from_dict({"text": words, "label": [i % 2 for i in range(80)]})
""",
    )
