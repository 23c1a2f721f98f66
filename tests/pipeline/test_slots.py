"""Slots and registers: a plan is run with names in place of arrays, and every op must find the values that it reads."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.pipeline.single.lanes import LaneBlock
from mmjax.pipeline.single.slots import Across, Register, Segment, Send, SlotOp, SlotPlan, plan
from mmjax.schedule.graph import EdgeNode, StageGraph, StageNode
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs


def block(*shape: int) -> LaneBlock:
    return LaneBlock(shape, np.dtype("float32"), ("dp",))


ACTIVATION, WEIGHT, LOSS = block(4, 8), block(8, 8), block(1)
KEPT = (block(4, 3), block(4, 8), block(4, 3))  # the second is of the activations' kind


def chain(lanes: int, chunks: int, microbatches: int, name: str) -> Schedule:
    """An encoder on all ranks, which is trained, and an LLM over lanes."""
    count = lanes * chunks
    nodes = [StageNode(name="eye.0", module="eye", index=0, ranks=tuple(range(lanes)))]
    nodes += [StageNode(name=f"llm.{i}", module="llm", index=i, ranks=(i % lanes,)) for i in range(count)]
    names = [node.name for node in nodes]
    edges = [EdgeNode(name=f"{a}->{b}", src=a, dst=b, kind="async") for a, b in pairwise(names)]
    graph = StageGraph(stages=tuple(nodes), edges=tuple(edges))
    return make_schedule(name, graph, microbatches, Costs.nominal(graph, move=0.1))


def items(schedule: Schedule, lanes: int) -> list[SlotOp | Across]:
    """What the ops of a chain do; a stage's later chunks keep less."""
    graph, result, begun = schedule.graph, [], set()
    for op in schedule.ops:
        if op.kind not in "FB":
            continue
        back = op.kind == "B"
        edges = graph.in_edges(op.stage) if back else graph.out_edges(op.stage)
        received = graph.out_edges(op.stage) if back else graph.in_edges(op.stage)
        lane = lane_of(op.stage, lanes)
        others = [edge.src if back else edge.dst for edge in edges]
        sends = [Send(key=(op.kind, o, op.microbatch), blocks=(ACTIVATION,), lane=lane_of(o, lanes)) for o in others]
        carry = ("F", op.stage, op.microbatch)
        taken = [(op.kind, op.stage, op.microbatch)] if received else []
        if lane is None:
            given = tuple(send for send in sends if send.lane is not None)
            result.append(Across(op=op, takes=tuple(taken) if back else (), gives=given))
            continue
        kept, sums, state = ("kept", op.stage, op.microbatch), ("sums", op.stage), ("state", op.stage)
        if back:
            reads = [state, carry, kept, *taken, *([sums] if op.stage in begun else [])]
            begun.add(op.stage)
            writes, drops = {sums: (WEIGHT,)}, [carry, kept, *taken]
        else:
            reads, writes, drops = [state, *taken], {kept: KEPT[: 1 + len(KEPT) - op.stage.count("1")]}, []
            if graph.gives_loss(op.stage):
                sends.append(Send(key=("loss", op.microbatch), blocks=(LOSS,), lane=None))
        result.append(
            SlotOp(op=op, lane=lane, reads=tuple(reads), writes=writes, drops=tuple(drops), sends=tuple(sends))
        )
    return result


def lane_of(stage: str, lanes: int) -> int | None:
    module, index = stage.split(".")
    return None if module == "eye" else int(index) % lanes


def run(made: SlotPlan, lanes: int) -> tuple[list[Op], dict[LaneBlock, int]]:
    """Runs a plan on names: a register holds, by lane, the value's key and the number of its array."""
    held: dict[Register, dict[int, object]] = defaultdict(dict)
    for (lane, key), registers in made.pinned.items():
        for i, register in enumerate(registers):
            held[register][lane] = (key, i)
    left, order, most = set(), [], defaultdict(int)
    for part in made.parts:
        if isinstance(part, Across):
            assert left >= set(part.takes), "what an op across the lanes takes has left them"
            order.append(part.op)
            continue
        for arrival in part.arrivals:
            for i, register in enumerate(arrival.registers):
                if not arrival.shared:
                    assert not set(held[register]) - {arrival.lane}
                held[register][arrival.lane] = (arrival.key, i)
        for slot in part.slots:
            assert slot.ops.keys() <= set(range(lanes))
            for lane, item in slot.ops.items():
                order.append(item.op)
                assert slot.reads[lane].keys() == set(item.reads)
                for key, registers in slot.reads[lane].items():
                    assert [held[r][lane] for r in registers] == [(key, i) for i in range(len(registers))], item.op
            for lane, item in slot.ops.items():
                for key in item.drops:
                    for register in slot.reads[lane][key]:
                        del held[register][lane]
            for lane in slot.ops:
                own = [*slot.writes[lane].items()]
                own += [(slot.ops[lane].sends[i].key, registers) for i, registers in slot.stays[lane]]
                for key, registers in own:
                    for i, register in enumerate(registers):
                        assert held[register].get(lane, (key, i)) == (key, i), f"{key} overwrites another value"
                        held[register][lane] = (key, i)
            for hop in slot.hops:
                assert len({a for a, _ in hop.pairs}) == len({b for _, b in hop.pairs}) == len(hop.pairs)
                for sender, receiver in hop.pairs:
                    number, array = hop.sources[sender]
                    send = slot.ops[sender].sends[number]
                    assert (send.lane, send.blocks[array]) == (receiver, hop.block) and sender != receiver
                    register, over = hop.targets[receiver]
                    assert receiver not in held[register], "what arrives overwrites nothing"
                    assert over or not held[register], "what arrives leaves other lanes' values alone"
                    held[register][receiver] = (send.key, array)
            for register in slot.dead:
                assert not held.pop(register, None), "a dead register holds nothing"
            counts = defaultdict(int)
            for (kind, _), by_lane in held.items():
                counts[kind] += bool(by_lane)
            most = {kind: max(counts[kind], most.get(kind, 0)) for kind in {*counts, *most}}
        left |= {key for key, _ in part.departures}
    return order, most


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.sampled_from(("1f1b", "gpipe")))
def test_every_op_finds_what_it_reads_and_lanes_keep_their_order(lanes, chunks, microbatches, name) -> None:
    schedule = chain(lanes, chunks if lanes > 1 else 1, microbatches, name)
    item = items(schedule, lanes)
    stages = [node.name for node in schedule.graph.stages[1:]]
    pinned = {(int(stage[4:]) % lanes, ("state", stage)): (WEIGHT, WEIGHT) for stage in stages}
    made = plan(item, pinned, lanes)
    order, _ = run(made, lanes)
    assert sorted(map(str, order)) == sorted(str(item.op) for item in item)
    for lane in range(lanes):
        mine = lambda op, lane=lane: lane_of(op.stage, lanes) in (lane, None)  # noqa: E731
        assert [op for op in order if mine(op)] == [item.op for item in item if mine(item.op)]
    loss = [key for part in made.parts if isinstance(part, Segment) for key, _ in part.departures if key[0] == "loss"]
    assert sorted(loss) == [("loss", m) for m in range(microbatches)]


def test_registers_are_as_many_as_the_fullest_lane_needs() -> None:
    """In 1F1B the first of four lanes has four microbatches in flight; a shared array per slot would be eight."""
    schedule = chain(4, 1, 8, "1f1b")
    schedule = Schedule(graph=schedule.graph, microbatches=8, ops=schedule.ops, name="1f1b")
    item = [item for item in items(schedule, 4) if isinstance(item, SlotOp)]
    # Without the encoder: its activations are there.
    item = [
        SlotOp(op=w.op, lane=w.lane, reads=tuple(k for k in w.reads if k[:2] != ("F", "llm.0")), writes=w.writes,
             drops=tuple(k for k in w.drops if k[:2] != ("F", "llm.0")), sends=w.sends)
        for w in item
    ]  # fmt: skip
    made = plan(item, {(lane, ("state", f"llm.{lane}")): (WEIGHT,) for lane in range(4)}, 4)
    (segment,) = made.parts
    assert isinstance(segment, Segment)
    assert len(segment.slots) == 2 * (8 + 4 - 1), "as many slots as the closed form of 1F1B with equal costs"
    assert made.registers[KEPT[0]] == 2 * 4
    assert run(made, 4)[1][KEPT[0]] == 2 * 4


def test_a_value_that_is_not_there_is_named() -> None:
    op = Op("F", "llm.0", 0)
    with pytest.raises(ValueError, match=r"F llm.0 microbatch 0 on lane 1 reads \('carry',\), which is not there"):
        plan([SlotOp(op=op, lane=1, reads=(("carry",),))], {}, 2)
