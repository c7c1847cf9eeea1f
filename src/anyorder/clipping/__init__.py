"""Clipping: the sum over privacy units of gradients of bounded norm."""

import torch
from torch import nn

from anyorder._undocumented import FUNCTORCH, check_names
from anyorder.clipping import native
from anyorder.clipping.base import PerUnitClipping
from anyorder.clipping.bounded import bounded_sum
from anyorder.clipping.clip_rules import Automatic, ClipRule, Flat, PerGroup, Rule
from anyorder.clipping.convert import convert
from anyorder.clipping.functional import FunctionalClipping
from anyorder.clipping.ghost import GhostClipping
from anyorder.clipping.layer_rules import register_layer_rule
from anyorder.clipping.loss import ExampleLoss
from anyorder.clipping.validate import Finding, check_model
from anyorder.release.schedules import Adaptive

check_names(torch._C._functorch, FUNCTORCH, torch)

__all__ = [
    "Adaptive",
    "Automatic",
    "ClipRule",
    "ExampleLoss",
    "Finding",
    "Flat",
    "FunctionalClipping",
    "GhostClipping",
    "PerGroup",
    "PerUnitClipping",
    "bounded_sum",
    "check_model",
    "convert",
    "register_layer_rule",
]


def make_clipping(
    module: nn.Module,
    chunk_size: int | None = None,
    grid: float | None = None,
    rule: Rule | None = None,
    non_finite: str = "zero",
) -> PerUnitClipping:
    """The engine for a model: one pass over the batch; on a grid, whose units are rounded one by one, two.

    Args:
        module, chunk_size, rule: see `GhostClipping`.
        grid: None, or the grid of exact integer sums; see `FunctionalClipping`.
        non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it;
            "refuse": an error with the number of such units, which is a release that no noise covers.
    Raises: ArgumentError for a rule other than `Flat` on a grid.
    """
    native.warn_if_missing(sum(p.numel() for p in module.parameters()))
    if grid is None:
        return GhostClipping(module, chunk_size, rule, non_finite)
    return FunctionalClipping(module, chunk_size, grid, rule, non_finite)
