"""Settings of audio encoders. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from mmjax.attention.settings import check_backend
from mmjax.configurable import PROPOSED, configurable, divides, one_of, positive, require
from mmjax.data.log_mel import EDGES
from mmjax.models.choices import ACTIVATIONS, REMATS, Medium
from mmjax.models.settings import EqualHeads


@configurable("Whisper")
@dataclass(frozen=True, kw_only=True)
class WhisperConfig(EqualHeads):
    """An audio encoder.

    Attributes:
      preset: the preset whose values are the defaults.
      layers, width, heads, mlp: depth, model width, attention heads and hidden units.
      mels: mel bins of a frame.
      merge: positions that make one LLM token; a position is two frames.
      positions: ``sinusoidal`` (any length) or ``learned`` (a table of ``length`` positions).
      length: largest number of positions of a recording; used by ``learned`` and ``pad``.
      pad: whether every recording is padded with silence or cut to ``length`` positions, as in transformers; otherwise
        each has as many as it needs. A folder proposes it.
      edges: the samples beyond both ends of a recording that frames read: ``silent`` (zeros) or ``reflected`` (its
        first and last samples, mirrored), as in OpenAI's models.
      k_bias: whether keys have a bias, on which attention does not depend; OpenAI's models have none.
      activation: ``gelu`` (tanh), ``gelu_exact`` or ``quick_gelu``.
      norm_eps: epsilon of norms; OpenAI's models have 1e-5.
      attention: the attention backend: ``blockwise`` (any mask, any device), ``cudnn``, ``dense`` (all pairs of tokens
        at once), or ``auto``: cuDNN where it supports device, mask and shape, else blockwise.
      remat: the checkpoint policy: ``none`` recomputes nothing, ``dots`` saves products, ``full`` recomputes all;
        ``auto`` is none on CPUs, and on GPUs the first of them whose estimated memory fits.
      sample_rate: samples per second of a recording.
      window, hop: samples under the window of a frame, and from one frame to the next.
    """

    medium: ClassVar[Medium] = "recording"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "tiny": {},
        "whisper-tiny": {
            "layers": 4,
            "width": 384,
            "heads": 6,
            "mlp": 1536,
            "mels": 80,
            "sample_rate": 16000,
            "window": 400,
            "hop": 160,
        },
        "whisper-large-v3": {
            "layers": 32,
            "width": 1280,
            "heads": 20,
            "mlp": 5120,
            "mels": 128,
            "sample_rate": 16000,
            "window": 400,
            "hop": 160,
        },
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
    pad: bool = field(default=False, metadata=PROPOSED)
    edges: str = "silent"
    k_bias: bool = True
    activation: str = "gelu"
    norm_eps: float = 1e-6
    attention: str = "auto"
    remat: str = "auto"
    sample_rate: int = 8000
    window: int = 256
    hop: int = 80

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "mlp", "mels", "merge", "length", "sample_rate", "window", "hop")
        for name in sizes:
            positive(f"Whisper.{name}", getattr(self, name))
        divides("Whisper.heads", self.heads, self.width, "Whisper.width")
        one_of("Whisper.positions", self.positions, ("sinusoidal", "learned"))
        one_of("Whisper.edges", self.edges, EDGES)
        one_of("Whisper.activation", self.activation, ACTIVATIONS)
        positive("Whisper.norm_eps", self.norm_eps, 1e-6)
        check_backend("Whisper", self.attention, self.head_width)
        one_of("Whisper.remat", self.remat, REMATS)
        if self.positions == "sinusoidal":
            even = self.width % 2 == 0 and self.width > 2
            require(even, "Whisper.width", self.width, "sinusoidal positions need an even width above 2, such as 64")
        if self.pad:
            divides("Whisper.merge", self.merge, self.length, "Whisper.length, which Whisper.pad makes of a recording,")
        fix = f"must be at least Whisper.hop ({self.hop}), or samples between frames are lost; set it to {2 * self.hop}"
        require(self.window >= self.hop, "Whisper.window", self.window, fix)

    def idle(self) -> dict[str, str]:
        """The fields without effect, given the other fields, each with the reason: "length" where nothing reads it,
        else {}.
        """
        reads_length = self.pad or self.positions == "learned"
        return {} if reads_length else {"length": "it belongs to Whisper.positions='learned' and to Whisper.pad"}
