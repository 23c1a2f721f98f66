"""Schedules of small SPMD programs: made, checked, timed, drawn and executed."""
