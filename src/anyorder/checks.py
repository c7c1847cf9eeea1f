"""Checks of arguments at the public boundary. Each returns the checked value or raises ArgumentError."""

import importlib
import math
import operator
import re
import sys
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar
from unicodedata import bidirectional, normalize

import numpy as np
from numpy.typing import ArrayLike, NDArray

from anyorder.errors import ArgumentError, MissingDependencyError


def integer(name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """An integer in [low, high]; NumPy integers are converted, floats and bools are refused."""
    try:
        result = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        result = None
    if result is None or result < low or (high is not None and result > high):
        rule = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ArgumentError(f"{name} must be {rule}, got {value!r}")
    return result


def name_of_unit(value: str) -> str:
    """A unit's name in one form: Unicode's composed one (NFC), without white space around it.

    So "ann " and "ann", and an accent that is typed in two ways, are one person. To take two for one is safe, as their
    parts are added up and cut together; to take one for two is not. Of a subclass the characters count, whatever it
    says that it is.
    """
    value = str.__str__(value).strip()
    return value if value.isascii() else normalize("NFC", value).strip()


def real(name: str, value: SupportsFloat, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite float in [low, high]; text that reads like a number is refused."""
    try:
        result = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if isinstance(value, bool) or not math.isfinite(result) or not low <= result <= high:
        bounds = " from" if low > -math.inf or high < math.inf else ""
        bounds += f" {low:g} to {high:g}" if bounds else ""
        raise ArgumentError(f"{name} must be a finite number{bounds}, got {value!r}")
    return result


def positive(name: str, value: SupportsFloat) -> float:
    """A finite float above zero."""
    result = real(name, value)
    if result <= 0:
        raise ArgumentError(f"{name} must be above 0, got {value!r}")
    return result


def probability(name: str, value: SupportsFloat) -> float:
    """A float strictly between 0 and 1."""
    result = real(name, value)
    if not 0 < result < 1:
        raise ArgumentError(f"{name} must lie strictly between 0 and 1, got {value!r}")
    return result


def choice(name: str, value: str, options: Collection[str]) -> str:
    """One of the given words."""
    if type(value) is not str or value not in options:
        listed = ", ".join(repr(option) for option in sorted(options))
        raise ArgumentError(f"{name} must be one of {listed}, got {value!r}")
    return value


def array(name: str, value: ArrayLike, *, ndim: int) -> NDArray[np.float64]:
    """A finite, non-empty float64 array of the given number of dimensions, copied; it can never be written."""
    try:
        given = np.array(value)
        if given.dtype.kind in "US":
            raise TypeError("got text")
        result = given.astype(np.float64, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} must be an array of numbers: {error}") from error
    if result.ndim != ndim or result.size == 0:
        raise ArgumentError(f"{name} must be a non-empty array of {ndim} dimension(s), got shape {result.shape}")
    if not np.isfinite(result).all():
        raise ArgumentError(f"{name} must be finite, got {int((~np.isfinite(result)).sum())} entries that are not")
    return frozen(result)


def plain(value: Any) -> Any:
    """A tensor, or a list of them, as arrays: without its graph, on the CPU, floats of every width as float64."""
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def word(name: str, value: Any) -> str:
    """A short word that is printed on cards and kept in files: harmless on every terminal, on one line."""
    if (
        not isinstance(value, str)
        or not 1 <= len(value) <= 40
        or not all(c in "0123456789 -_'" or (c.isalpha() and bidirectional(c) == "L") for c in value)
        or not (value[0].isalnum() and value[-1].isalnum())
    ):
        raise ArgumentError(
            f"{name} must be a word such as 'example' or 'user': up to 40 letters that run from left to right, digits, "
            f"and ' ', '-', '_' or an apostrophe between them, got {ascii(value)[:60]}"
        )
    return value


def fingerprint(name: str, value: Any) -> str:
    """The fingerprint of a key: 32 hexadecimal digits."""
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
        raise ArgumentError(f"{name} must be 32 hexadecimal digits, the fingerprint of a key, got {value!r:.70}")
    return value


def optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the package is there but broken: its own message says more
        raise MissingDependencyError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which is not installed; "
            f"in a clone of anyorder, install it with: pip install -e '.[{extra}]'"
        ) from error


# ----------------------------------------------------------------------------------------------------
# Classes that nobody may extend, and objects that nobody may change: what a claim was computed from is what runs.


Kind = TypeVar("Kind", bound=type)

if TYPE_CHECKING:
    from typing import final as final
else:

    def final(kind: Kind) -> Kind:
        """Class decorator: `typing.final`, and a subclass is refused where it is defined."""

        def refuse(cls: type, **options: Any) -> None:
            raise TypeError(
                f"{kind.__name__} must not be subclassed, got {cls.__name__}: claims are proven for {kind.__name__} "
                "itself, and a subclass could do something else under its name"
            )

        kind.__init_subclass__ = classmethod(refuse)
        return kind


class SetOnce:
    """Attributes are set once, by the constructor; none can be replaced, deleted, or put before one of the class."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__} is immutable: make a new one with another {name}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be deleted")


def frozen(values: NDArray[Any]) -> NDArray[Any]:
    """A copy that cannot be written, nor made writeable again: it lives in the memory of a `bytes` object."""
    return np.frombuffer(values.tobytes(), dtype=values.dtype).reshape(values.shape)


def is_of(found: Any, module: str, name: str) -> bool:
    """Whether it is of exactly this class; a class whose module was never imported has no objects."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and type(found) is kind
