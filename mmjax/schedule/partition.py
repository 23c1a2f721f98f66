"""Cuts layers into stages: contiguous runs, the longest as short as possible.

A cut balances the sum of forward and backward, since a stage runs both for each microbatch. The backward depends on
which modules are frozen (Jang et al., "Cornstarch", §4.2). Balancing the forward alone would make the stages of a
frozen encoder, which have no backward, half as long as those of the LLM behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

SLACK = 1e-12
"""Relative difference up to which sums count as equal."""


def backward_factor(*, trained: bool, trained_before: bool, recompute: bool = False) -> float:
    """Backward of a layer as a multiple of its forward.

    A trained layer has 2, for the gradients of its input and of its weights. A frozen layer behind a trained one
    (`trained_before`) has 1, for the gradient of its input. Any other has 0. `recompute` adds 1 to a layer with a
    backward, for its second forward. Like the paper, this also counts the gradient of the input of the first trained
    layers, which nothing needs.
    """
    factor = 2.0 if trained else 1.0 if trained_before else 0.0
    return factor + 1.0 if recompute and factor else factor


def cut(seconds: Sequence[float], stages: int, *, chunks: int = 1) -> tuple[range, ...]:
    """The layers of each of `stages · chunks` stages, as ranges of indices, from the seconds of each layer.

    `cut([1, 1, 2], 2)` is (range(0, 2), range(2, 3)). Among the cuts whose longest stage is shortest, this is the most
    even one: it has the least sum of squares. It is found by dynamic programming over the number of stages and the last
    layer. With interleaving every chunk is a stage, stage k is on submesh k mod `stages`, and the longest chunk sets
    the pace.

    Raises:
      ValueError: there are fewer layers than stages, no stages, or a layer with negative or infinite seconds.
    """
    pieces, layers = stages * chunks, len(seconds)
    if not 1 <= pieces <= layers:
        raise ValueError(f"{layers} layers in {stages} · {chunks} stages: a stage needs a layer")
    if not all(math.isfinite(layer) and layer >= 0 for layer in seconds):
        raise ValueError("a layer takes 0 seconds or more")
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    # piece_KE[k, e]: seconds of layers k to e - 1; no piece is empty.
    piece_KE = np.where(np.triu(np.ones((layers + 1, layers + 1), bool), 1), sums[None, :] - sums[:, None], np.inf)
    longest, _ = _best(piece_KE, pieces, np.maximum)
    allowed = np.where(piece_KE <= longest * (1 + SLACK), piece_KE**2, np.inf)
    _, ends = _best(allowed, pieces, np.add)
    return tuple(range(first, end) for first, end in zip([0, *ends], ends, strict=False))


def _best(piece_KE: np.ndarray, pieces: int, combine: np.ufunc) -> tuple[float, list[int]]:
    """The least cost of `pieces` pieces, whose costs `combine` joins, and the end of each piece."""
    layers = len(piece_KE) - 1
    cost = piece_KE[0]
    firsts = []
    for _ in range(pieces - 1):
        total_KE = combine(cost[:, None], piece_KE)
        first = total_KE.argmin(axis=0)
        firsts.append(first)
        cost = total_KE[first, np.arange(layers + 1)]
    ends = [layers]
    for first in reversed(firsts):
        ends.append(int(first[ends[-1]]))
    return float(cost[layers]), ends[::-1]
