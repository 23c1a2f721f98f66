"""Makes ``llava_next/``: a tiny LLaVA-NeXT with random parameters, and what transformers computes of sequences.

    python tests/oracles/make_llava_next.py

As ``make_onevision.py`` makes LLaVA-OneVision's. Every image has tiles here, also beside others, and no picture is
resized.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_onevision
import numpy as np
import torch
import transformers
from make_onevision import IMAGE, SIDE
from transformers.models.llava_next import modeling_llava_next as theirs

HERE = Path(__file__).parent / "llava_next"
GRIDS = [[SIDE * rows, SIDE * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
SEQUENCES = (
    ("tiTtt", [(50, 83)]),  # padding above and below
    ("ttt", []),
    ("itit", [(20, 31), (44, 9)]),  # tiles of both
    ("tit", [(39, 12)]),  # padding at the left and at the right
    ("it", [(60, 58)]),
)
"""As in ``make_onevision.py``."""


def model(
    vocabulary: int = 264, image: int = IMAGE, side: int = SIDE, patch: int = 4, grids: Sequence[Sequence[int]] = GRIDS
) -> Any:
    """A model with so many tokens, one of them an image's, for such tiles; no number is 0 or 1."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=side,
        patch_size=patch,
    )  # fmt: skip
    text = transformers.MistralConfig(
        vocab_size=vocabulary, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=512, sliding_window=None, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = transformers.LlavaNextForConditionalGeneration(
        transformers.LlavaNextConfig(
            vision_config=vision, text_config=text, image_token_index=image, image_grid_pinpoints=[*map(list, grids)]
        )
    )
    make_onevision.randomise(made)
    with torch.no_grad():
        made.lm_head.weight[256:] *= 0.05  # so that it says no special tokens
    return made.eval()


def pictures(made: Any, sizes: list[tuple[int, int]], rng: np.random.Generator) -> tuple[Any, list[tuple[int, int]]]:
    """Random pixels ``[1, media, 3, h, w]`` of all images and their tiles, and each image's rows and columns."""
    grids = [theirs.get_anyres_image_grid_shape(size, made.config.image_grid_pinpoints, SIDE) for size in sizes]
    count = sum(1 + rows * columns for rows, columns in grids)
    return rng.normal(size=(1, count, SIDE, SIDE, 3)).astype(np.float16), grids


def given(pixels: Any, sizes: list[tuple[int, int]], grids: list[tuple[int, int]]) -> dict[str, Any]:
    """Arguments of the model for images, which have as many tiles each, as its processor pads them."""
    if not sizes:
        return {}
    counts = [1 + rows * columns for rows, columns in grids]
    each = np.split(pixels[0].astype(np.float32), np.cumsum(counts)[:-1])
    padded = np.stack([np.pad(one, ((0, max(counts) - len(one)), (0, 0), (0, 0), (0, 0))) for one in each])
    return {"pixel_values": torch.tensor(padded).permute(0, 1, 4, 2, 3), "image_sizes": torch.tensor(sizes)}


def features(made: Any, images: dict[str, Any]) -> list[Any]:
    """What stands at the places of each image's tokens."""
    return list(made.get_image_features(**images).pooler_output)


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.set_num_threads(1)
    make_onevision.write(HERE, model(), SEQUENCES, pictures, given, features)
