"""Assembles a run from a ``Recipe``: model, data, devices, schedule and executor."""
