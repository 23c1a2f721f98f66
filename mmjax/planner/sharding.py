"""Seconds and bytes of states that ranks share: gathers and reductions, layer by layer or once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.mesh.layout import Layout
from mmjax.pipeline.state_bytes import StateBytes
from mmjax.planner.clock import Clock, PassSeconds, group_gather
from mmjax.planner.work import ModuleWork, StagePart, Work


@dataclass(frozen=True, kw_only=True)
class SharedStates:
    """States of a stage that the ranks of a group share.

    Attributes:
      states: their bytes on a device.
      ranks: number of ranks of the group.
      apart: distance of each rank's number to the next one's.
      uses: how often a parameter is used in a microbatch, and so gathered where it is a shard.
    """

    states: StateBytes[float]
    ranks: int
    apart: int
    uses: int = 1

    def gather(self, clock: Clock, shard: float, *, first: int) -> float:
        """Seconds of a gather of arrays; each rank has `shard` bytes of them; `first` as for `group_gather`."""
        return group_gather(clock, shard * self.ranks, ranks=self.ranks, apart=self.apart, first=first)


def shared_states(work: Work, name: str, part: StagePart, layout: Layout) -> tuple[SharedStates, ...]:
    """The states of a part of module `name`; those of experts are a second group if ranks of ep have different ones.

    work: such as `read_work(recipe)`. layout: the module's, with all lanes as one (`Layout.across_lanes`).
    """
    module, shards = work.modules[name], layout.optimizer_shards
    apart = layout.replica_size * layout.dp // shards // layout.optimizer_instances
    dense, *experts = work.states_by_group(name, part, layout)
    groups = [SharedStates(states=dense, ranks=shards, apart=apart)]
    for states in experts:
        uses = module.experts.uses(layout) if module.experts else 1
        groups.append(SharedStates(states=states, ranks=shards // layout.ep, apart=apart * layout.ep, uses=uses))
    return tuple(groups)


def once_a_step(groups: Sequence[SharedStates], layout: Layout, clock: Clock, *, first: int) -> tuple[float, float]:
    """Seconds of gathering parameters and of reducing gradients once a step.

    With optimizer instances, gradients are reduced within each instance, and then their shards between instances.

    Args:
      groups: the states, as `shared_states` gives them.
      layout: the module's layout, with all lanes as one.
      clock: the times of its devices.
      first: number of the stage's first device, from 0, where a node starts.
    """
    gather = reduce = 0.0
    instances = layout.optimizer_instances
    for group in groups:
        sums = group.states.sums
        if not layout.shards_parameters:
            gather += group_gather(clock, group.states.copies, ranks=group.ranks, apart=group.apart, first=first)
        if not layout.scatters_gradients:
            reduce += group_gather(clock, sums, ranks=group.ranks, apart=group.apart, first=first)
        shard = sums if layout.scatters_gradients else sums / group.ranks
        between = group.apart * group.ranks
        reduce += 2 * group_gather(clock, shard, ranks=instances, apart=between, first=first)
    return gather, reduce


def beside_backward(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a reduction that a stage's last backward does not hide, where that reduces layer by layer.

    The gradients of a layer are reduced beside the backward of the layer before; nothing hides those of the first.

    Args:
      reduce: seconds of the reduction.
      backward: seconds of that backward, or of the W of a split one.
      layers: number of the stage's layers.
    """
    return reduce / layers + max(0.0, reduce - backward) * (1 - 1 / layers)


def beside_layers(
    compute: PassSeconds,
    groups: Sequence[SharedStates],
    layout: Layout,
    clock: Clock,
    *,
    layers: int,
    ratio: float,
    first: int,
) -> PassSeconds:
    """Seconds of a stage whose layers are gathered and scattered beside each other's products.

    A pass takes as long as its products or its collectives, whichever is longer, and as those of a layer that nothing
    hides: the first gather, and in a backward the last scatter. A backward gathers again.

    Args:
      compute: seconds of the stage's products.
      groups: the stage's states, as `shared_states` gives them.
      layout: its module's layout.
      clock: the times of its devices.
      layers: number of its layers.
      ratio: bytes of a gradient that is scattered, over those of a gradient in the sums.
      first: number of the stage's first device, from 0, where a node starts.
    """
    if not layout.scatters_gradients:
        return compute

    def seconds(size: float, group: SharedStates) -> float:
        return group.uses * group.gather(clock, size, first=first)

    gather = sum(seconds(group.states.parameters, group) for group in groups) if layout.gathers_layers else 0.0
    scatter = sum(seconds(group.states.sums * ratio, group) for group in groups)
    backward = max(compute.backward, gather + scatter) + (gather + scatter) / layers if compute.backward else 0.0
    return PassSeconds(forward=max(compute.forward, gather) + gather / layers, backward=backward)


def transferred_bytes(module: ModuleWork, layout: Layout, item: int) -> float:
    """Bytes of a layer's parameters that a program holds for a time beside its other arrays.

    They are those of a gathered layer in forward, in backward also a layer's gradients before they are scattered.
    Experts are not among them where no ranks share them.

    Args:
      module: the work of the module, such as `read_work(recipe).modules["llm"]`.
      layout: its layout.
      item: bytes of a number in the computation.
    """
    times = layout.gathers_layers + layout.scatters_gradients
    parameters = module.dense.parameters.layer
    if module.experts and layout.optimizer_shards > layout.ep:
        parameters += module.experts.parameters / layout.ep
    return times * parameters / layout.tp * item
