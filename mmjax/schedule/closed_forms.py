"""Idle seconds of every rank of an even pipeline, in closed form.

The pipeline has `depth` stage submeshes with a rank each. For every rank and microbatch, F takes `forward` seconds and
B `backward`; moves take no time unless an argument names it. A step takes `microbatches · (forward + backward)` plus
the idle seconds. `simulate` gives the same; where costs differ, use it.
"""

from __future__ import annotations


def idle_1f1b(depth: int, *, forward: float, backward: float) -> float:
    """Idle seconds of each of `depth` ranks in a step of GPipe or 1F1B.

    `forward` and `backward` are a microbatch's seconds on a rank. A rank waits for `depth - 1` of both on other ranks,
    before or after its own.
    """
    return (depth - 1) * (forward + backward)


def idle_eager(depth: int, *, forward: float, backward: float, move: float = 0.0) -> float:
    """Idle seconds of each of `depth` ranks in a step of eager 1F1B: moves count once a hop, not once a microbatch.

    `forward` and `backward` are a microbatch's seconds on a rank. An asynchronous move takes `move` seconds in each
    direction. The form is right for `move ≤ (forward + backward) / 2` and `forward ≤ backward`.
    """
    return (depth - 1) * (forward + backward + 2 * move)


def idle_interleaved(depth: int, microbatches: int, *, chunks: int, forward: float, backward: float) -> float:
    """Idle seconds of each of `depth` ranks in a step of interleaved 1F1B: those of 1F1B divided by `chunks`.

    forward, backward: a microbatch's seconds on a rank, of all chunks of a rank together. With fewer microbatches than
    submeshes a rank also waits, in every round but the first, until the first microbatch comes back to it.
    """
    rounds = (chunks - 1) * max(0, depth - microbatches)
    return (depth - 1 + rounds) * (forward + backward) / chunks


def idle_zb_h1(depth: int, microbatches: int, *, forward: float, backward: float, weight: float) -> float:
    """Idle seconds of each of `depth` ranks in a step of ZB-H1, where F takes `forward` seconds a microbatch.

    B, the gradients of inputs, takes `backward` and W, those of weights, `weight` seconds a microbatch. B must take
    no less than W. The result is `(depth - 1) · (forward + backward - weight)` where W is no longer than F (a longer
    one fills no more than a forward's hole); with fewer microbatches than stages there are too few W to fill all holes.
    """
    holes = (depth - 1) * (backward + max(0.0, forward - weight))
    return holes + max(0, depth - microbatches) * min(forward, weight)


def idle_three_phase(depth: int, microbatches: int, *, window: int = 0, forward: float, backward: float) -> float:
    """Idle seconds of each of `depth` ranks in a step of three phases, with encoders on all ranks of the LLM.

    They are the idle seconds of 1F1B in each window of `window` microbatches (0: all). Encoders leave no rank idle.

    forward, backward: a microbatch's seconds in an LLM stage.
    """
    windows = -(-microbatches // (window or microbatches))
    return windows * idle_1f1b(depth, forward=forward, backward=backward)


def idle_encoders_first(
    depth: int, microbatches: int, *, forward: float, backward: float, encoder_forward: float, encoder_backward: float
) -> float:
    """Idle seconds of each of the LLM's `depth` ranks in a step of encoders first, with the encoder on other ranks.

    The LLM's ranks wait while the encoder runs all its F and B, each in `encoder_forward` and `encoder_backward`
    seconds a microbatch. forward, backward: a microbatch's seconds in an LLM stage.
    """
    encoder = microbatches * (encoder_forward + encoder_backward)
    return idle_1f1b(depth, forward=forward, backward=backward) + encoder
