"""The layouts that are run elsewhere with shapes checked, here with values: config, assembly, executor, comparison.

A layout is written "tp,pp,dp". Lists are of what Megatron-LM's tests and the papers' tables run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny import layout_bindings, tiny

from mmjax.mesh.layout import Layout
from mmjax.parity import check

Changes = dict[str, Any]


def layout(text: str) -> Layout:
    """From "tp,pp,dp"."""
    tp, pp, dp = map(int, text.split(","))
    return Layout(tp=tp, pp=pp, dp=dp)


def apart(vision: str, llm: str, **changes: Any) -> Changes:
    """The encoder on ranks after the LLM's."""
    language = layout(llm)
    return layout_bindings(replace(layout(vision), rank_offset=language.size), language) | changes


def together(vision: str, llm: str, **changes: Any) -> Changes:
    """Both on the same ranks."""
    return layout_bindings(layout(vision), layout(llm)) | changes


BRIDGE = {
    f"bridge {vision} to {llm}": apart(vision, llm)
    for vision, llm in (
        ("2,1,2", "4,1,1"),
        ("4,1,1", "2,1,2"),
        ("2,1,1", "2,1,1"),
        ("4,1,1", "4,1,1"),
        ("1,1,4", "4,1,1"),
        ("4,1,1", "1,1,4"),
    )
}
COLOCATED = {
    f"colocated {vision} to {llm}, {count} microbatches{', uniform masks' * uniform}": (
        together(vision, llm, **{"Train.microbatches": count}) | {"uniform": uniform}
    )
    for vision, llm in (("2,1,4", "4,1,2"), ("4,1,2", "2,1,4"), ("4,1,2", "4,1,2"))
    for count in (1, 4)
    for uniform in (True, False)
}
PIPELINED = {
    f"1f1b {vision} to {llm}": apart(vision, llm, **{"Train.microbatches": 4})
    for vision, llm in (
        ("1,1,1", "1,1,1"),
        ("1,1,1", "1,3,1"),
        ("2,1,1", "2,3,1"),
        ("2,2,1", "2,2,1"),
        ("1,1,4", "2,2,1"),
        ("2,2,1", "1,1,4"),
        ("1,1,2", "2,3,1"),
    )
}
FROZEN = {
    f"frozen llm {llm} | {vision}": apart(vision, llm, **{"llm/Optimizer.frozen": True, "Train.clip_norm": 1.0})
    for llm, vision in (
        ("4,1,1", "4,1,1"),
        ("2,1,2", "2,1,2"),
        ("2,2,1", "4,1,1"),
        ("1,1,4", "1,1,4"),
        ("1,4,1", "4,1,1"),
        ("1,4,1", "1,1,4"),
        ("1,2,2", "2,1,2"),
        ("4,1,1", "1,1,4"),
        ("2,2,1", "2,1,2"),
        ("2,1,2", "1,1,4"),
    )
}
TRAINED = {
    f"trained llm {llm} | {vision}": apart(vision, llm, **{"Train.clip_norm": 1.0})
    for llm, vision in (
        ("4,1,1", "4,1,1"),
        ("2,1,2", "2,1,2"),
        ("2,2,1", "4,1,1"),
        ("2,2,1", "2,1,2"),
        ("1,4,1", "4,1,1"),
        ("1,4,1", "2,1,2"),
        ("1,2,2", "2,1,2"),
        ("4,1,1", "2,1,2"),
    )
}
TRAINED_TOGETHER = {  # dp doubled
    f"trained llm {llm} | {vision}, colocated": together(vision, llm, **{"Train.clip_norm": 1.0})
    for llm, vision in (("4,1,2", "4,1,2"), ("2,1,4", "2,1,4"), ("4,1,2", "2,1,4"))
}
UNEVEN = {
    f"dp {vision} to {llm}, {transport}": apart(
        f"1,1,{vision}", f"1,1,{llm}", **{"World.transport": transport, "Train.microbatches": count}
    )
    for vision, llm, count in ((2, 3, 2), (3, 2, 1), (4, 3, 3))
    for transport in ("device_put", "collective")
}
COUNTS = {
    f"{count} microbatches, {schedule}": apart(
        "1,1,2", "2,2,1", **{"Train.microbatches": count, "Train.schedule": schedule}
    )
    for count, schedule in ((1, "1f1b"), (2, "gpipe"), (3, "1f1b"), (4, "gpipe"), (8, "1f1b"), (8, "gpipe"))
}
SLICED = {
    f"sliced {vision} to {llm}, {transport}": apart(
        vision, llm, **{"World.route": "sliced", "World.transport": transport}
    )
    for vision, llm, transport in (("2,1,2", "4,1,1", "device_put"), ("4,1,1", "2,1,2", "collective"))
}
INSTANCES = {
    f"{count} optimizer instances, {name}": {**changes, "vision/Layout.optimizer_instances": count}
    for name, changes, count in (
        ("bridge 1,1,4 to 4,1,1", apart("1,1,4", "4,1,1"), 2),
        ("bridge 2,1,2 to 4,1,1", apart("2,1,2", "4,1,1"), 2),
        ("colocated 1,1,8 to 4,1,2", together("1,1,8", "4,1,2"), 4),
        ("colocated 2,1,4 to 4,1,2", together("2,1,4", "4,1,2", **{"Train.clip_norm": 1.0}), 2),
        ("vision on both llm stages", together("1,1,8", "2,2,2", **{"vision/Optimizer.frozen": True}), 2),
    )
}
PHASES: dict[str, Changes] = {
    "all at once": {"Train.schedule": "three-phase"},
    "window of 2": {"Train.schedule": "three-phase", "Train.window": 2},
    "1f1b": {"Train.schedule": "1f1b"},
}
IN_PHASES = {  # colocated, most with several LLM stages; dp doubled
    f"{vision} to {llm} together, {phases}": together(vision, llm, **{"Train.microbatches": 4}, **PHASES[phases])
    for llm, vision in (
        ("4,1,2", "4,1,2"),
        ("2,1,4", "2,1,4"),
        ("2,2,2", "4,1,2"),
        ("2,2,2", "2,1,4"),
        ("1,4,2", "4,1,2"),
        ("1,4,2", "2,1,4"),
        ("1,2,4", "2,1,4"),
        ("1,2,4", "4,1,2"),
        ("4,1,2", "2,1,4"),
    )
    for phases in PHASES
}
ONE_MICROBATCH = {
    f"{vision} to {llm} together, 1 microbatch, {phases}": together(
        vision, llm, **{"Train.microbatches": 1, "Train.schedule": PHASES[phases]["Train.schedule"]}
    )
    for vision, llm in (("2,1,4", "2,2,2"), ("4,1,2", "1,2,4"))
    for phases in ("all at once", "1f1b")
}
AWAY = {"vision/Offload.parameters": True}
OFFLOADED = {
    "2,1,4 to 2,2,2 together, offloaded": {
        **IN_PHASES["2,1,4 to 2,2,2 together, window of 2"], **AWAY, "Offload.optimizer": True, "Train.clip_norm": 1.0
    },
    "2,1,4 to 1,4,2 together, instances, offloaded": {
        **IN_PHASES["2,1,4 to 1,4,2 together, all at once"], **AWAY, "vision/Layout.optimizer_instances": 4
    },
    "4,1,2 to 4,1,2 together, offloaded": {**IN_PHASES["4,1,2 to 4,1,2 together, window of 2"], **AWAY},
    "4,1,2 to 1,2,4 together, tied, offloaded, vision frozen": {
        **IN_PHASES["4,1,2 to 1,2,4 together, window of 2"], **AWAY, "Offload.optimizer": True,
        "vision/Optimizer.frozen": True, "llm/Decoder.tied": True,
    },
    "1,1,4 to 2,2,1 apart, optimizer offloaded": apart("1,1,4", "2,2,1", **{"Offload.optimizer": True}),
}  # fmt: skip
LONG = ("2,1,4 to 2,2,2 together, offloaded", "4,1,2 to 1,2,4 together, 1 microbatch, all at once")
MATRIX = (
    IN_PHASES
    | ONE_MICROBATCH
    | OFFLOADED
    | INSTANCES
    | BRIDGE
    | SLICED
    | COLOCATED
    | PIPELINED
    | FROZEN
    | TRAINED
    | TRAINED_TOGETHER
    | UNEVEN
    | COUNTS
)


def assert_equal(changes: Changes) -> None:
    """A check of the tiny model finds no difference, and no module is left out."""
    changes = dict(changes)
    uniform, config = changes.pop("uniform", False), tiny(**changes)
    report = check(config, style="silent", uniform=uniform)
    assert report
    numbers = report.numbers()
    assert report.ok, numbers
    assert numbers["modules"].keys() == config.model.optimizers.keys()
    assert numbers["layouts"] == {name: layout.describe() for name, layout in config.model.layouts.items()}
    one_program = (
        len({layout.ranks for layout in config.model.layouts.values()}) == 1 and config.model["llm"].layout.pp == 1
    )
    one_program &= config.train.schedule == "1f1b" and not any(
        node.offload.optimizer for node in config.model.nodes.values()
    )
    assert (numbers["programs"] == 1) == one_program


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(c, id=name, marks=pytest.mark.long if name in LONG else pytest.mark.slow)
        for name, c in MATRIX.items()
    ],
)
def test_a_layout_trains_as_one_device_does(changes: Changes) -> None:
    assert_equal(changes)
