"""How an amplified epsilon was found: a closed union, `Method = Pld | Deterministic`.

A plan's file says its method, so that whoever reads it can find the same number again.
"""

from dataclasses import dataclass
from typing import Any, assert_never

from anyorder._closed import final
from anyorder._sealed import check_names, quoted
from anyorder.errors import ArgumentError, CertificateError

__all__ = ["Deterministic", "Method", "Pld", "check_method", "from_dict", "to_dict"]


@final
@dataclass(frozen=True)
class Pld:
    """The privacy loss distribution of the pair itself, on a grid, rounded to the safe side: as tight as the grid."""

    def describe(self) -> str:
        """In a phrase, for the card."""
        return "privacy loss distribution"


@final
@dataclass(frozen=True)
class Deterministic:
    """A proven upper bound that is computed without any chance."""

    def describe(self) -> str:
        """In a phrase, for the card."""
        return "deterministic bound"


Method = Pld | Deterministic
"""All there are; each has `describe()`."""


def check_method(method: Any) -> Method:
    """The method, if it is one. Raises: ArgumentError."""
    if type(method) not in (Pld, Deterministic):
        raise ArgumentError(f"method must be Pld or Deterministic, got {type(method).__name__}")
    found: Method = method
    return found


def to_dict(method: Method) -> dict[str, Any]:
    """JSON values."""
    match method:
        case Pld():
            return {"kind": "pld"}
        case Deterministic():
            return {"kind": "bound"}
        case _:
            assert_never(method)


def from_dict(data: Any) -> Method:
    """The method that `to_dict` described. Raises: CertificateError for what it never writes."""
    kind = data.get("kind") if isinstance(data, dict) else None
    match kind:
        case "pld":
            check_names("method", data, {"kind"})
            return Pld()
        case "bound":
            check_names("method", data, {"kind"})
            return Deterministic()
        case _:
            raise CertificateError(f"a method must be of kind pld or bound, got {quoted(kind)}")
