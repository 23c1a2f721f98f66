"""The dense reference against float64 NumPy written in another form, finite differences and optax."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from mmjax import reference
from mmjax.data.types import Sample
from mmjax.mesh.layout import Layout
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.optimizer import learning_rate as trained_rate
from mmjax.optimizer_config import OptimizerConfig

VISION, SOUND = 27, 28  # placeholder ids
SQUARE = ViTConfig(
    layers=2, width=16, heads=2, mlp=24, patch=2, channels=1, merge=2, positions="rope2d", grid=4, activation="gelu"
)
TABLE = dataclasses.replace(SQUARE, layers=1, channels=3, merge=1, positions="learned2d", activation="quick_gelu")
DECODER = DecoderConfig(
    layers=2, width=20, heads=4, kv_heads=2, head_dim=6, mlp=24, vocab=29, rope_theta=50.0, norm_eps=1e-5, tied=False
)
HIDDEN = 14


def make_model(encoders: dict[str, ViTConfig], llm: DecoderConfig = DECODER) -> MultimodalModel:
    return multimodal(encoders, llm, projectors=dict.fromkeys(encoders, ProjectorConfig(hidden=HIDDEN)))


MODEL = make_model({"vision": SQUARE, "sound": TABLE})


def vit_shapes(name: str, vit: ViTConfig, llm_width: int) -> dict[str, tuple[int, ...]]:
    d, f, block = vit.width, vit.mlp, vit.merge**2 * vit.width
    shapes: dict[str, tuple[int, ...]] = {"patch/kernel": (vit.patch**2 * vit.channels, d), "patch/bias": (d,)}
    if vit.positions == "learned2d":
        shapes["position"] = (vit.grid**2, d)
    for layer in range(vit.layers):
        at = f"layers/{layer:03d}"
        shapes |= {f"{at}/{norm}/{part}": (d,) for norm in ("attn_norm", "mlp_norm") for part in ("scale", "bias")}
        shapes |= {f"{at}/attn/{part}": (d, d) for part in "qkvo"} | {f"{at}/attn/{part}_bias": (d,) for part in "qkvo"}
        shapes |= {
            f"{at}/mlp/up": (d, f),
            f"{at}/mlp/up_bias": (f,),
            f"{at}/mlp/down": (f, d),
            f"{at}/mlp/down_bias": (d,),
        }
    shapes |= {"norm/scale": (d,), "norm/bias": (d,)}
    projector = {"up": (block, HIDDEN), "up_bias": (HIDDEN,), "down": (HIDDEN, llm_width), "down_bias": (llm_width,)}
    return {f"{name}/{k}": v for k, v in shapes.items()} | {f"{name}_projector/{k}": v for k, v in projector.items()}


def llm_shapes(decoder: DecoderConfig) -> dict[str, tuple[int, ...]]:
    d, f, v, k = decoder.width, decoder.mlp, decoder.vocab, decoder.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (v, d), "norm": (d,)} | ({} if decoder.tied else {"head": (d, v)})
    for layer in range(decoder.layers):
        parts = {"attn_norm": (d,), "mlp_norm": (d,), "mlp/gate": (d, f), "mlp/up": (d, f), "mlp/down": (f, d)}
        parts |= {"attn/q": (d, decoder.heads * k), "attn/o": (decoder.heads * k, d)}
        parts |= {"attn/k": (d, decoder.kv_heads * k), "attn/v": (d, decoder.kv_heads * k)}
        shapes |= {f"layers/{layer:03d}/{name}": shape for name, shape in parts.items()}
    return {f"llm/{name}": shape for name, shape in shapes.items()}


def random_leaves(model: MultimodalModel, seed: int = 0) -> dict[str, np.ndarray]:
    """float64 leaves; every bias and scale differs from its usual start, so that none can be forgotten."""
    rng = np.random.default_rng(seed)
    shapes = llm_shapes(model.llm)
    for name, encoder in model.encoders.items():
        shapes |= vit_shapes(name, encoder.config, model.llm.width)
    centre = {name: float("scale" in name or name.endswith("norm")) for name in shapes}
    return {n: centre[n] + rng.normal(size=shape) * (0.3 if len(shape) == 1 else 0.4) for n, shape in shapes.items()}


def make_sample(layout: str, images: dict[str, list[tuple[int, int]]], seed: int) -> Sample:
    """`layout` has one letter per token: t text, V and S placeholders; image sizes are in pixels."""
    rng = np.random.default_rng(seed)
    ids = {"V": VISION, "S": SOUND}
    tokens = np.array([ids.get(letter) or rng.integers(1, 26) for letter in layout], np.int32)
    weights = np.where(tokens < VISION, rng.uniform(0.5, 2, len(tokens)), 0).astype(np.float32)
    channels = {"vision": 1, "sound": 3}
    media = {n: tuple(rng.normal(size=(*s, channels[n])).astype(np.float32) for s in v) for n, v in images.items()}
    return Sample(
        tokens=tokens,
        loss_weights=weights,
        media=media,
        question="",
        answer="",
        prompt=max(1, len(tokens) - 2),
        media_tokens={"vision": VISION, "sound": SOUND},
    )


TWO_IMAGES = make_sample("tVVtVtt", {"vision": [(4, 8), (4, 4)]}, 1)
BOTH = make_sample("SStVtSSSStt", {"sound": [(2, 4), (4, 4)], "vision": [(4, 4)]}, 2)
TEXT = make_sample("ttttt", {}, 3)
SAMPLES = (TWO_IMAGES, BOTH, TEXT)


# --- the same equations in float64 NumPy: complex rotations, explicit loops over heads and queries -------------------


def np_rotate(x_NK: np.ndarray, positions_N: np.ndarray, theta: float) -> np.ndarray:
    half = x_NK.shape[1] // 2
    z = (x_NK[:, :half] + 1j * x_NK[:, half:]) * np.exp(
        1j * np.array([[position / theta ** (i / half) for i in range(half)] for position in positions_N])
    )
    return np.concatenate([z.real, z.imag], axis=1)


def np_attention(q_NHK: np.ndarray, k_NGK: np.ndarray, v_NGK: np.ndarray, causal: bool) -> np.ndarray:
    n, heads, head_dim = q_NHK.shape
    out = np.zeros_like(q_NHK)
    for h in range(heads):
        g = h * k_NGK.shape[1] // heads
        for i in range(n):
            seen = i + 1 if causal else n
            p = np.exp(np.array([q_NHK[i, h] @ k_NGK[j, g] for j in range(seen)]) / math.sqrt(head_dim))
            out[i, h] = (p / p.sum()) @ v_NGK[:seen, g]
    return out.reshape(n, heads * head_dim)


def np_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def np_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def np_encode(leaves: dict[str, np.ndarray], name: str, vit: ViTConfig, image: np.ndarray) -> np.ndarray:
    def w(key: str) -> np.ndarray:
        return leaves[f"{name}/{key}"]

    def norm(key: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return scaled * w(f"{key}/scale") + w(f"{key}/bias")

    p, k, head_dim = vit.patch, vit.merge, vit.width // vit.heads
    rows, columns = image.shape[0] // p, image.shape[1] // p
    order = sorted(np.ndindex(rows, columns), key=lambda rc: (rc[0] // k, rc[1] // k, rc[0] % k, rc[1] % k))
    at = np.array(order)
    patches = np.array([image[r * p : r * p + p, c * p : c * p + p].ravel() for r, c in order], np.float64)
    x = patches @ w("patch/kernel") + w("patch/bias")
    if vit.positions == "learned2d":
        x = x + np.array([w("position")[r * vit.grid + c] for r, c in order])
    for layer in range(vit.layers):
        base = f"layers/{layer:03d}"
        y = norm(f"{base}/attn_norm", x)
        q, keys, v = (
            (y @ w(f"{base}/attn/{s}") + w(f"{base}/attn/{s}_bias")).reshape(len(x), vit.heads, head_dim) for s in "qkv"
        )
        if vit.positions == "rope2d":
            for z in (q, keys):
                for h in range(vit.heads):
                    for axis in (0, 1):
                        part = slice(axis * head_dim // 2, (axis + 1) * head_dim // 2)
                        z[:, h, part] = np_rotate(z[:, h, part], at[:, axis], 100.0)
        x = x + np_attention(q, keys, v, causal=False) @ w(f"{base}/attn/o") + w(f"{base}/attn/o_bias")
        y = norm(f"{base}/mlp_norm", x) @ w(f"{base}/mlp/up") + w(f"{base}/mlp/up_bias")
        y = np_gelu(y) if vit.activation == "gelu" else y * np_sigmoid(1.702 * y)
        x = x + y @ w(f"{base}/mlp/down") + w(f"{base}/mlp/down_bias")
    x = norm("norm", x)
    x = np.array([np.concatenate(list(x[i : i + k * k])) for i in range(0, len(x), k * k)])
    up = np_gelu(x @ leaves[f"{name}_projector/up"] + leaves[f"{name}_projector/up_bias"])
    return up @ leaves[f"{name}_projector/down"] + leaves[f"{name}_projector/down_bias"]


def np_logits(leaves: dict[str, np.ndarray], model: MultimodalModel, sample: Sample) -> np.ndarray:
    c = model.llm

    def norm(key: str, x: np.ndarray) -> np.ndarray:
        return x * leaves[f"llm/{key}"] / np.sqrt((x * x).mean(1, keepdims=True) + c.norm_eps)

    queues = {
        sample.media_tokens[name]: [
            row for image in sample.media.get(name, ()) for row in np_encode(leaves, name, encoder.config, image)
        ]
        for name, encoder in model.encoders.items()
    }
    x = np.array([queues[t].pop(0) if t in queues else leaves["llm/embed"][t] for t in sample.tokens.tolist()])
    for layer in range(c.layers):
        base = f"layers/{layer:03d}"
        y = norm(f"{base}/attn_norm", x)
        q, k, v = (
            (y @ leaves[f"llm/{base}/attn/{s}"]).reshape(len(x), heads, c.head_dim)
            for s, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))
        )
        for z in (q, k):
            for h in range(z.shape[1]):
                z[:, h] = np_rotate(z[:, h], np.arange(len(x)), c.rope_theta)
        x = x + np_attention(q, k, v, causal=True) @ leaves[f"llm/{base}/attn/o"]
        y = norm(f"{base}/mlp_norm", x)
        gate = y @ leaves[f"llm/{base}/mlp/gate"]
        x = x + (gate * np_sigmoid(gate) * (y @ leaves[f"llm/{base}/mlp/up"])) @ leaves[f"llm/{base}/mlp/down"]
    x = norm("norm", x)
    return x @ (leaves["llm/embed"].T if c.tied else leaves["llm/head"])


def np_loss(leaves: dict[str, np.ndarray], model: MultimodalModel, sample: Sample) -> float:
    logits = np_logits(leaves, model, sample)
    total = 0.0
    for t in range(1, len(sample.tokens)):
        p = np.exp(logits[t - 1] - logits[t - 1].max())
        total -= float(sample.loss_weights[t]) * math.log(p[sample.tokens[t]] / p.sum())
    return total


def test_leaves_are_those_of_the_model() -> None:
    parts = [
        part for stage in MODEL.stages(dict.fromkeys(("vision", "sound", "llm"), Layout())) for part in stage.slices
    ]
    leaves = [leaf for part in parts for leaf in jax.tree.leaves(part.leaves())]
    shapes = {name: leaf.logical_shape for leaf in leaves for name in leaf.names}
    assert {name: leaf.shape for name, leaf in random_leaves(MODEL).items()} == shapes


# --- forward ---------------------------------------------------------------------------------------------------------


def test_patches_come_in_merge_blocks() -> None:
    image = np.arange(4 * 6, dtype=np.float32).reshape(4, 6, 1)
    assert reference.patch_positions(2, 3, 1).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert reference.cut_patches(image, 2, 1)[1].tolist() == [2, 3, 8, 9]
    merged = reference.patch_positions(4, 4, 2)
    assert merged.tolist()[:6] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3]]
    assert reference.cut_patches(image, 1, 2)[:5, 0].tolist() == [0, 1, 6, 7, 2]


@pytest.mark.parametrize("positions", ["rope2d", "learned2d"])
@pytest.mark.parametrize(("activation", "merge"), [("gelu", 2), ("quick_gelu", 1)])
def test_encode_image_matches_numpy(positions: str, activation: str, merge: int) -> None:
    vit = dataclasses.replace(SQUARE, positions=positions, activation=activation, merge=merge)
    leaves = random_leaves(make_model({"vision": vit}))
    image = np.random.default_rng(5).normal(size=(4, 8, 1)).astype(np.float32)
    expected = np_encode(leaves, "vision", vit, image)
    assert expected.shape == (8 // merge**2, DECODER.width)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            reference.encode_image(leaves, "vision", vit, image)[0], expected, rtol=0, atol=1e-12
        )
    single, _ = reference.encode_image(leaves, "vision", vit, image)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_loss_match_numpy(tied: bool) -> None:
    model = MODEL.with_settings("llm", tied=tied)
    leaves = random_leaves(model)
    assert ("llm/head" in leaves) is not tied
    with jax.enable_x64(True):
        for sample in SAMPLES:
            expected = np_logits(leaves, model, sample)
            np.testing.assert_allclose(reference.sample_logits(leaves, model, sample), expected, rtol=0, atol=1e-11)
            assert float(reference.loss_sum(leaves, model, sample)) == pytest.approx(
                np_loss(leaves, model, sample), rel=1e-12
            )
    assert float(reference.loss_sum(leaves, model, BOTH)) == pytest.approx(np_loss(leaves, model, BOTH), rel=1e-5)


def test_a_change_reaches_only_what_comes_after_it() -> None:
    leaves = random_leaves(MODEL)
    before = np.asarray(reference.sample_logits(leaves, MODEL, TWO_IMAGES))
    first, second = TWO_IMAGES.media["vision"]
    later = dataclasses.replace(TWO_IMAGES, media={"vision": (first, second + 1)})
    moved = np.abs(np.asarray(reference.sample_logits(leaves, MODEL, later)) - before).max(axis=1)
    assert (moved[:4] == 0).all()
    assert (moved[4:] > 1e-3).all()  # the second image's token stands at position 4


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gradients_match_finite_differences() -> None:
    leaves, rng = random_leaves(MODEL), np.random.default_rng(7)
    with jax.enable_x64(True):
        gradients = reference.step_loss_and_gradients(leaves, MODEL, [BOTH]).gradients
        assert gradients.keys() == leaves.keys()
        for name in sorted(leaves):
            if "/layers/001" in name:
                continue
            direction = rng.normal(size=leaves[name].shape)
            step = 1e-6 / np.linalg.norm(direction)
            ends = []
            for sign in (1, -1):
                moved = {**leaves, name: leaves[name] + sign * step * direction}
                ends.append(float(reference.loss_sum(moved, MODEL, BOTH)))
            slope = (ends[0] - ends[1]) / (2 * step * reference.denominators(MODEL, [BOTH])["llm"])
            assert float((gradients[name] * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6), name


@pytest.mark.long
def test_step_is_the_weighted_mean_whatever_the_order() -> None:
    leaves = random_leaves(MODEL)
    weights = [float(s.loss_weights[1:].sum(dtype=np.float64)) for s in SAMPLES]
    assert reference.denominators(MODEL, SAMPLES)["llm"] == pytest.approx(sum(weights))
    with jax.enable_x64(True):
        sums = [float(reference.loss_sum(leaves, MODEL, s)) for s in SAMPLES]
        step = reference.step_loss_and_gradients(leaves, MODEL, SAMPLES)
        assert step.loss == pytest.approx(sum(sums) / sum(weights), rel=1e-12)
        parts = [reference.step_loss_and_gradients(leaves, MODEL, [s]).gradients for s in SAMPLES[::-1]]
    for name, gradient in step.gradients.items():
        mean = sum(weight * part[name] for weight, part in zip(weights[::-1], parts, strict=True)) / sum(weights)
        np.testing.assert_allclose(mean, gradient, rtol=0, atol=1e-12)


def test_the_weight_of_the_first_token_does_not_count() -> None:
    leaves, weights = random_leaves(MODEL), TEXT.loss_weights.copy()
    weights[0] = 9
    heavier = dataclasses.replace(TEXT, loss_weights=weights)
    assert reference.denominators(MODEL, [heavier]) == reference.denominators(MODEL, [TEXT])
    assert float(reference.loss_sum(leaves, MODEL, heavier)) == float(reference.loss_sum(leaves, MODEL, TEXT))


@pytest.mark.long
def test_placeholder_embeddings_get_no_gradient_and_may_lie_outside_the_vocabulary() -> None:
    leaves = random_leaves(MODEL)
    with jax.enable_x64(True):
        step = reference.step_loss_and_gradients(leaves, MODEL, [BOTH])
    rows = np.abs(step.gradients["llm/embed"]).max(axis=1)
    assert rows[[VISION, SOUND]].tolist() == [0, 0]
    assert (rows[BOTH.tokens[:-1][BOTH.tokens[:-1] < VISION]] > 0).all()
    outside = dataclasses.replace(
        TWO_IMAGES, tokens=np.where(TWO_IMAGES.tokens == VISION, -7, TWO_IMAGES.tokens), media_tokens={"vision": -7}
    )
    expected = reference.sample_logits(leaves, MODEL, TWO_IMAGES)
    assert (np.asarray(reference.sample_logits(leaves, MODEL, outside)) == np.asarray(expected)).all()


@pytest.mark.long
def test_frozen_modules_and_modules_without_media() -> None:
    leaves = random_leaves(MODEL)
    with jax.enable_x64(True):
        whole = reference.step_loss_and_gradients(leaves, MODEL, [TWO_IMAGES]).gradients
        part = reference.step_loss_and_gradients(leaves, MODEL, [TWO_IMAGES], frozen=["llm", "vision"]).gradients
    assert all(not g.any() for name, g in whole.items() if name.startswith("sound"))
    assert {name.split("/")[0] for name in part} == {"vision_projector", "sound", "sound_projector"}
    for name, gradient in part.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=0, atol=1e-12)


# --- training --------------------------------------------------------------------------------------------------------


def optimizer(**changes: object) -> OptimizerConfig:
    values = dict(learning_rate=1e-2, weight_decay=0.1, b1=0.8, b2=0.9, eps=1e-6, frozen=False)
    values |= dict(final_learning_rate=0.0, warmup=0, schedule="constant")
    return OptimizerConfig(**{**values, **changes})  # pyright: ignore[reportArgumentType]


OPTIMIZERS = {
    "vision": optimizer(frozen=True),
    "vision_projector": optimizer(learning_rate=3e-2, b2=0.95),
    "sound": optimizer(weight_decay=0.0),
    "sound_projector": optimizer(eps=1e-3),
    "llm": optimizer(schedule="linear", final_learning_rate=1e-3),
}


@pytest.mark.long
def test_three_steps_match_optax() -> None:
    leaves, clip, steps = random_leaves(MODEL), 0.3, [[TWO_IMAGES, TEXT], [BOTH], [BOTH, TWO_IMAGES]]
    modules: dict[Hashable, optax.GradientTransformation] = {
        module: optax.adamw(
            optax.linear_schedule(1e-2, 1e-3, 3) if module == "llm" else o.learning_rate,
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        )
        for module, o in OPTIMIZERS.items()
        if not o.frozen
    }
    chain = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.partition(modules, lambda tree: {name: name.split("/")[0] for name in tree}),
    )
    with jax.enable_x64(True):
        seen = reference.train_steps(leaves, MODEL, OPTIMIZERS, steps, clip_norm=clip)
        expected: Any = {name: leaf for name, leaf in leaves.items() if not name.startswith("vision/")}
        state = chain.init(expected)
        for step, samples in enumerate(steps):
            now = {**leaves, **expected}
            result = reference.step_loss_and_gradients(now, MODEL, samples, frozen=["vision"])
            assert seen.losses[step] == pytest.approx(result.loss, rel=1e-7)
            norm = float(optax.tree.norm(result.gradients))
            assert norm > clip  # else clipping is not tested
            assert seen.gradient_norms[step] == pytest.approx(norm, rel=1e-7)
            parts = seen.module_gradient_norms[step]
            assert parts.keys() == modules.keys()
            assert math.hypot(*parts.values()) == pytest.approx(norm, rel=1e-7)
            updates, state = chain.update(result.gradients, state, expected)
            expected = jax.tree.map(np.asarray, optax.apply_updates(expected, updates))
        for name, leaf in leaves.items():
            want = expected.get(name, leaf)  # the frozen encoder stays bit for bit
            np.testing.assert_allclose(seen.state.leaves[name], want, rtol=0, atol=1e-7 if name in expected else 0)
    assert seen.state.updates == 3
    assert seen.state.first.keys() == seen.state.second.keys() == expected.keys()


def test_learning_rates() -> None:
    o = optimizer(learning_rate=8.0, final_learning_rate=2.0, warmup=3, schedule="linear")
    assert [reference.learning_rate(o, step, 7) for step in range(8)] == [2, 4, 6, 8, 6.5, 5, 3.5, 2]
    o = dataclasses.replace(o, schedule="cosine")
    assert [reference.learning_rate(o, step, 7) for step in (3, 5, 7, 20)] == pytest.approx([8, 5, 2, 2])
    assert reference.learning_rate(optimizer(), 10**6, 7) == 1e-2


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates_are_those_of_training(schedule: str) -> None:
    o = optimizer(learning_rate=8.0, final_learning_rate=2.0, warmup=4, schedule=schedule)
    trained = trained_rate(o, 11)
    expected = [float(np.asarray(trained(step))) for step in range(12)]
    assert [reference.learning_rate(o, step, 11) for step in range(12)] == pytest.approx(expected, rel=1e-6)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    state = reference.TrainState(leaves={"llm/norm": np.ones(2, np.float32), "llm/head": np.ones((2, 2), np.float32)})
    gradients = {"llm/norm": np.ones(2, np.float32), "llm/head": np.array([[1, np.nan], [0, 0]], np.float32)}
    update = {"optimizers": {"llm": optimizer()}, "rates": {"llm": 0.5}}
    assert reference.adamw_step(state, gradients, clip_norm=1.0, **update) is state
    gradients["llm/head"] = np.array([[3, 0], [0, 0]], np.float32)
    moved = reference.adamw_step(state, gradients, clip_norm=0, **update)
    np.testing.assert_allclose(moved.leaves["llm/norm"], 0.5, atol=1e-6)  # one dimension: no decay
    np.testing.assert_allclose(moved.leaves["llm/head"], [[0.45, 0.95], [0.95, 0.95]], atol=1e-6)
    assert moved.first["llm/head"][0, 0] == pytest.approx(0.2 * 3)
    assert moved.second["llm/head"][0, 0] == pytest.approx(0.1 * 9)


@pytest.mark.long
def test_training_then_greedy_decoding_says_what_was_learned() -> None:
    leaves = {name: leaf.astype(np.float32) for name, leaf in random_leaves(MODEL).items()}
    other = dataclasses.replace(  # the same text under another image: only the image tells the answers apart
        TWO_IMAGES,
        tokens=np.append(TWO_IMAGES.tokens[:-2], [3, 4]).astype(np.int32),
        media={"vision": tuple(-image for image in TWO_IMAGES.media["vision"])},
    )
    weights = np.array([0] * 5 + [1, 1], np.float32)
    pair = [dataclasses.replace(s, loss_weights=weights) for s in (TWO_IMAGES, other)]
    optimizers = {module: optimizer(weight_decay=0.0) for module in OPTIMIZERS}
    result = reference.train_steps(leaves, MODEL, optimizers, [pair] * 25, clip_norm=1.0)
    assert {leaf.dtype for leaf in result.state.leaves.values()} == {np.dtype(np.float32)}
    assert result.losses[-1] < 0.1 < result.losses[0]
    for sample in pair:
        answer = sample.tokens[-2:].tolist()
        said = reference.greedy(result.state.leaves, MODEL, sample, max_new=2, eos=0)
        assert said == answer
        assert reference.greedy(result.state.leaves, MODEL, sample, max_new=2, eos=answer[1]) == answer[:1]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong() -> None:
    leaves = random_leaves(MODEL)
    missing = dataclasses.replace(TWO_IMAGES, media={})
    with pytest.raises(ValueError, match="3 placeholders of 'vision' for 0 modality tokens"):
        reference.sample_logits(leaves, MODEL, missing)
    with pytest.raises(ValueError, match="'smell'"):
        reference.sample_logits(leaves, MODEL, dataclasses.replace(TEXT, media={"smell": ()}))
    with pytest.raises(ValueError, match="does not hold token 29"):
        reference.loss_sum(leaves, MODEL, dataclasses.replace(TEXT, tokens=TEXT.tokens + 29 - TEXT.tokens.min()))
    with pytest.raises(ValueError, match="6x8 is no multiple of 4"):
        reference.encode_image(leaves, "vision", SQUARE, np.zeros((6, 8, 1), np.float32))
    with pytest.raises(ValueError, match=r"ViT\.grid: 4 is less than the image's 5x1"):
        reference.encode_image(leaves, "sound", TABLE, np.zeros((10, 2, 3), np.float32))
    with pytest.raises(ValueError, match="sum to 0"):
        silent = dataclasses.replace(TEXT, loss_weights=np.zeros_like(TEXT.loss_weights))
        reference.step_loss_and_gradients(leaves, MODEL, [silent])
    with pytest.raises(ValueError, match="none for"):
        reference.train_steps(leaves, MODEL, {"llm": optimizer()}, [[TEXT]], clip_norm=1.0)
