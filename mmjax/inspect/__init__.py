"""Figures and samples of the data that a configuration trains on."""
