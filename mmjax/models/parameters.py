"""Parameters of a stage: which logical leaves it holds, how they are sharded, initialised and named.

Modules are authored as NNX classes that only create parameters. Sharding comes from one table of logical axes, kept
here and not in NNX metadata. A stage holds, per module, a nested dict: ``layers`` is stacked over the stage's layers,
other entries are single. Several groups of layers are several stacks; layers that are not stacked are entries of their
own. A *logical leaf* is one parameter of one layer without padding; its name knows no stage and no layout.
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
"""Builds an NNX object; where a class has a hashable configuration, a ``partial`` of both."""
Tie = Literal["", "lent", "borrowed"]
"""Whether two stages of a module share a parameter: the first owns and lends it, the other borrows it."""

LogicalAxes = Mapping[str, tuple[str, ...]]
"""Names of a parameter's dimensions, by the last names of its path: two mostly, or one."""

KV_HEADS = "kv_heads"
"""A dimension of key and value heads of which each rank of tp takes one."""

# Every parameter is listed, here or in its module's ``axes``; one that is not is an error, never a silent replica.
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
      layer: global index of the layer that it belongs to, where layers are not stacked.
      from_end: by logical leaf, 0 behind the module's layers, 1 in the last one, and so on; one more before the first.
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
        """Sharding over tp; the stacking dimension is whole."""
        return Spread.of(axes).parameter(self.axes, stacked=self.layers is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the logical leaves, in stacking order."""
        layers = self.layers if self.layer is None else (self.layer,)
        if layers is None:
            return (f"{self.module}/{self.path}",)
        _, _, rest = self.path.partition("/")
        return tuple(f"{self.module}/layers/{layer:03d}/{rest}" for layer in layers)

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: logically a matrix, not a scale or a bias."""
        return len(self.logical_shape) > 1


UNNAMED = "partial"
"""Stands for the name of an unnamed part in the seed of its initial values. Kept results depend on it."""


@dataclass(frozen=True)
class Part:
    """A group of parameters created together.

    Attributes:
      create: builds the NNX object from ``nnx.Rngs``.
      name: prefix of its paths, or empty.
      tie: ``Leaf.tie`` of its leaves.
    """

    create: Create
    name: str = ""
    tie: Tie = ""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its parameters by path in the stage's tree of the module."""
        prefix = (self.name,) if self.name else ()
        return {"/".join(prefix + path): shape for path, shape in shapes_of(self.create).items()}


@dataclass(frozen=True)
class LayerRun:
    """Equal layers, one after another, that a stage holds as one stack, or one layer by itself.

    Attributes:
      create: creates one layer.
      layers: their indices in the module.
      name: their place in the stage's parameters. Names of logical leaves do not depend on it.
      stacked: whether they are a stack; if not, it is one layer.
    """

    create: Create
    layers: range
    name: str = "layers"
    stacked: bool = True

    @property
    def layer(self) -> int | None:
        """The index of the layer, where it is not in a stack."""
        return None if self.stacked else self.layers[0]


@dataclass(frozen=True)
class ModuleSlice:
    """The part of a module that one stage holds: some of its layers, and the single parts before or after them.

    Attributes:
      module: the module's name.
      runs: its layers here.
      parts: single parts held here.
      vocab_multiple: the ``vocab`` axis is padded to a multiple of this.
      axes: logical axes of parameters that are not in ``LOGICAL_AXES``, or are others there.
      depth: layers of the module, in all stages.
      ahead: paths of the parameters of single parts that stand before the layers.
    """

    module: str
    runs: tuple[LayerRun, ...] = ()
    parts: tuple[Part, ...] = ()
    vocab_multiple: int = 1
    axes: LogicalAxes = field(default_factory=dict)
    depth: int = 0
    ahead: frozenset[str] = frozenset()

    def leaves(self) -> Tree:
        """Tree of ``Leaf`` in the structure of the stage's parameters."""
        flat: dict[tuple[str, ...], Leaf] = {}
        for part in self.parts:
            for path, shape in part.shapes.items():
                from_end = (self.depth + 1) if path in self.ahead else 0
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
        """The stage's parameters in fp32, a pure function of ``key`` and the global layer indices.

        Traceable: under ``jit`` with output shardings no device holds more than its shard.
        """
        key = jax.random.fold_in(key, zlib.crc32(self.module.encode()) & 0x7FFFFFFF)
        tree: dict[str, Any] = {}
        for part in self.parts:
            seed = zlib.crc32((part.name or UNNAMED).encode()) & 0x7FFFFFFF
            values = _pure(part.create(nnx.Rngs(jax.random.fold_in(key, seed))))
            tree.update({part.name: values} if part.name else values)
        for run in self.runs:
            keys = [jax.random.fold_in(key, index) for index in run.layers]
            made = lambda key, create=run.create: _pure(create(nnx.Rngs(key)))  # noqa: E731
            tree[run.name] = jax.vmap(made)(jnp.stack(keys)) if run.stacked else made(*keys)
        return jax.tree.map(lambda leaf, value: _pad_to(value, leaf.shape), self.leaves(), tree)


def own_head(dimension: int, heads: int, stored: jax.Array) -> jax.Array:
    """The head that this rank of tp takes, of fewer heads than there are ranks.

    Its gradient is 0 in other heads, and a sum over tp has that of every rank that took a head.
    """
    axes = Axes().tp
    width = stored.shape[dimension] // heads
    head = lax.axis_index(axes) * heads // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(stored, head * width, width, dimension)


def logical_axes(path: str, shape: tuple[int, ...], own: LogicalAxes | None = None) -> tuple[str, ...]:
    """Logical axes of a parameter by its path: of names that end it, the longest in a table.

    Entries of a module's ``own`` table come first.

    Raises:
      ConfigError: the parameter is in no table, or has another number of dimensions there.
    """
    parts = path.split("/")
    for table in (own or {}, LOGICAL_AXES):
        for start in range(len(parts)):
            axes = table.get("/".join(parts[start:]))
            if axes and len(axes) == len(shape):
                return axes
    example = {parts[-1]: ("embed",) if len(shape) == 1 else ("embed", "mlp")}
    raise ConfigError(f"{path}{list(shape)}: its dimensions have no names; add them to its module's axes, as {example}")


def split_logical(leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Stage arrays to logical leaves: unstacked and unpadded. Traceable."""
    result = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        pieces = [array] if leaf.layers is None else [array[i] for i in range(len(leaf.layers))]
        for name, piece in zip(leaf.names, pieces, strict=True):
            result[name] = piece[tuple(slice(0, n) for n in leaf.logical_shape)]
    return result


def join_logical(leaves: Sequence[Leaf], named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Logical leaves to stage arrays: stacked and padded with zeros. Traceable."""
    result = []
    for leaf in leaves:
        pieces = [named[name] for name in leaf.names]
        result.append(_pad_to(pieces[0] if leaf.layers is None else jnp.stack(pieces), leaf.shape))
    return result


def shapes_of(create: Create) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    """Shapes of the parameters that ``create`` makes, by path; cached where it is a ``partial`` of a class."""
    if isinstance(create, partial) and not create.keywords:
        return _cached_shapes(create.func, create.args)
    return _traced_shapes(create)


@lru_cache(maxsize=256)
def _cached_shapes(cls: Callable[..., nnx.Module], args: tuple[Any, ...]) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    return _traced_shapes(partial(cls, *args))


def _traced_shapes(create: Create) -> Mapping[tuple[str, ...], tuple[int, ...]]:
    found: Tree = jax.eval_shape(lambda: _pure(create(nnx.Rngs(0))))
    flat: dict[tuple[str, ...], Any] = traverse_util.flatten_dict(found)
    return {path: aval.shape for path, aval in flat.items()}


def _pure(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]) if x.shape != shape else x


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
