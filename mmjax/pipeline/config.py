"""Configuration of offloading. Imports no JAX, so that errors in it are reported at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mmjax.configurable import configurable


@configurable("Offload")
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Arrays of a module that are moved to pinned host memory while its devices work for other modules.

    Attributes:
      activations: residuals of an encoder, of microbatches between forward and backward.
      parameters: compute parameters, while other modules on the same devices run between this one's forward and
        backward.
      optimizer: moments from an update to the next reduce, masters from prepare to reduce.
    """

    activations: bool = False
    parameters: bool = False
    optimizer: bool = False


OFFLOAD_KINDS = tuple(field.name for field in fields(OffloadConfig))
"""Kinds of a module's arrays that can be offloaded."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: divisor of the logits; 0 takes the most likely token.
      top_p: probability mass of the most likely tokens to choose from; 1 is all tokens.
      seed: seed of the random numbers. The text depends on the seed, not on the layout or on other rows.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
