"""The questions of a page by name, with their refusals: what the process behind it answers."""

from collections.abc import Iterator
from typing import Any

from anyorder.errors import AnyorderError, ArgumentError
from anyorder.planner_page.answers import Piece, answer, sampled
from anyorder.planner_page.settings import field_of, settings_of, sweep_of
from anyorder.planner_page.sweep import cells

__all__ = ["KINDS", "pieces"]

KINDS = ("plan", "sampled", "sweep")


def pieces(kind: str, asked: Any) -> Iterator[Piece]:
    """The answer to a question that came from outside, and at its end "end", or "error" where it is refused.

    An "error" has the "message" of `ao.plan` as it is, and the "field" that it is about, if it names one.

    Args:
        kind: of `KINDS`: `answer`, `sampled` (of "settings" and "noises"), `cells`.
        asked: what JSON made of the question.
    """
    try:
        yield from _answered(kind, asked)
    except AnyorderError as problem:
        yield {"kind": "error", "message": str(problem), "field": field_of(str(problem))}
        return
    yield {"kind": "end"}


def _answered(kind: str, asked: Any) -> Iterator[Piece]:
    match kind:
        case "plan":
            yield from answer(settings_of(asked))
        case "sampled":
            if not isinstance(asked, dict) or asked.keys() != {"settings", "noises"}:
                raise ArgumentError(f"a question must be an object with settings and noises, got {asked!r:.80}")
            yield from sampled(settings_of(asked["settings"]), asked["noises"])
        case "sweep":
            yield from cells(sweep_of(asked))
        case _:
            raise ArgumentError(f"a question must be one of {', '.join(KINDS)}, got {kind!r:.80}")
