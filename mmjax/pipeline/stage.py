"""Stage functions: forward and backward of one stage as two SPMD functions, and the residuals between them.

``jax.vjp`` is taken inside ``shard_map`` with varying-axes tracking, so that ``psum`` transposes correctly. Between
forward and backward a stage keeps *residuals* only: no weight, no host input and no received activation is among them,
since all three are still there when backward runs and are passed to it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.mesh.spmd import Spmd, with_sharding, zeros_of
from mmjax.mesh.spread import Axes
from mmjax.models.handles import Open
from mmjax.models.placeholders import listed_tokens
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import Value, handle
from mmjax.pipeline.residuals import made_of_parameters, require_small
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import by_name, nested, with_leaves

Tree = Any


class Output(NamedTuple):
    """Outputs of a stage, or their cotangents; ``None`` for one that the stage does not give.

    Attributes:
      activation: the activation that other stages take.
      result: the sums of its losses, ``[dp, losses]``, whose cotangent is ``[losses]``; or its predictions instead.
    """

    activation: Any
    result: Any


@dataclass(frozen=True)
class Residual:
    """Aval with sharding, and spec, of a kept value, stacked over exactly the axes that it varies over."""

    aval: Any
    spec: PartitionSpec


@dataclass(frozen=True)
class _Linear:
    """A forward's vjp as it was traced over some axes.

    Attributes:
      structure: its tree structure.
      residuals, outputs: shape, dtype and varying axes of every residual and of every array of the output.
      arguments: the same of the host inputs and the received activations.
    """

    structure: Any
    residuals: list[Value]
    outputs: list[Value]
    arguments: tuple[Tree, Tree]


class StageFunctions:
    """Forward and backward of one stage for one set of input shapes.

    Attributes:
      out: avals of its outputs.
      kept: avals of the residuals that backward reads.
      keeps_carry: whether backward reads the received activations.
      has_backward: whether anything wants a gradient from this stage.
      listed: whether its activation is the tokens ``[cells, listed, D]`` that its send list names, not whole rows.
    """

    def __init__(
        self,
        model: StageModel,
        state: StageState,
        inputs: Mapping[str, Any],
        carry: Mapping[str, Any],
        cells: int,
        wanted_carry: frozenset[str],
        sends: bool,
    ):
        """Traces the stage.

        Args:
          model: the stage.
          state: its parameters and gradient sums, and the devices that they are on.
          inputs: avals of its host inputs, rows first.
          carry: avals of the activations that reach it, by source stage, with shardings.
          cells: cells of a microbatch.
          wanted_carry: source stages that want a gradient.
          sends: whether another stage takes its activation.

        Raises:
          ResidualError: when residuals that depend on parameters alone are large, see `require_small`.
        """
        self.model, self.state, self.submesh = model, state, state.submesh
        self.wanted_carry, self.keeps_carry, self.sends = wanted_carry, False, sends
        self.has_backward = bool(state.trainable or wanted_carry)
        self.listed = sends and model.send_list in inputs
        self._cells = cells // self.submesh.layout.dp
        self._linear: dict[tuple[str, ...], _Linear] = {}
        self._residuals: list[Residual] = []
        self._again: list[int] = []
        self._avals = (state.param_avals, inputs, carry)
        spread = self.submesh.spread
        self._sent = spread.activation(inside=not model.last)
        self._received = {name: aval.sharding.spec for name, aval in carry.items()}
        self._in_specs = (
            state.param_specs,
            {name: aval.sharding.spec for name, aval in inputs.items()},
            self._received,
        )
        self._outputs = Output(self._sent, spread.whole_rows)
        if self.has_backward:
            self._plan()
            self._trace()
        else:
            self.out: Output = self._spmd(self._plain, self._outputs).abstract(*self._avals)

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Finds what has to be known before the vjp is traced; here nothing."""

    def _given(self, params: Tree) -> Tree:
        """Parameters as the vjp takes them."""
        return jax_compat.tree_to_varying(params, self._data)

    def _apply(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        return self._output(self.model.loss and self._losses, params, inputs, carry)

    def _losses(self, params: Tree, inputs: Tree, features: jax.Array, axes: Axes) -> jax.Array:
        """The sums of the stage's losses, in their order; no gradient comes back from a metric."""
        assert self.model.loss
        sums, kinds = self.model.loss(params, inputs, features, axes), self.model.losses
        if sums.keys() != kinds.keys():
            raise ValueError(f"stage {self.model.name}: loss gives {sorted(sums)} and losses are {sorted(kinds)}")
        whole = {name: self._over_stream(value) for name, value in sums.items()}
        return jnp.stack([whole[n] if kind.weight else lax.stop_gradient(whole[n]) for n, kind in kinds.items()])

    def _over_stream(self, total: jax.Array) -> jax.Array:
        """A sum over tokens, with those of the ranks of tp that share them; most modules have brought them together."""
        return lax.psum(total, tuple(axis for axis in jax_compat.varying_axes(total) if axis in self.submesh.axes.sp))

    def _output(self, result: Any, params: Tree, inputs: Tree, carry: Tree) -> Output:
        axes, give = self.submesh.axes, self.model.give
        params = with_handles(self.model, self.state, params)
        features = self.model.forward(params, inputs, carry, axes, self._cells)
        own = result(params, inputs, features, axes) if result else None
        if not self.sends:
            return Output(None, own)
        given = give(params, inputs, features, axes) if give else features
        if not self.model.last:
            return Output(given, own)
        whole = self._whole(given)
        return Output(listed_tokens(whole, inputs[self.model.send_list]) if self.listed else whole, own)

    def _whole(self, x_BT: jax.Array) -> jax.Array:
        """Whole rows, equal on all ranks that have a part of them."""
        parts = tuple(axis for axis in self.submesh.spread.stream if axis in jax_compat.varying_axes(x_BT))
        return jax_compat.all_gather_invariant(x_BT, parts, 1) if parts else x_BT

    def _plain(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        return self._stacked(self._apply(jax_compat.tree_to_varying(params, self._data), inputs, carry))

    def _predict(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        out = self._output(self.model.predict, jax_compat.tree_to_varying(params, self._data), inputs, carry)
        if out.result is None:
            return out
        of_rows = out.result.ndim == 1  # a sum over the tokens of each row
        if not of_rows:
            return out._replace(result=self._whole(out.result))
        return out._replace(result=lax.psum(self._over_stream(out.result), self._positions))

    def _stacked(self, out: Output) -> Output:
        """The output with its losses summed over the ranks that have parts of the same rows, in a row of their own."""
        return out if out.result is None else out._replace(result=lax.psum(out.result, self._positions)[None])

    def _linearise(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        """The output and all residuals, including those that are arguments."""
        out, vjp = jax.vjp(lambda p, c: self._apply(p, inputs, c), self._given(params), carry)
        leaves, structure = jax_compat.vjp_residuals(vjp)
        given = {id(x): name for name, x in inputs.items()}
        self._names = [given.get(id(leaf)) for leaf in leaves]
        outputs = [Value.of(x) for x in jax.tree.leaves(out)]
        # A stage may be traced over its own axes and over those of lanes, in any order.
        arguments = jax.tree.map(Value.of, (inputs, carry))
        self._linear[jax_compat.manual_axes()] = _Linear(structure, [*map(Value.of, leaves)], outputs, arguments)
        return out, leaves

    def _forward(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        out, leaves = self._linearise(params, inputs, carry)
        return self._stacked(out), [jnp.expand_dims(leaf, 0) for leaf in leaves]

    def _of_parameters(self, params: Tree) -> list[jax.Array]:
        """The residuals that are made of parameters alone; of forward nothing else is computed."""
        arguments = self._linear[jax_compat.manual_axes()].arguments

        def residuals(params: Tree) -> list[jax.Array]:
            inputs, carry = jax.tree.map(Value.zeros, arguments)
            leaves = self._linearise(params, inputs, carry)[1]
            return [jnp.expand_dims(leaves[i], 0) for i in self._again]

        return jax_compat.without_dead_code(residuals, params)

    def _backward(
        self,
        places: list[int],
        params: Tree,
        sums: Tree,
        inputs: Tree,
        carry: Tree,
        kept: list[jax.Array],
        cotangent: Output,
    ) -> tuple[Any, ...]:
        """Adds this microbatch's gradients to ``sums`` and returns the received activations' gradients.

        ``places`` are the places of the ``kept`` residuals among all residuals.
        """
        grads, carry_grads = self._transpose(params, inputs, carry, dict(zip(places, kept, strict=True)), cotangent)
        return added(sums, grads), carry_grads

    def _transpose(
        self, params: Tree, inputs: Tree, carry: Tree, kept: Mapping[int, jax.Array], cotangent: Output
    ) -> tuple[Tree, Tree]:
        """Gradients of the parameters in the form that the vjp takes, and of the received activations."""
        linear = self._linear[jax_compat.manual_axes()]
        if self._again and self._again[0] not in kept:
            values = dict(zip(self._again, self._of_parameters(params), strict=True))
            return self._transpose(params, inputs, carry, {**kept, **values}, cotangent)
        leaves = []
        for index, (name, value) in enumerate(zip(self._names, linear.residuals, strict=True)):
            if name is not None:
                leaves.append(inputs[name])
            elif index in kept:
                leaves.append(kept[index].squeeze(0))
            else:
                leaves.append(value.zeros())  # nothing reads it
        vjp = jax.tree.unflatten(linear.structure, leaves)
        # Arguments are passed again, so that nothing reads forward's residuals of them, and none is kept.
        jax_compat.replace_argument_residuals(vjp, 0, self._given(params))
        if carry:  # empty where backward does not read it
            jax_compat.replace_argument_residuals(vjp, 1, carry)
        typed = [
            jax_compat.to_varying(x.astype(value.dtype), sorted(value.axes))
            for x, value in zip(jax.tree.leaves(cotangent), linear.outputs, strict=True)
        ]
        grads, carry_grads = vjp(jax.tree.unflatten(jax.tree.structure(self.out), typed))
        return grads, {name: carry_grads[name] for name in sorted(self.wanted_carry)}

    # ---- the same over the submesh -----------------------------------------------------------------------------------

    @cached_property
    def forward(self) -> Spmd:
        """``(params, inputs, carry) -> (out, kept)``; without a backward ``kept`` is empty."""
        if not self.has_backward:
            return self._spmd(lambda *args: (self._plain(*args), []), (self._outputs, []))
        return self._forward_over(self._kept)

    @cached_property
    def infer(self) -> Spmd:
        """``(params, inputs, carry) -> Output`` with what the stage predicts, if anything, in place of a loss."""
        return self._spmd(self._predict, self._outputs)

    @cached_property
    def backward(self) -> Spmd:
        """``(params, sums, inputs, carry, kept, cotangent) -> (sums, gradients of carry)``.

        ``carry`` is empty where backward does not read the received activations; ``sums`` is ``backward_part``.
        """
        narrow = self._backward_over(self._kept)
        return Narrowed(narrow.body, narrow.mesh, narrow.in_specs, narrow.out_specs, call=self._narrow_backward)

    @property
    def backward_avals(self) -> tuple[Any, ...]:
        """Arguments of ``backward``."""
        params, inputs, carry = self._avals
        received = carry if self.keeps_carry else {}
        return (params, self.backward_part(self.state.sums_avals), inputs, received, self.kept, self.cotangent_aval)

    def backward_part(self, sums: Tree) -> Tree:
        """The gradient sums that ``backward`` adds to."""
        return sums

    @property
    def forward_avals(self) -> tuple[Any, ...]:
        """Arguments of ``forward`` and ``infer``."""
        return self._avals

    @property
    def cotangent_aval(self) -> Output:
        """Avals of the cotangents that backward starts from: the activation's gradient, and those of the losses."""
        sharding = self.submesh.sharding(self.submesh.spread.whole)
        weight = jax.ShapeDtypeStruct((len(self.model.losses),), jnp.float32, sharding=sharding)
        return Output(self.out.activation, None if self.out.result is None else weight)

    @property
    def kept(self) -> list[Any]:
        """Avals of the residuals that are kept per microbatch in flight."""
        return [self._residuals[i].aval for i in self._kept] if self.has_backward else []

    @cached_property
    def weights(self) -> Spmd:
        """``(sums, deferred) -> sums``, where the backward is split; else a TypeError."""
        raise TypeError(f"stage {self.model.name}: its backward is not split")

    @property
    def weights_avals(self) -> tuple[Any, ...]:
        """Arguments of ``weights``."""
        return self.weights_part(self.state.sums_avals), self.deferred

    def weights_part(self, sums: Tree) -> Tree:
        """The gradient sums that ``weights`` adds to."""
        return {}

    @property
    def deferred(self) -> list[Any]:
        """Avals of the values kept per microbatch from B to W, where the backward is split."""
        return []

    # ---- tracing -----------------------------------------------------------------------------------------------------

    @property
    def _data(self) -> tuple[str, ...]:
        return self.submesh.spread.data

    @property
    def _positions(self) -> tuple[str, ...]:
        return self.submesh.spread.positions

    def _spmd(self, body: Any, out_specs: Any) -> Spmd:
        return Spmd(body, self.submesh.mesh, self._in_specs, out_specs)

    def _trace(self) -> None:
        """Traces forward and backward with all residuals, and finds which of these backward reads.

        Programs reuse these two traces and leave the other residuals out: tracing is most of a start's time.
        """
        specs: list[PartitionSpec] = []

        def forward(*args: Any) -> tuple[Output, list[jax.Array]]:
            result = self._forward(*args)
            self._residuals = [self._residual(value) for value in self._linear[jax_compat.manual_axes()].residuals]
            specs[:] = [residual.spec for residual in self._residuals]  # read when the body has been traced
            return result

        wide = self._spmd(forward, (self._outputs, specs))
        self._wide_forward = jax.jit(wide, inline=True)
        shapes, _ = jax.eval_shape(self._wide_forward, *self._avals)
        self.out: Output = with_sharding(shapes, wide.mesh, self._outputs)
        self.keeps_carry, self._kept = True, list(range(len(self._residuals)))
        avals = self.backward_avals
        self._wide_backward = jax.jit(self._backward_over(self._kept), inline=True)
        flags = jax_compat.used_inputs(self._wide_backward, avals)
        carry, kept = jax.tree.unflatten(jax.tree.structure(avals), flags)[3:5]
        self.keeps_carry = any(carry.values())
        self._kept = [index for index, used in enumerate(kept) if used]
        # Backward computes those of parameters alone again: each microbatch would keep a copy.
        names = made_of_parameters(self._forward_over(self._kept), self._avals, lambda result: result[1])
        names = {self._kept[place]: each for place, each in names.items()}
        avals = {i: residual.aval for i, residual in enumerate(self._residuals)}
        require_small(self.model.name, avals, names, self._avals[0])
        self._again, self._kept = [*names], [index for index in self._kept if index not in names]

    def _narrow_backward(
        self, params: Tree, sums: Tree, inputs: Tree, carry: Tree, kept: list[jax.Array], cotangent: Output
    ) -> Any:
        own = dict(zip(self._kept, kept, strict=True))
        if self._again:
            specs = [self._residuals[i].spec for i in self._again]
            again = Spmd(self._of_parameters, self.submesh.mesh, self._in_specs[:1], specs)
            own |= zip(self._again, again(params), strict=True)
        every = [own[i] if i in own else zeros_of(residual.aval) for i, residual in enumerate(self._residuals)]
        received = carry if self.keeps_carry else jax.tree.map(zeros_of, self._avals[2])
        return self._wide_backward(params, sums, inputs, received, every, cotangent)

    def _residual(self, value: Value) -> Residual:
        """The residual of a local value, stacked over the axes that it varies over."""
        axes, spec = self.submesh.spread.residual(value.axes)
        copies = math.prod(self.submesh.mesh.shape[axis] for axis in axes)
        aval = jax.ShapeDtypeStruct((copies, *value.shape), value.dtype, sharding=self.submesh.sharding(spec))
        return Residual(aval, spec)

    def _forward_over(self, places: list[int]) -> Spmd:
        """The forward that gives some of the residuals, from the trace that has all."""

        def some(result: tuple[Output, list[jax.Array]]) -> tuple[Output, list[jax.Array]]:
            return result[0], [result[1][i] for i in places]

        return Narrowed(
            lambda *args: some(self._forward(*args)),
            self.submesh.mesh,
            self._in_specs,
            (self._outputs, [self._residuals[i].spec for i in places]),
            call=lambda *args: some(self._wide_forward(*args)),
        )

    def _backward_over(self, kept: list[int]) -> Spmd:
        spread, (params, inputs, carry) = self.submesh.spread, self._in_specs
        carry = carry if self.keeps_carry else {}
        cotangent = Output(self._sent, spread.whole)  # unused for an output that the stage does not give
        sums = self.backward_part(self.state.sums_specs)
        in_specs = (params, sums, inputs, carry, [self._residuals[i].spec for i in kept], cotangent)
        gradients = {name: self._received[name] for name in sorted(self.wanted_carry)}
        out_specs = (sums, gradients, *self._more_specs())
        return Spmd(partial(self._backward, kept), self.submesh.mesh, in_specs, out_specs)

    def _more_specs(self) -> tuple[Any, ...]:
        """Specs of what backward returns beside sums and gradients of activations."""
        return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Narrowed(Spmd):
    """An SPMD function that is traced already, as part of a wider one.

    Attributes:
      call: the function of global arrays, which uses that trace; ``body`` is for traces over other axes.
    """

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Runs on global arrays."""
        return self.call(*args)


def with_handles(model: StageModel, state: StageState, params: Tree) -> Tree:
    """Parameters of a stage as its model takes them: handles where what is stored has to be opened."""
    if not (state.opens or model.opens):
        return params
    named = by_name(params)
    given = {name: handle(named[name], own) for name, own in _both(model.opens, state.opens).items()}
    return with_leaves(params, given)


def _both(first: Mapping[str, Open], then: Mapping[str, Open]) -> dict[str, Open]:
    """Opens what one of them has, or both, one after the other."""
    both = {name: lambda x, one=first[name], other=then[name]: other(one(x)) for name in first.keys() & then.keys()}
    return {**first, **then, **both}


def added(sums: Tree, grads: Tree) -> Tree:
    """Sums with gradients added; gradients without a sum are left out."""
    named = by_name(grads)
    return nested({name: total + named[name].astype(total.dtype)[None] for name, total in by_name(sums).items()})
