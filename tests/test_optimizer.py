"""The optimizer against AdamW written out in numpy, and the learning rate's end points."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mmjax.configurable import ConfigError
from mmjax.mesh.spread import Axes
from mmjax.models.parameters import Leaf
from mmjax.optimizer import Moments, learning_rate, make_optimizer, moments, with_moments
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.rates import scale_updates
from mmjax.pipeline.zero import ZeroLeaf

SHAPES = {"llm/layers/000/attn/q": (4, 6), "llm/layers/000/attn_norm": (4,), "llm/scale": ()}
MASK = {"llm/layers/000/attn/q": True, "llm/layers/000/attn_norm": False, "llm/scale": False}
CONFIG = OptimizerConfig(
    learning_rate=0.03, final_learning_rate=0.003, warmup=3, schedule="cosine", weight_decay=0.2, b1=0.8, b2=0.9,
    eps=1e-3,
)  # fmt: skip


def tree(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def hand_written_rate(config: OptimizerConfig, count: int, total: int) -> float:
    if count < config.warmup:
        return config.learning_rate * (count + 1) / (config.warmup + 1)
    done = min(1.0, (count - config.warmup) / (total - config.warmup))
    share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[config.schedule]
    floor = config.learning_rate if config.schedule == "constant" else config.final_learning_rate
    return floor + (config.learning_rate - floor) * share


def hand_written_adamw(config: OptimizerConfig, total: int, steps: int) -> dict[str, np.ndarray]:
    parameters = {name: p.astype(np.float64) for name, p in tree(0).items()}
    m = {name: np.zeros_like(p) for name, p in parameters.items()}
    v = {name: np.zeros_like(p) for name, p in parameters.items()}
    for t in range(1, steps + 1):
        gradients = tree(t)
        rate = hand_written_rate(config, t - 1, total)
        for name, p in parameters.items():
            g = gradients[name].astype(np.float64)
            m[name] = config.b1 * m[name] + (1 - config.b1) * g
            v[name] = config.b2 * v[name] + (1 - config.b2) * g * g
            step = (m[name] / (1 - config.b1**t)) / (np.sqrt(v[name] / (1 - config.b2**t)) + config.eps)
            decay = config.weight_decay if p.ndim > 1 else 0.0
            parameters[name] = p - rate * (step + decay * p)
    return parameters


def train(optimizer: optax.GradientTransformation, steps: int, transform=lambda leaves: leaves):
    parameters = transform(jax.tree.map(jnp.asarray, tree(0)))
    state = optimizer.init(parameters)

    @jax.jit
    def update(parameters, state, gradients):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for t in range(1, steps + 1):
        parameters, state = update(parameters, state, transform(jax.tree.map(jnp.asarray, tree(t))))
    return parameters, state


def assert_close(got: Any, want: dict[str, np.ndarray]) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(np.asarray(got[name]), value, rtol=2e-5, atol=1e-6, err_msg=name)


def test_updates_are_hand_written_adamw():
    parameters, _ = train(make_optimizer(CONFIG, 10, MASK), 10)
    assert_close(parameters, hand_written_adamw(CONFIG, 10, 10))


def test_defaults_are_adam_with_a_constant_rate():
    parameters, _ = train(make_optimizer(OptimizerConfig(), 5, MASK), 5)
    assert_close(parameters, hand_written_adamw(OptimizerConfig(), 5, 5))


def test_what_the_mask_names_decays():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.5, weight_decay=0.1), 1, MASK)
    parameters = jax.tree.map(jnp.asarray, tree(0))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, parameters), optimizer.init(parameters), parameters)
    assert_close(updates, {name: value * (-0.05 if MASK[name] else 0.0) for name, value in tree(0).items()})


def test_a_shard_of_any_leaf_is_updated_like_the_whole():
    # Layers stacked, sliced along the last dimension, and cut into single elements: the mask is the logical leaf's.
    want = hand_written_adamw(CONFIG, 6, 6)
    columns = {name: (slice(None), slice(2, 5)) if len(shape) > 1 else ... for name, shape in SHAPES.items()}
    got, _ = train(make_optimizer(CONFIG, 6, MASK), 6, lambda t: {k: x[columns[k]] for k, x in t.items()})
    assert_close(got, {name: value[columns[name]] for name, value in want.items()})
    stacked, _ = train(make_optimizer(CONFIG, 6, MASK), 6, lambda t: {k: jnp.stack([x, x]) for k, x in t.items()})
    assert_close(stacked, {name: np.stack([value, value]) for name, value in want.items()})
    flat, _ = train(make_optimizer(CONFIG, 6, MASK), 6, lambda t: {k: x.reshape(-1)[:1] for k, x in t.items()})
    assert_close(flat, {name: value.reshape(-1)[:1] for name, value in want.items()})


def test_the_update_runs_on_shards_inside_shard_map():
    optimizer = make_optimizer(CONFIG, 4, MASK)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("dp",))
    specs = {name: P(None, "dp") if len(shape) > 1 else P() for name, shape in SHAPES.items()}
    parameters = jax.tree.map(jnp.asarray, tree(0))
    state = optimizer.init(parameters)
    state_specs = optax.tree.map_params(
        optimizer, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )

    def local(parameters, state, gradients):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    update = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))
    )
    for t in range(1, 5):
        parameters, state = update(parameters, state, tree(t))
    assert_close(parameters, hand_written_adamw(CONFIG, 4, 4))


def test_the_first_pattern_that_fits_and_the_layer_decide_over_the_rate():
    """As ``optax.multi_transform`` with an optimizer of its own for each rate; decay is multiplied too."""
    given: Any = dict(learning_rate=0.03, weight_decay=0.2, eps=1e-3)
    config = OptimizerConfig(
        **given, rates={"layers/001/attn/?": 0.5, "layers/001/*": 2.0, "head": 0.0}, layer_decay=0.8
    )
    factors = {  # of three layers: BEiT's rule, times the pattern's
        ("embed", 4): 0.8**4,
        ("layers/000/attn/q", 3): 0.8**3,
        ("layers/001/attn/q", 2): 0.5 * 0.8**2,
        ("layers/001/attn_norm", 2): 2.0 * 0.8**2,
        ("layers/002/attn/q", 1): 0.8,
        ("norm", 0): 1.0,
        ("head", 0): 0.0,
    }
    for (name, from_end), factor in factors.items():
        assert config.factor(name, from_end) == pytest.approx(factor, rel=1e-12), name
    random = np.random.default_rng(0)
    names = {name: (2,) if name.endswith("norm") else (2, 3) for name, _ in factors}
    leaves = {
        name: Leaf("llm", name, None, shape, shape, ("embed",) * len(shape), from_end=(from_end,))
        for (name, from_end), shape in zip(factors, names.values(), strict=True)
    }
    zeros = {name: ZeroLeaf(leaf, None, leaf.shape) for name, leaf in leaves.items()}
    masks = {name: leaf.decayed for name, leaf in leaves.items()}
    labels = {name: str(at) for at, name in enumerate(names)}
    groups: Any = {
        labels[name]: make_optimizer(
            dataclasses.replace(OptimizerConfig(**given), learning_rate=max(0.03 * factor, 1e-30)),
            4,
            lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
        )
        for (name, _), factor in factors.items()
    }
    wanted, mine = optax.multi_transform(groups, labels), make_optimizer(config, 4, masks)
    got: Any = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in names.items()}
    want: Any = got
    states = (mine.init(got), wanted.init(got))
    for _ in range(3):
        gradients = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in names.items()}
        updates, first = mine.update(gradients, states[0], got)
        got = optax.apply_updates(got, scale_updates(config, zeros, updates, Axes()))
        updates, second = wanted.update(gradients, states[1], want)
        want, states = optax.apply_updates(want, updates), (first, second)
    assert_close(got, {name: np.asarray(leaf) for name, leaf in dict(want).items()})


def test_a_frozen_module_has_no_state_no_updates_and_rate_zero():
    config = OptimizerConfig(frozen=True, warmup=100, weight_decay=0.5)
    optimizer = make_optimizer(config, 10, MASK)
    parameters, state = train(optimizer, 3)
    assert jax.tree.leaves(state) == [] and moments(state) is None
    for name, value in tree(0).items():
        assert np.asarray(parameters[name]).tobytes() == value.tobytes()
    assert np.asarray(learning_rate(config, 10)(5)) == 0.0
    with pytest.raises(ValueError, match="frozen"):
        with_moments(state, Moments(m={}, v={}, count=jnp.zeros((), jnp.int32)))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_the_schedules_end_points(schedule):
    config = OptimizerConfig(learning_rate=0.4, final_learning_rate=0.1, warmup=4, schedule=schedule)
    rate = learning_rate(config, 24)
    end = 0.4 if schedule == "constant" else 0.1
    middle = {"constant": 0.4, "cosine": 0.25, "linear": 0.25}[schedule]
    expected = {0: 0.08, 1: 0.16, 3: 0.32, 4: 0.4, 14: middle, 24: end, 1000: end}
    for count, value in expected.items():
        assert np.asarray(rate(count)) == pytest.approx(value, rel=1e-6), count


@settings(deadline=None, max_examples=30)
@given(
    peak=st.floats(1e-6, 1.0), share=st.floats(0, 1), warmup=st.integers(0, 8), rest=st.integers(1, 20),
    schedule=st.sampled_from(["constant", "cosine", "linear"]),
)  # fmt: skip
def test_the_rate_is_the_hand_written_one_at_every_step(peak, share, warmup, rest, schedule):
    config = OptimizerConfig(
        learning_rate=peak, final_learning_rate=peak * share, warmup=warmup, schedule=schedule
    )  # fmt: skip
    counts = np.arange(30)
    got = np.asarray(jax.vmap(learning_rate(config, warmup + rest))(counts))
    want = [hand_written_rate(config, int(count), warmup + rest) for count in counts]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=peak * 1e-6)


def test_saved_moments_continue_the_run():
    optimizer = make_optimizer(CONFIG, 8, MASK)
    parameters, state = train(optimizer, 5)
    saved = moments(state)
    assert saved is not None and int(saved.count) == 5 and saved.m.keys() == saved.v.keys() == SHAPES.keys()
    fresh = with_moments(optimizer.init(parameters), saved)
    for t in range(6, 9):
        updates, fresh = optimizer.update(jax.tree.map(jnp.asarray, tree(t)), fresh, parameters)
        parameters = optax.apply_updates(parameters, updates)
    assert_close(parameters, hand_written_adamw(CONFIG, 8, 8))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0), ("learning_rate", math.nan), ("final_learning_rate", -1e-3), ("warmup", -1),
        ("rates", {"embed": -1.0}), ("layer_decay", 0.0), ("layer_decay", 1.5),
        ("schedule", "cosin"), ("weight_decay", -0.1), ("b1", 1.0), ("b2", -0.5), ("eps", 0.0),
    ],
)  # fmt: skip
def test_illegal_values_are_named_in_one_line(field, value):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**{field: value})
    message = str(caught.value)
    shown = "Optimizer.rates['embed']=-1.0" if field == "rates" else str(value)
    assert f"Optimizer.{field}" in message and shown in message and "\n" not in message


def test_a_warmup_as_long_as_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"Optimizer.warmup.*100.*Train.steps = 100, such as 10"):
        make_optimizer(OptimizerConfig(warmup=100), 100, MASK)
