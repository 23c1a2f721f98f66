"""Ways to compute attention, of which one is chosen by device, shape and mask.

Every way gives the same values up to rounding. ``blockwise`` takes every mask on every device; a library's kernel takes
some masks and shapes on some devices, and says in words why it does not take others.

Shapes: B rows, T tokens that ask, S tokens that are asked, H query heads, G key/value heads, K head width (all local to
this rank).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Array, Float

from mmjax.attention import blockwise
from mmjax.attention.by_hand import Known, attend, known
from mmjax.attention.cudnn import CuDNN
from mmjax.attention.exchange import WAYS, attention_among, with_order
from mmjax.attention.kernels import Asked, Kernel
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.settings import AUTO
from mmjax.attention.tokamax_kernels import Tokamax
from mmjax.attention.tokens import Tokens
from mmjax.configurable import require

# The names are those of ``settings.ATTENTIONS``.
PLAIN: Mapping[str, Callable[..., Array]] = {"dense": dense_attention, "blockwise": blockwise.attention}
"""Ways that take every mask on every device."""
KERNELS: Mapping[str, type[Kernel]] = {kernel.LIBRARY: kernel for kernel in (CuDNN, Tokamax)}
"""Ways of a library."""
BEST_FIRST = ("cudnn",)
"""The kernels that ``auto`` may choose, the best first."""


@dataclass(frozen=True)
class Way:
    """The way that a module asks for.

    Attributes:
      name: ``auto`` or one of the ways.
      setting: where it is set, for messages, such as "llm/Decoder.attention".
    """

    name: str = AUTO
    setting: str = "attention"

    def attend(
        self,
        q_BTHK: Float[Array, "B T H K"],
        k_BSGK: Float[Array, "B S G K"],
        v_BSGK: Float[Array, "B S G K"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens | None = None,
        found: Known | None = None,
    ) -> Float[Array, "B T H K"]:
        """Attention of rows that are whole on this rank; for arguments see ``blockwise.attention``, and ``found``.

        Raises:
          ConfigError: the way is a kernel that does not take such arrays, such a mask or these devices.
        """
        asked = Asked.of(q_BTHK, k_BSGK, tokens, mask, keys)
        chosen = self.chosen(asked)
        if chosen in PLAIN:
            return PLAIN[chosen](q_BTHK, k_BSGK, v_BSGK, tokens, mask, keys)
        asking = known(tokens, mask)
        return attend(KERNELS[chosen].of(asked), q_BTHK, k_BSGK, v_BSGK, asking | (found or {}), asking)

    def among(
        self,
        axes: tuple[str, ...],
        cp_way: str,
        q_BTHK: Float[Array, "B T H K"],
        k_BTGK: Float[Array, "B T G K"],
        v_BTGK: Float[Array, "B T G K"],
        tokens: Tokens,
        mask: Mask,
        keys: Tokens,
        found: Known | None = None,
    ) -> Float[Array, "B T H K"]:
        """The same where the tokens of rows lie over some axes; see ``exchange.attention_among``."""
        asked = Asked.of(q_BTHK, k_BTGK, tokens, mask, keys, cp_way)
        chosen = self.chosen(asked)
        kernel = KERNELS[chosen].of(asked) if chosen in KERNELS else blockwise.Blockwise(mask)
        return attention_among(axes, cp_way, kernel, q_BTHK, k_BTGK, v_BTGK, tokens, keys, found)

    def found(self, mask: Mask, tokens: Tokens, keys: Tokens | None, cp_way: str) -> Known:
        """What kernels read of tokens beside the mask's inputs, found once for all layers with this mask.

        Args:
          mask: which tokens see which.
          tokens: what is known of this rank's tokens.
          keys: what is known of all tokens of the rows, where they lie on several ranks.
          cp_way: how keys of other ranks are brought, a key of ``exchange.WAYS``.
        """
        if self.name not in KERNELS:
            return {}
        found = KERNELS[self.name].found
        if keys is None:
            asking = known(tokens, mask)
            return found(mask, asking, asking, by_index=True)
        asked = with_order(keys, mask)
        return found(mask, WAYS[cp_way].queries(with_order(tokens, mask), asked), asked, by_index=False)

    def chosen(self, asked: Asked) -> str:
        """The name of the way that is taken for such a call."""
        if self.name in PLAIN:
            return self.name
        if self.name == AUTO:
            return next((name for name in BEST_FIRST if not KERNELS[name].refusal(asked)), "blockwise")
        why = KERNELS[self.name].refusal(asked)
        require(not why, self.setting, self.name, f"{why}; use {AUTO!r} or 'blockwise'")
        return self.name


ANY = Way()
"""The way that is chosen where a module asks for none."""
