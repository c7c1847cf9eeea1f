"""Strategies: the matrix C, in forms that stream."""

from collections.abc import Callable
from typing import Any

from anyorder import _check
from anyorder.strategy.base import Combination, Row, State, Strategy, Terms
from anyorder.strategy.independent import Independent

__all__ = ["Combination", "Independent", "Row", "State", "Strategy", "Terms", "from_dict"]

_KINDS: dict[str, Callable[..., Strategy]] = {"independent": Independent}


def from_dict(data: dict[str, Any]) -> Strategy:
    """The strategy that `Strategy.to_dict` described."""
    kind = _check.choice("strategy kind", data.get("kind", ""), _KINDS)
    return _KINDS[kind](**{key: value for key, value in data.items() if key != "kind"})
