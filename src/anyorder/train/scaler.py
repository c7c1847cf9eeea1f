"""Gradient scaling for float16: it would cut units at another norm, and finds no gradients to look at."""

from typing import Any

import torch

from anyorder.errors import TrainingError

__all__ = ["ask_for_scale", "refuse_scale"]


def ask_for_scale(optimizer: torch.optim.Optimizer) -> None:
    """Let a GradScaler hand its scale to the optimizer, as to those that unscale by themselves, so that it is seen."""
    vars(optimizer)["_step_supports_amp_scaling"] = True


def refuse_scale(optimizer: Any, kwargs: dict[str, Any]) -> None:
    """Raise TrainingError if a GradScaler takes this step."""
    scaled = "grad_scaler" in kwargs
    for name in ("grad_scale", "found_inf"):
        scaled |= vars(optimizer).pop(name, None) is not None
    if scaled:
        raise TrainingError(
            "a GradScaler takes this step: it scales the loss, and units would be cut at clip_norm over that scale. "
            "Leave it out, or make it with enabled=False: with torch.autocast in bfloat16 no scaling is needed"
        )
