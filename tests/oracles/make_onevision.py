"""Makes ``onevision/``: a tiny LLaVA-OneVision with random parameters, and what transformers computes of sequences.

    python tests/oracles/make_onevision.py

It needs torch and transformers, which mmjax does not. Each sequence is computed alone; the loss is the mean over all of
their text tokens behind the first, and gradients are torch's. Pixels are random: an image is a size and its tiles.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.llava_onevision import modeling_llava_onevision as theirs

HERE = Path(__file__).parent / "onevision"
IMAGE, SIDE, NEW = 263, 17, 64
"""The id that stands for an image's tokens, the side of a tile in pixels, and the tokens that are generated."""
GRIDS = [[SIDE * rows, SIDE * columns] for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (3, 3))]
SEQUENCES = (
    ("tiTtt", [(50, 83)]),  # more tokens than anyres_max_3 lets be, and padding above and below
    ("ttt", []),
    ("itit", [(20, 31), (44, 9)]),  # several images: no tiles
    ("tit", [(39, 12)]),  # padding at the left and at the right
    ("it", [(60, 58)]),  # as many tiles as there can be
)
"""``t`` is a run of text, ``T`` a longer one, ``i`` an image; and heights and widths of the images."""


def model(
    vocabulary: int = 264, image: int = IMAGE, side: int = SIDE, patch: int = 4, grids: Sequence[Sequence[int]] = GRIDS
) -> Any:
    """A model with so many tokens, one of them an image's, for such tiles; no number is 0 or 1."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=side,
        patch_size=patch, vision_use_head=False,
    )  # fmt: skip
    text = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    made = transformers.LlavaOnevisionForConditionalGeneration(
        transformers.LlavaOnevisionConfig(
            vision_config=vision, text_config=text, image_token_index=image, video_token_index=image - 1,
            image_grid_pinpoints=[*map(list, grids)], vision_aspect_ratio="anyres_max_3",
        )
    )  # fmt: skip
    randomise(made)
    with torch.no_grad():
        made.get_input_embeddings().weight[256:] *= 0.05  # so that it says no special tokens: the head is tied
    return made.eval()


def randomise(made: Any) -> None:
    """Gives a model random parameters."""
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            else:
                # Layers of the language model count for more than usual, so that what it says does not repeat itself.
                large = 3.0 if "language_model.layers" in name else 1.0
                parameter.copy_(noise * (0.2 if parameter.ndim == 1 else large * parameter.shape[-1] ** -0.5))


def pictures(made: Any, sizes: list[tuple[int, int]], rng: np.random.Generator) -> tuple[Any, list[tuple[int, int]]]:
    """Random pixels ``[images, tiles, 3, h, w]`` as the processor gives them, and each image's rows and columns."""
    grids = [
        theirs.get_anyres_image_grid_shape(size, made.config.image_grid_pinpoints, SIDE) if len(sizes) == 1 else (0, 0)
        for size in sizes
    ]
    found = [rng.normal(size=(1 + rows * columns, SIDE, SIDE, 3)).astype(np.float16) for rows, columns in grids]
    return np.stack(found) if found else np.zeros((0, 1, SIDE, SIDE, 3), np.float16), grids


def given(pixels: Any, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Arguments of the model for images."""
    if not sizes:
        return {}
    return {
        "pixel_values": torch.tensor(pixels.astype(np.float32)).permute(0, 1, 4, 2, 3),
        "image_sizes": torch.tensor(sizes),
        "batch_num_images": torch.tensor([len(sizes)]),
    }


def features(made: Any, images: dict[str, Any]) -> list[Any]:
    """What stands at the places of each image's tokens."""
    about = {"vision_aspect_ratio": "anyres_max_3"}
    found = made.get_image_features(**images, vision_feature_layer=-1, vision_feature_select_strategy="full", **about)
    return list(found.pooler_output)


Pictures = Callable[[Any, list[tuple[int, int]], np.random.Generator], tuple[Any, list[tuple[int, int]]]]
"""See ``pictures``."""


def write(
    folder: Path,
    made: Any,
    sequences: Sequence[tuple[str, list[tuple[int, int]]]],
    draw: Pictures,
    arguments: Callable[[Any, list[tuple[int, int]], list[tuple[int, int]]], dict[str, Any]],
    seen: Callable[[Any, dict[str, Any]], list[Any]],
) -> None:
    """Writes the model's folder, and what it computes of sequences.

    ``draw`` is such as ``pictures``; ``arguments`` gives the model's arguments for pixels, sizes and grids; ``seen`` is
    such as ``features``.
    """
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    made.save_pretrained(folder)
    values: dict[str, Any] = {}
    losses, counts, gaps = [], [], []
    for number, (kinds, sizes) in enumerate(sequences):
        pixels, grids = draw(made, sizes, rng)
        images = arguments(pixels, sizes, grids)
        own = seen(made, images) if sizes else []
        left, tokens = list(own), []
        for kind in kinds:
            if kind == "i":
                tokens += [IMAGE] * len(left.pop(0))
            else:
                tokens += rng.integers(0, 256, {"t": 4, "T": 11}[kind]).tolist()
        logits = made(input_ids=torch.tensor([tokens]), **images).logits[0]
        targets = torch.tensor(tokens)[1:]
        counted = targets != IMAGE
        each = torch.nn.functional.cross_entropy(logits[:-1], targets, reduction="none")
        losses.append((each * counted).sum())
        counts.append(int(counted.sum()))
        values |= {f"tokens_{number}": np.asarray(tokens, np.int16), f"pixels_{number}": pixels}
        values |= {
            f"{name}_{number}": np.asarray(own).reshape(-1, 2) for name, own in (("sizes", sizes), ("grids", grids))
        }
        values[f"logprobs_{number}"] = -each.detach().numpy()
        values[f"logits_{number}"] = logits[-3:].detach().numpy()
        if own:
            values[f"features_{number}"] = torch.cat(own).detach().numpy()
        with torch.no_grad():
            made_of = made.generate(
                input_ids=torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), **images,
                do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        values[f"generated_{number}"] = made_of.sequences[0, len(tokens) :].numpy().astype(np.int16)
        top = torch.cat(made_of.logits).topk(2, dim=-1).values
        gaps.append(float((top[:, 0] - top[:, 1]).min()))
    mean = torch.stack(losses).sum() / sum(counts)
    mean.backward()
    values["loss"] = mean.detach().numpy()
    gradients = {}
    for name, parameter in made.named_parameters():
        gradients[name] = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "smallest gap": min(gaps)}
    np.savez_compressed(folder / "values.npz", versions=json.dumps(versions), **values)
    np.savez_compressed(folder / "gradients.npz", **{k: v.astype(np.float32) for k, v in gradients.items()})


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    write(HERE, model(), SEQUENCES, pictures, lambda pixels, sizes, grids: given(pixels, sizes), features)


if __name__ == "__main__":
    main()
