"""Makes the UNets of `tests/oracles/unet`: a folder of `diffusers`, and outputs and gradients of two UNets.

Needs torch and diffusers 0.42: `python tests/oracles/make_unet.py`. Parameters are a function of their keys, so the
second UNet has a `config.json` alone. Of a parameter's gradient there are its products with some random directions.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from unet_inputs import CASES, CONFIGS, SD21, directions, inputs, parameter

FOLDER = Path(__file__).parent / "unet"


def main() -> None:
    import torch
    from diffusers import UNet2DConditionModel

    oracles: dict[str, Any] = {}
    for name, config in CONFIGS.items():
        model = UNet2DConditionModel(**config).train()
        with torch.no_grad():
            for key, tensor in model.named_parameters():
                tensor.copy_(torch.from_numpy(parameter(key, tuple(tensor.shape))))
        if name == "tiny":
            model.save_pretrained(FOLDER / name)
            (FOLDER / name / "diffusion_pytorch_model.safetensors").chmod(0o644)
        else:
            model.save_config(FOLDER / name)
        model = model.double()  # a GroupNorm of torch subtracts squares
        for case in CASES:
            arrays = inputs(case, model.config.in_channels, model.config.cross_attention_dim)
            given = {key: torch.from_numpy(value).double() for key, value in arrays.items()}
            sample, condition = given["sample"].requires_grad_(), given["condition"].requires_grad_()
            model.zero_grad()
            y = model(sample, given["timesteps"], condition, encoder_attention_mask=given["used"]).sample
            (y * given["cotangent"]).sum().backward()
            place = f"{name}/{case}"
            oracles[f"{place}/output"] = y.detach().numpy()
            oracles[f"{place}/sample"] = sample.grad.numpy()
            oracles[f"{place}/condition"] = condition.grad.numpy()
            gradients = {key: tensor.grad.numpy().ravel() for key, tensor in model.named_parameters()}
            shapes = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
            along = [directions(key, shapes[key]) @ gradients[key] for key in sorted(gradients)]
            oracles[f"{place}/parameters"] = np.array(along)
        print(name, sum(p.numel() for p in model.parameters()))
    kept: dict[str, Any] = {key: x.astype(np.float32) for key, x in oracles.items()}
    np.savez_compressed(FOLDER / "oracles.npz", **kept)
    count = UNet2DConditionModel(**SD21, sample_size=96) if "--count" in sys.argv else None
    print(count and sum(p.numel() for p in count.parameters()))


if __name__ == "__main__":
    main()
