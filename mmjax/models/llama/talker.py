"""Llama-family decoders that generate codes, such as those of speech, from another model's hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from mmjax.data.types import EncoderSpec
from mmjax.models.context import Context
from mmjax.models.layers import Params
from mmjax.models.llama import layers
from mmjax.models.llama.module import Llama
from mmjax.models.module import Loss
from mmjax.models.vocabulary import best_token


@dataclass(frozen=True)
class CodeDecoder(Llama):
    """A generator of codes (Xu et al., "Qwen2.5-Omni", 2025): a decoder over the codes that speak an answer.

    Its rows are codes, not text: each token is the code before, and has the LLM's hidden state of its place in the
    answer added.
    """

    @property
    def medium(self) -> EncoderSpec:
        """The codes of one answer, as a medium of one code a place without placeholders in the text."""
        return EncoderSpec(patch=1, channels=1, axes=1, drawn=True, codes=self.config.vocab)

    def with_vocab(self, vocab: int) -> Self:
        """The module itself: no tokenizer of text decides how many codes there are."""
        return self

    @property
    def layer_losses(self) -> Mapping[str, Loss]:
        """As of ``Llama``, but the mean is over its codes."""
        return {name: replace(loss, per="") for name, loss in super().layer_losses.items()}

    def predict(self, p: Params, context: Context, x: Float[Array, "R T D"]) -> Float[Array, " R"]:
        """For each row the number of learned codes that are predicted rightly, each from the right ones before.

        ``p`` are the module's parameters on its last stage, and ``x`` is the result of ``end``. The context's tokens
        have the inputs "targets" and "weights".
        """
        inputs, axes = context.tokens.inputs, context.axes
        logits_RTV = layers.logits(p, self.config, axes, x)
        is_right = (best_token(logits_RTV, axes) == inputs["targets"]) & (inputs["weights"] > 0)
        return jnp.sum(is_right.astype(jnp.float32), axis=1)
