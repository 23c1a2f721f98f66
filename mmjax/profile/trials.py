"""Trials: short stages of every module, the programs that training runs, compiled and timed on the devices here.

From stages of one to three layers follow the times of a layer, of a program and of a module's ends. All stages of a
trial are on the same devices, so one device is enough to time the parts of a pipeline. Nothing is trained: parameters
and inputs are constants, since times do not depend on their values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax import jax_compat
from mmjax.assembly.compiled_runs import with_typical_runs
from mmjax.assembly.model import build_model
from mmjax.data.packing import Packer
from mmjax.data.tokenizer import Tokenizer
from mmjax.mesh.layout import Layout
from mmjax.mesh.processes import gather_texts
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World
from mmjax.models.config import LLM
from mmjax.pipeline.compile import compile_all
from mmjax.pipeline.executor import StagePrograms
from mmjax.pipeline.place import InputShapes, PlacedModel, Settings, Stage
from mmjax.plan import work
from mmjax.planner.profile_file import Compiled, Trial
from mmjax.planner.work import StagePart
from mmjax.recipe import ModuleSpec, Recipe

_SECONDS, _LEAST, _MOST = 0.1, 3, 20
"""A program runs until all its runs took `_SECONDS`, between `_LEAST` and `_MOST` times; the shortest run counts."""
_TOGETHER = 6
"""How many times it runs where there are several processes: equally often in all of them."""
ROUNDS = 3
"""How many times all trials are run in turn, so that a slow spell of the machine does not spoil any of them."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the modules of a trial are cut.

    Attributes:
      layers: layers of each module.
      stages: stages of each module, with equally many layers.
    """

    layers: int
    stages: int

    def part(self, index: int) -> StagePart:
        """The part of the module that stage `index`, from 0, has."""
        return StagePart(layers=self.layers // self.stages, first=index == 0, last=index == self.stages - 1)


ONE, TWO, THREE = (Cut(layers=layers, stages=1) for layers in (1, 2, 3))
"""The time of a layer is the difference of `THREE` and `TWO`: one layer alone is compiled without a loop and is faster.
"""
HALVES = Cut(layers=2, stages=2)
"""Two stages of a layer each, which time a module's first and last end apart."""
LOOPS = tuple(Cut(layers=2 * layers, stages=2) for layers in (2, 3))
"""Only compiled, and only their first stages: they show the memory of a loop of layers without the last end's."""
CUTS = (ONE, TWO, THREE, HALVES, *LOOPS)
"""All cuts of a profile."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An input shape for every module.

    Attributes:
      shapes: (rows of a microbatch, positions of a row) by module name.
      ends: whether first and last ends are timed apart (`HALVES`).
      loops: whether loops with the first end alone are compiled (`LOOPS`).
    """

    shapes: Mapping[str, tuple[int, int]]
    ends: bool = False
    loops: bool = False


class Folded(World):
    """A world in which all stages of a module are on the devices of its first stage."""

    def submesh(self, layout: Layout, stage: int) -> Submesh:
        """The submesh of the first stage."""
        return super().submesh(layout, 0)


# ---- what is tried ---------------------------------------------------------------------------------------------------


def points(packer: Packer, rows: int, *, quick: bool) -> list[Point]:
    """At most five points to try, each with a shape of every module.

    They have each module's widest bucket with all rows, one row and a quarter, then its narrowest with all and a
    quarter. Rows are those of the bucket in all cells; quarters are rounded up. Equal shapes of a module are tried
    once. A module with fewer shapes than another repeats its first.

    Args:
      packer: packs the data, as `build_packer(recipe, tokenizer)` makes it.
      rows: rows of a microbatch for a module without buckets, rounded up to a multiple of the cells.
      quick: only the widest bucket, with all rows and a quarter.
    """
    tried = {name: _shapes(packer, name, rows, quick=quick) for name in (LLM, *packer.encoders)}
    longest = max(map(len, tried.values()))
    # A module that has fewer shapes than another stays at its first one, which is timed already.
    return [
        Point(
            shapes={name: shapes[index] if index < len(shapes) else shapes[0] for name, shapes in tried.items()},
            ends=index < 2,
            loops=index < 3,  # a single row says nothing of others, and two of these have more
        )
        for index in range(longest)
    ]


def _shapes(packer: Packer, module: str, rows: int, *, quick: bool) -> list[tuple[int, int]]:
    """(rows, width) to try for one module, as `points` says; those of its widest bucket come first."""
    most: dict[int, int] = {}
    for per_cell, width in packer.buckets_of(module) or ((-(-rows // packer.cells), packer.sequence_length),):
        most[width] = max(most.get(width, 0), per_cell * packer.cells)
    widest, narrowest = max(most), min(most)
    all_rows, quarter = most[widest], -(-most[widest] // 4)
    counts = [all_rows, quarter] if quick else [all_rows, 1, quarter]
    shapes = [(count, widest) for count in counts]
    if narrowest < widest and not quick:
        shapes += [(count, narrowest) for count in (most[narrowest], -(-most[narrowest] // 4))]
    return list(dict.fromkeys(shapes))


def legal_tps(recipe: Recipe, module: str, devices: int) -> tuple[int, ...]:
    """Every tp of 1, 2, 4 and 8, up to `devices`, ascending, that divides the sizes of a module: (1, 2).

    Args:
      recipe: the run's configuration.
      module: the module's name, such as "llm".
      devices: number of devices.
    """
    return tuple(tp for tp in work.legal_tps(recipe, module) if tp <= devices)


# ---- programs --------------------------------------------------------------------------------------------------------


def placed_for(
    recipe: Recipe, tokenizer: Tokenizer, world: World, cut: Cut, layout: Mapping[str, Layout]
) -> PlacedModel:
    """The configuration's model with every module cut in this way, on the first devices; no weights are made.

    Args:
      recipe: the configuration.
      tokenizer: its tokenizer, such as `plan(recipe).tokenizer`.
      world: the devices, as `world_for(recipe)` gives them.
      cut: layers and stages of each module, in place of the configuration's, such as `Cut(layers=2, stages=1)`.
      layout: by module name, the degrees, such as {"vision": Layout(tp=2), "llm": Layout(tp=2)}; `cut` gives the pp.
    """

    def cut_node(node: ModuleSpec) -> ModuleSpec:
        node = node.with_settings(layers=cut.layers)
        return node.with_projector(inject=(), levels=()) if node.projector else node

    model = build_model(replace(recipe, model=recipe.model.map(cut_node)), tokenizer)
    settings = Settings(optimizers=recipe.model.optimizers, total_steps=recipe.train.steps, dtype=recipe.train.dtype)
    layouts = {name: replace(module_layout, pp=cut.stages) for name, module_layout in layout.items()}
    return PlacedModel(model, layouts, Folded(world.devices), settings)


def input_shapes(packer: Packer, point: Point, times: int = 1) -> InputShapes:
    """Shapes of a microbatch's host inputs at a point, by module and input name, with `times` as many rows.

    Such as {"llm": {"tokens": ShapeDtypeStruct((8, 4096), int32), …}}.

    Args:
      packer: packs the data, as `build_packer(recipe, tokenizer)` makes it.
      point: rows and positions of every module, one of those that `points` gives.
      times: a factor on the rows.
    """
    empty, shapes = replace(packer, lists=False).microbatch([], packer.cells), {}
    for name, arrays in empty.inputs.items():
        rows, width = point.shapes[name]
        bucket_width = arrays["segments"].shape[1]
        shapes[name] = {
            key: jax.ShapeDtypeStruct((rows * times, max(1, a.shape[1] * width // bucket_width), *a.shape[2:]), a.dtype)
            for key, a in arrays.items()
        }
    return shapes


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The programs of a stage to try.

    Attributes:
      stage: the stage.
      programs: its programs.
      part: the part of the module that it has.
      tp: its tp; its dp is 1.
      rows: rows of its input.
      width: positions of a row.
      timed: whether the programs are run, not just compiled.
    """

    stage: Stage
    programs: StagePrograms
    part: StagePart
    tp: int
    rows: int
    width: int
    timed: bool = True

    def run(self) -> tuple[Trial, float]:
        """Runs and times the programs, several times each; compiles them first where that is not done.

        Returns:
          The trial, and the seconds that the host needs to call the forward.
        """
        functions = self.programs.functions
        params, inputs, carry = _filled(functions.forward_avals)
        devices = len(self.stage.submesh.ranks)
        ahead, backward = shortest(lambda: self.programs.forward(params, inputs, carry)), 0.0
        if self.programs.backward:
            _, residuals = self.programs.forward(params, inputs, carry)
            sums, received = (_filled(aval) for aval in (functions.backward_avals[1], functions.backward_avals[3]))
            cotangent = _filled(functions.cotangent_aval)
            program, sums_in = self.programs.backward, [sums]

            def back() -> Any:
                out = program(params, sums_in.pop(), inputs, received, residuals, cotangent)
                sums_in.append(out[0])  # the sums are overwritten
                return out

            backward = shortest(back).of(devices)
        return Trial(**self._about, forward=ahead.of(devices), backward=backward), ahead.called

    def compiled(self) -> Compiled:
        """Temporary bytes of the programs, which are compiled where that is not done; nothing is run."""
        both = (self.programs.forward, self.programs.backward)
        ahead, back = (float(program.compiled_temporary_bytes()) if program else 0.0 for program in both)
        return Compiled(**self._about, forward=ahead, backward=back)

    @property
    def _about(self) -> dict[str, Any]:
        module, shape = self.stage.model.module, {"rows": self.rows, "width": self.width}
        return {"module": module, "part": self.part, "tp": self.tp, **shape}


def attempts(
    recipe: Recipe,
    tokenizer: Tokenizer,
    packer: Packer,
    world: World,
    tp: int,
    tried: list[Point],
    cuts: Sequence[Cut] = CUTS,
) -> Iterator[Attempt]:
    """Yields the attempts with this tp of stages on this process's devices, each program once, not yet compiled.

    Modules that cannot have this tp are left out.

    Args:
      recipe: the configuration.
      tokenizer: its tokenizer, such as `plan(recipe).tokenizer`.
      packer: packs its data, as `build_packer(recipe, tokenizer)` makes it.
      world: the devices, as `world_for(recipe)` gives them.
      tp: one of the `legal_tps` of some module.
      tried: the shapes, as `points` gives them.
      cuts: the layers and stages of modules to try, such as (Cut(layers=1, stages=1),).
    """
    legal_by_module = {name: legal_tps(recipe, name, world.size) for name in recipe.model}
    layout = {name: Layout(tp=max(size for size in legal if size <= tp)) for name, legal in legal_by_module.items()}
    for cut in cuts:
        placed, done = placed_for(recipe, tokenizer, world, cut, layout), set[int]()
        for point in tried:
            if (cut == HALVES and not point.ends) or (cut in LOOPS and not point.loops):
                continue
            inputs = with_typical_runs(placed, packer, input_shapes(packer, point))
            for name, functions in placed.trace(inputs).stages.items():
                stage = placed.stages[name]
                if id(functions) in done or tp not in legal_by_module[stage.model.module] or not stage.submesh.local:
                    continue
                if cut in LOOPS and stage.model.index > 0:
                    continue
                done.add(id(functions))
                rows, width = point.shapes[stage.model.module]
                programs, part = StagePrograms(name, functions), cut.part(stage.model.index)
                yield Attempt(
                    stage=stage,
                    programs=programs,
                    part=part,
                    tp=tp,
                    rows=rows,
                    width=width,
                    timed=cut not in LOOPS,
                )


def compiled(stages: Sequence[Attempt], report: Callable[[int, int, str], None]) -> None:
    """Compiles all programs of some attempts; returns nothing, and the attempts have them.

    Args:
      stages: programs of stages, as `attempts` yields them.
      report: called with the number of programs that are done, that of all, and the name of the last one.
    """
    compile_all([program for stage in stages for program in stage.programs.programs], report)


def best_trials(stages: Sequence[Attempt], done: Callable[[], None]) -> tuple[list[Trial], list[float]]:
    """Runs all attempts in turn, `ROUNDS` times, and takes the shortest times.

    Args:
      stages: compiled attempts.
      done: called after each attempt of each round.

    Returns:
      In the order of `stages`, the trials, and the seconds that the host needs to call the forward of each.
    """
    trials, calls = list[Trial](), list[float]()
    for number in range(ROUNDS):
        for index, stage in enumerate(stages):
            trial, called = stage.run()
            done()
            if number == 0:
                trials.append(trial)
                calls.append(called)
                continue
            old, forward, backward = trials[index], trial.forward, trial.backward
            trials[index] = replace(old, forward=min(old.forward, forward), backward=min(old.backward, backward))
            calls[index] = min(calls[index], called)
    return trials, calls


def at_a_time(recipe: Recipe, tokenizer: Tokenizer, packer: Packer, world: World, point: Point) -> float:
    """Measures the number of devices that work at a time, from 1 to all; not whole where they share cores.

    All processes call it. Compares the time of a forward of the LLM on one device with that of the same forward on all
    devices at once.

    Args:
      recipe: the configuration.
      tokenizer: its tokenizer, such as `plan(recipe).tokenizer`.
      packer: packs its data, as `build_packer(recipe, tokenizer)` makes it.
      world: the devices, as `world_for(recipe)` gives them.
      point: the shape of every module, one of those that `points` gives; the same in all processes.
    """
    ready = []
    for dp in (1, world.size):
        layout = {name: Layout(dp=dp) for name in recipe.model}
        placed = placed_for(recipe, tokenizer, world, TWO, layout)
        name = f"{LLM}.0"
        if not placed.stages[name].submesh.local:
            continue
        inputs = with_typical_runs(placed, packer, input_shapes(packer, point, dp))
        functions = placed.trace(inputs).stages[name]
        ready.append((StagePrograms(name, functions).forward, _filled(functions.forward_avals)))
        jax.block_until_ready(ready[-1][0](*ready[-1][1]))
    walls = []
    for program, arguments in ready:
        if program is ready[-1][0]:
            gather_texts("")  # all devices at once
        walls.append(
            min(shortest(lambda program=program, arguments=arguments: program(*arguments)).wall for _ in range(ROUNDS))
        )
    return min(float(world.size), max(1.0, world.size * walls[0] / walls[-1]))


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Took:
    """Seconds of a program's run: the least over several runs, for each field by itself.

    Attributes:
      wall: from the call until the results are there.
      processor: processor time of all threads meanwhile.
      called: processor time of the calling thread until the call returned.
    """

    wall: float
    processor: float
    called: float

    def of(self, devices: int) -> float:
        """Seconds that each of `devices` worked.

        Virtual devices share the cores of their process with each other and with other processes. For them it is the
        processor time, which other processes do not change, divided by the devices of this process that worked.
        """
        if jax.default_backend() != "cpu" or (jax_compat.process_count() > 1 and jax.local_device_count() == 1):
            return self.wall  # `Device.shares_cores` says the same
        return self.processor / min(devices, jax.local_device_count())


def shortest(run: Callable[[], Any]) -> Took:
    """Runs a program several times, and takes the shortest times; the first run is not counted.

    The result has seconds: `wall`, `processor` and `called`, until the call returned. The least is taken of each.

    run: calls the compiled program, and returns its results without waiting for them.
    """
    jax.block_until_ready(run())
    best = np.full(3, np.inf)
    spent, count = 0.0, 0
    least, most = (_LEAST, _MOST) if jax_compat.process_count() == 1 else (_TOGETHER, _TOGETHER)
    while count < least or (spent < _SECONDS and count < most):
        start = np.array([time.perf_counter(), time.process_time(), time.thread_time()])
        out = run()
        called = time.thread_time()
        jax.block_until_ready(out)
        took = np.array([time.perf_counter(), time.process_time(), called]) - start
        best, spent, count = np.minimum(best, took), spent + took[0], count + 1
    wall, processor, called = best.tolist()
    return Took(wall=wall, processor=processor, called=called)


def _filled(avals: Any) -> Any:
    """Arrays of these shapes on their devices: one segment a row, small numbers elsewhere."""

    def filled(path: Any, aval: Any) -> jax.Array:
        name = str(getattr(path[-1], "key", "")) if path else ""

        def shard(index: Any) -> np.ndarray:
            return _values(name, aval, index)

        return jax.make_array_from_callback(aval.shape, aval.sharding, shard)

    return jax.tree_util.tree_map_with_path(filled, avals)


def _values(name: str, aval: Any, index: tuple[slice, ...]) -> np.ndarray:
    shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, aval.shape, strict=True))
    if name == "segments":
        return np.ones(shape, aval.dtype)
    if name == "positions":
        along = np.arange(shape[1], dtype=aval.dtype).reshape(1, -1, *(1 for _ in shape[2:]))
        return np.broadcast_to(along, shape).copy()
    return np.full(shape, 0.01 if jnp.issubdtype(aval.dtype, jnp.floating) else 0, aval.dtype)
