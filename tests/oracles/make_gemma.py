"""Makes ``gemma/``: tiny Gemma 3 and PaliGemma 2 with random parameters, and what transformers computes of them.

    python tests/oracles/make_gemma.py [gemma3 paligemma2]    # of these models alone

It needs torch and transformers, which mmjax does not. Each sequence is computed alone; the loss is the mean over the
text tokens behind the first of all of them, of PaliGemma over those behind the prompt, and gradients are torch's.
``generated`` is what greedy decoding says to ``prompt``, which has two images. Sequences are longer than windows.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_folders import continuation, save

HERE = Path(__file__).parent / "gemma"
START, END, IMAGE = 260, 261, 263
"""Ids around an image's tokens in Gemma 3, and the one that stands for each of these."""
SIDES = {"gemma3": 48, "paligemma2": 16}
"""Sides of images in pixels; a patch has 4. Gemma 3 makes nine tokens of an image, PaliGemma 16."""
TOKENS = {"gemma3": 9, "paligemma2": 16}
IMAGES = 5
SEQUENCES = {
    "gemma3": ("tiTtt", "tttT", "itiiti"),
    "paligemma2": ("iT|Tt", "T|tTt", "iiiitt|T"),
}
"""``t`` is a run of text, ``T`` a longer one, ``i`` an image, ``|`` where the prompt of PaliGemma ends."""
PROMPT, NEW = {"gemma3": "titi", "paligemma2": "iitT"}, 40
_IDS = dict(vocab_size=264, pad_token_id=256, bos_token_id=257, eos_token_id=259)
_TEXT: dict[str, Any] = dict(
    **dict(hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    **dict(head_dim=8, sliding_window=12, max_position_embeddings=256),
)
_TOWER: dict[str, Any] = dict(
    **dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4),
    vision_use_head=False,
)
SEEDS = {"gemma3": 5, "paligemma2": 6}


def models(ids: Mapping[str, int] = _IDS, tokens: Mapping[str, int] = {}) -> Iterator[tuple[str, Any]]:
    """The models by name; the ids of special tokens, and the vocabulary's size, may be others."""
    local, every = ["sliding_attention"], ["full_attention"]
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    }
    text = {**_TEXT, **ids, "layer_types": local * 2 + every + local, "rope_parameters": rope}
    config = transformers.Gemma3Config(
        text_config={**text, "query_pre_attn_scalar": 12, "model_type": "gemma3_text"},
        vision_config={**_TOWER, "image_size": SIDES["gemma3"], "model_type": "siglip_vision_model"},
        **dict(boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE) | dict(tokens),
        mm_tokens_per_image=TOKENS["gemma3"],
    )
    yield "gemma3", transformers.Gemma3ForConditionalGeneration(config)
    caps = dict(query_pre_attn_scalar=5, attn_logit_softcapping=2.0, final_logit_softcapping=0.5)
    config = transformers.PaliGemmaConfig(
        text_config={**_TEXT, **ids, **caps, "model_type": "gemma2"},
        vision_config={**_TOWER, "image_size": SIDES["paligemma2"], "model_type": "siglip_vision_model"},
        **dict(image_token_index=tokens.get("image_token_index", IMAGE), projection_dim=32, hidden_size=32),
    )
    yield "paligemma2", transformers.PaliGemmaForConditionalGeneration(config)


def randomise(made: Any, seed: int) -> None:
    """Gives a model random parameters; embeddings are small, since they are multiplied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                is_around_1 = "vision_tower" in name and name.endswith("weight")
                parameter.copy_(0.2 * noise + (1.0 if is_around_1 else 0.0))
            elif "embed_tokens" in name:
                parameter.copy_(0.05 * noise)
            else:
                inputs = len(parameter) if "mm_input" in name else parameter[0].numel()
                parameter.copy_(noise * inputs**-0.5 * (1.5 if "language_model" in name else 1))


def sequence(name: str, kinds: str, rng: np.random.Generator) -> list[int]:
    """Its tokens."""
    found: list[int] = []
    for kind in kinds.replace("|", ""):
        if kind == "i":
            around = ([START], [END]) if name == "gemma3" else ([], [])
            found += [*around[0], *[IMAGE] * TOKENS[name], *around[1]]
        else:
            found += rng.integers(0, 256, {"t": 4, "T": 15}[kind]).tolist()
    return found


def inputs_of(name: str, tokens: list[int], prompt: int, images: list[np.ndarray]) -> dict[str, Any]:
    """Arguments of the model."""
    ids = torch.tensor([tokens])
    kinds = (ids == IMAGE).long() if name == "gemma3" else (torch.arange(len(tokens))[None] >= prompt).long()
    given: dict[str, Any] = {"input_ids": ids, "token_type_ids": kinds}
    if images:
        given["pixel_values"] = torch.tensor(np.stack(images)).permute(0, 3, 1, 2)
    return given


def values_of(name: str, made: Any, images: list[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
    """All values of one model; its parameters have gradients then."""
    values: dict[str, Any] = {f"image_{number}": image for number, image in enumerate(images)}
    left, losses, counts = list(images), [], []
    for number, kinds in enumerate(SEQUENCES[name]):
        tokens = sequence(name, kinds, rng)
        prompt = len(sequence(name, kinds.partition("|")[0], np.random.default_rng(0))) if "|" in kinds else 1
        given = inputs_of(name, tokens, prompt, [left.pop(0) for _ in range(kinds.count("i"))])
        hidden = made.model(**given).last_hidden_state
        logits, targets = made(**given).logits[0], torch.tensor(tokens)[1:]
        loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        counted = (targets != IMAGE) & (torch.arange(1, len(tokens)) >= prompt)
        losses.append((loss * counted).sum())
        counts.append(int(counted.sum()))
        values |= {
            f"tokens_{number}": np.asarray(tokens),
            f"prompt_{number}": np.asarray(prompt),
            f"logprobs_{number}": -loss.detach().numpy(),
            f"hidden_{number}": hidden[0].detach().numpy(),
        }
    values["logits_2"] = logits.detach().numpy()
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    with torch.no_grad():
        for number, image in enumerate(images):
            pixels = torch.tensor(image[None]).permute(0, 3, 1, 2)
            values[f"seen_{number}"] = made.model.get_image_features(pixels).pooler_output[0].numpy()
        values |= generated(name, made, images)
    return values


def generated(name: str, made: Any, images: list[np.ndarray]) -> dict[str, Any]:
    """What a prompt with two images is continued with."""
    prompt = sequence(name, PROMPT[name], np.random.default_rng(5))
    inputs = inputs_of(name, prompt, len(prompt), images[:2])
    values = continuation(made, prompt, NEW, **inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    assert IMAGE not in values["generated"]
    return values


def main() -> None:
    torch.set_num_threads(1)
    for name, made in models():
        if name not in (sys.argv[1:] or SEEDS):
            continue
        made.set_attn_implementation("eager")
        randomise(made.eval(), SEEDS[name])
        rng, side = np.random.default_rng(0), SIDES[name]
        images = [rng.normal(size=(side, side, 3)).astype(np.float16).astype(np.float32) for _ in range(IMAGES)]
        values = values_of(name, made, images, rng)
        print(values["generated"].tolist())
        save(made, HERE / name, values)


if __name__ == "__main__":
    main()
