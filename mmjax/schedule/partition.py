"""Cuts layers into stages: contiguous runs, the longest as short as possible.

Balanced is the sum of forward and backward, since a stage runs both for each microbatch, and a backward depends on
what is frozen and where (Jang et al., "Cornstarch", §4.2): balancing the forward alone leaves stages of a frozen
encoder, which have no backward, half as long as those of the LLM behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

SLACK = 1e-12
"""Relative difference up to which sums count as equal."""


def backward_factor(*, trained: bool, trained_before: bool, recompute: bool = False) -> float:
    """Backward of a layer as a multiple of its forward.

    trained: it has trained parameters: 2, for the gradients of its input and of its weights. trained_before: something
    upstream has: 1, for the gradient of the input. Neither: 0. recompute: a layer with a backward runs its forward
    again, for 1 more. (Where nothing upstream is trained, the first trained layers need no gradient of their input;
    like the paper this counts it.)
    """
    factor = 2.0 if trained else 1.0 if trained_before else 0.0
    return factor + 1.0 if recompute and factor else factor


def step_seconds(
    forward: Sequence[float], *, trained: bool, trained_before: bool, recompute: bool = False
) -> list[float]:
    """Forward and backward of each layer of a module, from the seconds of its forward."""
    factor = backward_factor(trained=trained, trained_before=trained_before, recompute=recompute)
    return [seconds * (1.0 + factor) for seconds in forward]


def cut(seconds: Sequence[float], stages: int, *, chunks: int = 1) -> tuple[range, ...]:
    """The layers of each of `stages · chunks` stages; of cuts with the same longest stage the most even one.

    With interleaving every chunk is a stage: stage k is on submesh k mod `stages`, and the longest chunk sets the pace.
    By dynamic programming over the number of stages and the last layer. Even: the sum of squares is least.

    Raises:
      ValueError: there are fewer layers than stages, none of either, or a layer takes less than 0 seconds.
    """
    pieces, layers = stages * chunks, len(seconds)
    if not 1 <= pieces <= layers:
        raise ValueError(f"{layers} layers in {stages} · {chunks} stages: a stage needs a layer")
    if not all(math.isfinite(one) and one >= 0 for one in seconds):
        raise ValueError("a layer takes 0 seconds or more")
    sums = np.concatenate(([0.0], np.cumsum(seconds)))
    # piece_KE[k, e]: seconds of layers k to e - 1; no piece is empty.
    piece_KE = np.where(np.triu(np.ones((layers + 1, layers + 1), bool), 1), sums[None, :] - sums[:, None], np.inf)
    longest, _ = _best(piece_KE, pieces, np.maximum)
    allowed = np.where(piece_KE <= longest * (1 + SLACK), piece_KE**2, np.inf)
    _, ends = _best(allowed, pieces, np.add)
    return tuple(range(first, end) for first, end in zip([0, *ends], ends, strict=False))


def longest_stage(seconds: Sequence[float], stages: Sequence[range]) -> float:
    """Seconds of the longest of `stages`."""
    return max(math.fsum(seconds[layer] for layer in stage) for stage in stages)


def share_stages(modules: Mapping[str, Sequence[float]], stages: int) -> dict[str, int]:
    """How many of `stages` each module gets, so that the longest stage of all is as short as possible.

    modules: seconds of each layer by name; every stage has layers of one module. A stage goes to the module that has
    the longest one, until there are no more; a module with one layer a stage takes no more. That is optimal: with
    fewer stages for a module that had the longest one, it would be longer still.

    Raises:
      ValueError: there are fewer stages than modules, or more than layers.
    """
    most = sum(map(len, modules.values()))
    if not len(modules) <= stages <= most:
        raise ValueError(
            f"{stages} stages for {len(modules)} modules with {most} layers: give {len(modules)} to {most}"
        )
    count = dict.fromkeys(modules, 1)
    longest = {name: math.fsum(seconds) for name, seconds in modules.items()}
    for _ in range(stages - len(modules)):
        name = max((one for one in modules if count[one] < len(modules[one])), key=longest.__getitem__)
        count[name] += 1
        longest[name] = longest_stage(modules[name], cut(modules[name], count[name]))
    return count


def _best(piece_KE: np.ndarray, pieces: int, joined: np.ufunc) -> tuple[float, list[int]]:
    """The least cost of `pieces` pieces, whose costs `joined` combines, and where each of them ends."""
    layers = len(piece_KE) - 1
    cost = piece_KE[0]
    firsts = []
    for _ in range(pieces - 1):
        total_KE = joined(cost[:, None], piece_KE)
        first = total_KE.argmin(axis=0)
        firsts.append(first)
        cost = total_KE[first, np.arange(layers + 1)]
    ends = [layers]
    for first in reversed(firsts):
        ends.append(int(first[ends[-1]]))
    return float(cost[layers]), ends[::-1]
