"""The parts of `benchmarks.online`, and the peers that they stand beside."""
