"""Answers to messages about images and sounds."""

from typing import TYPE_CHECKING

from mmjax.exports import exported

if TYPE_CHECKING:
    from mmjax.generate.answers import Answer as Answer
    from mmjax.generate.answers import generate as generate

__all__ = ["Answer", "generate"]

__getattr__ = exported(__name__, {"mmjax.generate.answers": ("Answer", "generate")})
