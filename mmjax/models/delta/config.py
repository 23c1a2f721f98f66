"""Sizes of gated delta layers. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from mmjax.configurable import divides, positive, require

DELTA_SETTINGS = ("delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_taps", "attention_every")
"""Settings of a decoder that have no effect without ``delta_heads``."""


@dataclass(frozen=True, kw_only=True)
class DeltaSizes:
    """Sizes of one gated delta layer, which tp does not change.

    Attributes:
      layers: depth of the module, in all stages.
      width: model width.
      heads: heads of queries and keys.
      value_heads: heads of values, each with a state; consecutive ones share a key head.
      key_dim, value_dim: width of one head's queries and keys, and of its values.
      taps: tokens that a convolution reads, the token itself included.
      eps: epsilon of the gated norm.
    """

    layers: int
    width: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    def check(self, name: str) -> None:
        """Requires that there is such a layer.

        Args:
          name: the gin name of the settings, such as "Decoder".

        Raises:
          ConfigError: a width is not above 0, a convolution has one tap, or key heads do not divide value heads.
        """
        for field, size in {"delta_key_dim": self.key_dim, "delta_value_dim": self.value_dim}.items():
            positive(f"{name}.{field}", size, 128)
        require(
            self.taps > 1,
            f"{name}.delta_taps",
            self.taps,
            "a convolution reads tokens before; use 2 or more, such as 4",
        )
        divides(f"{name}.delta_heads", self.heads, self.value_heads, f"{name}.delta_value_heads")
