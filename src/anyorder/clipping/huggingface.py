"""What models of transformers do that an example alone cannot; nothing here imports the library."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["is_cache", "no_branches_on_masks"]


@contextmanager
def no_branches_on_masks() -> Iterator[None]:
    """Let transformers build its masks without a look at their values, as it does when a model is exported.

    It leaves a mask out where no token is padded: the same result, but a branch that cannot be mapped over examples.
    """
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None:
        yield
        return
    before = utils.is_jit_tracing  # which `is_tracing` asks, wherever it was imported to
    utils.is_jit_tracing = _yes
    try:
        yield
    finally:
        utils.is_jit_tracing = before


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values, for generation: models return one that training does not need."""
    caches: Any = sys.modules.get("transformers.cache_utils")
    return caches is not None and isinstance(value, caches.Cache)


def _yes() -> bool:
    return True
