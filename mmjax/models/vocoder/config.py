"""Settings of HiFi-GAN vocoders, from folders of transformers. Imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mmjax.configurable import ConfigError, require

CLASS = "SpeechT5HifiGan"
"""The class of ``transformers`` whose folders are read."""
_DEFAULTS: dict[str, Any] = {
    **{"model_in_dim": 80, "sampling_rate": 16000, "upsample_initial_channel": 512},
    **{"upsample_rates": [4, 4, 4, 4], "upsample_kernel_sizes": [8, 8, 8, 8], "resblock_kernel_sizes": [3, 7, 11]},
    **{"resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]], "leaky_relu_slope": 0.1, "normalize_before": True},
}
"""What transformers takes where a config.json has no value."""


@dataclass(frozen=True, kw_only=True)
class HifiGanConfig:
    """A HiFi-GAN generator (Kong et al. 2020, "HiFi-GAN", §2.2).

    Attributes:
      mels: mel bins of a frame.
      sample_rate: samples per second of a waveform.
      width: channels before the first level, which each level halves.
      rates: by level, samples that one becomes.
      kernels: by level, the width of its transposed convolution.
      block_kernels: widths of the convolutions of a level's residual blocks.
      dilations: dilations of each of these blocks.
      slope: of leaky rectifiers.
      normalised: whether frames are first normalised by the folder's mean and scale.
    """

    mels: int
    sample_rate: int
    width: int
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    block_kernels: tuple[int, ...]
    dilations: tuple[tuple[int, ...], ...]
    slope: float
    normalised: bool

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return prod(self.rates)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> HifiGanConfig:
        """The settings in a ``config.json``; raises ``ConfigError`` if it is of another model."""
        named = config.get("model_type") == "hifigan" or CLASS in (config.get("architectures") or [])
        fix = f"mmjax reads vocoders of the class {CLASS}; name such a folder, or none for Griffin-Lim"
        require(named, "config.json: architectures", config.get("architectures"), fix)
        c = _DEFAULTS | {key: value for key, value in config.items() if key in _DEFAULTS and value is not None}
        dilations = tuple(map(tuple, c["resblock_dilation_sizes"]))
        for kernels, of_kernels in (
            ("upsample_kernel_sizes", "upsample_rates"),
            ("resblock_dilation_sizes", "resblock_kernel_sizes"),
        ):
            if len(c[kernels]) != len(c[of_kernels]):
                raise ConfigError(f"config.json: {kernels}={c[kernels]}: must be as many as {of_kernels}")
        return cls(
            mels=c["model_in_dim"],
            sample_rate=c["sampling_rate"],
            width=c["upsample_initial_channel"],
            rates=tuple(c["upsample_rates"]),
            kernels=tuple(c["upsample_kernel_sizes"]),
            block_kernels=tuple(c["resblock_kernel_sizes"]),
            dilations=dilations,
            slope=c["leaky_relu_slope"],
            normalised=c["normalize_before"],
        )
