"""Which ops a process dispatches, and what it has in its hands, seen from one process: the devices are planned ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mmjax.jax_compat import PlannedDevice
from mmjax.mesh.world import World
from mmjax.pipeline.walker import Walker
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import ONCE, WORLD, Op
from mmjax.schedule.placements import TimedModule, apart

VISION, LLM = TimedModule(name="vision", layers=1, seconds=1.0), TimedModule(name="llm", layers=2, seconds=1.0)
GRAPH: StageGraph = apart((VISION,), LLM, {"vision": 1, "llm": 2}).graph
EDGE = GRAPH.out_edges("vision.0")[0].name
PREPARES = [Op(kind="prepare", stage=stage, microbatch=ONCE) for stage in ("vision.0", "llm.0", "llm.1")]
"""On ranks 0, 1 and 2."""
MOVE = Op(kind="move", stage="llm.0", microbatch=0, edge=EDGE)
"""From rank 0 to rank 1."""
ENDING = Op(kind="norm", stage=WORLD, microbatch=ONCE)


def walker(*owners: int, me: int = 0) -> tuple[Walker, list[Op]]:
    """For devices of these processes, and what it dispatches."""
    with mock.patch("mmjax.jax_compat.process_index", lambda: me):
        world = World(PlannedDevice(rank, process_index=owner) for rank, owner in enumerate(owners))
    placed: Any = SimpleNamespace(world=world, ties={}, stages={})
    made, ran = Walker(placed, GRAPH, {}), []
    made.handlers = dict.fromkeys(("prepare", "move", "norm"), ran.append)
    return made, ran


@pytest.mark.parametrize(
    ("owners", "me", "runs"),
    [
        ((0, 0, 0), 0, [*PREPARES, MOVE, ENDING]),
        ((0, 1, 1), 0, [PREPARES[0], MOVE, ENDING]),
        ((0, 1, 1), 1, [PREPARES[1], PREPARES[2], MOVE, ENDING]),
        ((0, 0, 1), 1, [PREPARES[2], ENDING]),
        ((0, 1, 2), 1, [PREPARES[1], MOVE, ENDING]),
        ((0, 0, 0, 1), 1, [ENDING]),  # no module is on its device
    ],
)
def test_a_process_dispatches_what_touches_its_devices(owners: tuple[int, ...], me: int, runs: list[Op]) -> None:
    made, ran = walker(*owners, me=me)
    ops = [*PREPARES, MOVE, ENDING]
    for _ in range(2):  # the second time it knows
        made.walk(ops)
    assert ran == runs * 2
    assert [made.is_local(op) is True for op in ops] == [op in runs for op in ops]


def test_what_may_put_ops_off_is_given_them_all_and_finishes_last() -> None:
    made, ran = walker(0, 1, 1)
    said: list[Any] = []
    awaiting = mock.MagicMock(side_effect=said.append)
    awaiting.finish = lambda: said.append("finished")
    made.walk([*PREPARES, ENDING], awaiting)
    assert said == [PREPARES[0], ENDING, "finished"] and not ran
    assert made.in_order is False


def test_where_one_process_has_all_the_graph_is_not_asked() -> None:
    for owners, asked in (((0, 0, 0), 0), ((0, 1, 1), 1)):
        made, _ = walker(*owners)
        with mock.patch("mmjax.pipeline.walker.participating_ranks", return_value=(0,)) as ranks:
            made.walk([PREPARES[0]] * 3)
        assert ranks.call_count == asked  # once for an op, however often it is walked


def test_keys_of_an_op_are_made_once() -> None:
    made, _ = walker(0, 0, 0)
    keys = made.keys(MOVE)
    assert made.keys(MOVE) is keys
    assert (keys.stage, keys.place, keys.source) == (("llm.0", 0), "llm.0", "vision.0")
    assert (keys.carried, keys.between) == ((EDGE, 0, False), EDGE)
    middle = made.keys(Op("B", "llm.0", 3))
    ahead = GRAPH.out_edges("llm.0")[0].name
    assert middle.activations == ((ahead, 3, False),) and middle.gradients == (("vision.0", (EDGE, 3, True)),)
    assert (middle.between, middle.source) == ("", "")
    ending = made.keys(ENDING)
    assert (ending.place, ending.activations, ending.gradients) == ("", (), ())


@pytest.mark.parametrize(("source", "target"), [(True, True), (True, False), (False, True)])
def test_only_a_process_with_the_receiver_keeps_what_was_moved(source: bool, target: bool) -> None:
    made, _ = walker(0, 1, 1)
    transfer = SimpleNamespace(move=lambda packed: tuple(x * 2 for x in packed), target=SimpleNamespace(local=target))
    made.boundaries = {(EDGE, ()): SimpleNamespace(forward=transfer)}  # pyright: ignore[reportAttributeAccessIssue]
    made.signatures = [()]
    key = (EDGE, 0, False)
    if source:
        made.in_transit[key] = (np.ones(2),)
    made.move(MOVE)
    assert (key in made.in_transit) == target
    if target:
        assert [x.tolist() for x in made.in_transit[key]] == ([[2.0, 2.0]] if source else [])


def test_weights_of_a_tie_leave_with_the_states_that_own_them() -> None:
    """Prediction lends one set of states after another: of a stage that is not among them nothing travels."""
    made, _ = walker(0, 1, 1)
    made.graph = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        ties=[SimpleNamespace(name="embed", src="llm.0"), SimpleNamespace(name="head", src="llm.1")]
    )
    with mock.patch("mmjax.pipeline.walker.moved", lambda x, _: x):
        made.lend({"llm.0": {"master": {"embed": 1.0, "other": 2.0}}})  # pyright: ignore[reportArgumentType]
    assert made.in_transit == {("embed", ONCE, False): 1.0}
