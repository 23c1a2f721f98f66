"""Parameters of a stage: their logical leaves, sharding, initial values and names.

Modules are NNX classes that only create parameters. Each parameter is created with the names of its dimensions,
``nnx.Param(value, dims=("embed", "mlp"))``, from which its sharding follows.

A stage has a nested dict of parameters for each module: the arrays of ``layers`` are stacked over the stage's layers,
others are single. Several groups of layers are several stacks; layers that are not stacked are entries of their own. A
*logical leaf* is one parameter of one layer without padding; its name does not depend on the stage or the layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter, itemgetter
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

KV_HEADS = "kv_heads"
"""The dimension of key/value heads. tp splits it like "heads" unless it has more ranks than there are such heads. Then
each rank has all of them and uses one.
"""


@dataclass(frozen=True)
class Declaration:
    """A parameter of one layer or part, as ``nnx.Param(value, dims=…)`` declares it.

    Attributes:
      shape: the shape of its value, without padding.
      dims: names of its dimensions. tp splits "heads", "kv_heads", "mlp" and "vocab" (see ``spread.TP_DIMENSIONS``).
      kv_heads: the number of heads in its dimension ``KV_HEADS``, if it has one.
      load_rate: how much it moves in a step, if its gradient is the load of each expert along the last dimension (see
        ``pipeline.loads``); ``None`` for all other parameters.
      in_fp32: whether it is fp32 in computations of every dtype.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    kv_heads: int = 0
    load_rate: float | None = None
    in_fp32: bool = False

    @classmethod
    def of(cls, name: str, param: nnx.Param[Any]) -> Declaration:
        """The declaration of a parameter, from the metadata "dims", "kv_heads", "load_rate" and "in_fp32"; ``name`` is
        for errors.

        Raises:
          ConfigError: ``dims`` do not name each dimension, or ``kv_heads`` does not divide its dimension.
        """
        shape, dims = param.shape, param.get_metadata("dims", None)
        kv_heads = param.get_metadata("kv_heads", 0)
        if not isinstance(dims, tuple) or len(dims) != len(shape):
            example = ("embed", "mlp", *("head",) * len(shape))[: len(shape)]
            fix = f"has to name each dimension, as in nnx.Param(value, dims={example})"
            raise ConfigError(f"{name}{list(shape)}: dims={dims!r} {fix}")
        if KV_HEADS in dims and (kv_heads < 1 or shape[dims.index(KV_HEADS)] % kv_heads):
            fix = f"has to be the number of key/value heads, as in nnx.Param(value, dims={dims}, kv_heads=2)"
            raise ConfigError(f"{name}{list(shape)}: kv_heads={kv_heads!r} {fix}")
        in_fp32 = param.get_metadata("in_fp32", False)
        return cls(shape, dims, kv_heads, param.get_metadata("load_rate", None), in_fp32)

    def dims_under(self, tp: int) -> tuple[str, ...]:
        """``dims`` with "heads" in place of ``KV_HEADS`` unless tp has more ranks than there are such heads."""
        return tuple("heads" if dim == KV_HEADS and tp <= self.kv_heads else dim for dim in self.dims)


@dataclass(frozen=True)
class Leaf:
    """One array of a stage.

    Attributes:
      module: owning module, such as ``llm``.
      path: path inside the stage's tree of the module, such as ``layers/attn/q``.
      layers: global indices of the stacked layers; ``None`` for a single parameter.
      logical_shape: shape of one logical leaf.
      shape: shape of the stage's array: stacked, vocabulary padded.
      dims: names of the dimensions of one logical leaf, by ``Declaration.dims_under``.
      tie: whether another stage shares it; a borrowed leaf is neither stored, updated nor saved here.
      layer: global index of its layer, where layers are not stacked.
      from_end: distance of each logical leaf from the module's end: 0 behind the layers, 1 in the last layer, and so
        on, up to the number of layers + 1 before the first layer.
      kv_heads: the number of heads in the dimension ``KV_HEADS``, if it has one.
      load_rate: see ``Declaration``; such a leaf is small, fp32 in every dtype, and whole on every rank.
      in_fp32: see ``Declaration``; so are leaves of loads.
    """

    module: str
    path: str
    layers: tuple[int, ...] | None
    logical_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tie: Tie = ""
    layer: int | None = None
    from_end: tuple[int, ...] = (0,)
    kv_heads: int = 0
    load_rate: float | None = None
    in_fp32: bool = False

    @property
    def is_load(self) -> bool:
        """Whether its gradient is a load."""
        return self.load_rate is not None

    def spec(self, axes: Axes) -> PartitionSpec:
        """Sharding of the stage's array over ``axes.tp``; the stacking dimension is not sharded."""
        return Spread.of(axes).parameter(self.dims, stacked=self.layers is not None)

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
    def declarations(self) -> dict[str, Declaration]:
        """Declarations of the parameters by path in the stage's tree of the module, such as "patch/kernel"."""
        prefix = f"{self.name}/" if self.name else ""
        return {f"{prefix}{path}": declaration for path, declaration in declarations(self.create).items()}


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
      tp: the tp degree. The dimension "vocab" is padded to a multiple of it.
      depth: the number of the module's layers in all stages.
      before_layers: paths of the parameters of single parts before the layers.
    """

    module: str
    runs: tuple[LayerRun, ...] = ()
    parts: tuple[Part, ...] = ()
    tp: int = 1
    depth: int = 0
    before_layers: frozenset[str] = frozenset()

    def leaves(self) -> Tree:
        """A nested dict of ``Leaf`` with the structure of the stage's parameters, such as {"layers": {"attn": {"q":
        leaf}}}.

        Raises:
          ConfigError: a parameter does not name its dimensions.
        """
        flat: dict[str, Leaf] = {}
        for part in self.parts:
            for path, declaration in part.declarations.items():
                from_end = (self.depth + 1) if path in self.before_layers else 0
                flat[path] = replace(self._leaf(path, None, declaration), tie=part.tie, from_end=(from_end,))
        for run in self.runs:
            for path, declaration in declarations(run.create).items():
                stack = tuple(run.layers) if run.stacked else None
                leaf = self._leaf(f"{run.name}/{path}", stack, declaration)
                from_end = tuple(self.depth - layer for layer in run.layers)
                flat[leaf.path] = replace(leaf, layer=run.layer, from_end=from_end)
        return traverse_util.unflatten_dict(flat, sep="/")

    def _leaf(self, path: str, layers: tuple[int, ...] | None, declaration: Declaration) -> Leaf:
        shape, dims = declaration.shape, declaration.dims_under(self.tp)
        padded = tuple(_round_up(n, self.tp) if dim == "vocab" else n for n, dim in zip(shape, dims, strict=True))
        stacked = padded if layers is None else (len(layers), *padded)
        return Leaf(
            self.module,
            path,
            layers,
            shape,
            stacked,
            dims,
            kv_heads=declaration.kv_heads,
            load_rate=declaration.load_rate,
            in_fp32=declaration.in_fp32 or declaration.load_rate is not None,
        )

    def initialise(self, key: jax.Array, *, stack: bool = False) -> Tree:
        """The stage's parameters in fp32, a pure function of ``key`` and the global layer indices, in the structure of
        ``leaves``.

        Traceable: under ``jit`` with output shardings no device holds more than its shard.

        Args:
          key: a ``jax.random.key``.
          stack: whether equal layers are created as one stack and then taken apart, if they are not stacked. A GPU's
            compiler takes seconds for kernels of random numbers, and makes some for each layer otherwise.
        """
        key = jax.random.fold_in(key, zlib.crc32(self.module.encode()) & 0x7FFFFFFF)
        tree: dict[str, Any] = {}
        for part in self.parts:
            seed = zlib.crc32((part.name or UNNAMED).encode()) & 0x7FFFFFFF
            values = _params_of(part.create(nnx.Rngs(jax.random.fold_in(key, seed))))
            tree.update({part.name: values} if part.name else values)
        if stack:
            tree |= self._taken_from_stacks(key)
        for run in () if stack else self.runs:
            keys = [jax.random.fold_in(key, index) for index in run.layers]
            create_layer = partial(_create_params, run.create)
            tree[run.name] = jax.vmap(create_layer)(jnp.stack(keys)) if run.stacked else create_layer(*keys)
        return jax.tree.map(lambda leaf, value: _pad_to(value, leaf.shape), self.leaves(), tree)

    def _taken_from_stacks(self, key: jax.Array) -> dict[str, Tree]:
        """The parameters of the layers by name of their run; equal layers are created together."""
        tree: dict[str, Tree] = {}
        for create, group in groupby(self.runs, key=attrgetter("create")):
            runs = tuple(group)
            layers = [index for run in runs for index in run.layers]
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.array(layers))  # in turn they make one large kernel
            stack = jax.vmap(partial(_create_params, create))(keys)
            # Without the barrier each slice would compute the numbers of its layer.
            stack = jax.tree.map(lax.optimization_barrier, stack)
            for run in runs:
                first = layers.index(run.layers[0])
                place = slice(first, first + len(run.layers)) if run.stacked else first
                tree[run.name] = jax.tree.map(itemgetter(place), stack)
        return tree


def head_of_rank(dimension: int, heads: int, stored: jax.Array) -> jax.Array:
    """The key/value head that this tp rank uses, where there are fewer heads than ranks; inside ``shard_map``.

    It is ``stored`` with 1 / ``heads`` of the size in ``dimension``. Rank r of tp uses the head r · heads // tp.

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


def split_logical(leaves: Sequence[Leaf], arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Splits a stage's arrays into logical leaves by name, such as "llm/layers/003/attn/q". Traceable.

    ``leaves`` are ``jax.tree.leaves(s.leaves())`` of a ``ModuleSlice`` s; ``arrays`` are in the same order. Stacking
    and padding are removed.
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

    Args:
      leaves: the stage's leaves, as ``jax.tree.leaves(s.leaves())`` gives them for a ``ModuleSlice`` s.
      named: arrays without stacking and padding by name, such as "llm/layers/003/attn/q"; others are not read.

    Raises:
      KeyError: a leaf is missing in ``named``.
    """
    result = []
    for leaf in leaves:
        pieces = [named[name] for name in leaf.names]
        result.append(_pad_to(pieces[0] if leaf.layers is None else jnp.stack(pieces), leaf.shape))
    return result


def declarations(create: Create) -> Mapping[str, Declaration]:
    """Declarations of the parameters that ``create`` creates, by path such as "attn/q", sorted, without
    creating them.

    ``create`` builds an NNX object from ``nnx.Rngs``, such as ``create`` of a ``Part``. A ``Declaration`` has
    ``shape``, ``dims`` and ``kv_heads``. Cached for a ``partial`` without keywords.

    Raises:
      ConfigError: a parameter's ``dims`` do not name each dimension, or ``kv_heads`` does not divide its dimension.
    """
    if isinstance(create, partial) and not create.keywords:
        return _cached_declarations(create.func, create.args)
    return _traced_declarations(create)


@lru_cache(maxsize=256)
def _cached_declarations(cls: Callable[..., nnx.Module], args: tuple[Any, ...]) -> Mapping[str, Declaration]:
    return _traced_declarations(partial(cls, *args))


def _traced_declarations(create: Create) -> Mapping[str, Declaration]:
    result: dict[str, Declaration] = {}

    def trace() -> None:
        module = create(nnx.Rngs(0))
        for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            names = [str(name) for name in path]
            result["/".join(names)] = Declaration.of(".".join((type(module).__name__, *names)), param)

    jax.eval_shape(trace)
    return result


def _create_params(create: Create, key: jax.Array) -> Tree:
    return _params_of(create(nnx.Rngs(key)))


def _params_of(module: nnx.Module) -> Tree:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]) if x.shape != shape else x


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
