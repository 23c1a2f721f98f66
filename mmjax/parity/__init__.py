"""Parity: a configuration's layouts against the dense reference, on samples made to be hard. `mmjax.check` uses it."""

from mmjax.parity.engine import Report, check

__all__ = ["Report", "check"]
