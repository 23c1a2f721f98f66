"""Rotary frequencies of the LLM, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmjax.reference.arithmetic import Tables
from mmjax.reference.latent import latent_magnitude

if TYPE_CHECKING:
    from mmjax.models.llama.config import DecoderConfig


def rotary_tables(decoder: DecoderConfig, positions_N3: np.ndarray) -> Tables:
    """Rotation tables (cosines, sines) [N, K / 2] of tokens at these positions (time, row, column), in float64.

    A position's first number rotates all pairs of a head; with M-RoPE each number rotates the pairs of its section, or
    every third pair where sections are interleaved. float64 is exact to the last fp32 bit at any position.
    """
    frequencies, _ = _rotary(decoder)
    if decoder.rope_sections and decoder.rope_interleaved:
        angles_NK = positions_N3[:, :1].astype(np.float64) * frequencies
        for axis in (1, 2):
            pairs = slice(axis, 3 * decoder.rope_sections[axis], 3)
            angles_NK[:, pairs] = positions_N3[:, axis : axis + 1] * frequencies[pairs]
        return np.cos(angles_NK), np.sin(angles_NK)
    sections = decoder.rope_sections or (len(frequencies), 0, 0)
    angles, first = [], 0
    for axis, pairs in enumerate(sections):
        section = frequencies[first : first + pairs]
        angles.append(positions_N3[:, axis : axis + 1].astype(np.float64) * section)
        first += pairs
    angles_NK = np.concatenate(angles, axis=1)
    return np.cos(angles_NK), np.sin(angles_NK)


def rotary_magnitude(decoder: DecoderConfig) -> float:
    """The factor of rotated heads, 1 without YaRN; see `_rotary`."""
    return _rotary(decoder)[1]


def _rotary(decoder: DecoderConfig) -> tuple[np.ndarray, float]:
    """Frequencies of a head's pairs of components, and a factor of the rotated heads.

    Sources: Peng et al. 2023, "YaRN", equations 13, 17 and 22, with a ramp between integer pairs as in published
    models; for llama3 the frequencies of Llama 3.1's release, by wavelength.
    """
    pairs, base, factor, context = (
        decoder.rotary_width // 2,
        decoder.rope_theta,
        decoder.rope_factor,
        decoder.rope_context,
    )
    plain = 1 / base ** (np.arange(pairs) / pairs)
    if decoder.rope_scaling == "proportional":  # pairs beyond the share do not rotate
        return np.where(np.arange(pairs) < int(decoder.rope_share * pairs), plain / factor, 0), 1.0
    if decoder.rope_scaling == "none":
        return plain, 1.0
    if decoder.rope_scaling == "linear":
        return plain / factor, 1.0
    low, high = decoder.turns
    if decoder.rope_scaling == "llama3":
        frequencies = plain.copy()
        for pair, wavelength in enumerate(2 * np.pi / plain):
            if wavelength > context / low:
                frequencies[pair] = plain[pair] / factor
            elif wavelength >= context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequencies[pair] = (1 - smooth) * plain[pair] / factor + smooth * plain[pair]
        return frequencies, 1.0
    # The pair whose wavelength fits `times` times into the context: context / (2 pi base^(pair / pairs)) = times.
    start, end = (pairs * np.log(context / (times * 2 * np.pi)) / np.log(base) for times in (high, low))
    start, end = max(np.floor(start), 0), min(np.ceil(end), 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - start) / (end - start if end != start else 0.001), 0, 1)
    magnitude = latent_magnitude(decoder) if decoder.kv_rank else 0.1 * float(np.log(factor)) + 1
    return plain / factor * ramp + plain * (1 - ramp), magnitude
