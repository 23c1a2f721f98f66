"""Assembles a run from a ``Config``: model, data, devices, schedule and executor."""
