"""Parameters of a stage: their logical leaves, sharding, initial values and names.

Modules are NNX classes that only create parameters. Sharding follows from one table of logical axes in this file, not
from NNX metadata. A stage has a nested dict of parameters for each module: the arrays of ``layers`` are stacked over
the stage's layers, others are single. Several groups of layers are several stacks; layers that are not stacked are
entries of their own. A *logical leaf* is one parameter of one layer without padding; its name does not depend on the
stage or the layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax import lax
from jax.sharding import PartitionSpec

from mmjax.configurable import ConfigError
from mmjax.mesh.spread import Axes, Spread

Tree = Any
"""Nested dict of arrays."""
Create = Callable[[nnx.Rngs], nnx.Module]
"""A function that builds an NNX object, if possible a ``partial`` of a class and a hashable configuration."""
Tie = Literal["", "lent", "borrowed"]
"""Whether two stages of a module share a parameter: the first owns and lends it, the other borrows it."""

LogicalAxes = Mapping[str, tuple[str, ...]]
"""Names of a parameter's dimensions, by the end of its path: the last name, or the last two."""

KV_HEADS = "kv_heads"
"""The dimension of key/value heads where tp has more ranks than there are heads: each rank uses one head."""

# Every parameter is listed here or in its module's ``axes``. A missing one is an error, never a silent replica.
LOGICAL_AXES: LogicalAxes = {
    "attn/q": ("embed", "heads"),
    "attn/k": ("embed", "heads"),
    "attn/v": ("embed", "heads"),
    "attn/o": ("heads", "embed"),
    "attn/q_bias": ("heads",),
    "attn/k_bias": ("heads",),
    "attn/v_bias": ("heads",),
    "attn/q_norm": ("head",),
    "attn/k_norm": ("head",),
    "mlp/gate": ("embed", "mlp"),
    "mlp/up": ("embed", "mlp"),
    "mlp/gate_bias": ("mlp",),
    "mlp/up_bias": ("mlp",),
    "mlp/down": ("mlp", "embed"),
    "embed": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "up": ("embed", "mlp"),
    "up_bias": ("mlp",),
    "down": ("mlp", "embed"),
    "attn/o_bias": ("embed",),
    "down_bias": ("embed",),
    "attn_norm": ("embed",),
    "mlp_norm": ("embed",),
    "norm": ("embed",),
    "attn_scale": ("embed",),
    "mlp_scale": ("embed",),
    "class_token": ("embed",),
    "newline": ("embed",),
    "scale": ("embed",),
    "position": ("place", "embed"),
    "kernel": ("input", "output"),
    "bias": ("output",),
}


@dataclass(frozen=True)
class Leaf:
    """One array of a stage.

    Attributes:
      module: owning module, such as ``llm``.
      path: path inside the stage's tree of the module, such as ``layers/attn/q``.
      layers: global indices of the stacked layers; ``None`` for a single parameter.
      logical_shape: shape of one logical leaf.
      shape: shape of the stage's array: stacked, vocabulary padded.
      axes: logical axis per dimension of one logical leaf.
      tie: whether another stage shares it; a borrowed leaf is neither stored, updated nor saved here.
      layer: global index of its layer, where layers are not stacked.
      from_end: distance of each logical leaf from the module's end: 0 behind the layers, 1 in the last layer, and so
        on, up to the number of layers + 1 before the first layer.
    """

    module: str
    path: str
    layers: tuple[int, ...] | None
    logical_shape: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    tie: Tie = ""
    layer: int | None = None
    from_end: tuple[int, ...] = (0,)

    def spec(self, axes: Axes) -> PartitionSpec:
        """Sharding of the stage's array over ``axes.tp``; the stacking dimension is not sharded."""
        return Spread.of(axes).parameter(self.axes, stacked=self.layers is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the logical leaves, in stacking order, such as ("llm/layers/002/attn/q", "llm/layers/003/attn/q") or
        ("llm/embed",).
        """
        layers = self.layers if self.layer is None else (self.layer,)
        if layers is None:
            return (f"{self.module}/{self.path}",)
        _, _, suffix = self.path.partition("/")
        return tuple(f"{self.module}/layers/{layer:03d}/{suffix}" for layer in layers)

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to scales and biases."""
        return len(self.logical_shape) > 1


UNNAMED = "partial"
"""The name of unnamed parts in the seeds of initial values. Recorded results depend on it."""


@dataclass(frozen=True)
class Part:
    """A group of parameters that are created together.

    Attributes:
      create: builds the NNX object from ``nnx.Rngs``.
      name: the prefix of their paths, or "".
      tie: ``Leaf.tie`` of their leaves.
    """

    create: Create
    name: str = ""
    tie: Tie = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters by path in the stage's tree of the module, such as "patch/kernel"; unpadded."""
        prefix = (self.name,) if self.name else ()
        return {"/".join(prefix + path): shape for path, shape in shapes_of(self.create).items()}


@dataclass(frozen=True)
class LayerRun:
    """Consecutive equal layers of a stage: one stack, or a single layer that is not stacked.

    Attributes:
      create: creates the parameters of one layer.
      layers: indices of the layers in the module.
      name: the key in the stage's parameters. Names of logical leaves do not depend on it.
      stacked: whether the parameters are stacked; otherwise there is one layer.
    """

    create: Create
    layers: range
    name: str = "layers"
    stacked: bool = True

    @property
    def layer(self) -> int | None:
        """The index of the layer that is not stacked, else ``None``."""
        return None if self.stacked else self.layers[0]


@dataclass(frozen=True)
class ModuleSlice:
    """A stage's share of a module: some of its layers, and the single parts before or after them.

    Attributes:
      module: the module's name.
      runs: the layers of this stage.
      parts: the single parts of this stage.
      vocab_multiple: the ``vocab`` axis is padded to a multiple of this.
      axes: logical axes of the module's parameters, which take precedence over ``LOGICAL_AXES``.
      depth: the number of the module's layers in all stages.
      before_layers: paths of the parameters of single parts before the layers.
    """

    module: str
    runs: tuple[LayerRun, ...] = ()
    parts: tuple[Part, ...] = ()
    vocab_multiple: int = 1
    axes: LogicalAxes = field(default_factory=dict)
    depth: int = 0
    before_layers: frozenset[str] = frozenset()

    def leaves(self) -> Tree:
        """A nested dict of ``Leaf`` with the structure of the stage's parameters, such as {"layers": {"attn": {"q":
        leaf}}}.

        Raises:
          ConfigError: a parameter is in no table of logical axes.
        """
        flat: dict[tuple[str, ...], Leaf] = {}
        for part in self.parts:
            for path, shape in part.shapes.items():
                from_end = (self.depth + 1) if path in self.before_layers else 0
                flat[tuple(path.split("/"))] = replace(self._leaf(path, None, shape, part.tie), from_end=(from_end,))
        for run in self.runs:
            for path, shape in shapes_of(run.create).items():
                stack = tuple(run.layers) if run.stacked else None
                leaf = self._leaf("/".join((run.name, *path)), stack, shape)
                from_end = tuple(self.depth - layer for layer in run.layers)
                flat[(run.name, *path)] = replace(leaf, layer=run.layer, from_end=from_end)
        return traverse_util.unflatten_dict(flat)

    def _leaf(self, path: str, layers: tuple[int, ...] | None, shape: tuple[int, ...], tie: Tie = "") -> Leaf:
        axes = logical_axes(f"{self.module}/{path}", shape, self.axes)
        padded = tuple(
            _round_up(n, self.vocab_multiple) if a == "vocab" else n for n, a in zip(shape, axes, strict=True)
        )
        stacked = padded if layers is None else (len(layers), *padded)
        return Leaf(self.module, path, layers, shape, stacked, axes, tie)

    def initialise(self, key: jax.Array) -> Tree:
        """The stage's parameters in fp32, a pure function of ``key`` and the global layer indices, in the structure of
        ``leaves``.

        Traceable: under ``jit`` with output shardings no device holds more than its shard.
        """
        key = jax.random.fold_in(key, zlib.crc32(self.module.encode()) & 0x7FFFFFFF)
        tree: dict[str, Any] = {}
        for part in self.parts:
            seed = zlib.crc32((part.name or UNNAMED).encode()) & 0x7FFFFFFF
            values = _params_of(part.create(nnx.Rngs(jax.random.fold_in(key, seed))))
            tree.update({part.name: values} if part.name else values)
        for run in self.runs:
            keys = [jax.random.fold_in(key, index) for index in run.layers]
            create_layer = partial(_create_params, run.create)
            tree[run.name] = jax.vmap(create_layer)(jnp.stack(keys)) if run.stacked else create_layer(*keys)
        return jax.tree.map(lambda leaf, value: _pad_to(value, leaf.shape), self.leaves(), tree)


def head_of_rank(dimension: int, heads: int, stored: jax.Array) -> jax.Array:
    """The key/value head that this tp rank uses, where there are fewer heads than ranks; inside ``shard_map``.

    The gradient of other heads is 0 on this rank, so a sum over tp adds the gradients of all ranks that use a head.

    Args:
      dimension: the dimension of ``stored`` that has the heads side by side.
      heads: the number of heads in it; tp is a multiple of it.
      stored: a weight or bias with all heads.
    """
    axes = Axes().tp
    width = stored.shape[dimension] // heads
    head = lax.axis_index(axes) * heads // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(stored, head * width, width, dimension)


def logical_axes(path: str, shape: tuple[int, ...], module_axes: LogicalAxes | None = None) -> tuple[str, ...]:
    """The name of each dimension of a parameter, from the longest end of its path that is in a table.

    Entries of ``module_axes``, the module's table, take precedence over ``LOGICAL_AXES``.

    Args:
      path: the parameter's path, such as "llm/layers/attn/q".
      shape: its shape without stacking.
      module_axes: see ``Module.axes``.

    Raises:
      ConfigError: the parameter is in no table with its number of dimensions.
    """
    parts = path.split("/")
    for table in (module_axes or {}, LOGICAL_AXES):
        for start in range(len(parts)):
            axes = table.get("/".join(parts[start:]))
            if axes and len(axes) == len(shape):
                return axes
    example = {parts[-1]: ("embed",) if len(shape) == 1 else ("embed", "mlp")}
    raise ConfigError(f"{path}{list(shape)}: its dimensions have no names; add them to its module's axes, as {example}")


def split_logical(leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Splits a stage's arrays into logical leaves by name, such as "llm/layers/003/attn/q". Traceable.

    ``leaves`` and ``arrays`` are flat and in the same order. Stacking and padding are removed.
    """
    result = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        pieces = [array] if leaf.layers is None else [array[i] for i in range(len(leaf.layers))]
        for name, piece in zip(leaf.names, pieces, strict=True):
            result[name] = piece[tuple(slice(0, n) for n in leaf.logical_shape)]
    return result


def join_logical(leaves: Sequence[Leaf], named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Joins logical leaves by name to a stage's arrays, stacked and padded with zeros, in the order of ``leaves``.
    Traceable.

    Raises:
      KeyError: a leaf is missing in ``named``.
    """
    result = []
    for leaf in leaves:
        pieces = [named[name] for name in leaf.names]
        result.append(_pad_to(pieces[0] if leaf.layers is None else jnp.stack(pieces), leaf.shape))
    return result


def shapes_of(create: Create) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    """Shapes of the parameters that ``create`` creates, by path such as ("attn", "q"), without creating them.

    Cached for a ``partial`` without keywords.
    """
    if isinstance(create, partial) and not create.keywords:
        return _cached_shapes(create.func, create.args)
    return _traced_shapes(create)


@lru_cache(maxsize=256)
def _cached_shapes(cls: Callable[..., nnx.Module], args: tuple[Any, ...]) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    return _traced_shapes(partial(cls, *args))


def _traced_shapes(create: Create) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    tree: Tree = jax.eval_shape(lambda: _params_of(create(nnx.Rngs(0))))
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(tree)
    return {path: aval.shape for path, aval in flat.items()}


def _create_params(create: Create, key: jax.Array) -> Tree:
    return _params_of(create(nnx.Rngs(key)))


def _params_of(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]) if x.shape != shape else x


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
