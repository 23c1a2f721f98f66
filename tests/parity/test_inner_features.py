"""Outputs of an encoder's inner layers, each with a projector of its own, enter layers of the LLM under every layout.

The LLM's sections of M-RoPE are interleaved, and the tower has learned and rotary positions, as in Qwen3-VL. With two
stages both of the LLM's have layers that features enter, and both of the tower's have layers that they leave.
"""

from __future__ import annotations

import pytest
from tiny import NESTED, TWO_STAGES, Changes, layouts, tiny

from mmjax.config import load_config
from mmjax.parity import check
from mmjax.parity.shrink import shrink

DENSE: Changes = {
    "vision/ViT.layers": 4,
    "vision/ViT.positions": "learned2d+axial",
    "vision/ViT.grid": 5,
    "vision/ViT.interpolate": "corners",
    "vision/ViT.frames": 2,
    "vision/ViT.last_norm": False,
    "vision/Projector.norm": "layer",
    "vision/Projector.activation": "gelu_exact",
    "vision/Projector.inject": (1, 2, 3),
    "vision/Projector.levels": (0, 2, 3),
    "llm/Decoder.qk_norm": True,
    "llm/Decoder.head_dim": 16,
    "llm/Decoder.rope_sections": (3, 3, 2),
    "llm/Decoder.rope_interleaved": True,
}
EXPERTS: Changes = DENSE | {
    "llm/Decoder.experts": 4,
    "llm/Decoder.experts_per_token": 2,
    "llm/Decoder.expert_mlp": 24,
    "llm/Decoder.balance_loss": 0.05,
}


PHASED: Changes = {"Train.schedule": "three-phase", "Train.microbatches": 4, "Train.window": 2}
MATRIX: dict[str, Changes] = {
    "two stages of both": DENSE | TWO_STAGES,
    "experts, ep and cp": EXPERTS | layouts(4, {"cp": 2}, dp=2, cp=2, ep=2),
    "one device": DENSE | layouts(0, {}),
    "two stages of both, zb-h1": DENSE | TWO_STAGES | {"Train.schedule": "zb-h1", "Train.clip_norm": 0.5},
    "cp of both": DENSE | layouts(4, {"cp": 2, "tp": 2}, cp=2, tp=2),
    "cp by rings, two stages": DENSE | layouts(4, {"dp": 3}, cp=2, pp=2, cp_way="ring"),
    "cp, a projector with RMSNorm": DENSE | layouts(2, {"dp": 2}, cp=2) | {"vision/Projector.norm": "rms"},
    "nested, lanes": DENSE | layouts(0, {"tp": 2}, pp=2, tp=2) | NESTED,
    "nested, lanes, experts": EXPERTS | layouts(0, {"dp": 2}, pp=2, dp=2, ep=2) | NESTED,
    "in three phases": DENSE | layouts(0, {"dp": 4}, pp=2, tp=2) | PHASED,
    "in three phases, offloaded": DENSE
    | layouts(0, {"dp": 4}, pp=2, tp=2)
    | PHASED
    | {"vision/Offload.parameters": True},
    "lanes with phases, offloaded": DENSE
    | layouts(0, {"tp": 2, "lanes": 2}, pp=2, tp=2)
    | {"Train.schedule": "encoders-first", "Train.microbatches": 4, "vision/Offload.parameters": True},
    "chunks": DENSE | layouts(2, {"dp": 2}, pp=2, chunks=2) | {"Train.schedule": "interleaved"},
    "full recomputation": DENSE | TWO_STAGES | {"llm/Decoder.remat": "full", "vision/ViT.remat": "full"},
    "unrolled, products kept": DENSE | TWO_STAGES | {"llm/Decoder.remat": "dots", "Train.unroll": True},
    "one program": DENSE | layouts(0, {"dp": 4}, tp=2, dp=2),
    "sharded parameters": DENSE | layouts(4, {"dp": 2, "shard": "parameters"}, dp=2, tp=2, shard="parameters"),
    "adapters": DENSE
    | TWO_STAGES
    | {"llm/Lora.rank": 2, "llm/Lora.targets": ("attn/*",), "llm/Optimizer.frozen": True},
    "vision frozen": DENSE | TWO_STAGES | {"vision/Optimizer.frozen": True},
    "experts, ep, two stages": EXPERTS | layouts(4, {"pp": 2}, pp=2, dp=2, ep=2) | {"Train.schedule": "zb-h1"},
}


@pytest.mark.long
@pytest.mark.parametrize("changes", MATRIX.values(), ids=MATRIX)
def test_inner_features_train_as_on_one_device(changes: Changes) -> None:
    report = check(tiny(**changes), style="silent")
    assert report and report.ok, report and report.numbers()


def test_a_published_model_becomes_small_but_keeps_what_enters_its_layers() -> None:
    lines = ["vision/ViT.preset='qwen3-vl-8b'", "llm/Decoder.preset='qwen3-vl-30b-a3b'", "llm/Layout.pp=2"]
    lines += ["vision/Projector.inject=(1, 2, 3)", "vision/Projector.levels=(8, 16, 24)", "vision/Layout.rank_offset=2"]
    found = load_config([], lines)
    small = shrink(found, 2, 261).recipe
    llm, tower, projector = small.model.llm.settings, small.model["vision"].settings, small.model.projectors["vision"]
    assert llm.rope_interleaved and llm.rope_sections == (2, 1, 1) and llm.head_width == 8 and llm.layers == 4
    assert tower.positions == "learned2d+axial" and tower.interpolate == "corners"
    assert projector.settings.inject and len(projector.settings.levels) == len(projector.settings.inject)
