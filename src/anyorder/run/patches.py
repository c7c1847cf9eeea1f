"""What small patches of an image look like: features that are a fixed function of that image, and cost no privacy.

    h = U p / (|U p|^2 + q s^2)^(1/2),    e_k = max(0, <r_k, h> - t),    averaged over the patches p of a field

for each pattern r_k and field of a grid. U, of q rows, whitens patches of 6 x 6 pixels as noise of spectrum 1 / f^2 has
them, which photographs are like [Field 1987, Relations between the statistics of natural images and the response
properties of cortical cells]: it is computed, not learned. The r_k are standard normal, drawn once for all from a key
that is written here. Whitened patches, thresholds and averages over a grid are those of [Coates, Lee and Ng 2011, An
analysis of single-layer networks in unsupervised feature learning], whose patterns are learned from data; not so here.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from anyorder import checks
from anyorder.errors import ArgumentError
from anyorder.noise import NoiseSource

__all__ = ["COLOURS", "look"]

_SIDE = 6  # pixels of a patch
_RIDGE = 0.02  # of the largest variance, added to each
_SOFT = 0.1  # s: patches of less contrast than this count for less
_THRESHOLD = 1.0  # t, in standard deviations of <r, h>
COLOURS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))  # brightness and two differences
_VARIANCES = (1.0, 0.15, 0.06)  # of each, about, in photographs
_FINEST = (10, 4, 3)  # half waves down and across that are kept of each: the eye sees colours coarsely too
_LONGEST = 32  # pixels: longer waves are no stronger
_KEY = b"patterns of patches, not secret."
_AT_A_TIME = 16  # images, which stay in the cache


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
