"""Makes small vision towers of random weights with ``transformers``, and what they compute, for the tests of ours.

``python tests/oracles/make_vision.py [FAMILY ...]`` writes for each family a folder as ``save_pretrained`` does, with
``oracles.npz`` in it: images, features of the last layer and of the one before, of later towers also gradients, and the
versions that made them.
It needs torch and transformers, which mmjax does not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTModel,
)

HERE = Path(__file__).parent / "vision"
PATCH = 7
SIZES = {"native": (28, 28), "wide": (21, 49), "tall": (42, 14), "cut": (33, 24)}
"""Heights and widths of images in pixels; the patch does not divide those of the last."""
_SHAPE: Mapping[str, Any] = dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, patch_size=PATCH)
_WIDE: Mapping[str, Any] = dict(_SHAPE, intermediate_size=24)

FAMILIES: Mapping[str, Callable[[], Any]] = {
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**_WIDE, image_size=28)),
    "siglip": lambda: SiglipVisionModel(SiglipVisionConfig(**_WIDE, image_size=30)),
    "siglip2": lambda: Siglip2VisionModel(Siglip2VisionConfig(**_WIDE, num_patches=16, vision_use_head=False)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**_SHAPE, image_size=28, mlp_ratio=2)),
    "dinov2_giant": lambda: Dinov2Model(Dinov2Config(**_SHAPE, image_size=28, mlp_ratio=2, use_swiglu_ffn=True)),
    "dinov2_with_registers": lambda: Dinov2WithRegistersModel(
        Dinov2WithRegistersConfig(**_SHAPE, image_size=28, mlp_ratio=2, num_register_tokens=3, use_swiglu_ffn=True)
    ),
    "dinov3_vit": lambda: DINOv3ViTModel(DINOv3ViTConfig(**_WIDE, image_size=28, num_register_tokens=4)),
    "dinov3_vit_gated": lambda: DINOv3ViTModel(
        DINOv3ViTConfig(
            **{**_WIDE, "image_size": 28, "num_register_tokens": 2, "use_gated_mlp": True, "hidden_act": "silu"},
            **{"query_bias": False, "value_bias": False},
        )
    ),
    "vit": lambda: ViTModel(ViTConfig(**_WIDE, image_size=28)),
}


def randomise(model: torch.nn.Module) -> None:
    """Gives every parameter random values, so that none is 0 or 1 and each one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = "norm" in name and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            width = parameter[0].numel() ** -0.5 if parameter.dim() > 1 and "embed" not in name else 0.3
            parameter.copy_(noise * width + float(scale or "lambda" in name))


def images() -> dict[str, np.ndarray]:
    """Random images ``[h, w, 3]`` by name, float16 so that files stay small."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(*size, 3)).astype(np.float16) for name, size in SIZES.items()}


def features(family: str, model: Any, image_HWC: np.ndarray) -> Any:
    """What the model gives for one image, resizing its position table where the image's size asks for it."""
    pixels = torch.from_numpy(image_HWC.astype(np.float32)).permute(2, 0, 1)[None]
    if family == "siglip2":
        rows, columns = (side // PATCH for side in image_HWC.shape[:2])
        cut = pixels[0, :, : rows * PATCH, : columns * PATCH].reshape(3, rows, PATCH, columns, PATCH)
        patches = cut.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        mask, shape = torch.ones(1, rows * columns, dtype=torch.int32), torch.tensor([[rows, columns]])
        return model(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shape, output_hidden_states=True)
    if family.startswith("dino"):
        return model(pixels, output_hidden_states=True)
    return model(pixels, interpolate_pos_encoding=True, output_hidden_states=True)


def gradients(model: Any, image_HWC: np.ndarray) -> dict[str, np.ndarray]:
    """Of the weights outside of layers and of one layer, by keys of folders, for a cotangent of the last features."""
    pixels = torch.from_numpy(image_HWC.astype(np.float32)).permute(2, 0, 1)[None]
    last_TD = model(pixels).last_hidden_state[0]
    cotangent_TD = torch.randn(last_TD.shape, generator=torch.Generator().manual_seed(1))
    (last_TD * cotangent_TD).sum().backward()
    for weight in model.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        by_key = load_file(Path(folder) / "model.safetensors")
    kept = {key: grad for key, grad in by_key.items() if "layer." not in key or "layer.1." in key}
    return {"cotangent": cotangent_TD.numpy(), **{f"gradients/{key}": grad for key, grad in kept.items()}}


def main() -> None:
    """Writes all folders, or those that are named."""
    for family in sys.argv[1:] or FAMILIES:
        model = FAMILIES[family]().eval().float()
        randomise(model)
        model.save_pretrained(HERE / family)
        found: dict[str, np.ndarray] = {
            "versions": np.array(f"transformers {transformers.__version__}, torch {torch.__version__}")
        }
        for name, image_HWC in images().items():
            with torch.no_grad():
                output = features(family, model, image_HWC)
            found |= {
                f"{name}/image": image_HWC,
                f"{name}/last": output.last_hidden_state[0].numpy(),
                f"{name}/before": output.hidden_states[-2][0].numpy(),
            }
        if family.startswith("dinov") and family != "dinov2":
            found |= gradients(model, images()["wide"])
        np.savez_compressed(HERE / family / "oracles.npz", allow_pickle=False, **found)


if __name__ == "__main__":
    main()
