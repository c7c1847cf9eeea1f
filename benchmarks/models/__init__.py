"""A table of real models, each against the loop over examples: `python -m benchmarks.models --write`."""
