"""Norms behind branches, soft caps, two rotary bases and pooled tokens, as in Gemma, its fourth tower, layers without
positions, as in SmolLM3, and norms behind branches alone and of all heads, as in OLMo 2 and 3, under layouts and
schedules."""

from __future__ import annotations

from tiny import ADAPTERS, NESTED, SPLIT, TWO_STAGES, Changes, cases, layouts, tiny

from mmjax.config import load_config
from mmjax.parity import check
from mmjax.parity.shrink import shrink

DECODER: Changes = {
    "llm/Decoder.layers": 4,
    "llm/Decoder.norm_plus_one": True,
    "llm/Decoder.post_norms": True,
    "llm/Decoder.scaled_embed": True,
    "llm/Decoder.activation": "gelu",
    "llm/Decoder.tied": True,
    "llm/Decoder.score_width": 5.0,
    "llm/Decoder.window": 6,
}
GEMMA3: Changes = DECODER | {
    "llm/Decoder.qk_norm": True,
    "llm/Decoder.mask": "gemma3",
    "llm/Decoder.full_every": 3,
    "llm/Decoder.local_rope_theta": 100.0,
    "llm/Decoder.rope_scaling": "linear",
    "llm/Decoder.rope_factor": 8.0,
    "vision/Projector.kind": "linear",
    "vision/Projector.hidden": 0,
    "vision/Projector.norm": "rms_plus_one",
    "vision/Projector.bias": False,
    "vision/Projector.pool": True,
}
PALIGEMMA2: Changes = DECODER | {
    "llm/Decoder.mask": "paligemma",
    "llm/Decoder.full_every": 2,
    "llm/Decoder.nope_every": 2,
    "llm/Decoder.score_cap": 1.0,
    "llm/Decoder.logit_cap": 2.0,
}


TOWER: Changes = {
    "vision/ViT.positions": "learned_xy+rope_xy",
    "vision/ViT.patch_bias": False,
    "vision/ViT.bias": False,
    "vision/ViT.qk_norm": True,
    "vision/ViT.v_norm": True,
    "vision/ViT.score_width": 1.0,
    "vision/ViT.norm": "rms",
    "vision/ViT.last_norm": False,
    "vision/ViT.post_norms": True,
    "vision/ViT.clipped": True,
    "vision/ViT.output": "standardised",
    "vision/ViT.gated": True,
    "vision/Projector.kind": "linear",
    "vision/Projector.hidden": 0,
    "vision/Projector.norm": "rms_plain",
    "vision/Projector.bias": False,
    "vision/Projector.pool": True,
}
"""A tower and an embedder as in Gemma 4."""


OLMO3: Changes = {
    **{"llm/Decoder.layers": 4, "llm/Decoder.pre_norms": False, "llm/Decoder.post_norms": True},
    **{"llm/Decoder.qk_norm": True, "llm/Decoder.qk_norm_whole": True, "llm/Decoder.window": 6},
    **{"llm/Decoder.full_every": 2, "llm/Decoder.local_rope_theta": 100.0},
    "llm/Decoder.norm_eps": 1e-2,  # initial branches are small, and with 1e-5 their norms enlarge rounding
}
MATRIX: dict[str, Changes] = {
    "two stages, zb-h1": GEMMA3 | TWO_STAGES | SPLIT,
    "caps, cp and tp": PALIGEMMA2 | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "one device": GEMMA3 | layouts(0, {}),
    "nested, lanes": GEMMA3 | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "cp by rings": GEMMA3 | layouts(4, {"dp": 2}, cp=2, cp_way="ring"),
    "adapters": GEMMA3 | TWO_STAGES | ADAPTERS,
    "caps, cp by rings, two stages": PALIGEMMA2 | layouts(4, {"dp": 2}, cp=2, pp=2, cp_way="ring"),
    "caps, two stages, zb-h1": PALIGEMMA2 | TWO_STAGES | SPLIT,
    "caps, nested, lanes": PALIGEMMA2 | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "caps, full recomputation": PALIGEMMA2 | TWO_STAGES | {"llm/Decoder.remat": "full"},
    "products kept, unrolled": GEMMA3 | TWO_STAGES | {"llm/Decoder.remat": "dots", "Train.unroll": True},
    "sharded parameters": PALIGEMMA2 | layouts(4, {"dp": 2}, dp=2, tp=2, shard="parameters"),
    "tp with overlap": GEMMA3 | layouts(2, {"dp": 2}, tp=2, overlap=True),
    "latent attention with a cap": layouts(2, {"dp": 2}, tp=2)
    | {"llm/Decoder.score_cap": 1.0, "llm/Decoder.kv_rank": 8, "llm/Decoder.nope_head_dim": 8}
    | {
        "llm/Decoder.rope_head_dim": 4,
        "llm/Decoder.head_dim": 0,
        "llm/Decoder.kv_heads": 8,
    },
}
MATRIX |= {
    "a part of each head rotates, cp and tp": layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2)
    | {"llm/Decoder.rope_share": 0.5, "llm/Decoder.window": 6},
    "norms behind alone, two stages, zb-h1": OLMO3 | TWO_STAGES | SPLIT,
    "norms behind alone, cp and tp": OLMO3 | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "norms behind alone, nested, lanes": OLMO3 | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "norms behind alone, more ranks than key heads": OLMO3 | layouts(4, {"dp": 2}, tp=4) | {"llm/Decoder.kv_heads": 2},
    "norms behind alone, tp with overlap": OLMO3 | layouts(2, {"dp": 2}, tp=2, overlap=True),
    "norms behind alone, sharded": OLMO3 | layouts(4, {"dp": 2}, dp=2, tp=2, shard="parameters"),
    "norms behind alone, adapters": OLMO3 | TWO_STAGES | ADAPTERS,
    "tower, tp and pp, zb-h1": TOWER | TWO_STAGES | SPLIT,
    "tower, cp and tp": TOWER | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "tower, dp and remat": TOWER | layouts(2, {"dp": 2}, tp=2) | {"vision/ViT.remat": "full"},
    "tower, nested, lanes": TOWER | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "tower, sharded parameters": TOWER | layouts(4, {"dp": 2, "tp": 2, "shard": "parameters"}, dp=2, tp=2),
    "tower, adapters": TOWER
    | layouts(4, {"pp": 2, "tp": 2}, tp=2)
    | {"vision/Lora.rank": 2, "vision/Lora.targets": ("attn/*", "mlp/*"), "vision/Optimizer.frozen": True},
    "tower, registers without a class token": TOWER | layouts(4, {"tp": 2}, tp=2) | {"vision/ViT.registers": 2},
    "tower, a class token, registers and products kept": TOWER
    | layouts(4, {"tp": 2}, tp=2)
    | {"vision/ViT.class_token": True, "vision/ViT.registers": 3, "vision/ViT.remat": "dots"},
}
MATRIX["two layers on one device"] = PALIGEMMA2 | layouts(0, {}) | {"llm/Decoder.layers": 2}


@cases(MATRIX)
def test_they_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()


def test_a_published_model_becomes_small_but_keeps_its_layers() -> None:
    """Layers with and without a window, and a mean of patches before a norm and one matrix."""
    lines = ["vision/ViT.preset='siglip-so400m-14-896'", "llm/Decoder.preset='gemma3-27b'", "llm/Layout.pp=2"]
    lines += ["vision/Projector.kind='linear'", "vision/Projector.norm='rms_plus_one'", "vision/Projector.bias=False"]
    lines += ["vision/Projector.pool=True", "vision/ViT.merge=4", "vision/Layout.rank_offset=2", "llm/Layout.dp=1"]
    lines += ["llm/Layout.tp=1", "vision/Layout.dp=1"]
    small = shrink(load_config([], lines), 2, 261).recipe.model
    llm, projector = small.llm.settings, small.projectors["vision"].settings
    assert (llm.layers, llm.window, llm.full_every, llm.local_rope_theta) == (4, 8, 4, 10000.0)
    assert llm.post_norms and llm.scaled_embed and llm.score_width and llm.mask == "gemma3"
    assert projector.pool and not projector.bias and projector.norm == "rms_plus_one"
