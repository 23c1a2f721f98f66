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
from mmjax.schedule.orders import backward_ops, peak, turns
from mmjax.schedule.simulate import Costs
from mmjax.schedule.validate import ScheduleError

Turn = tuple[int, int]
"""(chunk, microbatch)."""


def interleaved(graph: StageGraph, microbatches: int, costs: Costs) -> Schedule:
    """Interleaved 1F1B. A module whose stages share no ranks runs plain 1F1B.

    Any number of microbatches works. With fewer microbatches than submeshes, a submesh waits in every round until the
    first microbatch comes back to it. Raises ScheduleError where chunked modules feed each other in a circle.
    """
    orders: dict[str, list[Op]] = {}
    leads: dict[str, int] = {}  # by stage, how far its F are ahead of its B at most
    in_flight: dict[str, int] = {}
    chunked = {node.name: module for module in chunked_modules(graph) for node in module.stages}
    for node in reversed(graph.topological):
        if node.name in leads:
            continue
        if node.name not in chunked:
            leads[node.name] = in_flight[node.name] = demand(graph, leads, node.name)
            orders[node.name] = turns(node, microbatches, leads[node.name])
            continue
        module = chunked[node.name]
        _check_behind(graph, module, leads)
        made = _orders(graph, module, microbatches, leads)
        orders |= {f"{module.stages[d].name} and its ranks' other chunks": order for d, order in enumerate(made)}
        for stage in reversed(module.stages):
            order = next(order for order in made if order[0].stage in module.sharing(stage))
            ahead = demand(graph, leads, stage.name)
            leads[stage.name] = max(ahead, peak(order, stage)) if stage.backward else ahead
            # Without backward a stage is held back by its consumers, which take a whole group at a time.
            in_flight[stage.name] = peak(order, stage) if stage.backward else ahead + max(module.groups(microbatches))
    result = list_schedule(graph, microbatches, costs, orders=orders, in_flight=in_flight, name="interleaved")
    return result.schedule


def demand(graph: StageGraph, leads: Mapping[str, int], stage: str) -> int:
    """How many F of `stage` come before its first B so that the stages behind it can keep their leads; 1 at a sink."""
    return max((leads[edge.dst] + graph.hop(edge) for edge in graph.out_edges(stage) if edge.dst in leads), default=1)


@dataclass(frozen=True, kw_only=True)
class ChunkedModule:
    """A module whose stage k is on submesh k mod `depth`."""

    stages: tuple[StageNode, ...]
    depth: int

    def sharing(self, stage: StageNode) -> tuple[str, ...]:
        """Names of the stages on the submesh of `stage`, itself included, in their order."""
        place = self.stages.index(stage) % self.depth
        return tuple(node.name for node in self.stages[place :: self.depth])

    def groups(self, microbatches: int) -> tuple[int, ...]:
        """Sizes of the groups that go through one chunk after another: as even as can be and no smaller than `depth`.

        One group where there are fewer microbatches than submeshes.
        """
        count = max(1, microbatches // self.depth)
        return tuple(microbatches // count + (i < microbatches % count) for i in range(count))

    def turns(self, microbatches: int, *, backward: bool) -> list[Turn]:
        """The order in which every submesh takes chunks and microbatches."""
        chunks = range(-(-len(self.stages) // self.depth))
        result, first = [], 0
        for size in self.groups(microbatches):
            span = range(first, first + size)
            result += [(chunk, m) for chunk in (reversed(chunks) if backward else chunks) for m in span]
            first += size
        return result


def chunked_modules(graph: StageGraph) -> tuple[ChunkedModule, ...]:
    """The modules with more stages than submeshes, where stages go round the submeshes in order."""
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
    own = {node.name for node in module.stages}
    for name in own:
        for edge in graph.out_edges(name):
            if edge.dst not in own and edge.dst not in leads:
                raise ScheduleError(
                    f"interleaved: {name!r} feeds {edge.dst!r}, which leads back to its module: use 1f1b"
                )


def _orders(graph: StageGraph, module: ChunkedModule, microbatches: int, leads: Mapping[str, int]) -> list[list[Op]]:
    """The order of F, B and W of its chunks, for each submesh."""
    forward = module.turns(microbatches, backward=False)
    backward = module.turns(microbatches, backward=True)
    warmup, result = 0, []
    for place in reversed(range(module.depth)):
        chunks = module.stages[place :: module.depth]
        ahead = {c: demand(graph, leads, node.name) for c, node in enumerate(chunks) if node.backward}
        # A submesh further up has two more turns to wait for, there and back.
        warmup = max(warmup + 2 * bool(result), _needed(forward, backward, ahead))
        result.append(_order(chunks, forward, backward, warmup))
    return result[::-1]


def _needed(forward: Sequence[Turn], backward: Sequence[Turn], ahead: Mapping[int, int]) -> int:
    """Turns that a submesh's forward must lead its backward by so that every chunk leads its own B by `ahead`."""
    place = {turn: i for i, turn in enumerate(forward)}
    last = max(m for _, m in forward)
    later = ((i, c, min(m + ahead[c] - 1, last)) for i, (c, m) in enumerate(backward) if c in ahead)
    return max((place[c, m] - i for i, c, m in later), default=0)


def _order(chunks: Sequence[StageNode], forward: Sequence[Turn], backward: Sequence[Turn], warmup: int) -> list[Op]:
    """`warmup` forwards, then forward and backward in turn, then what is left.

    A chunk that is not there, or has no backward, passes its turn: all submeshes of a module stay in step.
    """
    forwards = [[Op("F", chunks[c].name, m)] if c < len(chunks) else [] for c, m in forward]
    backwards = [backward_ops(chunks[c], m) if c < len(chunks) else [] for c, m in backward]
    order = forwards[:warmup]
    for i, ops in enumerate(backwards):
        order += [*forwards[warmup + i : warmup + i + 1], ops]
    return [op for ops in order for op in ops]
