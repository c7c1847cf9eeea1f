r"""The lines of a budget file: what each says, and the chain that binds it to all lines before it.

    line    one JSON object, plain ASCII, and "\n"
    chain   sha256(chain of the line before | this line's JSON without its chain)

The first line says what the budget is of; then come spends, what runs turned out to use, and limits. All of it is
public: no ids, no data, and curves alone. What units have each is in a file of its own; see `anyorder.budget.units`.
"""

import hashlib
import json
from dataclasses import dataclass, field, fields
from typing import Any, assert_never

from anyorder._sealed import brief, canonical, check_names
from anyorder.accounting import MonteCarlo
from anyorder.accounting.curves import Amplified, BoundedRange, Composed, Curve, Gaussian, Sampled, compose
from anyorder.errors import BudgetError

__all__ = [
    "FILTERS", "FORMAT", "Begin", "Entry", "Limit", "Line", "Settle", "Spend", "UnitsAt", "decode", "encode",
    "label_of", "read_curve", "relabelled", "write_curve",
]  # fmt: skip

FORMAT = "anyorder-budget/1"
FILTERS = ("gaussian", "renyi")


@dataclass(frozen=True, kw_only=True)
class Begin:
    """What the budget is of.

    Attributes:
        id: 32 hexadecimal digits, drawn when it was made.
        unit, neighbours: of every plan; None: as those of the first that is spent.
        adaptive: whether later plans may be chosen after results of earlier ones.
        filter: which of `FILTERS` counts, if adaptive; None: by the law of the first that is spent.
        order: of the Rényi filter, fixed for good.
    """

    kind = "begin"
    id: str
    epsilon: float
    delta: float
    unit: str | None
    neighbours: str | None
    adaptive: bool
    filter: str | None
    order: int
    time: str


@dataclass(frozen=True, kw_only=True)
class UnitsAt:
    """Where the units' own parts of an entry are, in the secret file, and which file that is.

    Attributes:
        offset, size, digest: of the rows; the digest is under the file's key.
        key: fingerprint of that key. All entries of a budget have the same.
    """

    offset: int
    size: int
    digest: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Spend:
    """A plan, a run, or anything else with a curve, that units may be used for.

    Attributes:
        number: from 1, rising by 1.
        what: "plan", "certificate", "search" or "curve".
        parts: its curve, or that of one run of a search, for the budget's neighbours.
        search: the law of a search, whose runs have that curve; None for what is no search.
        plan: digest of the plan as it may be shown; None for what is none.
        run: a word under which it is charged once, however often it is asked for.
        key: fingerprint of the noise of the run, where it is known.
        about: words and numbers of the plan, for people.
        units: where each unit's own part is; None where everybody has the whole.
    """

    kind = "spend"
    number: int
    name: str
    what: str
    parts: list[dict[str, Any]]
    search: dict[str, Any] | None = None
    plan: str | None = None
    run: str | None = None
    key: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    units: dict[str, Any] | None = None
    time: str


@dataclass(frozen=True, kw_only=True)
class Settle:
    """What the run of an entry turned out to use.

    Attributes:
        number: of the entry.
        key: fingerprint of the noise of its run.
        steps: that it took.
        max_participations, min_separation: of those who took part.
        mu: of that.
    """

    kind = "settle"
    number: int
    key: str
    steps: int
    max_participations: int
    min_separation: int
    mu: float
    time: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit that holds from here on."""

    kind = "limit"
    epsilon: float
    delta: float
    time: str


Line = Begin | Spend | Settle | Limit
Entry = Spend | Settle | Limit


def encode(line: Line, chain: str) -> tuple[bytes, str]:
    """(the line as it is written, its chain) behind a line with the given chain."""
    data = {"kind": line.kind, **{f.name: getattr(line, f.name) for f in fields(line)}}
    if type(line) is Begin:
        data = {"format": FORMAT, **data}  # first, so that the file says what it is
    linked = _link(chain, data)
    return json.dumps({**data, "chain": linked}, allow_nan=False).encode("ascii") + b"\n", linked


def decode(raw: bytes, chain: str) -> tuple[Line, str]:
    """What a line says. Raises: ValueError if it is not whole, altered, or does not follow the line of this chain."""
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    linked = data.pop("chain", None)
    if linked != _link(chain, data):
        raise ValueError("its chain differs")
    if data.get("kind") == Begin.kind and data.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    kinds: dict[str, type[Line]] = {one.kind: one for one in (Begin, Spend, Settle, Limit)}
    made = kinds.get(str(data.pop("kind", None)))
    if made is None:
        raise ValueError("its kind is unknown: a later version wrote it")
    check_names("a line", data, {f.name for f in fields(made)})
    return made(**data), linked


def _link(chain: str, data: dict[str, Any]) -> str:
    return hashlib.sha256((chain + canonical(data)).encode()).hexdigest()


# -- curves ----------------------------------------------------------------------------------------------------------


def write_curve(curve: Curve) -> list[dict[str, Any]]:
    """The parts of a curve, as JSON values; `read_curve` has them back."""
    match curve:
        case Composed():
            return [one for part in curve.parts for one in write_curve(part)]
        case Gaussian():
            own: dict[str, Any] = {"kind": "gaussian", "mu": curve.mu}
        case BoundedRange():
            own = {"kind": "bounded-range", "e0": curve.e0, "draws": curve.draws}
        case Sampled():
            own = {
                "kind": "sampled", "sigma": curve.sigma, "sampling_probability": curve.sampling_probability,
                "n": curve.n, "e0": curve.e0, "draws": curve.draws,
            }  # fmt: skip
        case Amplified():
            _check_countable(curve)
            return [{"kind": "amplified", **curve.to_dict()}]
        case _:
            assert_never(curve)
    return [{**own, "neighbours": curve.neighbours, "unit": curve.unit}]


def _check_countable(curve: Amplified) -> None:
    """Raise BudgetError for what no sum is made of."""
    if type(curve.method) is MonteCarlo:
        raise BudgetError(
            "a claim by samples holds for one delta of one release, and a budget adds up whole curves: plan with "
            "method='bound', which is counted"
        )


def read_curve(parts: list[dict[str, Any]], relation: str | None = None) -> Curve:
    """The curve of these parts.

    Args:
        relation: that all of them are to be for; their own by default.
    Raises: BudgetError for what `write_curve` does not write.
    """
    found: list[Curve] = []
    try:
        for part in parts:
            own = {name: value for name, value in part.items() if name not in ("kind", "neighbours")}
            neighbours = part["neighbours"] if relation is None else relation
            match part["kind"]:
                case "gaussian":
                    found.append(Gaussian(**own, neighbours=neighbours))
                case "bounded-range":
                    found.append(BoundedRange(**own, neighbours=neighbours))
                case "sampled":
                    found.append(Sampled(**own, neighbours=neighbours))
                case "amplified":
                    found.append(Amplified.from_dict({**own, "neighbours": neighbours}))
                case _:
                    raise ValueError("its kind is unknown")
        return compose(*found)
    except Exception as problem:  # of a line that is chained, so that its writer made it so
        raise BudgetError(f"the budget file holds a curve that is none: {brief(problem)}") from problem


def relabelled(curve: Curve, neighbours: str) -> Curve:
    """The same numbers, said to be for another relation; never from or to "replace-one", which has others."""
    if curve.neighbours == neighbours:
        return curve
    return read_curve(write_curve(curve), neighbours)


def label_of(parts: list[dict[str, Any]]) -> str:
    """The one relation that curves of a budget have in sums; that they are for the budget's was checked before.

    "zero-out" for it and for "add-or-remove", which budgets for zero-out take too, with one number. An amplified curve
    of "replace-one" is another curve, so that this is a label of its own, which all entries of such a budget have.
    """
    return "replace-one" if any(part["neighbours"] == "replace-one" for part in parts) else "zero-out"
