"""Across runs: what a search for settings costs, and what a data set has left."""
