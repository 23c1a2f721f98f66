"""Makes ``gemma4_tower/``: tiny Gemma 4 with random parameters, and what transformers computes of its tower.

    python tests/oracles/make_gemma4_tower.py

It needs torch and transformers, which mmjax does not. ``bounded`` has products with bounds that many numbers reach,
``standard`` standardised features. All images go through the tower in one batch, padded as its processor pads them;
``seen`` are the tower's soft tokens and ``tokens`` those of the embedder. The loss is a sum of the tokens with random
weights, and gradients are torch's; buffers have none.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "gemma4_tower"
PATCH, POOL = 4, 3
SIZES = ((24, 36), (12, 48), (36, 24), (12, 12), (48, 12))
"""Heights and widths of images in pixels."""
KINDS: dict[str, dict[str, Any]] = {
    "bounded": {"use_clipped_linears": True, "standardize": False},
    "standard": {"use_clipped_linears": False, "standardize": True},
}
_TOWER: dict[str, Any] = dict(
    **dict(hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2),
    **dict(head_dim=12, patch_size=PATCH, pooling_kernel_size=POOL, position_embedding_size=14),
)
_TEXT: dict[str, Any] = dict(
    **dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1),
    **dict(head_dim=8, global_head_dim=8, vocab_size=8, vocab_size_per_layer_input=8, hidden_size_per_layer_input=0),
    **dict(layer_types=["full_attention"], bos_token_id=2, eos_token_id=1, pad_token_id=0),
)


def made(kind: str) -> Any:
    """A tiny model whose language model is hardly one."""
    config = transformers.Gemma4Config(
        text_config={**_TEXT, "model_type": "gemma4_text"},
        vision_config={**_TOWER, **KINDS[kind], "model_type": "gemma4_vision"},
        **dict(image_token_id=7, boi_token_id=6, eoi_token_id=5, video_token_id=4),
    )
    config.audio_config = None
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    return model


def randomise(model: Any, seed: int) -> None:
    """Gives parameters and buffers random values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            end = name.rpartition(".")[2]
            if end in ("input_min", "output_min"):
                tensor.copy_(-0.7 - 0.5 * noise.abs())
            elif end in ("input_max", "output_max"):
                tensor.copy_(0.7 + 0.5 * noise.abs())
            elif end in ("std_bias", "std_scale") or "norm" in name:
                tensor.copy_(0.3 * noise + float(end != "std_bias"))
            elif "position_embedding_table" in name:
                tensor.copy_(0.5 * noise)
            elif tensor.ndim == 2:
                tensor.copy_(noise * tensor[0].numel() ** -0.5)


def batch(images: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches of pixels in 0 to 1, and their columns and rows, padded as the processor pads them."""
    patches, places = [], []
    for image in images:
        rows, columns = (side // PATCH for side in image.shape[:2])
        cut = ((image + 1) / 2).reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 1, 3, 4)
        x, y = np.meshgrid(np.arange(columns), np.arange(rows), indexing="xy")
        patches.append(cut.reshape(rows * columns, -1))
        places.append(np.stack([x, y], axis=-1).reshape(-1, 2))
    most = max(map(len, patches))
    padded = [np.pad(own, ((0, most - len(own)), (0, 0))) for own in patches]
    padded_places = [np.pad(own, ((0, most - len(own)), (0, 0)), constant_values=-1) for own in places]
    return torch.tensor(np.stack(padded)), torch.tensor(np.stack(padded_places))


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    # In steps of 1/64 so that pixels in 0 to 1 have no rounding.
    images = [np.round(rng.uniform(-1, 1, (*size, 3)) * 64).astype(np.float32) / 64 for size in SIZES]
    for seed, kind in enumerate(KINDS):
        model = made(kind)
        randomise(model, seed)
        values: dict[str, Any] = {f"image_{number}": image for number, image in enumerate(images)}
        pixels, places = batch(images)
        out = model.model.get_image_features(pixels, places)
        loss = torch.zeros(())
        for number, tokens in enumerate(out.pooler_output):
            weights = rng.normal(size=tokens.shape).astype(np.float32)
            loss = loss + (tokens * torch.tensor(weights)).sum()
            values |= {f"tokens_{number}": tokens.detach().numpy(), f"weights_{number}": weights}
        values["seen"] = out.last_hidden_state.detach().numpy()
        loss.backward()
        values["loss"] = loss.detach().numpy()
        model.save_pretrained(HERE / kind)
        (HERE / kind / "model.safetensors").chmod(0o644)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        np.savez_compressed(
            HERE / kind / "values.npz", allow_pickle=False, versions=np.array(json.dumps(versions)), **values
        )
        gradients = {key: own.grad.numpy() for key, own in model.named_parameters() if own.grad is not None}
        np.savez_compressed(HERE / kind / "gradients.npz", allow_pickle=False, **gradients)
        print(kind, float(loss), len(gradients), values["seen"].shape)


if __name__ == "__main__":
    main()
