"""Makes small autoencoders of diffusers, their latents, pictures and gradients: ``autoencoder/``.

    python tests/oracles/make_autoencoders.py        # needs torch and diffusers

Pictures, noise and cotangents are drawn by ``drawn``, which tests call too.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "autoencoder"
SIZES: Mapping[str, tuple[int, int, int]] = {"wide": (3, 8, 12), "tall": (1, 20, 4)}
"""Numbers, heights and widths of pictures."""
GRADIENTS = "wide"
"""The size for which gradients are kept."""
FACTOR, CHANNELS = 4, 3
_KL: Mapping[str, Any] = dict(block_out_channels=(2, 4, 6), layers_per_block=1, norm_num_groups=2)
_BLOCKS: Mapping[str, Any] = dict(
    down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3
)
KINDS = ("kl", "kl_shifted", "qwen_image")
WITH_GRADIENTS = ("kl", "qwen_image")


def drawn(size: tuple[int, int, int], latent_channels: int) -> dict[str, np.ndarray]:
    """Pictures "picture" ``[B, H, W, C]``, "noise" ``[B, h, w, Z]`` and the pictures' cotangents "cotangent"."""
    number, height, width = size
    rng = np.random.default_rng(height)
    latent = (number, height // FACTOR, width // FACTOR, latent_channels)
    shapes = {"picture": (*size, CHANNELS), "noise": latent, "cotangent": (*size, CHANNELS)}
    return {name: rng.standard_normal(shape).astype(np.float32) * 0.5 for name, shape in shapes.items()}


def models() -> Mapping[str, Callable[[], Any]]:
    """Makes each autoencoder."""
    from diffusers import AutoencoderKL, AutoencoderKLQwenImage

    qwen: Mapping[str, Any] = dict(base_dim=2, z_dim=3, dim_mult=[1, 1, 2], num_res_blocks=1)
    statistics = dict(latents_mean=[0.1, -0.2, 0.3], latents_std=[1.5, 0.7, 2.0])
    return {
        "kl": lambda: AutoencoderKL(**_KL, **_BLOCKS),
        "kl_shifted": lambda: AutoencoderKL(
            **{**_KL, "block_out_channels": (2, 2, 4)},
            **_BLOCKS,
            **dict(latent_channels=3, scaling_factor=1.5305, shift_factor=0.0609, mid_block_add_attention=False),
            **dict(use_quant_conv=False, use_post_quant_conv=False),
        ),
        "qwen_image": lambda: AutoencoderKLQwenImage(**qwen, **statistics, temperal_downsample=[False, True]),
    }


def main() -> None:
    """Writes all folders."""
    import torch

    for kind, make in models().items():
        torch.manual_seed(sum(map(ord, kind)))
        model = make()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # 1 and 0 in a new model
                    parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(HERE / kind)
        model.double()  # so that an oracle's rounding is none of its differences from others
        oracles: dict[str, Any] = {}
        for size_name, size in SIZES.items():
            oracles |= {f"{size_name}/{name}": array for name, array in _computed(model, kind, size).items()}
            if size_name == GRADIENTS and kind in WITH_GRADIENTS:
                with_gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                oracles |= {f"gradient/{name}": gradient.float().numpy() for name, gradient in with_gradient.items()}
        np.savez_compressed(HERE / kind / "oracles.npz", **oracles)


def _computed(model: Any, kind: str, size: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Latents and pictures of a size; leaves parameters with their gradients."""
    import torch

    is_video = kind == "qwen_image"

    def theirs(x: np.ndarray) -> Any:
        tensor = torch.from_numpy(x).double().permute(0, 3, 1, 2)
        return tensor[:, :, None] if is_video else tensor

    def ours(x: Any) -> np.ndarray:
        x = x[:, :, 0] if is_video else x
        return x.permute(0, 2, 3, 1).detach().float().numpy()

    channels = model.config.z_dim if is_video else model.config.latent_channels
    inputs = {name: theirs(array) for name, array in drawn(size, channels).items()}
    picture = inputs["picture"].requires_grad_()
    posterior = model.encode(picture).latent_dist
    latent = posterior.mean + posterior.std * inputs["noise"]
    decoded = model.decode(latent).sample
    # The divergence of a posterior is a sum, for videos too.
    divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).sum()
    model.zero_grad()
    ((decoded * inputs["cotangent"]).sum() + 0.1 * divergence).backward()
    results = {"mean": posterior.mean, "log_variance": posterior.logvar, "decoded": decoded, "d_picture": picture.grad}
    return {name: ours(array) for name, array in results.items()}


if __name__ == "__main__":
    main()
