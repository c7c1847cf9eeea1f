"""A data set's images as scattering features, and the linear model on them that is centred and whitened privately.

The features z of an image are log(1 + 1000 S) of its scattering coefficients S, of norm 1 over the image: a function of
that image alone. What is known of all images together is learned within the private run, as gradients are, since the
gradient of a mean is a mean: that of -<m, z> at m is -z. So three things are trained one after the other, each with the
noise of the plan, and the plan's epsilon is that of all three:

    the first epoch         mean      m, the mean of z
    the second epoch        spread    P, the mean of an image's sum over places of c c^T, of norm 1, for c = z - m
    the other epochs        classes   softmax regression on f = W c of norm 1, with W = (P + ridge I)^(-1/2)

W acts on the coefficients of one place, and is shared by places and colours, so that P is small and its noise too.

With features of patches beside them (`patched`), of norm 1 over the image too, z is both over sqrt 2, the first epoch
learns the mean of both, and f is W c of norm 1 beside those of patches less their mean, of norm 1, both over sqrt 2.
"""

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from anyorder.errors import ArgumentError, ModelError
from anyorder.run.datasets import Data
from anyorder.run.patches import COLOURS, look
from anyorder.run.scattering import scatter

__all__ = ["STAGES", "Features", "Stage", "Whitened", "joined", "patched", "scattered", "whitened"]

Stage = Literal["mean", "spread", "classes"]
STAGES: tuple[Stage, ...] = ("mean", "spread", "classes")

_STRENGTH = 1000.0  # of the logarithm: coefficients from 0.001 on count by their ratios
_RIDGE = 0.3  # of the mean of P's eigenvalues, added to each
_PATTERNS = 512  # of patches
_AT_A_TIME = 1000


class Features(Dataset[tuple[Tensor, Tensor]]):
    """Features and classes, whole batches of which are read at a time; see `joined`."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    def __getitems__(self, i: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


def joined(batch: Any) -> Any:
    """What a DataLoader is to make of a batch of `Features`."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def scattered(data: Data) -> Data:
    """The data set with the features of its images in the place of images.

    Colours are turned into brightness and two differences first. Photographs that mirror each other
    show the same thing: where there is colour, the features are the mean of an image's and its mirror image's.

    Returns: inputs (channels, coefficients, height / 4, width / 4), float16.
    Cost: 1 ms for an image of 28 x 28, 6 ms for one of 3 x 32 x 32, on one core. Memory: 8 kB, 31 kB an image.
    Raises: ModelError for inputs that are no images with sides divided by 4.
    """
    _refuse_other_than_images(data)
    train, test = (_features(part, _of_images) for part in (data.train, data.test))
    return Data(data.name, train, test, tuple(train.x.shape[1:]), data.num_classes)


def patched(data: Data) -> Data:
    """The data set with the features of its images, and of their patches beside them, in the place of images.

    Those of patches are the mean of an image's and its mirror image's where there is colour, as the others are.

    Returns: inputs (1, d) float16: the coefficients of `scattered` and then (512, 4, 4) of `look`. Their `input_shape`
        is what `whitened` is to be called with: (channels, coefficients, height / 4, width / 4, 8192).
    Cost: 1 ms more than `scattered` for an image of 28 x 28, 3 ms for one of 3 x 32 x 32. Memory: 16 kB more an image.
    Raises: ModelError for inputs that are no images with sides divided by 4, of one channel or three.
    """
    channels, height, width = _refuse_other_than_images(data)
    if channels not in (1, 3) or min(height, width) < 12:
        raise ModelError(
            "model 'patches' takes images of shape (channels, height, width), one channel or three, sides of 12 pixels "
            f"at least, got {data.input_shape}; use 'scattering', or module:function with a model of your own"
        )
    train, test = (_features(part, _with_patches) for part in (data.train, data.test))
    places = (height // 4, width // 4)
    others = train.x.shape[2] - channels * 81 * places[0] * places[1]
    return Data(data.name, train, test, (channels, 81, *places, others), data.num_classes)


def _refuse_other_than_images(data: Data) -> tuple[int, int, int]:
    shape = data.input_shape
    if len(shape) != 3 or any(side % 4 for side in shape[1:]):
        raise ModelError(
            "models 'scattering' and 'patches' take images of shape (channels, height, width), sides divided by 4, got "
            f"{shape}; use 'mlp' or 'linear', or module:function with a model of your own"
        )
    return shape[0], shape[1], shape[2]


def _features(part: Dataset[tuple[Tensor, Tensor | int]], of: Callable[[Tensor], Tensor]) -> "Features":
    size = len(part)  # type: ignore[arg-type]
    if isinstance(part, TensorDataset):
        x, y = part.tensors
    else:
        rows = [part[i] for i in range(size)]
        x, y = torch.stack([x for x, _ in rows]), torch.tensor([int(y) for _, y in rows])
    pieces = [of(x[i : i + _AT_A_TIME]).half() for i in range(0, size, _AT_A_TIME)]
    return Features(torch.cat(pieces), y)


def _with_patches(x: Tensor) -> Tensor:
    """(n, channels, height, width) -> (n, 1, d)."""
    x = x.float()
    seen = look(x, patterns=_PATTERNS)
    if x.shape[1] == 3:
        seen = (seen + look(x.flip(-1), patterns=_PATTERNS)) / 2
    return torch.cat([_of_images(x).flatten(1), seen.flatten(1)], 1)[:, None]


def _of_images(x: Tensor) -> Tensor:
    """(n, channels, height, width) -> (n, channels, coefficients, height / 4, width / 4)."""
    x = x.float()
    if x.shape[1] == 3:
        turn = F.normalize(torch.tensor(COLOURS)).to(x.device)
        x = torch.einsum("ab,nbhw->nahw", turn, x)
    found = torch.log1p(_STRENGTH * scatter(x).clamp(min=0))
    return (found + _mirrored(found)) / 2 if x.shape[1] == 3 else found


def _mirrored(found: Tensor) -> Tensor:
    """What the features of the mirror image are, up to the places that coefficients are taken at, a pixel apart."""
    turned = (6 - torch.arange(8)) % 8  # by whose wavelets the mirror image is seen as the image is by the others
    pairs = (turned[:, None] * 8 + turned).flatten()
    order = torch.cat([torch.tensor([0]), 1 + turned, 9 + turned, 17 + pairs])
    return found[:, :, order.to(found.device)].flip(-1)


class Whitened(nn.Module):
    """Softmax regression on features that are centred and whitened by private means; see the top of this file.

    Attributes:
        stage: what `forward` is for. In "mean" and "spread" it returns (n, 1), whose sum is to be made small: its
            gradients are minus what is averaged, of norm 1 for each image. In "classes" (n, classes) logits.
        mean, mixing: m as (d,) and W; set by `finish`.

    Args:
        shape: of the features: (channels, coefficients, height, width), and how many others stand beside them, if any.
    """

    mean: Tensor
    mixing: Tensor

    def __init__(self, shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        if len(shape) not in (4, 5):
            raise ModelError(
                "features must be of shape (channels, coefficients, height, width), or with the number of others after "
                f"these, got {shape}; see scattered() and patched()"
            )
        self.shape, self.stage = shape[:4], STAGES[-1]
        self._size = prod(shape[:4])
        size, count = self._size + sum(shape[4:]), shape[1]
        self.centre = nn.Linear(size, 1, bias=False)
        self.spread = nn.Linear(count * count, 1, bias=False)
        self.classify = nn.Linear(size, num_classes, bias=False)  # a bias's gradient would use up half the clip norm
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("mixing", torch.eye(count))
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """(n, *shape) or (n, 1, d) features, or (n, d) of `prepared` -> what the stage is for."""
        if x.dim() == 2:
            return self._logits(x.float())
        z = self._of_norm_one(x)
        stage = self.stage if self.training else "classes"
        if stage == "mean":
            return self._minus(self.centre, z)
        if stage == "spread":
            by_place = self._centred(z).transpose(1, 2).flatten(2)  # (n, coefficients, channels and places)
            return self._minus(self.spread, F.normalize((by_place @ by_place.transpose(1, 2)).flatten(1)))
        return self._logits(self._whitened(z))

    def _of_norm_one(self, x: Tensor) -> Tensor:
        """z, (n, d)."""
        flat = x.float().flatten(1)
        if flat.shape[1] == self._size:
            return F.normalize(flat)
        return F.normalize(torch.cat([F.normalize(flat[:, : self._size]), F.normalize(flat[:, self._size :])], 1))

    def _centred(self, z: Tensor) -> Tensor:
        """c, (n, channels, coefficients, places)."""
        return F.normalize(z[:, : self._size] - self.mean[: self._size]).view(-1, *self.shape).flatten(3)

    def _whitened(self, z: Tensor) -> Tensor:
        """f, (n, d)."""
        f = F.normalize((self.mixing @ self._centred(z)).flatten(1))
        if z.shape[1] == self._size:
            return f
        return F.normalize(torch.cat([f, F.normalize(z[:, self._size :] - self.mean[self._size :])], 1))

    @staticmethod
    def _minus(layer: nn.Linear, of: Tensor) -> Tensor:
        value: Tensor = layer(of)
        return -value

    def _logits(self, f: Tensor) -> Tensor:
        logits: Tensor = self.classify(f)
        return logits

    @torch.no_grad()
    def prepared(self, part: Features) -> Features:
        """The same with f in the place of z, once and for all: in the last stage no step needs more."""
        pieces = [
            self._whitened(self._of_norm_one(x.to(self.mean.device))).half().cpu()
            for x in torch.split(part.x, _AT_A_TIME)
        ]
        return Features(torch.cat(pieces), part.y)

    @torch.no_grad()
    def finish(self, stage: Stage) -> None:
        """Put what a stage has learned to use: called once at its end, when `centre` or `spread` hold the mean."""
        match stage:
            case "mean":
                self.mean.copy_(self.centre.weight[0])
            case "spread":
                count = self.shape[1]
                found = self.spread.weight.view(count, count).double()
                values, vectors = torch.linalg.eigh((found + found.T) / 2)
                values = values.clamp(min=0)
                values += _RIDGE * values.mean() + torch.finfo(torch.float32).tiny
                self.mixing.copy_((vectors * (values / values.mean()).rsqrt()) @ vectors.T)
            case "classes":
                pass
            case _:
                raise ArgumentError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")


def whitened(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`Whitened` on features of that shape: that of the inputs of `scattered`, or the shape that `patched` says."""
    return Whitened(input_shape, num_classes)
