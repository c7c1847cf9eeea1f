"""Convex learners in one pass, of any order: an adapter of `anyorder.release`."""
