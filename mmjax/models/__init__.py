"""Modules as pure functions with their sharding table, and the graph that makes them one model."""
