"""Parts of `python -m benchmarks.wide`."""
