"""The parts of `python -m benchmarks.audit`: each module has `rows(quick) -> Iterator[Row]`."""
