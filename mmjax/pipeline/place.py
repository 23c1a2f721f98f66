"""Places a model on a world: stages on submeshes, boundaries on edges, and the stage graph for schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from mmjax.attention.reach import DISTANCES
from mmjax.attention.row_runs import ANY_RUNS, MAX_RUNS
from mmjax.data.send_lists import SEND
from mmjax.data.together import MICROBATCHES
from mmjax.mesh.boundary import Boundary, boundary_kind
from mmjax.mesh.layout import Layout, cell_count
from mmjax.mesh.movers import mover_of
from mmjax.mesh.routing import INSIDE_MODULE, LISTED_TOKENS, WHOLE_ROWS
from mmjax.mesh.shared_out import SharedOut
from mmjax.mesh.spmd import Program
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World
from mmjax.models.graph import MultimodalModel
from mmjax.models.stage_model import StageModel
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.config import OFFLOAD_KINDS, OffloadConfig
from mmjax.pipeline.lane_gathers import LaneGather
from mmjax.pipeline.offload import require_host_memory
from mmjax.pipeline.split import SplitFunctions
from mmjax.pipeline.stage import StageFunctions
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.ties import Tie
from mmjax.pipeline.world_gather import WorldGather
from mmjax.schedule.graph import (
    EdgeKind,
    EdgeNode,
    GatherKind,
    StageGraph,
    StageNode,
    connected,
    edge_name,
    lane_name,
)
from mmjax.schedule.simulate import Costs

NO_OFFLOAD = OffloadConfig()
InputShapes = Mapping[str, Mapping[str, Any]]
"""By module and input name: arrays or ``ShapeDtypeStruct`` of one microbatch's global rows.

Shapes for which programs are traced may have values under ``row_runs.MAX_RUNS`` and ``reach.DISTANCES``, for which
attention is compiled, and under ``together.MICROBATCHES`` the microbatches whose rows these are.
"""


@dataclass(frozen=True)
class Settings:
    """Settings of a training run that the pipeline reads.

    Attributes:
      optimizers: optimizer configuration by module.
      total_steps: length of the learning rate schedules.
      dtype: compute dtype, ``float32`` or ``bfloat16``.
      clip_norm: largest global gradient norm, 0 for none.
      transport, route: see ``Boundary``.
      offloads: offload configuration by module; of modules without one nothing is offloaded.
      microbatches: microbatches that an op takes together, by module; one of modules that are missing.
      overlap_grad_reduce: whether a step's last backward of a stage reduces its gradients, where it can.
    """

    optimizers: Mapping[str, OptimizerConfig]
    total_steps: int
    dtype: str = "float32"
    clip_norm: float = 0.0
    transport: str = "auto"
    route: str = "leader"
    offloads: Mapping[str, OffloadConfig] = field(default_factory=dict)
    microbatches: Mapping[str, int] = field(default_factory=dict)
    overlap_grad_reduce: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage on its devices, or on one lane of them."""

    model: StageModel
    submesh: Submesh
    state: StageState

    @property
    def name(self) -> str:
        """Its name, such as ``llm.0``."""
        return self.model.name

    def has_whole_rows(self, name: str, *, whole_rows: bool = False) -> bool:
        """Whether every rank of cp has whole rows of a host input: if ``whole_rows``, or if ``name`` is a send list."""
        return whole_rows or name == self.model.send_list

    def input_sharding(self, name: str, *, whole_rows: bool = False) -> NamedSharding:
        """The sharding of the host input ``name``: rows over dp, and tokens over cp unless ``has_whole_rows``."""
        spread, is_whole = self.submesh.spread, self.has_whole_rows(name, whole_rows=whole_rows)
        return self.submesh.sharding(spread.whole_rows if is_whole else spread.tokens)


@dataclass(frozen=True)
class TracedStages:
    """Stage functions and boundaries for one combination of buckets.

    Attributes:
      stages: functions by place (see ``PlacedModel.places``).
      boundaries: boundaries by the name of an edge between two places.
    """

    stages: Mapping[str, StageFunctions]
    boundaries: Mapping[str, Boundary | SharedOut]


class PlacedModel:
    """A model on a world.

    Attributes:
      stages: stages by name, sources before users; a stage with lanes spans all of them here, with its states.
      places: the places that run ops of a microbatch: stages by name, and in place of a stage with lanes each lane; the
        first lane has the stage's name (see ``StageNode.lane_name``).
      graph: graph of the stages, for schedules.
      cells: number of cells of a microbatch.
    """

    def __init__(self, model: MultimodalModel, layouts: Mapping[str, Layout], world: World, settings: Settings):
        """Places every stage; nothing is traced or allocated yet.

        Args:
          model: the modules.
          layouts: layouts by module.
          world: the devices.
          settings: settings of the run.

        Raises:
          ConfigError: offloading is on and the devices have no pinned host memory.
        """
        self.model, self.world, self.settings = model, world, settings
        self.layouts = dict(layouts)
        self.cells = cell_count(self.layouts.values())
        dtype = jnp.dtype(settings.dtype)
        self.stages: dict[str, Stage] = {}
        self.places: dict[str, Stage] = {}

        def placed(stage: StageModel, layout: Layout) -> Stage:
            submesh = world.submesh(layout, stage.index)
            state = StageState(
                stage,
                submesh,
                optimizers=settings.optimizers,
                modules=model.modules,
                total_steps=settings.total_steps,
                dtype=dtype,
                clip_norm=settings.clip_norm,
                overlap_grad_reduce=settings.overlap_grad_reduce and self.layouts[stage.module].lanes == 1,
            )
            return Stage(stage, submesh, state)

        for stage in model.stages(self.layouts):
            layout = self.layouts[stage.module]
            spanning = self.stages[stage.name] = placed(stage, layout.across_lanes)
            lanes = [placed(stage, layout.lane(k)) for k in range(layout.lanes)] if layout.lanes > 1 else [spanning]
            self.places |= {lane_name(stage.name, k): lane for k, lane in enumerate(lanes)}
        self._require_host_memory()
        self.graph = self._graph()
        self._functions: dict[Any, StageFunctions] = {}
        self._boundaries: dict[Any, Boundary] = {}
        self._shares: dict[tuple[Boundary, int], SharedOut] = {}

    def offload(self, stage: str) -> OffloadConfig:
        """Offload configuration of the module of a stage such as "llm.0"; without one, nothing is offloaded."""
        return self.settings.offloads.get(self.stages[stage].model.module, NO_OFFLOAD)

    def _require_host_memory(self) -> None:
        for module, offload in self.settings.offloads.items():
            for name in (name for name in OFFLOAD_KINDS if getattr(offload, name)):
                require_host_memory(f"{module}/Offload.{name}", self.world.devices)

    @property
    def offloads(self) -> bool:
        """Whether any arrays are offloaded during a step."""
        return any(offload != NO_OFFLOAD for offload in self.settings.offloads.values())

    @property
    def straight_line(self) -> bool:
        """Whether every stage lives on the same devices, so that a step can be one program."""
        return len({place.submesh.ranks for place in self.places.values()}) == 1

    def local_places(self, stage: str) -> dict[str, Stage]:
        """The lanes of a stage on this process's devices, by place; without lanes, the stage itself if it is there."""
        return self._local_places[stage]

    @cached_property
    def _local_places(self) -> dict[str, dict[str, Stage]]:
        return {
            node.name: {name: self.places[name] for name in node.lane_names if self.places[name].submesh.local}
            for node in self.graph.stages
        }

    @cached_property
    def local_stages(self) -> dict[str, Stage]:
        """The stages on this process's devices, by name."""
        return {name: stage for name, stage in self.stages.items() if stage.submesh.local}

    def world_gather(self, name: str, place: str, aval: jax.ShapeDtypeStruct, count: int) -> WorldGather | None:
        """The program that copies ``count`` arrays of a place to every process; ``None`` in a run of one process.

        ``name`` is the program's; ``aval`` is one array, with rows over dp.
        """
        if self.world.processes == 1:
            return None
        return WorldGather(name, self.world, self.places[place].submesh, aval, count)

    def _graph(self) -> StageGraph:
        nodes = [
            StageNode(
                name=name,
                module=stage.model.module,
                index=stage.model.index,
                ranks=stage.submesh.ranks,
                trainable=bool(stage.state.trainable),
                loss=bool(stage.model.losses),
                offload=self.offload(name).parameters,
                stash=self.offload(name).activations,
                lanes=self.layouts[stage.model.module].lanes,
                microbatches=self.settings.microbatches.get(stage.model.module, 1),
                gather=self._gather_kind(stage),
            )
            for name, stage in self.stages.items()
        ]
        pairs = [(source, name) for name, stage in self.stages.items() for source in stage.model.sources]
        return connected(nodes, pairs, lambda src, dst: self._kind(src.name, dst.name), self._tie_nodes())

    def _gather_kind(self, stage: Stage) -> GatherKind:
        """How lanes gather the stage's parameters: as activations move, without waiting for each other or together."""
        if not stage.submesh.layout.pulls:
            return ""
        mover = mover_of(self.settings.transport, stage.submesh, stage.submesh)
        return "pull" if mover.kind == "async" else "collective"

    @cached_property
    def lane_gathers(self) -> dict[str, LaneGather]:
        """The gathers of the stages whose parameters are shards over lanes, by stage."""
        return {
            node.name: LaneGather(
                node.name,
                self.stages[node.name].state,
                {place: self.places[place].state for place in node.lane_names},
            )
            for node in self.graph.stages
            if node.gather
        }

    def _tie_nodes(self) -> tuple[EdgeNode, ...]:
        owners = {leaf: name for name, stage in self.stages.items() for leaf in stage.state.lent}
        return tuple(
            EdgeNode(
                name=leaf,
                src=owners[leaf],
                dst=name,
                kind=self._kind(owners[leaf], name),
                gradient=zero.leaf.module in stage.state.trainable,
            )
            for name, stage in self.stages.items()
            for leaf, zero in stage.state.borrowed.items()
        )

    @cached_property
    def ties(self) -> dict[str, Tie]:
        """Transfers of the weights that two stages share, by name of the tie."""
        result = {}
        for tie in self.graph.ties:
            src, dst = self.stages[tie.src], self.stages[tie.dst]
            result[tie.name] = Tie(
                tie.name,
                owned=src.state.shared_avals(src.state.lent)[tie.name],
                borrowed=dst.state.shared_avals(dst.state.borrowed)[tie.name],
                ends=(src.submesh, dst.submesh),
                world=self.world,
                transport=self.settings.transport,
            )
        return result

    def _kind(self, source: str, target: str) -> EdgeKind:
        """The kind of an edge's boundaries: ``rendezvous`` if the boundary of any pair of lanes is."""
        lanes = [self.layouts[self.stages[end].model.module].lanes for end in (source, target)]
        pairs = ((lane_name(source, m % lanes[0]), lane_name(target, m % lanes[1])) for m in range(math.lcm(*lanes)))
        kinds = {
            boundary_kind(self.places[source_place].submesh, self.places[target_place].submesh, self.settings.transport)
            for source_place, target_place in pairs
        }
        return cast(EdgeKind, next(kind for kind in ("rendezvous", "async", "local") if kind in kinds))

    def prepare_programs(self) -> list[Program]:
        """The programs of ``StageState.prepare`` of all stages that have one, local or not."""
        return [program for stage in self.stages.values() if (program := stage.state.prepare_program)]

    def trace(self, inputs: InputShapes, graph: StageGraph | None = None, *, only: str = "") -> TracedStages:
        """Traces every stage for one combination of buckets; stages of unchanged shapes are traced once.

        Args:
          inputs: shapes of the host inputs of one microbatch, of every module.
          graph: a schedule's graph, which has the stages whose backward is split; without it no backward is split.
          only: the only module of interest, such as "llm": of the stages before it the forward is traced alone, and
            no other stage at all. Without it every stage is traced.

        Raises:
          ValueError: inputs have lists of tokens that no stage sends; see also ``input_aval``.
        """
        for module, module_inputs in inputs.items():
            if unsent := [
                name for name in module_inputs if name.startswith(SEND) and name != self._send_lists.get(module)
            ]:
                fix = "its tokens go to other modules in whole rows; pack without lists"
                raise ValueError(f"{module}/{unsent[0]}: {fix}")
        graph = graph or self.graph
        functions, boundaries = {}, {}
        needed = self._stages_up_to(only) if only else self.stages.keys()
        for name, stage in ((name, stage) for name, stage in self.stages.items() if name in needed):
            carries: dict[str, dict[str, Any]] = {place: {} for place in self.graph.stage(name).lane_names}
            for edge in self.graph.in_edges(name):
                for source, place in (self.graph.ends(edge, m) for m in self.graph.lane_cycle(edge)):
                    source_functions = functions[source]
                    boundary = self.boundary(
                        source, place, source_functions.out.activation, listed=source_functions.listed
                    )
                    if self.graph.shares_out(edge):
                        count = inputs[self.stages[edge.src].model.module].get(MICROBATCHES, 0)
                        boundary = self._shared_out(boundary, count) if count else boundary
                    boundaries[edge_name(source, place)] = boundary
                    carries[place][edge.src] = boundary.forward.target_aval
            alone = bool(only) and stage.model.module != only
            split = graph.stage(name).split and not alone
            for place, carry in carries.items():
                functions[place] = self._stage_functions(
                    place, inputs[stage.model.module], carry, split=split, forward_alone=alone
                )
        return TracedStages(functions, boundaries)

    def _stages_up_to(self, module: str) -> set[str]:
        """Names of the stages of a module, and of those whose activations reach it."""
        needed = set[str]()
        for name, stage in reversed(self.stages.items()):
            if stage.model.module == module or name in needed:
                needed |= {name, *(edge.src for edge in self.graph.in_edges(name))}
        return needed

    def boundary(
        self, source: str, target: str, aval: Any, *, whole_rows: bool = False, listed: bool = False
    ) -> Boundary:
        """The boundary between two places for an activation of ``source``, created once for each shape.

        Args:
          source, target: names of the places.
          aval: shape and dtype of the activation ``[rows, tokens, D]``.
          whole_rows: whether rows are whole on every rank of cp inside modules too.
          listed: whether the activation is the tokens on the lists of another module's ranks of cp.
        """
        inside = not whole_rows and self.places[source].model.module == self.places[target].model.module
        placements = INSIDE_MODULE if inside else LISTED_TOKENS if listed else WHOLE_ROWS
        key = (source, target, aval.shape, aval.dtype, placements)
        if key not in self._boundaries:
            self._boundaries[key] = Boundary(
                edge_name(source, target),
                self.places[source].submesh,
                self.places[target].submesh,
                aval,
                self.world,
                transport=self.settings.transport,
                route=self.settings.route,
                placements=placements,
            )
        return self._boundaries[key]

    def _shared_out(self, boundary: Boundary, microbatches: int) -> SharedOut:
        """A boundary with the activation of an op of several microbatches, shared out to these; created once."""
        key = boundary, microbatches
        if key not in self._shares:
            self._shares[key] = SharedOut(boundary, microbatches, self.cells)
        return self._shares[key]

    def _stage_functions(
        self,
        place: str,
        inputs: Mapping[str, Any],
        carry: Mapping[str, Any],
        *,
        split: bool,
        forward_alone: bool,
    ) -> StageFunctions:
        stage, max_runs = self.places[place], inputs.get(MAX_RUNS, ANY_RUNS)
        distances = inputs.get(DISTANCES)
        avals = {name: self.input_aval(stage, name, inputs[name]) for name in stage.model.read(inputs)}
        arrays = ((n, a.shape, a.dtype, a.sharding.spec) for n, a in (*avals.items(), *carry.items()))
        key = (place, split, forward_alone, max_runs, distances, *arrays)
        if key not in self._functions:
            gradients = {edge.src for edge in self.graph.in_edges(stage.name) if edge.gradient}
            functions_class = SplitFunctions if split else StageFunctions
            model = stage.model
            if max_runs or distances is not None:
                model = replace(model, max_runs=max_runs, distances=distances)
            self._functions[key] = functions_class(
                model,
                stage.state,
                avals,
                carry,
                cells=math.lcm(self.cells, stage.submesh.layout.dp),  # only a module that reads no other has more dp
                gradient_sources=frozenset(gradients),
                sends=bool(self.graph.out_edges(stage.name)),
                forward_alone=forward_alone,
            )
        return self._functions[key]

    def input_aval(self, stage: Stage, name: str, array: Any, *, whole_rows: bool = False) -> jax.ShapeDtypeStruct:
        """Aval of the host input ``name`` on the stage's devices; see ``Stage.input_sharding``.

        Only shape and dtype of ``array`` are read.

        Raises:
          ValueError: tokens do not divide by cp, or by cp·tp with sequence parallelism.
        """
        layout, is_whole = stage.submesh.layout, stage.has_whole_rows(name, whole_rows=whole_rows)
        if not is_whole and layout.row_multiple > 1 and array.shape[1] % layout.row_multiple:
            of = f"Layout.cp={layout.cp}" + (f" times tp={layout.tp}" if layout.shares_tokens else "")
            fix = "pad them, or use other degrees" + (", or set Layout.sp to False" if layout.shares_tokens else "")
            raise ValueError(f"{stage.name}: rows of {array.shape[1]} positions do not divide by {of}; {fix}")
        sharding = stage.input_sharding(name, whole_rows=whole_rows)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    def without_lists(self, inputs: InputShapes) -> InputShapes:
        """The same inputs without send lists: tokens then go to other modules in whole rows."""
        lists = self._send_lists
        return {
            module: {name: array for name, array in module_inputs.items() if name != lists.get(module)}
            for module, module_inputs in inputs.items()
        }

    def require_no_lists(self, inputs: InputShapes, reader: str) -> None:
        """Requires inputs without send lists.

        Args:
          inputs: the host inputs.
          reader: subject of the error message.

        Raises:
          ValueError: inputs have lists, so that indices of other modules' tokens are positions in the lists.
        """
        for module, name in self._send_lists.items():
            if name in inputs.get(module, ()):
                raise ValueError(
                    f"{module}/{name}: {reader} takes whole rows of other modules' tokens; pack without lists"
                )

    @cached_property
    def _send_lists(self) -> dict[str, str]:
        """The name of the input with a module's send list, by module."""
        return {stage.model.module: stage.model.send_list for stage in self.stages.values() if stage.model.send_list}

    def nominal_costs(self, inputs: InputShapes) -> Costs:
        """Costs that order ops before any are measured: FLOPs per rank of a padded microbatch's matrix products.

        The unit is the most expensive forward. Every module has "segments" ``[rows, tokens]`` among its inputs. Moves
        and once-a-step ops cost a hundredth of it.
        """
        work = {name: _forward_work(self.places[name], inputs) for name in self.stages}
        top = max(work.values())
        forward = {name: value / top for name, value in work.items()}
        return Costs.nominal(self.graph, forward=forward, move=0.01, once=0.01)


def _forward_work(stage: Stage, inputs: InputShapes) -> float:
    """2 · parameters · tokens / ranks of a copy; only matrices count, and tokens are segment ids with padding."""
    tokens = int(np.prod(inputs[stage.model.module]["segments"].shape))
    single = {(part.module, run.name) for part in stage.model.slices for run in part.runs if not run.stacked}
    weights = 0
    for path, leaf in jax.tree.leaves_with_path(stage.state.param_avals):
        # A vector of stacked layers is a matrix: one of a single layer counts too, so that both give the same costs.
        is_single = tuple(key.key for key in path[:2]) in single
        weights += math.prod(leaf.shape) if len(leaf.shape) + is_single > 1 else 0
    return 2.0 * weights * tokens / (len(stage.submesh.ranks) // stage.submesh.layout.copies)
