"""Attention behind one interface: segment ids, positions, mask kind."""

from mmjax.attention.reference import attention

__all__ = ["attention"]
