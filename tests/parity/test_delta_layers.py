"""Decoders with gated delta layers train under layouts, schedules and adapters as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import bindings, tiny

from mmjax.config import load_config
from mmjax.mesh.layout import Layout
from mmjax.parity import check
from mmjax.parity.shrink import shrink

Changes = dict[str, Any]
DELTA: Changes = {  # as Qwen3.5: three of four layers, here one of two
    "llm/Decoder.qk_norm": True,
    "llm/Decoder.norm_plus_one": True,
    "llm/Decoder.attention_gate": True,
    "llm/Decoder.head_dim": 8,
    "llm/Decoder.rope_share": 0.25,
    "llm/Decoder.delta_heads": 4,
    "llm/Decoder.delta_value_heads": 8,
    "llm/Decoder.delta_key_dim": 6,
    "llm/Decoder.delta_value_dim": 5,
    "llm/Decoder.attention_every": 2,
    "Train.clip_norm": 0.5,
}


def llm(vision: int = 2, **degrees: Any) -> Changes:
    """A layout of the LLM, and the encoder on ranks behind it."""
    changes: Changes = {f"llm/Layout.{name}": value for name, value in degrees.items()}
    return changes | {"vision/Layout.dp": vision, "vision/Layout.rank_offset": Layout(**degrees).size}


SPLIT: Changes = {"Train.schedule": "zb-h1"}
IN_ORDER: Changes = {"cp_tokens": "contiguous"}
ADAPTERS: Changes = {"llm/Lora.rank": 2, "llm/Lora.targets": ("attn/*", "delta/*")}
FAST: dict[str, Changes] = {"cp and tp": llm(cp=2, tp=2, **IN_ORDER)}
LAYOUTS: dict[str, Changes] = {
    "tp and pp, zb-h1": llm(tp=2, pp=2) | SPLIT,
    "one device": {},
    "tp 4": llm(tp=4),
    "tp without sp": llm(tp=2, sp=False),
    "tp with overlap": llm(tp=2, overlap=True),
    "tp and dp": llm(tp=2, dp=2),
    "tp and pp": llm(tp=2, pp=2),
    "pp 4": llm(pp=4),
    "chunks": llm(pp=2, chunks=2),
    "cp 3 and pp": llm(cp=3, pp=2, **IN_ORDER),
    "cp 4": llm(cp=4, **IN_ORDER),
    "cp and pp, zb-h1": llm(cp=2, pp=2, **IN_ORDER) | SPLIT,
    "cp, tp and pp": llm(8, cp=2, tp=2, pp=2, **IN_ORDER) | {"vision/Layout.rank_offset": 0},
    "cp and dp": llm(cp=2, dp=2, **IN_ORDER),
    "cp without sp": llm(cp=2, tp=2, sp=False, **IN_ORDER),
    "zb-h1 without sp": llm(tp=2, pp=2, sp=False) | SPLIT,
    "zb-h1, adapters of a frozen model": llm(tp=2, pp=2) | SPLIT | ADAPTERS | {"llm/Optimizer.frozen": True},
    "adapters": llm(tp=2) | ADAPTERS,
    "one program": {"llm/Layout.tp": 2, "llm/Layout.dp": 2, "vision/Layout.dp": 4},
    "full recomputation": llm(tp=2) | {"llm/Decoder.remat": "full"},
    "products kept": llm(tp=2) | {"llm/Decoder.remat": "dots"},
    "products kept, unrolled": llm(tp=2) | {"llm/Decoder.remat": "dots", "Train.unroll": True},
    "sharded parameters": llm(tp=2, dp=2, shard="parameters"),
    "sharded gradients": llm(dp=4, shard="gradients"),
    "optimizer on the host": llm(dp=2) | {"llm/Offload.optimizer": True},
    "experts": llm(tp=2) | {"llm/Decoder.experts": 4, "llm/Decoder.shared_experts": 1, "llm/Decoder.shared_gate": True},
    "three of four": llm(tp=2, pp=2) | {"llm/Decoder.attention_every": 4, "llm/Decoder.norm_eps": 1e-3},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, id=name) for name, changes in FAST.items()),
        *(pytest.param(changes, id=name, marks=pytest.mark.long) for name, changes in LAYOUTS.items()),
    ],
)
def test_delta_layers_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**(DELTA | changes)), style="silent")
    assert report and report.ok, report and report.numbers()


@pytest.mark.long
def test_a_published_model_becomes_small_but_keeps_its_layers() -> None:
    """Three of four layers, value heads that share a key head, and a rotated part of a head; and it trains as on one
    device.
    """
    lines = [line for line in bindings() if not line.startswith("llm/Decoder")]
    lines += ["llm/Decoder.preset='qwen3.5-9b'", "llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.rank_offset=4"]
    config = load_config([], lines)
    small = shrink(config, 2, 261).recipe.model.llm.settings
    assert (small.layers, small.delta.heads, small.delta.value_heads, small.head_width) == (4, 4, 8, 32)
    assert [small.has_delta(layer) for layer in range(4)] == [True, True, True, False]
    assert (small.rotary_width, small.delta_key_dim, small.delta_value_dim) == (8, 6, 5)
    report = check(config, style="silent")
    assert report and report.ok, report and report.numbers()
