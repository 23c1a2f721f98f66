"""Schedules of small SPMD programs: made, checked, timed and drawn. Nothing here knows a device or array."""
