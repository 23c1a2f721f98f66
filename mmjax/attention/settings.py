"""The setting ``attention`` of modules: names of ways, and what is known of them without devices. Imports no JAX."""

from __future__ import annotations

from mmjax.configurable import one_of, require

AUTO = "auto"
ATTENTIONS = (AUTO, "dense", "blockwise", "cudnn")
"""Values of ``attention``: what fits device, shape and mask best; scores of all pairs of tokens; blocks of tokens in
plain XLA; and cuDNN's kernels."""
CUDNN_WIDTHS = (8, 128)
"""Heads that cuDNN takes: their width is a multiple of the first number, up to the second."""
CUDNN_DTYPES = ("bfloat16", "float16")
"""Dtypes that cuDNN takes."""


def check_attention(cls: str, attention: str, head_width: int, grid_window: int = 0) -> None:
    """Requires that the way exists and takes heads and windows of the module.

    Args:
      cls: the name of the module's settings, such as "Decoder".
      attention: the way.
      head_width: width of one head.
      grid_window: edge of the windows that cut an image; 0 is none.

    Raises:
      ConfigError: it does not.
    """
    name = f"{cls}.attention"
    one_of(name, attention, ATTENTIONS)
    if attention == "cudnn":
        why = cudnn_refusal(head_width, grid_window)
        require(not why, name, attention, f"{why}; use {AUTO!r} or 'blockwise'")


def cudnn_refusal(head_width: int, grid_window: int) -> str:
    """Why cuDNN takes no such heads or windows; "" where it does."""
    multiple, most = CUDNN_WIDTHS
    if head_width % multiple or head_width > most:
        return f"cuDNN takes heads whose width is a multiple of {multiple} up to {most}, not {head_width}"
    return "cuDNN has no windows of a grid" if grid_window else ""
