"""Modules written as people write them, and as torchvision and timm do."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.case import EXAMPLES, Batch, Case

__all__ = ["cases"]


class _Residual(nn.Module):
    """A ResNet's block."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class _ConvNext(nn.Module):
    """torchvision's block: a depthwise convolution, LayerNorm over channels, a layer scale, rows left out at random."""

    def __init__(self, survival: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.scale, self.survival = nn.Parameter(torch.full((8, 1, 1), 0.5)), survival

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2) * self.scale
        noise = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
        return x + y * noise.bernoulli_(self.survival).div_(self.survival)


class _SqueezeExcitation(nn.Module):
    """Channels weighed by their means, in an inverted residual of a MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite, self.project = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.depthwise(F.hardswish(self.expand(x))))
        return x + self.project(y * self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid())


class _Split(nn.Module):
    """Half of the channels are normalised, as in ShuffleNet, and all are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        y = torch.cat([a, self.conv(self.norm(b))], dim=1)
        return y.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


class _Decoder(nn.Module):
    """The sequence-to-sequence loop of tutorials: cells in a loop, outputs written into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs, state = torch.zeros(x.shape[0], x.shape[1], 5), torch.zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs[:, t] = self.out(state)
        return outputs


class _Packed(nn.Module):
    """An LSTM over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][0][0]


class _Last(_Packed):
    """The same, from the padded tensor."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = self.layer(x)[0]
        return out.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, out.shape[2]))[:, 0]


class _Repeated(nn.Module):
    """One layer in three places, as in a universal transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Branch(nn.Module):
    """An if on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def _images() -> Batch:
    return {"x": torch.randn(EXAMPLES, 8, 9, 9)}


def _sequences(width: int = 4) -> Batch:
    return {"x": torch.randn(EXAMPLES, 5, width)}


def _lengths() -> Batch:
    return {**_sequences(), "lengths": torch.tensor([2, 5, 3])}


def cases() -> Iterator[Case]:
    """What is told apart by how it is written."""
    yield _case("ResNet block", _Residual, _images, refused="GroupNorm")
    yield _case("ResNet block", _Residual, _images, given="converted", converted=True)
    yield _case("ConvNeXt block with stochastic depth", lambda: _ConvNext(1.0), _images)
    yield _case("inverted residual with squeeze and excitation", _SqueezeExcitation, _images)
    yield _case("GroupNorm of one half of the channels", _Split, _images)
    yield _case("GRU cell in a loop, outputs written into zeros", _Decoder, _sequences)
    yield _case("LSTM over a packed sequence", _Packed, _lengths, refused="out.gather")
    yield _case("LSTM over a padded tensor, last states gathered", _Last, _lengths)
    yield _case("one layer in three places", _Repeated, lambda: _sequences(8))
    yield _case("if on the value of a tensor", _Branch, lambda: {"x": torch.randn(EXAMPLES, 4)}, refused="torch.where")


def _case(name: str, make: Callable[[], nn.Module], batch: Callable[[], Batch], **options: object) -> Case:
    return Case("patterns", name, lambda: (make(), batch()), **options)  # type: ignore[arg-type]
