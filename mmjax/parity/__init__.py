"""Compares a configuration's layouts with the dense reference, on samples of hard cases. `mmjax.check` uses it."""

from mmjax.parity.engine import CheckReport, check

__all__ = ["CheckReport", "check"]
