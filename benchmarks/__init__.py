"""Benchmarks that run in a checkout alone: ``python -m mmjax.bench NAME`` loads them from here.

`mmjax/bench/` has their names, flags and rows, and the benchmarks that an installed package has too.
"""
