"""Seconds and bytes of parameters that are gathered, and gradients that are scattered, layer by layer."""

from __future__ import annotations

from mmjax.mesh.layout import Layout
from mmjax.pipeline.state_bytes import StateBytes
from mmjax.planner.clock import Clock, PassSeconds, group_gather


def beside_layers(
    compute: PassSeconds, states: StateBytes[float], layout: Layout, clock: Clock, *, ratio: float, first: int
) -> PassSeconds:
    """Seconds of a stage whose layers are gathered and scattered beside each other's products.

    Each pass takes as long as its products or its collectives, whichever is longer. A backward gathers again.

    Args:
      compute: seconds of the stage's products.
      states: bytes of its states on a device.
      layout: its module's layout.
      clock: the times of its devices.
      ratio: bytes of a gradient that is scattered, over those of a gradient in the sums.
      first: number of the stage's first device, from 0, where a node starts.
    """
    if not layout.scatters_gradients:
        return compute
    shards = layout.optimizer_shards
    apart = layout.replica_size * layout.dp // shards // layout.optimizer_instances

    def seconds(size: float) -> float:
        return group_gather(clock, size * shards, ranks=shards, apart=apart, first=first)

    gather = seconds(states.parameters) if layout.gathers_layers else 0.0
    scatter = seconds(states.sums * ratio)
    backward = max(compute.backward, gather + scatter) if compute.backward else 0.0
    return PassSeconds(forward=max(compute.forward, gather), backward=backward)


def layers_in_transfer(layout: Layout) -> int:
    """The number of layers' parameters that a program holds for a time beside its other arrays: a gathered layer in
    forward, in backward also a layer's gradients before they are scattered.
    """
    return layout.gathers_layers + layout.scatters_gradients
