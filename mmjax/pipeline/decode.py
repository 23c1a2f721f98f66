"""Decoding with one stage: SPMD functions for prefill, which fills a cache, and for decoding one token.

A cache is ``{"known": {"segments": [B, S], …}, "layers": {name: ((k, v), …)}}``. Keys and values of a stack of layers
are ``[L, B, S, G, K]``, with rows sharded over dp and heads over tp (see ``attention.cache``). ``known`` is the
information of each token that the stage's masks read. A layer with a state has a ``State`` in place of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax import jax_compat
from mmjax.attention.cache import Cache, State, updated
from mmjax.attention.tokens import Tokens
from mmjax.mesh.spmd import Program, Spmd, with_sharding
from mmjax.mesh.spread import Spread
from mmjax.models.sampling import next_token
from mmjax.models.stage_model import StageModel
from mmjax.models.taps import Value
from mmjax.pipeline.stage import Output
from mmjax.pipeline.stage_params import with_handles
from mmjax.pipeline.stage_state import StageState

Tree = Any
CHOICE, ORDER = "choice", "order"
"""Names of further inputs: ``SamplingParams``, and the positions of new tokens in their rows ``[B, T]``."""


class StageDecoding:
    """Prefill and decoding functions of one stage, for one shape of rows.

    ``prefill`` is ``(params, inputs, carry) -> (Output, cache)`` and ``decode`` is ``(params, inputs, carry, cache) ->
    (Output, cache)``. The result of the last stage is the next token of each row and its log-probability, each ``[B]``.
    A cache is a list of its arrays.

    Attributes:
      out: avals of the outputs of ``prefill``.
      cache: avals of the cache.
    """

    def __init__(
        self,
        model: StageModel,
        state: StageState,
        inputs: Mapping[str, Any],
        carry: Mapping[str, Any],
        *,
        cells: int,
        room: int,
    ):
        """Traces ``prefill``.

        Args:
          model: the stage.
          state: its parameters, and the devices that they are on.
          inputs: avals of its host inputs, rows first, with ``SamplingParams`` for a last stage.
          carry: avals of the activations that reach it, by source stage.
          cells: cells of a microbatch.
          room: capacity of a row in tokens, S.
        """
        self.model, self.state, self.submesh, self.room = model, state, state.submesh, room
        self._cells = cells // self.submesh.layout.dp
        self._avals = (state.param_avals, inputs, carry)
        self._cache_specs: list[PartitionSpec] = []
        # A single token cannot be split: every rank of cp has whole rows, and computes the same.
        self._axes = self.submesh.axes.whole_rows
        self._spread = Spread.of(self._axes)
        rows = self._spread.whole_rows
        self._in_specs = (state.param_specs, dict.fromkeys(inputs, rows), dict.fromkeys(carry, rows))
        self._out_specs = (Output(rows, rows), self._cache_specs)
        prefill = Spmd(self._prefill, self.submesh.mesh, self._in_specs, self._out_specs)
        out, cache = jax.eval_shape(prefill, *self._avals)
        self.out: Output = with_sharding(out, prefill.mesh, self._out_specs[0])
        self.cache: list[Any] = with_sharding(cache, prefill.mesh, self._cache_specs)
        self._prefill_spmd = prefill

    @cached_property
    def prefill(self) -> Program:
        """The program for prompts, which fills the cache."""
        return Program(f"prefill {self.model.name}", self._prefill_spmd, self._avals, (self.out, self.cache))

    def decode(self, inputs: Mapping[str, Any], carry: Mapping[str, Any]) -> Program:
        """The program for one more token of each row; it donates its cache argument.

        Args:
          inputs: avals of the host inputs of one token, with its ``ORDER``.
          carry: avals of the activations that reach the stage, by source stage.
        """
        rows, (params, _, _) = self._spread.whole_rows, self._in_specs
        specs = (params, dict.fromkeys(inputs, rows), dict.fromkeys(carry, rows), self._cache_specs)
        spmd = Spmd(self._decode, self.submesh.mesh, specs, self._out_specs)
        return Program.of(f"decode {self.model.name}", spmd, (self._avals[0], inputs, carry, self.cache), donate=[3])

    # ---- functions of local shards -----------------------------------------------------------------------------------

    def _prefill(self, params: Tree, inputs: Tree, carry: Tree) -> tuple[Output, list[jax.Array]]:
        cache = Cache(Tokens.of(inputs))
        out = self._output(params, inputs, carry, cache)
        contents = {"known": self._token_info(inputs), "layers": cache.new}
        leaves, self._structure = jax.tree.flatten(contents)
        self._is_state = _states(contents)
        orders_BT = cache.tokens.orders_BT
        caches = [
            leaf if is_state else updated(self._empty(leaf), leaf, orders_BT)
            for leaf, is_state in zip(leaves, self._is_state, strict=True)
        ]
        # Specs are read when the body has been traced.
        self._cache_specs[:] = [self._spread.cache(leaf.ndim, jax_compat.varying_axes(leaf)) for leaf in leaves]
        return out, caches

    def _decode(
        self, params: Tree, inputs: Tree, carry: Tree, caches: list[jax.Array]
    ) -> tuple[Output, list[jax.Array]]:
        tree = jax.tree.unflatten(self._structure, caches)
        cache = Cache(Tokens.of(inputs), tree["known"], tree["layers"])
        out = self._output(params, inputs, carry, cache)
        new = jax.tree.leaves({"known": self._token_info(inputs), "layers": cache.new})
        return out, [
            leaf if is_state else updated(cached, leaf, inputs[ORDER])
            for cached, leaf, is_state in zip(caches, new, self._is_state, strict=True)
        ]

    def _token_info(self, inputs: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: inputs[name] for name in self.model.remembers}

    def _empty(self, new: jax.Array) -> jax.Array:
        """An empty cache for arrays like ``new``, whose token dimension is ``room`` long."""
        row_dimension = 1 if new.ndim == len("LBTGK") else 0
        shape = (*new.shape[: row_dimension + 1], self.room, *new.shape[row_dimension + 2 :])
        return Value(shape, new.dtype, jax_compat.varying_axes(new)).zeros()

    def _output(self, params: Tree, inputs: Tree, carry: Tree, cache: Cache) -> Output:
        axes = self._axes
        params = jax_compat.tree_to_varying(params, self._spread.data)
        params = with_handles(self.model, self.state, params, predicting=True)
        x = self.model.decode(params, inputs, carry, axes, self._cells, cache)
        if not self.model.last:
            return Output(x, None)
        choice = inputs[CHOICE]
        x_B1D = jnp.take_along_axis(x, choice.last[:, None, None], axis=1)
        logits_B1V = self.model.logits(params, inputs, x_B1D, axes)
        return Output(None, next_token(logits_B1V[:, 0], choice, axes))


def _states(contents: Tree) -> list[bool]:
    """Whether each array of a cache is part of a ``State``, in the order of ``jax.tree.leaves``."""
    nodes = jax.tree.leaves(contents, is_leaf=lambda node: isinstance(node, State))
    return [isinstance(node, State) for node in nodes for _ in jax.tree.leaves(node)]
