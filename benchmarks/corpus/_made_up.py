"""Made-up data in the files that scripts read: noise of the right shapes."""

import gzip
import random
import struct
from pathlib import Path


def mnist(folder: Path, train: int = 512, test: int = 64, name: str = "MNIST") -> None:
    """Images and labels as torchvision's MNIST reads them from `folder`."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for part, count in (("train", train), ("t10k", test)):
        images = struct.pack(">4i", 2051, count, 28, 28) + chance.randbytes(count * 784)
        labels = struct.pack(">2i", 2049, count) + bytes(i % 10 for i in range(count))
        for file, data in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            (raw / file).write_bytes(data)
            (raw / f"{file}.gz").write_bytes(gzip.compress(data, 1))
