"""Wide tables: noise only where it is needed, lazily and exactly, or on rows that are chosen privately."""

from anyorder.accounting.selection import Counts, Top, Uniform
from anyorder.sparse.bounded import bounded_parts, bounded_rows
from anyorder.sparse.lazy_table import LazyTable
from anyorder.sparse.select import chances, threshold_for

__all__ = [
    "Counts", "LazyTable", "Top", "Uniform", "bounded_parts", "bounded_rows", "chances",
    "threshold_for",
]  # fmt: skip
