"""Makes ``llava/``: a tiny LLaVA with random parameters, sequences with images, and what transformers computes of them.

    python tests/oracles/make_llava.py

It needs torch and transformers, which mmjax does not. Each sequence is computed alone; the loss is the mean over all of
their text tokens behind the first, and gradients are torch's.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "llava"
IMAGE, TOKENS = 263, 16
"""The id that stands for an image's tokens, and how many an image has."""
SEQUENCES = ("tiTtt", "ttt", "itit")
"""``t`` is a run of text, ``T`` a longer one, ``i`` an image."""


def model(vocabulary: int = 264, image: int = IMAGE) -> Any:
    """A model with so many tokens, one of them an image's, and numbers that are neither 0 nor 1 anywhere."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=7
    )
    text = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    made = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return made.eval()


def sequence(kinds: str, rng: np.random.Generator) -> list[int]:
    """Its tokens."""
    found: list[int] = []
    for kind in kinds:
        count = {"i": TOKENS, "t": 4, "T": 11}[kind]
        found += [IMAGE] * TOKENS if kind == "i" else rng.integers(0, 256, count).tolist()
    return found


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng, made = np.random.default_rng(0), model()
    values: dict[str, Any] = {"images": rng.normal(size=(3, 28, 28, 3)).astype(np.float32)}
    pixels, used, losses, counts = torch.tensor(values["images"]).permute(0, 3, 1, 2), 0, [], []
    for number, kinds in enumerate(SEQUENCES):
        tokens = sequence(kinds, rng)
        own = pixels[used : used + kinds.count("i")]
        used += len(own)
        given = {"pixel_values": own} if len(own) else {}
        logits = made(input_ids=torch.tensor([tokens]), **given).logits[0]
        targets = torch.tensor(tokens)[1:]
        counted = targets != IMAGE
        loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        losses.append((loss * counted).sum())
        counts.append(int(counted.sum()))
        values[f"tokens_{number}"], values[f"logits_{number}"] = np.asarray(tokens), logits.detach().numpy()
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    HERE.mkdir(exist_ok=True)
    made.save_pretrained(HERE)
    stored = dict(made.state_dict())
    gradients = {}
    for name, parameter in made.named_parameters():
        assert stored[name].shape == parameter.shape
        gradients[name] = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(HERE / "values.npz", versions=json.dumps(versions), **values)
    np.savez_compressed(HERE / "gradients.npz", **{k: v.astype(np.float32) for k, v in gradients.items()})


if __name__ == "__main__":
    main()
