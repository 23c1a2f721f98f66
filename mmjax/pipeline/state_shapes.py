"""The leaves of a stage's state, and their shapes and shardings.

The masters and the optimizer's moments are sharded over dp (ZeRO-1, see ``ZeroLeaf``). Masters are float32; those of a
frozen module, which nothing updates, are in the dtype of its storage. The compute parameters of a module are made by
casting and gathering its masters, or are the masters themselves. Under ``Layout.shards_parameters`` they are shards
like the masters, and under ``Layout.scatters_gradients`` the sums of their gradients are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mmjax.mesh.spmd import with_sharding
from mmjax.mesh.submesh import Submesh
from mmjax.models.handles import Open
from mmjax.models.parameters import Leaf
from mmjax.models.stage_model import StageModel
from mmjax.optimizer import learning_rate, make_optimizer
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.gathers import Gather
from mmjax.pipeline.state_bytes import param_dtype
from mmjax.pipeline.trees import Shared, Tree, by_name, nested
from mmjax.pipeline.zero import Reduction, ZeroLeaf, shard_axes

State = dict[str, Any]
"""``{"master": {module: tree}, "opt": {module: optax state}}``; a frozen module has no ``opt``, and its masters are its
only copy, in the dtype of its storage."""
MOMENTS = ("adam_m", "adam_v")
"""Kinds of checkpoint leaves that trained modules have beside ``params``."""


MEAN = "ema"
"""The kind of checkpoint leaves of a running mean of the parameters (`Optimizer.ema`)."""


def module_of_moment(name: str) -> str:
    """The module of a checkpoint leaf that is a moment: "llm" for "adam_m/llm/embed", "" for "params/llm/embed"."""
    kind, _, path = name.partition("/")
    return path.partition("/")[0] if kind in MOMENTS else ""


def group_of_leaf(name: str) -> str:
    """The group of a checkpoint leaf that a state may lack as a whole: its module for a moment, "ema/llm" for a running
    mean, and "" for a parameter, which none lacks.
    """
    kind, _, path = name.partition("/")
    return f"{MEAN}/{path.partition('/')[0]}" if kind == MEAN else module_of_moment(name)


@dataclass(frozen=True)
class Widened:
    """A cast of stored parameters to a wider dtype, which is exact; equal casts are equal."""

    dtype: Any

    def __call__(self, stored: jax.Array) -> jax.Array:
        """The parameter in ``dtype``."""
        return stored.astype(self.dtype)


class StateShapes:
    """Leaves of one stage's state, with their shapes and shardings.

    Attributes:
      leaves: ``Leaf`` tree by module.
      zero: ``ZeroLeaf`` tree by module.
      owned: ``zero`` without borrowed leaves: the leaves of the state.
      lent, borrowed: leaves that are shared with another stage of the module, by name.
      trainable: modules of this stage that are trained.
      master_dtypes: dtype of the masters by module: float32, or the storage dtype of a frozen module.
      param_dtypes: dtype of the compute parameters by module: the compute dtype, or a narrower storage dtype.
      direct_modules: modules whose masters are used directly as compute parameters, without a copy.
    """

    def __init__(
        self,
        model: StageModel,
        submesh: Submesh,
        *,
        optimizers: Mapping[str, OptimizerConfig],
        modules: Sequence[str],
        total_steps: int,
        dtype: Any,
        clip_norm: float,
        overlap_grad_reduce: bool = False,
    ):
        """Plans the state.

        Args:
          model: the stage.
          submesh: its devices.
          optimizers: optimizer configuration by module.
          modules: all modules of the run; their order numbers the columns of the norm rows.
          total_steps: length of the learning rate schedules.
          dtype: dtype of the compute parameters.
          clip_norm: largest global gradient norm; 0 switches clipping off.
          overlap_grad_reduce: whether the last backward of a step reduces the gradients, where it can.
        """
        self.model, self.submesh, self.dtype, self.clip_norm = model, submesh, dtype, clip_norm
        self.modules = tuple(modules)
        self.leaves = {part.module: part.leaves() for part in model.slices}
        self.zero: dict[str, Tree] = jax.tree.map(lambda leaf: ZeroLeaf.plan(leaf, submesh), self.leaves)
        self.lent, self.borrowed = self._shared("lent"), self._shared("borrowed")
        self.owned = self._without_borrowed(self.zero)
        self.trainable = frozenset(m for m in self.leaves if not optimizers[m].frozen)
        compute = str(jnp.dtype(dtype))
        self.master_dtypes = {m: jnp.dtype(optimizers[m].held_in(compute)) for m in self.leaves}
        self.param_dtypes = {m: jnp.dtype(param_dtype(str(d), compute)) for m, d in self.master_dtypes.items()}
        same_dtype = (m for m, master in self.master_dtypes.items() if master == self.param_dtypes[m])
        self.direct_modules = frozenset(same_dtype if self.has_whole_masters or self._has_shards else ())
        decayed = {m: jax.tree.map(lambda zero: zero.leaf.decayed, self.owned[m]) for m in sorted(self.trainable)}
        self.optimizers = {m: make_optimizer(optimizers[m], total_steps, decayed[m]) for m in decayed}
        self.learning_rates = {m: learning_rate(optimizers[m], total_steps) for m in sorted(self.trainable)}
        self._configs = dict(optimizers)
        self._overlap_grad_reduce = overlap_grad_reduce
        self.averaged = frozenset(m for m in self.leaves if optimizers[m].ema)

    # ---- shapes and shardings ----------------------------------------------------------------------------------------

    @cached_property
    def param_specs(self) -> dict[str, Tree]:
        """``PartitionSpec`` of each compute parameter: a tree by module."""
        axes = self.submesh.axes
        return jax.tree.map(lambda zero: zero.spec(axes) if self._has_shards else zero.leaf.spec(axes), self.zero)

    @cached_property
    def param_avals(self) -> dict[str, Tree]:
        """``ShapeDtypeStruct``, with its sharding, of each compute parameter: a tree by module."""

        def shape(zero: ZeroLeaf) -> jax.ShapeDtypeStruct:
            param_shape = zero.shape if self._has_shards else zero.leaf.shape
            return jax.ShapeDtypeStruct(param_shape, self.param_dtype(zero.leaf))

        return self._avals(shape, self.zero, self.param_specs)

    @cached_property
    def opens(self) -> dict[str, Open]:
        """The functions that widen parameters of a narrower dtype to the compute dtype, by name such as "llm/embed"."""
        narrow = {m: leaves for m, leaves in self.leaves.items() if self.param_dtypes[m] != jnp.dtype(self.dtype)}
        names = [name for name, leaf in by_name(narrow).items() if not leaf.in_fp32]
        return dict.fromkeys(names, Widened(jnp.dtype(self.dtype)))

    @cached_property
    def gathers(self) -> dict[str, Gather]:
        """The gathers of a layer's parameter from shards, by name: of parameters that are shards, or whose sums are."""
        if not self.submesh.layout.scatters_gradients:
            return {}
        axes = self.submesh.axes
        gathers = {
            name: zero.layer_gather(axes, trained=zero.leaf.module in self.trainable)
            for name, zero in by_name(self.zero).items()
        }
        return {name: gather for name, gather in gathers.items() if gather}

    @cached_property
    def reduces_in_backward(self) -> bool:
        """Whether a step's last backward of the stage can reduce its gradients.

        They are whole on several ranks, that is, matrices; layers are not stacked; no other stage has part of a
        gradient. Not with kernels of convolutions, whose sums XLA would copy.
        """
        layout, spread = self.submesh.layout, self.submesh.spread
        trained = [zero.leaf for zero in jax.tree.leaves(self.zero) if zero.leaf.module in self.trainable]
        specs = [leaf.spec(self.submesh.axes) for leaf in trained if len(leaf.shape) > 1]
        ranks = (self.submesh.mesh.shape[axis] for spec in specs for axis in spread.gradient_axes(spec))
        is_shared = any(count > 1 for count in ranks) and not layout.scatters_gradients
        is_stacked = any(leaf.layers is not None for leaf in trained)
        has_ties = bool(self._trained(self.lent) or self._trained(self.borrowed))
        has_convolutions = any(len(leaf.shape) > 3 for leaf in trained)
        return self._overlap_grad_reduce and is_shared and not (has_ties or is_stacked or has_convolutions)

    @cached_property
    def reductions(self) -> dict[str, Reduction]:
        """The sum of each parameter's gradient over ranks, by name."""
        return {name: zero.reduction(self.submesh.axes) for name, zero in by_name(self.zero).items()}

    @property
    def scattered(self) -> frozenset[str]:
        """Names of the trained parameters that are whole, and whose sums of gradients are shards."""
        names = () if self.submesh.layout.gathers_layers else self.gathers
        return frozenset(name for name in names if name.partition("/")[0] in self.trainable)

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes on a rank of the largest layer's sharded parameters, when they are gathered; 0 without ``gathers``."""
        sizes: dict[tuple[str, int], int] = {}
        zeros, axes = by_name(self.zero), self.submesh.axes
        for zero in (zeros[name] for name in self.gathers if zeros[name].leaf.layer is not None):
            local = self.submesh.sharding(zero.leaf.spec(axes)).shard_shape(zero.shape)
            key = zero.leaf.module, zero.leaf.layer or 0
            sizes[key] = sizes.get(key, 0) + math.prod(local) * self.param_dtypes[zero.leaf.module].itemsize
        return max(sizes.values(), default=0)

    def sharers(self, zero: ZeroLeaf) -> int:
        """The number of ranks that share a leaf's master: those of an optimizer instance which have the same part."""
        return math.prod(self.submesh.mesh.shape[axis] for axis in shard_axes(zero.leaf, self.submesh.axes))

    @property
    def _has_shards(self) -> bool:
        return self.submesh.layout.shards_parameters

    @cached_property
    def master_specs(self) -> dict[str, Tree]:
        """``PartitionSpec`` of each owned master: a tree by module."""
        return jax.tree.map(lambda zero: zero.spec(self.submesh.axes), self.owned)

    @cached_property
    def master_avals(self) -> dict[str, Tree]:
        """``ShapeDtypeStruct``, with its sharding, of each owned master, padded: a tree by module."""
        return self._avals(self._master_shape, self.owned, self.master_specs)

    def _master_shape(self, zero: ZeroLeaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(zero.shape, self.master_dtype(zero.leaf))

    def master_dtype(self, leaf: Leaf) -> Any:
        """The dtype of the leaf's master."""
        return jnp.dtype(jnp.float32) if leaf.in_fp32 else self.master_dtypes[leaf.module]

    def param_dtype(self, leaf: Leaf) -> Any:
        """The dtype of the leaf's compute parameter."""
        return jnp.dtype(jnp.float32) if leaf.in_fp32 else self.param_dtypes[leaf.module]

    def shared_specs(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, PartitionSpec]:
        """``PartitionSpec`` of ``lent`` or ``borrowed`` masters, or of their reduced gradients, by name."""
        return {name: zero.spec(self.submesh.axes) for name, zero in shared.items()}

    def shared_avals(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, jax.ShapeDtypeStruct]:
        """``ShapeDtypeStruct``, with its sharding, of the same arrays as ``shared_specs``, by name."""
        shapes = {name: self._master_shape(zero) for name, zero in shared.items()}
        return with_sharding(shapes, self.submesh.mesh, self.shared_specs(shared))

    @cached_property
    def opt_specs(self) -> dict[str, Tree]:
        """``PartitionSpec`` of the optimizer states, by trained module: moments as masters, counters on every rank."""
        result: dict[str, Tree] = {}

        def collect_specs(masters: Tree) -> None:
            for module, optimizer in self.optimizers.items():
                result[module] = optax.tree_utils.tree_map_params(
                    optimizer,
                    lambda _, spec: spec,
                    optimizer.init(masters[module]),
                    self.master_specs[module],
                    transform_non_params=lambda _: PartitionSpec(),
                )

        jax.eval_shape(collect_specs, self.master_avals)  # traced, so that optax's counters are on no device
        return result

    @cached_property
    def opt_avals(self) -> dict[str, Tree]:
        """``ShapeDtypeStruct``, with its sharding, of the optimizer states, by trained module."""
        shapes = {m: jax.eval_shape(o.init, self.master_avals[m]) for m, o in self.optimizers.items()}
        return with_sharding(shapes, self.submesh.mesh, self.opt_specs)

    @cached_property
    def state_avals(self) -> State:
        """``ShapeDtypeStruct``, with its sharding, of each array of the state."""
        return {"master": self.master_avals, "opt": self.opt_avals}

    @cached_property
    def grad_specs(self) -> dict[str, Tree]:
        """``PartitionSpec`` of the reduced gradients of owned leaves, by trained module: as ``master_specs``."""
        return {m: self.master_specs[m] for m in sorted(self.trainable)}

    @property
    def grad_avals(self) -> dict[str, Tree]:
        """``ShapeDtypeStruct`` of the reduced gradients of owned leaves, by trained module: as ``master_avals``."""
        return {m: self.master_avals[m] for m in sorted(self.trainable)}

    @cached_property
    def sums_specs(self) -> dict[str, Tree]:
        """``PartitionSpec`` of the gradient sums, by trained module: one slice per rank with different tokens."""

        def spec(zero: ZeroLeaf) -> PartitionSpec:
            return self.submesh.spread.gradient_sums(self._summed_spec(zero))

        return {m: jax.tree.map(spec, self.zero[m]) for m in sorted(self.trainable)}

    @cached_property
    def sums_avals(self) -> dict[str, Tree]:
        """``ShapeDtypeStruct`` of the gradient sums by trained module: float32 ``[dp·cp, *leaf.shape]``.

        With sequence parallelism those of leaves that tp does not split are ``[dp·cp·tp, *leaf.shape]``. Sums that are
        shards are ``[instances, *zero.shape]``, times tp likewise.
        """

        def shape(zero: ZeroLeaf) -> jax.ShapeDtypeStruct:
            axes = self.submesh.spread.gradient_axes(self._summed_spec(zero))
            parts = math.prod(self.submesh.mesh.shape[axis] for axis in axes)
            sum_shape = zero.shape if self.submesh.layout.scatters_gradients else zero.leaf.shape
            return jax.ShapeDtypeStruct((parts, *sum_shape), jnp.float32)

        return self._avals(shape, {m: self.zero[m] for m in sorted(self.trainable)}, self.sums_specs)

    def _summed_spec(self, zero: ZeroLeaf) -> PartitionSpec:
        """``PartitionSpec`` of the sums of a leaf's gradients, without their first dimension."""
        axes = self.submesh.axes
        return zero.spec(axes) if self.submesh.layout.scatters_gradients else zero.leaf.spec(axes)

    @property
    def rows_spec(self) -> PartitionSpec:
        """Sharding of the norm rows: one row per rank."""
        return self.submesh.spread.per_rank

    @property
    def rows_aval(self) -> jax.ShapeDtypeStruct:
        """Aval of the norm rows ``[ranks, modules]``: each rank's part of the modules' squared gradient norms."""
        shape = (len(self.submesh.ranks), len(self.modules))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.submesh.sharding(self.rows_spec))

    @property
    def reduce_avals(self) -> tuple[Any, ...]:
        """Avals of the arguments of ``reduce``: the gradient sums, and by name the gradients of trained lent leaves."""
        return self.sums_avals, self.shared_avals(self._trained(self.lent))

    def logical_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Avals of the checkpoint leaves of this stage, by name, with shardings.

        Names are such as ``params/llm/layers/003/attn/q``, for trained modules also ``adam_m/…`` and ``adam_v/…``, and
        ``ema/…`` where they have a running mean.
        """
        result = {}
        for zero in jax.tree.leaves(self.owned):
            sharding = self.submesh.sharding(zero.logical_spec(self.submesh.axes))
            aval = jax.ShapeDtypeStruct(zero.leaf.logical_shape, self.master_dtype(zero.leaf), sharding=sharding)
            moments = MOMENTS if zero.leaf.module in self.trainable else ()  # float32, as a trained module's masters
            means = (MEAN,) if moments and zero.leaf.module in self.averaged else ()
            result |= {f"{kind}/{name}": aval for name in zero.leaf.names for kind in ("params", *moments, *means)}
        return result

    # ---- masters used directly as compute parameters -----------------------------------------------------------------

    @property
    def has_whole_masters(self) -> bool:
        """Whether masters are whole on every dp rank, not sharded."""
        return self.submesh.layout.optimizer_shards == 1

    @property
    def reduces_in_place(self) -> bool:
        """Whether the reduced gradients have the size of the sums on every rank, which they overwrite."""
        return self.has_whole_masters or self.submesh.layout.scatters_gradients

    @property
    def prepare_is_identity(self) -> bool:
        """Whether all masters are used directly as compute parameters, so that nothing is prepared."""
        return not self.prepared_avals

    @cached_property
    def prepared_avals(self) -> dict[str, Tree]:
        """Avals of the compute parameters that ``prepare`` makes: those of all modules but the ``direct_modules``."""
        return {m: avals for m, avals in self.param_avals.items() if m not in self.direct_modules}

    def direct_weights(self, masters: Tree, borrowed: Shared) -> tuple[Tree, Shared]:
        """Selects masters, by module, and borrowed leaves, by name, that are used directly as compute parameters."""
        return self._select(masters, borrowed, direct=True)

    def prepare_inputs(self, masters: Tree, borrowed: Shared) -> tuple[Tree, Shared]:
        """Selects masters, by module, and borrowed leaves, by name, that ``prepare`` takes: not used directly."""
        return self._select(masters, borrowed, direct=False)

    def _select(self, masters: Tree, borrowed: Shared, *, direct: bool) -> tuple[Tree, Shared]:
        def selected(module: str) -> bool:
            return (module in self.direct_modules) == direct

        leaves = {name: x for name, x in borrowed.items() if selected(self.borrowed[name].leaf.module)}
        return {module: tree for module, tree in masters.items() if selected(module)}, leaves

    # ---- selections of leaves ----------------------------------------------------------------------------------------

    def _shared(self, tie: str) -> dict[str, ZeroLeaf]:
        return {name: zero for name, zero in by_name(self.zero).items() if zero.leaf.tie == tie}

    def _trained(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, ZeroLeaf]:
        return {name: zero for name, zero in shared.items() if zero.leaf.module in self.trainable}

    def _without_borrowed(self, tree: Tree) -> Tree:
        return nested({name: x for name, x in by_name(tree).items() if name not in self.borrowed})

    def _avals(self, fn: Any, tree: Tree, specs: Tree) -> Tree:
        return with_sharding(jax.tree.map(fn, tree), self.submesh.mesh, specs)
