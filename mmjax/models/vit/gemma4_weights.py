"""The vision tower of Gemma 4: settings, and weights tables of a transformer. Imports no JAX.

Its pooling and its embedder, a norm and a matrix, are a projector in mmjax. Bounds of products, and the mean and scale
of its results, are buffers in transformers: values that no optimizer changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import one_of, require
from mmjax.models.choices import ACTIVATION_OF, hf_activation
from mmjax.models.vit.config import ViTConfig
from mmjax.weights.table import SAME, TRANSPOSED, Row, View

KIND = "gemma4_vision"
"""The ``model_type`` of the tower alone."""
KINDS = (KIND, "gemma4")
"""The ``model_type`` of the tower, and of a composite model whose part names none."""
CLASS = "Gemma4VisionModel"
"""The class of the tower alone."""

# Defaults of transformers for keys that a config.json may leave out.
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
_ROPE: Mapping[str, Any] = {"rope_type": "axial", "rope_theta": 100.0}
_BOUNDS = "[input_min|input_max|output_min|output_max]"
"""The names of a product's four bounds."""


def settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ViTConfig``, by name, from a ``vision_config`` whose "model_type" is one of ``KINDS``.

    The result is such as {"layers": 16, "width": 768, …}.

    Raises:
      ConfigError: mmjax cannot compute the tower.
    """
    c = {**_DEFAULTS, **{key: value for key, value in hf_config.items() if value is not None}}
    rope = {**_ROPE, **(c.get("rope_parameters") or {})}
    width, heads = c["hidden_size"], c["num_attention_heads"]
    one_of("config.json: hidden_activation", c["hidden_activation"], ACTIVATION_OF)
    # Published folders say "default", which transformers reads as "axial".
    one_of("config.json: rope_type", rope["rope_type"], ("axial", "default"))
    fix = f"mmjax has heads that divide hidden_size ({width}) equally: {width // heads}"
    require(c["head_dim"] * heads == width, "config.json: head_dim", c["head_dim"], fix)
    fix = f"mmjax has as many as query heads ({heads}) in a tower"
    require(c["num_key_value_heads"] == heads, "config.json: num_key_value_heads", c["num_key_value_heads"], fix)
    biased = c["attention_bias"]
    require(not biased, "config.json: attention_bias", biased, "mmjax has no biases in this tower")
    return {
        "layers": c["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "mlp": c["intermediate_size"],
        "patch": c["patch_size"],
        "channels": 3,
        "merge": c["pooling_kernel_size"],
        "positions": "learned_xy+rope_xy",
        "rope_theta": float(rope["rope_theta"]),
        "grid": c["position_embedding_size"],
        "interpolate": "none",
        "class_token": False,
        "registers": 0,
        "frames": 1,
        "patch_bias": False,
        **{"bias": False, "qkv_bias": True, "k_bias": True},
        "qk_norm": True,
        "v_norm": True,
        "score_width": 1.0,
        "norm": "rms",
        "stem_norm": False,
        "last_norm": False,
        "norm_eps": float(c["rms_norm_eps"]),
        "post_norms": True,
        "clipped": bool(c["use_clipped_linears"]),
        "output": "standardised" if c["standardize"] else "scaled",
        "layer_scale": False,
        "gated": True,
        "activation": ACTIVATION_OF[c["hidden_activation"]],
        "window": 0,
        "full_at": (),
    }


def closest_config(c: ViTConfig) -> dict[str, Any]:
    """The ``config.json`` of a folder of a tower alone with as many of the settings as it has."""
    return {
        "architectures": [CLASS],
        "model_type": KIND,
        "hidden_size": c.width,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "head_dim": c.head_width,
        "hidden_activation": hf_activation(c.activation),
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": {"rope_type": "axial", "rope_theta": c.rope_theta},
        "pooling_kernel_size": c.merge,
        "patch_size": c.patch,
        "position_embedding_size": c.grid,
        "use_clipped_linears": c.clipped,
        "standardize": c.output == "standardised",
    }


def rows(c: ViTConfig) -> tuple[Row, ...]:
    """The tower's weights table, with the keys of a folder of the tower alone.

    A ``Row`` has the ``leaf``, such as "layers/{}/attn/q", a tuple of one key, and its ``view`` of the tensor, such as
    the transpose. The key of bounds stands for four tensors.
    """
    return tuple(Row(leaf, (key,), view) for leaf, key, view in _named(c))


def _named(c: ViTConfig) -> Iterator[tuple[str, str, View]]:
    yield "patch/kernel", "patch_embedder.input_proj.weight", TRANSPOSED
    yield "position", "patch_embedder.position_embedding_table", View(theirs=(2, c.grid, c.width))
    layer = "encoder.layers.{}"
    norms = {
        "attn_norm/scale": "input_layernorm",
        "attn_post_norm/scale": "post_attention_layernorm",
        "mlp_norm/scale": "pre_feedforward_layernorm",
        "mlp_post_norm/scale": "post_feedforward_layernorm",
        "attn/q_norm": "self_attn.q_norm",
        "attn/k_norm": "self_attn.k_norm",
    }
    for name, hf_name in norms.items():
        yield f"layers/{{}}/{name}", f"{layer}.{hf_name}.weight", SAME
    products = {f"attn/{name}": f"self_attn.{name}_proj" for name in "qkvo"}
    products |= {f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name, hf_name in products.items():
        yield f"layers/{{}}/{name}", f"{layer}.{hf_name}.linear.weight", TRANSPOSED
        if c.clipped:
            yield f"layers/{{}}/{name}_bounds", f"{layer}.{hf_name}.{_BOUNDS}", SAME
    if c.output == "standardised":
        yield "standard/bias", "std_bias", SAME
        yield "standard/scale", "std_scale", SAME
