"""Noise added to a gradient: ours against `Tensor.normal_` and `Tensor.add_`, in nanoseconds per element and step."""

from collections.abc import Iterator
from functools import partial

import torch

from anyorder.noise import NoiseSource, NoiseStream
from anyorder.strategy import BLT, Independent, Strategy, Tree
from benchmarks._report import Row, options, seconds, show

STEPS = 32


def main() -> None:
    """Measure and print."""
    chosen = options(__doc__ or "")
    show(measure(size=1 << 18 if chosen.quick else 1 << 23, repeats=2 if chosen.quick else 3), chosen.json)


def measure(size: int, repeats: int) -> Iterator[Row]:
    """Independent noise with each number of rounds, then whole streams of correlated noise."""
    gradient, spare = torch.zeros(size), torch.empty(size)
    peer = seconds(lambda: gradient.add_(spare.normal_()), repeats) / size * 1e9

    def row(name: str, ours: float) -> Row:
        return Row(name, ours, peer, peer / ours, "ns/element")

    for rounds in (8, 12, 20):
        ours = seconds(partial(_add, gradient, NoiseSource.random(rounds)), repeats)
        yield row(f"independent, ChaCha{rounds}", ours / size * 1e9)

    strategies: dict[str, Strategy] = {
        "independent": Independent(STEPS),
        "tree, vanilla": Tree(STEPS),
        "tree, online": Tree(STEPS, "online"),
        "tree, full": Tree(STEPS, "full"),
        "BLT, 4 buffers": BLT([0.99, 0.9, 0.6, 0.2], [0.02, 0.05, 0.1, 0.1], STEPS),
    }
    for name, strategy in strategies.items():
        yield row(f"stream of {STEPS} steps, {name}", _stream(strategy, gradient[: size // 8]))


def _add(gradient: torch.Tensor, source: NoiseSource) -> None:
    gradient.add_(torch.from_numpy(source.normal(0, 0, len(gradient))))


def _stream(strategy: Strategy, gradient: torch.Tensor) -> float:
    """A whole stream, for its steps differ in cost: nanoseconds per element and step."""
    size = len(gradient)
    source = NoiseSource.random()

    def run() -> None:
        stream = NoiseStream(strategy, source, 1.0, size)
        for _ in range(strategy.n):
            gradient.add_(torch.from_numpy(stream.next()))

    return seconds(run, 1) / (size * strategy.n) * 1e9


if __name__ == "__main__":
    main()
