"""Made-up graphs in the files of the TU collection."""

import random
from pathlib import Path


def tu(folder: Path, name: str, count: int = 60, most: int = 10) -> None:
    """Rings of 4 to `most` nodes with three kinds of nodes, and two classes."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    chance, at, edges, graphs, kinds = random.Random(0), 1, [], [], []
    for graph in range(1, count + 1):
        n = chance.randint(4, most)
        for i in range(n):
            j = (i + 1) % n
            edges += [f"{at + i}, {at + j}", f"{at + j}, {at + i}"]
        graphs += [str(graph)] * n
        kinds += [str(chance.randrange(3)) for _ in range(n)]
        at += n
    for what, lines in (
        ("A", edges),
        ("graph_indicator", graphs),
        ("node_labels", kinds),
        ("graph_labels", [str(i % 2) for i in range(count)]),
    ):
        (raw / f"{name}_{what}.txt").write_text("\n".join(lines) + "\n")
