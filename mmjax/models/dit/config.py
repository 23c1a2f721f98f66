"""Settings of diffusion transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import configurable, divides, not_negative, one_of, positive, require
from mmjax.data.log_mel import EDGES, LOGS, LogMel
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.diffusion import Diffusion
from mmjax.models.settings import ConditionTokens, EqualHeads, SquarePatches


@dataclass(frozen=True, kw_only=True)
class DiTBlocks(Diffusion, ConditionTokens, EqualHeads):
    """Settings of a diffusion transformer, whatever its patches are of; ``Diffusion`` has those of noise and drawing.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      merge: patches, along each axis, that make one LLM token.
      queries: LLM tokens that condition a medium, whatever its size, as tokens of their own before the patches; 0 = a
        token for each block of ``merge`` patches along each axis, whose features are added to theirs.
      frequencies: number of sines, and of cosines, of the time.
      activation: ``gelu`` (tanh), ``gelu_exact`` or ``quick_gelu``.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
    """

    splits_queries: ClassVar[bool] = True

    preset: str = "tiny"
    layers: int = 2
    width: int = 64
    heads: int = 4
    mlp: int = 128
    merge: int = 2
    queries: int = 0
    frequencies: int = 8
    activation: str = "gelu"
    attention: str = "auto"
    remat: str = "auto"

    @property
    def patch_values(self) -> int:
        """The number of values in one patch."""
        raise NotImplementedError(f"{type(self).__name__} defines no patch_values")

    def check_blocks(self, scope: str) -> None:
        """Raises ``ConfigError`` unless the settings fit together; ``scope`` is their name in gin, such as "DiT"."""
        for name in ("layers", "width", "heads", "mlp", "merge", "frequencies"):
            positive(f"{scope}.{name}", getattr(self, name))
        self.check_diffusion(scope)
        not_negative(f"{scope}.queries", self.queries)
        fix = f"{scope}.queries={self.queries} tokens stand for a medium of any size; set it to 1, or queries to 0"
        require(not self.queries or self.merge == 1, f"{scope}.merge", self.merge, fix)
        divides(f"{scope}.heads", self.heads, self.width, f"{scope}.width")
        quarter = f"a quarter of {scope}.width (positions rotate quarters of a head), which is"
        divides(f"{scope}.heads", self.heads, self.width // 4, quarter)
        one_of(f"{scope}.activation", self.activation, ACTIVATIONS)
        check_backend(scope, self.attention, self.head_width)
        one_of(f"{scope}.remat", self.remat, REMATS)


@configurable("DiT")
@dataclass(frozen=True, kw_only=True)
class DiTConfig(SquarePatches, DiTBlocks):
    """A generator of pictures; ``DiTBlocks`` and ``Diffusion`` have its other settings.

    Attributes:
      patch: side of a square patch in pixels.
      channels: channels of a picture.
    """

    medium: ClassVar[Medium] = "image"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "dit-xl2": {"layers": 28, "width": 1152, "heads": 16, "mlp": 4608, "patch": 2, "channels": 4},
    }

    patch: int = 2
    channels: int = 1

    def __post_init__(self) -> None:
        for name in ("patch", "channels"):
            positive(f"DiT.{name}", getattr(self, name))
        self.check_blocks("DiT")

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason."""
        return self.idle_diffusion("DiT")


@configurable("SoundDiT")
@dataclass(frozen=True, kw_only=True)
class SoundDiTConfig(DiTBlocks):
    """A generator of recordings, as log-mel frames; ``DiTBlocks`` and ``Diffusion`` have its other settings.

    Attributes:
      patch: frames of a patch, which has all of their bins.
      mels: mel bins of a frame.
      sample_rate: samples per second of a recording.
      window, hop: samples under the window of a frame, and from one frame to the next.
      edges: the samples beyond both ends of a recording that frames read: ``silent`` (zeros) or ``reflected``.
      low, high: hertz from which and to which bins reach; ``high`` 0 = half of ``sample_rate``.
      log: the logarithms of bins: ``log10`` of magnitudes, as SpeechT5, ``ln``, as HiFi-GAN, or ``whisper``.
      mean, std: what is subtracted from the logarithms, and what they are then divided by, so that they are about -1…1.
    """

    medium: ClassVar[Medium] = "recording"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "speecht5": {
            "layers": 12,
            "width": 768,
            "heads": 12,
            "mlp": 3072,
            "mels": 80,
            "sample_rate": 16000,
            "window": 1024,
            "hop": 256,
            "edges": "reflected",
            "low": 80.0,
            "high": 7600.0,
        },
    }

    merge: int = 1
    patch: int = 4
    mels: int = 40
    sample_rate: int = 8000
    window: int = 256
    hop: int = 80
    edges: str = "silent"
    low: float = 0.0
    high: float = 0.0
    log: str = "log10"
    mean: float = -2.0
    std: float = 2.0

    def __post_init__(self) -> None:
        for name in ("patch", "mels", "sample_rate", "window", "hop", "std"):
            positive(f"SoundDiT.{name}", getattr(self, name))
        self.check_blocks("SoundDiT")
        one_of("SoundDiT.edges", self.edges, EDGES)
        one_of("SoundDiT.log", self.log, LOGS)
        fix = (
            f"must be at least SoundDiT.hop ({self.hop}), or samples between frames are lost; set it to {4 * self.hop}"
        )
        require(self.window >= self.hop, "SoundDiT.window", self.window, fix)
        top = self.high or self.sample_rate / 2
        fix = f"must be above 0 and at most half of SoundDiT.sample_rate={self.sample_rate}; set it to 0.0 for that"
        require(0 < top <= self.sample_rate / 2, "SoundDiT.high", self.high, fix)
        require(0 <= self.low < top, "SoundDiT.low", self.low, f"must be below {top:g} hertz; set it to 0.0")

    @property
    def channels(self) -> int:
        """The bins of a frame, which are to a recording what channels are to a picture."""
        return self.mels

    @property
    def patch_values(self) -> int:
        """The number of values in one patch: ``patch`` · ``mels``."""
        return self.patch * self.mels

    @property
    def log_mel(self) -> LogMel:
        """How a recording becomes frames."""
        names = ("sample_rate", "window", "hop", "mels", "edges", "low", "high", "log", "mean", "std")
        return LogMel(**{name: getattr(self, name) for name in names})

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason."""
        return self.idle_diffusion("SoundDiT")
