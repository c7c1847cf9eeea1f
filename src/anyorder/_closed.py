"""Classes that nobody may extend, and objects that nobody may change: what a claim was computed from is what runs."""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["SetOnce", "final", "frozen"]

Kind = TypeVar("Kind", bound=type)

if TYPE_CHECKING:
    from typing import final
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
