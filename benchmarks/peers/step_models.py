"""The models that are timed, with inputs and targets. Needs torch; Opacus where its layer is asked for."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and a layer of 4 times the width, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Blocks of attention, 64 dimensions a head."""

    def __init__(self, words: int = 1000, length: int = 64, blocks: int = 4, width: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand_as(x).contiguous()  # one that Opacus can view
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


class Adapted(nn.Module):
    """A linear layer that stands still, and a product of rank 8 beside it, which is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 8, bias=False)
        self.up = nn.Linear(8, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted_gpt(blocks: int, width: int) -> nn.Module:
    """A GPT of 10 000 words and 128 places, of which adapters of the attention alone are trained (LoRA)."""
    model = Gpt(10_000, 128, blocks, width).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)  # type: ignore[assignment,arg-type]
    return model


class Lstm(nn.Module):
    """The next-word model of [Kairouz et al. 2021]: 96, LSTM of 670, 96, 10 004 words."""

    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(10004, 96), layer(96, 670, batch_first=True)
        self.project, self.head = nn.Linear(670, 96), nn.Linear(96, 10004)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.project(self.layer(self.words(x))[0]))


class Cbow(nn.Module):
    """The mean of 8 words tells the middle one; 100 000 words in 100 dimensions, in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(100_000, 100), nn.Linear(100, 100_000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


def perceptron(*widths: int) -> nn.Module:
    """Linear layers with a tanh between any two."""
    layers: list[nn.Module] = []
    for width in pairwise(widths):
        layers += [nn.Linear(*width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Means(nn.Module):
    """Two classes by the mean of 4 rows of a table of 10^6 x 8, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10**6, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


class Own(nn.Module):
    """The small perceptron, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def mnist_cnn() -> nn.Module:
    """That of `anyorder.app.job.cnn`."""
    network = nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def cifar_cnn() -> nn.Module:
    """Six 3 x 3 convolutions of 32 to 128 channels, and two linear layers."""
    widths = [(3, 32), (32, 32), None, (32, 64), (64, 64), None, (64, 128), (128, 128), None]
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.MaxPool2d(2)] if width is None else [nn.Conv2d(*width, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


def case(name: str, opacus: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs, targets."""
    lstm: Callable[..., nn.Module] = nn.LSTM
    if opacus:
        from opacus.layers import DPLSTM as lstm  # its hooks need its own layer
    match name:
        case "small":
            return perceptron(64, 64, 10), torch.randn(32, 64), torch.randint(10, (32,))
        case "own":
            return Own(), torch.randn(32, 64), torch.randint(10, (32,))
        case "logistic":
            return nn.Linear(64, 10), torch.randn(32, 64), torch.randint(10, (32,))
        case "wide":
            return perceptron(784, 512, 512, 10), torch.randn(512, 784), torch.randint(10, (512,))
        case "mlp":
            return perceptron(784, 512, 512, 10), torch.randn(128, 784), torch.randint(10, (128,))
        case "mnist":
            return mnist_cnn(), torch.randn(250, 1, 28, 28), torch.randint(10, (250,))
        case "cifar":
            return cifar_cnn(), torch.randn(500, 3, 32, 32), torch.randint(10, (500,))
        case "gpt":
            return Gpt(), torch.randint(1000, (32, 64)), torch.randint(1000, (32, 64))
        case "lora" | "lora-100":
            blocks, width = (4, 256) if name == "lora" else (12, 768)
            return adapted_gpt(blocks, width), torch.randint(10_000, (8, 128)), torch.randint(10_000, (8, 128))
        case "table":
            return Means(), torch.randint(10**6, (1024, 4)), torch.randint(2, (1024,))
        case "lstm-16" | "lstm-64":
            size = int(name.split("-")[1])
            return Lstm(lstm), torch.randint(10004, (size, 20)), torch.randint(10004, (size, 20))
        case "cbow":
            return Cbow(), torch.randint(100_000, (64, 8)), torch.randint(100_000, (64,))
    raise ValueError(name)


def losses(out: Tensor, y: Tensor) -> Tensor:
    """(B,) the mean loss of each example."""
    each = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none")
    return each.view(len(y), -1).mean(1)
