"""Measurements of a configuration's layers and of links between devices, for plans."""
