"""Makes ``training/``: what torch's AdamW makes of a tiny LLaVA and of a tiny Qwen2.5-VL in twenty steps.

    python tests/oracles/make_training.py

It needs torch and transformers, which mmjax does not, and the folders that ``make_llava.py`` and ``make_qwen.py`` made.
Every step has the images of those and other texts. The gradient's norm is clipped over all parameters, and matrices
decay.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_qwen
import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
SETTINGS = {
    "steps": 20,
    "learning_rate": 1e-3,
    "warmup": 4,
    "weight_decay": 0.1,
    "b1": 0.9,
    "b2": 0.95,
    "eps": 1e-8,
    "clip_norm": 1.0,
}
Sequence = tuple[np.ndarray, list[np.ndarray]]
"""Tokens, and the images among them ``[h, w, 3]``."""


def sequences(values: Any, images: list[np.ndarray], image: int, count: Callable[[np.ndarray], int]) -> list[Sequence]:
    """The sequences of an oracle; ``count`` gives the tokens of an image."""
    left, made = list(images), []
    for number in range(3):
        tokens, taken = values[f"tokens_{number}"], list[np.ndarray]()
        while sum(map(count, taken)) < np.sum(tokens == image):
            taken.append(left.pop(0))
        made.append((tokens, taken))
    return made


def with_other_text(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Other tokens of text in the same places; special ones stay."""
    return np.where(tokens < 256, rng.integers(0, 256, len(tokens)), tokens)


def trained(made: Any, examples: list[Sequence], image: int, given: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Losses and tokens of all steps, and the parameters behind the last one.

    Args:
      made: the model.
      examples: sequences of which each step has other texts.
      image: the token that stands for an image's; it is not learned.
      given: the model's inputs for tokens and images.
    """
    s, rng, losses = SETTINGS, np.random.default_rng(7), []
    tokens: list[list[np.ndarray]] = [[] for _ in examples]
    parameters = [own for own in made.parameters() if own.requires_grad]
    groups = [
        {"params": [own for own in parameters if own.ndim > 1], "weight_decay": s["weight_decay"]},
        {"params": [own for own in parameters if own.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=s["learning_rate"], betas=(s["b1"], s["b2"]), eps=s["eps"])
    for step in range(int(s["steps"])):
        total, count = torch.zeros(()), 0
        for number, (first, images) in enumerate(examples):
            own = with_other_text(first, rng)
            tokens[number].append(own)
            logits, targets = made(**given(own, images)).logits[0], torch.tensor(own)[1:]
            counted = targets != image
            loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
            total, count = total + (loss * counted).sum(), count + int(counted.sum())
        mean = total / count
        losses.append(float(mean.detach()))
        optimizer.zero_grad()
        mean.backward()
        gradients = [own.grad for own in parameters if own.grad is not None]
        norm = math.sqrt(sum(float(own.double().square().sum()) for own in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, s["clip_norm"] / norm))
        for group in optimizer.param_groups:
            group["lr"] = s["learning_rate"] * min(1.0, (step + 1) / (s["warmup"] + 1))
        optimizer.step()
    found = {f"tokens_{number}": np.stack(own).astype(np.int16) for number, own in enumerate(tokens)}
    return found | {"losses": np.asarray(losses)} | {f"parameter/{k}": v for k, v in parameters_of(made)}


def parameters_of(made: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters by name."""
    yield from ((name, own.detach().numpy()) for name, own in made.named_parameters())


def llava() -> dict[str, Any]:
    values = np.load(HERE / "llava" / "values.npz")
    made = transformers.LlavaForConditionalGeneration.from_pretrained(HERE / "llava", dtype="float32").eval()
    image = made.config.image_token_id

    def given(tokens: np.ndarray, images: list[np.ndarray]) -> dict[str, Any]:
        pixels = {"pixel_values": torch.tensor(np.stack(images)).permute(0, 3, 1, 2)} if images else {}
        return {"input_ids": torch.tensor(tokens)[None].long(), **pixels}

    return trained(made, sequences(values, list(values["images"]), image, lambda own: 16), image, given)


def qwen() -> dict[str, Any]:
    folder = HERE / "qwen" / "qwen2_5_vl"
    values = np.load(folder / "values.npz")
    made = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype="float32").eval()

    def given(tokens: np.ndarray, images: list[np.ndarray]) -> dict[str, Any]:
        ids: dict[str, Any] = {"input_ids": torch.tensor(tokens)[None].long()}
        if images:
            ids["pixel_values"], ids["image_grid_thw"] = make_qwen.patches_of(images)
            ids["mm_token_type_ids"] = (ids["input_ids"] == make_qwen.IMAGE).int()
        return ids

    images = [values[f"image_{number}"] for number in range(len(make_qwen.SIZES))]
    examples = sequences(values, images, make_qwen.IMAGE, lambda own: own.shape[0] * own.shape[1] // 64)
    return trained(made, examples, make_qwen.IMAGE, given)


def main() -> None:
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (HERE / "training").mkdir(exist_ok=True)
    for name, make in (("llava", llava), ("qwen2_5_vl", qwen)):
        values = make()
        print(name, values["losses"][[0, -1]])
        about = {"versions": json.dumps(versions), "settings": json.dumps(SETTINGS)}
        np.savez_compressed(HERE / "training" / f"{name}.npz", allow_pickle=False, **about, **values)


if __name__ == "__main__":
    main()
