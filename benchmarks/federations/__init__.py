"""Parts of `python -m benchmarks.federated`."""
