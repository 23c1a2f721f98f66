"""Models that are not encoders, an LLM and generators: any graph without cycles, and modules with two groups of layers.

What such a model computes over its stages is compared with plain JAX over whole arrays, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spmd_runs import AXES, on_tp

from mmjax.configurable import ConfigError
from mmjax.jax_compat import varying_axes
from mmjax.mesh.layout import Layout
from mmjax.models.callbacks import Callback, Callbacks, reads
from mmjax.models.context import Context
from mmjax.models.dit.config import DiTConfig
from mmjax.models.dit.module import DiffusionTransformer
from mmjax.models.flops import parameter_count, training_factors
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.module import Llama
from mmjax.models.module import LayerGroup
from mmjax.models.nodes import Edge, Node
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.models.vit.module import VisionTransformer

VIT = ViTConfig(layers=2, width=16, heads=2, mlp=24, patch=2, merge=1, grid=4)
LLM = DecoderConfig(layers=2, width=24, heads=4, kv_heads=2, mlp=40, vocab=37)
DIT = DiTConfig(layers=1, width=16, heads=2, mlp=24, patch=2, merge=1, frequencies=2)
BETWEEN = ProjectorConfig(hidden=12)
WEB = MultimodalModel(
    {
        "vision": Node(VisionTransformer(VIT), BETWEEN),
        "llm": Node(Llama(LLM)),
        "painter": Node(DiffusionTransformer(DIT), BETWEEN, "start"),
        "printer": Node(DiffusionTransformer(replace(DIT, loss_weight=0.5)), BETWEEN, "start"),
    },
    (
        Edge("vision", "llm", "vision_index"),
        Edge("vision", "painter", "sights"),
        Edge("llm", "painter", "index"),
        Edge("painter", "printer", "drawn"),
    ),
)
"""An encoder feeds the LLM and a generator, which is fed by both; a further generator is behind the first."""


def rows(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Host inputs: one row of each module, with tokens of two modules in one of them."""
    ones, places = np.ones((1, 4), np.int32), np.arange(4, dtype=np.int32)[None]
    grid = np.stack([places // 2, places % 2], -1)
    patches = lambda: rng.normal(size=(1, 4, 4)).astype("f4")  # noqa: E731
    times, weights = rng.random((1, 4)).astype("f4"), rng.random((1, 4)).astype("f4")
    drawn = {"segments": ones, "positions": grid, "times": times, "weights": weights}
    return {
        "vision": {"patches": patches(), "segments": ones, "positions": grid},
        "llm": {
            **{"tokens": np.array([[3, 36, 36, 5]]), "segments": ones, "positions": places},
            **{"targets": np.array([[1, 2, 3, 4]]), "weights": weights, "vision_index": np.array([[-1, 2, 0, -1]])},
        },
        "painter": {
            **drawn,
            **{"patches": patches(), "targets": patches()},
            **{"sights": np.array([[1, -1, 3, -1]]), "index": np.array([[-1, 2, -1, -1]])},
        },
        "printer": {**drawn, "patches": patches(), "targets": patches(), "drawn": np.array([[3, 2, -1, 0]])},
    }


def losses(model: MultimodalModel, layouts: dict[str, Layout], params: Any, inputs: Any) -> dict[str, jax.Array]:
    """Loss of each module, stage after stage."""
    carry: dict[str, jax.Array] = {}
    found: dict[str, jax.Array] = {}
    for stage in model.stages(layouts):
        given = {name: jnp.asarray(inputs[stage.module][name]) for name in stage.inputs}
        own = params[stage.name]
        x, _ = stage.forward(own, given, {name: carry[name] for name in stage.sources}, AXES, 1)
        carry[stage.name] = stage.give(own, given, x, AXES)
        if stage.losses:
            found[stage.module] = stage.loss(own, given, x, AXES)["loss"]
    return found


def initial(model: MultimodalModel, layouts: dict[str, Layout]) -> dict[str, Any]:
    key = jax.random.key(0)
    return {stage.name: {part.module: part.initialise(key) for part in stage.slices} for stage in model.stages(layouts)}


def whole(layouts: Any) -> dict[str, Layout]:
    return {**dict.fromkeys(WEB.nodes, Layout()), **layouts}


def test_any_graph_is_cut_into_stages() -> None:
    stages = {stage.name: stage for stage in WEB.stages(whole({"llm": Layout(pp=2), "vision": Layout(pp=2)}))}
    assert {name: stage.sources for name, stage in stages.items()} == {
        "vision.0": (),
        "vision.1": ("vision.0",),
        "llm.0": ("vision.1",),
        "llm.1": ("llm.0",),
        "painter.0": ("vision.1", "llm.1"),
        "printer.0": ("painter.0",),
    }
    assert [name for name, stage in stages.items() if stage.losses] == ["llm.1", "painter.0", "printer.0"]
    weights = {stage.module: {n: kind.weight for n, kind in stage.losses.items()} for stage in stages.values()}
    assert weights == {"vision": {}, "llm": {"loss": 1.0}, "painter": {"loss": 1.0}, "printer": {"loss": 0.5}}
    # The painter's projector takes what the LLM and the encoder give, the printer's what the painter gives.
    assert WEB.projector_widths("vision") == {"": (16, 12, 24)}
    assert WEB.projector_widths("painter") == {"": (24, 12, 16), "vision": (24, 12, 16)}
    assert WEB.projector_widths("printer") == {"": (16, 12, 16)}
    assert parameter_count(WEB)["printer_projector"] == 16 * 12 + 12 + 12 * 16 + 16


@pytest.mark.long
def test_gradients_reach_every_module_that_feeds_another() -> None:
    """By difference quotients in the direction of each module's own gradient, and the same cut into more stages."""
    inputs, one = rows(np.random.default_rng(0)), whole({})

    def total(params: Any, only: str) -> jax.Array:
        return losses(WEB, one, params, inputs)[only]

    def gradients(params: Any, only: str) -> Any:
        return jax.grad(total)(params, only)

    run = lambda only: jax.jit(lambda p: on_tp(1, lambda p: gradients(p, only), p))  # noqa: E731
    params = initial(WEB, one)
    reached = {only: run(only)(params) for only in ("llm", "painter", "printer")}
    touched = {
        only: {name for name, own in found.items() if any(np.abs(x).max() > 0 for x in jax.tree.leaves(own))}
        for only, found in reached.items()
    }
    assert touched["llm"] == {"vision.0", "llm.0"}
    assert touched["painter"] == {"vision.0", "llm.0", "painter.0"}
    assert touched["printer"] == {"vision.0", "llm.0", "painter.0", "printer.0"}
    value = jax.jit(lambda p: on_tp(1, lambda p: total(p, "printer"), p))
    for name in one:
        direction = jax.tree.map(lambda x, name=name: x * 0, reached["printer"])
        direction[f"{name}.0"] = reached["printer"][f"{name}.0"]
        square = sum(float(jnp.vdot(x, x)) for x in jax.tree.leaves(direction))
        step = 1e-2 / np.sqrt(square)
        moved = (jax.tree.map(lambda p, d, by=by: p + by * d, params, direction) for by in (step, -step))
        ahead, back = (float(value(p)) for p in moved)
        np.testing.assert_allclose((ahead - back) / (2 * step), square, rtol=2e-2)


@pytest.mark.long
def test_tokens_of_two_modules_meet_in_one_row() -> None:
    """What the encoder sees and the LLM says both change the drawing, each at its own places."""
    inputs, one = rows(np.random.default_rng(1)), whole({})
    params = initial(WEB, one)
    run = jax.jit(lambda p, given: on_tp(1, lambda p, given: losses(WEB, one, p, given), p, given))
    before = run(params, inputs)
    unseen = {**inputs, "painter": {**inputs["painter"], "sights": np.full((1, 4), -1)}}
    unsaid = {**inputs, "painter": {**inputs["painter"], "index": np.full((1, 4), -1)}}
    for changed in (unseen, unsaid):
        after = run(params, changed)
        assert after["llm"] == before["llm"]
        assert after["painter"] != before["painter"] and after["printer"] != before["printer"]


def test_frozen_modules_pass_gradients_to_whatever_trains_upstream() -> None:
    factors = training_factors(WEB, {"llm", "painter", "printer", "painter_projector", "printer_projector"})
    assert factors == {
        **{"vision": 3, "vision_projector": 3, "llm": 2},
        **{"painter": 2, "painter_projector": 2, "printer": 2, "printer_projector": 2},
    }
    frozen = {"vision", "vision_projector", "llm", "painter_projector", "painter"}
    assert training_factors(WEB, frozen) == {
        **{"vision": 1, "vision_projector": 1, "llm": 1},
        **{"painter": 1, "painter_projector": 1, "printer": 3, "printer_projector": 3},
    }


@pytest.mark.parametrize(
    ("edges", "why"),
    [
        ((Edge("llm", "vision", "i"),), "put 'llm' before 'vision'"),
        ((Edge("vision", "lmm", "i"),), "no module 'lmm'"),
        ((), "vision: a projector at its end and no edge there"),
    ],
)
def test_what_is_no_such_graph_is_refused(edges: tuple[Edge, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        MultimodalModel({name: WEB.nodes[name] for name in ("vision", "llm")}, edges)


# ---- two groups of layers --------------------------------------------------------------------------------------------


class Alternating(VisionTransformer):
    """A ViT whose second layer is of another group."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        (group,) = super().groups
        return tuple(replace(group, layers=layers) for layers in (1, self.config.layers - 1))


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_groups_of_layers_are_cut_anywhere(pp: int) -> None:
    """Equal layers in two groups, stacked or not, are the layers in one: names, initial values, output."""
    vit = replace(VIT, layers=3)
    plain, grouped = multimodal({"vision": vit}, LLM), multimodal({"vision": Alternating(vit)}, LLM)
    layouts = {"vision": Layout(pp=pp), "llm": Layout()}
    inputs, found = rows(np.random.default_rng(2)), []
    for model in (plain, grouped, replace(grouped, unroll=True)):
        params = initial(model, layouts)
        run = jax.jit(lambda p, model=model: on_tp(1, lambda p: losses(model, layouts, p, inputs)["llm"], p))
        names = {
            name
            for stage in model.stages(layouts)
            for part in stage.slices
            for leaf in jax.tree.leaves(part.leaves())
            for name in leaf.names
        }
        found.append((names, float(run(params))))
    assert found[0][0] == found[1][0] == found[2][0]
    np.testing.assert_allclose([loss for _, loss in found], found[0][1], rtol=1e-6)


def test_groups_that_do_not_add_up_are_refused() -> None:
    class Short(VisionTransformer):
        @property
        def groups(self) -> tuple[LayerGroup, ...]:
            return (replace(super().groups[0], layers=1),)

    with pytest.raises(ConfigError, match=r"Short\.groups have 1 layers and ViT\.layers is 2"):
        multimodal({"vision": Short(VIT)}, LLM).stages({"vision": Layout(), "llm": Layout()})


# ---- callbacks -------------------------------------------------------------------------------------------------------

SPOTS = [
    *(("vision", place) for place in ("before", "after", "projected")),
    *(("llm", place) for place in ("before", "after")),
    *((name, place) for name in ("painter", "printer") for place in ("projected", "before", "after")),
]
"""Where the web has room for callbacks, in the order in which they are called."""


def with_callbacks(made: Callable[[str, Any], Callback]) -> MultimodalModel:
    """The web with ``made(module, place)`` everywhere."""
    given: dict[str, dict[str, Callback]] = {}
    for module, place in SPOTS:
        given.setdefault(module, {})[place] = made(module, place)
    nodes = {name: replace(node, callbacks=Callbacks(**given[name])) for name, node in WEB.nodes.items()}
    return replace(WEB, nodes=nodes)


@pytest.mark.long
def test_callbacks_stand_between_the_parts_of_a_module() -> None:
    """Each is called once, however the module is cut; with callbacks that change nothing the losses are bitwise so."""
    called: list[tuple[str, str, tuple[int, ...]]] = []

    def noting(module: str, place: str) -> Callback:
        def note(context: Context, x: jax.Array) -> jax.Array:
            assert context.tokens.segments_BT.shape == (1, 4)
            called.append((module, place, x.shape))
            return x

        return note

    inputs, cut = rows(np.random.default_rng(3)), whole({"llm": Layout(pp=2), "vision": Layout(pp=2)})
    params = initial(WEB, cut)
    run = lambda model: jax.jit(lambda p: on_tp(1, lambda p: losses(model, cut, p, inputs), p))(params)  # noqa: E731
    plain, noted = run(WEB), run(with_callbacks(noting))
    assert plain == noted
    widths = {"vision": 16, "llm": 24, "painter": 16, "printer": 16}
    assert called == [
        (module, place, (1, 4, 24 if (module, place) == ("vision", "projected") else widths[module]))
        for module, place in SPOTS
    ]


@pytest.mark.long
@pytest.mark.parametrize(("module", "place"), SPOTS)
def test_what_a_callback_gives_takes_the_place_of_what_it_was_given(module: str, place: str) -> None:
    """Without tokens of others, a module does not depend on them; without features, not on anything."""
    one, rng = whole({}), np.random.default_rng(4)
    inputs, params = rows(rng), initial(WEB, one)
    other = {**inputs, "vision": rows(rng)["vision"]}
    node = replace(WEB.nodes[module], callbacks=Callbacks(**{place: lambda context, x: 0 * x}))
    model = replace(WEB, nodes={**WEB.nodes, module: node})
    run = jax.jit(lambda p, given: on_tp(1, lambda p, given: losses(model, one, p, given), p, given))
    first, second = (run(params, given) for given in (inputs, other))
    same = {name for name in first if first[name] == second[name]}
    # Whatever the encoder sees passes the spot; the painter is fed by the encoder and the LLM, the printer by it alone.
    behind = {"vision": {"llm", "painter", "printer"}, "llm": {"llm"}, "painter": {"painter", "printer"}}
    assert same == behind.get(module, {"printer"})


def test_a_stage_reads_what_its_callbacks_declare() -> None:
    @reads("patches", "positions")
    def reading(context: Context, x: jax.Array) -> jax.Array:
        return x + 0 * context.inputs["patches"][..., :1]

    def reads_patches(model: MultimodalModel) -> dict[str, bool]:
        stages = model.stages(whole({"llm": Layout(pp=2), "vision": Layout(pp=2)}))
        assert all(len(set(stage.inputs)) == len(stage.inputs) for stage in stages)
        return {stage.name: "patches" in stage.inputs for stage in stages}

    before = {"vision.0": True, "vision.1": False, "llm.0": False, "llm.1": False, "painter.0": True, "printer.0": True}
    assert reads_patches(WEB) == before
    assert reads_patches(with_callbacks(lambda module, place: reading)) == dict.fromkeys(before, True)
    for place, stage in {"before": "llm.0", "after": "llm.1"}.items():
        own = replace(WEB.nodes["llm"], callbacks=Callbacks(**{place: reading}))
        assert reads_patches(replace(WEB, nodes={**WEB.nodes, "llm": own})) == {**before, stage: True}


@pytest.mark.parametrize(
    ("callback", "why"),
    [
        (lambda context, x: x[:, ::2], r"gives float32\[1, 2, 16\] for local rows float32\[1, 4, 16\]; keep shape and"),
        (lambda context, x: x.astype(jnp.bfloat16), r"gives bfloat16\[1, 4, 16\] for local rows float32\[1, 4, 16\]"),
        (lambda context, x: None, r"gives NoneType for local rows"),
        (lambda context, x: x + jax.lax.axis_index("tp"), r"its result differs over tp; sum it there"),
    ],
    ids=["shape", "dtype", "nothing", "ranks"],
)
def test_a_callback_that_changes_more_than_values_is_refused(callback: Callback, why: str) -> None:
    node = replace(WEB.nodes["vision"], callbacks=Callbacks(after=callback))
    model, inputs = replace(WEB, nodes={**WEB.nodes, "vision": node}), rows(np.random.default_rng(5))
    params = initial(model, whole({}))
    with pytest.raises(ConfigError, match=rf"^vision/Callbacks\.after='\S+:<lambda>': {why}"):
        jax.eval_shape(lambda p: on_tp(2, lambda p: losses(model, whole({}), p, inputs), p), params)


def test_a_constant_result_may_take_the_place_of_features() -> None:
    one = rows(np.random.default_rng(6))["vision"]

    def call(x: jax.Array) -> jax.Array:
        callbacks = Callbacks(after=lambda context, x: jnp.ones(x.shape, x.dtype))
        y = callbacks.apply("after", "vision", Context.of(AXES, one, "full"), x)
        assert varying_axes(y) == varying_axes(x) == {"tp"}
        return y

    assert (on_tp(2, call, jnp.zeros((2, 4)), specs=(P("tp"),), out=P("tp")) == 1).all()


def test_callbacks_without_a_place_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Callbacks\.projected: the node has no projector; use Callbacks\.after"):
        Node(Llama(LLM), callbacks=Callbacks(projected=lambda context, x: x))
    with pytest.raises(ValueError, match="callbacks: no module 'vison'; use one of"):
        multimodal({"vision": VIT}, LLM, callbacks={"vison": Callbacks()})
