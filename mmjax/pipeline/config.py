"""What offloading is configured by. It imports no JAX, so that what is wrong is said at once."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.configurable import configurable


@configurable("Offload")
@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What of a module is in pinned host memory while its devices work for others.

    Attributes:
      parameters: compute parameters, while what shares the encoder's devices runs between its forward and backward.
      optimizer: masters and moments: moments from update to update, masters from prepare to update.
    """

    parameters: bool = False
    optimizer: bool = False
