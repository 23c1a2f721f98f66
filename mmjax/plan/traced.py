"""The bytes that stages of each module need on a device, counted in traced programs; the devices need not be here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import jax

from mmjax.assembly.packers import bucket_shapes
from mmjax.data.packing import Packer
from mmjax.data.patches import patch_shapes
from mmjax.data.split import Split
from mmjax.data.types import EncoderSpec
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World
from mmjax.models.graph import MultimodalModel
from mmjax.pipeline.memory import in_flight_bytes, shard_bytes, temporary_bytes
from mmjax.pipeline.place import InputShapes, PlacedModel, Settings
from mmjax.pipeline.stage import StageFunctions
from mmjax.planner.work import Shares, SplitMemory, StageMemory
from mmjax.recipe import Recipe
from mmjax.schedule.graph import StageGraph

ROWS = 4
"""Rows that are traced, and half as many. A single row has dimensions of one, which take no copies."""


Key = TypeVar("Key")


class TracedLater(Mapping[Key, StageMemory]):
    """Bytes by key, such as by tp, that are traced when one is first read; the keys are known before.

    keys: every key. trace: gives the bytes of a key.
    """

    def __init__(self, keys: Iterable[Key], trace: Callable[[Key], StageMemory]) -> None:
        self._keys, self._trace = tuple(keys), trace

    def __getitem__(self, key: Key) -> StageMemory:
        if key not in self._keys:
            raise KeyError(key)
        return self._trace(key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def positions_of(inputs: InputShapes) -> int:
    """Positions of all rows of a microbatch, of all modules together. inputs: by module and name."""
    return sum(math.prod(arrays["segments"].shape) for arrays in inputs.values())


def _rows_of(packer: Packer, rows: int, model: MultimodalModel, tps: Mapping[str, int]) -> InputShapes:
    """Inputs of `rows` rows of every module, as wide as its largest bucket, rounded up for ranks of tp."""
    shapes = max(bucket_shapes(replace(packer, lists=False), 1).values(), key=positions_of)
    result: dict[str, dict[str, Any]] = {}
    for module, inputs in shapes.items():
        node, spec = model.nodes[module], model.nodes[module].module.medium
        split = Split(unit=tps[module] * node.module.patches_per_token)
        width = inputs["segments"].shape[1]
        # Rows stay as wide as a canvas where ranks of tp do not share their places.
        wider = width if getattr(node.config, "needs_all_tokens", False) else split.rounded(width)
        result[module] = {
            name: jax.ShapeDtypeStruct(
                (rows, _widened(name, array.shape[1], width, wider, spec), *array.shape[2:]), array.dtype
            )
            for name, array in inputs.items()
        }
    return result


def _widened(name: str, length: int, width: int, wider: int, spec: EncoderSpec | None) -> int:
    """The length of the input `name` in rows of `wider` positions, if it is `length` in rows of `width`."""
    if spec and spec.queries:
        return wider if length == width else length + wider - width if name in patch_shapes(spec) else length
    return length * wider // width  # some inputs have a place for a token of several patches


def trace_memory(
    recipe: Recipe,
    model: MultimodalModel,
    packer: Packer,
    tps: Mapping[str, tuple[int, ...]],
    widths: Mapping[str, int],
    gradients: Mapping[str, float],
) -> Callable[[str, int], StageMemory]:
    """A function that gives the bytes that a row of a module, of its width, needs on a device, from its name and tp.

    A tp is traced when it is first read: what a program needs is a maximum over its moments, each of which tp cuts
    differently. Bytes are linear in the number of rows; the part that does not depend on rows is taken as proportional
    to 1/tp.

    Args:
      recipe: the run's configuration, in which no `remat` is "auto".
      model: its model, as `build_model(recipe, tokenizer)` makes it.
      packer: its packer, as `build_packer(recipe, tokenizer)` makes it.
      tps: the tp to trace, by module, ascending.
      widths: positions of a row, by module.
      gradients: bytes of the gradients of a layer that a program gives, by module.
    """
    rounds = [
        {name: legal[min(number, len(legal) - 1)] for name, legal in tps.items()}
        for number in range(max(map(len, tps.values())))
    ]
    apart = {name: node.settings.needs_all_tokens for name, node in recipe.model.nodes.items()}

    @cache
    def placed(number: int, rows: int) -> _Placed:
        """Stages of all modules, each with its tp of the round."""
        layouts = {name: Layout(tp=tp, sp=not apart[name]) for name, tp in rounds[number].items()}
        return _Placed.of(recipe, model, _rows_of(packer, rows, model, rounds[number]), layouts)

    few = cache(lambda name: placed(0, ROWS // 2).traced(name))
    many = cache(lambda number, name: placed(number, ROWS).traced(name))

    @cache
    def memory(name: str, tp: int) -> StageMemory:
        before, after = few(name), many(0, name)
        fixed = [max(0.0, 2 * small - large) for small, large in zip(before.needed, after.needed, strict=True)]
        # Programs may give the gradients of all their layers, where products do not add to the sums.
        gradient = min(fixed[1] / 2, gradients[name])
        number = max(number for number, round_tps in enumerate(rounds) if round_tps[name] == tp)
        inputs, shrunk = placed(number, ROWS).inputs, rounds[0][name] / tp
        rows = ROWS * inputs[name]["segments"].shape[1] / widths[name]
        return many(number, name).memory(rows, [size * shrunk for size in fixed], gradient / tp)

    return memory


def trace_experts(
    recipe: Recipe, model: MultimodalModel, packer: Packer, name: str, layout: Layout, *, width: int, gradient: float
) -> StageMemory:
    """Bytes that a row of a module needs on a device in a layout with expert parallelism.

    Args:
      recipe, model, packer: as for `trace_memory`.
      name: the module's name, such as "llm".
      layout: one stage of it, such as `Layout(tp=2, dp=4, ep=4)`.
      width: positions of a row.
      gradient: bytes of the gradients of a layer that a program gives on a device.
    """
    layouts = dict.fromkeys(model.nodes, Layout()) | {name: layout}
    tps = {module: degrees.tp for module, degrees in layouts.items()}
    few, many = (_rows_of(packer, rows * layout.dp, model, tps) for rows in (ROWS // 2, ROWS))
    before, after = (_Placed.of(recipe, model, inputs, layouts).traced(name) for inputs in (few, many))
    fixed = [max(0.0, 2 * small - large) for small, large in zip(before.needed, after.needed, strict=True)]
    rows = ROWS * many[name]["segments"].shape[1] / width
    return after.memory(rows, fixed, min(fixed[1] / 2, gradient))


@dataclass(frozen=True)
class _Placed:
    """Stages of one, two and one layers of every module, and the inputs of their rows; nothing is traced yet."""

    model: PlacedModel
    inputs: InputShapes

    @classmethod
    def of(cls, recipe: Recipe, model: MultimodalModel, inputs: InputShapes, degrees: Mapping[str, Layout]) -> _Placed:
        """The stages with these inputs. degrees: by module, a layout of one stage."""
        layouts: dict[str, Layout] = {}
        offset = 0
        for name, layout in degrees.items():
            layouts[name] = replace(layout, pp=3, layers=(1, 2, 1), rank_offset=offset)
            offset += layouts[name].size
        small = model
        for name in degrees:
            small = small.with_settings(name, layers=4).with_inject(name)
        settings = Settings(
            optimizers=recipe.model.optimizers,
            total_steps=recipe.train.steps,
            dtype=recipe.train.dtype,
            transport="device_put",
        )
        return cls(PlacedModel(small, layouts, World.planned(offset), settings), inputs)

    def traced(self, name: str) -> _Traced:
        """The bytes of a module's stages, which alone are traced."""
        plain = self._stages(name)
        return _Traced(
            residuals=tuple(in_flight_bytes(stage) for stage in plain),
            host_inputs=tuple(shard_bytes(stage.forward_avals[1]) for stage in plain),
            needed=tuple(temporary_bytes(stage) for stage in plain),
            split=cache(partial(self._split, name)),
        )

    def _split(self, name: str) -> _TracedSplit:
        split = self._stages(name, self.model.graph.with_split())
        return _TracedSplit(
            deferred=tuple(shard_bytes(stage.deferred_avals) for stage in split),
            needed=tuple(temporary_bytes(stage) for stage in split),
        )

    def _stages(self, name: str, graph: StageGraph | None = None) -> list[StageFunctions]:
        stages = self.model.trace(self.inputs, graph, only=name).stages
        return [stages[f"{name}.{index}"] for index in range(3)]


@dataclass(frozen=True)
class _TracedSplit:
    """Bytes of three stages with split backwards: inputs of the second half, and temporaries of the programs."""

    deferred: tuple[int, ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class _Traced:
    """Bytes of a module's three stages, of one, two and one layers.

    Attributes:
      residuals: bytes from forward to backward.
      host_inputs: inputs from the host.
      needed: temporaries of the programs.
      split: gives the bytes with split backwards, which are traced then.
    """

    residuals: tuple[int, ...]
    host_inputs: tuple[int, ...]
    needed: tuple[int, ...]
    split: Callable[[], _TracedSplit]

    def memory(self, rows: float, fixed: Sequence[float], gradient: float) -> StageMemory:
        """Bytes of one row.

        Args:
          rows: rows that were traced, counted in rows of the module's width.
          fixed: bytes of each stage's temporaries that do not depend on rows.
          gradient: the part of `fixed` that each layer adds.
        """
        each = [max(0.0, needed - constant) / rows for needed, constant in zip(self.needed, fixed, strict=True)]
        alone = (max(0.0, size - gradient * layers) for size, layers in zip(fixed, (1, 2, 1), strict=True))
        return StageMemory(
            residuals=_shares(self.residuals, rows),
            inputs=Shares(first=(self.host_inputs[0] - self.host_inputs[1]) / rows, last=self.host_inputs[2] / rows),
            temporary=Shares(*each),
            fixed=Shares(*alone),
            fixed_layer=gradient,
            split=partial(self._split_memory, rows),
        )

    def _split_memory(self, rows: float) -> SplitMemory:
        split = self.split()
        return SplitMemory(
            deferred=_shares(split.deferred, rows),
            temporaries=max(after / before for after, before in zip(split.needed, self.needed, strict=True)),
        )


def _shares(sizes: tuple[int, ...], rows: float) -> Shares:
    """Bytes of a row in first end, layer and last end, from those of some in stages of one, two and one layers."""
    first, middle, last = (size / rows for size in sizes)
    layer = middle / 2
    return Shares(first=max(0.0, first - layer), layer=layer, last=max(0.0, last - layer))
