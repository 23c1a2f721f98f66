"""Latent attention trains under layouts, schedules and adapters as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import bindings, speaking, tiny

from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.parity import check
from mmjax.parity.shrink import shrink

Changes = dict[str, Any]
LITE: Changes = {  # as DeepSeek-V2-Lite: queries without a latent, and YaRN that changes the softmax's scale
    "llm/Decoder.kv_heads": 8,
    "llm/Decoder.head_dim": 0,
    "llm/Decoder.kv_rank": 10,
    "llm/Decoder.nope_head_dim": 5,
    "llm/Decoder.rope_head_dim": 4,
    "llm/Decoder.v_head_dim": 3,
    "llm/Decoder.rope_scaling": "yarn",
    "llm/Decoder.rope_factor": 4.0,
    "llm/Decoder.rope_context": 16,
    "llm/Decoder.rope_mscale": 0.7,
    "llm/Decoder.rope_mscale_all": 1.3,
}
FULL: Changes = LITE | {  # as DeepSeek-V3, with experts behind a dense layer
    "llm/Decoder.q_rank": 14,
    "llm/Decoder.experts": 8,
    "llm/Decoder.experts_per_token": 3,
    "llm/Decoder.expert_mlp": 20,
    "llm/Decoder.shared_experts": 1,
    "llm/Decoder.dense_layers": 1,
    "llm/Decoder.router": "sigmoid",
    "llm/Decoder.router_scale": 2.5,
    "llm/Decoder.router_groups": 4,
    "llm/Decoder.router_group_limit": 2,
    "llm/Decoder.router_bias": True,
    "llm/Decoder.balance_loss": 0.05,
    "llm/Layout.layers": (),
    "Train.clip_norm": 0.5,
}
MODELS = {"lite": LITE, "full": FULL}


def llm(vision: int = 2, **degrees: Any) -> Changes:
    """A layout of the LLM, and the encoder on ranks behind it."""
    changes: Changes = {f"llm/Layout.{name}": value for name, value in degrees.items()}
    return changes | {"vision/Layout.dp": vision, "vision/Layout.rank_offset": Layout(**degrees).size}


SPLIT: Changes = {"Train.schedule": "zb-h1"}
ADAPTERS: Changes = {"llm/Lora.rank": 2, "llm/Lora.targets": ("attn/*",)}
FAST: dict[str, Changes] = {
    "lite, tp and pp": LITE | llm(tp=2, pp=2),
}
LAYOUTS: dict[str, Changes] = {
    "one device": {},
    "tp 4": llm(tp=4),
    "tp without sp": llm(tp=2, sp=False),
    "tp with overlap": llm(tp=2, overlap=True),
    "tp and dp": llm(tp=2, dp=2),
    "cp and tp": llm(cp=2, tp=2),
    "cp by need": llm(cp=2, cp_way="need"),
    "cp by rings, pp": llm(cp=2, pp=2, cp_way="ring"),
    "cp by all-to-all": llm(cp=2, cp_way="all-to-all"),
    "cp and dp, zigzag": llm(cp=2, dp=2, cp_tokens="zigzag"),
    "pp 4": llm(pp=4),
    "chunks": llm(pp=2, chunks=2),
    "zb-h1": llm(tp=2, pp=2) | SPLIT,
    "zb-h1 without sp": llm(tp=2, pp=2, sp=False) | SPLIT,
    "zb-h1, adapters of a frozen model": llm(tp=2, pp=2) | SPLIT | ADAPTERS | {"llm/Optimizer.frozen": True},
    "adapters without sp": llm(tp=2, sp=False) | ADAPTERS,
    "one program": {"llm/Layout.tp": 2, "llm/Layout.dp": 2, "vision/Layout.dp": 4},
    "full recomputation": llm(tp=2) | {"llm/Decoder.remat": "full"},
    "products kept": llm(tp=2) | {"llm/Decoder.remat": "dots"},
    "products kept, unrolled": llm(tp=2) | {"llm/Decoder.remat": "dots", "Train.unroll": True},
    "dense attention": llm(tp=2) | {"llm/Decoder.attention": "dense"},
    "window": llm(cp=2) | {"llm/Decoder.window": 9, "llm/Decoder.full_every": 2},
    "rules": llm(cp=2) | {"llm/Decoder.mask": "text sees all before; vision sees vision in item"},
    "three axes of positions": llm(tp=2) | {"llm/Decoder.rope_sections": (1, 0, 1)},
    "sharded parameters": llm(tp=2, dp=2, shard="parameters"),
    "sharded gradients": llm(dp=4, shard="gradients"),
}
LONG = {f"{model}, {name}": MODELS[model] | layout for model in MODELS for name, layout in LAYOUTS.items()}
LONG |= {
    "lite, cp": LITE | llm(cp=2),
    "full, adapters": FULL | llm(tp=2) | ADAPTERS,
    "full, ep": FULL | llm(dp=2, ep=2),
    "full, ep, cp and tp": FULL | llm(cp=2, tp=2, ep=2),
    "a talker": speaking("2,1,1", "1,1,2", "2,1,1")
    | {name.replace("llm/", "talker/"): value for name, value in LITE.items() if "heads" not in name}
    | {"talker/Decoder.heads": 4, "talker/Decoder.kv_heads": 4, "talker/Decoder.kv_rank": 6},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, id=name) for name, changes in FAST.items()),
        *(pytest.param(changes, id=name, marks=pytest.mark.long) for name, changes in LONG.items()),
    ],
)
def test_latent_attention_trains_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()


def test_a_published_model_becomes_small_but_keeps_its_latents() -> None:
    """Queries and values of different widths, and groups of experts; and the small configuration is legal."""
    lines = [line for line in bindings() if not line.startswith("llm/Decoder")]
    lines += ["llm/Decoder.preset='deepseek-v3'", "llm/Layout.tp=2", "vision/Layout.rank_offset=2"]
    small = shrink(load_config([], lines), 2, 261).recipe.model.llm.settings
    assert (small.heads, small.kv_heads, small.head_dim, small.head_width, small.value_width) == (4, 4, 0, 14, 5)
    assert (small.kv_rank, small.q_rank, small.router_groups, small.rope_mscale_all) == (12, 20, 4, 1.0)
