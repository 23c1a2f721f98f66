"""A small LLaVA with random weights as a folder, and dialogues of random tokens: all that the systems read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

IMAGE_AT = 4
"""The place of an image's first token in a dialogue."""
FIRST_WORD = 300
"""Words of dialogues have at least this id: smaller ones are those of bytes and special tokens."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and of a step's dialogues. A dialogue has one image and ``length`` tokens.

    Attributes:
      tower_layers, tower_width: of the vision tower, CLIP's; heads are 64 wide, the mlp is four times as wide.
      layers, width, mlp: of the language model, Llama's.
      head_width: width of its heads.
      vocab: its vocabulary; the last word stands for an image's tokens.
      image, patch: edges of an image and of its patches, in pixels.
      dialogues, length: dialogues of a step, and tokens of each, those of its image among them.
    """

    tower_layers: int = 6
    tower_width: int = 384
    layers: int = 8
    width: int = 512
    mlp: int = 1376
    head_width: int = 64
    vocab: int = 8000
    image: int = 112
    patch: int = 14
    dialogues: int = 8
    length: int = 192

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.image // self.patch) ** 2

    @property
    def tower_heads(self) -> int:
        """Heads of the vision tower."""
        return self.tower_width // min(64, self.tower_width // 2)

    @property
    def heads(self) -> int:
        """Heads of the language model."""
        return self.width // self.head_width


SIZES = Sizes()
SMALL = Sizes(
    tower_layers=2, tower_width=32, layers=2, width=32, mlp=48, head_width=16, vocab=400, image=28, patch=7,
    dialogues=2, length=64,
)  # fmt: skip
"""Sizes that take no time to speak of: they try the path."""


def write_model(sizes: Sizes, folder: Path) -> None:
    """Writes the folder of a model as transformers saves it: ``config.json`` and ``model.safetensors``, in fp32."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {name: _drawn(rng, name, shape) for name, shape in _shapes(sizes)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(sizes), indent=2) + "\n")


def write_dialogues(sizes: Sizes, steps: int, file: Path) -> None:
    """Writes the dialogues of so many steps as ``file``, an npz.

    It has "tokens" [steps, dialogues, length], "images" [dialogues, image, image, 3], which are those of every step,
    and "learned" [length], whether the model learns the token at a place: the second half of the text.
    """
    rng = np.random.default_rng(1)
    tokens = rng.integers(FIRST_WORD, sizes.vocab - 1, (steps, sizes.dialogues, sizes.length), np.int32)
    tokens[:, :, IMAGE_AT : IMAGE_AT + sizes.patches] = sizes.vocab - 1
    images = rng.standard_normal((sizes.dialogues, sizes.image, sizes.image, 3), np.float32)
    learned = np.arange(sizes.length) >= (sizes.length + IMAGE_AT + sizes.patches) // 2
    np.savez(file, tokens=tokens, images=images, learned=learned)


def _shapes(s: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the folder's tensors."""
    tower, d, mlp = s.tower_width, s.width, 4 * s.tower_width
    yield from _affine("multi_modal_projector.linear_1", tower, d)
    yield from _affine("multi_modal_projector.linear_2", d, d)
    yield "vision_tower.embeddings.class_embedding", (tower,)
    yield "vision_tower.embeddings.patch_embedding.weight", (tower, 3, s.patch, s.patch)
    yield "vision_tower.embeddings.position_embedding.weight", (s.patches + 1, tower)
    for name in ("pre_layrnorm", "post_layernorm"):
        yield from _norm(f"vision_tower.{name}", tower)
    for layer in range(s.tower_layers):
        prefix = f"vision_tower.encoder.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _affine(f"{prefix}.self_attn.{name}", tower, tower)
        yield from (*_affine(f"{prefix}.mlp.fc1", tower, mlp), *_affine(f"{prefix}.mlp.fc2", mlp, tower))
        yield from (*_norm(f"{prefix}.layer_norm1", tower), *_norm(f"{prefix}.layer_norm2", tower))
    yield "language_model.lm_head.weight", (s.vocab, d)
    yield "language_model.model.embed_tokens.weight", (s.vocab, d)
    yield "language_model.model.norm.weight", (d,)
    for layer in range(s.layers):
        prefix = f"language_model.model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (d, d)
        yield f"{prefix}.mlp.gate_proj.weight", (s.mlp, d)
        yield f"{prefix}.mlp.up_proj.weight", (s.mlp, d)
        yield f"{prefix}.mlp.down_proj.weight", (d, s.mlp)
        yield f"{prefix}.input_layernorm.weight", (d,)
        yield f"{prefix}.post_attention_layernorm.weight", (d,)


def _affine(name: str, inputs: int, outputs: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]


def _norm(name: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"{name}.weight", (width,)), (f"{name}.bias", (width,))]


def _drawn(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms' weights about 1, biases about 0, embeddings of 0.02, and products that keep the size of their input."""
    numbers = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        return numbers * np.float32(0.02) + np.float32(name.endswith("weight"))
    is_table = name.endswith(("embed_tokens.weight", "position_embedding.weight"))
    return numbers * np.float32(0.02 if is_table else np.prod(shape[1:]) ** -0.5)


def _config(s: Sizes) -> dict[str, Any]:
    text = {
        "model_type": "llama", "vocab_size": s.vocab, "hidden_size": s.width, "intermediate_size": s.mlp,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.heads,
        "head_dim": s.head_width, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "mlp_bias": False, "max_position_embeddings": s.length, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "hidden_size": s.tower_width, "intermediate_size": 4 * s.tower_width,
        "num_hidden_layers": s.tower_layers, "num_attention_heads": s.tower_heads, "image_size": s.image,
        "patch_size": s.patch, "num_channels": 3, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
    }  # fmt: skip
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "dtype": "float32",
        "image_token_index": s.vocab - 1, "image_seq_length": s.patches, "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
    }  # fmt: skip
