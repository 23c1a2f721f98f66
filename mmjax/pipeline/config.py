"""Configuration of offloading. Imports no JAX, so that errors in it are reported at once."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.configurable import configurable


@configurable("Offload")
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """State of a module that lies in pinned host memory while its devices work for other modules.

    Attributes:
      parameters: compute parameters, while modules on the same devices run between this one's forward and backward.
      optimizer: masters and moments: moments from an update to the next reduce, masters from prepare to reduce.
    """

    parameters: bool = False
    optimizer: bool = False


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
