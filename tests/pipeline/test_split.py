"""A split backward: B and W together are the backward, in values and in FLOPs, and what is kept between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import toy
from parity import Case
from test_stage import BOTH, PATCHES, ROWS, TOKENS, inputs, place, random_like

from mmjax.assembly.packers import bucket_shapes
from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import TP_DIMENSIONS
from mmjax.mesh.world import World
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import MicrobatchBytes, _replay, deferred_bytes, residual_bytes
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.split import SplitFunctions, _Tap
from mmjax.pipeline.stage import Output, StageFunctions
from mmjax.pipeline.trees import by_name, nested
from mmjax.pipeline.watch import measured_residuals
from mmjax.schedule.ops import ONCE
from mmjax.schedule.validate import validate

# One layer a stage, so that a compiler counts loops right, and widths that make products most of the work.
WIDE = {
    "vision": {"layers": 1, "width": 64, "mlp": 128},
    "llm": {"layers": 2, "width": 48, "mlp": 96},
}


def wide(remat: str = "none", tied: bool = False) -> Any:
    return parity.model_with(vision=WIDE["vision"] | {"remat": remat}, llm=WIDE["llm"] | {"remat": remat, "tied": tied})


def both_ways(placed: PlacedModel, stage: str) -> tuple[StageFunctions, SplitFunctions]:
    """A stage's functions with a whole and with a split backward."""
    whole = placed.trace(inputs()).stages[stage]
    split = placed.trace(inputs(), placed.graph.with_split()).stages[stage]
    assert isinstance(split, SplitFunctions) and not isinstance(whole, SplitFunctions)
    return whole, split


def test_taps_are_named_and_cannot_be_changed() -> None:
    use: Any = None
    tap = _Tap(use=use, layers=(), leads=True, x=0, dy=1)
    with pytest.raises(FrozenInstanceError):
        tap.x = 2  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="positional"):
        _Tap(use, (), True, 0, 1)  # pyright: ignore[reportCallIssue]


@pytest.mark.long
def test_w_computes_the_gradients_of_convolutions() -> None:
    """All kernels of a UNet are tapped, and all weights of its products; norms and biases are not."""
    case = Case(model="drawing, unet", schedule="zb-h1")
    shapes = next(iter(bucket_shapes(parity.make_packer(case, 1), 1).values()))
    layouts = {name: Layout(rank_offset=rank) for rank, name in enumerate(parity.MODELS[case.model].nodes)}
    settings = Settings(optimizers=parity.optimizers(case), total_steps=1, dtype="float32", transport="device_put")
    placed = PlacedModel(parity.MODELS[case.model], layouts, World.planned(len(layouts)), settings)
    painter = placed.trace(shapes, placed.graph.with_split()).stages["painter.0"]
    assert isinstance(painter, SplitFunctions)
    matrices = {name for name, aval in by_name(painter._avals[0]).items() if aval.ndim > 2}
    assert {name for name in matrices if "conv" in name and name.endswith("kernel")}
    assert painter._taps.keys() == {name for name in matrices if name.startswith("painter/")} | {
        "painter_projector/down",
        "painter_projector/up",
    }


# ---- values and FLOPs ------------------------------------------------------------------------------------------------

FAST = {("vision.0", "full", False, "float32", ("vision",))}
LONG = {("llm.1", "dots", True, "float32", ())}
SLOW = {
    *itertools.product(("vision.0", "llm.0", "llm.1"), ("none", "dots", "full"), (False,), ("float32",), ((),)),
    *itertools.product(("vision.0", "llm.0", "llm.1"), ("none", "full"), (True,), ("bfloat16",), ((),)),
    ("vision.0", "none", False, "float32", ("vision_projector",)),
    ("llm.0", "none", False, "float32", ("vision", "vision_projector")),
}
CASES = [
    *(pytest.param(*case, id=" ".join(map(str, case))) for case in sorted(FAST)),
    *(pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.long) for case in sorted(LONG)),
    *(pytest.param(*case, id=" ".join(map(str, case)), marks=pytest.mark.slow) for case in sorted(SLOW)),
]


def compiled(function: Any, *args: Any) -> tuple[Any, float]:
    """The result, and the FLOPs that the compiler counts."""
    program = jax.jit(function).lower(*args).compile()
    analysis = program.cost_analysis()
    assert analysis
    return program(*args), analysis["flops"]


@pytest.mark.long
@pytest.mark.parametrize(("stage", "remat", "tied", "dtype", "frozen"), CASES)
def test_b_and_w_together_are_the_backward(
    stage: str, remat: str, tied: bool, dtype: str, frozen: tuple[str, ...]
) -> None:
    """Sums, gradients of activations and FLOPs, from sums that are not empty."""
    whole, split = both_ways(place(wide(remat, tied), frozen=frozen, dtype=dtype), stage)
    rng = np.random.default_rng(0)
    params, sums, given, carry, _, _ = whole.backward_avals
    params, sums = (jax.tree.map(lambda a: random_like(a, rng), tree) for tree in (params, sums))
    carry = jax.tree.map(lambda a: random_like(a, rng), whole.forward_avals[2])
    given = {
        n: jax.device_put(
            random_like(a, rng) if a.dtype == jnp.float32 else rng.integers(1, 3, a.shape).astype(np.int32), a.sharding
        )
        for n, a in given.items()
    }
    given_back = whole.cotangent_aval.activation
    cotangent = (
        Output(None, jnp.array([0.3], jnp.float32))
        if given_back is None
        else Output(random_like(given_back, rng), None)
    )

    (out, kept), forward = compiled(whole.forward, params, given, carry)
    received = carry if whole.backward_reads_carry else {}
    (want, want_carry), backward = compiled(whole.backward, params, sums, given, received, kept, cotangent)
    (same, kept), tapped = compiled(split.forward, params, given, carry)
    received = carry if split.backward_reads_carry else {}
    (part, got_carry, deferred), b = compiled(
        split.backward, params, split.backward_part(sums), given, received, kept, cotangent
    )
    rest, w = compiled(split.weights, split.weights_part(sums), deferred)

    got = by_name(part) | by_name(rest)
    assert got.keys() == by_name(want).keys() and not by_name(part).keys() & by_name(rest).keys()
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        *(np.asarray(jax.tree.leaves(x)[0], np.float32) for x in (same, out)), rtol=tolerance, atol=tolerance
    )
    pairs = [(f"sum of {name}", got[name], total) for name, total in by_name(want).items()]
    pairs += [(f"gradient of {name}", got_carry[name], grad) for name, grad in want_carry.items()]
    for name, one, other in pairs:
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name
    before = by_name(sums)
    assert all(np.abs(np.asarray(got[n]) - np.asarray(before[n])).max() > 0 for n in by_name(rest)), "W adds nothing"
    if dtype == "float32":  # in bf16 a CPU's program is full of casts
        assert b + w == pytest.approx(backward, rel=0.02) and w > 0.25 * backward * (not frozen)
        assert tapped == pytest.approx(forward, rel=0.02), "taps are free in forward"


# ---- weights that are stored in another form -------------------------------------------------------------------------


def with_opens(placed: PlacedModel, stage: str, opened_by: Callable[[str], Any]) -> PlacedModel:
    """The model with every parameter of a stage stored in another form, which a function opens, by name."""
    own = placed.stages[stage]
    opens = {name: opened_by(name) for name in by_name(own.state.param_avals)}
    placed.places[stage] = replace(own, model=replace(own.model, opens=opens))
    return placed


def rounded(weight: jax.Array) -> jax.Array:
    return weight.astype(jnp.bfloat16).astype(weight.dtype)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", pytest.param("dots", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "stage", [pytest.param("vision.0", marks=pytest.mark.long), pytest.param("llm.0", marks=pytest.mark.long), "llm.1"]
)
def test_handles_leave_nothing_behind_and_no_product_to_b(stage: str, remat: str) -> None:
    """The same values are kept for backward as without them, and W has the same to do."""
    model = parity.model_with(
        vision=WIDE["vision"] | {"remat": remat, "positions": "learned2d"},
        llm=WIDE["llm"] | {"remat": remat, "tied": True},
    )
    plain = both_ways(place(model), stage)
    stored = both_ways(with_opens(place(model), stage, lambda _: rounded), stage)
    size = lambda avals: sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)  # noqa: E731
    for one, other in zip(plain, stored, strict=True):
        assert size(other.residual_avals) <= size(one.residual_avals)
    assert by_name(plain[1].weights_avals[0]) == by_name(stored[1].weights_avals[0])
    assert plain[1].deferred_avals == stored[1].deferred_avals and plain[1].deferred_avals


@pytest.mark.long
@pytest.mark.parametrize("stage", ["vision.0", "llm.1"])
def test_a_handle_has_the_gradient_of_what_is_stored(stage: str) -> None:
    """Parameters are stored halved, matrices with rows or columns in another order: outputs are the same, and gradients
    of what is stored are twice as large and in its order."""
    model = wide("dots", tied=True)
    plain = place(model)
    leaves = by_name(plain.stages[stage].state.leaves)
    # Along a dimension that tp does not split.
    turned = {name: -1 - (leaf.dims[-1] in TP_DIMENSIONS) for name, leaf in leaves.items() if len(leaf.dims) > 1}

    def opened_by(name: str) -> Any:
        return lambda half: 2 * (jnp.roll(half, 1, turned[name]) if name in turned else half)

    def back(tree: Any) -> Any:
        return nested({n: jnp.roll(x, -1, turned[n]) if n in turned else x for n, x in by_name(tree).items()})

    stored = with_opens(place(model), stage, opened_by)
    rng = np.random.default_rng(0)
    functions = both_ways(plain, stage)[0]
    params = jax.tree.map(lambda a: random_like(a, rng), functions.forward_avals[0])
    halves = jax.tree.map(lambda x, y: jax.device_put(x / 2, y.sharding), back(params), params)
    carry = jax.tree.map(lambda a: random_like(a, rng), functions.forward_avals[2])
    given = {
        n: random_like(a, rng) if a.dtype == jnp.float32 else jax.device_put(np.ones(a.shape, np.int32), a.sharding)
        for n, a in functions.forward_avals[1].items()
    }
    seen = functions.cotangent_aval.activation
    cotangent = Output(None, jnp.array([0.3], jnp.float32)) if seen is None else Output(random_like(seen, rng), None)
    sums = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), functions.backward_avals[1])

    def gradients(functions: StageFunctions, params: Any) -> tuple[Any, Any, Any]:
        out, kept = jax.jit(functions.forward)(params, given, carry)
        received = carry if functions.backward_reads_carry else {}
        new, grads, *deferred = jax.jit(functions.backward)(
            params, functions.backward_part(sums), given, received, kept, cotangent
        )
        rest = jax.jit(functions.weights)(functions.weights_part(sums), *deferred) if deferred else {}
        return out, by_name(new) | by_name(rest), grads

    want_out, want, want_grads = gradients(functions, params)
    want = by_name(back(nested(want)))
    for made in both_ways(stored, stage):
        out, got, grads = gradients(made, halves)
        for one, other in zip(jax.tree.leaves((out, grads)), jax.tree.leaves((want_out, want_grads)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert got.keys() == want.keys()
        for name, total in want.items():
            np.testing.assert_allclose(got[name], 2 * total, rtol=1e-4, atol=1e-4, err_msg=name)


# ---- what W reads ----------------------------------------------------------------------------------------------------


def taps(layouts: dict[str, Layout], model: str, frozen: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """By stage, what is tapped."""
    settings = Settings(optimizers=parity.optimizers(Case(model=model, frozen=frozen)), total_steps=1)
    placed = PlacedModel(parity.MODELS[model], layouts, parity.world(), settings)
    stages = placed.trace(inputs(), placed.graph.with_split()).stages
    return {name: set(by_name(s.weights_avals[0])) for name, s in stages.items()}


VISION = {f"vision/layers/attn/{n}" for n in "qkvo"} | {f"vision/layers/mlp/{n}" for n in ("up", "down")}
LAYER = {f"llm/layers/attn/{n}" for n in "qkvo"} | {f"llm/layers/mlp/{n}" for n in ("gate", "up", "down")}
PROJECTOR = {"vision_projector/up", "vision_projector/down"}


@pytest.mark.long
def test_what_one_product_reads_is_left_to_w() -> None:
    apart = {"vision": BOTH, "llm": replace(BOTH, pp=2)}
    vision = VISION | PROJECTOR | {"vision/patch/kernel"}
    # The head is no such product: W would need the gradient of all logits.
    assert taps(apart, "plain") == {"vision.0": vision, "llm.0": LAYER, "llm.1": LAYER}
    assert taps(apart, "tied", frozen=("vision",)) == {"vision.0": PROJECTOR, "llm.0": LAYER, "llm.1": LAYER}
    assert taps({"vision": BOTH, "llm": BOTH}, "tied", frozen=("vision", "vision_projector"))["llm.0"] == LAYER


def test_a_weight_that_two_products_read_is_left_to_b() -> None:
    model = toy.placed(dict.fromkeys(toy.MODULES, Layout()), toy.optimizers())
    shapes = dict(toy.batch(0, (1,)))[("eye", 1),]
    functions = model.trace(shapes, model.graph.with_split()).stages["llm.0"]
    assert set(by_name(functions.weights_avals[0])) == {"llm/layers/up", "llm/layers/down"}
    assert "llm/ends/up" in by_name(functions.backward_avals[1])


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full"])
def test_between_b_and_w_only_inputs_and_outputs_gradients_of_products_are_kept(remat: str) -> None:
    """The figures are per token and tp rank; q, k, v share an input, as do gate and up. What has the model's width is
    of the tokens of one tp rank. Nothing is as long as the vocabulary, whose part of the backward is B's."""
    placed = place(parity.model_with(vision={"remat": remat}, llm={"remat": remat}))
    held = deferred_bytes(placed, [inputs()], placed.graph.with_split())
    tp, vit, llm = BOTH.tp, parity.VIT, parity.DECODER
    d = llm.width // tp
    heads, kv = llm.heads * llm.head_width // tp, llm.kv_heads * llm.head_width // tp
    layer = (d + heads + 2 * kv) + (heads + d) + (d + 2 * llm.mlp // tp) + (llm.mlp // tp + d)
    tokens = ROWS // BOTH.dp * TOKENS * 4
    first, last = (
        sum(len(run.layers) for run in part.runs)
        for name in ("llm.0", "llm.1")
        for part in placed.stages[name].model.slices
    )
    assert held["llm.0"] == tokens * layer * first
    assert held["llm.1"] == tokens * layer * last
    v = vit.width // tp
    block = (v + 3 * v) + (v + v)
    block += (v + vit.mlp // tp) + (vit.mlp // tp + v)
    patches, merged = ROWS // BOTH.dp * PATCHES * 4, vit.merge**2
    projector = (merged * v + 20 // tp + 20 // tp + d) / merged
    assert held["vision.0"] == patches * (vit.layers * block + parity.PATCH**2 / tp + v + projector)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_until_b_no_more_is_kept_than_before(remat: str) -> None:
    placed = place(wide(remat))
    graph = placed.graph.with_split()
    whole, split = (residual_bytes(placed, [inputs()], which) for which in (placed.graph, graph))
    assert all(split[name] <= whole[name] for name in whole)
    if remat == "full":
        assert split == whole


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.long), "1f1b"])
def test_what_lives_is_what_validate_promises(schedule: str) -> None:
    """To the byte, with W right after B and as late as can be."""
    model = toy.placed({"eye": Layout(), "ear": Layout(), "llm": Layout(pp=2)}, toy.optimizers())
    executor = toy.executor(model, 3, schedule, split=True)
    assert isinstance(executor, Executor)
    shapes = list(dict(toy.batch(0, (1, 2))).values())
    if schedule == "gpipe":
        ops = executor.schedule.ops
        step = [op for op in ops if op.microbatch != ONCE and op.kind != "W"]
        ends = [op for op in ops if op.microbatch == ONCE and (op.kind in ("reduce", "norm", "update") or op.backward)]
        first = [op for op in ops if op.microbatch == ONCE and op not in ends]
        late = (*first, *step, *(op for op in ops if op.kind == "W"), *ends)
        executor.schedule = replace(executor.schedule, ops=late)
    graph = executor.schedule.graph
    held = residual_bytes(model, shapes, graph), deferred_bytes(model, shapes, graph)
    promised = validate(executor.schedule, *held).residual_bytes
    parts = toy.batch(0, (2, 2, 2))
    with measured_residuals(executor) as measured:
        executor.step(parts, {"llm": 1.0, "rows": 1.0}).fetch()
    assert {name: max(ranks.values()) for name, ranks in measured.items()} == promised
    if schedule == "gpipe":
        assert any(promised[name] == 3 * held[1][name] > 3 * held[0][name] for name in promised)
    _, left = _replay(executor.schedule, MicrobatchBytes(model, shapes[1], graph))
    assert not any(size for (_, kind), size in left.items() if kind == "residuals")
