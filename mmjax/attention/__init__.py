"""Attention behind one interface: what is known of the tokens, and a kind of mask."""

from mmjax.attention.cache import Cache, written
from mmjax.attention.reference import MaskKind, attention
from mmjax.attention.tokens import Tokens

__all__ = ["Cache", "MaskKind", "Tokens", "attention", "written"]
