"""The state that a stage owns between steps, and the once-a-step functions on it: prepare, reduce, update.

The masters and the optimizer's moments are sharded over dp (ZeRO-1, see ``ZeroLeaf``). Masters are float32; those of a
frozen module, which nothing updates, are in the dtype that it is held in. ``prepare`` makes the compute parameters
(cast, then gathered) of the modules whose masters do not serve as they are; ``reduce`` turns per-dp gradient sums into
shards; ``update`` clips, skips or applies on shards. What is held in less than the compute dtype is given to the stage
as it is held, and widened by ``opens`` where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spmd import Program, Spmd, with_sharding
from mmjax.mesh.submesh import Submesh
from mmjax.models.handles import Open
from mmjax.models.parameters import Leaf, join_logical, split_logical
from mmjax.models.stage_model import StageModel
from mmjax.optimizer import Moments, learning_rate, make_optimizer, moments, with_moments
from mmjax.optimizer_config import OptimizerConfig
from mmjax.pipeline.offload import DEVICE, moved
from mmjax.pipeline.rates import at_own_rates
from mmjax.pipeline.state_bytes import given_in
from mmjax.pipeline.trees import Shared, Tree, by_name, nested, with_leaves
from mmjax.pipeline.zero import ZeroLeaf

State = dict[str, Any]
"""``{"master": {module: tree}, "opt": {module: optax state}}``; a frozen module has no ``opt``, and its masters are the
one copy of it, in the dtype that it is held in."""
MOMENTS = ("adam_m", "adam_v")
"""Kinds of checkpoint leaves that trained modules have beside ``params``."""


def module_of_moment(name: str) -> str:
    """The module of a checkpoint leaf that is a moment; "" for a parameter."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[0] if kind in MOMENTS else ""


class StageState:
    """Shapes, shardings and once-a-step functions of one stage's state.

    Attributes:
      leaves: ``Leaf`` tree by module.
      zero: ``ZeroLeaf`` tree by module.
      owned: ``zero`` without borrowed leaves: the leaves of the state.
      lent, borrowed: leaves that are shared with another stage of the module, by name.
      trainable: modules of this stage that are trained.
      held_in: dtype of the masters by module: float32, and of frozen modules what ``OptimizerConfig.held_in`` says.
      given_in: dtype of the compute parameters by module: the compute dtype, or a narrower one that it is held in.
      serving: modules whose masters are computed with as they are.
    """

    def __init__(
        self,
        model: StageModel,
        submesh: Submesh,
        optimizers: Mapping[str, OptimizerConfig],
        modules: Sequence[str],
        total_steps: int,
        dtype: Any,
        clip_norm: float,
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
        """
        self.model, self.submesh, self.dtype, self.clip_norm = model, submesh, dtype, clip_norm
        self.modules = tuple(modules)
        self.leaves = {part.module: part.leaves() for part in model.slices}
        plan = lambda leaf: ZeroLeaf.plan(leaf, submesh)  # noqa: E731
        self.zero: dict[str, Tree] = jax.tree.map(plan, self.leaves)
        self.lent, self.borrowed = self._shared("lent"), self._shared("borrowed")
        self.owned = self._without_borrowed(self.zero)
        self.trainable = frozenset(m for m in self.leaves if not optimizers[m].frozen)
        name = str(jnp.dtype(dtype))
        self.held_in = {m: jnp.dtype(optimizers[m].held_in(name)) for m in self.leaves}
        self.given_in = {m: jnp.dtype(given_in(str(held), name)) for m, held in self.held_in.items()}
        serve = {m for m, held in self.held_in.items() if held == self.given_in[m]} if self.whole else ()
        self.serving = frozenset(serve)
        decay = lambda m: jax.tree.map(lambda zero: zero.leaf.decayed, self.owned[m])  # noqa: E731
        self.optimizers = {m: make_optimizer(optimizers[m], total_steps, decay(m)) for m in sorted(self.trainable)}
        self.learning_rates = {m: learning_rate(optimizers[m], total_steps) for m in sorted(self.trainable)}
        self._configs = dict(optimizers)

    # ---- shapes and shardings ----------------------------------------------------------------------------------------

    @cached_property
    def param_specs(self) -> dict[str, Tree]:
        """Sharding of the compute parameters."""
        return jax.tree.map(lambda leaf: leaf.spec(self.submesh.axes), self.leaves)

    @cached_property
    def param_avals(self) -> dict[str, Tree]:
        """Avals of the compute parameters."""
        shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.given_in[leaf.module])  # noqa: E731
        return self._avals(shape, self.leaves, self.param_specs)

    @cached_property
    def opens(self) -> dict[str, Open]:
        """How parameters that are given in a narrower dtype become weights, by name."""
        narrow = {m: leaves for m, leaves in self.leaves.items() if self.given_in[m] != jnp.dtype(self.dtype)}
        return dict.fromkeys(by_name(narrow), lambda stored: stored.astype(self.dtype))

    @cached_property
    def master_specs(self) -> dict[str, Tree]:
        """Sharding of the masters."""
        return jax.tree.map(lambda zero: zero.spec(self.submesh.axes), self.owned)

    @cached_property
    def master_avals(self) -> dict[str, Tree]:
        """Avals of the masters."""
        return self._avals(self._master_shape, self.owned, self.master_specs)

    def _master_shape(self, zero: ZeroLeaf) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(zero.shape, self.held_in[zero.leaf.module])

    def shared_specs(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, PartitionSpec]:
        """Sharding of lent or borrowed masters, or of their reduced gradients."""
        return {name: zero.spec(self.submesh.axes) for name, zero in shared.items()}

    def shared_avals(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, Any]:
        """Avals of lent or borrowed masters, or of their reduced gradients."""
        shapes = {name: self._master_shape(zero) for name, zero in shared.items()}
        return with_sharding(shapes, self.submesh.mesh, self.shared_specs(shared))

    @cached_property
    def opt_specs(self) -> dict[str, Tree]:
        """Sharding of the optimizer states: moments as the masters, counters everywhere."""
        result: dict[str, Tree] = {}

        def read(masters: Tree) -> None:
            for module, optimizer in self.optimizers.items():
                result[module] = optax.tree_utils.tree_map_params(
                    optimizer,
                    lambda _, spec: spec,
                    optimizer.init(masters[module]),
                    self.master_specs[module],
                    transform_non_params=lambda _: PartitionSpec(),
                )

        jax.eval_shape(read, self.master_avals)  # optax makes counters, which in a trace are on no device
        return result

    @cached_property
    def opt_avals(self) -> dict[str, Tree]:
        """Avals of the optimizer states."""
        shapes = {m: jax.eval_shape(o.init, self.master_avals[m]) for m, o in self.optimizers.items()}
        return with_sharding(shapes, self.submesh.mesh, self.opt_specs)

    @cached_property
    def state_avals(self) -> State:
        """Avals of the whole state."""
        return {"master": self.master_avals, "opt": self.opt_avals}

    @cached_property
    def grad_specs(self) -> dict[str, Tree]:
        """Sharding of the reduced gradients of owned leaves."""
        return {m: self.master_specs[m] for m in sorted(self.trainable)}

    @property
    def grad_avals(self) -> dict[str, Tree]:
        """Avals of the reduced gradients of owned leaves."""
        return {m: self.master_avals[m] for m in sorted(self.trainable)}

    @cached_property
    def sums_specs(self) -> dict[str, Tree]:
        """Sharding of the gradient sums: one slice per rank with tokens of its own, until the step's one reduction."""
        stack = lambda leaf: self.submesh.spread.sums(leaf.spec(self.submesh.axes))  # noqa: E731
        return {m: jax.tree.map(stack, self.leaves[m]) for m in sorted(self.trainable)}

    @cached_property
    def sums_avals(self) -> dict[str, Tree]:
        """Avals of the gradient sums, fp32, ``[dp·cp, ...]``; where ranks of tp share tokens, of leaves that tp
        does not split ``[dp·cp·tp, ...]``."""

        def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
            over = self.submesh.spread.summed(leaf.spec(self.submesh.axes))
            parts = math.prod(self.submesh.mesh.shape[axis] for axis in over)
            return jax.ShapeDtypeStruct((parts, *leaf.shape), jnp.float32)

        return self._avals(shape, {m: self.leaves[m] for m in sorted(self.trainable)}, self.sums_specs)

    @property
    def rows_spec(self) -> PartitionSpec:
        """Sharding of the norm rows: one row per rank."""
        return self.submesh.spread.each

    @property
    def rows_aval(self) -> Any:
        """Aval of the norm rows ``[ranks, modules]``: squared gradient norms that each rank contributes, by module."""
        shape = (len(self.submesh.ranks), len(self.modules))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.submesh.sharding(self.rows_spec))

    # ---- once-a-step functions ---------------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether every dp rank has whole masters."""
        return self.submesh.layout.optimizer_shards == 1

    @property
    def prepare_is_identity(self) -> bool:
        """Whether all masters can serve as compute parameters as they are."""
        return not self.copied

    @property
    def copied(self) -> dict[str, Tree]:
        """Avals of the compute parameters that ``prepare`` makes, of the modules whose masters do not serve."""
        return {m: avals for m, avals in self.param_avals.items() if m not in self.serving}

    def served(self, masters: Tree, borrowed: Shared) -> tuple[Tree, Shared]:
        """The part of masters and borrowed leaves that is computed with as it is."""
        return self._by_serving(masters, borrowed, serving=True)

    def unserved(self, masters: Tree, borrowed: Shared) -> tuple[Tree, Shared]:
        """The part of masters and borrowed leaves that ``prepare`` reads."""
        return self._by_serving(masters, borrowed, serving=False)

    def _by_serving(self, masters: Tree, borrowed: Shared, *, serving: bool) -> tuple[Tree, Shared]:
        own = {m: tree for m, tree in masters.items() if (m in self.serving) == serving}
        return own, {n: x for n, x in borrowed.items() if (self.borrowed[n].leaf.module in self.serving) == serving}

    @cached_property
    def prepare(self) -> Spmd:
        """``unserved -> copied``: cast before gathering, so that half the bytes travel."""
        axes, zero = self.submesh.axes, {m: self.zero[m] for m in self.copied}

        def body(masters: Tree, borrowed: Shared) -> Tree:
            one = lambda zero, x: zero.gather(x.astype(self.given_in[zero.leaf.module]), axes)  # noqa: E731
            return jax.tree.map(one, zero, with_leaves(masters, borrowed))

        specs = self.unserved(self.master_specs, self.shared_specs(self.borrowed))
        return Spmd(body, self.submesh.mesh, specs, {m: self.param_specs[m] for m in zero})

    @cached_property
    def prepare_program(self) -> Program | None:
        """``prepare``, compiled once for all callers; ``None`` where all masters serve as they are."""
        if self.prepare_is_identity:
            return None
        avals = self.unserved(self.master_avals, self.shared_avals(self.borrowed))
        return Program.of(f"prepare {self.model.name}", self.prepare, list(avals))

    def compute_params(self, masters: Tree, borrowed: Shared, prepare: Callable[..., Tree] | None = None) -> Tree:
        """The parameters as the stage's programs take them: cast and gathered, or the masters themselves.

        Args:
          masters: masters by module.
          borrowed: borrowed leaves by name.
          prepare: what makes the copies; ``prepare_program`` unless given. A trace takes ``prepare`` itself.
        """
        served = with_leaves(*self.served(masters, borrowed))
        make = prepare or self.prepare_program
        return {**served, **make(*self.unserved(masters, borrowed))} if make and self.copied else served

    @cached_property
    def reduce(self) -> Spmd:
        """``(sums, returned) -> (gradient shards, sent, norm rows, zeroed sums)``.

        ``returned`` are gradient shards of lent leaves from the stage that borrows them, and are added to the gradient.
        ``sent`` are gradient shards of borrowed leaves; they count in the owner's norm and not here.
        """
        axes = self.submesh.axes
        lent, borrowed = (self.shared_specs(self._trained(shared)) for shared in (self.lent, self.borrowed))

        def body(sums: Tree, returned: Shared) -> tuple[Tree, Shared, jax.Array, Tree]:
            zero = {m: self.zero[m] for m in sums}
            grads = jax.tree.map(lambda z, g: z.reduce(g.squeeze(0), axes), zero, sums)
            named = by_name(grads)
            sent = {name: named[name] for name in borrowed}
            grads = self._without_borrowed(with_leaves(grads, {n: named[n] + g for n, g in returned.items()}))
            rows = jnp.stack([self._squared_norm(m, grads) for m in self.modules])
            return grads, sent, rows[None], jax.tree.map(jnp.zeros_like, sums)

        outs = (self.grad_specs, borrowed, self.rows_spec, self.sums_specs)
        return Spmd(body, self.submesh.mesh, (self.sums_specs, lent), outs)

    @property
    def reduce_avals(self) -> tuple[Any, ...]:
        """Arguments of ``reduce``."""
        return self.sums_avals, self.shared_avals(self._trained(self.lent))

    def _squared_norm(self, module: str, grads: Tree) -> jax.Array:
        """This rank's part of the module's squared gradient norm; 0 for a module without gradients here."""
        zero, axes = self.owned[module] if module in grads else {}, self.submesh.axes
        norms = jax.tree.map(lambda z, g: z.squared_norm(g, axes), zero, grads.get(module, {}))
        return sum(jax.tree.leaves(norms), start=jnp.zeros((), jnp.float32))

    def _shared(self, tie: str) -> dict[str, ZeroLeaf]:
        return {name: zero for name, zero in by_name(self.zero).items() if zero.leaf.tie == tie}

    def _trained(self, shared: Mapping[str, ZeroLeaf]) -> dict[str, ZeroLeaf]:
        return {name: zero for name, zero in shared.items() if zero.leaf.module in self.trainable}

    def _without_borrowed(self, tree: Tree) -> Tree:
        return nested({name: x for name, x in by_name(tree).items() if name not in self.borrowed})

    @cached_property
    def update(self) -> Spmd:
        """``(state, gradient shards, totals) -> state``.

        ``totals`` are norm rows summed over the world, the same on every rank. A step whose norm is not finite leaves
        the state as it was, counters included.
        """

        def body(state: State, grads: Tree, totals: jax.Array) -> State:
            norm = jnp.sqrt(jnp.sum(totals))  # one row
            finite = jnp.isfinite(norm)
            scale = jnp.clip(self.clip_norm / norm, max=1.0) if self.clip_norm else jnp.float32(1)
            new: State = {"master": dict(state["master"]), "opt": {}}
            for module, optimizer in self.optimizers.items():
                scaled = jax.tree.map(lambda g: g * scale, grads[module])
                master = state["master"][module]
                updates, opt = optimizer.update(scaled, state["opt"][module], master)
                updates = at_own_rates(self._configs[module], self.owned[module], updates, self.submesh.axes)
                keep = lambda a, b: jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
                new["master"][module] = keep(optax.apply_updates(master, updates), master)
                new["opt"][module] = keep(opt, state["opt"][module])
            return new

        specs = {"master": self.master_specs, "opt": self.opt_specs}
        # Element by element on shards: nothing is differentiated or summed, so nothing needs tracking.
        return Spmd(body, self.submesh.mesh, (specs, self.grad_specs, self.rows_spec), specs, check_vma=False)

    # ---- creation and logical leaves ---------------------------------------------------------------------------------

    def initialise(self, key: jax.Array) -> State:
        """A fresh state; the same values under every layout."""
        return self._fresh(key)

    @cached_property
    def _fresh(self) -> Callable[[jax.Array], State]:
        create = lambda key: self._join_state({}, 0, {}, key)  # noqa: E731
        return self._jit_once(create, jax.tree.map(lambda a: a.sharding, self.state_avals))

    def logical_avals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Avals of the checkpoint leaves of this stage: ``params/…``, and if trained ``adam_m/…`` and ``adam_v/…``."""
        result = {}
        for zero in jax.tree.leaves(self.owned):
            sharding = self.submesh.sharding(zero.logical_spec(self.submesh.axes))
            aval = jax.ShapeDtypeStruct(zero.leaf.logical_shape, self.held_in[zero.leaf.module], sharding=sharding)
            own = MOMENTS if zero.leaf.module in self.trainable else ()  # float32, as a trained module's masters
            result |= {f"{kind}/{name}": aval for name in zero.leaf.names for kind in ("params", *own)}
        return result

    def to_logical(self, state: State) -> dict[str, jax.Array]:
        """Checkpoint leaves of a state, as arrays of their own (the state may be donated afterwards)."""
        return self._logical(moved(state, DEVICE))

    @cached_property
    def _logical(self) -> Callable[[State], dict[str, jax.Array]]:
        # Cached: a new function at every call would be traced and compiled at every checkpoint.
        shardings = {name: aval.sharding for name, aval in self.logical_avals().items()}
        return jax.jit(self._split_state, out_shardings=shardings)

    def is_finite(self, state: State) -> jax.Array:
        """Whether all masters and moments are finite: one flag, on every device of the stage."""
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
          named: checkpoint leaves, parameters in any floating dtype. A module's moments may be absent, and are zeros
            then; with a key its parameters may be absent too, and are fresh then.
          count: number of updates applied by the run.
          since: by module, that number when its moments were zeros; 0 unless given.
          key: see ``initialise``.

        Raises:
          KeyError: only part of a module's parameters or moments is there, or no parameters and no key.
        """
        shardings = jax.tree.map(lambda a: a.sharding, self.state_avals)
        own = {name: named[name] for name in self.logical_avals() if name in named}
        join = lambda own, key: self._join_state(own, count, since, key)  # noqa: E731
        return self._jit_once(join, shardings)(own, key)

    def parameters_from_logical(self, named: Mapping[str, jax.Array]) -> State:
        """A state for prediction from the ``params/…`` leaves: masters without moments."""
        shardings = jax.tree.map(lambda a: a.sharding, self.master_avals)
        own = {name: named[name] for name in self.logical_avals() if name.startswith("params/")}
        join = lambda named: {m: self._join("params", m, named) for m in self.owned}  # noqa: E731
        return {"master": self._jit_once(join, shardings)(own), "opt": {}}

    def _jit_once(self, fn: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
        """A program on the submesh that runs only at a start: compiling it takes longer than running it."""
        options = jax_compat.compiler_options(self.submesh.mesh.devices.flat[0].platform, once=True)
        return jax.jit(fn, out_shardings=shardings, compiler_options=options)

    def _split_state(self, state: State) -> dict[str, jax.Array]:
        result = self._split("params", self.owned, state["master"])
        for module, opt in state["opt"].items():
            held = moments(opt)
            assert held is not None
            for kind, moment in zip(MOMENTS, (held.m, held.v), strict=True):
                result |= self._split(kind, self.owned[module], moment)
        return result

    def _join_state(
        self, named: Mapping[str, jax.Array], count: int, since: Mapping[str, int], key: jax.Array | None
    ) -> State:
        """The state of ``from_logical``. Traceable."""
        masters = {m: self._join("params", m, named) for m in self.owned if self._has("params", m, named)}
        if len(masters) < len(self.owned):
            if key is None:
                raise KeyError(f"no parameters of {', '.join(sorted(self.owned.keys() - masters))}, and no key")
            fresh = {part.module: part.initialise(key) for part in self.model.slices if part.module not in masters}
            own = self._without_borrowed(fresh)
            masters |= {m: jax.tree.map(self._padded, self.owned[m], own[m]) for m in own}
        opts, updates = {}, jnp.asarray(count, jnp.int32)
        for module, optimizer in self.optimizers.items():
            state = optimizer.init(masters[module])
            held = moments(state)
            assert held is not None
            if self._has(MOMENTS[0], module, named):
                m, v = (self._join(kind, module, named) for kind in MOMENTS)
                held = Moments(m=m, v=v, count=updates - since.get(module, 0))
            opts[module] = with_moments(state, held, updates)
        return {"master": masters, "opt": opts}

    def _has(self, kind: str, module: str, named: Mapping[str, jax.Array]) -> bool:
        """Whether any leaf of this kind of the module is among ``named``."""
        return any(
            f"{kind}/{name}" in named for zero in jax.tree.leaves(self.owned[module]) for name in zero.leaf.names
        )

    def _split(self, kind: str, zero: Tree, arrays: Tree) -> dict[str, jax.Array]:
        plain = split_logical([z.leaf for z in jax.tree.leaves(zero)], jax.tree.leaves(arrays))
        return {f"{kind}/{name}": x for name, x in plain.items()}

    def _join(self, kind: str, module: str, named: Mapping[str, jax.Array]) -> Tree:
        zeros, structure = jax.tree.flatten(self.owned[module])
        own = {name: named[f"{kind}/{name}"] for z in zeros for name in z.leaf.names}
        plain = join_logical([z.leaf for z in zeros], own)
        return jax.tree.unflatten(structure, [self._padded(z, x) for z, x in zip(zeros, plain, strict=True)])

    def _padded(self, zero: ZeroLeaf, x: jax.Array) -> jax.Array:
        """A whole array as a master or a moment."""
        return zero.pad(x.astype(self.held_in[zero.leaf.module]))

    def _avals(self, fn: Any, tree: Tree, specs: Tree) -> Tree:
        return with_sharding(jax.tree.map(fn, tree), self.submesh.mesh, specs)


def _all_finite(state: State) -> jax.Array:
    floating = (leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact))
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floating]).all()
