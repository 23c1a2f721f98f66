"""Stage functions: what is kept between forward and backward, and whether backward is the derivative of forward.

Sequence lengths are multiples of 7 and 11, and no parameter's size is: a buffer without such a factor holds no tokens.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import toy
from function_stage import with_methods
from jax import lax

from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.executor import StagePrograms
from mmjax.pipeline.memory import shard_bytes
from mmjax.pipeline.place import PlacedModel, Settings
from mmjax.pipeline.residuals import Residual, ResidualError
from mmjax.pipeline.stage import Output, StageFunctions, _TracedVjp

ROWS, PATCHES, TOKENS = 4, 56, 44
BOTH = Layout(dp=2, tp=2)
Functions = dict[str, StageFunctions]


def inputs() -> dict[str, dict[str, Any]]:
    """Shapes of one microbatch."""
    i32, f32 = jnp.int32, jnp.float32
    rows, patches = (ROWS, TOKENS), (ROWS, PATCHES)
    llm = dict.fromkeys(("tokens", "targets", "positions", "segments", "vision_index"), jax.ShapeDtypeStruct(rows, i32))
    vision = {
        "patches": jax.ShapeDtypeStruct((*patches, parity.PATCH**2), f32),
        "segments": jax.ShapeDtypeStruct(patches, i32),
        "positions": jax.ShapeDtypeStruct((*patches, 2), i32),
    }
    return {"vision": vision, "llm": {**llm, "weights": jax.ShapeDtypeStruct(rows, f32)}}


def place(
    model: MultimodalModel = parity.MODEL,
    *,
    frozen: tuple[str, ...] = (),
    dtype: str = "float32",
    sp: bool = True,
) -> PlacedModel:
    """Vision dp=2·tp=2 on the LLM's first stage, the LLM likewise on two."""
    optimizers = {module: OptimizerConfig(frozen=module in frozen) for module in model.modules}
    layouts = {"vision": replace(BOTH, sp=sp), "llm": replace(BOTH, pp=2, sp=sp)}
    return PlacedModel(model, layouts, parity.world(), Settings(optimizers=optimizers, total_steps=1, dtype=dtype))


@cache
def traced(
    remat: str = "none",
    tied: bool = False,
    frozen: tuple[str, ...] = (),
    dtype: str = "float32",
    sp: bool = True,
) -> tuple[PlacedModel, Functions]:
    """The placed model and its stage functions by stage name; read only."""
    model = parity.model_with(vision={"remat": remat}, llm={"remat": remat, "tied": tied})
    placed = place(model, frozen=frozen, dtype=dtype, sp=sp)
    return placed, dict(placed.trace(inputs()).stages)


def trace(**changes: Any) -> Functions:
    """Traced stage functions by stage name; read only."""
    return traced(**changes)[1]


def size(kept: list[Any]) -> int:
    """Bytes of one microbatch's residuals on all devices."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in kept)


@pytest.mark.long
def test_a_stage_is_traced_once_forward_and_once_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs are made of it; most of a start's time is tracing."""
    done: Counter[str] = Counter()
    for name in ("_linearise", "_transpose"):
        plain = getattr(StageFunctions, name)

        def counted(self: StageFunctions, *args: Any, name: str = name, plain: Any = plain) -> Any:
            done[f"{self.model.name} {name}"] += 1
            return plain(self, *args)

        monkeypatch.setattr(StageFunctions, name, counted)
    stages = dict(place().trace(inputs()).stages)
    for name, functions in stages.items():
        for program in StagePrograms(name, functions).programs:
            program.lower()
    assert done == {f"{stage} {name}": 1 for stage in stages for name in ("_linearise", "_transpose")}


# ---- weights among the residuals -------------------------------------------------------------------------------------


def parameter_shapes(placed: PlacedModel, stage: str) -> set[tuple[int, ...]]:
    """Sorted shapes of a stage's matrices: global and of one rank, stacked and of one layer."""
    shapes: set[tuple[int, ...]] = set()
    for aval in jax.tree.leaves(placed.stages[stage].state.param_avals):
        for shape in (aval.shape, aval.sharding.shard_shape(aval.shape)):
            shapes |= {tuple(sorted(s)) for s in (shape, shape[1:]) if len(s) > 1}
    return shapes


FROZEN = ((), ("vision", "llm"), ("vision_projector",))
MATRIX = list(itertools.product(("float32", "bfloat16"), ("none", "dots", "full"), (False, True), FROZEN))
FAST = {
    ("float32", "none", False, FROZEN[0]),
    ("bfloat16", "none", False, FROZEN[0]),
    ("bfloat16", "none", True, FROZEN[1]),
    ("bfloat16", "none", False, FROZEN[2]),
    ("bfloat16", "dots", True, FROZEN[0]),
    ("bfloat16", "full", False, FROZEN[1]),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "remat", "tied", "frozen"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in MATRIX],
)
def test_no_residual_has_the_size_of_a_parameter(dtype: str, remat: str, tied: bool, frozen: tuple[str, ...]) -> None:
    placed, stages = traced(remat, tied, frozen, dtype)
    for name, functions in stages.items():
        recomputed = [functions._residuals[i].aval.shape for i in functions._recomputed]
        assert functions.has_backward and all(math.prod(shape[1:]) == 1 for shape in recomputed)
        shapes, copies = parameter_shapes(placed, name), BOTH.size
        for aval in functions.residual_avals:
            stacked, *local = aval.shape
            assert copies % stacked == 0
            for shape in (local, local[1:]):
                assert tuple(sorted(shape)) not in shapes, f"{name} keeps {aval.dtype}{aval.shape}"
            count = math.prod(local)  # of one rank; numbers of the layers are in backward too
            assert count % 7 == 0 or count % 11 == 0, f"{name} keeps {aval.dtype}{aval.shape}"


def leaks() -> dict[str, Callable[[Any], Any]]:
    """Ways to transform weights inside a stage that leave a copy of them for backward."""

    def on_matrices(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda params: jax.tree.map(lambda w: change(w) if w.ndim > 1 else w, params)

    return {
        "cast": on_matrices(lambda w: w.astype(jnp.bfloat16).astype(w.dtype)),
        "transposed": on_matrices(lambda w: w.T.T),
        "sliced": on_matrices(lambda w: jnp.concatenate([w[:1], w[1:]])),
        "scaled": on_matrices(lambda w: w * 2),
        "stopped": on_matrices(lax.stop_gradient),
    }


@pytest.mark.parametrize(("stage", "leak"), [*(("vision.0", leak) for leak in leaks()), ("llm.1", "cast")])
def test_a_stage_that_would_keep_transformed_weights_is_refused(stage: str, leak: str) -> None:
    placed = place()
    own = placed.stages[stage]
    change, forward = leaks()[leak], own.model.forward
    model = with_methods(own.model, forward=lambda params, *args: forward(change(params), *args))
    placed.places[stage] = replace(own, model=model)
    with pytest.raises(ResidualError, match=rf"stage {stage}: backward would need float32\[.*alone \((vision|llm).*/"):
        placed.trace(inputs())


def squared_last(placed: PlacedModel, stage: str) -> PlacedModel:
    """With a stage that squares its last parameter, a vector: backward reads twice the parameter."""
    own = placed.stages[stage]
    *_, (path, _) = jax.tree_util.tree_leaves_with_path(own.state.param_avals)

    def squared(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, w: w**2 if p == path else w, params)

    forward, give = own.model.forward, own.model.give
    model = with_methods(
        own.model,
        forward=lambda params, *args: forward(squared(params), *args),
        give=lambda params, *args: give(squared(params), *args),
    )
    placed.places[stage] = replace(own, model=model)
    return placed


@pytest.mark.long
@pytest.mark.parametrize("stage", ["vision.0", "llm.0"])
def test_small_residuals_of_parameters_alone_are_computed_again(stage: str) -> None:
    functions = squared_last(place(), stage).trace(inputs()).stages[stage]
    before = trace()[stage]
    assert len(functions._recomputed) > len(before._recomputed)
    assert [a.shape for a in functions.residual_avals] == [a.shape for a in before.residual_avals]


def test_the_same_transformation_in_a_checkpointed_body_keeps_nothing() -> None:
    placed = place(sp=False)
    own = placed.stages["llm.1"]
    body = jax.checkpoint(lambda x, w: x @ w[:, None].T.T.astype(jnp.bfloat16).astype(w.dtype))
    model = with_methods(
        own.model,
        forward=lambda params, given, carry, *_: (body(carry["llm.0"], params["llm"]["norm"])[..., 0], {}),
        loss=lambda params, given, activation, *_: {"loss": jnp.sum(activation * given["weights"])},
    )
    placed.places["llm.1"] = replace(own, model=model)
    kept = placed.trace(inputs()).stages["llm.1"].residual_avals
    assert [a.shape for a in kept if math.prod(a.shape[1:]) % 11] == []


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_frozen_stage_with_something_trained_upstream_keeps_less() -> None:
    trained, frozen = trace(), trace(frozen=("llm",))
    for stage in ("llm.0", "llm.1"):
        assert frozen[stage].has_backward and not frozen[stage].state.trainable
        assert 0 < size(frozen[stage].residual_avals) < 0.8 * size(trained[stage].residual_avals)
        assert jax.tree.leaves(frozen[stage].backward_avals[1]) == []
    assert size(frozen["vision.0"].residual_avals) == size(trained["vision.0"].residual_avals)


@pytest.mark.long
def test_with_nothing_trained_upstream_nothing_is_kept_and_there_is_no_backward() -> None:
    placed, stages = traced(frozen=("vision", "vision_projector"))
    assert not stages["vision.0"].has_backward and stages["vision.0"].residual_avals == []
    assert not stages["vision.0"].backward_reads_carry
    assert not placed.graph.stage("vision.0").backward
    assert [edge.gradient for edge in placed.graph.edges] == [False, True]
    assert stages["llm.0"].gradient_sources == frozenset() and stages["llm.0"].has_backward
    assert jax.eval_shape(stages["vision.0"].forward, *stages["vision.0"].forward_avals)[1] == []


def test_a_frozen_encoder_keeps_only_what_its_projector_needs() -> None:
    trained, frozen = trace()["vision.0"], trace(frozen=("vision",))["vision.0"]
    assert frozen.has_backward and frozen.state.trainable == {"vision_projector"}
    assert 0 < size(frozen.residual_avals) < 0.25 * size(trained.residual_avals)
    assert all(a.shape[0] == BOTH.dp or a.shape[0] == BOTH.size for a in frozen.residual_avals)


@pytest.mark.long
def test_remat_policies_order_the_bytes_that_are_kept() -> None:
    policies = [trace(remat=remat) for remat in ("none", "dots", "full")]
    for stage in ("vision.0", "llm.0", "llm.1"):
        none, dots, full = (size(stages[stage].residual_avals) for stages in policies)
        assert 0 < full < 0.7 * dots < 0.49 * none, (none, dots, full)


def test_each_residual_is_stacked_over_the_axes_that_it_varies_over() -> None:
    """What differs between tp ranks has a copy per rank, what they all have has one per dp rank."""
    for functions in trace(sp=False).values():
        assert {aval.shape[0] for aval in functions.residual_avals} == {BOTH.dp, BOTH.size}


@pytest.mark.long
def test_ranks_that_share_tokens_keep_their_own_between_blocks() -> None:
    """With `full`, a layer keeps its input alone; what the head keeps are a few numbers a token."""
    shared, whole = (trace(remat="full", sp=sp) for sp in (True, False))
    for stage in ("llm.0", "llm.1"):
        inputs_of = [sum(shard_bytes(a) for a in of[stage].residual_avals if a.ndim > 3) for of in (shared, whole)]
        assert inputs_of[1] == 2 * inputs_of[0] > 0
    assert shared["vision.0"].out.activation.sharding.shard_shape((ROWS, 7, 24)) == (ROWS // BOTH.dp, 7, 24)
    spans = [shard_bytes(of["llm.0"].out.activation) for of in (shared, whole)]
    assert spans[1] == 2 * spans[0]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_gather_and_scatter_tokens_in_place_of_sums(overlap: bool) -> None:
    """Of the LLM's first stage as it is compiled: what tp ranks sum whole has no positions, or is a gradient that goes
    to another module."""
    layouts = {"vision": replace(BOTH, sp=False), "llm": replace(BOTH, pp=2, overlap=overlap)}
    model = parity.model_with(llm={"layers": 4, "remat": "dots"})
    settings = Settings(optimizers={module: OptimizerConfig() for module in model.modules}, total_steps=1)
    functions = PlacedModel(model, layouts, parity.world(), settings).trace(inputs()).stages["llm.0"]
    pairs = ((functions.forward, functions.forward_avals), (functions.backward, functions.backward_avals))
    forward, backward = (kinds(jax.jit(function).lower(*avals).compile().as_text() or "") for function, avals in pairs)
    exchanges = {"collective-permute"} if overlap else {"all-gather", "reduce-scatter"}
    assert exchanges <= forward.keys() <= exchanges | {"reduce-scatter"}  # of the embedding
    of_tokens = {(ROWS // BOTH.dp, length, parity.DECODER.width) for length in (TOKENS, TOKENS // BOTH.tp)}
    assert exchanges <= backward.keys() and not of_tokens & backward.get("all-reduce", set())


def kinds(hlo: str) -> dict[str, set[tuple[int, ...]]]:
    """Shapes of the results of a program's collectives, by kind."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for result, kind in re.findall(
        r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", hlo
    ):
        shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", result)}
        found[kind] = found.get(kind, set()) | shapes
    return found


@pytest.mark.long
def test_host_inputs_are_not_kept() -> None:
    for functions in trace(remat="full").values():
        # Loss weights have the shape of the losses, which are kept.
        given = {name: a for name, a in functions.forward_avals[1].items() if name != "weights"}
        own = {(a.shape[1:], a.dtype) for a in given.values()}
        assert not [a for a in functions.residual_avals if (a.shape[2:], a.dtype) in own]


@pytest.mark.parametrize("frozen", [(), ("llm",)], ids="-".join)
def test_received_activations_are_given_again_where_backward_reads_them(frozen: tuple[str, ...]) -> None:
    """The stage's own scan copies what it reads, so this one multiplies what it received with a weight."""
    placed = place(frozen=frozen, sp=False)
    own = placed.stages["llm.1"]

    def forward(params: Any, given: Any, carry: Any, *_: Any) -> tuple[jax.Array, Any]:
        return carry["llm.0"] @ params["llm"]["norm"], {}

    def loss(params: Any, given: Any, activation: Any, *_: Any) -> dict[str, jax.Array]:
        return {"loss": jnp.sum(activation * given["weights"])}

    placed.places["llm.1"] = replace(own, model=with_methods(own.model, forward=forward, loss=loss))
    stages = placed.trace(inputs()).stages
    assert stages["llm.1"].backward_reads_carry == (not frozen)
    received = [a.shape for a in jax.tree.leaves(stages["llm.1"].backward_avals[3])]
    assert received == ([] if frozen else [stages["llm.0"].out.activation.shape])
    assert size(stages["llm.1"].residual_avals) < size([stages["llm.0"].out.activation]) / 2
    assert not stages["llm.0"].backward_reads_carry  # picking modality tokens is linear


def test_received_activations_are_given_again_where_backward_reads_one_of_them() -> None:
    """Of two that arrive, one goes into a square and the other into a sum."""
    placed = toy.placed({name: Layout() for name in toy.MODULES}, toy.optimizers())
    own = placed.stages["llm.0"]

    def forward(params: Any, given: Any, carry: Any, *_: Any) -> tuple[jax.Array, Any]:
        seen = carry["eye.0"]
        return jnp.sum(seen * seen + carry["ear.0"], 1), {}

    placed.places["llm.0"] = replace(own, model=with_methods(own.model, forward=forward))
    (_, numbers), *_ = toy.batch(0, (1,))
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), numbers)
    functions = placed.trace(avals).stages["llm.0"]
    assert functions.backward_reads_carry and functions.backward_avals[3].keys() == {"eye.0", "ear.0"}


def test_an_unsplit_backward_leaves_nothing_for_later() -> None:
    functions = trace()["llm.0"]
    assert functions.deferred_avals == [] and functions.weights_part(functions.state.sums_avals) == {}
    assert functions.weights_avals == ({}, [])
    with pytest.raises(TypeError, match=r"^stage llm\.0: its backward is not split$"):
        print(functions.weights)


def test_a_loop_may_start_from_a_parameter() -> None:
    """What it carries varies over dp from the second turn on, so it has to from the first."""
    placed = place(sp=False)
    own = placed.stages["llm.1"]

    def loop(params: Any, given: Any) -> jax.Array:
        first = params["llm"]["norm"][0]
        return lax.scan(lambda x, rows: (x + jnp.sum(rows), None), first, given["weights"])[0]

    model = with_methods(
        own.model,
        forward=lambda params, given, *_: (given["weights"] * loop(params, given), {}),
        loss=lambda params, given, activation, *_: {"loss": jnp.sum(activation)},
        predict=lambda params, given, activation, *_: activation * loop(params, given),
    )
    placed.places["llm.1"] = replace(own, model=model)
    functions = placed.trace(inputs()).stages["llm.1"]
    assert functions.infer.abstract(*functions.forward_avals).result.shape == (ROWS, TOKENS)


def test_residuals_cannot_be_changed() -> None:
    aval: Any = jax.ShapeDtypeStruct((2,), jnp.float32)
    for one, name in ((Residual(aval, P()), "aval"), (_TracedVjp(None, [], [], ({}, {})), "structure")):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, None)


# ---- values ----------------------------------------------------------------------------------------------------------


def random_like(aval: Any, rng: np.random.Generator) -> jax.Array:
    return jax.device_put((rng.normal(size=aval.shape) / math.sqrt(aval.shape[-1])).astype(aval.dtype), aval.sharding)


@pytest.mark.parametrize(
    ("stage", "squared"),
    [pytest.param("vision.0", False, marks=pytest.mark.long), ("llm.0", False), ("llm.0", True)],
)
def test_backward_is_the_derivative_of_forward(stage: str, squared: bool) -> None:
    """Against autodiff of the plain forward on one device, with sums that are not empty and another cotangent."""
    shapes = {
        module: {n: jax.ShapeDtypeStruct((2, a.shape[1] // 2, *a.shape[2:]), a.dtype) for n, a in of.items()}
        for module, of in inputs().items()
    }
    shapes["vision"] = {n: jax.ShapeDtypeStruct((2, 8, *a.shape[2:]), a.dtype) for n, a in shapes["vision"].items()}
    placed = squared_last(place(), stage) if squared else traced("dots")[0]
    functions, rng = placed.trace(shapes).stages[stage], np.random.default_rng(0)
    params, sums, given, carry, _, _ = functions.backward_avals
    carry = functions.forward_avals[2]
    params, sums, carry = (jax.tree.map(lambda a: random_like(a, rng), tree) for tree in (params, sums, carry))
    given = {
        n: jax.device_put(
            random_like(a, rng) if a.dtype == jnp.float32 else rng.integers(1, 3, a.shape).astype(np.int32), a.sharding
        )
        for n, a in given.items()
    }
    cotangent = random_like(functions.cotangent_aval.activation, rng)

    out, kept = jax.jit(functions.forward)(params, given, carry)
    new, grads = jax.jit(functions.backward)(
        params, sums, given, carry if functions.backward_reads_carry else {}, kept, Output(cotangent, None)
    )

    dense = parity.world().submesh(Layout(), 0)

    def on_one(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), dense.sharding(P())), tree)

    def activation(p: Any, i: Any, c: Any) -> jax.Array:
        model = placed.stages[stage].model
        features, _ = model.forward(p, i, c, dense.axes, placed.cells)
        return model.give(p, i, features, dense.axes)

    forward = jax.shard_map(
        activation,
        mesh=dense.mesh,
        in_specs=P(),
        out_specs=P(dense.axes.dp),
    )

    @jax.jit
    def derivative(p: Any, i: Any, c: Any, cotangent: Any) -> Any:
        expected, vjp = jax.vjp(lambda p, c: forward(p, i, c), p, c)
        return expected, vjp(cotangent)

    expected, (wanted, wanted_carry) = derivative(*map(on_one, (params, given, carry, cotangent)))
    np.testing.assert_allclose(out.activation, expected, rtol=1e-5, atol=1e-5)
    got = jax.tree.map(lambda a, b: np.asarray(a - b).sum(0), new, sums)
    for a, b in zip(jax.tree.leaves((got, grads)), jax.tree.leaves((wanted, wanted_carry)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


P = jax.sharding.PartitionSpec
