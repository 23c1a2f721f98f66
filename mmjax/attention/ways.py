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

from mmjax.attention import blockwise, cudnn, tokamax_kernels
from mmjax.attention.kernels import Asked
from mmjax.attention.mask import Mask
from mmjax.attention.reference import dense_attention
from mmjax.attention.settings import AUTO
from mmjax.attention.tokens import Tokens
from mmjax.configurable import require

# The names are those of ``settings.ATTENTIONS``.
PLAIN: Mapping[str, Callable[..., Array]] = {"dense": dense_attention, "blockwise": blockwise.attention}
"""Ways that take every mask on every device."""
KERNELS = {"cudnn": cudnn, "tokamax": tokamax_kernels}
"""Ways of a library: modules with ``refusal`` and ``attention``."""
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
    ) -> Float[Array, "B T H K"]:
        """Attention by this way; for arguments see ``blockwise.attention``.

        Raises:
          ConfigError: the way is a kernel that does not take such arrays, such a mask or these devices.
        """
        chosen = self.chosen(Asked.of(q_BTHK, k_BSGK, tokens, mask, keys))
        attend = PLAIN[chosen] if chosen in PLAIN else KERNELS[chosen].attention
        return attend(q_BTHK, k_BSGK, v_BSGK, tokens, mask, keys)

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
