"""Mixture of experts in folders of transformers: rows of the weights table, and their part of ``config.json``.

Values of ``model_type`` are mixtral, qwen2_moe, qwen3_moe, qwen3_5_moe_text and, in composite models, qwen3_vl_moe; of
deepseek_v2 and deepseek_v3 the rows are here, and the configuration is in ``deepseek_weights``. A folder has a tensor
for each expert and product, also if ``transformers`` 5 stacks them in memory. One of qwen3_vl_moe has stacks, with
gates before ups; published folders have the transposes of what ``transformers`` 5 writes. One of qwen3_5_moe_text has
either a list or the stacks of ``transformers`` 5. Imports no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mmjax.configurable import require
from mmjax.models.llama.config import DecoderConfig
from mmjax.weights.table import SAME, TRANSPOSED, TRANSPOSED_LIST, Row, View

Json = Mapping[str, Any]
"""The contents of a ``config.json``, or its part on the language model."""
_QWEN = {
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
    "moe_intermediate_size": 768,
    "shared_expert_intermediate_size": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
DEFAULTS: Mapping[str, Json] = {
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 8},
    "qwen2_moe": _QWEN
    | {"num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632},
    "qwen3_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN
    | {"num_experts": 256, "norm_topk_prob": True, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512},
}
"""The defaults of transformers for missing keys on experts, by model type."""
QWEN3_VL = ("qwen3_vl_moe", "qwen3_vl_moe_text")
"""Model types with the stacked tensors of Qwen3-VL-MoE."""
QWEN3_VL_DEFAULTS: Json = _QWEN | {
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
}
"""The defaults of transformers for missing keys on experts, for ``QWEN3_VL``."""
_BLOCKS = {"mixtral": "block_sparse_moe"}
_SHARED = {"deepseek_v2": "shared_experts", "deepseek_v3": "shared_experts"}
_PRODUCTS = {"mixtral": {"gate": "w1", "up": "w3", "down": "w2"}}
_WITH_SHARED = ("qwen2_moe", "qwen3_5_moe_text")
_WITH_STACKS = ("qwen3_5_moe_text",)
_QWEN_PRODUCTS = {name: f"{name}_proj" for name in ("gate", "up", "down")}


def expert_rows(c: DecoderConfig, model_type: str) -> Iterator[Row]:
    """Yields the rows of a decoder's experts, with the keys of this ``model_type``; "" is chosen by the settings."""
    kind = model_type if model_type in (*DEFAULTS, *QWEN3_VL, *_SHARED) else model_type_of(c)
    layers, block = range(c.dense_layers, c.layers), f"model.layers.{{}}.{_BLOCKS.get(kind, 'mlp')}"
    yield Row("layers/{}/experts/router", (f"{block}.gate.weight",), TRANSPOSED, layers=layers)
    products = _stacked(c) if kind in QWEN3_VL else _listed(c, kind)
    for name, keys, view, *other_views in products:
        leaf, keys = f"layers/{{}}/experts/{name}", tuple(f"{block}.experts.{key}" for key in keys)
        yield Row(leaf, keys, view, layers=layers, other_views=tuple(other_views))
    if c.router_bias:
        yield Row("layers/{}/experts/router_bias", (f"{block}.gate.e_score_correction_bias",), layers=layers)
    shared = _SHARED.get(kind, "shared_expert")
    for name, key in _QWEN_PRODUCTS.items() if c.shared_experts else ():
        yield Row(f"layers/{{}}/shared/{name}", (f"{block}.{shared}.{key}.weight",), TRANSPOSED, layers=layers)
    if c.shared_gate:
        yield Row("layers/{}/shared_gate", (f"{block}.shared_expert_gate.weight",), TRANSPOSED, layers=layers)


Product = tuple[str, tuple[str, ...], *tuple[View, ...]]
"""Name, keys and views of a product of experts."""


def _listed(c: DecoderConfig, kind: str) -> Iterator[Product]:
    """Yields each product of experts with a tensor for each of them; published folders of Qwen3.5 have stacks."""
    stacks = {name: (key, view) for name, (key,), view, *_ in _stacked(c)} if kind in _WITH_STACKS else {}
    for name, key in _PRODUCTS.get(kind, _QWEN_PRODUCTS).items():
        of_list = f"*.{key}.weight"
        if name in stacks:
            stack, view = stacks[name]
            yield name, (of_list, stack), TRANSPOSED_LIST, view
        else:
            yield name, (of_list,), TRANSPOSED_LIST


def _stacked(c: DecoderConfig) -> Iterator[Product]:
    """Yields each product of stacked experts.

    Tensors are ``[E, 2F, D]`` and ``[E, D, F]`` as ``transformers`` 5 writes them, ``[E, D, 2F]`` and ``[E, F, D]`` in
    published folders.
    """
    for number, name in enumerate(("gate", "up")):
        rows = number * c.expert_width, (number + 1) * c.expert_width
        yield name, ("gate_up_proj",), replace(TRANSPOSED_LIST, rows=rows, axis=1), View(rows=rows, axis=2)
    yield "down", ("down_proj",), TRANSPOSED_LIST, SAME


def model_type_of(c: DecoderConfig) -> str:
    """The model type with a decoder's attention, router, shared experts and norms; other settings may have none."""
    if c.kv_rank:
        return "deepseek_v3" if c.router == "sigmoid" else "deepseek_v2"
    if c.delta_heads:
        return "qwen3_5_moe_text"
    if c.shared_experts:
        return "qwen2_moe"
    return "qwen3_moe" if c.qk_norm else "mixtral"


def expert_settings(kind: str, t: Json) -> dict[str, Any]:
    """Fields of ``DecoderConfig`` on experts, by name, from a ``config.json`` of this model type, without missing keys.

    Raises:
      ConfigError: mmjax has no such experts; the message names the key and its value.
    """
    if kind == "mixtral":
        experts = t.get("num_experts") or t["num_local_experts"]
        return _settings(t, experts, normalised=True)
    step, fix = t["decoder_sparse_step"], "mmjax has experts in all layers but the first; 1 alone"
    require(step == 1, "config.json: decoder_sparse_step", step, fix)
    dense = sorted(t["mlp_only_layers"] or ())
    fix = "mmjax has layers without experts first, such as [0, 1]"
    require(dense == [*range(len(dense))], "config.json: mlp_only_layers", dense, fix)
    width, shared = t["moe_intermediate_size"], t["shared_expert_intermediate_size"] if kind in _WITH_SHARED else 0
    fix = f"mmjax has multiples of moe_intermediate_size, {width}"
    require(shared % width == 0, "config.json: shared_expert_intermediate_size", shared, fix)
    experts = t.get("num_local_experts") or t["num_experts"]
    fix = "transformers divides by the sum whatever it says; set it to true"
    normalised = t["norm_topk_prob"]
    require(kind not in QWEN3_VL or normalised, "config.json: norm_topk_prob", normalised, fix)
    values = _settings(t, experts, normalised=bool(t["norm_topk_prob"]))
    values |= {"expert_mlp": width, "dense_layers": len(dense)}
    return values | {"shared_experts": shared // width, "shared_gate": shared > 0}


def _settings(t: Json, experts: int, *, normalised: bool) -> dict[str, Any]:
    values = {"experts": experts, "experts_per_token": t["num_experts_per_tok"], "router_normalised": normalised}
    return values | {"router": "softmax", "router_scale": 1.0, "router_groups": 1, "router_bias": False}


def expert_config(c: DecoderConfig, kind: str) -> dict[str, Any]:
    """The entries of a ``config.json`` on a decoder's experts."""
    values: dict[str, Any] = {
        "num_experts_per_tok": c.experts_per_token,
        "router_aux_loss_coef": c.balance_loss,
        "output_router_logits": False,
    }
    if kind == "mixtral":
        return values | {"num_local_experts": c.experts, "intermediate_size": c.expert_width}
    values |= {
        "num_experts": c.experts,
        "norm_topk_prob": c.router_normalised,
        "moe_intermediate_size": c.expert_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*range(c.dense_layers)],
    }
    return values | ({"shared_expert_intermediate_size": c.shared_width} if kind in _WITH_SHARED else {})
