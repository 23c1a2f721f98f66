"""Decoding with one stage: SPMD functions for the first tokens of rows, which make a cache, and for one that follows.

A cache is ``{"known": {"segments": [B, S], …}, "layers": {name: ((k, v), …)}}``, where keys and values of a stack of
layers are ``[L, B, S, G, K]``: rows lie over dp, heads over tp (see ``attention.cache``). Known is what the stage's
masks read of each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.attention.cache import Cache, updated
from mmjax.attention.tokens import Tokens
from mmjax.mesh.spmd import Program, Spmd, with_sharding
from mmjax.mesh.spread import Spread
from mmjax.models.sampling import next_token
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import Value
from mmjax.pipeline.stage import Output, with_handles
from mmjax.pipeline.stage_state import StageState

Tree = Any
CHOICE, ORDER = "choice", "order"
"""Names of inputs beside the module's: ``SamplingParams``, and the places of new tokens in their rows ``[B, T]``."""


class StageDecoding:
    """What a stage computes while text is generated, for one shape of rows.

    ``begin`` is ``(params, inputs, carry) -> (Output, cache)`` and ``follow`` is ``(params, inputs, carry, cache) ->
    (Output, cache)``. The result of the last stage is the next token of each row and its log-probability.

    Attributes:
      out: avals of the outputs of ``begin``.
      cache: avals of the cache.
    """

    def __init__(
        self,
        model: StageModel,
        state: StageState,
        inputs: Mapping[str, Any],
        carry: Mapping[str, Any],
        cells: int,
        room: int,
    ):
        """Traces ``begin``.

        Args:
          model: the stage.
          state: its parameters, and the devices that they are on.
          inputs: avals of its host inputs, rows first, with ``SamplingParams`` for a last stage.
          carry: avals of the activations that reach it, by source stage.
          cells: cells of a microbatch.
          room: tokens of a row, S.
        """
        self.model, self.state, self.submesh, self.room = model, state, state.submesh, room
        self._cells = cells // self.submesh.layout.dp
        self._avals = (state.param_avals, inputs, carry)
        self._cache_specs: list[PartitionSpec] = []
        # One token at a time has no parts: every rank of cp has whole rows, and computes the same.
        self._axes = self.submesh.axes.whole_rows
        self._spread = Spread.of(self._axes)
        rows = self._spread.whole_rows
        self._in_specs = (state.param_specs, dict.fromkeys(inputs, rows), dict.fromkeys(carry, rows))
        self._out_specs = (Output(rows, rows), self._cache_specs)
        begin = Spmd(self._begin, self.submesh.mesh, self._in_specs, self._out_specs)
        out, cache = jax.eval_shape(begin, *self._avals)
        self.out: Output = with_sharding(out, begin.mesh, self._out_specs[0])
        self.cache: list[Any] = with_sharding(cache, begin.mesh, self._cache_specs)
        self._begin_spmd = begin

    @cached_property
    def begin(self) -> Program:
        """The program for the first tokens of rows."""
        return Program(f"begin {self.model.name}", self._begin_spmd, self._avals, (self.out, self.cache))

    def follow(self, inputs: Mapping[str, Any], carry: Mapping[str, Any]) -> Program:
        """The program for one more token of each row, which overwrites the cache that it is given.

        Args:
          inputs: as of ``begin``, of one token, and their ``ORDER``.
          carry: likewise.
        """
        rows, (params, _, _) = self._spread.whole_rows, self._in_specs
        specs = (params, dict.fromkeys(inputs, rows), dict.fromkeys(carry, rows), self._cache_specs)
        spmd = Spmd(self._follow, self.submesh.mesh, specs, self._out_specs)
        return Program.of(f"follow {self.model.name}", spmd, (self._avals[0], inputs, carry, self.cache), donate=[3])

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def _begin(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        cache = Cache(Tokens.of(inputs))
        out = self._output(params, inputs, carry, cache)
        held = {"known": self._known(inputs), "layers": cache.new}
        leaves, self._structure = jax.tree.flatten(held)
        made = [updated(self._empty(leaf), leaf, cache.tokens.orders_BT) for leaf in leaves]
        # Specs are read when the body has been traced.
        self._cache_specs[:] = [self._spread.cache(leaf.ndim, jax_compat.varying_axes(leaf)) for leaf in leaves]
        return out, made

    def _follow(self, params: Tree, inputs: Tree, carry: Tree, held: list[jax.Array]) -> tuple[Output, list[jax.Array]]:
        tree = jax.tree.unflatten(self._structure, held)
        cache = Cache(Tokens.of(inputs), tree["known"], tree["layers"])
        out = self._output(params, inputs, carry, cache)
        new = jax.tree.leaves({"known": self._known(inputs), "layers": cache.new})
        return out, [updated(own, leaf, inputs[ORDER]) for own, leaf in zip(held, new, strict=True)]

    def _known(self, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: inputs[name] for name in self.model.remembers}

    def _empty(self, new: jax.Array) -> jax.Array:
        """An empty cache for what is known of new tokens."""
        rows = 1 if new.ndim == len("LBTGK") else 0
        shape = (*new.shape[: rows + 1], self.room, *new.shape[rows + 2 :])
        return Value(shape, new.dtype, jax_compat.varying_axes(new)).zeros()

    def _output(self, params: Tree, inputs: Tree, carry: Tree, cache: Cache) -> Output:
        axes = self._axes
        params = with_handles(self.model, self.state, jax_compat.tree_to_varying(params, self._spread.data))
        assert self.model.decode
        x = self.model.decode(params, inputs, carry, axes, self._cells, cache)
        if not self.model.logits:
            return Output(x, None)
        choice = inputs[CHOICE]
        x_B1D = jnp.take_along_axis(x, choice.last[:, None, None], axis=1)
        logits_B1V = self.model.logits(params, inputs, x_B1D, axes)
        return Output(None, next_token(logits_B1V[:, 0], choice, axes))
