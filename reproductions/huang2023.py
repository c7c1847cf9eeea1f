"""Huang et al. 2023, "Learning across data owners with joint differential privacy"."""

from reproductions._claims import Figure
from reproductions.huang import tables, theory

TITLE = "Huang et al. 2023, Learning across data owners with joint differential privacy"

FIGURES = (
    Figure("theorem31", theory.theorem31),
    Figure("users", theory.users),
    Figure("bounds", theory.bounds),
    Figure("table1", tables.table1),
    Figure("table2", tables.table2),
    Figure("table4", tables.table4),
    Figure("figure1", tables.figure1, trains=True),
)
