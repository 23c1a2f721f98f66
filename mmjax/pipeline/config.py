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
