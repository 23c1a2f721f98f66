"""Reads dialled digits in log-mel frames with a classifier that is fitted to calls of the training data.

It is ridge regression of the loud frames of a digit onto the ten digits (Hoerl and Kennard 1970). A digit of a
recording is what most of its frames' scores are for; frames are loud where their highest bin is in the upper half of
its range.

Shapes: F frames of a call, M mel bins, N loud frames of all calls, K = 10 digits to choose from.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float

from mmjax.data.log_mel import LogMel
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.digits.dtmf import plan_call, render_call

_CALLS = 40
"""Calls of each digit to which the classifier is fitted."""
_RIDGE = 1.0
"""Weight of the penalty on coefficients."""
_SEED = 8


def read_call(frames_FM: Float[np.ndarray, "F M"], count: int, log_mel: LogMel, config: DigitsConfig) -> str:
    """The first ``count`` digits, one after another, in a call, as text.

    The time between the first loud frame and the last is divided among them.

    Args:
      frames_FM: the call's frames, as ``log_mel`` makes them.
      count: number of digits.
      log_mel: how recordings become frames.
      config: the task's settings, whose calls the classifier is fitted to.
    """
    coefficients = _fitted(log_mel, config)
    frames_FM = np.nan_to_num(np.asarray(frames_FM, np.float64))
    loud = np.flatnonzero(_is_loud(frames_FM))
    parts = np.array_split(np.arange(loud[0], loud[-1] + 1), count)
    return "".join(str(int(_scores(frames_FM, part, coefficients).argmax())) for part in parts)


def _scores(frames_FM: np.ndarray, part: np.ndarray, coefficients: np.ndarray) -> Float[np.ndarray, " K"]:
    """The sum of scores of the loud frames of a part of a call."""
    loud = part[_is_loud(frames_FM)[part]] if len(part) else part
    return (_features(frames_FM[loud]) @ coefficients).sum(0)


def _is_loud(frames_FM: np.ndarray) -> Bool[np.ndarray, " F"]:
    highest_F = frames_FM.max(1)
    return highest_F >= (highest_F.min() + highest_F.max()) / 2


def _features(frames_NM: np.ndarray) -> Float[np.ndarray, "N M+1"]:
    """Bins beside their mean, whatever the level of the call is, and a one."""
    return np.concatenate([frames_NM - frames_NM.mean(1, keepdims=True), np.ones((len(frames_NM), 1))], axis=1)


@lru_cache(maxsize=4)
def _fitted(log_mel: LogMel, config: DigitsConfig) -> Float[np.ndarray, "M+1 K"]:
    """The coefficients of loud frames in the score of each digit."""
    features, targets = list[np.ndarray](), list[np.ndarray]()
    for digit in range(10):
        for number in range(_CALLS):
            rng = np.random.default_rng([_SEED, digit, number])
            call = plan_call(rng, str(digit), config, log_mel.sample_rate)
            frames_FM = log_mel(render_call(call, log_mel.sample_rate)).astype(np.float64)
            features.append(_features(frames_FM[_is_loud(frames_FM)]))
            targets.append(np.tile(np.eye(10)[digit], (len(features[-1]), 1)))
    x_NM, y_NK = np.concatenate(features), np.concatenate(targets)
    return np.linalg.solve(x_NM.T @ x_NM + _RIDGE * np.eye(x_NM.shape[1]), x_NM.T @ y_NK)
