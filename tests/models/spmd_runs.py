"""Runs model code, which expects local shards and axis names, on a few devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from mmjax.mesh.layout import Layout
from mmjax.mesh.spread import Axes
from mmjax.mesh.submesh import Submesh
from mmjax.mesh.world import World
from mmjax.models.context import Context
from mmjax.models.module import Module, layer_runs
from mmjax.models.parameters import ModuleSlice

AXES = Axes()


def slice_of(module: Module, name: str = "m") -> ModuleSlice:
    """All of a module in one stage."""
    runs = layer_runs(module, range(module.config.layers))
    return ModuleSlice(name, tuple(run for run, _ in runs), module.parts(first=True, last=True))


def context(module: Module, **inputs: Any) -> Context:
    """What the module is given with such host inputs."""
    return Context.of(AXES, inputs, module.mask)


@cache
def submesh(tp: int = 1) -> Submesh:
    """``tp`` devices."""
    return World(jax.devices()[:tp]).submesh(Layout(tp=tp), 0)


def on_tp(tp: int, fn: Callable[..., Any], *args: Any, specs: tuple[Any, ...] = (), out: Any = None) -> Any:
    """``fn`` under ``shard_map`` over ``tp`` ranks; without specs everything is replicated."""
    given = specs or (P(),) * len(args)
    return jax.shard_map(fn, mesh=submesh(tp).mesh, in_specs=given, out_specs=P() if out is None else out)(*args)
