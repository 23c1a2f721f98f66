"""Configurations of models. Imports neither JAX nor a model, so that errors in them are reported at once.

A kind of encoder or generator has its configuration here, and its computation in ``encoders`` or ``generators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.mesh.layout import Layout, split_layers

LLM = "llm"
Medium = Literal["image", "recording"]
ACTIVATIONS = ("gelu", "quick_gelu")
REMATS = ("none", "dots", "full")
"""Values of ``remat``: a layer keeps everything for its backward, products only, or its input only."""


@configurable("Decoder")
@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A language model.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, kv_heads, mlp: depth, model width, query heads, key/value heads, hidden units.
      head_dim: width of one head; 0 means width / heads.
      vocab: vocabulary size; 0 means the tokenizer's.
      rope_theta: base of the rotary frequencies.
      norm_eps: added to the mean square in RMSNorm.
      tied: the output head is the embedding's transpose.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "vicuna-7b": dict(layers=32, width=4096, heads=32, kv_heads=32, mlp=11008, vocab=32000),
        "llama3-8b": dict(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, vocab=128256, rope_theta=500000.0),
        "llama3-70b": dict(layers=80, width=8192, heads=64, kv_heads=8, mlp=28672, vocab=128256, rope_theta=500000.0),
    }

    preset: str = "tiny"
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    mlp: int = 192
    vocab: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = False
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "mlp", "rope_theta", "norm_eps"):
            positive(f"Decoder.{name}", getattr(self, name))
        for name in ("vocab", "head_dim"):
            not_negative(f"Decoder.{name}", getattr(self, name))
        divides("Decoder.kv_heads", self.kv_heads, self.heads, "Decoder.heads")
        if not self.head_dim:
            divides("Decoder.heads", self.heads, self.width, "Decoder.width")
        require(self.head_width % 2 == 0, "Decoder.head_dim", self.head_width, "must be even, such as 16")
        one_of("Decoder.remat", self.remat, REMATS)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads


@configurable("ViT")
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """A vision encoder.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      patch: side of a square patch in pixels.
      channels: image channels.
      merge: side of the square of patches that the projector joins into one LLM token.
      positions: ``rope2d`` (any resolution) or ``learned2d`` (a table of ``grid``² positions).
      grid: largest number of patches along a side; used by ``learned2d``.
      activation: ``gelu`` or ``quick_gelu``.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "clip-vit-l14": dict(
            layers=24,
            width=1024,
            heads=16,
            mlp=4096,
            patch=14,
            channels=3,
            positions="learned2d",
            grid=24,
            activation="quick_gelu",
        ),
        "vit-h14": dict(
            layers=32, width=1280, heads=16, mlp=5120, patch=14, channels=3, positions="learned2d", grid=16
        ),
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
    grid: int = 32
    activation: str = "gelu"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "grid"):
            positive(f"ViT.{name}", getattr(self, name))
        divides("ViT.heads", self.heads, self.width, "ViT.width")
        one_of("ViT.positions", self.positions, ("rope2d", "learned2d"))
        one_of("ViT.activation", self.activation, ACTIVATIONS)
        one_of("ViT.remat", self.remat, REMATS)
        if self.positions == "rope2d":
            divides(
                "ViT.heads",
                self.heads,
                self.width // 4,
                "a quarter of ViT.width (rope2d rotates quarters of a head), which is",
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels


@configurable("Whisper")
@dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """An audio encoder.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      mels: mel bins of a frame.
      merge: positions that the projector joins into one LLM token; a position is two frames.
      positions: ``sinusoidal`` (any length) or ``learned`` (a table of ``length`` positions).
      length: largest number of positions of a recording; used by ``learned``.
      activation: ``gelu`` or ``quick_gelu``.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
      sample_rate: samples per second of a recording.
      window, hop: samples under the window of a frame, and from one frame to the next.
    """

    medium: ClassVar[Medium] = "recording"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "whisper-tiny": dict(layers=4, width=384, heads=6, mlp=1536, mels=80, sample_rate=16000, window=400, hop=160),
        "whisper-large-v3": dict(
            layers=32, width=1280, heads=20, mlp=5120, mels=128, sample_rate=16000, window=400, hop=160
        ),
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    mels: int = 40
    merge: int = 4
    positions: str = "sinusoidal"
    length: int = 1500
    activation: str = "gelu"
    remat: str = "none"
    sample_rate: int = 8000
    window: int = 256
    hop: int = 80

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "mlp", "mels", "merge", "length", "sample_rate", "window", "hop")
        for name in sizes:
            positive(f"Whisper.{name}", getattr(self, name))
        divides("Whisper.heads", self.heads, self.width, "Whisper.width")
        one_of("Whisper.positions", self.positions, ("sinusoidal", "learned"))
        one_of("Whisper.activation", self.activation, ACTIVATIONS)
        one_of("Whisper.remat", self.remat, REMATS)
        if self.positions == "sinusoidal":
            even = self.width % 2 == 0 and self.width > 2
            require(even, "Whisper.width", self.width, "sinusoidal positions need an even width above 2, such as 64")
        fix = f"must be at least Whisper.hop ({self.hop}), or samples between frames are lost; set it to {2 * self.hop}"
        require(self.window >= self.hop, "Whisper.window", self.window, fix)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads


@configurable("DiT")
@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """A generator of pictures.

    Attributes:
      preset: name of the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      patch: side of a square patch in pixels.
      channels: channels of a picture.
      merge: side of the square of patches that one LLM token stands for.
      frequencies: number of sines, and of cosines, of the time.
      loss_weight: weight of its loss beside the LLM's.
      steps: number of steps from noise to a picture.
      activation: ``gelu`` or ``quick_gelu``.
      remat: what is kept for backward: ``none`` recomputes nothing, ``dots`` keeps products, ``full`` recomputes all.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "dit-xl2": dict(layers=28, width=1152, heads=16, mlp=4608, patch=2, channels=4),
    }

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    patch: int = 2
    channels: int = 1
    merge: int = 2
    frequencies: int = 8
    loss_weight: float = 1.0
    steps: int = 20
    activation: str = "gelu"
    remat: str = "none"

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "patch", "channels", "merge", "frequencies", "steps"):
            positive(f"DiT.{name}", getattr(self, name))
        not_negative("DiT.loss_weight", self.loss_weight)
        divides("DiT.heads", self.heads, self.width, "DiT.width")
        of = "a quarter of DiT.width (positions rotate quarters of a head), which is"
        divides("DiT.heads", self.heads, self.width // 4, of)
        one_of("DiT.activation", self.activation, ACTIVATIONS)
        one_of("DiT.remat", self.remat, REMATS)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def patch_values(self) -> int:
        """Numbers in one patch."""
        return self.patch * self.patch * self.channels


@configurable("Projector")
@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """A two-layer projector.

    Attributes:
      hidden: hidden units; 0 means the LLM's width.
      inject: LLM layers that the modality tokens enter again: each adds, at the tokens' places, the output of a
        projector of its own for them, as in DeepStack (Meng et al. 2024).
    """

    hidden: int = 0
    inject: tuple[int, ...] = field(default=(), metadata={"example": (0, 2)})

    def __post_init__(self) -> None:
        not_negative("Projector.hidden", self.hidden)
        rising = list(self.inject) == sorted(set(self.inject)) and all(layer >= 0 for layer in self.inject)
        require(rising, "Projector.inject", self.inject, "must be rising numbers of LLM layers, such as (0, 2)")


ENCODER_CONFIGS: Mapping[str, type[Any]] = {"vit": ViTConfig, "whisper": WhisperConfig}
GENERATOR_CONFIGS: Mapping[str, type[Any]] = {"dit": DiTConfig}
"""The configuration of each kind."""


@configurable("Model")
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which modules the model has.

    Attributes:
      encoders: kind of each encoder by its name; the name is the encoder's scope in a configuration.
      generators: kind of each generator by its name, likewise.
    """

    encoders: dict[str, str] = field(default_factory=lambda: {"vision": "vit"})
    generators: dict[str, str] = field(default_factory=dict, metadata={"example": {"painter": "dit"}})

    def __post_init__(self) -> None:
        require(bool(self.encoders), "Model.encoders", self.encoders, "name at least one, such as {'vision': 'vit'}")
        given = (
            ("encoders", self.encoders, ENCODER_CONFIGS, "vision"),
            ("generators", self.generators, GENERATOR_CONFIGS, "painter"),
        )
        for which, named, kinds, example in given:
            for name, kind in named.items():
                article = "an" if which[0] == "e" else "a"
                fix = f"not {article} {which[:-1]}; use one of {', '.join(kinds)}"
                require(kind in kinds, f"Model.{which}[{name!r}]", kind, fix)
                fix = f"must be an identifier other than 'llm', such as {example!r}"
                require(name != LLM and name.isidentifier(), f"Model.{which}", name, fix)

    @property
    def media(self) -> tuple[str, ...]:
        """The modules whose media have placeholders in the LLM's rows: encoders, then generators."""
        return (*self.encoders, *self.generators)


def projector_name(module: str) -> str:
    """Module name of an encoder's or a generator's projector."""
    return f"{module}_projector"


def require_layers(name: str, layers: int, layout: Layout) -> None:
    """Checks that every stage of the module has a layer, and every layer a stage.

    Raises:
      ConfigError: when the module has fewer layers than stages, or not as many as the layout's stages together.
    """
    fix = f"a stage needs a layer and there are {layers}; use {layers} or less"
    require(layout.pp <= layers, f"{name}/Layout.pp", layout.pp, fix)
    fix = f"pp * chunks = {layout.stages} stages need a layer each and there are {layers}; use {layers // layout.pp}"
    require(layout.stages <= layers, f"{name}/Layout.chunks", layout.chunks, fix)
    even = tuple(map(len, split_layers(layers, layout.stages)))
    fix = f"sums to {sum(layout.layers)} and there are {layers}; use {even}, or () for as equal as possible"
    require(sum(layout.layers or even) == layers, f"{name}/Layout.layers", layout.layers, fix)
