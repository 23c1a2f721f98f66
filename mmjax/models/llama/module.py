"""Llama-family language models as a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.attention.language import WORDS, MaskKind, Rules
from mmjax.attention.mask import Mask
from mmjax.models.context import Context
from mmjax.models.layers import Params, embed_tokens, rms_norm
from mmjax.models.llama import counts, layers
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.module import LayerGroup, Loss, Module
from mmjax.models.parameters import KV_HEADS, LogicalAxes, Part


@dataclass(frozen=True)
class Llama(Module):
    """A language model over packed samples of text and modality tokens; gives hidden states after its last norm."""

    config: DecoderConfig

    Config = DecoderConfig
    mask: ClassVar[MaskKind] = "causal"

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        c = self.config
        create, block = partial(layers.DecoderLayer, c), lambda context, x: layers.block(c, context)
        rules, near = Rules.parse(c.mask), {"window": c.window, "grid_window": c.chunk}
        return tuple(
            LayerGroup(count, create, block, rules=rules, **(near if is_near else {})) for count, is_near in c.runs
        )

    def axes_of(self, tp: int) -> LogicalAxes:
        if tp <= self.config.kv_heads:
            return self.axes
        names = [f"attn/{name}" for name in "kv"]
        return {
            **self.axes,
            **{name: ("embed", KV_HEADS) for name in names},
            **{f"{n}_bias": (KV_HEADS,) for n in names},
        }

    def parts(self, first: bool, last: bool) -> tuple[Part, ...]:
        return layers.parts(self.config, first, last)

    def inputs(self, first: bool, last: bool) -> tuple[str, ...]:
        ends = (("tokens",) if first else ()) + (("targets", "weights") if last else ())
        words = (name for name in Mask.of(self.config.mask).reads if name in WORDS)
        return ("segments", "positions", *ends, *words)

    def embed(self, p: Params, context: Context) -> Float[Array, "B T D"]:
        return embed_tokens(context.tokens.inputs["tokens"], p["embed"], context.axes)

    def end(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        # Checkpointed, or a copy in fp32 would be kept of each microbatch in flight.
        return jax.checkpoint(partial(rms_norm, eps=self.config.norm_eps))(x, p["norm"])

    @property
    def losses(self) -> Mapping[str, Loss]:
        """The cross-entropy, and with ``Decoder.z_loss`` the squared logarithm of the softmax's denominator."""
        z_loss = self.config.z_loss
        return {"loss": Loss()} | ({"z_loss": Loss(weight=z_loss)} if z_loss else {})

    def loss(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> dict[str, Float[Array, ""]]:
        given = context.tokens.inputs
        return layers.losses(p, self.config, context.axes, x, given["targets"], given["weights"])

    def predict(self, p: Params, context: Context, x: Float[Array, "B T D"]) -> Float[Array, " B"]:
        """The weighted loss of each row."""
        given = context.tokens.inputs
        found = layers.per_token(p, self.config, context.axes, x, given["targets"])
        return jnp.sum(found.cross_entropy * given["weights"], axis=1)

    def logits(self, p: Params, context: Context, x: Float[Array, "B 1 D"]) -> Float[Array, "B 1 V"]:
        return layers.logits(p, self.config, context.axes, x)

    @property
    def position_axes(self) -> int:
        return 3 if self.config.rope_sections else 1

    @property
    def sees(self) -> str:
        return self.config.mask

    def parameters(self) -> int:
        return counts.parameters(self.config)

    def forward_flops(self, lengths: Iterable[int]) -> int:
        return counts.forward_flops(self.config, lengths)

    def counted_flops(self, lengths: Iterable[int], pairs: Mapping[Mask, int]) -> int:
        seen = sum(layers * pairs[mask] for layers, mask in self.masks)
        return counts.forward_flops(self.config, lengths, seen)
