"""Parity: a configuration's layouts against the dense reference, on samples made to be hard. `mmjax.check` uses it."""

from mmjax.parity.engine import CheckReport, check

__all__ = ["CheckReport", "check"]
