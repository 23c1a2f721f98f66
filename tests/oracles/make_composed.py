"""Makes ``composed/``: losses of models glued together of towers, projectors and language models, as torch has them.

    python tests/oracles/make_composed.py

It needs torch and transformers, which mmjax does not, and the folders that the other scripts here make. Each sequence
is computed alone; a loss is the mean over all text tokens behind the first.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.idefics3.configuration_idefics3 import Idefics3Config
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

HERE = Path(__file__).parent
IMAGE = 263
SEQUENCES = ("tit", "tt", "iti")
"""``t`` is a run of text, ``i`` an image."""


def mlp(width: int, llm: int) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """Two layers with an exact GELU, and their parameters by our names."""
    made = torch.nn.Sequential(torch.nn.Linear(width, llm), torch.nn.GELU(), torch.nn.Linear(llm, llm))
    named = {"up": made[0].weight, "up_bias": made[0].bias, "down": made[2].weight, "down_bias": made[2].bias}
    return made, named


def pixel_shuffle(width: int, llm: int) -> tuple[Callable[[Any], Any], dict[str, Any]]:
    """The connector of Idefics3 and SmolVLM: squares of 2x2 patches side by side, and one layer without a bias."""
    text = {"model_type": "llama", "hidden_size": llm, "num_attention_heads": 1, "num_key_value_heads": 1}
    vision = {"hidden_size": width, "num_attention_heads": 1}
    config = Idefics3Config(scale_factor=2, vision_config=vision, text_config=text)
    made = Idefics3Connector(config)
    (weight,) = made.parameters()
    return made, {"kernel": weight}


MODELS: dict[str, tuple[Any, str, Any, Any, str]] = {
    "clip_mlp_llama": (
        *(transformers.CLIPVisionModel, "vision/clip", mlp),
        *(transformers.LlavaForConditionalGeneration, "llava"),
    ),
    "siglip_shuffle_qwen2": (
        *(transformers.SiglipVisionModel, "vision/siglip", pixel_shuffle),
        *(transformers.LlavaOnevisionForConditionalGeneration, "onevision"),
    ),
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {"images": rng.normal(size=(3, 28, 28, 3)).astype(np.float16)}
    pixels = torch.tensor(values["images"].astype(np.float32)).permute(0, 3, 1, 2)
    for name, (vision, tower_folder, projector, whole, folder) in MODELS.items():
        tower = vision.from_pretrained(HERE / tower_folder).eval()
        llm = whole.from_pretrained(HERE / folder).eval()
        width = llm.config.text_config.hidden_size
        project, parameters = projector(tower.config.hidden_size, width)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
            seen = tower(pixels, interpolate_pos_encoding=True).last_hidden_state
        tokens_ND = project(seen[:, 1:] if "clip" in tower_folder else seen)
        used, losses, counts = 0, [], []
        for number, kinds in enumerate(SEQUENCES):
            tokens, embedded = [], []
            for kind in kinds:
                if kind == "i":
                    embedded.append(tokens_ND[used])
                    tokens += [IMAGE] * len(tokens_ND[used])
                    used += 1
                else:
                    text = rng.integers(0, 256, 5)
                    embedded.append(llm.get_input_embeddings()(torch.tensor(text)))
                    tokens += text.tolist()
            hidden = llm.model.language_model(inputs_embeds=torch.cat(embedded)[None]).last_hidden_state
            targets = torch.tensor(tokens)[1:]
            each = torch.nn.functional.cross_entropy(llm.lm_head(hidden)[0, :-1], targets, reduction="none")
            losses.append((each * (targets != IMAGE)).sum())
            counts.append(int((targets != IMAGE).sum()))
            values[f"{name}/tokens_{number}"] = np.asarray(tokens, np.int16)
        mean = torch.stack(losses).sum() / sum(counts)
        mean.backward()
        values[f"{name}/loss"] = mean.detach().numpy()
        for leaf, parameter in parameters.items():
            values[f"{name}/{leaf}"] = parameter.detach().numpy()
            values[f"{name}/gradient/{leaf}"] = parameter.grad.numpy()
    (HERE / "composed").mkdir(exist_ok=True)
    versions = json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
    np.savez_compressed(HERE / "composed" / "values.npz", versions=versions, **values)


if __name__ == "__main__":
    main()
