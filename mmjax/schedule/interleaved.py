"""Interleaved 1F1B on a stage graph: several stages of a module, its chunks, take turns on one submesh.

The order follows Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
§2.2. Microbatches form groups, and a group goes through one chunk after another. The warm-up is as long as the last
rank needs to run its first backward right after its first forward through the last chunk. Two things differ here.

* If the pipeline's depth does not divide the microbatches, groups are larger than the depth, never smaller. A smaller
  group would come round before the last submesh has finished it, and all submeshes would wait.
* The warm-up depends on the stages behind the module, as in `one_f_one_b`. So encoders and generators may stand before
  and behind the module, and may be interleaved too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmjax.schedule.graph import StageGraph, StageNode
from mmjax.schedule.list_scheduler import list_schedule
from mmjax.schedule.ops import Op, Schedule
from mmjax.schedule.orders import backward_ops, one_f_one_b_order, peak_in_flight
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import ScheduleError

Turn = tuple[int, int]
"""(chunk, microbatch)."""


def interleaved(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """The ops of a step, in order, of interleaved 1F1B. A module whose stages share no ranks runs plain 1F1B.

    Any number of microbatches works. With fewer microbatches than submeshes, a submesh waits in every round until the
    first microbatch comes back to it. Raises ScheduleError where chunked modules feed each other in a circle.

    Args:
      graph: the stages and edges, such as `apart([vision], llm, {"vision": 1, "llm": 2}, chunks=2).graph`.
      microbatches: microbatches of a step.
      costs: seconds of each op, such as `Costs.nominal(graph)`; they decide how the orders of the stages merge.
    """
    orders: dict[str, list[Op]] = {}
    leads: dict[str, int] = {}  # by stage, the most F that are ahead of its B
    in_flight: dict[str, int] = {}
    chunked = {node.name: module for module in chunked_modules(graph) for node in module.stages}
    for node in reversed(graph.topological):
        if node.name in leads:
            continue
        if node.name not in chunked:
            leads[node.name] = in_flight[node.name] = demand(graph, leads, node.name)
            orders[node.name] = one_f_one_b_order(node, microbatches, leads[node.name])
            continue
        module = chunked[node.name]
        _check_behind(graph, module, leads)
        by_submesh = _orders(graph, module, microbatches, leads)
        orders |= {f"{module.stages[d].name} and its ranks' other chunks": order for d, order in enumerate(by_submesh)}
        for stage in reversed(module.stages):
            order = next(order for order in by_submesh if order[0].stage in module.sharing(stage))
            ahead, most = demand(graph, leads, stage.name), peak_in_flight(order, stage)
            leads[stage.name] = max(ahead, most) if stage.backward else ahead
            # A stage without backward waits for its consumers, which take a whole group at a time.
            in_flight[stage.name] = most if stage.backward else ahead + max(module.groups(microbatches))
    result = list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="interleaved")
    return result.schedule


def demand(graph: StageGraph, leads: Mapping[str, int], stage: str) -> int:
    """The number of F of `stage` before its first B with which the stages that it feeds directly keep their leads.

    It is the largest sum of such a stage's lead and the edge's `StageGraph.hop`, 0 or 1; it is 1 if none of them is in
    `leads`, as for a sink.

    Args:
      graph: the stages and edges, such as the `graph` of a `Placement` or of a schedule.
      leads: by stage name, the most F that are ahead of its B: {"llm.1": 1}.
      stage: a stage's name, such as "llm.0".
    """
    return max((leads[edge.dst] + graph.hop(edge) for edge in graph.out_edges(stage) if edge.dst in leads), default=1)


@dataclass(frozen=True, kw_only=True)
class ChunkedModule:
    """A module whose stage k is on submesh k mod `depth`."""

    stages: tuple[StageNode, ...]
    depth: int

    def sharing(self, stage: StageNode) -> tuple[str, ...]:
        """Names of the stages on the submesh of `stage`, itself included, in their order."""
        submesh = self.stages.index(stage) % self.depth
        return tuple(node.name for node in self.stages[submesh :: self.depth])

    def groups(self, microbatches: int) -> tuple[int, ...]:
        """Sizes of the groups that go through one chunk after another: as even as can be and no smaller than `depth`.

        One group where there are fewer microbatches than submeshes.
        """
        count = max(1, microbatches // self.depth)
        return tuple(microbatches // count + (i < microbatches % count) for i in range(count))

    def turns(self, microbatches: int, *, backward: bool) -> list[Turn]:
        """(chunk, microbatch) in the order in which every submesh runs their forwards, or backwards."""
        chunks = range(-(-len(self.stages) // self.depth))
        result, first = [], 0
        for size in self.groups(microbatches):
            span = range(first, first + size)
            result += [(chunk, m) for chunk in (reversed(chunks) if backward else chunks) for m in span]
            first += size
        return result


def chunked_modules(graph: StageGraph) -> tuple[ChunkedModule, ...]:
    """The modules with more stages than submeshes, if their stages go round the submeshes in order.

    Each has its `stages` in order and as `depth` the number of submeshes; () where there is none.

    graph: the stages and edges, such as the `graph` of a `Placement` or of a schedule.
    """
    result = []
    for module in graph.modules:
        stages = [node for node in graph.topological if node.module == module]
        submeshes = list(dict.fromkeys(frozenset(node.ranks) for node in stages))
        depth = len(submeshes)
        round_robin = all(frozenset(node.ranks) == submeshes[k % depth] for k, node in enumerate(stages))
        if depth < len(stages) and round_robin:
            result.append(ChunkedModule(stages=tuple(stages), depth=depth))
    return tuple(result)


def _check_behind(graph: StageGraph, module: ChunkedModule, leads: Mapping[str, int]) -> None:
    names = {node.name for node in module.stages}
    for name in names:
        for edge in graph.out_edges(name):
            if edge.dst not in names and edge.dst not in leads:
                raise ScheduleError(
                    f"interleaved: {name!r} feeds {edge.dst!r}, which leads back to its module: use 1f1b"
                )


def _orders(graph: StageGraph, module: ChunkedModule, microbatches: int, leads: Mapping[str, int]) -> list[list[Op]]:
    """For each submesh of `module`, the order of F, B and W of its chunks."""
    forward = module.turns(microbatches, backward=False)
    backward = module.turns(microbatches, backward=True)
    warmup, result = 0, []
    for submesh in reversed(range(module.depth)):
        chunks = module.stages[submesh :: module.depth]
        ahead = {c: demand(graph, leads, node.name) for c, node in enumerate(chunks) if node.backward}
        # A submesh further up waits for two more turns: one hop forward, one hop back.
        warmup = max(warmup + 2 * bool(result), _least_warmup(forward, backward, ahead))
        result.append(_order(chunks, forward, backward, warmup))
    return result[::-1]


def _least_warmup(forward: Sequence[Turn], backward: Sequence[Turn], ahead: Mapping[int, int]) -> int:
    """The fewest turns of forward before the first backward so that each chunk's F lead its B by `ahead` of it."""
    place = {turn: i for i, turn in enumerate(forward)}
    last = max(m for _, m in forward)
    due = ((i, c, min(m + ahead[c] - 1, last)) for i, (c, m) in enumerate(backward) if c in ahead)
    return max((place[c, m] - i for i, c, m in due), default=0)


def _order(chunks: Sequence[StageNode], forward: Sequence[Turn], backward: Sequence[Turn], warmup: int) -> list[Op]:
    """The ops of one submesh: `warmup` forwards, then forward and backward in turn, then the remaining backwards.

    A chunk that the submesh lacks, or that has no backward, passes its turn: all submeshes of a module stay in step.
    """
    forwards = [[Op("F", chunks[c].name, m)] if c < len(chunks) else [] for c, m in forward]
    backwards = [backward_ops(chunks[c], m) if c < len(chunks) else [] for c, m in backward]
    order = forwards[:warmup]
    for i, ops in enumerate(backwards):
        order += [*forwards[warmup + i : warmup + i + 1], ops]
    return [op for ops in order for op in ops]
