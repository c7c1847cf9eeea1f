"""Stand-ins for photographs, to choose settings for CIFAR-10 on.

Articles of Fashion-MNIST, coloured, turned, mirrored, of random size and place, on backgrounds of coloured noise with
edges and spots. Private runs on them:

    python -m benchmarks.stand_ins --data-dir data --model patches --epsilon 3 --lr 750

With `--plain mnist` or `--plain fashion_mnist` the same of those images as they are, to choose settings for the other.
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anyorder.app import Settings, train
from anyorder.app import data as datasets
from anyorder.app.data import Data
from anyorder.errors import ArgumentError

SIDE = 32
_AT_A_TIME = 1000
_SCORED = 10_000


def main() -> None:
    """One run, on part of the training part, scored on its last 10 000; the test part is not touched."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="data", help="the folder that holds the data sets")
    parser.add_argument("--plain", choices=("mnist", "fashion_mnist"), help="images as they are, of this data set")
    parser.add_argument("--model", default="patches", choices=("patches", "scattering"))
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--size", type=int, default=50_000, help="images to train on")
    parser.add_argument("--picture", type=Path, help="write 64 of them here, and train nothing")
    chosen = parser.parse_args()
    name = chosen.plain or "fashion_mnist"
    images = datasets.load(name, str(Path(chosen.data_dir) / name)).train
    assert isinstance(images, TensorDataset)
    if chosen.picture is not None:
        _draw(made(images.tensors[0][:64, 0], torch.Generator().manual_seed(5)), chosen.picture)
        return
    settings = Settings.of(
        chosen.plain or "stand_ins", model=chosen.model, epsilon=chosen.epsilon, lr=chosen.lr,
        batch_size=chosen.size // 10,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = train(settings, Path(folder) / "run", data=load(images, chosen.size, chosen.plain))
    shown = f"{settings.dataset}, {chosen.model}, epsilon {chosen.epsilon:g}, lr {settings.lr:g}"
    print(f"{shown}: {100 * result.accuracy[-1]:.2f} %")


def load(images: TensorDataset, size: int, plain: str | None = None) -> Data:
    """The first of the images to train on, the last 10 000 to score on, each pasted once, or plain."""
    x, y = images.tensors
    if not 1 <= size <= len(x) - _SCORED:  # none is scored on that was trained on
        raise ArgumentError(f"size must be an integer from 1 to {len(x) - _SCORED}, got {size}")
    index = torch.cat([torch.arange(size), torch.arange(len(x) - _SCORED, len(x))])
    generator = torch.Generator().manual_seed(5)
    if plain is None:
        found = torch.cat([made(x[part, 0], generator) for part in torch.split(index, _AT_A_TIME)])
    else:
        found = x[index]
    train_part, held_out = (TensorDataset(found[at], y[index[at]]) for at in (slice(size), slice(size, None)))
    return Data(plain or "stand_ins", train_part, held_out, tuple(found.shape[1:]), 10)


def made(articles: Tensor, g: torch.Generator) -> Tensor:
    """(n, 28, 28) in 0 to 1 -> (n, 3, 32, 32) in 0 to 1."""
    n = len(articles)
    moved = F.grid_sample(articles[:, None], _places(n, g), align_corners=False)
    mask = F.avg_pool2d((moved * 5).clamp(0, 1), 3, 1, 1)
    own = _colour(n, g) * (0.35 + 0.65 * moved) + 0.07 * _clouds(n, g, 0.6, 1.4) + 0.25 * (moved - 0.5)
    found = _background(n, g) * (1 - mask) + mask * own + 0.02 * torch.randn(n, 3, SIDE, SIDE, generator=g)
    return (found.clamp(0, 1) * 255).round() / 255


def _between(n: int, low: float, high: float, g: torch.Generator) -> Tensor:
    return (low + (high - low) * torch.rand(n, generator=g))[:, None, None]


def _places(n: int, g: torch.Generator) -> Tensor:
    """Where each pixel is taken from: turned by 0.4 at most, sized 0.75 to 1.25, mirrored by chance, moved by 0.3."""
    angle, size = _between(n, -0.4, 0.4, g), _between(n, 0.75, 1.25, g) * 28 / SIDE
    mirrored = torch.where(_between(n, 0, 1, g) < 0.5, -1.0, 1.0)
    down, across = _between(n, -0.3, 0.3, g), _between(n, -0.3, 0.3, g)
    first = torch.cat([angle.cos() / size * mirrored, -angle.sin() / size * mirrored, across], 2)
    second = torch.cat([angle.sin() / size, angle.cos() / size, down], 2)
    return F.affine_grid(torch.cat([first, second], 1), [n, 1, SIDE, SIDE], align_corners=False)


def _background(n: int, g: torch.Generator) -> Tensor:
    """Clouds of a colour, another colour beyond a straight edge, and two spots."""
    found = _colour(n, g) + 0.22 * _clouds(n, g, 0.7, 1.6)
    found = found + 0.06 * torch.cat([_clouds(n, g, 0.7, 1.6) for _ in range(3)], 1)
    rows, columns = torch.meshgrid(torch.arange(float(SIDE)), torch.arange(float(SIDE)), indexing="ij")
    angle, offset = _between(n, 0, 2 * math.pi, g), _between(n, -14, 14, g)
    beyond = torch.sigmoid(2 * ((columns - 16) * angle.cos() + (rows - 16) * angle.sin() - offset))[:, None]
    found = found * (1 - beyond) + beyond * (_colour(n, g) + 0.15 * _clouds(n, g, 0.7, 1.6))
    for _ in range(2):
        x, y, wide, high = (_between(n, *ends, g) for ends in ((0, SIDE), (0, SIDE), (2, 7), (2, 7)))
        spot = torch.sigmoid(4 * (1 - ((columns - x) / wide) ** 2 - ((rows - y) / high) ** 2))[:, None]
        found = found * (1 - spot) + spot * (_colour(n, g) + 0.1 * _clouds(n, g, 0.7, 1.6))
    return found


def _colour(n: int, g: torch.Generator) -> Tensor:
    grey = torch.rand(n, 1, generator=g)
    return (grey + 0.18 * torch.randn(n, 3, generator=g)).clamp(0, 1)[:, :, None, None]


def _clouds(n: int, g: torch.Generator, low: float, high: float) -> Tensor:
    """Noise of amplitude 1 / f^a, a between low and high, of mean 0 and standard deviation 1 in each image."""
    f = torch.fft.fftfreq(SIDE)
    radius = (f[:, None] ** 2 + f**2).sqrt().clamp(min=1 / SIDE)
    shaped = torch.fft.fft2(torch.randn(n, 1, SIDE, SIDE, generator=g)) * radius ** -_between(n, low, high, g)[:, None]
    x: Tensor = torch.fft.ifft2(shaped).real
    return (x - x.mean((-1, -2), keepdim=True)) / x.std((-1, -2), keepdim=True)


def _draw(images: Tensor, path: Path) -> None:
    from PIL import Image

    sheet = images.view(8, 8, 3, SIDE, SIDE).permute(0, 3, 1, 4, 2).reshape(8 * SIDE, 8 * SIDE, 3)
    Image.fromarray((sheet * 255).byte().numpy()).resize((24 * SIDE, 24 * SIDE)).save(path)


if __name__ == "__main__":
    main()
