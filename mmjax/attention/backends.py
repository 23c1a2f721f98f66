"""Attention backends: dense, blockwise, and libraries' kernels; one is chosen by device, shape and mask.

Every backend gives the same values up to rounding. ``blockwise`` supports every mask on every device. A library's
kernel supports some masks and shapes on some devices, and refuses others with a reason in words.

Shapes: B rows, T queries, S keys, H query heads, G key/value heads, K width of queries and keys, V of
values (all local to this rank). Kernels of libraries need V = K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Array, Float

from mmjax.attention import blockwise
from mmjax.attention.cudnn import CuDNN
from mmjax.attention.custom_vjp import TokenInfo, attend, token_info
from mmjax.attention.exchange import EXCHANGES, attend_across_ranks, token_info_with_order
from mmjax.attention.kernels import AttentionCall, Kernel
from mmjax.attention.language import ITEMS
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.row_runs import ANY_RUNS
from mmjax.attention.settings import AUTO
from mmjax.attention.tokamax_kernels import Tokamax
from mmjax.attention.tokens import Tokens
from mmjax.configurable import require

# The names are those of ``settings.BACKENDS``.
XLA_BACKENDS: Mapping[str, Callable[..., Array]] = {"dense": dense_attention, "blockwise": blockwise.attention}
"""Backends in plain XLA, which support every mask on every device."""
KERNELS: Mapping[str, type[Kernel]] = {kernel.LIBRARY: kernel for kernel in (CuDNN, Tokamax)}
"""Backends of libraries."""
AUTO_KERNELS = ("cudnn",)
"""The kernels that ``auto`` may choose, in order of preference."""


@dataclass(frozen=True)
class Backend:
    """The attention backend of a module.

    Attributes:
      name: ``auto`` or the name of a backend.
      setting: the gin setting that holds the name, for messages, such as "llm/Decoder.attention".
      max_runs: the known bound on the number of runs in rows (see ``row_runs``). Without one, ``cudnn`` and ``auto``
        compute blockwise.
      distances: the distances over which needed blocks travel; ``None`` where the device chooses (see ``reach``).
    """

    name: str = AUTO
    setting: str = "attention"
    max_runs: int = ANY_RUNS
    distances: tuple[int, ...] | None = None

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGV: Float[Array, "B S G V"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens | None = None,
        precomputed: TokenInfo | None = None,
        soft_cap: float = 0.0,
    ) -> Float[Array, "B T H V"]:
        """Grouped-query attention within segments, of rows that are complete on this rank; differentiable.

        Args:
          q_BTHK, k_BSGK, v_BSGV: queries and keys with rotary embedding, and values; H is a multiple of G.
          tokens: the queries' tokens.
          mask: the attention mask.
          keys: the keys' tokens; by default the queries' tokens.
          precomputed: the result of ``precompute`` for this mask and these tokens; by default it is computed here.
          soft_cap: c > 0 makes a score s into c · tanh(s / c); 0 leaves it.

        Raises:
          ConfigError: the backend is a kernel that does not support these arrays, this mask or these devices.
          ValueError: a host input of the mask is missing.
        """
        call = AttentionCall.of(
            q_BTHK,
            k_BSGK,
            tokens,
            mask,
            keys,
            max_runs=self.max_runs,
            value_width=v_BSGV.shape[-1],
            soft_cap=soft_cap,
        )
        name = self.resolve(call)
        if name in XLA_BACKENDS:
            return XLA_BACKENDS[name](q_BTHK, k_BSGK, v_BSGV, tokens, mask, keys, soft_cap)
        info = token_info(tokens, mask)
        return attend(KERNELS[name].of(call), q_BTHK, k_BSGK, v_BSGV, info | (precomputed or {}), info)

    def attend_across_ranks(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BTGK: Float[Array, "B T G K"],
        v_BTGV: Float[Array, "B T G V"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens,
        *,
        axes: tuple[str, ...],
        cp_way: str,
        precomputed: TokenInfo | None = None,
        soft_cap: float = 0.0,
    ) -> Float[Array, "B T H V"]:
        """Attention with the tokens of rows split over mesh axes, inside ``shard_map``.

        Args:
          q_BTHK, k_BTGK, v_BTGV: queries, keys and values of this rank's tokens.
          tokens: this rank's tokens.
          mask: the attention mask.
          keys: the tokens of complete rows, from ``exchange.gather_tokens`` with the same ``cp_way``.
          axes: mesh axes that the tokens of rows are split over.
          cp_way: a key of ``exchange.EXCHANGES``: "gather", "need", "ring" or "all-to-all".
          precomputed: the result of ``precompute`` for this mask and these tokens.
          soft_cap: c > 0 makes a score s into c · tanh(s / c); 0 leaves it.

        Raises:
          ConfigError: the backend is a kernel that does not support these arrays, this mask, ``cp_way`` or these
            devices.
          ValueError: the heads cannot be divided over the ranks, as "all-to-all" needs it.
        """
        widths = {"value_width": v_BTGV.shape[-1], "soft_cap": soft_cap}
        call = AttentionCall.of(q_BTHK, k_BTGK, tokens, mask, keys, cp_way, self.max_runs, **widths)
        name = self.resolve(call)
        kernel = KERNELS[name].of(call) if name in KERNELS else blockwise.Blockwise(mask, soft_cap=soft_cap)
        return attend_across_ranks(
            q_BTHK,
            k_BTGK,
            v_BTGV,
            tokens,
            keys,
            kernel=kernel,
            axes=axes,
            cp_way=cp_way,
            precomputed=precomputed,
            distances=self.distances,
        )

    def precompute(self, mask: Mask, tokens: Tokens, keys: Tokens | None, cp_way: str) -> TokenInfo:
        """Arrays that kernels read beside the mask's inputs, computed once for all layers with this mask.

        The result is for the argument ``precomputed`` of ``attend`` and ``attend_across_ranks``. It is {} unless the
        backend's name is that of a kernel that needs such arrays; for "auto" it is {}.

        Args:
          mask: the mask of the layers.
          tokens: this rank's tokens.
          keys: all tokens of the rows, where they are split over ranks (see ``exchange.gather_tokens``); ``None`` where
            rows are complete.
          cp_way: how ranks exchange tokens, a key of ``exchange.EXCHANGES``; not read where rows are complete.
        """
        if self.name not in KERNELS:
            return {}
        kernel = KERNELS[self.name]
        if keys is None:
            info = token_info(tokens, mask)
            return kernel.precompute(mask, info, info, in_row_order=True)
        key_info = token_info_with_order(keys, mask)
        query_info = EXCHANGES[cp_way].tokens_of_queries(token_info_with_order(tokens, mask), key_info)
        return kernel.precompute(mask, query_info, key_info, in_row_order=False)

    def compiled_runs(self, call: AttentionCall) -> int:
        """The value of ``max_runs`` for which the call is compiled (see ``Kernel.compiled_runs``).

        Raises:
          ConfigError: the backend is a kernel that does not support the call.
        """
        name = self.resolve(call)
        return KERNELS[name].compiled_runs(call) if name in KERNELS else ANY_RUNS

    def needs_neighbours(self, mask: Mask) -> bool:
        """Whether the backend computes under the mask only where the tokens of each medium are neighbours."""
        has_items = ITEMS in mask.relations and mask.shows_intervals
        return has_items and self.name in KERNELS and KERNELS[self.name].ONE_INTERVAL

    def resolve(self, call: AttentionCall) -> str:
        """The name of the backend that computes a call, such as "blockwise"; never "auto".

        Raises:
          ConfigError: the backend is a kernel that does not support the call.
        """
        if self.name in XLA_BACKENDS:
            return self.name
        if self.name == AUTO:
            return next((name for name in AUTO_KERNELS if not KERNELS[name].refusal(call)), "blockwise")
        refusal = KERNELS[self.name].refusal(call)
        require(not refusal, self.setting, self.name, f"{refusal}; use {AUTO!r} or 'blockwise'")
        return self.name


AUTO_BACKEND = Backend()
"""The backend of a module without such a setting."""
