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


def images(folder: Path, count: int, size: int, name: str = "image") -> None:
    """Coloured images of size x size pixels."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for i in range(count):
        file = f"{name}.png" if count == 1 else f"{name}{i}.png"
        Image.frombytes("RGB", (size, size), chance.randbytes(size * size * 3)).save(folder / file)


def cora(folder: Path, nodes: int = 200, words: int = 30, classes: int = 7) -> None:
    """A graph of papers: their words and classes, and who cites whom."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    rows = [[i, *(chance.randrange(2) for _ in range(words)), f"class{i % classes}"] for i in range(nodes)]
    (folder / "cora.content").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    pairs = {(chance.randrange(nodes), chance.randrange(nodes)) for _ in range(3 * nodes)}
    (folder / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in sorted(pairs)))


def words(count: int, seed: str) -> list[str]:
    """Words of two to eight letters."""
    chance = random.Random(seed)
    return ["".join(chance.choices("abcdefghij", k=chance.randrange(2, 9))) for _ in range(count)]
