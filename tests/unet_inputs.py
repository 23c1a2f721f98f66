"""UNets, parameters and inputs that ``tests/oracles/make_unet.py`` and the tests share; without JAX and torch."""

from __future__ import annotations

import zlib

import numpy as np

CONFIGS = {
    # Shaped like Stable Diffusion 2.1, whose last level has no attention on the way down and up.
    "tiny": {
        "block_out_channels": [8, 16],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "attention_head_dim": [2, 4],
        "cross_attention_dim": 12,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "use_linear_projection": True,
        "upcast_attention": True,
        "in_channels": 1,
        "out_channels": 1,
    },
    # Every other value that is read, an odd number of heads among them.
    "other": {
        "block_out_channels": [8, 24],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [1, 3],
        "cross_attention_dim": 10,
        "layers_per_block": 2,
        "transformer_layers_per_block": 2,
        "norm_num_groups": 2,
        "norm_eps": 1e-4,
        "use_linear_projection": False,
        "flip_sin_to_cos": False,
        "freq_shift": 1,
        "in_channels": 3,
        "out_channels": 3,
    },
}
CASES = {"wide": (3, 4, 12), "odd": (2, 6, 7)}
"""Pictures, rows and columns by case."""
QUERIES, DIRECTIONS = 5, 4


def parameter(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """The parameter of a key."""
    rng = np.random.default_rng(zlib.crc32(key.encode()))
    scale = 0.3 if len(shape) == 1 else 1.2 / np.sqrt(np.prod(shape[1:]))
    is_norm = len(shape) == 1 and "norm" in key and key.endswith("weight")
    return (is_norm + scale * rng.normal(size=shape)).astype(np.float32)


def inputs(case: str, channels: int, width: int) -> dict[str, np.ndarray]:
    """Sample, timesteps, condition, its mask, and the gradient of the output."""
    rng, (batch, rows, columns) = np.random.default_rng(zlib.crc32(case.encode())), CASES[case]
    used = np.arange(QUERIES) < rng.integers(2, QUERIES + 1, size=(batch, 1))
    return {
        "sample": rng.normal(size=(batch, channels, rows, columns)).astype(np.float32),
        "timesteps": rng.uniform(0, 1000, size=batch).astype(np.float32),
        "condition": rng.normal(size=(batch, QUERIES, width)).astype(np.float32),
        "used": used.astype(np.float32),
        "cotangent": rng.normal(size=(batch, channels, rows, columns)).astype(np.float32),
    }


def directions(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random directions of a parameter, a row for each."""
    rng = np.random.default_rng(zlib.crc32(key[::-1].encode()))
    return rng.normal(size=(DIRECTIONS, int(np.prod(shape)))).astype(np.float32)


SD21 = {
    "attention_head_dim": [5, 10, 20, 20],
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
    "upcast_attention": True,
}
"""What Stable Diffusion 2.1 has beside the defaults of diffusers."""
