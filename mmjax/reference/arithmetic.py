"""Arithmetic of encoders, LLM and generators: products, norms, positions, attention; and access to leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

if TYPE_CHECKING:
    from mmjax.models.dit.config import DiTConfig, SoundDiTConfig
    from mmjax.models.projector.config import ProjectorConfig
    from mmjax.models.temporal.config import TemporalConfig
    from mmjax.models.vit.config import ViTConfig
    from mmjax.models.whisper.config import WhisperConfig

Arrays = Mapping[str, jax.Array]
Leaves = Mapping[str, jax.Array | np.ndarray]
ROPE2D_THETA = 100.0
LAYER_NORM_EPS = 1e-6
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda y: 0.5 * y * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (y + 0.044715 * y**3))),
    "gelu_exact": lambda y: 0.5 * y * (1 + jax.lax.erf(y / 2**0.5)),
    "quick_gelu": lambda y: y / (1 + jnp.exp(-1.702 * y)),
    "silu": lambda y: y / (1 + jnp.exp(-y)),
}


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` with the highest precision of products."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def dense_leaves(leaves: Leaves) -> Arrays:
    """Copies of leaves by name, such as "llm/embed", as fp32 on the default device; the leaves may be sharded.

    float64 leaves stay float64 under JAX's x64 mode. Leaves under differentiation are returned as they are.
    """

    def convert(value: jax.Array | np.ndarray) -> jax.Array:
        if isinstance(value, Tracer):
            return value
        keep = jax.config.read("jax_enable_x64") and value.dtype == np.float64
        return jnp.asarray(np.asarray(value), dtype=jnp.float64 if keep else jnp.float32)

    return {name: convert(value) for name, value in leaves.items()}


def module_of(leaf: str) -> str:
    """The module in the name of a leaf: "llm" for "llm/layers/000/attn/q"."""
    return leaf.split("/", 1)[0]


def rotate(x_NHK: jax.Array, positions_N: np.ndarray, theta: float) -> jax.Array:
    """Rotary embedding in the half-split convention (Su et al. 2021): pairs are (x[i], x[i + K/2]).

    Pair i is rotated by positions_N · theta^(-2i / K) radians. `x_NHK` are queries or keys; the result has its shape.
    """
    half = x_NHK.shape[-1] // 2
    return rotate_by(x_NHK, positions_N, theta ** (-np.arange(half) / half))


def rotate_by(x_NHK: jax.Array, positions_N: np.ndarray, frequencies: np.ndarray) -> jax.Array:
    """Rotary embedding by positions_N · frequencies radians, in the half-split convention: pairs are (x[i], x[i +
    K/2]).

    `frequencies` are [K / 2]. `x_NHK` are queries or keys; the result has its shape.
    """
    # float64 on the host: the tables are then exact to the last fp32 bit at any position.
    angles = positions_N[:, None].astype(np.float64) * frequencies
    return rotate_to(x_NHK, (np.cos(angles), np.sin(angles)))


Tables = tuple[np.ndarray | jax.Array, np.ndarray | jax.Array]
"""Cosines and sines of the rotation angles of each token's pairs of components, [N, K / 2]."""


def rotate_to(x_NHK: jax.Array, tables: Tables) -> jax.Array:
    """Rotary embedding by the angles of these tables, (cosines, sines) of shape [N, K / 2]; pairs are (x[i], x[i +
    K/2]).

    `x_NHK` are queries or keys; the result has its shape and dtype.
    """
    half = x_NHK.shape[-1] // 2
    cos, sin = (jnp.asarray(table[:, None, :], x_NHK.dtype) for table in tables)
    first, second = x_NHK[..., :half], x_NHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax_attention(
    q_NHK: jax.Array,
    k_NGK: jax.Array,
    v_NGV: jax.Array,
    *,
    causal: bool,
    window: int = 0,
    read_NN: jax.Array | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Softmax attention with scale K^-0.5; query head h reads key/value head h // (H / G). Returns [N, H*V].

    N is the number of tokens, V the width of values; without `causal` each query reads all keys.

    With a window above 0, a causal query reads at most that many keys, its own the last. `read_NN` replaces `causal`
    and `window`: it is true where a query (the row) reads a key (the column). A `cap` c above 0 makes a score s into
    c · tanh(s / c).
    """
    length, heads, head_dim = q_NHK.shape
    unread = np.ones((length, length), bool)
    for query in range(length):
        unread[query, max(0, query + 1 - window) if window else 0 : query + 1] = False
    group = heads // k_NGK.shape[1]
    outputs = []
    for kv_head in range(k_NGK.shape[1]):
        q = q_NHK[:, kv_head * group : (kv_head + 1) * group].transpose(1, 0, 2)
        scores = matmul(q, k_NGK[:, kv_head].T) * head_dim**-0.5
        if cap:
            scores = cap * jnp.tanh(scores / cap)
        if read_NN is not None:
            scores = jnp.where(read_NN, scores, -jnp.inf)
        elif causal:
            scores = jnp.where(unread, -jnp.inf, scores)
        outputs.append(matmul(jax.nn.softmax(scores, axis=-1), v_NGV[:, kv_head]))
    return jnp.concatenate(outputs).transpose(1, 0, 2).reshape(length, heads * v_NGV.shape[2])


def rms_norm(scale: jax.Array | float, x_ND: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of each row of x_ND: x / sqrt(mean(x²) + eps) · scale, with the scale [D], or 1. Returns [N, D]."""
    return x_ND / jnp.sqrt(jnp.square(x_ND).mean(axis=-1, keepdims=True) + eps) * scale


def norm(leaves: Arrays, prefix: str, x_TD: jax.Array, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """LayerNorm by the leaves ``{prefix}/scale`` and ``{prefix}/bias`` [D], or RMSNorm if there is no bias.

    `prefix` is such as "vision/norm"; the result is [T, D], as x_TD.
    """
    if f"{prefix}/bias" in leaves:
        return layer_norm(leaves, prefix, x_TD, eps)
    return rms_norm(leaves[f"{prefix}/scale"], x_TD, eps)


def layer_norm(leaves: Arrays, prefix: str, x_TD: jax.Array, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """LayerNorm by the leaves ``{prefix}/scale`` and ``{prefix}/bias`` [D]; `prefix` is such as "vision/norm".

    The result is [T, D], as x_TD.
    """
    return normalised(x_TD, eps) * leaves[f"{prefix}/scale"] + leaves[f"{prefix}/bias"]


def normalised(x_TD: jax.Array, eps: float = LAYER_NORM_EPS) -> jax.Array:
    """LayerNorm over the last axis, without scale and bias."""
    centred = x_TD - x_TD.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)


def activate(name: str, x: jax.Array) -> jax.Array:
    """The activation function of this name, a key of ``ACTIVATIONS``, applied to each element.

    The keys are "gelu" (the tanh approximation), "gelu_exact", "quick_gelu" and "silu".
    """
    return ACTIVATIONS[name](x)


def affine(leaves: Arrays, prefix: str, x_TD: jax.Array) -> jax.Array:
    """Product x_TD · kernel [T, F] with the leaf ``{prefix}/kernel`` [D, F], plus ``{prefix}/bias`` [F] if there is
    one.

    `prefix` is such as "vision/patch".
    """
    product = matmul(x_TD, leaves[f"{prefix}/kernel"])
    return product + leaves[f"{prefix}/bias"] if f"{prefix}/bias" in leaves else product


Turn = Callable[[jax.Array], jax.Array]
"""Rotates queries and keys [T, H, K]."""


def turn_axial(positions_T2: np.ndarray, theta: float) -> Turn:
    """A function that rotates pair i < K / 4 by the patch's row, and pair K / 4 + i with the same frequency by its
    column.

    `positions_T2` are (row, column) of each patch, as `patch_positions` gives them, and `theta` is the base of the
    frequencies, such as 10000.0. The function takes and returns queries or keys [T, H, K].
    """

    def turn(y_THK: jax.Array) -> jax.Array:
        parts = jnp.split(y_THK, 4, axis=-1)  # first halves of the row's and the column's pairs, then second halves
        turned = []
        for axis in range(2):
            pairs = jnp.concatenate([parts[axis], parts[axis + 2]], axis=-1)
            turned.append(jnp.split(rotate(pairs, positions_T2[:, axis], theta), 2, axis=-1))
        return jnp.concatenate([turned[axis][half] for half in range(2) for axis in range(2)], axis=-1)

    return turn


def turn_xy(positions_T2: np.ndarray, theta: float) -> Turn:
    """`turn_2d` by the column first: it rotates the first half of a head by the patch's column, the second by its row.

    `positions_T2` are (row, column) of each patch, as `patch_positions` gives them, and `theta` is the base of the
    frequencies. The function takes and returns queries or keys [T, H, K].
    """
    return turn_2d(positions_T2[:, ::-1], theta)


def turn_2d(positions_T2: np.ndarray, theta: float = ROPE2D_THETA) -> Turn:
    """A function that rotates the first half of a head by the patch's row, the second by its column.

    `positions_T2` are (row, column) of each patch, as `patch_positions` gives them, and `theta` is the base of the
    frequencies. The function takes and returns queries or keys [T, H, K].
    """

    def turn(y_THK: jax.Array) -> jax.Array:
        by_row, by_column = jnp.split(y_THK, 2, axis=-1)
        turned = [rotate(y, positions_T2[:, axis], theta) for axis, y in enumerate((by_row, by_column))]
        return jnp.concatenate(turned, axis=-1)

    return turn


def product(leaves: Arrays, name: str, x_TD: jax.Array) -> jax.Array:
    """x_TD · weight, plus a bias if there is one: [T, F].

    The leaves are `name`, such as "vision/layers/000/attn/q", [D, F], and `name`_bias [F].

    With a leaf `name`_bounds [4] the input and the result are between (least, most, least, most), which are constants.
    """
    weight, bias, bounds = leaves[name], leaves.get(f"{name}_bias", 0.0), leaves.get(f"{name}_bounds")
    if bounds is None:
        return matmul(x_TD, weight) + bias
    low, high, least, most = jax.lax.stop_gradient(bounds)
    x_TD = jnp.where(x_TD < low, low, jnp.where(x_TD > high, high, x_TD))
    y_TF = matmul(x_TD, weight) + bias
    return jnp.where(y_TF < least, least, jnp.where(y_TF > most, most, y_TF))


def attend(
    leaves: Arrays,
    prefix: str,
    module: ViTConfig | WhisperConfig | TemporalConfig | DiTConfig | SoundDiTConfig,
    normed_TD: jax.Array,
    turn: Turn,
    windows: Sequence[np.ndarray] = (),
    read_TT: jax.Array | None = None,
) -> jax.Array:
    """Self-attention of an encoder's or a generator's layer, without the residual; returns [T, D].

    Args:
      leaves: arrays by name, as `dense_leaves` gives them.
      prefix: the prefix of the layer's leaves q, k, v, o [D, D] and, where they exist, their biases and bounds and the
        norms q_norm and k_norm [K], such as "vision/layers/000/attn".
      module: settings, of which `heads`, `v_norm`, `score_width` and `norm_eps` are read.
      normed_TD: the normalised features [T, D].
      turn: a function that rotates queries and keys [T, H, K], such as `turn_2d` gives.
      windows: indices of the patches of each window, which attend only to one another; by default all attend to all.
      read_TT: without windows, true where a token (the row) reads another; by default all read all.
    """

    def heads(name: str) -> jax.Array:
        projected = product(leaves, f"{prefix}/{name}", normed_TD)
        projected = projected.reshape(projected.shape[0], module.heads, -1)
        scale = leaves.get(f"{prefix}/{name}_norm", 1.0 if name == "v" and module.v_norm else None)
        return projected if scale is None else rms_norm(scale, projected, module.norm_eps)

    q, k, v = turn(heads("q")), turn(heads("k")), heads("v")
    if module.score_width:
        q *= (q.shape[-1] / module.score_width) ** 0.5
    if windows:
        outputs = jnp.concatenate([softmax_attention(q[at], k[at], v[at], causal=False) for at in windows])
        mixed = jnp.zeros_like(outputs).at[np.concatenate(windows)].set(outputs)
    else:
        mixed = softmax_attention(q, k, v, causal=False, read_NN=read_TT)
    return product(leaves, f"{prefix}/o", mixed)


def feed_forward(leaves: Arrays, prefix: str, activation: str, normed_TD: jax.Array) -> jax.Array:
    """The two-layer MLP of an encoder's or a generator's layer, without the residual; gated if there is a gate. Returns
    [T, D].

    Args:
      leaves: arrays by name, as `dense_leaves` gives them.
      prefix: the prefix of the leaves up and down, for a gated MLP gate, and where they exist their biases and bounds,
        such as "vision/layers/000/mlp".
      activation: a key of `ACTIVATIONS`, such as "gelu".
      normed_TD: the normalised features [T, D].
    """
    hidden = product(leaves, f"{prefix}/up", normed_TD)
    if f"{prefix}/gate" in leaves:
        hidden = activate(activation, product(leaves, f"{prefix}/gate", normed_TD)) * hidden
    else:
        hidden = activate(activation, hidden)
    return product(leaves, f"{prefix}/down", hidden)


def project(leaves: Arrays, projector: str, x_TD: jax.Array, joined: int, settings: ProjectorConfig) -> jax.Array:
    """A projector: joins runs of `joined` features side by side and puts them through one layer or two: [T / joined,
    width].

    Args:
      leaves: arrays by name, as `dense_leaves` gives them.
      projector: the prefix of the projector's leaves, such as "vision_projector".
      x_TD: features; T is a multiple of `joined`.
      joined: number of rows of `x_TD` that become one token, such as merge².
      settings: settings of the projector, such as `ProjectorConfig()`: its norm, kind and activation.
    """
    if settings.pool:
        x_TD, joined = x_TD.reshape(-1, joined, x_TD.shape[1]).mean(axis=1), 1
    if settings.norm == "rms_plus_one":
        x_TD = rms_norm(1 + leaves[f"{projector}/norm/scale"], x_TD, LAYER_NORM_EPS)
    elif settings.norm == "rms_plain":
        x_TD = rms_norm(1.0, x_TD, LAYER_NORM_EPS)
    elif settings.norm != "none":
        x_TD = norm(leaves, f"{projector}/norm", x_TD)
    merged = x_TD.reshape(x_TD.shape[0] // joined, -1)
    if settings.kind == "linear":
        return affine(leaves, projector, merged)
    biases = (leaves[f"{projector}/{name}_bias"] if settings.bias else 0.0 for name in ("up", "down"))
    up = matmul(merged, leaves[f"{projector}/up"]) + next(biases)
    return matmul(activate(settings.activation, up), leaves[f"{projector}/down"]) + next(biases)
