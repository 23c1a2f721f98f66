"""Llama-family decoder: RMSNorm, rotary positions, grouped-query or latent attention or the delta rule, SwiGLU.

Shapes: B rows, T tokens, D width, H query heads and G key/value heads local to this rank, K head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.mesh.spread import Axes
from mmjax.models.context import Context
from mmjax.models.delta.layers import GatedDelta, mixed
from mmjax.models.experts.layers import Experts, apply_experts
from mmjax.models.experts.router import ROUTER_METRICS, Router
from mmjax.models.head import TokenLosses, token_losses
from mmjax.models.layers import (
    ACTIVATIONS,
    Params,
    column_parallel,
    column_parallel_of_parts,
    linear,
    residual_init,
    row_parallel_of_parts,
    saved,
    split_heads,
)
from mmjax.models.llama import per_layer, rope
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.latent import LatentAttention, latent_heads
from mmjax.models.llama.norms import first_scale, normed
from mmjax.models.module import Block, Loss
from mmjax.models.norms import scaled_by_constant, unscaled_rms_norm
from mmjax.models.parameters import Part
from mmjax.models.sequence_parallel import TokenParts
from mmjax.models.taps import Computed, divisible
from mmjax.models.vocabulary import vocabulary_logits


class _Attention(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        init, heads, kv = nnx.initializers.lecun_normal(), c.heads * c.head_width, c.kv_heads * c.head_width
        queries = heads * (2 if c.attention_gate else 1)
        self.q = nnx.Param(init(rngs.params(), (c.width, queries)), dims=("embed", "heads"))
        if not c.reads_keys:
            self.k = nnx.Param(init(rngs.params(), (c.width, kv)), dims=("embed", "kv_heads"), kv_heads=c.kv_heads)
        if c.has_values:
            self.v = nnx.Param(init(rngs.params(), (c.width, kv)), dims=("embed", "kv_heads"), kv_heads=c.kv_heads)
        self.o = nnx.Param(residual_init(c.layers)(rngs.params(), (heads, c.width)), dims=("heads", "embed"))
        if c.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros(queries), dims=("heads",))
            if not c.reads_keys:
                self.k_bias = nnx.Param(jnp.zeros(kv), dims=("kv_heads",), kv_heads=c.kv_heads)
            if c.has_values:
                self.v_bias = nnx.Param(jnp.zeros(kv), dims=("kv_heads",), kv_heads=c.kv_heads)
        if c.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(c.width), dims=("embed",))
        if c.qk_norm and not c.qk_norm_whole:
            self.q_norm = nnx.Param(first_scale(c, c.head_width), dims=("head",))
            if not c.reads_keys:
                self.k_norm = nnx.Param(first_scale(c, c.head_width), dims=("head",))
        if c.qk_norm and c.qk_norm_whole:
            self.q_norm = nnx.Param(first_scale(c, heads), dims=("heads",))
            if not c.reads_keys:
                self.k_norm = nnx.Param(first_scale(c, kv), dims=("kv_heads",), kv_heads=c.kv_heads)


class _Mlp(nnx.Module):
    def __init__(self, c: DecoderConfig, hidden: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Param(init(rngs.params(), (c.width, hidden)), dims=("embed", "mlp"))
        self.up = nnx.Param(init(rngs.params(), (c.width, hidden)), dims=("embed", "mlp"))
        self.down = nnx.Param(residual_init(c.layers)(rngs.params(), (hidden, c.width)), dims=("mlp", "embed"))
        if c.mlp_bias:
            self.gate_bias = nnx.Param(jnp.zeros(hidden), dims=("mlp",))
            self.up_bias = nnx.Param(jnp.zeros(hidden), dims=("mlp",))
            self.down_bias = nnx.Param(jnp.zeros(c.width), dims=("embed",))


Mixing = Literal["attn", "delta"]
"""What mixes the tokens of a layer, as its parameters are named."""


def _mixing(c: DecoderConfig, name: Mixing, rngs: nnx.Rngs) -> nnx.Module:
    if name == "delta":
        return GatedDelta(c.delta, rngs)
    return (LatentAttention if c.kv_rank else _Attention)(c, rngs)


def _norms_and_mixing(layer: nnx.Module, c: DecoderConfig, mixing: Mixing, rngs: nnx.Rngs) -> None:
    """Gives a layer its norms, and attention or the delta rule."""
    setattr(layer, mixing, _mixing(c, mixing, rngs))
    before = ("attn_norm", "mlp_norm") if c.pre_norms else ()
    for name in (*before, *(("attn_post_norm", "mlp_post_norm") if c.post_norms else ())):
        setattr(layer, name, nnx.Param(first_scale(c, c.width), dims=("embed",)))
    further: dict[str, nnx.Module | nnx.Param[Array]] = {}
    if c.per_layer_width:
        further["per_layer"] = per_layer.Products(c, rngs)
        further["per_layer_norm"] = nnx.Param(first_scale(c, c.width), dims=("embed",))
    if c.layer_scalar:
        further["layer_scalar"] = nnx.Param(jnp.ones(1), dims=("scalar",))
    for name, value in further.items():
        setattr(layer, name, value)


class DecoderLayer(nnx.Module):
    """Parameters of one block: "attn_norm", "attn" or "delta", "mlp_norm" and "mlp".

    With ``Decoder.post_norms`` also "attn_post_norm" and "mlp_post_norm", with ``Decoder.layer_scalar`` that too;
    without ``Decoder.pre_norms`` no "attn_norm" and no "mlp_norm".
    """

    def __init__(self, c: DecoderConfig, mixing: Mixing, rngs: nnx.Rngs):
        _norms_and_mixing(self, c, mixing, rngs)
        self.mlp = _Mlp(c, c.mlp, rngs)


class ExpertLayer(nnx.Module):
    """Parameters of one block with "experts" in place of the mlp.

    With shared experts it has "shared" too, and "shared_gate" if their result has a gate; with
    ``Decoder.mlp_beside_experts`` it has "mlp", and the norms "mlp_branch_norm", "experts_norm" and
    "experts_post_norm".
    """

    def __init__(self, c: DecoderConfig, mixing: Mixing, rngs: nnx.Rngs):
        _norms_and_mixing(self, c, mixing, rngs)
        self.experts = Experts(router_of(c), c.width, c.expert_width, c.layers, rngs)
        if c.mlp_beside_experts:
            self.mlp = _Mlp(c, c.mlp, rngs)
            for name in ("mlp_branch_norm", "experts_norm", "experts_post_norm"):
                setattr(self, name, nnx.Param(first_scale(c, c.width), dims=("embed",)))
        if c.shared_experts:
            self.shared = _Mlp(c, c.shared_width, rngs)
        if c.shared_gate:
            init = nnx.initializers.lecun_normal()
            self.shared_gate = nnx.Param(init(rngs.params(), (c.width, 1)), dims=("embed", "gate"))


class _Embedding(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        # An untied table has about the scale of a projector's output, which balances text and images at the start.
        # A tied table is the head too, whose logits must be small at the start.
        init = nnx.initializers.normal(c.width**-0.5 if c.tied else 0.5)
        self.embed = nnx.Param(init(rngs.params(), (c.vocab, c.width)), dims=("vocab", "embed"))


class _Head(nnx.Module):
    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        self.norm = nnx.Param(first_scale(c, c.width), dims=("embed",))
        if not c.tied:
            init = nnx.initializers.lecun_normal()
            self.head = nnx.Param(init(rngs.params(), (c.width, c.vocab)), dims=("embed", "vocab"))


def parts(c: DecoderConfig, *, first: bool, last: bool) -> tuple[Part, ...]:
    """The parameters outside of layers of a stage that is the first, the last, or both; () for neither.

    A ``Part`` creates parameters together; ``Part.declarations`` has their shapes by name. The first stage has "embed",
    the last "norm" and, unless the table is tied, "head". A tied table is on both stages, and belongs to the first.
    """
    embedding, head = partial(_Embedding, c), Part(partial(_Head, c))
    of_layers = (Part(partial(per_layer.Tables, c), name="per_layer"),) if c.per_layer_width else ()
    if first and last:
        return (Part(embedding), *of_layers, head)
    if first:
        return (Part(embedding, tie="lent" if c.tied else ""), *of_layers)
    if last:
        return (Part(embedding, tie="borrowed"), head) if c.tied else (head,)
    return ()


def router_of(c: DecoderConfig) -> Router:
    """The router of a decoder with experts."""
    return Router(
        experts=c.experts,
        per_token=c.experts_per_token,
        scores=c.router,
        normalised=c.router_normalised,
        scale=c.router_scale,
        groups=c.router_groups,
        group_limit=c.router_group_limit,
        bias_rate=c.router_bias_rate if c.router_bias else None,
        capacity=c.expert_capacity,
        buffer=c.expert_buffer,
        norm_eps=c.norm_eps if c.router_norm else None,
        scaled=c.expert_scale,
    )


def layer_losses(c: DecoderConfig) -> dict[str, Loss]:
    """The losses and metrics of layers with experts, by name; {} without experts."""
    if not c.experts:
        return {}
    weights = {"balance_loss": c.balance_loss, "router_z_loss": c.router_z_loss}
    metrics = (*ROUTER_METRICS, *(("router_dropped",) if c.expert_capacity or c.expert_buffer else ()))
    kept = {name: weight for name, weight in weights.items() if weight} | dict.fromkeys(metrics, 0.0)
    return {name: Loss(weight=weight, per="llm_tokens") for name, weight in kept.items()}


def block(c: DecoderConfig, context: Context, x: Array) -> Block:
    """The function of one layer, (x [B, T, D], its parameters) -> [B, T, D], over rows of packed samples.

    ``context`` is such as ``Context.of(axes, inputs, "causal")``, with "segments" and "positions" in its inputs. ``x``,
    the input of the first layer, is not read. The parameters are a dict with "attn_norm", "attn" ("q", "k", "v", "o",
    or those of ``LatentAttention``) or "delta" (those of ``GatedDelta``), "mlp_norm" and "mlp" ("gate", "up", "down").

    Raises:
      ValueError: the stage reads no positions.
    """

    def layer(x_BTD: Array, p: Params) -> Array:
        x = _after_mixing(c, context, x_BTD, p)
        y = _mlp(c, context.axes, p["mlp"], _pre_normed(c, x, p, "mlp_norm"))
        return _layer_end(c, (x + _post_normed(c, y, p, "mlp_post_norm")).reshape(x_BTD.shape), p)

    return layer


def expert_block(c: DecoderConfig, context: Context, x: Array) -> Block:
    """The function of one layer with experts, (x [B, T, D], its parameters) -> ([B, T, D], losses).

    The parameters are those that ``ExpertLayer`` names; the losses the sum of each of ``layer_losses`` over the local
    tokens, by name. See ``block``.
    """
    router, losses = router_of(c), tuple(layer_losses(c))

    def layer(x_BTD: Array, p: Params) -> tuple[Array, dict[str, Array]]:
        x = _after_mixing(c, context, x_BTD, p).reshape(x_BTD.shape)
        h = _pre_normed(c, x, p, "mlp_norm")
        h_of_experts = normed(c, x, p["experts_norm"]) if c.mlp_beside_experts else h
        scored = x if c.router_norm else h_of_experts
        y, sums = apply_experts(router, p["experts"], context, h_of_experts, losses, scored, activation=c.activation)
        if c.mlp_beside_experts:
            of_mlp = _mlp(c, context.axes, p["mlp"], h)
            y = _post_normed(c, of_mlp, p, "mlp_branch_norm") + _post_normed(c, y, p, "experts_post_norm")
        if c.shared_experts:
            shared = _mlp(c, context.axes, p["shared"], h)
            y += shared * jax.nn.sigmoid(linear(h, p["shared_gate"])) if c.shared_gate else shared
        y = _post_normed(c, y, p, "mlp_post_norm")
        # Means over layers, too.
        return _layer_end(c, x + y, p), {name: total / c.expert_layers for name, total in sums.items()}

    return layer


def _after_mixing(c: DecoderConfig, context: Context, x_BTD: Array, p: Params) -> Array:
    """The features behind a layer's attention or delta rule; ``[B·T, D]`` without sequence parallelism."""
    axes, is_delta = context.axes, "delta" in p
    a = p["delta" if is_delta else "attn"]
    # XLA lets a product add a residual without a copy only if the residual has the product's two dimensions.
    x = x_BTD if axes.sp else x_BTD.reshape(-1, c.width)
    h = _pre_normed(c, x, p, "attn_norm")
    y_BTHK = mixed(c.delta, context, a, h) if is_delta else _attended(c, context, a, h)
    parts = TokenParts.of(x, axes.sp, divisible=not axes.overlap and divisible(p))
    width = y_BTHK.shape[2] * y_BTHK.shape[3]
    ys = parts.split_gathered(y_BTHK.reshape(*(y_BTHK.shape[:2] if axes.sp else (-1,)), width))
    y = parts.join(row_parallel_of_parts(ys, a["o"], axes, a.get("o_bias")))
    return saved(x + _post_normed(c, y, p, "attn_post_norm"))


def _pre_normed(c: DecoderConfig, x: Array, p: Params, name: str) -> Array:
    """A branch's input after its norm, if it has one."""
    return normed(c, x, p[name]) if name in p else x


def _post_normed(c: DecoderConfig, y: Array, p: Params, name: str) -> Array:
    """A branch's result after its own norm, if it has one, whose backward reads the result."""
    return normed(c, saved(y), p[name]) if name in p else y


def _layer_end(c: DecoderConfig, x_BTD: Array, p: Params) -> Array:
    """The output of a layer behind its mlp: with its input beside the features, and times its number."""
    if c.per_layer_width:
        x_BTD = x_BTD + per_layer.branch(c, x_BTD, p)
    return scaled_by_constant(x_BTD, p["layer_scalar"]) if "layer_scalar" in p else x_BTD


def _normed_over_heads(c: DecoderConfig, axes: Axes, x_BTHK: Array, scale: Any) -> Array:
    """One norm of all heads, those of other tp ranks included. A head that several ranks have counts on each."""
    return normed(c, x_BTHK.reshape(*x_BTHK.shape[:2], -1), scale, over=axes.tp).reshape(x_BTHK.shape)


def _attended(c: DecoderConfig, context: Context, p: Params, h: Array) -> Float[Array, "B T H K"]:
    """The output of attention, before the product "o"."""
    q, k, v, *gate = latent_heads(c, context, p, h) if c.kv_rank else _heads(c, context, p, h)
    if c.score_width:
        q *= (c.head_width / c.score_width) ** 0.5
    if c.reads_keys:
        y_BTHK = context.attend_shared(q, soft_cap=c.score_cap)
    else:
        y_BTHK = context.attend(q, k, v, soft_cap=c.score_cap)
    return y_BTHK * jax.nn.sigmoid(gate[0]) if gate else y_BTHK


def _heads(c: DecoderConfig, context: Context, p: Params, h: Array) -> tuple[Any, ...]:
    """Queries ``[B, T, H, K]`` and keys ``[B, T, G, K]`` with rotary embedding, values ``[B, T, G, K]``, and with
    ``Decoder.attention_gate`` the gate of each number of the output.

    In layers that read the keys of another one, keys and values are ``None``.
    """
    a: Any = p
    axes, positions = context.axes, context.tokens.positions
    names = "q" if c.reads_keys else "qk" if c.keys_as_values else "qkv"
    products = column_parallel(h, [(a[n], a.get(f"{n}_bias")) for n in names], axes)
    q, *keys_and_values = (y.reshape(*positions.shape[:2], -1) for y in products)
    q = split_heads(q, c.head_width * (2 if c.attention_gate else 1))
    q, *gate = jnp.split(q, 2, axis=-1) if c.attention_gate else [q]

    def rotated(name: str, y_BTHK: Array) -> Array:
        if c.qk_norm and c.qk_norm_whole:
            y_BTHK = _normed_over_heads(c, axes, y_BTHK, a[f"{name}_norm"])
        elif c.qk_norm:
            y_BTHK = normed(c, y_BTHK, a[f"{name}_norm"])
        y_BTHK = rope.rotate(c, y_BTHK, positions)
        return y_BTHK if c.qk_norm else saved(y_BTHK)  # a norm's backward reads the products, which are saved

    if c.reads_keys:
        return rotated("q", q), None, None, *gate
    k, v = (split_heads(y, c.head_width) for y in (keys_and_values[0], keys_and_values[-1]))
    return rotated("q", q), rotated("k", k), unscaled_rms_norm(v, c.norm_eps) if c.v_norm else v, *gate


def _mlp(c: DecoderConfig, axes: Axes, p: Params, h: Array) -> Array:
    """An mlp of normed features ``[B, T, D]`` or ``[B·T, D]``."""
    m: Any = p
    parts = TokenParts.of(h, axes.sp, divisible=not axes.overlap and divisible(p))
    hs = parts.split(h)
    gates, ups = column_parallel_of_parts(hs, [(m[n], m.get(f"{n}_bias")) for n in ("gate", "up")], axes)
    inner = [Computed(_GATED[c.activation], arrays) for arrays in zip(gates, ups, strict=True)]
    return parts.join(row_parallel_of_parts(inner, m["down"], axes, m.get("down_bias")))


def _gated(activation: Callable[[Array], Array], gate_BTF: Array, up_BTF: Array) -> Array:
    return activation(gate_BTF) * up_BTF


_GATED = {name: partial(_gated, activation) for name, activation in ACTIVATIONS.items()}
"""Gates with their activations; each is one object, since equal functions make equal programs (see ``Computed``)."""


def logits(p: Params, c: DecoderConfig, axes: Axes, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """fp32 logits of this rank's part of the vocabulary, from hidden states after the final norm; inside ``shard_map``.

    ``p`` are the LLM's parameters, of which "head", or "embed" of a tied table, is read. Padding entries are -1e30.
    With sequence parallelism ``x_BTD`` has this rank's tokens, and the result those of all tp ranks.
    """
    return vocabulary_logits(x_BTD, p["embed"].T if c.tied else p["head"], axes, c.vocab, c.logit_cap)


def losses(
    p: Params,
    c: DecoderConfig,
    axes: Axes,
    x_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
    """The weighted sum of each loss over tokens, from hidden states after the final norm.

    The losses are "loss", the cross-entropy, and with ``Decoder.z_loss`` "z_loss", not yet times its weight.

    Args:
      p: the LLM's parameters, of which "head", or "embed" of a tied table, is read.
      c: the settings.
      axes: mesh axes by role, such as ``Axes()``.
      x_BTD: hidden states, equal on all tp ranks; this rank's tokens under sequence parallelism.
      targets_BT: targets of all tokens, as indices in the complete vocabulary.
      weights_BT: weights of the targets; 0 for tokens that do not count.
    """
    # 'auto' is the value of modules outside of runs, which compute logits again.
    by_token = token_losses_of(p, c, axes, x_BTD, targets_BT, keep_logits=c.remat in ("none", "dots"))
    by_name = {"loss": by_token.cross_entropy} | ({"z_loss": by_token.log_sum**2} if c.z_loss else {})
    return {name: jnp.sum(losses_BT * weights_BT) for name, losses_BT in by_name.items()}


def token_losses_of(
    p: Params,
    c: DecoderConfig,
    axes: Axes,
    x_BTD: Float[Array, "B T D"],
    targets_BT: Int[Array, "B T"],
    *,
    keep_logits: bool = False,
) -> TokenLosses:
    """Losses in nats of each token, from hidden states after the final norm.

    They are ``cross_entropy`` and ``log_sum``, the logarithm of the softmax's denominator, each ``[B, T]``.

    Args:
      p: the LLM's parameters, of which "head", or "embed" of a tied table, is read.
      c: the settings.
      axes: mesh axes by role, such as ``Axes()``.
      x_BTD: hidden states, equal on all tp ranks; this rank's tokens under sequence parallelism.
      targets_BT: targets of all tokens, as indices in the complete vocabulary.
      keep_logits: see ``head.token_losses``.
    """
    head = p["embed" if c.tied else "head"]
    settings = {"tied": c.tied, "soft_cap": c.logit_cap, "keep_logits": keep_logits}
    return token_losses(x_BTD, head, targets_BT, axes, c.vocab, **settings)
