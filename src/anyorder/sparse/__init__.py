"""Wide tables: noise only where it is needed, lazily and exactly, or on rows that are chosen privately."""

from anyorder.sparse.select import select_counts, select_top, select_uniform

__all__ = ["select_counts", "select_top", "select_uniform"]
