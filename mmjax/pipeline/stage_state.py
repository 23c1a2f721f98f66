"""The once-a-step functions on the state of a stage, and its exchange with checkpoints.

``prepare`` makes the compute parameters (cast, then gathered) of the modules whose masters are not used directly.
``reduce`` turns per-dp gradient sums into shards. ``update`` clips, skips or applies on shards. A frozen module whose
storage is narrower than the compute dtype reaches the stage in its storage dtype, and ``opens`` widens it where it is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spmd import Program, Spmd
from mmjax.models.parameters import join_logical, split_logical
from mmjax.optimizer import Moments, mean_of, moments, next_mean, with_mean, with_moments
from mmjax.pipeline.loads import split_loads
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.rates import scale_updates
from mmjax.pipeline.state_shapes import MEAN, MOMENTS, State, StateShapes
from mmjax.pipeline.trees import Shared, Tree, by_name, nested, with_leaves
from mmjax.pipeline.zero import ZeroLeaf


class StageState(StateShapes):
    """The state that a stage owns between steps: masters and optimizer states."""

    # ---- once-a-step functions ---------------------------------------------------------------------------------------

    @cached_property
    def prepare(self) -> Spmd:
        """``(masters, borrowed) -> parameters``: casts before gathering, so that half the bytes travel.

        Parameters that are gathered later, for the ops that use them, stay shards.

        The arguments are ``prepare_inputs``. The parameters are a tree by module, without ``direct_modules``.
        """
        axes, zero = self.submesh.axes, {m: self.zero[m] for m in self.prepared_avals}
        stay_shards = self.submesh.layout.shards_parameters

        def cast_and_gather(zero: ZeroLeaf, shard: jax.Array) -> jax.Array:
            shard = shard.astype(self.param_dtype(zero.leaf))
            return shard if stay_shards else zero.gather(shard, axes)

        def body(masters: Tree, borrowed: Shared) -> Tree:
            return jax.tree.map(cast_and_gather, zero, with_leaves(masters, borrowed))

        specs = self.prepare_inputs(self.master_specs, self.shared_specs(self.borrowed))
        return Spmd(body, self.submesh.mesh, specs, {m: self.param_specs[m] for m in zero})

    @cached_property
    def prepare_program(self) -> Program | None:
        """``prepare``, compiled once for all callers; ``None`` if all masters are used directly."""
        if self.prepare_is_identity:
            return None
        avals = self.prepare_inputs(self.master_avals, self.shared_avals(self.borrowed))
        return Program.of(f"prepare {self.model.name}", self.prepare, list(avals))

    def compute_params(self, masters: Tree, borrowed: Shared, prepare: Callable[..., Tree] | None = None) -> Tree:
        """The compute parameters, a tree by module: parameters cast and gathered, or the masters themselves.

        Args:
          masters: masters by module.
          borrowed: borrowed leaves by name.
          prepare: the function that makes copies; by default ``prepare_program``. Inside a trace, pass ``prepare``.
        """
        direct, leaves = self.direct_weights(masters, borrowed)
        direct = with_leaves(direct, leaves) if leaves else direct
        make = prepare or self.prepare_program
        if not (make and self.prepared_avals):
            return direct
        return {**direct, **make(*self.prepare_inputs(masters, borrowed))}

    @cached_property
    def reduce(self) -> Spmd:
        """``(sums, returned) -> (gradient shards, borrowed gradients, norm rows)``.

        ``sums`` are as ``sums_avals``, gradient shards as ``grad_avals``, norm rows ``[ranks, modules]``. ``returned``
        are gradient shards of lent leaves, by name, from the stage that borrows them, and are added to the gradient.
        The borrowed gradients are shards for the owner of these leaves; they count in the owner's norm and not here.
        """
        lent, borrowed = (self.shared_specs(self._trained(shared)) for shared in (self.lent, self.borrowed))
        outs = (self.grad_specs, borrowed, self.rows_spec)
        return Spmd(self.reduced, self.submesh.mesh, (self.sums_specs, lent), outs)

    def reduced(
        self, sums: Tree, returned: Shared, before: Mapping[str, jax.Array] = MappingProxyType({})
    ) -> tuple[Tree, Shared, jax.Array]:
        """The body of ``reduce``, inside ``shard_map``; ``before`` are gradients by name that are reduced already."""
        axes, zeros, borrowed = self.submesh.axes, by_name(self.zero), self._trained(self.borrowed)

        def reduce(name: str, total: jax.Array) -> jax.Array:
            if name in before:
                return before[name]
            zero = zeros[name]
            return (zero.sum_shards if name in self.gathers else zero.reduce)(total.squeeze(0), axes)

        named = {name: reduce(name, total) for name, total in by_name(sums).items()}
        grads = nested(named)
        borrowed_grads = {name: named[name] for name in borrowed}
        grads = self._without_borrowed(with_leaves(grads, {n: named[n] + g for n, g in returned.items()}))
        rows = jnp.stack([self._squared_norm(m, grads) for m in self.modules])
        return grads, borrowed_grads, rows[None]

    def _squared_norm(self, module: str, grads: Tree) -> jax.Array:
        """This rank's part of the module's squared gradient norm; 0 for a module without gradients here."""
        zero, axes = self.owned[module] if module in grads else {}, self.submesh.axes
        norms = jax.tree.map(lambda z, g: 0 if z.leaf.is_load else z.squared_norm(g, axes), zero, grads.get(module, {}))
        return sum(jax.tree.leaves(norms), start=jnp.zeros((), jnp.float32))

    @cached_property
    def update(self) -> Spmd:
        """``(state, gradient shards, totals) -> state``.

        Gradient shards are as ``grad_avals``. ``totals`` ``[ranks, modules]`` are norm rows summed over the world, the
        same on every rank. A step whose norm is not finite leaves the state as it was, counters included.
        """

        def where_finite(finite: jax.Array, new: Tree, old: Tree) -> Tree:
            return jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)

        def body(state: State, grads: Tree, totals: jax.Array) -> State:
            norm = jnp.sqrt(jnp.sum(totals))  # one row
            finite = jnp.isfinite(norm)
            scale = jnp.clip(self.clip_norm / norm, max=1.0) if self.clip_norm else jnp.float32(1)
            new: State = {"master": dict(state["master"]), "opt": {}}
            for module, optimizer in self.optimizers.items():
                loss_grads, load_updates = split_loads(self.owned[module], grads[module])
                scaled = jax.tree.map(lambda g: g * scale, loss_grads)
                master = state["master"][module]
                updates, opt = optimizer.update(scaled, state["opt"][module], master)
                updates = scale_updates(self._configs[module], self.owned[module], updates, self.submesh.axes)
                updates = with_leaves(updates, load_updates) if load_updates else updates
                updated = optax.apply_updates(master, updates)
                if (mean := mean_of(opt)) is not None:
                    opt = with_mean(opt, next_mean(mean, updated, self._configs[module].ema))
                new["master"][module] = where_finite(finite, updated, master)
                new["opt"][module] = where_finite(finite, opt, state["opt"][module])
            return new

        specs = {"master": self.master_specs, "opt": self.opt_specs}
        # Elementwise on shards: nothing is differentiated or summed, so no axes need tracking.
        return Spmd(body, self.submesh.mesh, (specs, self.grad_specs, self.rows_spec), specs, check_vma=False)

    # ---- creation and logical leaves ---------------------------------------------------------------------------------

    def initialise(self, key: jax.Array) -> State:
        """A fresh state on the stage's devices from a ``jax.random.key``; the same values under every layout."""
        return self._fresh(key)

    @cached_property
    def _fresh(self) -> Callable[[jax.Array], State]:
        def create(key: jax.Array) -> State:
            return self._join_state({}, 0, {}, key)

        return self._jit_once(create, jax.tree.map(lambda a: a.sharding, self.state_avals))

    def to_logical(self, state: State) -> dict[str, jax.Array]:
        """Checkpoint leaves of a state, as in ``logical_avals``, in new arrays: the state may be donated afterwards."""
        return self._logical(moved(state, DEVICE))

    @cached_property
    def _logical(self) -> Callable[[State], dict[str, jax.Array]]:
        # Cached: a new function at every call would be traced and compiled at every checkpoint.
        shardings = {name: aval.sharding for name, aval in self.logical_avals().items()}
        return jax.jit(self._split_state, out_shardings=shardings)

    def is_finite(self, state: State) -> jax.Array:
        """Whether all masters and moments are finite: a boolean scalar, on every device of the stage."""
        return self._finite(moved(state, DEVICE))

    @cached_property
    def _finite(self) -> Callable[[State], jax.Array]:
        return self._jit_once(_all_finite, self.submesh.sharding(PartitionSpec()))

    def from_logical(
        self,
        named: Mapping[str, jax.Array],
        count: int,
        since: Mapping[str, int] = MappingProxyType({}),
        key: jax.Array | None = None,
    ) -> State:
        """A state from checkpoint leaves and the number of updates applied so far.

        Args:
          named: checkpoint leaves, as in ``logical_avals``; parameters may have any floating dtype. Without moments a
            module's moments are zeros; without parameters and with a key its parameters are fresh.
          count: number of updates applied by the run.
          since: value of ``count`` at which a module's moments were zeros, by module; 0 by default.
          key: see ``initialise``.

        Raises:
          KeyError: part of a module's parameters or moments is missing, or all parameters and the key are.
        """
        shardings = jax.tree.map(lambda a: a.sharding, self.state_avals)
        local = {name: named[name] for name in self.logical_avals() if name in named}

        def join(named: Mapping[str, jax.Array], key: jax.Array | None) -> State:
            return self._join_state(named, count, since, key)

        return self._jit_once(join, shardings)(local, key)

    def evaluated(self, state: State) -> State:
        """The state with running means in place of the masters of modules that have one, for prediction."""
        means = {module: mean_of(opt) for module, opt in state["opt"].items()}
        return {**state, "master": state["master"] | {m: mean for m, mean in means.items() if mean is not None}}

    def prediction_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Avals of the checkpoint leaves that ``parameters_from_logical`` takes, by name, with shardings: ``params/…``,
        and ``ema/…`` of modules that have a running mean.
        """
        avals = {name: aval for name, aval in self.logical_avals().items() if name.startswith("params/")}
        means = {f"{MEAN}/{name.removeprefix('params/')}": aval for name, aval in avals.items()}
        averaged = tuple(f"{MEAN}/{module}/" for module in self.averaged)
        return avals | {name: aval for name, aval in means.items() if name.startswith(averaged)}

    def parameters_from_logical(self, named: Mapping[str, jax.Array]) -> State:
        """A state for prediction: masters, and ``{}`` in place of optimizer states.

        Masters are from the ``ema/…`` leaves of modules that have them and are to have them, else ``params/…``.

        Raises:
          KeyError: a parameter of the stage is missing.
        """
        shardings = jax.tree.map(lambda a: a.sharding, self.master_avals)
        local = {name: named[name] for name in self.prediction_avals() if name in named}

        def join(named: Mapping[str, jax.Array]) -> Tree:
            return {m: self._join(MEAN if self._has(MEAN, m, named) else "params", m, named) for m in self.owned}

        return {"master": self._jit_once(join, shardings)(local), "opt": {}}

    def _jit_once(self, fn: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """A program that runs once, at a start: compiled with options for short compilation."""
        options = jax_compat.compiler_options(self.submesh.mesh.devices.flat[0].platform, once=True)
        return jax.jit(fn, out_shardings=shardings, compiler_options=options)

    def _split_state(self, state: State) -> dict[str, jax.Array]:
        result = self._split("params", self.owned, state["master"])
        for module, opt in state["opt"].items():
            adam = moments(opt)
            assert adam is not None
            for kind, moment in zip(MOMENTS, (adam.m, adam.v), strict=True):
                result |= self._split(kind, self.owned[module], moment)
            if (mean := mean_of(opt)) is not None:
                result |= self._split(MEAN, self.owned[module], mean)
        return result

    def _join_state(
        self, named: Mapping[str, jax.Array], count: int, since: Mapping[str, int], key: jax.Array | None
    ) -> State:
        """The state of ``from_logical``. Traceable."""
        masters = {m: self._join("params", m, named) for m in self.owned if self._has("params", m, named)}
        if len(masters) < len(self.owned):
            if key is None:
                raise KeyError(f"no parameters of {', '.join(sorted(self.owned.keys() - masters))}, and no key")
            stack = self.submesh.mesh.devices.flat[0].platform != "cpu"
            slices = [part for part in self.model.slices if part.module not in masters]
            fresh = {part.module: part.initialise(key, stack=stack) for part in slices}
            fresh = self._without_borrowed(fresh)
            masters |= {m: jax.tree.map(self._padded, self.owned[m], fresh[m]) for m in fresh}
        opts, updates = {}, jnp.asarray(count, jnp.int32)
        for module, optimizer in self.optimizers.items():
            state = optimizer.init(masters[module])
            adam = moments(state)
            assert adam is not None
            if self._has(MOMENTS[0], module, named):
                m, v = (self._join(kind, module, named) for kind in MOMENTS)
                adam = Moments(m=m, v=v, count=updates - since.get(module, 0))
            state = with_moments(state, adam, updates)
            if self._has(MEAN, module, named):
                state = with_mean(state, self._join(MEAN, module, named))
            elif module in self.averaged:  # arrays of its own, since both are donated
                state = with_mean(state, jax.tree.map(jnp.copy, masters[module]))
            opts[module] = state
        return {"master": masters, "opt": opts}

    def _has(self, kind: str, module: str, named: Mapping[str, jax.Array]) -> bool:
        """Whether ``named`` has a leaf of this kind of the module."""
        return any(
            f"{kind}/{name}" in named for zero in jax.tree.leaves(self.owned[module]) for name in zero.leaf.names
        )

    def _split(self, kind: str, zero: Tree, arrays: Tree) -> dict[str, jax.Array]:
        logical = split_logical([z.leaf for z in jax.tree.leaves(zero)], jax.tree.leaves(arrays))
        return {f"{kind}/{name}": x for name, x in logical.items()}

    def _join(self, kind: str, module: str, named: Mapping[str, jax.Array]) -> Tree:
        zeros, structure = jax.tree.flatten(self.owned[module])
        logical = {name: named[f"{kind}/{name}"] for z in zeros for name in z.leaf.names}
        arrays = join_logical([z.leaf for z in zeros], logical)
        return jax.tree.unflatten(structure, [self._padded(z, x) for z, x in zip(zeros, arrays, strict=True)])

    def _padded(self, zero: ZeroLeaf, x: jax.Array) -> jax.Array:
        """A whole array in the dtype and padded shape of a master or moment."""
        return zero.pad(x.astype(self.master_dtype(zero.leaf)))


def _all_finite(state: State) -> jax.Array:
    floating = (leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact))
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floating]).all()
