"""Telephone calls: digits dialled as DTMF tones (ITU-T Q.23), with random silences, noise and level; and their codes.

A key sounds as two sines, with the frequencies of its row and its column. A call is planned first, which gives its
length in samples; its waveform is rendered from the plan only when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from mmjax.data.patches import END, FIRST_CODE
from mmjax.data.tasks.digits.config import DigitsConfig

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = ("123", "456", "789", "*0#")
HERTZ = {
    key: (row, column) for row, keys in zip(ROWS, KEYS, strict=True) for key, column in zip(keys, COLUMNS, strict=True)
}
BLANK_CODE = FIRST_CODE + len(ROWS) + len(COLUMNS)
LETTER_CODE = BLANK_CODE + 1
CODES = LETTER_CODE + 1
"""Number of codes with which answers are spoken."""
LEAST_RATE = 4000
"""The least samples per second for the highest tone, with room for the width of its window."""


@dataclass(frozen=True, kw_only=True)
class CallPlan:
    """One call.

    digits: the dialled digits. edges: the samples at which tones begin and end in turn, then the number of samples.
    level: amplitude of a tone's two sines together. tilt: the share of the higher sine in it. noise: standard deviation
    of the white noise, in units of `level`. seed: of the noise.
    """

    digits: str
    edges: tuple[int, ...]
    level: float
    tilt: float
    noise: float
    seed: int

    @property
    def samples(self) -> int:
        """Length of the recording, in samples."""
        return self.edges[-1]


def plan_call(rng: np.random.Generator, digits: str, config: DigitsConfig, sample_rate: int) -> CallPlan:
    """A call in which `digits`, such as "123", are dialled; silence, tone, silence, … of random lengths.

    It begins and ends with silence.

    Args:
      rng: draws the lengths, level and noise.
      digits: the dialled keys, of "0123456789*#".
      config: the ranges of lengths (in seconds), level and noise: `tone`, `gap`, `level`, `noise`. `DigitsConfig()` has
        defaults.
      sample_rate: samples per second, such as 8000.

    Returns:
      `.edges`, the samples, from 0, at which tones begin and end in turn, then the number of samples: 7 integers for
      "123". `.samples` is the last one; `digits`, `level`, `tilt`, `noise` and `seed` are for `render_call`.
    """
    gaps, tones = rng.uniform(*config.gap, len(digits) + 1), rng.uniform(*config.tone, len(digits))
    lengths = np.empty(2 * len(digits) + 1)
    lengths[::2], lengths[1::2] = gaps, tones
    return CallPlan(
        digits=digits,
        edges=tuple(np.ceil(np.cumsum(lengths) * sample_rate).astype(int).tolist()),
        level=float(rng.uniform(*config.level)),
        tilt=float(rng.uniform(0.4, 0.6)),
        noise=float(rng.uniform(*config.noise)),
        seed=int(rng.integers(2**32)),
    )


def longest_call(config: DigitsConfig, sample_rate: int) -> int:
    """The most samples of a call at `sample_rate` samples per second.

    The call has the most digits, the longest tones and the longest silences, `digits[1]`, `tone[1]` and `gap[1]` of
    `config`.
    """
    digits = config.digits[1]
    return int(np.ceil((digits * config.tone[1] + (digits + 1) * config.gap[1]) * sample_rate))


def render_call(call: CallPlan, sample_rate: int) -> Float[np.ndarray, " N"]:
    """The waveform of a call, float64, N = `call.samples`; a tone has the amplitude `call.level`.

    Args:
      call: the call, as `plan_call` plans it.
      sample_rate: the samples per second for which it was planned.
    """
    noise = np.random.default_rng(call.seed).normal(size=call.samples)
    waveform = call.level * call.noise * noise
    seconds = np.arange(call.samples) / sample_rate
    for key, (start, end) in zip(call.digits, list(pairwise(call.edges))[::2], strict=True):
        low, high = (np.sin(2 * np.pi * hertz * seconds[start:end]) for hertz in HERTZ[key])
        waveform[start:end] += call.level * ((1 - call.tilt) * low + call.tilt * high)
    return waveform


def spoken(answer: str) -> np.ndarray:
    """The codes int32 [n, 1] that speak an answer, such as "12 3", each below `CODES`.

    A digit is two codes, the row and the column of its key on a telephone; a blank and any other character are one; the
    last code, 1, ends them. Rows are codes 2 to 5, columns 6 to 8, a blank is 9 and another character 10.
    """
    codes: list[int] = []
    for character in answer:
        if character.isdigit() and character in HERTZ:
            row, column = HERTZ[character]
            codes += [FIRST_CODE + ROWS.index(row), FIRST_CODE + len(ROWS) + COLUMNS.index(column)]
        else:
            codes.append(BLANK_CODE if character == " " else LETTER_CODE)
    return np.asarray([*codes, END], np.int32)[:, None]
