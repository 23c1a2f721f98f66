"""Idle seconds of every rank of an even pipeline, in closed form.

The pipeline has `depth` stage submeshes with a rank each. For every rank and microbatch, F takes `forward` seconds and
B (with W, if split) `backward`; moves take no time unless an argument names it. A step takes
`microbatches · (forward + backward)` plus the idle seconds. `simulate` gives the same; where costs differ, use it.
"""

from __future__ import annotations


def idle_1f1b(depth: int, *, forward: float, backward: float) -> float:
    """GPipe and 1F1B: each rank waits for `depth - 1` forwards and backwards of others, before or after its own."""
    return (depth - 1) * (forward + backward)


def idle_eager(depth: int, *, forward: float, backward: float, move: float = 0.0) -> float:
    """Eager 1F1B: asynchronous moves of up to half a forward and backward count once a hop, not once a microbatch.

    A move takes `move` seconds in each direction; `move ≤ (forward + backward) / 2` and `forward ≤ backward`.
    """
    return (depth - 1) * (forward + backward + 2 * move)


def idle_interleaved(depth: int, microbatches: int, *, chunks: int, forward: float, backward: float) -> float:
    """Interleaved 1F1B: the idle seconds of 1F1B divided by the number of chunks, for any number of microbatches.

    forward, backward: of all chunks of a rank together. With fewer microbatches than submeshes a rank also waits, in
    every round but the first, until the first microbatch comes back to it.
    """
    rounds = (chunks - 1) * max(0, depth - microbatches)
    return (depth - 1 + rounds) * (forward + backward) / chunks


def idle_zb_h1(depth: int, microbatches: int, *, forward: float, backward: float, weight: float) -> float:
    """ZB-H1; B takes `backward` and W `weight` seconds, B no less than W.

    `(depth - 1) · (forward + backward - weight)` where W is no longer than F (a longer one fills no more than a
    forward's hole); with fewer microbatches than stages there are too few W to fill all holes.
    """
    holes = (depth - 1) * (backward + max(0.0, forward - weight))
    return holes + max(0, depth - microbatches) * min(forward, weight)


def idle_three_phase(depth: int, microbatches: int, *, window: int = 0, forward: float, backward: float) -> float:
    """Three phases, with encoders on all ranks of the LLM: the idle seconds of 1F1B in each window.

    Encoders leave no rank idle.

    forward, backward: of an LLM stage.
    """
    windows = -(-microbatches // (window or microbatches))
    return windows * idle_1f1b(depth, forward=forward, backward=backward)


def idle_encoders_first(
    depth: int, microbatches: int, *, forward: float, backward: float, encoder_forward: float, encoder_backward: float
) -> float:
    """All encoders first, with the encoder on ranks of its own: the LLM's ranks wait while it runs all its F and B."""
    encoder = microbatches * (encoder_forward + encoder_backward)
    return idle_1f1b(depth, forward=forward, backward=backward) + encoder
