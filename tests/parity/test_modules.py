"""Three modules, and features that enter several LLM layers: image and audio encoders feed one LLM, with values.

Layouts are written "tp,pp,dp"; see ``test_layouts``.
"""

from __future__ import annotations

import pytest
from test_layouts import Changes, apart, assert_equal
from tiny import four, three

# Image and audio encoders, "LLM | vision | audio"; an encoder's "@" is its first rank where it shares ranks.
MODULES = {
    f"three modules {llm} | {vision} | {audio}": three(llm, vision, audio, **{"Train.microbatches": 3})
    for llm, vision, audio in (
        ("2,2,1", "1,1,2", "1,2,1"),
        ("2,2,1", "2,1,1", "1,1,2"),
        ("1,2,2", "1,2,1", "2,1,1"),
        ("1,3,1", "1,1,2", "1,2,1"),
        ("2,1,2", "1,2,1", "1,1,2"),
        ("2,2,1", "1,1,4", "1,2,2@4"),  # encoders on the same ranks, one of them pipelined
        ("2,2,1", "2,1,2", "1,1,4@4"),
        ("2,2,1", "1,1,2@0", "1,2,1"),  # vision on the LLM's first stage
        ("1,2,2", "1,1,2@2", "2,1,2@4"),  # vision on its second
        ("2,1,4", "1,1,8@0", "4,1,2@0"),  # all on all ranks
        ("2,2,2", "1,1,4@0", "2,2,1@4"),
    )
} | {
    "three modules, one without a gradient": three(
        "2,2,1", "1,1,2", "1,2,1", **{"audio/Optimizer.frozen": True, "audio_projector/Optimizer.frozen": True}
    ),
    "three modules, learned positions, buckets": three(
        "2,2,1",
        "1,1,2",
        "1,2,1",
        **{"audio/Whisper.positions": "learned", "audio/Packing.buckets": ((4, 36), (16, 36))},
    ),
}
# Features that enter LLM layers again; the LLM has four.
INJECTED = {
    "injected, unequal encoder pp": three(
        "2,2,1", "1,1,2", "1,2,1", **{"vision/Projector.inject": (0, 2), "Train.microbatches": 3}
    ),
    "injected, unequal encoder pp, drawing": four(
        "2,2,1", "1,1,1", "1,2,1", "1,1,1", **{"vision/Projector.inject": (0, 2), "Train.microbatches": 3}
    ),
    "injected by both encoders": three(
        "1,3,1", "1,2,1", "1,1,2", **{"vision/Projector.inject": (1, 3), "audio/Projector.inject": (2, 3)}
    ),
    "injected, colocated": three("2,2,2", "1,1,4@0", "2,2,1@4", **{"audio/Projector.inject": (0, 1, 3)}),
    "injected, one program": three("2,1,4", "1,1,8@0", "4,1,2@0", **{"vision/Projector.inject": (1, 2)}),
    "injected, from a frozen encoder into a frozen llm": apart(
        "1,2,1",
        "2,2,1",
        **{
            "vision/Projector.inject": (0, 3),
            "vision/Optimizer.frozen": True,
            "llm/Optimizer.frozen": True,
            "llm/Decoder.remat": "full",
        },
    ),
    "injected into every layer, sliced": apart(
        "1,1,4",
        "2,2,1",
        **{"vision/Projector.inject": (0, 1, 2, 3), "World.route": "sliced", "World.transport": "collective"},
    ),
}
# Encoders, LLM and a generator, "LLM | vision | audio | painter".
DRAWING = {
    f"drawing {llm} | {vision} | {audio} | {painter}": four(
        llm, vision, audio, painter, **{"Train.microbatches": 3, "Train.clip_norm": 1.0}
    )
    for llm, vision, audio, painter in (
        ("2,2,1", "1,1,1", "1,2,1", "1,1,1"),  # unequal encoder pp
        ("2,2,1", "1,1,1", "1,1,1", "1,1,2"),
        ("2,2,1", "1,1,1", "1,1,1", "1,2,1"),
        ("2,2,1", "1,1,1", "1,1,1", "2,1,1"),
        ("1,2,1", "1,1,1", "1,1,1", "1,1,4"),
        ("1,2,2", "1,1,2", "2,1,1@4", "1,1,2@6"),  # encoders on the same ranks
        ("2,2,1", "1,1,2", "1,1,2@4", "1,1,2@4"),  # the generator on theirs
        ("2,2,1", "1,1,2", "1,2,1", "1,1,4@0"),  # on all of the LLM's
        ("2,2,1", "1,1,2@0", "1,2,1", "1,1,2@2"),  # on its last stage
        ("2,1,4", "1,1,8@0", "4,1,2@0", "1,1,8@0"),  # all on all ranks
        ("2,2,2", "1,1,4@0", "2,2,1@4", "2,2,2@0"),
    )
} | {
    f"drawing, {name}": four("2,2,1", "1,1,1", "1,1,1", "1,1,2", **{"Train.microbatches": 4, **changes})
    for name, changes in {
        "zb-h1": {"Train.schedule": "zb-h1"},
        "interleaved": {"Train.schedule": "interleaved", "llm/Layout.chunks": 2},
        "eager": {"Train.schedule": "eager-1f1b"},
        "llm frozen": {"llm/Optimizer.frozen": True},
        "painter frozen": {"painter/Optimizer.frozen": True, "painter_projector/Optimizer.frozen": True},
        "collective": {"World.transport": "collective", "llm/Decoder.tied": True},
    }.items()
}
MATRIX: dict[str, Changes] = MODULES | INJECTED | DRAWING
LONG = "injected, unequal encoder pp, drawing"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(c, id=name, marks=pytest.mark.long if name == LONG else pytest.mark.slow)
        for name, c in MATRIX.items()
    ],
)
def test_three_modules_train_as_one_device_does(changes: Changes) -> None:
    assert_equal(changes)
