"""Models of diffusers, with random weights and small configurations."""

from collections.abc import Iterator

import diffusers
import torch
from torch import nn

from benchmarks.models.case import EXAMPLES, Batch, Case

__all__ = ["cases"]

_BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
_UNET = {**_BLOCKS, "sample_size": 8, "in_channels": 3, "out_channels": 3}
_CONDITIONED = {
    **_BLOCKS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 8, "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip


def _noisy(channels: int, size: int = 8) -> Batch:
    steps = torch.randint(0, 100, (EXAMPLES,))
    return {"sample": torch.randn(EXAMPLES, channels, size, size), "timestep": steps}


def _latents(channels: int) -> Batch:
    steps = torch.randint(0, 100, (EXAMPLES,))
    return {"hidden_states": torch.randn(EXAMPLES, channels, 8, 8), "timestep": steps}


def cases() -> Iterator[Case]:
    """What is trained to take noise away, and what makes latent images."""
    yield Case("diffusers", "UNet2DModel", lambda: (
        diffusers.UNet2DModel(
            **_UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
        ), _noisy(3),
    ))  # fmt: skip
    yield Case("diffusers", "UNet2DConditionModel", lambda: (
        diffusers.UNet2DConditionModel(**_CONDITIONED),
        {**_noisy(4), "encoder_hidden_states": torch.randn(EXAMPLES, 5, 8)},
    ))  # fmt: skip
    yield Case("diffusers", "AutoencoderKL", lambda: (
        diffusers.AutoencoderKL(**_BLOCKS, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4),
        {"sample": torch.randn(EXAMPLES, 3, 16, 16)},
    ))  # fmt: skip
    yield Case("diffusers", "DiTTransformer2DModel", lambda: (
        _dit(), {**_latents(4), "class_labels": torch.randint(0, 100, (EXAMPLES,))},
    ))  # fmt: skip
    yield Case("diffusers", "SD3Transformer2DModel", lambda: (
        diffusers.SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=4, num_layers=1, attention_head_dim=4,
            num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8,
            out_channels=4),
        {**_latents(4), "encoder_hidden_states": torch.randn(EXAMPLES, 5, 8),
         "pooled_projections": torch.randn(EXAMPLES, 8)},
    ))  # fmt: skip


def _dit() -> nn.Module:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, num_layers=1, sample_size=8, patch_size=2,
        norm_num_groups=4, num_embeds_ada_norm=100, dropout=0.0,
    )  # fmt: skip
    for part in model.modules():
        if hasattr(part, "dropout_prob"):
            part.dropout_prob = 0.0  # labels are left out at random
    return model
