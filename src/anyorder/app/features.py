"""Features that are a fixed function of each image, so that they cost no privacy, and the linear model on them."""

from collections.abc import Callable
from functools import cache
from math import pi, prod, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from anyorder import checks
from anyorder.app.data import Data
from anyorder.errors import ArgumentError, ModelError
from anyorder.noise import NoiseSource

# ----------------------------------------------------------------------------------------------------
# The scattering transform of images: features that are a fixed function of each image, so that they cost no privacy.
#
#     S0 = x * phi,   S1 = |x * psi_a| * phi,   S2 = ||x * psi_a| * psi_b| * phi,   each at every 2^J-th pixel
#
# for Morlet wavelets psi of J scales and L angles, b of a larger scale than a, and a Gaussian phi of width 2^J [Bruna
# and Mallat 2013, Invariant scattering convolution networks, sections 2 and 3]. The filters are those of Kymatio
# [Andreux et al. 2020], whose numbers a test compares.


_AT_A_TIME = 16  # images, which stay in the cache


def scatter(images: Tensor, *, scales: int = 2, angles: int = 8) -> Tensor:
    """Scattering coefficients up to the second order.

    Args:
        images: (n, channels, height, width), float; sides that 2^scales divides.
        scales: J. Coefficients are averages over 2^J pixels a side.
        angles: L.
    Returns: (n, channels, 1 + J L + L^2 J (J - 1) / 2, height / 2^J, width / 2^J) float32: first S0, then S1 by scale
        and angle, then S2 by the first wavelet and by the second.
    Cost: 0.5 ms for an image of 28 x 28 on one core; no training, and one image at a time, whatever the others are.
    Raises: ArgumentError for other shapes.
    """
    scales = checks.integer("scales", scales, low=1, high=6)
    angles = checks.integer("angles", angles, low=1)
    if images.ndim != 4 or not images.is_floating_point() or any(side % 2**scales for side in images.shape[2:]):
        raise ArgumentError(
            f"images must be float of shape (n, channels, height, width), sides divided by {2**scales}, got "
            f"{images.dtype} of shape {tuple(images.shape)}"
        )
    n, channels, height, width = images.shape
    flat = images.reshape(n * channels, height, width)
    with torch.no_grad():
        pieces = torch.split(flat, _AT_A_TIME) if len(flat) else ()
        parts = [_transform(part.float(), scales, angles) for part in pieces]
    count = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
    shape = (n, channels, count, height >> scales, width >> scales)
    return torch.cat(parts).reshape(shape) if parts else images.new_zeros(shape, dtype=torch.float32)


def _transform(x: Tensor, scales: int, angles: int) -> Tensor:
    """(m, height, width) -> (m, coefficients, height / 2^J, width / 2^J)."""
    margin = 2**scales  # mirrored around the image, and cut off the result, one coefficient a side
    x = F.pad(x[:, None], (margin,) * 4, mode="reflect")[:, 0]
    psi, *sides = _filters(x.shape[1], x.shape[2], scales, angles)
    psi = [[one.to(x.device) for one in of_scale] for of_scale in psi]
    down, across = ([one.to(x.device) for one in of_side] for of_side in sides)

    def smooth(values: Tensor, scale: int) -> Tensor:
        """The averages of what is at every 2^scale-th pixel."""
        averages: Tensor = down[scale] @ values @ across[scale].T
        return averages

    def waves(values: Tensor, scale: int, at: int) -> Tensor:
        """|values * psi| for all angles of a scale, of what is at every 2^at-th pixel, at every 2^scale-th."""
        spectrum = torch.fft.fft2(values)[..., None, :, :] * psi[scale][at]
        moduli: Tensor = torch.fft.ifft2(_thinned(spectrum, scale - at)).abs()
        return moduli

    first = [waves(x, a, 0) for a in range(scales)]  # (m, L, ..) each
    orders = [smooth(x, 0)[:, None], *(smooth(one, a) for a, one in enumerate(first))]
    for a, one in enumerate(first):
        seconds = [smooth(waves(one, b, a), b) for b in range(a + 1, scales)]  # (m, L, L, ..) each
        if seconds:
            orders.append(torch.cat(seconds, 2).flatten(1, 2))
    return torch.cat(orders, 1)


def _thinned(spectrum: Tensor, octaves: int) -> Tensor:
    """The spectrum of every 2^octaves-th pixel: the mean of its equal parts."""
    for _ in range(octaves):  # in slices: torch's own mean over two inner dimensions takes four times as long
        height, width = (side // 2 for side in spectrum.shape[-2:])
        half = spectrum[..., :height, :] + spectrum[..., height:, :]
        spectrum = (half[..., :width] + half[..., width:]) / 4
    return spectrum


@cache
def _filters(
    height: int, width: int, scales: int, angles: int
) -> tuple[list[list[Tensor]], list[Tensor], list[Tensor]]:
    """Spectra of wavelets by scale and by the thinning of what they meet, (L, ..) each; averages down and across."""
    psi = []
    for j in range(scales):
        turned = [
            _morlet(
                height, width, 0.8 * 2**j, (angles - angles // 2 - 1 - turn) * pi / angles, 0.75 * pi / 2**j, angles
            )
            for turn in range(angles)
        ]
        spectrum = np.fft.fft2(np.stack(turned)).real
        low = [_low(_low(spectrum, octaves, -2), octaves, -1) for octaves in range(j + 1)]
        psi.append([torch.from_numpy(np.ascontiguousarray(one)).float() for one in low])
    return psi, _averages(height, scales), _averages(width, scales)


def _averages(side: int, scales: int) -> list[Tensor]:
    """By thinning, (side / 2^J - 2, side / 2^thinning): phi, which is a product of one for rows and one for columns."""
    sigma = 0.8 * 2 ** (scales - 1)
    bell = np.exp(-(np.arange(-2 * side, 3 * side) ** 2) / (2 * sigma**2)).reshape(5, side).sum(0)
    spectrum = np.fft.fft(bell / (sqrt(2 * pi) * sigma)).real
    result = []
    for octaves in range(scales):
        low = _low(spectrum, octaves, -1)
        every = np.fft.ifft(low[:, None] * np.fft.fft(np.eye(side >> octaves), axis=0), axis=0).real
        result.append(torch.from_numpy(every[:: 2 ** (scales - octaves)][1:-1].copy()).float())
    return result


def _low(spectrum: NDArray[np.float64], octaves: int, axis: int) -> NDArray[np.float64]:
    """The low frequencies: a filter for what is at every 2^octaves-th pixel."""
    full = spectrum.shape[axis]
    kept = full >> octaves
    return np.delete(spectrum, np.s_[kept // 2 : full - kept + kept // 2], axis) if octaves else spectrum


def _morlet(
    height: int, width: int, sigma: float, angle: float, frequency: float, angles: int
) -> NDArray[np.complex128]:
    """g(u) (exp(i <frequency, u>) - beta), with the beta that makes the mean zero."""
    wave = _gabor(height, width, sigma, angle, frequency, 4 / angles)
    bump = _gabor(height, width, sigma, angle, 0.0, 4 / angles)
    balanced: NDArray[np.complex128] = wave - wave.sum() / bump.sum() * bump
    return balanced


def _gabor(
    height: int, width: int, sigma: float, angle: float, frequency: float, slant: float
) -> NDArray[np.complex128]:
    """A Gaussian of width sigma along the angle and sigma / slant across it, times a plane wave; periodic."""
    c, s = np.cos(angle), np.sin(angle)
    rows = np.arange(-2 * height, 3 * height)[:, None]
    columns = np.arange(-2 * width, 3 * width)[None, :]
    along, across = c * rows + s * columns, c * columns - s * rows
    values = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    periodic: NDArray[np.complex128] = values.reshape(5, height, 5, width).sum((0, 2))
    scaled: NDArray[np.complex128] = periodic * (slant / (2 * pi * sigma**2))
    return scaled


# ----------------------------------------------------------------------------------------------------
# What small patches of an image look like: features that are a fixed function of that image, and cost no privacy.
#
#     h = U p / (|U p|^2 + q s^2)^(1/2),    e_k = max(0, <r_k, h> - t),    averaged over the patches p of a field
#
# for each pattern r_k and field of a grid. U, of q rows, whitens patches of 6 x 6 pixels as noise of spectrum 1 / f^2
# has them, which photographs are like [Field 1987, Relations between the statistics of natural images and the
# response properties of cortical cells]: it is computed, not learned. The r_k are standard normal, drawn once for all
# from a key that is written here. Whitened patches, thresholds and averages over a grid are those of [Coates, Lee and
# Ng 2011, An analysis of single-layer networks in unsupervised feature learning], whose patterns are learned from
# data; not so here.


_SIDE = 6  # pixels of a patch
_RIDGE = 0.02  # of the largest variance, added to each
_SOFT = 0.1  # s: patches of less contrast than this count for less
_THRESHOLD = 1.0  # t, in standard deviations of <r, h>
COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))  # brightness and two differences
_VARIANCES = (1.0, 0.15, 0.06)  # of each, about, in photographs
_FINEST = (10, 4, 3)  # half waves down and across that are kept of each: the eye sees colours coarsely too
_LONGEST = 32  # pixels: longer waves are no stronger
_KEY = b"patterns of patches, not secret."


def look(images: Tensor, *, patterns: int = 512, grid: int = 4) -> Tensor:
    """How much the patches of each field of an image look like each pattern.

    Args:
        images: (n, channels, height, width), float, pixels in 0 to 1; one channel or three; sides of 6 pixels at least.
        patterns: how many r_k.
        grid: fields a side, which overlap by a pixel where the number of patches is no multiple.
    Returns: (n, patterns, grid, grid) float32.
    Cost: 1 ms for an image of 32 x 32 and 512 patterns on one core. Each image is looked at alone.
    Raises: ArgumentError for other shapes.
    """
    patterns = checks.integer("patterns", patterns, low=1)
    grid = checks.integer("grid", grid, low=1)
    fits = images.ndim == 4 and images.is_floating_point() and images.shape[1] in (1, 3)
    if not fits or min(images.shape[2:]) < _SIDE + grid - 1:
        raise ArgumentError(
            f"images must be float of shape (n, 1 or 3, height, width), sides of {_SIDE + grid - 1} pixels at least, "
            f"got {images.dtype} of shape {tuple(images.shape)}"
        )
    filters = _whitening(images.shape[1]).to(images.device)
    drawn = _patterns(patterns, len(filters)).to(images.device)
    with torch.no_grad():
        pieces = torch.split(images, _AT_A_TIME) if len(images) else ()
        parts = [_look(x.float(), filters, drawn, grid) for x in pieces]
    return torch.cat(parts) if parts else images.new_zeros((0, patterns, grid, grid), dtype=torch.float32)


def _look(x: Tensor, filters: Tensor, drawn: Tensor, grid: int) -> Tensor:
    h = F.conv2d(x, filters).permute(0, 2, 3, 1)
    h = h / (h.square().sum(3, keepdim=True) + _SOFT**2 * len(filters)).sqrt()
    likeness = (h.flatten(0, 2) @ drawn).sub_(_THRESHOLD).relu_()
    return F.adaptive_avg_pool2d(likeness.view(*h.shape[:3], -1).permute(0, 3, 1, 2), grid)


@cache
def _patterns(count: int, size: int) -> Tensor:
    """(size, count) standard normals, the same in every run; more of them begin with the fewer."""
    source = NoiseSource(_KEY)
    return torch.from_numpy(np.stack([source.normal(k, 0, size) for k in range(count)], 1))


@cache
def _whitening(channels: int) -> Tensor:
    """(q, channels, 6, 6): waves over a patch, each over the standard deviation that photographs would give it."""
    waves, expected = _waves()
    found = []
    for colour, variance, finest in zip(COLOURS, _VARIANCES, _FINEST, strict=True):
        own = np.array(colour[:channels]) / np.linalg.norm(colour[:channels])
        kept = [(i, j) for i in range(_SIDE) for j in range(_SIDE) if 0 < i + j <= finest]  # (0, 0) is the mean
        for i, j in kept:
            deviation = np.sqrt(variance * expected[i, j] / expected[0, 1] + _RIDGE)
            found.append(np.multiply.outer(own, np.multiply.outer(waves[i], waves[j])) / deviation)
        if channels == 1:
            break
    return torch.from_numpy(np.stack(found)).float()


def _waves() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines over a patch's side, orthonormal, and the variance of each product under 1 / (f^2 + 1 / 32^2)."""
    at = np.arange(_SIDE)
    waves = np.cos(np.pi * at[:, None] * (at + 0.5) / _SIDE) * np.sqrt(2 / _SIDE)
    waves[0] /= np.sqrt(2)
    f = np.fft.fftfreq(2 * _LONGEST)
    apart = np.fft.ifft2(1 / (f[:, None] ** 2 + f**2 + _LONGEST**-2)).real  # the covariance of pixels so far apart
    between = at[:, None] - at
    covariance = apart[between[:, None, :, None], between[None, :, None, :]]  # of (a, b) and (c, d) at [a, b, c, d]
    return waves, np.einsum("ia,jb,abcd,ic,jd->ij", waves, waves, covariance, waves, waves)


# ----------------------------------------------------------------------------------------------------
# A data set's images as scattering features, and the linear model on them that is centred and whitened privately.
#
# The features z of an image are log(1 + 1000 S) of its scattering coefficients S, of norm 1 over the image: a
# function of that image alone. What is known of all images together is learned within the private run, as gradients
# are, since the gradient of a mean is a mean: that of -<m, z> at m is -z. So three things are trained one after the
# other, each with the noise of the plan, and the plan's epsilon is that of all three:
#
#     the first epoch         mean      m, the mean of z
#     the second epoch        spread    P, the mean of an image's sum over places of c c^T, of norm 1, for c = z - m
#     the other epochs        classes   softmax regression on f = W c of norm 1, with W = (P + ridge I)^(-1/2)
#
# W acts on the coefficients of one place, and is shared by places and colours, so that P is small and its noise too.
#
# With features of patches next to them (`patched`), of norm 1 over the image too, z is both over sqrt 2, the first
# epoch learns the mean of both, and f is W c of norm 1 beside those of patches less their mean, of norm 1, both over
# sqrt 2.


Stage = Literal["mean", "spread", "classes"]
STAGES: tuple[Stage, ...] = ("mean", "spread", "classes")

_STRENGTH = 1000.0  # of the logarithm: coefficients from 0.001 on count by their ratios
_RIDGE_OF_FEATURES = 0.3  # of the mean of P's eigenvalues, added to each
_PATTERNS = 512  # of patches
_ROWS_AT_A_TIME = 1000


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
    """The data set with the features of its images, and of their patches next to them, in the place of images.

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
    pieces = [of(x[i : i + _ROWS_AT_A_TIME]).half() for i in range(0, size, _ROWS_AT_A_TIME)]
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
            for x in torch.split(part.x, _ROWS_AT_A_TIME)
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
                values += _RIDGE_OF_FEATURES * values.mean() + torch.finfo(torch.float32).tiny
                self.mixing.copy_((vectors * (values / values.mean()).rsqrt()) @ vectors.T)
            case "classes":
                pass
            case _:
                raise ArgumentError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")


def whitened(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """`Whitened` on features of that shape: that of the inputs of `scattered`, or the shape that `patched` says."""
    return Whitened(input_shape, num_classes)
