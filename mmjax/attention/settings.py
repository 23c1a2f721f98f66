"""The setting ``attention`` of modules: names of backends, and their limits that need no device. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from mmjax.configurable import one_of, require

AUTO = "auto"
DTYPES = ("float32", "bfloat16")
"""Dtypes in which a run may compute, values of ``Train.dtype``."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library of attention kernels, and the calls that it supports.

    Attributes:
      name: the library's name as its makers write it.
      devices: the supported devices, for messages.
      dtypes: supported dtypes of queries, keys and values.
      width_multiple, max_width: a head's width is a multiple of the first, and at most the second.
      package: the Python package of the library, an extra of mmjax; "" where the kernels are part of JAX.
      version: the package's version.
      any_mask: whether every kind of mask is supported: each token sees one interval of keys, and masks for which that
        is not so are computed blockwise.
      cp_ways: supported values of ``Layout.cp_way``.
      soft_caps: whether scores may have a soft cap.
    """

    name: str
    devices: str
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    width_multiple: int = 8
    max_width: int = 128
    package: str = ""
    version: str = ""
    any_mask: bool = False
    cp_ways: tuple[str, ...] = ()
    soft_caps: bool = False

    def refusal(
        self,
        head_width: int,
        grid_window: int = 0,
        kind: str = "causal",
        cp_way: str = "",
        *,
        value_width: int = 0,
        soft_cap: float = 0.0,
    ) -> str:
        """The reason why the library cannot compute such attention, or is not installed; "" where it can.

        Args:
          head_width: width of one head.
          grid_window: edge of the windows that cut an image, or chunk of a text; 0 is none.
          kind: the kind of the mask: "causal", "full" or "words".
          cp_way: a value of ``Layout.cp_way``; "" without context parallelism.
          value_width: width of one head of values; 0 stands for ``head_width``.
          soft_cap: the bound of scores; 0 is none.
        """
        if soft_cap and not self.soft_caps:
            return f"{self.name} has no soft cap of scores"
        if kind == "words" and not self.any_mask:
            return f"{self.name} takes causal and full masks, and none of other rules"
        if cp_way and cp_way not in self.cp_ways:
            ways = " and ".join(map(repr, self.cp_ways))
            return f"{self.name} with cp is for Layout.cp_way {ways}, not {cp_way!r}"
        if value_width not in (0, head_width):
            return f"{self.name} takes keys and values of one width, not of {head_width} and {value_width}"
        if head_width % self.width_multiple or head_width > self.max_width:
            widths = f"a multiple of {self.width_multiple} up to {self.max_width}"
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
        soft_caps=True,
        cp_ways=("gather", "need", "all-to-all"),
    ),
}
BACKENDS = (AUTO, "dense", "blockwise", *LIBRARIES)
"""Values of ``attention``: the best for device, shape and mask; scores of all pairs of tokens; blocks of tokens in
plain
XLA; and the kernels of libraries."""


def check_backend_layout(field: str, attention: str, layout: str, *, cp: int, cp_way: str) -> None:
    """Requires that the backend of a module computes under its context parallelism.

    Args:
      field: the setting, such as "llm/Decoder.attention".
      attention: its value, one of ``BACKENDS``, or "" for a module without such a setting.
      layout: the name of the module's layout, such as "llm/Layout".
      cp, cp_way: fields of that layout.

    Raises:
      ConfigError: the backend does not.
    """
    if cp == 1:
        return
    fix = f"is for whole rows, and {layout}.cp is {cp}; set it to {AUTO!r} or 'blockwise'"
    require(attention != "dense", field, attention, fix)
    if library := LIBRARIES.get(attention):
        fix = f"with {layout}.cp={cp}, {library.name} needs Layout.cp_way="
        fix += f"{' or '.join(map(repr, library.cp_ways))}, not {cp_way!r}; set one, or {field} to {AUTO!r}"
        require(cp_way in library.cp_ways, field, attention, fix)


def check_backend_run(field: str, attention: str, dtype: str, platform: str) -> None:
    """Requires that the backend of a module computes in the run's dtype and on its platform.

    Args:
      field: the setting, such as "llm/Decoder.attention".
      attention: its value, one of ``BACKENDS``, or "" for a module without such a setting.
      dtype: the value of ``Train.dtype``.
      platform: the value of ``World.platform``.

    Raises:
      ConfigError: the backend does not.
    """
    if library := LIBRARIES.get(attention):
        fix = f"or {AUTO!r}, which takes what there is"
        dtypes = " or ".join(repr(name) for name in DTYPES if name in library.dtypes)
        problem = f"{library.name} does not compute in Train.dtype={dtype!r}; use {dtypes} there, {fix}"
        require(dtype in library.dtypes, field, attention, problem)
        where = f"{library.name} runs on {library.devices} and World.platform is {platform!r}"
        require(platform in ("", "cuda"), field, attention, f"{where}; use 'cuda' there, {fix}")


def check_backend(
    cls: str,
    attention: str,
    head_width: int,
    grid_window: int = 0,
    kind: str = "causal",
    *,
    value_width: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Raises `ConfigError` unless the backend exists and supports the module's heads, windows and mask.

    Args:
      cls: the gin name of the module's settings, such as "Decoder".
      attention: the name of the backend, one of ``BACKENDS``: "auto", "dense", "blockwise", "cudnn" or "tokamax".
      head_width: width of one head.
      grid_window: edge of the windows that cut an image, or chunk of a text; 0 is none.
      kind: the kind of the mask: "causal", "full" or "words".
      value_width: width of one head of values; 0 stands for ``head_width``.
      soft_cap: the bound of scores; 0 is none.

    Raises:
      ConfigError: the name is unknown, or the backend's library refuses.
    """
    name = f"{cls}.attention"
    one_of(name, attention, BACKENDS)
    if attention in LIBRARIES:
        library = LIBRARIES[attention]
        refusal = library.refusal(head_width, grid_window, kind, value_width=value_width, soft_cap=soft_cap)
        require(not refusal, name, attention, f"{refusal}; use {AUTO!r} or 'blockwise'")
