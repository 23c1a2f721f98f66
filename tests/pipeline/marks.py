"""Callbacks for tests of parity, named in configurations as "marks:…". Each gives every token another factor."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from mmjax.models.callbacks import Callbacks, reads
from mmjax.models.config import CallbacksConfig
from mmjax.models.context import Context


def _scale(x_BTD: Array, factor_BT: Array) -> Array:
    """Every token times its factor; a projector's token takes that of the first of its positions."""
    joined = factor_BT.shape[1] // x_BTD.shape[1]
    return x_BTD * factor_BT[:, ::joined, None].astype(x_BTD.dtype)


@reads("positions")
def placed(context: Context, x: Array) -> Array:
    """By its place in its sample or medium."""
    places = context.tokens.positions
    places_BT = places if places.ndim == 2 else places[..., 0] * 3 + places[..., 1]
    return _scale(x, 1 + 0.4 * jnp.cos(places_BT))


@reads("patches")
def shaded(context: Context, x: Array) -> Array:
    """By its patch."""
    return _scale(x, 1 + 0.3 * jnp.tanh(context.inputs["patches"].sum(-1)))


def seen(context: Context, x: Array) -> Array:
    """By whether an encoder gives it, and by how many tokens of its sample are before it."""
    own_BT = jnp.where(context.inputs["vision_index"] >= 0, 0.5, 1.0)
    segments = context.tokens.segments_BT
    order = jnp.broadcast_to(context.tokens.order_BT, segments.shape)
    there, others = context.gather_rows(segments), context.gather_rows(order)
    before_BTS = (segments[:, :, None] == there[:, None]) & (others[:, None] <= order[:, :, None])
    return _scale(x, own_BT + 0.2 / before_BTS.sum(-1))


@reads("tokens")
def spelt(context: Context, x: Array) -> Array:
    """By its id, which no last stage of several reads by itself; and by its surroundings, through attention."""
    x = _scale(x, 1 + 0.3 * jnp.sin(context.inputs["tokens"]))
    heads = x[..., None, :]
    return x + 0.1 * context.attend(heads, heads, heads)[..., 0, :].astype(x.dtype)


MARKS: Mapping[str, Mapping[str, str]] = {
    "vision": {"before": "placed", "after": "shaded", "projected": "placed"},
    "llm": {"before": "seen", "after": "spelt"},
}
GENERATOR = Callbacks(before=placed, after=shaded, projected=placed)


def functions(module: str) -> Callbacks:
    """The callbacks of an encoder or the LLM."""
    return Callbacks(**{place: globals()[name] for place, name in MARKS[module].items()})


def named(module: str) -> CallbacksConfig:
    """The same as settings."""
    return CallbacksConfig(**{place: f"marks:{name}" for place, name in MARKS[module].items()})
