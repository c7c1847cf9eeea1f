"""Clipping: the sum over privacy units of gradients of bounded norm."""

from collections.abc import Mapping

from torch import nn

from anyorder.clipping import native
from anyorder.clipping.clip_rules import Automatic, Flat, PerGroup, Rule
from anyorder.clipping.layer_rules import register_layer_rule
from anyorder.clipping.loss import ExampleLoss
from anyorder.clipping.norms import Table
from anyorder.clipping.per_example import FunctionalClipping, GhostClipping, PerUnitClipping
from anyorder.clipping.validate import convert
from anyorder.errors import ModelError
from anyorder.release.schedules import Adaptive

__all__ = [
    "Adaptive",
    "Automatic",
    "ExampleLoss",
    "Flat",
    "PerGroup",
    "convert",
    "register_layer_rule",
]


def make_clipping(
    module: nn.Module,
    chunk_size: int | None = None,
    grid: float | None = None,
    rule: Rule | None = None,
    non_finite: str = "zero",
    *,
    tables: Mapping[str, Table] | None = None,
    count_norm: float | None = None,
) -> PerUnitClipping:
    """The engine for a model: one pass over the batch; on a grid, whose units are rounded one by one, two.

    Args:
        module, chunk_size, rule: see `GhostClipping`.
        grid: None, or the grid of exact integer sums; see `FunctionalClipping`.
        non_finite: "zero": a unit whose gradient is NaN or infinite adds exactly zero, and nothing tells of it;
            "refuse": an error with the number of such units, which is a release that no noise covers.
        tables: {parameter: how its rows are read}, for parameters of which a model reads rows and nothing else; see
            `Table`. The parameter itself may have no rows. Its sum is a coalesced sparse tensor of the rows that were
            read, (V, D) with one sparse dimension and ids ascending, and nothing of size V is made. Rows of padding
            are not read. Which rows there are is as secret as the data.
        count_norm: makes one sum more for each table, under `count_of(name)`: a coalesced sparse tensor (V,), float64,
            the sum over units of min(1, count_norm / sqrt(m_u)) on the rows that the unit reads, m_u in number over all
            tables. What a unit adds to all of them together has norm at most count_norm.
    Raises: ArgumentError for a rule other than `Flat` on a grid, and for tables that do not fit the module; ModelError
        for tables on a grid. In a forward pass, ModelError for a table that is used otherwise than by lookups
        (`F.embedding`, `F.embedding_bag` of (B, L) ids), and for a model that cannot be run in one pass.
    """
    native.warn_if_missing(sum(p.numel() for p in module.parameters()))
    if grid is None:
        return GhostClipping(module, chunk_size, rule, non_finite, tables=tables, count_norm=count_norm)
    if tables or count_norm is not None:
        raise ModelError(
            "sums on a grid are of whole parameters, and those of sparse tables are of rows: train them with "
            "sparse=False, or without ao.mechanism(secure=True)"
        )
    return FunctionalClipping(module, chunk_size, grid, rule, non_finite)
