"""Names of torch and transformers that no documentation promises and the guarantee rests on: checked where imported."""

from types import ModuleType

from anyorder.errors import MissingDependencyError

__all__ = ["FUNCTORCH", "TRAINER", "check_names"]

FUNCTORCH = (
    "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched", "get_inplace_requires_grad_allowed", "get_unwrapped",
    "is_batchedtensor", "is_functorch_wrapped_tensor", "maybe_current_level",
)  # fmt: skip
"""Of torch._C._functorch: what is an example's own, and what is kept of a batch."""

TRAINER = (
    "_get_collator_with_removed_columns", "_get_train_sampler", "_init_training_state", "_prepare_inputs",
    "_remove_unused_columns", "_save_checkpoint",
)  # fmt: skip
"""Of transformers.Trainer: what PrivateTrainer calls or replaces; a save that is not called would lose the ledger."""


def check_names(owner: object, names: tuple[str, ...], package: ModuleType) -> None:
    """Raise MissingDependencyError unless the owner has all the names: another release may do the same otherwise."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        label = getattr(owner, "__name__", type(owner).__name__)
        raise MissingDependencyError(
            f"{label} of {package.__name__} {getattr(package, '__version__', '')} has no {', '.join(missing)}, on "
            "which private training rests; install a release that anyorder was tested with"
        )
