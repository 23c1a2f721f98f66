"""Makes ``gemma/``: tiny whole models of Gemma 4 with random parameters, and what transformers computes of them.

    python tests/oracles/make_gemma4.py

It needs torch and transformers, which mmjax does not. Images have several sizes, and products of the tower have bounds.
In ``gemma4`` features are standardised, and layers with a window show an image's tokens to one another; layers of
``gemma4_small``, like E2B, read inputs of their own and keys of others. As in ``make_gemma.py`` each sequence is
computed alone, and the loss is the mean over the text tokens behind the first of all of them.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_gemma4_tower import PATCH, POOL, batch
from tiny_folders import continuation, save

HERE = Path(__file__).parent / "gemma"
START, END, IMAGE = 260, 261, 263
SIZES = ((24, 36), (12, 48), (36, 24), (12, 12), (24, 24))
"""Heights and widths of images in pixels: of one to six tokens."""
SEQUENCES, PROMPT, NEW = ("tiTtt", "tttT", "itiiti"), "titi", 24
"""``t`` is a run of text, ``T`` a longer one, ``i`` an image."""
_IDS = dict(vocab_size=264, pad_token_id=256, bos_token_id=257, eos_token_id=259)
_TOKENS = dict(boi_token_id=START, eoi_token_id=END, image_token_id=IMAGE, video_token_id=262)
_TEXT: dict[str, Any] = dict(
    **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    **dict(head_dim=8, global_head_dim=12, num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=12),
    **dict(layer_types=["sliding_attention", "full_attention"] * 2, max_position_embeddings=256),
    **dict(hidden_size_per_layer_input=0, use_bidirectional_attention="vision", final_logit_softcapping=0.5),
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
)
SMALL: dict[str, Any] = dict(
    **dict(hidden_size_per_layer_input=16, use_bidirectional_attention=None, attention_k_eq_v=False),
    **dict(num_global_key_value_heads=None, num_kv_shared_layers=2, use_double_wide_mlp=True),
)
"""What the text of a small model has in place of a large one's."""
_TOWER: dict[str, Any] = dict(
    **dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2),
    **dict(head_dim=8, patch_size=PATCH, pooling_kernel_size=POOL, position_embedding_size=48),
    **dict(use_clipped_linears=True, standardize=True),
)


def model(
    ids: Mapping[str, int] = _IDS,
    tokens: Mapping[str, int] = _TOKENS,
    window: int = 12,
    limit: int = 6,
    *,
    small: bool = False,
) -> Any:
    """The model; ids of special tokens, the window and the limit of an image's tokens may be others."""
    text = {**_TEXT, **(SMALL if small else {}), **ids, "sliding_window": window}
    config = transformers.Gemma4Config(
        text_config={**text, "vocab_size_per_layer_input": ids["vocab_size"], "model_type": "gemma4_text"},
        vision_config={**_TOWER, "standardize": not small, "model_type": "gemma4_vision"},
        **{**tokens, "vision_soft_tokens_per_image": limit},
    )
    config.audio_config = None
    made = transformers.Gemma4ForConditionalGeneration(config).eval()
    made.set_attn_implementation("eager")
    return made


def randomise(made: Any, seed: int) -> None:
    """Gives parameters and buffers random values; embeddings are small, since they are multiplied."""
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(made.named_parameters()) | dict(made.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise, end = torch.randn(tensor.shape, generator=generator), name.rpartition(".")[2]
            if end in ("input_min", "output_min"):
                tensor.copy_(-1.5 - noise.abs())
            elif end in ("input_max", "output_max"):
                tensor.copy_(1.5 + noise.abs())
            elif end in ("std_bias", "std_scale", "layer_scalar") or (tensor.ndim == 1 and "norm" in name):
                tensor.copy_(0.2 * noise + float(end != "std_bias"))
            elif name.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight")):
                tensor.copy_(noise * (0.05 if name.endswith("tokens.weight") else 0.3))
            elif "position_embedding_table" in name:
                tensor.copy_(0.3 * noise)
            elif tensor.ndim == 2:
                tensor.copy_(noise * tensor[0].numel() ** -0.5 * (1.5 if "language_model" in name else 1))


def sequence(kinds: str, rng: np.random.Generator, sizes: list[tuple[int, int]]) -> list[int]:
    """Its tokens; the sizes of its images are taken from the list."""
    found: list[int] = []
    for kind in kinds:
        if kind == "i":
            height, width = sizes.pop(0)
            found += [START, *[IMAGE] * (height * width // (PATCH * POOL) ** 2), END]
        else:
            found += rng.integers(0, 256, {"t": 4, "T": 15}[kind]).tolist()
    return found


def inputs_of(tokens: list[int], images: list[np.ndarray]) -> dict[str, Any]:
    """Arguments of the model."""
    ids = torch.tensor([tokens])
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long()}
    if images:
        given["pixel_values"], given["image_position_ids"] = batch(images)
    return given


def precise_logits(made: Any, inputs: dict[str, Any]) -> np.ndarray:
    """Logits computed in fp64 but for norms: those in fp32 differ by 1.5e-5 of the largest between processors."""
    with torch.no_grad():
        precise = copy.deepcopy(made).double()
        logits = precise(**{k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}).logits[0]
    return logits.float().numpy()


def values_of(made: Any, images: list[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
    """All values; the parameters have gradients then."""
    values: dict[str, Any] = {f"image_{number}": image for number, image in enumerate(images)}
    left, sizes, losses, counts = list(images), list(SIZES), [], []
    for number, kinds in enumerate(SEQUENCES):
        tokens = sequence(kinds, rng, sizes)
        given = inputs_of(tokens, [left.pop(0) for _ in range(kinds.count("i"))])
        hidden = made.model(**given).last_hidden_state
        logits, targets = made(**given).logits[0], torch.tensor(tokens)[1:]
        loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        losses.append((loss * (targets != IMAGE)).sum())
        counts.append(int((targets != IMAGE).sum()))
        values |= {
            f"tokens_{number}": np.asarray(tokens),
            f"logprobs_{number}": -loss.detach().numpy(),
            f"hidden_{number}": hidden[0].detach().numpy(),
        }
    values["logits_2"] = precise_logits(made, given)
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    with torch.no_grad():
        for number, image in enumerate(images):
            values[f"seen_{number}"] = made.model.get_image_features(*batch([image])).pooler_output[0].numpy()
        prompt = sequence(PROMPT, np.random.default_rng(5), list(SIZES))
        inputs = inputs_of(prompt, images[:2])
        values |= continuation(made, prompt, NEW, **inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    assert IMAGE not in values["generated"]
    return values


def main() -> None:
    torch.set_num_threads(1)
    for name, seed in (("gemma4", 7), ("gemma4_small", 14)):
        made, rng = model(small=name == "gemma4_small"), np.random.default_rng(0)
        randomise(made, seed)
        images = [np.round(rng.uniform(-1, 1, (*size, 3)) * 64).astype(np.float32) / 64 for size in SIZES]
        values = values_of(made, images, rng)
        print(values["generated"].tolist())
        save(made, HERE / name, values)


if __name__ == "__main__":
    main()
