"""A process for each node or each device: what waits, and how many ops a process dispatches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from planner.models import GIGA, PLAIN, clock, model, module
from planner.test_estimate import estimated

from mmjax.mesh.layout import Layout
from mmjax.planner.node_processes import OP_SECONDS, most_ops, seconds_by_process, waiting_free
from mmjax.schedule.ops import participating_ranks

LAYOUTS = {"vision": Layout(dp=2, rank_offset=6), "llm": Layout(pp=3, tp=2)}
WORK = model(
    module("vision", 4, 0.5, output_bytes=GIGA, carried=GIGA),
    module("llm", 6, 1.0, after=("vision",), carried=GIGA),
)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("microbatches", [3, 8])
def test_the_ops_of_the_busiest_process_are_those_of_the_whole_schedule(
    devices: int, schedule: str, microbatches: int
) -> None:
    estimate = estimated(WORK, LAYOUTS, microbatches, schedule=schedule)
    counts = Counter[int]()
    whole = estimate.timeline().schedule
    for op in whole.ops:
        counts.update({rank // devices for rank in participating_ranks(whole.graph, op)})
    assert most_ops(estimate, devices) == max(counts.values())


def test_a_process_for_each_device_waits_and_dispatches_less() -> None:
    slow = replace(clock(WORK), accelerator=replace(PLAIN, link=4 * GIGA))
    estimate = replace(estimated(WORK, LAYOUTS, 8), clock=slow)
    node, device = seconds_by_process(estimate, "auto")
    assert (node.per, device.per) == ("node", "device")
    assert node.simulated < device.simulated and node.host > device.host
    assert node.host == most_ops(estimate, clock(WORK).node) * OP_SECONDS
    for transport, group in (("device_put", 0), ("collective", 1)):
        alone = replace(estimate, clock=replace(slow, process=group)).seconds
        assert [step.simulated for step in seconds_by_process(estimate, transport)] == [alone, alone]


def test_one_device_has_one_process() -> None:
    work = model(module("llm", 6, 1.0))
    assert seconds_by_process(estimated(work, {"llm": Layout()}, 4), "auto") == ()


def test_what_waits() -> None:
    assert waiting_free("auto", "node", 8) == 8
    assert waiting_free("auto", "device", 8) == 1
    assert waiting_free("auto", "device", 8, "cpu") == 0
    assert waiting_free("collective", "node", 8) == 1
    assert waiting_free("device_put", "device", 8) == 0
