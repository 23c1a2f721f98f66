"""Whole steps of a small made-up model against one device: losses, norms, parameters and moments, by value.

What ``test_parity`` shows with real modules is shown here in a second or two, with edges that those have not: one
activation that leaves twice, two that arrive together, and a gradient that is their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import numpy as np
import parity
import pytest
import toy

from mmjax import reference
from mmjax.mesh.layout import Layout
from mmjax.pipeline import zero
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.one_program import OneProgramExecutor
from mmjax.pipeline.place import PlacedModel
from mmjax.pipeline.single.executor import SingleExecutor
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.trees import by_name
from mmjax.schedule.ops import Op

APART = {"eye": Layout(dp=2, rank_offset=4), "ear": Layout(rank_offset=6), "llm": Layout(tp=2, pp=2)}
CHUNKED = {**APART, "llm": Layout(tp=2, pp=2, chunks=2)}
# Numbers of layers that no even split has: most of them first, or last, or in a chunk in the middle.
FRONT = {**APART, "llm": Layout(tp=2, pp=2, layers=(4, 1))}
UNEVEN_CHUNKS = {**APART, "llm": Layout(tp=2, pp=2, chunks=2, layers=(1, 1, 2, 1))}
SIDE_BY_SIDE = {"eye": Layout(dp=2, tp=2), "ear": Layout(dp=4), "llm": Layout(dp=2, tp=2)}
# Optimizer instances: dp cut in two, or into single ranks, and a weight that two such stages share.
GROUPS = {
    "eye": Layout(dp=4, tp=2, optimizer_instances=2),
    "ear": Layout(dp=4, optimizer_instances=4),
    "llm": Layout(dp=4, pp=2, optimizer_instances=2),
}
GROUPS_SIDE_BY_SIDE = {
    "eye": Layout(dp=2, tp=2, optimizer_instances=2),
    "ear": Layout(dp=4, optimizer_instances=2),
    "llm": Layout(dp=4, optimizer_instances=2),
}

# A hand behind the LLM: on ranks of its own, on the LLM's, on some of them, and on lanes.
HAND_APART = {
    "eye": Layout(),
    "ear": Layout(rank_offset=1),
    "llm": Layout(tp=2, pp=2, rank_offset=2),
    "hand": Layout(dp=2, rank_offset=6),
}
HAND_DEEP = {**HAND_APART, "hand": Layout(pp=2, rank_offset=6)}
HAND_BESIDE = {"eye": Layout(), "ear": Layout(), "llm": Layout(tp=2, pp=2), "hand": Layout(dp=2, pp=2)}
HAND_SIDE_BY_SIDE = {**SIDE_BY_SIDE, "hand": Layout(dp=4)}
HAND_ON_LANES = {"eye": Layout(dp=4), "ear": Layout(dp=2), "llm": Layout(dp=2, pp=2), "hand": Layout(dp=2, pp=2)}
# The eye spans both lanes, the ear is on the first.
ON_LANES = {"eye": Layout(dp=4, tp=2), "ear": Layout(dp=2, tp=2), "llm": Layout(dp=2, tp=2, pp=2)}
# An eye and an ear in each stage of the LLM.
COPIES = {
    "eye": Layout(copies=2, dp=2, optimizer_instances=2),
    "ear": Layout(copies=2, dp=2),
    "llm": Layout(dp=2, pp=2),
}
ALL_RUNS = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Executor, id="program per op", marks=pytest.mark.long),
        pytest.param(StraightExecutor, id="straight line"),
        pytest.param(SingleExecutor, id="single", marks=pytest.mark.long),
    ],
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to run the toy; ``padded`` pads leaves that are too small for it otherwise."""

    layouts: Mapping[str, Layout] = field(default_factory=lambda: APART)
    run: type[toy.Run] = Executor
    buckets: tuple[int, ...] = (1, 2, 1)
    schedule: str = "1f1b"
    split: bool = False
    frozen: tuple[str, ...] = ()
    clip_norm: float = 0.0
    decay: float = 0.0
    padded: bool = False
    hand: float = 1.0  # the weight of the hand's loss

    @property
    def modules(self) -> tuple[str, ...]:
        """Of the model."""
        return tuple(self.layouts)


CASES = {
    "apart": Case(clip_norm=0.4, decay=0.1, padded=True),
    "apart, gpipe, ear frozen": Case(schedule="gpipe", frozen=("ear",)),
    "apart, eye frozen": Case(frozen=("eye",)),
    "one program": Case(
        layouts=SIDE_BY_SIDE, run=StraightExecutor, buckets=(2, 2, 2), clip_norm=0.4, decay=0.1, padded=True
    ),
    "one program, llm frozen, 1 microbatch": Case(
        layouts={"eye": Layout(tp=2), "ear": Layout(tp=2), "llm": Layout(tp=2)},
        run=StraightExecutor,
        buckets=(1,),
        frozen=("llm",),
    ),
    "program per op": Case(layouts=SIDE_BY_SIDE),
    "chunks": Case(layouts=CHUNKED, clip_norm=0.4, decay=0.1),
    "chunks, interleaved": Case(layouts=CHUNKED, schedule="interleaved", buckets=(1, 2, 1, 1)),
    "chunks, gpipe": Case(layouts=CHUNKED, schedule="gpipe"),
    "uneven": Case(layouts=FRONT, clip_norm=0.4, decay=0.1),
    "uneven, zb-h1, llm frozen": Case(layouts=FRONT, schedule="zb-h1", frozen=("llm",)),
    "uneven chunks, interleaved": Case(layouts=UNEVEN_CHUNKS, schedule="interleaved", buckets=(1, 2, 1, 1)),
    "instances": Case(layouts=GROUPS, clip_norm=0.4, decay=0.1, padded=True),
    "instances, ear frozen": Case(layouts=GROUPS, frozen=("ear",)),
    "instances, one program": Case(
        layouts=GROUPS_SIDE_BY_SIDE, run=StraightExecutor, buckets=(2, 2, 2), clip_norm=0.4, decay=0.1, padded=True
    ),
    "copies": Case(layouts=COPIES, schedule="encoders-first", clip_norm=0.4, decay=0.1, padded=True),
    "zb-h1": Case(schedule="zb-h1", clip_norm=0.4, decay=0.1, padded=True),
    "zb-h1, eye frozen": Case(schedule="zb-h1", frozen=("eye",)),
    "split": Case(schedule="gpipe", split=True),
    "split, chunks, ear frozen": Case(layouts=CHUNKED, schedule="gpipe", split=True, frozen=("ear",)),
    "split, llm frozen": Case(schedule="gpipe", split=True, frozen=("llm",)),
    "split, same devices": Case(layouts=SIDE_BY_SIDE, schedule="gpipe", split=True),
    "hand": Case(layouts=HAND_DEEP, hand=0.3, clip_norm=0.4, decay=0.1),
    "hand, gpipe, llm frozen": Case(layouts=HAND_APART, schedule="gpipe", frozen=("llm",)),
    "hand, eager, hand frozen": Case(layouts=HAND_APART, schedule="eager-1f1b", frozen=("hand",)),
    "hand alone trained": Case(layouts=HAND_DEEP, frozen=("eye", "ear", "llm")),
    "hand, zb-h1": Case(layouts=HAND_BESIDE, schedule="zb-h1", hand=0.3),
    "hand, interleaved": Case(
        layouts={**HAND_DEEP, "llm": Layout(pp=2, chunks=2, rank_offset=2)},
        schedule="interleaved",
        buckets=(1, 2, 1, 1),
    ),
    "hand, three phases": Case(layouts={**ON_LANES, "hand": Layout(dp=2, tp=2)}, schedule="three-phase", hand=0.3),
    "hand, one program": Case(
        layouts=HAND_SIDE_BY_SIDE, run=StraightExecutor, buckets=(2, 2, 2), hand=0.3, clip_norm=0.4
    ),
    "single, hand": Case(layouts=HAND_ON_LANES, run=SingleExecutor, buckets=(2, 2), hand=0.3, clip_norm=0.4),
    "single, hand on all lanes": Case(
        layouts={**HAND_ON_LANES, "hand": Layout(tp=2, dp=2)},
        run=SingleExecutor,
        buckets=(2, 2),
        frozen=("ear",),
        hand=0.3,
    ),
    "single": Case(layouts=ON_LANES, run=SingleExecutor, buckets=(2, 2, 2), clip_norm=0.4, decay=0.1, padded=True),
    "single, llm frozen, 1 microbatch": Case(layouts=ON_LANES, run=SingleExecutor, buckets=(2,), frozen=("llm",)),
    "single, ear frozen, gpipe": Case(
        layouts=ON_LANES, run=SingleExecutor, buckets=(2, 2), frozen=("ear",), schedule="gpipe"
    ),
    "single, eye frozen, five stages": Case(
        layouts={"eye": Layout(tp=5), "ear": Layout(), "llm": Layout(pp=5)},
        run=SingleExecutor,
        buckets=(1,) * 6,
        frozen=("eye",),
    ),
    "single, chunks": Case(
        layouts={"eye": Layout(dp=2), "ear": Layout(), "llm": Layout(pp=2, chunks=2)},
        run=SingleExecutor,
        buckets=(1,) * 4,
        clip_norm=0.4,
    ),
    "single, uneven": Case(
        layouts={**ON_LANES, "llm": Layout(dp=2, tp=2, pp=2, layers=(4, 1))}, run=SingleExecutor, buckets=(2, 2)
    ),
    "single, uneven chunks": Case(
        layouts={"eye": Layout(dp=2), "ear": Layout(), "llm": Layout(pp=2, chunks=2, layers=(1, 1, 2, 1))},
        run=SingleExecutor,
        buckets=(1,) * 4,
    ),
    "single, instances": Case(
        layouts={**GROUPS, "ear": Layout(dp=4, optimizer_instances=2)},
        run=SingleExecutor,
        buckets=(2, 2),
        clip_norm=0.4,
        padded=True,
    ),
    "single, ear on all lanes": Case(  # its backward reads what its forward received from a lane
        layouts={**ON_LANES, "eye": Layout(dp=2, tp=2), "ear": Layout(dp=4, tp=2)}, run=SingleExecutor, buckets=(2, 2)
    ),
    "single, three phases": Case(layouts=ON_LANES, run=SingleExecutor, buckets=(2, 2, 2), schedule="three-phase"),
    "single, zb-h1": Case(layouts=ON_LANES, run=SingleExecutor, buckets=(1,) * 4, schedule="zb-h1", padded=True),
    "single, split, eye frozen": Case(
        layouts=ON_LANES, run=SingleExecutor, buckets=(2, 2), schedule="gpipe", split=True, frozen=("eye",)
    ),
}
SHORT = {"single", "zb-h1"}
"""The cases of `make test`."""
SLOW = {
    "program per op",
    "uneven",
    "uneven chunks, interleaved",
    "chunks",
    "chunks, gpipe",
    "uneven, zb-h1, llm frozen",
    "zb-h1, eye frozen",
    "split",
    "instances, ear frozen",
    "instances, one program",
    "split, chunks, ear frozen",
    "split, llm frozen",
    "split, same devices",
    "hand, gpipe, llm frozen",
    "hand, eager, hand frozen",
    "hand alone trained",
    "hand, interleaved",
    "hand, three phases",
    "hand, one program",
} | {name for name in CASES if name.startswith("single, ")}


def _weighted(leaves: Any, part: Any, factors: Mapping[str, Any]) -> tuple[Any, Any]:
    losses = toy.dense_losses(leaves, part)
    return sum(factor * losses[name] for name, factor in factors.items()), losses


VALUE_AND_GRAD = jax.jit(jax.value_and_grad(_weighted, has_aux=True))


def factors_of(counts: Mapping[str, float], hand: float) -> dict[str, float]:
    """Weights of the losses over their denominators."""
    kinds = {
        f"{module}/{name}": (module, kind)
        for module in counts
        if module in toy.LOSSES
        for name, kind in toy.LOSSES[module].items()
    }
    weights = {name: hand if name == "hand/loss" else kind.weight for name, (_, kind) in kinds.items()}
    return {name: weights[name] / counts[kind.per or module] for name, (module, kind) in kinds.items()}


@cache
def initial(modules: tuple[str, ...]) -> tuple[toy.Leaves, PlacedModel]:
    """Parameters before the first step, as one device makes them, and the model there."""
    model = toy.placed(dict.fromkeys(modules, Layout()), toy.optimizers(modules))
    states = {name: stage.state.initialise(jax.random.key(toy.SEED)) for name, stage in model.stages.items()}
    return parity.of_kind(toy.logical(model, states), "params"), model


@cache
def wanted(
    buckets: tuple[int, ...],
    frozen: tuple[str, ...],
    clip_norm: float,
    decay: float,
    modules: tuple[str, ...] = toy.MODULES,
    hand: float = 1.0,
) -> tuple[list[float], list[dict[str, float]], list[dict[str, dict[str, np.ndarray]]]]:
    """Losses, norms by module, and parameters with both moments after each step, on one device."""
    configs = toy.optimizers(frozen, decay)
    leaves, model = initial(modules)
    state = reference.TrainState(leaves=leaves)
    losses, norms, states = [], [], []
    for step in range(toy.STEPS):
        parts = toy.batch(step, buckets)
        total, gradients = 0.0, {name: np.zeros_like(leaf) for name, leaf in state.leaves.items()}
        factors = factors_of(toy.denominators(model, parts), hand)
        for _, part in parts:
            (loss, _), grads = VALUE_AND_GRAD(state.leaves, part, factors)
            total += float(loss)
            for name in gradients:
                gradients[name] = gradients[name] + np.asarray(grads[name])
        gradients = {name: g for name, g in gradients.items() if parity.module_of(name) not in frozen}
        rates = {module: config.learning_rate for module, config in configs.items()}
        factors = {name: toy.rate_factor(name, decay) for name in leaves}
        state = reference.adamw_step(state, gradients, configs, rates, clip_norm=clip_norm, factors=factors)
        losses.append(total)
        norms.append({module: reference.global_norm(gradients, module) for module in modules})
        states.append({"params": state.leaves, "adam_m": state.first, "adam_v": state.second})
    return losses, norms, states


def mark_of(name: str) -> Any:
    if name in SLOW:
        return pytest.mark.slow
    return () if name in SHORT else pytest.mark.long


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=mark_of(name)) for name, case in CASES.items()],
)
def test_steps_equal_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = (case.buckets, case.frozen, case.clip_norm, case.decay, case.modules, case.hand)
    losses, norms, states = wanted(*given)
    if case.padded:
        monkeypatch.setattr(zero, "SMALL", 1)
    configs = toy.optimizers(case.frozen, case.decay)
    model = toy.placed(case.layouts, configs, case.hand, clip_norm=case.clip_norm)
    executor = toy.executor(model, len(case.buckets), case.schedule, case.run, split=case.split)
    assert_all_is_compiled_ahead(executor)
    if isinstance(executor, Executor):
        watch_sums(executor)
    for step in range(toy.STEPS):
        parts, before = toy.batch(step, case.buckets), dict(executor.states)
        loss, norm = executor.step(parts, toy.denominators(model, parts)).fetch()
        for name, state in before.items():
            updated = issubclass(case.run, OneProgramExecutor) or bool(model.stages[name].state.trainable)
            arrays = [x for x in jax.tree.leaves(state) if x.ndim]  # a counter may be a copy
            assert all(x.is_deleted() == updated for x in arrays), "states are updated in place"
        assert loss == pytest.approx(losses[step], rel=1e-5)
        assert norm == pytest.approx(norms[step], rel=2e-5)
        assert not case.clip_norm or sum(n**2 for n in norm.values()) > case.clip_norm**2, "the case clips"
        leaves = toy.logical(model, executor.states)
        for kind, want in states[step].items():
            # A second moment is of squares, so it is off by twice what the gradients are.
            tolerance = 4e-5 if kind == "adam_v" else 1e-5
            parity.assert_close(parity.of_kind(leaves, kind), want, tolerance, f"step {step}: {kind}")
    if isinstance(executor, Executor):
        assert_nothing_is_left(executor)


def assert_all_is_compiled_ahead(executor: toy.Run) -> None:
    """Every program of a step is compiled by ``compile``, which says how far it is; what buckets share is one."""
    seen: list[tuple[int, int, str]] = []
    executor.compile(lambda *progress: seen.append(progress))
    programs = list({id(program): program for program in executor.programs()}.values())
    assert all(aval.sharding is not None for program in programs for aval in jax.tree.leaves(program.avals))
    assert [done for done, _, _ in seen] == list(range(1, len(programs) + 1))
    assert {(total, name) for _, total, name in seen} == {(len(programs), program.name) for program in programs}
    if isinstance(executor, OneProgramExecutor):
        assert sorted(program.name for program in programs) == ["step eye[1]", "step eye[2]"]
        return
    stages, buckets = executor.placed.stages.items(), ((("eye", 1),), (("eye", 2),))
    want = {"norm world", *(f"F {name}" for name in executor.placed.stages)}
    want |= {f"B {node.name}" for node in executor.placed.graph.stages if node.backward}
    want |= {f"W {node.name}" for node in executor.schedule.graph.stages if node.split}
    want |= {f"{kind} {name}" for name, stage in stages if stage.state.trainable for kind in ("reduce", "update")}
    want |= {f"prepare {name}" for name, stage in stages if stage.submesh.layout.optimizer_shards > 1}
    boundaries = executor.boundaries.values()
    want |= {p.name for one in boundaries for way in (one.forward, one.backward) for p in way.programs()}
    assert {program.name for program in programs} == want
    for name, shared in {"eye.0": False, "ear.0": False, "llm.0": False, "llm.1": True}.items():
        if name in executor.placed.stages:
            first, second = (executor.stage_programs[name, bucket] for bucket in buckets)
            assert (first is second) == shared


def watch_sums(executor: Executor) -> None:
    """B, W and reduce overwrite the gradient sums, from the second microbatch on: all of them, but a split stage's B
    and W each its own part, and a reduce whose results are shards none.
    """
    handlers, graph = executor._run.handlers, executor.schedule.graph
    overwritten: dict[tuple[str, str], set[str]] = {}

    def watched(handle: Callable[[Op], None]) -> Callable[[Op], None]:
        def watch(op: Op) -> None:
            sums = by_name(executor.sums.get(op.stage, {}))
            handle(op)
            assert op.kind != "reduce" or op.stage not in executor.walker.returned, "gradients of what was lent"
            gone = {name for name, x in sums.items() if x.is_deleted()}
            if op.kind == "reduce":
                whole = executor.placed.stages[op.stage].state.has_whole_masters
                assert gone == (sums.keys() if whole else set()) and op.stage not in executor.sums
            elif not graph.stage(op.stage).split:
                assert gone == sums.keys()
            elif sums and op.microbatch:
                overwritten[op.stage, op.kind] = gone
                b, w = (overwritten.get((op.stage, kind)) for kind in "BW")
                if b is not None and w is not None:
                    assert b | w == sums.keys() and not b & w and w

        return watch

    handlers |= {kind: watched(handlers[kind]) for kind in ("B", "W", "reduce")}


def assert_nothing_is_left(executor: Executor) -> None:
    """After a step no buffer of it is held, gradient sums neither."""
    run = executor._run
    held = (run.inputs, run.carry, run.cotangents, run.in_transit, run.residuals, run.deferred)
    held += (run.reduced, run.rows, run.params)
    assert held == ({},) * len(held) and not run.losses and not run.totals
    assert not any(executor.sums.values())  # of a frozen stage there are none


@ALL_RUNS
def test_a_step_is_whole_or_not_at_all(run: type[toy.Run]) -> None:
    """Another number of microbatches or two buckets in one program are refused; what is not finite is skipped."""
    model = toy.placed({Executor: APART, StraightExecutor: SIDE_BY_SIDE}.get(run, ON_LANES), toy.optimizers())
    executor = toy.executor(model, 2, run=run)
    good, other = toy.batch(0, (2, 2)), toy.batch(1, (1, 2))
    for parts in (good[:1], [*good, good[0]], []):
        with pytest.raises(ValueError, match=f"{len(parts)} microbatches"):
            executor.step(parts, {"llm": 1.0, "rows": 1.0})
    if isinstance(executor, OneProgramExecutor):
        with pytest.raises(ValueError, match="2 microbatches in 2 buckets: one program takes 2 in one bucket"):
            executor.step(other, {"llm": 1.0, "rows": 1.0})
    if run is StraightExecutor:
        with pytest.raises(ValueError, match="schedule gpipe interleaves microbatches at B "):
            toy.executor(model, 2, "gpipe", StraightExecutor)
        with pytest.raises(ValueError, match=r"1f1b splits the backward of eye\.0, ear\.0, llm\.0; use Executor"):
            toy.executor(model, 1, run=StraightExecutor, split=True)
        with pytest.raises(ValueError, match="use Executor"):
            toy.executor(toy.placed(APART, toy.optimizers()), 2, run=StraightExecutor)
    before = toy.logical(model, executor.states)
    for spoilt in (np.nan, np.inf, 1e25):  # the last one's gradients are finite, their squares are not
        signature, part = toy.batch(0, (2,))[0]
        part["llm"]["weights"][3] = spoilt
        _, norms = executor.step([good[0], (signature, part)], {"llm": 1.0, "rows": 1.0}).fetch()
        assert not all(np.isfinite(norm) for norm in norms.values())
        assert counts(executor) == {0}
    after = toy.logical(model, executor.states)
    assert all(np.array_equal(after[name], leaf) for name, leaf in before.items())
    loss, norms = executor.step(good, toy.denominators(model, good)).fetch()
    assert counts(executor) == {1} and np.isfinite(loss) and all(np.isfinite(norm) for norm in norms.values())


@pytest.mark.long
@ALL_RUNS
def test_with_nothing_trained_a_step_is_its_loss(run: type[toy.Run]) -> None:
    configs, buckets = toy.optimizers(toy.MODULES), (2, 2, 2)
    layouts = ON_LANES if run is SingleExecutor else SIDE_BY_SIDE
    executor = toy.executor(toy.placed(layouts, configs), len(buckets), run=run)
    executor.compile()
    parts, before = toy.batch(0, buckets), toy.logical(executor.placed, executor.states)
    loss, norms = executor.step(parts, toy.denominators(executor.placed, parts)).fetch()
    assert (loss, norms) == (pytest.approx(wanted(buckets, (), 0.4, 0.1)[0][0], rel=1e-5), {})
    if isinstance(executor, Executor):
        assert_nothing_is_left(executor)
    after = toy.logical(executor.placed, executor.states)
    assert all(np.array_equal(after[name], leaf) for name, leaf in before.items())


@pytest.mark.long
def test_uneven_stages_take_over_from_even_ones_and_hand_back() -> None:
    """Leaves of two equal stages, as a checkpoint has them, in four unequal chunks: the next step is one device's."""
    buckets = (1, 2, 1, 1)
    losses, norms, states = wanted(buckets, (), 0.0, 0.0)
    even, uneven = toy.placed(APART, toy.optimizers()), toy.placed(UNEVEN_CHUNKS, toy.optimizers())
    first, then = toy.executor(even, len(buckets)), toy.executor(uneven, len(buckets), "interleaved")
    parts = toy.batch(0, buckets)
    first.step(parts, toy.denominators(even, parts))
    then.states = carried(even, first.states, uneven, 1)
    held = toy.logical(uneven, then.states)
    for name, leaf in toy.logical(even, first.states).items():
        np.testing.assert_array_equal(held.pop(name), leaf, err_msg=name)
    assert not held
    parts = toy.batch(1, buckets)
    loss, norm = then.step(parts, toy.denominators(uneven, parts)).fetch()
    assert (loss, norm) == (pytest.approx(losses[1], rel=1e-5), pytest.approx(norms[1], rel=2e-5))
    first.states = carried(uneven, then.states, even, 2)
    leaves = toy.logical(even, first.states)
    for kind, want in states[1].items():
        parity.assert_close(parity.of_kind(leaves, kind), want, 4e-5 if kind == "adam_v" else 1e-5, kind)


def carried(source: PlacedModel, states: Mapping[str, Any], target: PlacedModel, count: int) -> dict[str, Any]:
    """States after so many updates in another layout, by way of their logical leaves."""
    leaves = parity.logical_leaves(source, states)
    result = {}
    for name, stage in target.stages.items():
        own = {leaf: jax.device_put(leaves[leaf], a.sharding) for leaf, a in stage.state.logical_avals().items()}
        result[name] = stage.state.from_logical(own, count)
    return result


@pytest.mark.long
def test_a_loss_with_nothing_in_a_step_is_zero() -> None:
    """A step without a row for the hand is the step of the model without it; what is missing is said."""
    layouts = {"eye": Layout(dp=2), "ear": Layout(dp=2), "llm": Layout(dp=2), "hand": Layout(dp=2)}
    executor = toy.executor(toy.placed(layouts, toy.optimizers()), 1)
    parts = toy.batch(0, (1,))
    with pytest.raises(ValueError, match=r"^hand: a loss is divided by 'hand'; use one of \['llm', 'rows'\]$"):
        executor.step(parts, {"llm": 1.0, "rows": 1.0})
    with pytest.raises(ValueError, match="every denominator is 0"):
        executor.step(parts, {"llm": 0.0, "hand": 0.0, "rows": 0.0})
    parts[0][1]["hand"]["weights"][:] = 0
    result = executor.step(parts, toy.denominators(executor.placed, parts))
    want, norms, _ = wanted((1,), (), 0.0, 0.0)
    seen = result.fetch_losses()
    assert seen["llm/loss"] + 0.1 * seen["llm/size"] == pytest.approx(want[0], rel=1e-5)
    assert seen["hand/loss"] == 0.0 and seen.keys() == {"llm/loss", "llm/size", "llm/reach", "hand/loss"}
    leaves, _ = initial(tuple(layouts))
    reach = float(toy.dense_losses(leaves, parts[0][1])["llm/reach"]) / toy.ROWS
    assert seen["llm/reach"] == pytest.approx(reach, rel=1e-5)
    assert result.fetch() == (pytest.approx(want[0], rel=1e-5), pytest.approx({**norms[0], "hand": 0.0}, rel=2e-5))


def counts(executor: toy.Run) -> set[int]:
    """Numbers of updates made, over all stages and counters."""
    return {int(x) for x in jax.tree.leaves(executor.states) if x.dtype == np.int32}


@pytest.mark.long
def test_compute_in_bf16_keeps_masters_in_fp32() -> None:
    buckets, configs = (1, 2, 1), toy.optimizers()
    model = toy.placed(APART, configs, dtype="bfloat16")
    executor, parts = toy.executor(model, len(buckets)), toy.batch(0, buckets)
    for stage in model.stages.values():
        assert {str(a.dtype) for a in jax.tree.leaves(stage.state.param_avals)} == {"bfloat16"}
        assert not stage.state.prepare_is_identity
    before = toy.logical(model, executor.states)
    loss, _ = executor.step(parts, toy.denominators(model, parts)).fetch()
    want = wanted(buckets, (), 0.0, 0.0)[0][0]
    assert loss == pytest.approx(want, rel=2e-2) and loss != pytest.approx(want, rel=1e-6)
    assert {str(x.dtype) for x in jax.tree.leaves(executor.states)} == {"float32", "int32"}
    after = toy.logical(model, executor.states)
    moved = {name: np.abs(after[name] - leaf).max() for name, leaf in before.items() if name.startswith("params/")}
    assert all(0 < most < 1e-2 for most in moved.values()), "an update of another size, or masters rounded to bf16"


def test_a_stage_knows_the_learning_rates_of_what_it_trains() -> None:
    stages = toy.placed(APART, toy.optimizers(("ear",))).stages
    rates = {
        name: {m: float(np.asarray(rate(0))) for m, rate in s.state.learning_rates.items()}
        for name, s in stages.items()
    }
    assert {name: list(own) for name, own in rates.items()} == {
        "eye.0": ["eye"],
        "ear.0": [],
        "llm.0": ["llm"],
        "llm.1": ["llm"],
    }
    assert rates["eye.0"]["eye"] == pytest.approx(2e-3) and rates["llm.0"]["llm"] == pytest.approx(3e-3)
