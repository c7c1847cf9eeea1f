"""Who looks on: observers, who see what was released, and a guest, who adds to totals for an audit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anyorder.errors import TrainingError

__all__ = ["Guest", "Observer", "check_guest", "copy_of", "tell_each"]

Observer = Callable[[int, Any], object]

Guest = Callable[[int, list[Tensor], float], list[Tensor]]
"""(step, a total in pieces, what the noised total will be divided by) -> new pieces, with what it adds."""


def tell_each(observers: Sequence[Observer], step: int, released: Any) -> None:
    """Call every observer with a copy; what they raise is raised when all were called."""
    problems = []
    for observer in tuple(observers):
        try:
            observer(step, copy_of(released))
        except Exception as problem:
            problem.add_note(f"(an observer's; step {step} was taken, and `unreturned` has its result)")
            problems.append(problem)
    if len(problems) > 1:
        raise ExceptionGroup(f"{len(problems)} observers of step {step} failed", problems)
    if problems:
        raise problems[0]


def copy_of(released: Any) -> Any:
    """A copy for observers: of an array one that cannot be written."""
    if isinstance(released, tuple | list):
        return type(released)(copy_of(part) for part in released)
    if isinstance(released, Tensor):
        return released.clone()
    copy = released.copy()
    copy.flags.writeable = False
    return copy


def check_guest(step: int, guest: Guest | None, ranks: int, has_files: bool) -> None:
    """Raise TrainingError where a run takes no guest (any more)."""
    problem = None
    if step:
        problem = "after its first step: what was released before knows nothing of them"
    elif guest is not None:
        problem = "a second time"
    elif ranks > 1:
        problem = "among several ranks, each of which has a part of the total: audit in one process"
    elif has_files:
        problem = "with a checkpoint: a resumed run would have to add the same ones; audit without checkpoint="
    if problem is not None:
        raise TrainingError(f"canaries cannot be planted in a run {problem}")


def joined(pieces: Sequence[Any]) -> Tensor:
    """Pieces one behind the other, for who sees all coordinates."""
    return torch.cat([torch.as_tensor(piece).reshape(-1) for piece in pieces])
