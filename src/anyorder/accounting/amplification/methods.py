"""How an amplified epsilon was found: a closed union, `Method = Pld | Deterministic | MonteCarlo`.

A plan's file says its method, so that whoever reads it can find the same number again.
"""

from dataclasses import dataclass
from typing import Any, assert_never

from anyorder import checks
from anyorder.checks import final
from anyorder.errors import ArgumentError, CertificateError
from anyorder.formats import check_names, quoted


@final
@dataclass(frozen=True)
class Pld:
    """The privacy loss distribution of the pair itself, on a grid, rounded to the safe side: as tight as the grid."""


@final
@dataclass(frozen=True)
class Deterministic:
    """A proven upper bound that is computed without any chance."""


@final
@dataclass(frozen=True)
class MonteCarlo:
    """How a certificate of chance is made; its seed is not among it.

    Args:
        samples: terms of P against Q, at least 1000; Q against P takes up to 32 times as many.
        failure: probability that the claim is too small, which is taken off delta; None for delta / 100.
        salt: any other number gives fresh samples: for those who verify.
    """

    samples: int = 200_000
    failure: float | None = None
    salt: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", checks.integer("samples", self.samples, low=1000, high=10**9))
        if self.failure is not None:
            object.__setattr__(self, "failure", checks.probability("failure", self.failure))
        object.__setattr__(self, "salt", checks.integer("salt", self.salt, low=0, high=2**63 - 1))


Method = Pld | Deterministic | MonteCarlo
"""All there are."""


def check_method(method: Any) -> Method:
    """The method, if it is one. Raises: ArgumentError."""
    if type(method) not in (Pld, Deterministic, MonteCarlo):
        raise ArgumentError(f"method must be Pld, Deterministic or MonteCarlo, got {type(method).__name__}")
    found: Method = method
    return found


def describe(method: Method) -> str:
    """Return a phrase for the card."""
    match method:
        case Pld():
            return "by its privacy loss distribution"
        case Deterministic():
            return "by a bound that is computed without chance"
        case MonteCarlo():
            failure = "a hundredth of delta" if method.failure is None else f"{method.failure:g}"
            salted = f", salt {method.salt}" if method.salt else ""
            return (
                f"by {method.samples} samples that anybody can draw again{salted}; too small with probability "
                f"{failure} at most, which is taken off delta"
            )
        case _:
            assert_never(method)


def to_dict(method: Method) -> dict[str, Any]:
    """JSON values."""
    match method:
        case Pld():
            return {"kind": "pld"}
        case Deterministic():
            return {"kind": "bound"}
        case MonteCarlo():
            return {"kind": "monte_carlo", "samples": method.samples, "failure": method.failure, "salt": method.salt}
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
        case "monte_carlo":
            check_names("method", data, {"kind", "samples", "failure", "salt"})
            return MonteCarlo(data["samples"], data["failure"], data["salt"])
        case _:
            raise CertificateError(f"a method must be of kind pld, bound or monte_carlo, got {quoted(kind)}")
