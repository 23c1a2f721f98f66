"""Configuration of offloading. Imports no JAX, so that errors in it are reported at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mmjax.configurable import configurable


@configurable("Offload")
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Arrays of a module that lie in pinned host memory while its devices work for other modules.

    Attributes:
      activations: what an encoder's forward keeps for its backward, of microbatches that wait for theirs.
      parameters: compute parameters, while modules on the same devices run between this one's forward and backward.
      optimizer: masters and moments: moments from an update to the next reduce, masters from prepare to reduce.
    """

    activations: bool = False
    parameters: bool = False
    optimizer: bool = False


KINDS_AWAY = tuple(field.name for field in fields(OffloadConfig))
"""What of a module can be offloaded."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
      temperature: what logits are divided by; 0 takes the likeliest token.
      top_p: the likeliest tokens that make up this probability together are chosen among; 1 is all.
      seed: of the random numbers; the same text comes of the same seed, under any layout and whatever rows are beside.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
