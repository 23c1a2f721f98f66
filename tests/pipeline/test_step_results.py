"""What a step says of itself on the host: losses over denominators, norms, and the seeds that losses start from."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from mmjax.mesh.layout import Layout
from mmjax.models.module import Loss
from mmjax.pipeline.executor import Executor, StagePrograms, StepResult, loss_seeds
from mmjax.pipeline.place import PlacedModel
from mmjax.schedule.ops import Op
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import Costs

MODULES = (*toy.MODULES, "hand")


def result(totals: jax.Array | None, denominators: dict[str, float]) -> StepResult:
    """Of two microbatches on two dp ranks."""
    llm = [jnp.array([[1.0, 30.0], [2.0, 20.0]]), jnp.array([[3.0, 10.0], [4.0, 20.0]])]
    losses = {"llm": llm, "hand": [jnp.array([[5.0]]), jnp.array([[7.0]])]}
    kinds = {"llm": {"loss": Loss(), "size": Loss(weight=0.0, per="rows")}, "hand": {"loss": Loss(weight=0.5)}}
    return StepResult(losses, totals, {**denominators, "rows": 8.0}, kinds, ("eye", "llm", "hand"))


def test_losses_are_sums_over_their_denominators() -> None:
    step = result(jnp.array([[4.0, 0.25, 9.0]]), {"llm": 4.0, "hand": 3.0})
    assert step.fetch_losses() == {"llm/loss": 2.5, "llm/size": 10.0, "hand/loss": 4.0}
    assert step.fetch() == (4.5, {"eye": 2.0, "llm": 0.5, "hand": 3.0})
    with pytest.raises(FrozenInstanceError):
        step.totals = None  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loss_that_a_step_has_nothing_for_is_zero() -> None:
    assert result(None, {"llm": 4.0, "hand": 0.0}).fetch() == (2.5, {})


def test_losses_are_summed_in_double_precision() -> None:
    """In fp32 a billion would not change by one."""
    sums = jnp.array([[1e9, 1.0, 1.0, 1.0]]).T
    step = StepResult({"llm": [sums]}, None, {"llm": 1.0}, {"llm": {"loss": Loss()}}, ("llm",))
    assert step.fetch_losses() == {"llm/loss": 1e9 + 3}


def model() -> PlacedModel:
    """The toy, on one device, of which nothing is compiled here."""
    layouts = {name: Layout() for name in MODULES}
    return toy.placed(layouts, toy.optimizers(), hand=0.3)


def test_a_loss_is_seeded_with_its_weight_over_its_denominator() -> None:
    placed = model()
    seeds = loss_seeds(placed, {"llm": 4.0, "hand": 0.0, "rows": 0.5})
    assert {name: seed.tolist() for name, seed in seeds.items()} == {
        "llm.0": [0.25, np.float32(0.2), 0.0],
        "hand.0": [0.0],
    }
    assert {seed.dtype for seed in seeds.values()} == {np.dtype(np.float32)}
    assert loss_seeds(placed, {"llm": 4.0, "hand": 2.0, "rows": 1.0})["hand.0"].tolist() == [np.float32(0.15)]
    with pytest.raises(ValueError, match=r"^llm: a loss is divided by 'llm'; use one of \['eye', 'rows'\]$"):
        loss_seeds(placed, {"eye": 1.0, "rows": 1.0})
    for counts in ({"llm": 0.0, "hand": 0.0, "rows": 0.0}, {"llm": 0.0, "hand": 0.0, "rows": 0.0, "eye": 1.0}):
        with pytest.raises(ValueError, match=r"^every denominator is 0: a step needs something with a loss$"):
            loss_seeds(placed, counts)


def test_programs_of_a_stage_are_listed_in_the_order_in_which_they_run() -> None:
    placed = model()
    (_, numbers), *_ = toy.batch(0, (1,))
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), numbers)
    for shapes, kinds in ((placed.trace(avals), "FB"), (placed.trace(avals, placed.graph.with_split()), "FBW")):
        programs = StagePrograms("eye.0", shapes.stages["eye.0"]).programs
        assert [program.name for program in programs] == [f"{kind} eye.0" for kind in kinds]


def test_programs_of_a_step_are_listed_in_its_order() -> None:
    """As progress shows them: stages, edges there and back, tied weights likewise, then what runs once."""
    layouts = {"eye": Layout(dp=2), "ear": Layout(rank_offset=2), "llm": Layout(pp=2, rank_offset=3)}
    placed = toy.placed(layouts, toy.optimizers(frozen=("ear",)), transport="collective")
    graph = placed.graph
    order = make_schedule("gpipe", graph, 2, Costs.nominal(graph, move=0.01, once=0.01))
    executor = Executor(placed, order, dict(toy.batch(0, (1,))))
    assert [program.name for program in executor.programs()] == [
        *(f"{kind} {stage}" for stage in ("eye.0", "ear.0", "llm.0", "llm.1") for kind in "FB"),
        *("eye.0->ear.0 forward move 0-2", "eye.0->ear.0 forward unpack"),
        *("eye.0->ear.0 backward pack", "eye.0->ear.0 backward move 0-2"),
        *("eye.0->llm.0 forward move 0-3", "eye.0->llm.0 forward unpack"),
        *("eye.0->llm.0 backward pack", "eye.0->llm.0 backward move 0-3"),
        *("ear.0->llm.0 forward move 2-3", "ear.0->llm.0 backward move 2-3"),
        *("llm.0->llm.1 forward move 3-4", "llm.0->llm.1 backward move 3-4"),
        *(f"llm/ends/{x} {way} move 3-4" for x in ("bias", "down", "up") for way in ("forward", "backward")),
        *("prepare eye.0", "reduce eye.0", "reduce llm.0", "reduce llm.1"),
        *("update eye.0", "update llm.0", "update llm.1", "norm world"),
    ]
    executor.walker.signatures = [(("eye", 1),)]
    executor.walker.weights(Op(kind="W", stage="eye.0", microbatch=0))
    assert executor.sums == {}, "where no weight is left for W there is nothing to do"
    losses = executor._loss_aval("llm.1")
    assert (losses.shape, losses.dtype, executor._loss_aval("eye.0")) == ((1, 3), jnp.float32, None)
