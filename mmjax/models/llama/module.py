"""Llama-family language models as a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.language import WORDS, MaskKind, Rules
from mmjax.attention.mask import Mask
from mmjax.models.context import Context
from mmjax.models.layers import Params, embed_tokens
from mmjax.models.llama import layers, per_layer
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.llama.runs import LayerRun
from mmjax.models.module import LayerGroup, Loss, Module
from mmjax.models.norms import rms_norm
from mmjax.models.parameters import Part


@dataclass(frozen=True)
class Llama(Module):
    """A language model over packed samples of text and modality tokens; it sends hidden states after its last norm."""

    config: DecoderConfig

    Config = DecoderConfig
    mask: ClassVar[MaskKind] = "causal"

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Its groups of layers: runs of layers that are alike, see ``runs.LayerRun``."""
        c, rules, causal = self.config, Rules.parse(self.config.mask), Rules.parse("causal")
        return tuple(
            LayerGroup(
                run.count,
                partial(
                    layers.ExpertLayer if run.has_experts else layers.DecoderLayer,
                    c.shaped(run),
                    "delta" if run.is_delta else "attn",
                ),
                partial(layers.expert_block if run.has_experts else layers.block, c.of_run(run)),
                rules=causal if c.full_causal and not run.is_local else rules,
                window=c.window if run.is_local else 0,
                grid_window=c.chunk if run.is_local else 0,
                stores=_kind(run) if run.sharing == "stores" else "",
                reads=_kind(run) if run.sharing == "reads" else "",
            )
            for run in c.runs
        )

    @property
    def in_order(self) -> bool:
        """Whether it has delta layers, whose states go from token to token."""
        return self.config.needs_order

    @property
    def layer_losses(self) -> Mapping[str, Loss]:
        """The losses and metrics of routers, where layers have experts: such as "balance_loss"."""
        return layers.layer_losses(self.config)

    def routed_share(self, ranks: int, *, all_to_all: bool) -> float:
        """See ``Module``."""
        if ranks == 1 or not self.config.experts:
            return 1.0
        return layers.router_of(self.config).routed_share(self.config.experts // ranks, all_to_all=all_to_all)

    def parts(self, *, first: bool, last: bool) -> tuple[Part, ...]:
        """The embedding table of the first stage, and the norm and the head of the last; see ``layers.parts``."""
        return layers.parts(self.config, first=first, last=last)

    def inputs(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """ "segments" and "positions"; "tokens" on the first stage, "targets" and "weights" on the last; and the words
        of its mask.
        """
        ends = (("tokens",) if first else ()) + (("targets", "weights") if last else ())
        words = (name for name in Mask.of(self.config.mask).input_names if name in WORDS)
        return ("segments", "positions", *ends, *words)

    def embed(self, p: Params, context: Context) -> Float[Array, "B T D"]:
        """The embeddings of the context's host input "tokens"; ``p`` are the module's parameters on its first stage."""
        x_BTD = embed_tokens(context.tokens.inputs["tokens"], p["embed"], context.axes)
        return x_BTD * jnp.asarray(self.config.width**0.5, x_BTD.dtype) if self.config.scaled_embed else x_BTD

    @property
    def layer_input_width(self) -> int:
        """``Decoder.per_layer_width``; see ``Module``."""
        return self.config.per_layer_width

    @property
    def media_token(self) -> int:
        """``Decoder.per_layer_media``; see ``Module``."""
        return self.config.per_layer_media

    def layer_inputs(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "L B T P"]:
        """The input of each layer beside the features: see ``per_layer.inputs``."""
        return per_layer.inputs(self.config, p["per_layer"], context, x)

    def end(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Hidden states after the final norm. ``p`` are the module's parameters on its last stage, and ``x`` is the
        output of the last layer.
        """
        return rms_norm(x, p["norm"], self.config.norm_eps, plus=float(self.config.norm_plus_one))

    @property
    def losses(self) -> Mapping[str, Loss]:
        """The cross-entropy "loss", and with ``Decoder.z_loss`` "z_loss", the squared logarithm of the softmax's
        denominator.
        """
        z_loss = self.config.z_loss
        return {"loss": Loss()} | ({"z_loss": Loss(weight=z_loss)} if z_loss else {})

    def loss(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> dict[str, Float[Array, ""]]:
        """The weighted sum of each loss over the local tokens, by name.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's tokens
        have the inputs "targets" and "weights".
        """
        inputs = context.tokens.inputs
        return layers.losses(p, self.config, context.axes, x, inputs["targets"], inputs["weights"])

    def predict(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, " B"]:
        """The sum of each row's weighted cross-entropies in nats.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's tokens
        have the inputs "targets" and "weights".
        """
        inputs = context.tokens.inputs
        losses = layers.token_losses_of(p, self.config, context.axes, x, inputs["targets"])
        return jnp.sum(losses.cross_entropy * inputs["weights"], axis=1)

    def logits(self, p: Params, context: Context, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        """fp32 logits of the next token, in this tp rank's part of the vocabulary; padding entries are -1e30.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end`` for each row's last
        token.
        """
        return layers.logits(p, self.config, context.axes, x)

    @property
    def position_axes(self) -> int:
        """3 with ``Decoder.rope_sections``, else 1."""
        return 3 if self.config.rope_sections else 1

    @property
    def sees(self) -> str:
        """``Decoder.mask``: the mask rules of its rows, or the name of a preset."""
        return self.config.mask


def _kind(run: LayerRun) -> str:
    """The name of keys and values that layers of a kind share."""
    return "local" if run.is_local else "global"
