"""Attention behind one interface: what is known of the tokens, and a kind of mask."""

from mmjax.attention.reference import MaskKind, attention
from mmjax.attention.tokens import Tokens

__all__ = ["MaskKind", "Tokens", "attention"]
