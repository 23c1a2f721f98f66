"""Heads of other shapes in layers without a window, keys as values, and experts beside the mlp, as in Gemma 4, under
layouts and schedules."""

from __future__ import annotations

from tiny import ADAPTERS, NESTED, SPLIT, TWO_STAGES, Changes, cases, layouts, tiny

from mmjax.config import load_config
from mmjax.parity import check
from mmjax.parity.shrink import shrink

DENSE: Changes = {
    "llm/Decoder.layers": 4,
    "llm/Decoder.head_dim": 8,
    "llm/Decoder.global_head_dim": 16,
    "llm/Decoder.global_kv_heads": 2,
    "llm/Decoder.keys_as_values": True,
    "llm/Decoder.qk_norm": True,
    "llm/Decoder.v_norm": True,
    "llm/Decoder.post_norms": True,
    "llm/Decoder.layer_scalar": True,
    "llm/Decoder.scaled_embed": True,
    "llm/Decoder.activation": "gelu",
    "llm/Decoder.tied": True,
    # Scores that are hardly divided, and norms of a few small numbers, make much of rounding errors.
    "llm/Decoder.score_width": 16.0,
    "llm/Decoder.norm_eps": 1e-3,
    "llm/Decoder.logit_cap": 2.0,
    "llm/Decoder.window": 6,
    "llm/Decoder.full_every": 2,
    "llm/Decoder.local_rope_theta": 100.0,
    "llm/Decoder.rope_scaling": "proportional",
    "llm/Decoder.rope_share": 0.5,
}
EXPERTS: Changes = DENSE | {
    "llm/Decoder.experts": 4,
    "llm/Decoder.expert_mlp": 24,
    "llm/Decoder.mlp_beside_experts": True,
    "llm/Decoder.router_norm": True,
    "llm/Decoder.expert_scale": True,
    "llm/Decoder.balance_loss": 0.1,
}

SHARED: Changes = DENSE | {
    "llm/Decoder.kv_shared_layers": 2,
    "llm/Decoder.kv_shared_mlp": 80,
}
IN_STAGE: Changes = {"llm/Decoder.kv_shared_layers": 1, "llm/Layout.layers": (1, 3)}
PER_LAYER: Changes = SHARED | {"llm/Decoder.per_layer_width": 12, "llm/Decoder.norm_eps": 0.1}


THREE: Changes = {"Train.schedule": "three-phase", "Train.microbatches": 4, "vision/Layout.lanes": 2}
MATRIX: dict[str, Changes] = {
    "two stages, zb-h1": DENSE | TWO_STAGES | SPLIT,
    "cp and tp": DENSE | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "cp by rings": DENSE | layouts(4, {"dp": 2}, cp=2, pp=2, cp_way="ring"),
    "nested, lanes": DENSE | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "adapters": DENSE | TWO_STAGES | ADAPTERS,
    "more ranks than heads": DENSE | layouts(4, {"dp": 2}, tp=4),
    "sharded parameters": DENSE | layouts(4, {"dp": 2}, dp=2, tp=2, shard="parameters"),
    "products kept, unrolled": DENSE | TWO_STAGES | {"llm/Decoder.remat": "dots", "Train.unroll": True},
    "experts, two stages, zb-h1": EXPERTS | TWO_STAGES | SPLIT,
    "experts, cp, ep": EXPERTS | layouts(4, {"dp": 2}, cp=2, tp=2, ep=2),
    "experts, three-phase": EXPERTS | layouts(0, {"tp": 2}, pp=2, tp=2) | THREE,
    "experts, adapters": EXPERTS | TWO_STAGES | ADAPTERS,
    "experts, sharded parameters": EXPERTS | layouts(4, {"dp": 2}, dp=2, tp=2, shard="parameters"),
    "shared keys, zb-h1": SHARED | TWO_STAGES | SPLIT | IN_STAGE,
    "shared keys, cp and tp": SHARED | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "shared keys, cp by rings": SHARED | layouts(4, {"dp": 2}, cp=2, cp_way="ring"),
    "shared keys, nested": SHARED | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED | IN_STAGE,
    "shared keys, recomputed, unrolled": SHARED
    | layouts(2, {"dp": 2}, tp=2)
    | {"llm/Decoder.remat": "full", "Train.unroll": True},
    "shared keys, adapters": SHARED | TWO_STAGES | ADAPTERS | IN_STAGE,
    "inputs of layers, cp and tp": PER_LAYER | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "inputs of layers, three-phase": PER_LAYER
    | layouts(0, {"dp": 2, "tp": 2}, dp=2, tp=2)
    | {"Train.schedule": "three-phase", "Train.microbatches": 4},
    "inputs of layers, zb-h1, adapters": PER_LAYER | layouts(2, {"pp": 2}, tp=2) | SPLIT | ADAPTERS,
    "inputs of layers, sharded parameters": PER_LAYER | layouts(4, {"dp": 2}, dp=2, tp=2, shard="parameters"),
    "inputs of layers, recomputed, unrolled": PER_LAYER
    | layouts(2, {"dp": 2}, tp=2)
    | {"llm/Decoder.remat": "full", "Train.unroll": True},
    "two layers on one device": EXPERTS | layouts(0, {}) | {"llm/Decoder.layers": 2},
}


@cases(MATRIX)
def test_they_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()


def test_a_published_model_becomes_small_but_keeps_its_layers() -> None:
    """Layers with and without a window, whose heads differ, and experts beside the mlp."""
    lines = ["llm/Decoder.preset='gemma4-26b-a4b'", "llm/Layout.pp=2", "vision/Layout.rank_offset=2"]
    lines += ["llm/Layout.dp=1", "llm/Layout.tp=1", "vision/Layout.dp=1"]
    llm = shrink(load_config([], lines), 2, 261).recipe.model.llm.settings
    assert (llm.layers, llm.window, llm.full_every, llm.local_rope_theta) == (4, 8, 4, 10000.0)
    assert (llm.kv_heads, llm.global_kv_heads, llm.head_dim, llm.global_head_dim) == (2, 1, 8, 32)
    assert llm.keys_as_values and llm.mlp_beside_experts and llm.experts == 8 and llm.rotated_pairs == 4
