"""A denoising diffusion model of pictures."""

import random
from pathlib import Path

REPOSITORY, COMMIT = "https://github.com/huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951"
SCRIPT = "examples/unconditional_image_generation/train_unconditional.py"
ARGS = [
    "--train_data_dir", "pictures", "--model_config_name_or_path", "config.json", "--resolution", "16",
    "--train_batch_size", "8", "--num_epochs", "2", "--save_images_epochs", "9", "--save_model_epochs", "9",
    "--lr_warmup_steps", "0", "--ddpm_num_steps", "20", "--ddpm_num_inference_steps", "2", "--eval_batch_size", "2",
    "--output_dir", "kept",
]  # fmt: skip
NEEDS = ("torchvision==0.28.0",)
HERE = [
    ('check_min_version("', ""),
]
EDITS = [
    ("import argparse", "...\nimport anyorder as ao"),
    (
        "train_dataloader, lr_scheduler = accelerator.prepare(",
        """
        plan = ao.plan(loader=train_dataloader, epochs=args.num_epochs, epsilon=8, delta=1e-5, optimizer=optimizer)
        model, optimizer, train_dataloader = ao.PrivacyEngine(plan).make_private(model, optimizer, train_dataloader)
        accelerator.unwrap_model = lambda private: private.module
        ...
        """,
    ),
]
OPACUS = [
    ("import argparse", "...\nimport opacus"),
    (
        "train_dataloader, lr_scheduler = accelerator.prepare(",
        """
        model.train()
        model, optimizer, train_dataloader = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=train_dataloader, noise_multiplier=1.0, max_grad_norm=1.0)
        accelerator.unwrap_model = lambda private: private._module
        ...
        """,
    ),
]
MODEL = "untouched"
RESULT, WHY = "runs", ""


def stand_in(folder: Path) -> None:
    import diffusers
    from PIL import Image

    chance = random.Random(0)
    (folder / "pictures").mkdir()
    for i in range(32):
        Image.frombytes("RGB", (20, 20), chance.randbytes(1200)).save(folder / "pictures" / f"{i}.png")
    diffusers.UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).save_config(folder)  # fmt: skip
