"""A generator of recordings behind the LLM: layouts compared with the dense reference, alone and beside a painter.

Recordings end inside of patches. Layouts are written "tp,pp,dp", "LLM | vision | talker"; see ``test_layouts``.
"""

from __future__ import annotations

import pytest
from test_layouts import Changes, assert_equal
from tiny import HAND, cases, sounding

QUERIES: Changes = {"talker/SoundDiT.queries": 2, "talker/SoundDiT.merge": 1}
TWO: Changes = {
    **HAND,
    "Model.generators": {"painter": "dit", "talker": "sound-dit"},
    "llm/Decoder.vocab": 263,
    "painter/Layout.rank_offset": 6,
    "painter/Layout.dp": 2,
}
PROCESS: Changes = {
    "talker/SoundDiT.process": "ddpm",
    "talker/SoundDiT.prediction": "v",
    "talker/SoundDiT.sampler": "ddim",
    "talker/SoundDiT.min_snr": 5.0,
    "talker/SoundDiT.drop_condition": 0.5,
}
LAYOUTS = {
    "sounding 2,2,1 | 1,1,1 | 2,1,1": sounding("2,2,1", "1,1,1", "2,1,1", **{"Train.microbatches": 3}),
    "sounding on one device": sounding("1,1,1", "1,1,1@0", "1,1,1@0"),
    "sounding, one program": sounding("2,1,2", "2,1,2@0", "2,1,2@0"),
    "sounding 1,1,2 | 1,1,1 | 1,2,2": sounding("1,1,2", "1,1,1", "1,2,2"),
    "sounding, context parallel": sounding("2,1,1", "1,1,2", "1,1,1", **{"talker/Layout.cp": 2}),
    "sounding, zb-h1, a process": sounding("1,2,1", "1,1,2", "2,2,1", **PROCESS | {"Train.schedule": "zb-h1"}),
    "sounding, nested": sounding(
        "1,2,2",
        "1,1,1@0",
        "2,1,1@0",
        **{"Train.schedule": "nested", "Train.microbatches": 4, "vision/Layout.lanes": 4, "talker/Layout.lanes": 2},
    ),
    "sounding, queries": sounding("1,2,1", "1,1,2", "1,1,2", **QUERIES),
    "sounding, queries, tp": sounding("1,1,2", "1,1,1", "2,1,1", **QUERIES | {"talker/Layout.sp": False}),
    "sounding, adapted": sounding(
        "1,2,1", "1,1,2@0", "1,1,2@0", **{"talker/Lora.rank": 2, "talker/Optimizer.frozen": True}
    ),
    "sounding beside a painter": sounding("2,1,1", "1,1,2", "1,1,2") | TWO,
    "sounding beside a painter, zb-h1": sounding("1,2,1", "1,1,2", "2,1,1") | TWO | {"Train.schedule": "zb-h1"},
    "sounding, packed": sounding(
        "1,1,2", "1,1,1", "1,1,2", **{"talker/Packing.buckets": ((4, 16), (16, 40)), "llm/Packing.buckets": ((8, 40),)}
    ),
}


@pytest.mark.long
@cases(LAYOUTS, "sounding 2,2,1 | 1,1,1 | 2,1,1")
def test_sounding(changes: Changes) -> None:
    assert_equal(changes)
