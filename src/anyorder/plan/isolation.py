"""How a run keeps what one unit brings apart from the vectors of all others, in four words for its certificate."""

from dataclasses import asdict, dataclass
from typing import Any

from anyorder.errors import CertificateError
from anyorder.formats import check_names, quoted
from anyorder.plan.plan import Plan

CONSTRUCTED = "by construction"
PROVED = "proved"
MAPPED = "mapped"
EITHER = "proved or mapped"
PROMISED = "promised"
_WEAKER = (CONSTRUCTED, PROVED, EITHER, MAPPED, PROMISED)  # each says less than those before it

_MEANING = {
    "dataset": {
        CONSTRUCTED: "example i is row i of the data",
        PROMISED: "the code of the data set makes each example of that example's own data, and keeps and draws nothing "
        "that reaches others",
    },
    "collation": {
        CONSTRUCTED: "rows are stacked, or collated one by one",
        PROMISED: "each row of a batch is made of one example alone, and is not padded by the length of others",
    },
    "model": {
        CONSTRUCTED: "it runs on each example alone, and was tried on made-up data for what it keeps between batches",
        PROMISED: "it runs on each example alone, and what it keeps of one batch for the next could not be tried",
    },
    "loss": {
        PROVED: "in every batch each operation maps rows to rows",
        MAPPED: "what has no proof was run again for each row alone",
        EITHER: "each batch was proved row by row or run again for each row alone; which one is not told",
        PROMISED: "each example's loss depends on that example alone",
    },
}
"""Part -> word -> what it says. No other words are read."""


@dataclass(frozen=True)
class Isolation:
    """How each part of a training keeps units apart: "by construction", "proved", "mapped", or "promised" by its owner.

    The words follow from the types of data set, loader and collation, from a trial on made-up data, and from the
    operations of the loss: never from numbers of the data. Where the sizes of batches are secret, or tell the
    neighbours apart, the loss is "proved or mapped", since which one may follow from a size.

    Attributes:
        dataset: how an example is read and drawn.
        collation: how examples become a batch.
        model: how the model runs on a batch.
        loss: how the loss of a batch is that of single rows.
    """

    dataset: str
    collation: str
    model: str
    loss: str

    def to_dict(self) -> dict[str, str]:
        """As a certificate has it."""
        return asdict(self)

    def and_before(self, before: "Isolation") -> "Isolation":
        """What holds of a run whose first steps had `before`, and later ones this: of each part the weaker word."""
        pairs = zip(self.to_dict().items(), before.to_dict().values(), strict=True)
        return Isolation(**{part: max(own, other, key=_WEAKER.index) for (part, own), other in pairs})

    def facts(self) -> list[tuple[str, str]]:
        """(name, sentence) of each part, for the card."""
        return [(_NAMES[part], f"{word}: {_MEANING[part][word]}") for part, word in self.to_dict().items()]

    def promises(self) -> list[str]:
        """What the owner states, and nothing checks."""
        return [
            f"of the {_NAMES[part]}, that {_MEANING[part][PROMISED]}"
            for part, word in self.to_dict().items()
            if word == PROMISED
        ]


_NAMES = {"dataset": "data set", "collation": "collation", "model": "model", "loss": "loss"}
UNKNOWN = Isolation(PROMISED, PROMISED, PROMISED, PROMISED)
"""Of steps that were taken before this was kept."""


def sizes_are_public(plan: Plan) -> bool:
    """Whether the numbers of examples in batches are the same for neighbours, and no secret."""
    return not plan.participation.secret and plan.neighbours in ("zero-out", "replace-one")


def read_isolation(plan: Plan, data: Any) -> Isolation:
    """What a certificate says. Raises: CertificateError for what this package does not write of such a plan."""
    check_names("isolation", data, set(_MEANING))
    for part, words in _MEANING.items():
        known = [word for word in words if part != "loss" or sizes_are_public(plan) or word in (EITHER, PROMISED)]
        if type(data[part]) is not str or data[part] not in known:
            raise CertificateError(
                f"isolation: {part} must be one of {', '.join(map(repr, known))}, got {quoted(data[part])}"
            )
    return Isolation(**data)
