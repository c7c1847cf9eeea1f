"""Kairouz et al. 2021, "Practical and private (deep) learning without sampling or shuffling" [K21]."""

from reproductions._claims import Figure
from reproductions.kairouz import tables

TITLE = "Kairouz et al. 2021, Practical and private (deep) learning without sampling or shuffling"

FIGURES = (
    Figure("table4", tables.table4),
    Figure("table5", tables.table5),
)
