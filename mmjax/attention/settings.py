"""The setting ``attention`` of modules: names of ways, and what is known of them without devices. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from mmjax.configurable import one_of, require

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library with kernels for attention, and what it takes.

    Attributes:
      name: as its makers write it.
      devices: in words.
      dtypes: of queries, keys and values.
      multiple, most: the width of a head is a multiple of the first, up to the second.
      package: the Python package that has it; "" where JAX has it. version: of the package, which is an extra of mmjax.
      any_mask: whether it takes every mask that shows a token one run of keys, and rows of others go by blocks.
      cp_ways: values of ``Layout.cp_way`` under which it computes attention.
    """

    name: str
    devices: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    multiple: int = 8
    most: int = 128
    package: str = ""
    version: str = ""
    any_mask: bool = False
    cp_ways: tuple[str, ...] = ()

    def refusal(self, head_width: int, grid_window: int = 0, kind: str = "causal", cp_way: str = "") -> str:
        """Why it takes no heads or windows of such sizes, or no such mask, or is not there; "" where it does.

        Args:
          head_width: width of one head.
          grid_window: edge of the windows that cut an image, or chunks of a text; 0 is none.
          kind: see ``Mask``.
          cp_way: how ranks of cp bring queries and keys together; "" where rows are whole.
        """
        if kind == "words" and not self.any_mask:
            return f"{self.name} takes causal and full masks, and none of other rules"
        if cp_way and cp_way not in self.cp_ways:
            ways = " and ".join(map(repr, self.cp_ways))
            return f"{self.name} with cp is for Layout.cp_way {ways}, not {cp_way!r}"
        if head_width % self.multiple or head_width > self.most:
            widths = f"a multiple of {self.multiple} up to {self.most}"
            return f"{self.name} takes heads whose width is {widths}, not {head_width}"
        if grid_window and not self.any_mask:
            return f"{self.name} has no windows of a grid and no chunks"
        if self.package and not find_spec(self.package):
            return f"{self.name} is not installed (pip install {self.package}=={self.version})"
        return ""


LIBRARIES: Mapping[str, Library] = {
    "cudnn": Library(name="cuDNN", devices="NVIDIA's GPUs", cp_ways=("all-to-all",)),
    "tokamax": Library(
        name="tokamax",
        devices="NVIDIA's Hopper GPUs",
        package="tokamax",
        version="0.0.12",
        any_mask=True,
        cp_ways=("gather", "need", "all-to-all"),
    ),
}
ATTENTIONS = (AUTO, "dense", "blockwise", *LIBRARIES)
"""Values of ``attention``: what fits device, shape and mask best; scores of all pairs of tokens; blocks of tokens in
plain XLA; and the kernels of libraries."""


def check_attention(cls: str, attention: str, head_width: int, grid_window: int = 0, kind: str = "causal") -> None:
    """Requires that the way exists and takes heads, windows and mask of the module.

    Args:
      cls: the name of the module's settings, such as "Decoder".
      attention: the way.
      head_width, grid_window, kind: see ``Library.refusal``.

    Raises:
      ConfigError: it does not.
    """
    name = f"{cls}.attention"
    one_of(name, attention, ATTENTIONS)
    if attention in LIBRARIES:
        why = LIBRARIES[attention].refusal(head_width, grid_window, kind)
        require(not why, name, attention, f"{why}; use {AUTO!r} or 'blockwise'")
