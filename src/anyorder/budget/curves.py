"""Privacy curves in files."""

from dataclasses import fields
from typing import Any, assert_never

from anyorder._limits import MAX_STEPS, REMEDY, is_bounded
from anyorder._sealed import brief, canonical, check_names, quoted
from anyorder.accounting.curves import Amplified, BoundedRange, Composed, Curve, Gaussian, Sampled
from anyorder.errors import CertificateError, LimitError
from anyorder.sensitivity.cost import check_plan

__all__ = ["curve_from_dict", "curve_to_dict"]

_KINDS: dict[str, type[Gaussian] | type[BoundedRange] | type[Sampled]] = {
    "gaussian": Gaussian, "bounded range": BoundedRange, "sampled": Sampled,
}  # fmt: skip
_MOST_PARTS = 3  # of a stranger's file: each is convolved
_LOUDEST = 0.4**-2  # mu^2 of a sampled step, or of all draws


def curve_to_dict(curve: Curve) -> dict[str, Any]:
    """The curve as JSON values."""
    match curve:
        case Composed():
            return {"kind": "composed", "parts": [curve_to_dict(part) for part in curve.parts]}
        case Gaussian() | BoundedRange() | Sampled():
            [kind] = [name for name, known in _KINDS.items() if known is type(curve)]
            data = {f.name: getattr(curve, f.name) for f in fields(curve) if f.init}
            if type(curve) is Sampled and curve.neighbours == "add-or-remove":
                del data["neighbours"]  # as files always had it
            return {"kind": kind, **data}
        case Amplified():
            return {"kind": "amplified", **curve.to_dict()}
        case _:
            assert_never(curve)


def curve_from_dict(data: Any) -> Curve:
    """The curve that `curve_to_dict` described. Raises: CertificateError."""
    if not isinstance(data, dict):
        raise CertificateError(f"a curve must be an object, got {quoted(data)}")
    kind = data.get("kind")
    try:
        if kind == "composed":
            parts = check_names("a curve", data, {"kind", "parts"})["parts"]
            if not isinstance(parts, list) or (is_bounded() and len(parts) > _MOST_PARTS):
                raise LimitError(f"a curve must have a list of up to {_MOST_PARTS} parts{REMEDY}")
            curve: Curve = Composed(tuple(_single(part) for part in parts))
        else:
            curve = _single(data)
        same = canonical(curve_to_dict(curve)) == canonical(data)
    except CertificateError:
        raise
    except Exception as problem:  # whatever the numbers break, no curve of this package was saved like that
        raise CertificateError(f"the curve in the file is malformed: {brief(problem)}") from problem
    if not same:
        raise CertificateError(
            "the curve in the file is malformed: some of it is not in the form that curves are saved"
        )
    return curve


def _single(data: Any) -> Gaussian | BoundedRange | Sampled | Amplified:
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "amplified":
        return _amplified({name: value for name, value in data.items() if name != "kind"})
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CertificateError(
            f"a curve must be of kind {', '.join(_KINDS)}, amplified or composed, got {quoted(kind)}"
        )
    made = _KINDS[kind]
    names = {"kind", *(f.name for f in fields(made) if f.init)}
    check_names("a curve", data, names - ({"neighbours"} - data.keys() if made is Sampled else set()))
    curve = made(**{name: value for name, value in data.items() if name != "kind"})
    if is_bounded() and not _is_quick(curve):
        raise LimitError(f"a curve of so many steps, or so little noise, takes more time than a file is given{REMEDY}")
    return curve


def _amplified(data: dict[str, Any]) -> Amplified:
    """Within the bounds of the plan that has this curve, before any part of it is made."""
    part, sigma = data.get("participation"), data.get("noise_multiplier")
    steps = None
    if isinstance(part, dict):
        epochs, bins = part.get("k"), part.get("b")
        steps = epochs * bins if type(epochs) is int and type(bins) is int and "n" not in part else part.get("n")
    check_plan({**data, "sigma": sigma, "workload": {"n": steps}})
    return Amplified.from_dict(data)


def _is_quick(curve: Gaussian | BoundedRange | Sampled) -> bool:
    """Whether its loss distribution takes a second at most; `check_plan` has the same bounds."""
    match curve:
        case Gaussian():
            return True
        case BoundedRange():
            return curve.e0**2 * curve.draws <= _LOUDEST
        case Sampled():
            return curve.n <= MAX_STEPS and curve.sigma**-2 + curve.e0**2 * curve.draws / 4 <= _LOUDEST
        case _:
            assert_never(curve)
