"""Models by name."""

import inspect
from collections.abc import Callable
from math import prod

import torch
from torch import nn

from anyorder.errors import ArgumentError, ModelError
from anyorder.run.features import whitened
from anyorder.run.names import load_function

__all__ = ["MODELS", "build", "cnn", "linear", "mlp"]

Shape = tuple[int, ...]


def linear(input_shape: Shape, num_classes: int) -> nn.Module:
    """Softmax regression on the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), num_classes))


def mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    """One hidden layer of 32 units with tanh, which bounds activations and so suits clipped gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 32), nn.Tanh(), nn.Linear(32, num_classes))


def cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """The network for MNIST of [Kairouz et al. 2021, Table 2(a)]; 26 010 parameters at 28 x 28 and 10 classes.

    The table names two convolutions (16 of 8 x 8, 32 of 4 x 4, strides 2) and a layer of 32 units. Padding 3, pooling
    2 x 2 with stride 1 after each convolution, and tanh are those of the prior work that it refers to
    [Papernot et al. 2020, Making the Shoe Fit].
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 20:
        raise ModelError(
            f"model 'cnn' takes images of shape (channels, height, width), 20 pixels or more a side, got "
            f"{input_shape}; use 'mlp' or 'linear', or module:function with a model of your own"
        )
    channels, height, width = input_shape
    rows, columns = (_side(side) for side in (height, width))
    network = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * rows * columns, 32), nn.Tanh(), nn.Linear(32, num_classes),
    )  # fmt: skip
    # On a CPU a private step takes half the time in this layout; torch's types leave the argument out.
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _side(pixels: int) -> int:
    first = (pixels + 2 * 3 - 8) // 2 + 1 - 1
    return (first - 4) // 2 + 1 - 1


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": cnn,
    "linear": linear,
    "mlp": mlp,
    "patches": whitened,
    "scattering": whitened,
}


def build(name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    """The model of that name, or what `module:function` returns.

    A function of one's own is called with (input_shape, num_classes) if it takes arguments, else without.
    """
    if ":" not in name:
        if name not in MODELS:
            raise ArgumentError(f"model must be one of {', '.join(MODELS)} or module:function, got {name!r}")
        return MODELS[name](input_shape, num_classes)
    function = load_function(name, "model")
    model = function(input_shape, num_classes) if inspect.signature(function).parameters else function()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model {name!r} must return a torch.nn.Module, got {type(model).__name__}")
    return model
