"""A generator with streams of condition and picture behind the LLM: layouts compared with the dense reference.

Layouts are written "tp,pp,dp", "LLM | vision | painter"; see ``test_layouts``.
"""

from __future__ import annotations

import pytest
from test_layouts import Changes, assert_equal
from tiny import cases, streams, tiny

from mmjax.configurable import ConfigError

SHARDS: Changes = {"painter/Layout.shard": "parameters"}
ADAPTERS: Changes = {
    "painter/Lora.rank": 2,
    "painter/Lora.targets": ("attention", "modulation/kernel", "condition_mlp/*"),
    "painter/Optimizer.frozen": True,
}
SEEING: Changes = {"painter/MMDiT.references": 2, "painter/MMDiT.drop_condition": 0.3}
NESTED: Changes = {"Train.schedule": "nested", "Train.microbatches": 4}
LAYOUTS = {
    "streams 1,2,1 | 1,1,2 | 2,2,1": streams("1,2,1", "1,1,2", "2,2,1", **{"Train.microbatches": 3}),
    "streams on one device": streams("1,1,1", "1,1,1@0", "1,1,1@0"),
    "streams 2,1,2, one program": streams("2,1,2", "2,1,2@0", "2,1,2@0"),
    "streams 2,1,1 | 1,1,1 | 1,1,3": streams("2,1,1", "1,1,1", "1,1,3"),
    "streams, chunks": streams(
        "1,2,1",
        "1,1,1",
        "1,2,1",
        **{"Train.schedule": "interleaved", "Train.microbatches": 4}
        | {f"{name}/Layout.chunks": 2 for name in ("llm", "painter")}
        | {"painter/MMDiT.layers": 4},
    ),
    "streams, zb-h1, remat": streams(
        "1,2,1", "1,1,2", "1,2,2", **{"Train.schedule": "zb-h1", "painter/MMDiT.remat": "full"}
    ),
    "streams, nested": streams(
        "1,2,2", "1,1,1@0", "2,1,1@0", **NESTED | {"vision/Layout.lanes": 4, "painter/Layout.lanes": 2}
    ),
    "streams, three phases": streams("2,1,2", "1,1,4@0", "1,1,4@0", **{"Train.schedule": "three-phase"}),
    "streams, shards, tp": streams("1,1,2", "1,1,2", "2,1,2", **SHARDS),
    "streams, shards in chunks": streams("1,2,1", "1,1,2", "1,2,2", **SHARDS | {"painter/MMDiT.remat": "dots"}),
    "references 1,2,1 | 1,1,2 | 2,2,1": streams("1,2,1", "1,1,2", "2,2,1", **SEEING),
    "references, three phases": streams("2,1,2", "1,1,4@0", "1,1,4@0", **SEEING | {"Train.schedule": "three-phase"}),
    "references on one device": streams("1,1,1", "1,1,1@0", "1,1,1@0", **SEEING),
    "streams, frozen llm": streams("1,2,1", "1,1,2", "2,1,2", **{"llm/Optimizer.frozen": True, "Train.clip_norm": 0.5}),
    "streams, frozen": streams("1,2,1", "1,1,2", "1,2,2", **{"painter/Optimizer.frozen": True}),
    "streams, adapted": streams("1,2,1", "1,1,2", "2,2,1", **ADAPTERS),
    "streams, without sp": streams("1,1,2", "1,1,2", "4,1,1", **{"painter/Layout.sp": False}),
    "streams, buckets": streams("1,1,2", "1,1,2", "1,1,2", **{"painter/Packing.buckets": ((8, 10), (16, 34))}),
}


@cases(LAYOUTS)
def test_streams(changes: Changes) -> None:
    assert_equal(changes)


def test_ranks_of_tp_have_equal_parts_of_the_condition() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(**streams("1,1,1", "1,1,1", "2,1,1", **{"painter/MMDiT.queries": 3}))
    assert str(caught.value).startswith(
        "painter/MMDiT.queries=3: painter/Layout.tp=2 ranks share its places; use a mult"
    )
