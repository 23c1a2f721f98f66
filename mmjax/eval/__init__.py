"""Evaluation: the model's answers to held-out samples, and their scores."""

from typing import TYPE_CHECKING

from mmjax.exports import exported

if TYPE_CHECKING:
    from mmjax.eval.report import EvalReport as EvalReport
    from mmjax.eval.report import evaluate as evaluate

__all__ = ["EvalReport", "evaluate"]

__getattr__ = exported(__name__, {"mmjax.eval.report": ("EvalReport", "evaluate")})
