"""Stage functions: forward and backward of one stage as two SPMD functions, and the residuals between them.

``jax.vjp`` is taken inside ``shard_map`` with varying-axes tracking, so that ``psum`` transposes correctly. Between
forward and backward a stage keeps only *residuals*. They contain no weight, no host input and no received activation:
these still exist when backward runs, and are passed to it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mmjax import jax_compat, jaxprs
from mmjax.mesh.spmd import PretracedSpmd, Spmd, with_sharding, zeros_of
from mmjax.mesh.spread import Axes
from mmjax.models.handles import reducing
from mmjax.models.placeholders import listed_tokens
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import PRODUCT, Summed, Value
from mmjax.pipeline.residuals import Residual, from_parameters_alone, require_small
from mmjax.pipeline.stage_params import add_gradients, with_handles, with_scattered
from mmjax.pipeline.stage_state import StageState
from mmjax.pipeline.trees import by_name, with_leaves
from mmjax.pipeline.weight_uses import DIMENSIONS, MARKS, single_uses, summable

Tree = Any


class Output(NamedTuple):
    """Outputs of a stage, or their cotangents; ``None`` for an output that the stage does not have.

    Attributes:
      activation: the activation for other stages.
      result: the sums of the stage's losses, ``[dp, losses]``, with a cotangent ``[losses]``; or its predictions.
    """

    activation: Any
    result: Any


@dataclass(frozen=True)
class _TracedVjp:
    """The vjp of a forward, traced over some mesh axes.

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
      residual_avals: avals of the residuals that backward reads, kept for each microbatch in flight.
      backward_reads_carry: whether backward reads the received activations.
      has_backward: whether the stage has gradients: of its parameters, or for a source stage.
      listed: whether its activation is the tokens ``[cells, listed, D]`` of its send list, not whole rows.
    """

    def __init__(
        self,
        model: StageModel,
        state: StageState,
        inputs: Mapping[str, Any],
        carry: Mapping[str, Any],
        *,
        cells: int,
        gradient_sources: frozenset[str],
        sends: bool,
        forward_alone: bool = False,
    ):
        """Traces the stage.

        Args:
          model: the stage.
          state: its parameters and gradient sums, and the devices that they are on.
          inputs: avals of its host inputs, rows first.
          carry: avals of the activations that reach it, by source stage, with shardings.
          cells: cells of a microbatch.
          gradient_sources: source stages that receive a gradient.
          sends: whether another stage reads its activation.
          forward_alone: whether only its forward is of interest; then it has no backward and no residuals.

        Raises:
          ResidualError: when residuals that depend only on parameters are large, see ``require_small``.
        """
        self.model, self.state, self.submesh = model, state, state.submesh
        self.gradient_sources, self.backward_reads_carry, self.sends = gradient_sources, False, sends
        self.has_backward = bool(state.trainable or gradient_sources) and not forward_alone
        self.listed = sends and model.send_list in inputs
        self._cells = cells // self.submesh.layout.dp
        self._vjps: dict[tuple[str, ...], _TracedVjp] = {}
        self._residuals: list[Residual] = []
        self._recomputed: list[int] = []
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
        """Prepares the trace of the vjp: determines the weights whose products add gradients to sums."""
        self._summed = self._summable

    @property
    def _trained(self) -> dict[str, Any]:
        """Avals of the trained parameters by name."""
        named = by_name(self._avals[0])
        return {name: aval for name, aval in named.items() if name.partition("/")[0] in self.state.trainable}

    @property
    def _summable(self) -> list[str]:
        opened = {*self.model.opens, *self.state.opens, *self.state.gathers}
        params = self._trained
        return [
            name
            for name in summable(params, opened, every_dtype=self.state.reduces_in_backward)
            if DIMENSIONS.get(self._single_uses.get(name, "")) == params[name].ndim
        ]

    @property
    def _scattered(self) -> frozenset[str]:
        """Whole parameters whose gradients backward scatters layer by layer."""
        return self.state.scattered

    @cached_property
    def reduced_in_backward(self) -> tuple[str, ...]:
        """Names of the weights whose gradients a step's last backward reduces, layer by layer."""
        if not self.state.reduces_in_backward:
            return ()
        return tuple(name for name in self._summed if self._single_uses[name] == PRODUCT)

    @cached_property
    def _single_uses(self) -> dict[str, str]:
        return single_uses(self._spmd(self._plain, self._outputs), self._avals, MARKS)

    def _vjp_params(self, params: Tree, sums: Tree | None = None) -> Tree:
        """Parameters as arguments of the vjp, those of ``_summed`` with their sums ``[1, ...]``, zeros by default."""
        params = with_scattered(self.state, jax_compat.tree_to_varying(params, self._token_axes), self._scattered)
        named, totals, summed = by_name(params), by_name(sums or {}), {}
        for name in self._summed:
            like = Value(named[name].shape, jnp.float32, jax_compat.varying_axes(named[name]))
            total = totals[name].squeeze(0) if sums is not None else like.zeros()
            summed[name] = self._with_reduction(name, Summed(weight=named[name], total=total))
        return with_leaves(params, summed)

    def _with_reduction(self, name: str, summed: Summed) -> Summed:
        """The summed weight with its reduction, if the stage's last backward of a step reduces its gradient."""
        if name not in self.reduced_in_backward:
            return summed
        reduction = self.state.reductions[name]
        return replace(summed, reduced=reduction.zeros(summed.total), reduction=reduction)

    def _apply(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        return self._output(self._losses if self.model.losses else None, params, inputs, carry)

    def _losses(self, params: Tree, inputs: Tree, features: jax.Array, axes: Axes, of_layers: Tree) -> jax.Array:
        """The sums of the stage's losses, in their order; metrics have no gradient.

        A stage that does not end its module gives the losses ``of_layers`` alone, and 0 for the others.
        """
        kinds, sums = self.model.losses, dict(of_layers)
        if self.model.ends:
            sums |= self.model.loss(params, inputs, features, axes)
            if sums.keys() != kinds.keys():
                raise ValueError(f"stage {self.model.name}: loss gives {sorted(sums)} and losses are {sorted(kinds)}")
        totals = {name: self._sum_over_sp(sums.get(name, jnp.zeros(()))) for name in kinds}
        varying = (*self.submesh.spread.rows, *self._position_axes)
        totals = jax_compat.tree_to_varying(totals, varying)
        return jnp.stack([totals[n] if kind.weight else lax.stop_gradient(totals[n]) for n, kind in kinds.items()])

    def _predictions(self, params: Tree, inputs: Tree, features: jax.Array, axes: Axes, of_layers: Tree) -> Any:
        """The predictions of the stage, which do not read the losses ``of_layers``."""
        del of_layers
        return self.model.predict(params, inputs, features, axes)

    def _sum_over_sp(self, total: jax.Array) -> jax.Array:
        """A sum over tokens, added up over ranks of tp if sequence parallelism still splits the tokens there."""
        return lax.psum(total, tuple(axis for axis in jax_compat.varying_axes(total) if axis in self.submesh.axes.sp))

    def _output(self, result: Any, params: Tree, inputs: Tree, carry: Tree) -> Output:
        axes = self.submesh.axes
        params = with_handles(self.model, self.state, params)
        inputs = self.model.completed(inputs, carry, self._cells)
        features, sums = self.model.forward(params, inputs, carry, axes, self._cells)
        stage_result = result(params, inputs, features, axes, sums) if result else None
        if not self.sends:
            return Output(None, stage_result)
        activation = self.model.give(params, inputs, features, axes)
        if not self.model.last:
            return Output(activation, stage_result)
        rows = self._whole_rows(activation)
        return Output(listed_tokens(rows, inputs[self.model.send_list]) if self.listed else rows, stage_result)

    def _whole_rows(self, x_BT: jax.Array) -> jax.Array:
        """Whole rows, equal on all ranks that have a part of them."""
        parts = tuple(axis for axis in self.submesh.spread.stream if axis in jax_compat.varying_axes(x_BT))
        return jax_compat.all_gather_invariant(x_BT, parts, 1) if parts else x_BT

    def _plain(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        return self._stacked(self._apply(jax_compat.tree_to_varying(params, self._token_axes), inputs, carry))

    def _predict(self, params: Tree, inputs: Tree, carry: Tree) -> Output:
        predict = self._predictions if self.model.losses and self.model.ends else None
        out = self._output(predict, jax_compat.tree_to_varying(params, self._token_axes), inputs, carry)
        if out.result is None:
            return out
        is_row_sum = out.result.ndim == 1  # a sum over the tokens of each row
        if not is_row_sum:
            return out._replace(result=self._whole_rows(out.result))
        return out._replace(result=lax.psum(self._sum_over_sp(out.result), self._position_axes))

    def _stacked(self, out: Output) -> Output:
        """The output with its losses summed over the ranks with parts of the same rows, as one row ``[1, losses]``."""
        return out if out.result is None else out._replace(result=lax.psum(out.result, self._position_axes)[None])

    def _linearise(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        """The output and all residuals, including those that are arguments."""
        out, vjp = jax.vjp(lambda p, c: self._apply(p, inputs, c), self._vjp_params(params), carry)
        leaves, structure = jax_compat.vjp_residuals(vjp)
        input_names = {id(x): name for name, x in inputs.items()}
        self._input_of_residual = [input_names.get(id(leaf)) for leaf in leaves]
        outputs = [Value.of(x) for x in jax.tree.leaves(out)]
        # A stage may be traced over the axes of its submesh and over those of the one-program lowering, in any order.
        arguments = jax.tree.map(Value.of, (inputs, carry))
        self._vjps[jax_compat.manual_axes()] = _TracedVjp(structure, [*map(Value.of, leaves)], outputs, arguments)
        return out, leaves

    def _forward(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        out, leaves = self._linearise(params, inputs, carry)
        return self._stacked(out), [jnp.expand_dims(leaf, 0) for leaf in leaves]

    def _parameter_residuals(self, params: Tree) -> list[jax.Array]:
        """The residuals that depend only on parameters; no other part of forward is computed."""
        arguments = self._vjps[jax_compat.manual_axes()].arguments

        def residuals(params: Tree) -> list[jax.Array]:
            inputs, carry = jax.tree.map(Value.zeros, arguments)
            leaves = self._linearise(params, inputs, carry)[1]
            return [jnp.expand_dims(leaves[i], 0) for i in self._recomputed]

        return jaxprs.without_dead_code(residuals, params)

    def _backward(
        self,
        indices: list[int],
        params: Tree,
        sums: Tree,
        inputs: Tree,
        carry: Tree,
        residuals: list[jax.Array],
        cotangent: Output,
    ) -> tuple[Any, ...]:
        """Adds this microbatch's gradients to ``sums`` and returns the received activations' gradients.

        ``indices`` are the positions of ``residuals`` among all residuals.
        """
        by_index = dict(zip(indices, residuals, strict=True))
        grads, carry_grads = self._transpose(params, sums, inputs, carry, by_index, cotangent)
        return add_gradients(sums, grads), carry_grads

    def reducing_backward(
        self, params: Tree, sums: Tree, inputs: Tree, carry: Tree, residuals: list[jax.Array], cotangent: Output
    ) -> tuple[Tree, Tree, dict[str, jax.Array]]:
        """The body of ``backward`` that reduces gradients too, those of ``reduced_in_backward``; they come last."""
        by_index = dict(zip(self._read_residuals, residuals, strict=True))
        with reducing(True):
            grads, carry_grads = self._transpose(params, sums, inputs, carry, by_index, cotangent)
        named = by_name(grads)
        reduced = {name: named[name].reduced for name in self.reduced_in_backward}
        return add_gradients(sums, grads), carry_grads, reduced

    def _transpose(
        self,
        params: Tree,
        sums: Tree,
        inputs: Tree,
        carry: Tree,
        residuals: Mapping[int, jax.Array],
        cotangent: Output,
    ) -> tuple[Tree, Tree]:
        """Gradients of the vjp's parameters and of the received activations; ``residuals`` by index."""
        traced = self._vjps[jax_compat.manual_axes()]
        if self._recomputed and self._recomputed[0] not in residuals:
            recomputed = dict(zip(self._recomputed, self._parameter_residuals(params), strict=True))
            return self._transpose(params, sums, inputs, carry, {**residuals, **recomputed}, cotangent)
        leaves = []
        for index, (name, value) in enumerate(zip(self._input_of_residual, traced.residuals, strict=True)):
            if name is not None:
                leaves.append(inputs[name])
            elif index in residuals:
                leaves.append(residuals[index].squeeze(0))
            else:
                leaves.append(value.zeros())  # nothing reads it
        vjp = jax.tree.unflatten(traced.structure, leaves)
        # Arguments are passed again, so that backward reads none of forward's residuals that are arguments.
        jax_compat.replace_argument_residuals(vjp, 0, self._vjp_params(params, sums))
        if carry:  # empty where backward does not read it
            jax_compat.replace_argument_residuals(vjp, 1, carry)
        typed = [
            jax_compat.to_varying(x.astype(value.dtype), sorted(value.axes))
            for x, value in zip(jax.tree.leaves(cotangent), traced.outputs, strict=True)
        ]
        grads, carry_grads = vjp(jax.tree.unflatten(jax.tree.structure(self.out), typed))
        return grads, {name: carry_grads[name] for name in sorted(self.gradient_sources)}

    # ---- the same over the submesh -----------------------------------------------------------------------------------

    @cached_property
    def forward(self) -> Spmd:
        """``(params, inputs, carry) -> (Output, residuals)``, a list of arrays that is empty without a backward."""
        if not self.has_backward:
            return self._spmd(lambda *args: (self._plain(*args), []), (self._outputs, []))
        return self._forward_over(self._read_residuals)

    @cached_property
    def infer(self) -> Spmd:
        """``(params, inputs, carry) -> Output`` with the stage's predictions, if it has any, in place of losses."""
        return self._spmd(self._predict, self._outputs)

    @cached_property
    def backward(self) -> Spmd:
        """``(params, sums, inputs, carry, residuals, cotangent) -> (sums, gradients of carry by source stage)``.

        Arguments are as ``backward_avals``. ``carry`` is empty if backward does not read the received activations;
        ``sums`` is ``backward_part``.
        """
        spmd = self._backward_over(self._read_residuals)
        return PretracedSpmd(spmd.body, spmd.mesh, spmd.in_specs, spmd.out_specs, call=self._call_backward)

    @property
    def backward_avals(self) -> tuple[Any, ...]:
        """Avals of the arguments of ``backward``, in their order."""
        params, inputs, carry = self._avals
        received = carry if self.backward_reads_carry else {}
        return (
            params,
            self.backward_part(self.state.sums_avals),
            inputs,
            received,
            self.residual_avals,
            self.cotangent_aval,
        )

    def backward_part(self, sums: Tree) -> Tree:
        """The leaves of a tree like ``sums_avals`` that ``backward`` adds to: all, where the backward is not split."""
        return sums

    def with_backward_part(self, sums: Tree, part: Tree) -> Tree:
        """A tree like ``sums_avals`` with another ``backward_part``: the part itself, where it is the whole."""
        return part

    @property
    def forward_avals(self) -> tuple[Any, ...]:
        """Avals of the arguments of ``forward`` and ``infer``: parameters, host inputs, activations by source stage."""
        return self._avals

    @property
    def cotangent_aval(self) -> Output:
        """Avals of backward's cotangents: the activation's gradient, and those of the losses."""
        sharding = self.submesh.sharding(self.submesh.spread.replicated)
        weight = jax.ShapeDtypeStruct((len(self.model.losses),), jnp.float32, sharding=sharding)
        return Output(self.out.activation, None if self.out.result is None else weight)

    @property
    def residual_avals(self) -> list[Any]:
        """Avals of the residuals that are kept per microbatch in flight; empty for a stage without backward."""
        return [self._residuals[i].aval for i in self._read_residuals] if self.has_backward else []

    @cached_property
    def weights(self) -> Spmd:
        """``(sums, deferred) -> sums``, where the backward is split; else a TypeError."""
        raise TypeError(f"stage {self.model.name}: its backward is not split")

    @property
    def weights_avals(self) -> tuple[Any, ...]:
        """Avals of the arguments of ``weights``, in their order."""
        return self.weights_part(self.state.sums_avals), self.deferred_avals

    def weights_part(self, sums: Tree) -> Tree:
        """The leaves of a tree like ``sums_avals`` that ``weights`` adds to: none, where the backward is not split."""
        return {}

    def with_weights_part(self, sums: Tree, part: Tree) -> Tree:
        """A tree like ``sums_avals`` with another ``weights_part``: the sums, where it is empty."""
        return sums

    @property
    def deferred_avals(self) -> list[Any]:
        """Avals of the values kept per microbatch from B to W; empty where the backward is not split."""
        return []

    # ---- tracing -----------------------------------------------------------------------------------------------------

    @property
    def _token_axes(self) -> tuple[str, ...]:
        return self.submesh.spread.data

    @property
    def _position_axes(self) -> tuple[str, ...]:
        return self.submesh.spread.positions

    def _spmd(self, body: Any, out_specs: Any) -> Spmd:
        return Spmd(body, self.submesh.mesh, self._in_specs, out_specs)

    def _trace(self) -> None:
        """Traces forward and backward with all residuals, and determines which residuals backward reads.

        Programs reuse these two traces without the other residuals: tracing is most of a start's time.
        """
        specs: list[PartitionSpec] = []

        def forward(*args: Any) -> tuple[Output, list[jax.Array]]:
            result = self._forward(*args)
            self._residuals = [self._residual(value) for value in self._vjps[jax_compat.manual_axes()].residuals]
            specs[:] = [residual.spec for residual in self._residuals]  # read when the body has been traced
            return result

        wide = self._spmd(forward, (self._outputs, specs))
        self._wide_forward = jax.jit(wide, inline=True)
        shapes, _ = jax.eval_shape(self._wide_forward, *self._avals)
        self.out: Output = with_sharding(shapes, wide.mesh, self._outputs)
        self.backward_reads_carry, self._read_residuals = True, list(range(len(self._residuals)))
        avals = self.backward_avals
        self._wide_backward = jax.jit(self._backward_over(self._read_residuals), inline=True)
        flags = jaxprs.used_inputs(self._wide_backward, avals)
        carry, is_read = jax.tree.unflatten(jax.tree.structure(avals), flags)[3:5]
        self.backward_reads_carry = any(carry.values())
        self._read_residuals = [index for index, used in enumerate(is_read) if used]
        # Backward recomputes the residuals that depend only on parameters: each microbatch would keep a copy.
        names = from_parameters_alone(self._forward_over(self._read_residuals), self._avals, lambda result: result[1])
        names = {self._read_residuals[position]: params for position, params in names.items()}
        avals = {i: residual.aval for i, residual in enumerate(self._residuals)}
        require_small(self.model.name, avals, names, self._avals[0])
        self._recomputed = list(names)
        self._read_residuals = [index for index in self._read_residuals if index not in names]

    def _call_backward(
        self, params: Tree, sums: Tree, inputs: Tree, carry: Tree, residuals: list[jax.Array], cotangent: Output
    ) -> Any:
        by_index = dict(zip(self._read_residuals, residuals, strict=True))
        if self._recomputed:
            # The trace of forward has them already; what does not lead to them is dropped.
            recompute = self._forward_over(self._recomputed)
            zeros = jax.tree.map(zeros_of, self._avals[1:])
            values = jaxprs.without_dead_code(lambda params: recompute(params, *zeros)[1], params)
            by_index |= zip(self._recomputed, values, strict=True)
        all_residuals = [
            by_index[i] if i in by_index else zeros_of(residual.aval) for i, residual in enumerate(self._residuals)
        ]
        received = carry if self.backward_reads_carry else jax.tree.map(zeros_of, self._avals[2])
        return self._wide_backward(params, sums, inputs, received, all_residuals, cotangent)

    def _residual(self, value: Value) -> Residual:
        """The residual of a local value, stacked over the axes that it varies over."""
        axes, spec = self.submesh.spread.residual(value.axes)
        copies = math.prod(self.submesh.mesh.shape[axis] for axis in axes)
        aval = jax.ShapeDtypeStruct((copies, *value.shape), value.dtype, sharding=self.submesh.sharding(spec))
        return Residual(aval, spec)

    def _forward_over(self, indices: list[int]) -> Spmd:
        """The forward that returns some of the residuals, from the trace of all."""

        def select(result: tuple[Output, list[jax.Array]]) -> tuple[Output, list[jax.Array]]:
            return result[0], [result[1][i] for i in indices]

        return PretracedSpmd(
            lambda *args: select(self._forward(*args)),
            self.submesh.mesh,
            self._in_specs,
            (self._outputs, [self._residuals[i].spec for i in indices]),
            call=lambda *args: select(self._wide_forward(*args)),
        )

    def _backward_over(self, indices: list[int]) -> Spmd:
        spread, (params, inputs, carry) = self.submesh.spread, self._in_specs
        carry = carry if self.backward_reads_carry else {}
        cotangent = Output(self._sent, spread.replicated)  # unused for an output that the stage does not have
        sums = self.backward_part(self.state.sums_specs)
        in_specs = (params, sums, inputs, carry, [self._residuals[i].spec for i in indices], cotangent)
        gradients = {name: self._received[name] for name in sorted(self.gradient_sources)}
        out_specs = (sums, gradients, *self._deferred_specs())
        return Spmd(partial(self._backward, indices), self.submesh.mesh, in_specs, out_specs)

    def _deferred_specs(self) -> tuple[Any, ...]:
        """Specs of the further results of backward, after sums and gradients of activations."""
        return ()
