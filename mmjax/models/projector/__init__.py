"""Projectors between the rows of two modules."""
