"""Makes a small Qwen-Image transformer of random weights with ``diffusers``, and what it predicts, for tests of ours.

``python tests/oracles/make_mmdit.py`` writes a folder as ``save_pretrained`` does, in several shards, and
``oracles.npz`` in it: latents, which it packs as pipelines do, hidden states of texts, times, predictions, and the
gradients of the sum of predictions times a direction: by latents and hidden states, and for one case by parameters. It
needs torch and diffusers, which mmjax does not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel

HERE = Path(__file__).parent / "mmdit"
CHANNELS, CONDITION = 4, 12
SIZES = dict(num_layers=2, num_attention_heads=2, attention_head_dim=8, joint_attention_dim=CONDITION)
CASES: dict[str, dict[str, Any]] = {
    "wide": {"pictures": [(6, 10)], "texts": (5, 3, 1), "seed": 1},
    "tall": {"pictures": [(10, 4)], "texts": (7,), "seed": 2},
    "edit": {"pictures": [(4, 6), (8, 2)], "texts": (4, 6, 6), "seed": 3},
}
"""Height and width in latents of each picture of a row, the first of which is made; and tokens of each row's text."""


def randomise(model: torch.nn.Module) -> None:
    """Gives every parameter random values, so that none is 0 or 1 and each one shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            width = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
            parameter.copy_(noise * width + float("norm" in name and parameter.dim() == 1 and "linear" not in name))


def case(model: QwenImageTransformer2DModel, pictures: list[Any], texts: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Random inputs of a case, and what the model makes of them."""
    rows, longest, rng = len(texts), max(texts), torch.Generator().manual_seed(seed)
    latents = [torch.randn((rows, CHANNELS, *size), generator=rng) for size in pictures]
    packed = [QwenImagePipeline._pack_latents(x, rows, CHANNELS, *x.shape[2:]) for x in latents]
    sample = torch.cat(packed, dim=1).requires_grad_()
    hidden = torch.randn((rows, longest, CONDITION), generator=rng).requires_grad_()
    mask = torch.arange(longest)[None] < torch.tensor(texts)[:, None]
    times = torch.rand(rows, generator=rng)
    shapes = [[(1, height // 2, width // 2) for height, width in pictures]] * rows
    inputs = dict(encoder_hidden_states=hidden, encoder_hidden_states_mask=mask, timestep=times, img_shapes=shapes)
    predicted = model(hidden_states=sample, **inputs).sample[:, : packed[0].shape[1]]
    direction = torch.randn(predicted.shape, generator=rng)
    model.zero_grad()
    (predicted * direction).sum().backward()
    height, width = pictures[0]
    unpacked = QwenImagePipeline._unpack_latents(predicted, 8 * height, 8 * width, 8)[:, :, 0]
    values = {f"latents{number}": x for number, x in enumerate(latents)}
    values |= {"hidden": hidden, "mask": mask, "times": times, "predicted": predicted, "direction": direction}
    values |= {"unpacked": unpacked, "d_hidden": hidden.grad, "d_sample": sample.grad}
    if len(texts) > 1 and len(pictures) == 1:  # of one case alone, since they take as much room as the model
        values |= {
            f"d/{name}": parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        }
    return {name: value.detach().numpy() for name, value in values.items()}


def main() -> None:
    """Writes the folder."""
    rope, sizes = (4, 2, 2), {"in_channels": 4 * CHANNELS, "out_channels": CHANNELS}
    model = QwenImageTransformer2DModel(**SIZES, **sizes, axes_dims_rope=rope).float()
    randomise(model)
    model.save_pretrained(HERE, max_shard_size="40KB")
    for file in HERE.iterdir():
        file.chmod(0o644)
    values = {"versions": np.array(json.dumps({"diffusers": diffusers.__version__, "torch": torch.__version__}))}
    for name, settings in CASES.items():
        values |= {f"{name}/{key}": value for key, value in case(model, **settings).items()}
    np.savez_compressed(HERE / "oracles.npz", allow_pickle=False, **values)
    print(sum(parameter.numel() for parameter in model.parameters()), list(values)[:12])


if __name__ == "__main__":
    main()
