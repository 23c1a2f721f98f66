"""A generator of codes behind the LLM: layouts compared with the dense reference, alone and beside a painter.

Layouts are written "tp,pp,dp", "LLM | vision | talker"; see ``test_layouts``.
"""

from __future__ import annotations

import pytest
from test_layouts import Changes, assert_equal
from tiny import HAND, speaking

PAINTED: Changes = {**HAND, "Model.generators": {"talker": "llama", "painter": "dit"}, "painter/Layout.rank_offset": 6}
SPEAKING = {
    "speaking 2,2,1 | 1,1,2 | 1,1,2": speaking("2,2,1", "1,1,2", "1,1,2", **{"Train.microbatches": 3}),
    "speaking 1,1,2 | 1,1,1 | 2,2,1": speaking("1,1,2", "1,1,1", "2,2,1", **{"talker/Decoder.z_loss": 0.1}),
    "speaking, context parallel": speaking(
        "1,1,1",
        "1,1,1",
        "1,1,1",
        **{"llm/Layout.cp": 2, "vision/Layout.rank_offset": 2, "talker/Layout.cp": 2}
        | {"talker/Layout.rank_offset": 3},
    ),
    "speaking beside a painter": speaking("2,1,1", "1,1,2", "1,1,2") | PAINTED,
    "speaking, colocated, adapted": speaking(
        "1,2,1", "1,1,2@0", "1,1,2@0", **{"talker/Lora.rank": 2, "talker/Optimizer.frozen": True}
    ),
    "speaking, packed": speaking(
        "1,1,2", "1,1,1", "1,1,2", **{"talker/Packing.buckets": ((4, 16), (16, 16)), "llm/Packing.buckets": ((8, 40),)}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if number == 0 else pytest.mark.long)
        for number, (name, changes) in enumerate(SPEAKING.items())
    ],
)
def test_speaking(changes: Changes) -> None:
    assert_equal(changes)
