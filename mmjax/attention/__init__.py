"""Attention behind one interface: what is known of the tokens, and a mask."""

from mmjax.attention.blockwise import KEPT, attention
from mmjax.attention.cache import Cache, written
from mmjax.attention.mask import Mask, MaskKind
from mmjax.attention.reference import dense_attention
from mmjax.attention.tokens import Tokens

__all__ = ["KEPT", "Cache", "Mask", "MaskKind", "Tokens", "attention", "dense_attention", "written"]
