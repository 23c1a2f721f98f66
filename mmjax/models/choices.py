"""What configurations of several families offer: their choices, and the sizes that follow from others. No JAX."""

from __future__ import annotations

from typing import Literal

Medium = Literal["image", "recording"]
ACTIVATIONS = ("gelu", "quick_gelu")
REMATS = ("none", "dots", "full")
"""Values of ``remat``: a layer keeps everything for its backward, products only, or its input only."""


class EqualHeads:
    """Settings of attention whose heads share the width."""

    width: int
    heads: int

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


class SquarePatches:
    """Settings of a module that cuts images into squares."""

    patch: int
    channels: int

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels
