"""Makes ``qwen/``: tiny models of Qwen-VL with random parameters, and what transformers computes of them.

    python tests/oracles/make_qwen.py [qwen3_vl ...]    # of these models alone

It needs torch and transformers, which mmjax does not. Each sequence is computed alone; the loss is the mean over all of
their text tokens behind the first, and gradients are torch's. ``far`` is a text at positions that an axis each has of
its own, up to 30,000. ``generated`` is what greedy decoding says to ``prompt``, a text with two images. ``deep`` is of
the inner layers of Qwen3-VL's tower.
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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent / "qwen"
PATCH, MERGE = 4, 2
START, END, VIDEO, IMAGE = 260, 261, 262, 263
"""Ids around an image's tokens, and those that stand for a video's and for an image's."""
SIZES = ((24, 40), (16, 16), (8, 24), (40, 24), (16, 8))
"""Heights and widths of the images in pixels. A window of Qwen2.5-VL has 16."""
SEQUENCES = ("tiTtt", "tttT", "itiiti")
"""``t`` is a run of text, ``T`` a longer one, ``i`` an image; each takes the next of ``SIZES``."""
PROMPT, NEW = "titi", 64
_TEXT: dict[str, Any] = dict(
    vocab_size=264, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32768, bos_token_id=256, eos_token_id=259,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
)  # fmt: skip
_VISION: dict[str, Any] = dict(
    depth=3, num_heads=2, in_channels=3, patch_size=PATCH, spatial_merge_size=MERGE, temporal_patch_size=2
)
_QWEN3_TEXT: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=16,
    rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2], "mrope_interleaved": True
    },
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
_QWEN3_VISION: dict[str, Any] = {
    **_VISION,
    **dict(depth=4, hidden_size=16, out_hidden_size=32, intermediate_size=24, num_position_embeddings=36),
    "deepstack_visual_indexes": [0, 2, 3],
}
_QWEN3_5_TEXT: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=48, layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5,
    rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
)  # fmt: skip
_IDS = dict(vision_start_token_id=START, vision_end_token_id=END, video_token_id=VIDEO, image_token_id=IMAGE)


SEEDS = {"qwen2_vl": 3, "qwen2_5_vl": 11, "qwen3_vl": 11, "qwen3_vl_moe": 12, "qwen3_5": 27, "qwen3_5_moe": 58}
"""Seeds with which ``generated`` is varied, and has no token that stands for an image.

With Qwen3.5's gradients in fp32 are 2e-5 of the largest from those in fp64; with many seeds the norm behind a small
output of a delta layer makes it 1e-4.
"""


def models(text_ids: Mapping[str, int] = {}, ids: Mapping[str, int] = _IDS) -> Iterator[tuple[str, Any]]:
    """The models by name; the ids of special tokens, and the vocabulary's size, may be others."""
    about = {**_TEXT, **text_ids}
    vision = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        **_VISION, embed_dim=16, hidden_size=32, mlp_ratio=2
    )
    text = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLTextConfig(**about)
    config = transformers.Qwen2VLConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), **ids)
    yield "qwen2_vl", transformers.Qwen2VLForConditionalGeneration(config)
    vision = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        **_VISION, hidden_size=16, out_hidden_size=32, intermediate_size=24, window_size=16, fullatt_block_indexes=[1]
    )
    text = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**about)
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), tie_word_embeddings=True, **ids
    )
    yield "qwen2_5_vl", transformers.Qwen2_5_VLForConditionalGeneration(config)
    text = {**about, **_QWEN3_TEXT}
    config = transformers.Qwen3VLConfig(vision_config=_QWEN3_VISION, text_config=text, tie_word_embeddings=True, **ids)
    yield "qwen3_vl", transformers.Qwen3VLForConditionalGeneration(config)
    config = transformers.Qwen3VLMoeConfig(vision_config=_QWEN3_VISION, text_config={**text, **_EXPERTS}, **ids)
    yield "qwen3_vl_moe", transformers.Qwen3VLMoeForConditionalGeneration(config)
    vision = {key: value for key, value in _QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
    config = transformers.Qwen3_5Config(
        vision_config=vision, text_config={**about, **_QWEN3_5_TEXT}, tie_word_embeddings=True, **ids
    )
    yield "qwen3_5", transformers.Qwen3_5ForConditionalGeneration(config)
    text = {**about, **_QWEN3_5_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 24}
    config = transformers.Qwen3_5MoeConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    yield "qwen3_5_moe", transformers.Qwen3_5MoeForConditionalGeneration(config)


def randomise(made: Any, seed: int) -> None:
    """Gives a model random parameters, large ones in the text's layers, so that what it says varies."""
    generator, has_delta = torch.Generator().manual_seed(seed), made.config.model_type.startswith("qwen3_5")
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):  # Rates differ, and some are small, so that states last.
                parameter.copy_(2 * noise - 2)
            elif has_delta and "language_model" in name and "norm" in name and "linear_attn" not in name:
                parameter.copy_(0.2 * noise)  # of norms that multiply by 1 + weight
            elif parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                inputs = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()  # three: experts
                scale = 0.2 if parameter.ndim == 1 else inputs**-0.5
                is_large = "language_model.layers" in name and not has_delta  # fp32 would be 5e-5 off
                parameter.copy_(noise * scale * (2 if is_large else 1))


def patches_of(images: list[np.ndarray]) -> tuple[Any, Any]:
    """Patches and grids of images ``[h, w, 3]`` as the model's own processor cuts them."""
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2)
    plain = dict(do_resize=False, do_rescale=False, do_normalize=False, do_convert_rgb=False)
    made = processor([image.transpose(2, 0, 1) for image in images], return_tensors="pt", **plain)
    return made["pixel_values"].float(), made["image_grid_thw"]


def sequence(kinds: str, sizes: Iterator[tuple[int, int]], rng: np.random.Generator) -> list[int]:
    """Its tokens."""
    found: list[int] = []
    for kind in kinds:
        if kind == "i":
            height, width = next(sizes)
            found += [START, *[IMAGE] * (height * width // (PATCH * MERGE) ** 2), END]
        else:
            found += rng.integers(0, 256, {"t": 4, "T": 11}[kind]).tolist()
    return found


def computed(made: Any, tokens: list[int], images: list[np.ndarray], **more: Any) -> Any:
    """The model's output for one sequence."""
    given: dict[str, Any] = {"input_ids": torch.tensor([tokens]), **more}
    if images:
        given["pixel_values"], given["image_grid_thw"] = patches_of(images)
        given["mm_token_type_ids"] = (given["input_ids"] == IMAGE).int()
    return made(**given, output_hidden_states=True)


def values_of(made: Any, images: list[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
    """All values of one model; its parameters have gradients then."""
    values: dict[str, Any] = {f"image_{number}": image for number, image in enumerate(images)}
    left, sizes, losses, counts = list(images), iter(SIZES), [], []
    for number, kinds in enumerate(SEQUENCES):
        tokens = sequence(kinds, sizes, rng)
        output = computed(made, tokens, [left.pop(0) for _ in range(kinds.count("i"))])
        logits, targets = output.logits[0], torch.tensor(tokens)[1:]
        loss = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        counted = targets != IMAGE
        losses.append((loss * counted).sum())
        counts.append(int(counted.sum()))
        values |= {
            f"tokens_{number}": np.asarray(tokens),
            f"logprobs_{number}": -loss.detach().numpy(),
            f"hidden_{number}": output.hidden_states[-1][0].detach().numpy(),
        }
    values["logits_2"] = logits.detach().numpy()
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    with torch.no_grad():
        for number, image in enumerate(images):
            patches, grid = patches_of([image])
            seen = made.model.visual(patches, grid_thw=grid)
            values[f"merged_{number}"] = seen.pooler_output.numpy()
            for place, features in enumerate(getattr(seen, "deepstack_features", ())):
                values[f"deep_{number}_{place}"] = features.numpy()
        values |= far(made, rng) | generated(made, images, np.random.default_rng(5))
    return values


def far(made: Any, rng: np.random.Generator) -> dict[str, Any]:
    """A text at positions of three axes that are far apart."""
    tokens, positions = rng.integers(0, 256, 12), rng.integers(0, 30000, (12, 3))
    given = torch.tensor(positions.T[:, None])
    logits = computed(made, tokens.tolist(), [], position_ids=given).logits[0]
    return {"far_tokens": tokens, "far_positions": positions, "far_logits": logits.numpy()}


def generated(made: Any, images: list[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
    """What a prompt with images is continued with."""
    prompt = sequence(PROMPT, iter(SIZES), rng)
    patches, grid = patches_of(images[: PROMPT.count("i")])
    ids = torch.tensor([prompt])
    media = {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}
    return continuation(made, prompt, NEW, input_ids=ids, **media)


def main() -> None:
    torch.set_num_threads(1)
    for name, made in models():
        if name not in (sys.argv[1:] or SEEDS):
            continue
        randomise(made.eval(), SEEDS[name])
        rng = np.random.default_rng(0)
        images = [rng.normal(size=(*size, 3)).astype(np.float16).astype(np.float32) for size in SIZES]
        values = values_of(made, images, rng)
        save(made, HERE / name, values, with_gradients=name != "qwen2_5_vl")


if __name__ == "__main__":
    main()
