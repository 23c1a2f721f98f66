"""Schedules of small SPMD programs: made, checked, timed, drawn and replayed. Nothing here knows a device or array."""
