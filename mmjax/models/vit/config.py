"""Settings of vision transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.settings import EqualHeads, SquarePatches

INTERPOLATIONS = ("none", "bicubic", "bicubic_smooth", "bilinear", "corners")
"""Methods to resize a learned position table to an image."""
LEARNED = ("learned2d", "learned2d+axial", "learned_xy+rope_xy")
"""Values of ``positions`` with a table."""
POSITIONS = ("rope2d", "axial", "axial_centres", *LEARNED)
OUTPUTS = ("plain", "scaled", "standardised")
"""Values of ``output``."""

_LARGE: Mapping[str, object] = {
    "layers": 24,
    "width": 1024,
    "heads": 16,
    "mlp": 4096,
    "patch": 14,
    "channels": 3,
    "positions": "learned2d",
}
"""The settings of ViT-L/14, shared by CLIP and DINOv2."""

_DINOV2_GIANT: Mapping[str, object] = {
    **{"layers": 40, "width": 1536, "heads": 24, "mlp": 4096, "patch": 14, "channels": 3},
    **{"positions": "learned2d", "grid": 37, "interpolate": "bicubic", "class_token": True, "layer_scale": True},
    **{"gated": True, "activation": "silu"},
}
"""The settings of DINOv2's largest tower; with registers its table is smoothed."""

_DINOV3: Mapping[str, object] = {
    **{"patch": 16, "channels": 3, "positions": "axial_centres", "grid": 14, "class_token": True, "registers": 4},
    **{"k_bias": False, "layer_scale": True, "activation": "gelu_exact", "norm_eps": 1e-5},
}
"""The settings that the towers of DINOv3 share."""

_SO400M: Mapping[str, object] = {
    "layers": 27,
    "width": 1152,
    "heads": 16,
    "mlp": 4304,
    "patch": 14,
    "channels": 3,
    "positions": "learned2d",
    "interpolate": "bicubic",
}
"""The settings of SigLIP's So400m/14: 224 and 896 pixels in PaliGemma and Gemma 3."""

_QWEN: Mapping[str, object] = {
    "layers": 32,
    "width": 1280,
    "heads": 16,
    "patch": 14,
    "channels": 3,
    "merge": 2,
    "positions": "axial",
    "rope_theta": 10000.0,
    "frames": 2,
    "patch_bias": False,
    "last_norm": False,
}
"""The settings that the towers of Qwen2-VL and Qwen2.5-VL share."""

_QWEN3: Mapping[str, object] = {
    **_QWEN,
    "patch": 16,
    "positions": "learned2d+axial",
    "grid": 48,
    "interpolate": "corners",
    "patch_bias": True,
}
"""The settings that all towers of Qwen3-VL share."""

_GEMMA4: Mapping[str, object] = {
    "heads": 16,
    "patch": 16,
    "channels": 3,
    "merge": 3,
    "positions": "learned_xy+rope_xy",
    "grid": 10240,
    "patch_bias": False,
    "bias": False,
    "qk_norm": True,
    "v_norm": True,
    "score_width": 1.0,
    "norm": "rms",
    "last_norm": False,
    "post_norms": True,
    "output": "scaled",
    "gated": True,
}
"""The settings that the towers of Gemma 4 share."""


@configurable("ViT")
@dataclass(frozen=True, kw_only=True)
class ViTConfig(EqualHeads, SquarePatches):
    """A vision encoder.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      patch: side of a square patch in pixels.
      channels: image channels.
      merge: side of the square of patches that make one LLM token.
      positions: ``rope2d`` or ``axial`` (any resolution: half of a head's components, or half of its pairs of
        components as in Qwen2-VL, rotate with the row, the others with the column), ``axial_centres`` (as ``axial``,
        by the place of a patch's centre between the image's edges, of which one is -2π and the other 2π, as in DINOv3),
        ``learned2d`` (a table of ``grid``² positions), ``learned2d+axial`` (both, as in Qwen3-VL), or
        ``learned_xy+rope_xy`` (a table of ``grid`` columns and another of ``grid`` rows, whose embeddings are added;
        half of a head's components rotate with the column, the others with the row, as in Gemma 4).
      rope_theta: base of the rotary frequencies.
      grid: side of the table of learned positions in patches, or the places of each of two tables: the largest side of
        an image, unless the table is resized (``interpolate``).
      interpolate: method to resize the table to each image: ``none`` (an image reads the upper left corner),
        ``bicubic``, ``bicubic_smooth`` and ``bilinear`` (smoothed where the image has fewer patches, as in DINOv2 with
        registers and in SigLIP 2), or ``corners`` (linear, the patches in an image's corners read the corners of the
        table, as in Qwen3-VL).
      class_token: whether a class token, with its own position, precedes each image's patches. Patches attend to it; it
        is not sent to the LLM.
      registers: learned tokens without positions that precede an image's patches, behind its class token. Patches
        attend to them; they are not sent to the LLM (Darcet et al., "Vision transformers need registers").
      frames: frames of a patch: of a video so many follow one another, an image is repeated (Qwen2-VL has 2).
      patch_bias: whether the patch embedding has a bias.
      bias: whether the products of layers have biases.
      qkv_bias: whether queries, keys and values have biases, where products have.
      k_bias: whether keys have one beside queries and values, on which attention does not depend; DINOv3 has none.
      qk_norm: whether each head's queries and keys have an RMSNorm in front of their rotation.
      v_norm: whether each head's values have an RMSNorm without a weight.
      score_width: scores are divided by the square root of this; 0 = of a head's width.
      norm: ``layer`` or ``rms``.
      stem_norm, last_norm: whether there is a norm behind the embeddings, and behind the last layer.
      norm_eps: epsilon of norms.
      post_norms: whether the outputs of attention and mlp have norms of their own before they are added, as in Gemma.
      clipped: whether each product of a layer bounds its input and its result, by four numbers from a folder that
        training does not change.
      output: ``plain``, ``scaled`` (results are multiplied by the square root of the width), or ``standardised`` (then
        also minus a mean and times a scale, from a folder, which training does not change).
      layer_scale: whether the outputs of attention and mlp are scaled by learned vectors.
      gated: whether the mlp is gated (SwiGLU with ``silu``).
      activation: ``gelu`` (tanh), ``gelu_exact``, ``quick_gelu`` or ``silu``.
      window: side, in patches, of the windows that an image is cut into from its upper left corner: a patch attends to
        its own window; 0 means no windows.
      full_at: layers without windows, counted from 0.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "clip-vit-l14": {**_LARGE, "grid": 24, "activation": "quick_gelu"},
        "vit-h14": {
            "layers": 32,
            "width": 1280,
            "heads": 16,
            "mlp": 5120,
            "patch": 14,
            "channels": 3,
            "positions": "learned2d",
            "grid": 16,
        },
        "clip-vit-l14-336": {
            **_LARGE,
            "grid": 24,
            "interpolate": "bicubic",
            "class_token": True,
            "patch_bias": False,
            "stem_norm": True,
            "last_norm": False,
            "norm_eps": 1e-5,
            "activation": "quick_gelu",
        },
        "siglip-so400m-14-224": {**_SO400M, "grid": 16},
        "siglip-so400m-14-384": {**_SO400M, "grid": 27},
        "siglip-so400m-14-896": {**_SO400M, "grid": 64},
        "dinov2-giant": {**_DINOV2_GIANT},
        "dinov2-large": {
            **_LARGE,
            "grid": 37,
            "interpolate": "bicubic",
            "class_token": True,
            "layer_scale": True,
            "activation": "gelu_exact",
        },
        "dinov2-with-registers-giant": {**_DINOV2_GIANT, "registers": 4, "interpolate": "bicubic_smooth"},
        "dinov3-vitl16": {**_DINOV3, "layers": 24, "width": 1024, "heads": 16, "mlp": 4096},
        "dinov3-vith16plus": {
            **_DINOV3,
            **{"layers": 32, "width": 1280, "heads": 20, "mlp": 5120, "gated": True, "activation": "silu"},
        },
        "qwen2-vl-7b": {**_QWEN, "mlp": 5120, "activation": "quick_gelu"},
        "qwen2.5-vl-7b": {
            **_QWEN,
            "mlp": 3420,
            "activation": "silu",
            "gated": True,
            "norm": "rms",
            "window": 8,
            "full_at": (7, 15, 23, 31),
        },
        "qwen3-vl-4b": {**_QWEN3, "layers": 24, "width": 1024, "mlp": 4096},
        "qwen3-vl-8b": {**_QWEN3, "layers": 27, "width": 1152, "mlp": 4304},
        "qwen3-vl-30b-a3b": {**_QWEN3, "layers": 27, "width": 1152, "mlp": 4304},
        "gemma4-e4b": {**_GEMMA4, "layers": 16, "width": 768, "heads": 12, "mlp": 3072, "clipped": True},
        "gemma4-31b": {**_GEMMA4, "layers": 27, "width": 1152, "mlp": 4304, "output": "standardised"},
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 4
    channels: int = 1
    merge: int = 2
    positions: str = "rope2d"
    rope_theta: float = 100.0
    grid: int = 32
    interpolate: str = "none"
    class_token: bool = False
    registers: int = 0
    frames: int = 1
    patch_bias: bool = True
    bias: bool = True
    qkv_bias: bool = True
    k_bias: bool = True
    qk_norm: bool = False
    v_norm: bool = False
    score_width: float = 0.0
    norm: str = "layer"
    stem_norm: bool = False
    last_norm: bool = True
    norm_eps: float = 1e-6
    post_norms: bool = False
    clipped: bool = False
    output: str = "plain"
    layer_scale: bool = False
    gated: bool = False
    activation: str = "gelu"
    window: int = 0
    full_at: tuple[int, ...] = field(default=(), metadata={"example": (7, 15)})
    attention: str = "auto"
    remat: str = "auto"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "grid", "frames", "rope_theta"):
            positive(f"ViT.{name}", getattr(self, name))
        not_negative("ViT.registers", self.registers)
        positive("ViT.norm_eps", self.norm_eps, 1e-6)
        divides("ViT.heads", self.heads, self.width, "ViT.width")
        one_of("ViT.positions", self.positions, POSITIONS)
        one_of("ViT.norm", self.norm, ("layer", "rms"))
        one_of("ViT.interpolate", self.interpolate, INTERPOLATIONS)
        one_of("ViT.activation", self.activation, ACTIVATIONS)
        one_of("ViT.output", self.output, OUTPUTS)
        not_negative("ViT.score_width", self.score_width)
        check_backend("ViT", self.attention, self.head_width, self.window)
        one_of("ViT.remat", self.remat, REMATS)
        legal = self.interpolate == "none" or (self.has_table and not self.has_axis_tables)
        fix = "resizes a table of positions; set it to 'none' or ViT.positions to 'learned2d'"
        require(legal, "ViT.interpolate", self.interpolate, fix)
        if self.rotates:
            divides(
                "ViT.heads",
                self.heads,
                self.width // 4,
                f"a quarter of ViT.width ({self.positions} rotates quarters of a head), which is",
            )
        self._check_window()

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "rope_theta" or "grid" by
        ``positions``, "qkv_bias" without ``bias``, "k_bias" without ``qkv_bias``, or none.
        """
        read = {"rope_theta": self.rotates, "grid": self.has_table}
        reasons = {
            name: f"ViT.positions={self.positions!r} does not read it" for name, is_read in read.items() if not is_read
        }
        if not self.bias:
            reasons |= dict.fromkeys(("qkv_bias", "k_bias"), "ViT.bias=False: no product has one")
        elif not self.qkv_bias:
            reasons["k_bias"] = "ViT.qkv_bias=False: neither keys nor queries have one"
        return reasons

    def _check_window(self) -> None:
        not_negative("ViT.window", self.window)
        fix = f"must be a multiple of ViT.merge ({self.merge}), such as {4 * self.merge}, or 0"
        require(self.window % self.merge == 0, "ViT.window", self.window, fix)
        fix = "class tokens and registers lie in no window; set it to 0, or leave out ViT.class_token and ViT.registers"
        require(not (self.window and self.special), "ViT.window", self.window, fix)
        ascending = list(self.full_at) == sorted({*self.full_at}) and all(0 <= at < self.layers for at in self.full_at)
        fix = f"must be rising numbers of layers, 0 to {self.layers - 1}"
        require(ascending, "ViT.full_at", self.full_at, fix)
        fix = "no layer has windows; set ViT.window, such as 8, or leave it ()"
        require(self.window > 0 or not self.full_at, "ViT.full_at", self.full_at, fix)

    @property
    def special(self) -> int:
        """The number of an image's tokens that are no patches: its class token and registers."""
        return self.class_token + self.registers

    @property
    def has_table(self) -> bool:
        """Whether positions are learned, in a table."""
        return self.positions in LEARNED

    @property
    def has_axis_tables(self) -> bool:
        """Whether the table has a row for each column and each row of patches, and not for each pair of them."""
        return self.positions == "learned_xy+rope_xy"

    @property
    def places(self) -> int:
        """The number of rows of the table of positions, with the class token's."""
        return self.class_token + (2 * self.grid if self.has_axis_tables else self.grid**2)

    @property
    def rotates(self) -> str:
        """The rotary embedding of queries and keys: "rope2d", "axial", "axial_centres", "rope_xy", or "" for
        none.
        """
        rotary = {"learned2d": "", "learned2d+axial": "axial", "learned_xy+rope_xy": "rope_xy"}
        return rotary.get(self.positions, self.positions)

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Runs of equal layers: the number of layers, and their window in patches; 0 means no windows. Such as ((7, 8),
        (1, 0)).
        """
        by_layer = (0 if layer in self.full_at else self.window for layer in range(self.layers))
        return tuple((len(list(run)), window) for window, run in groupby(by_layer))
