"""Layouts, the world's devices, submeshes and the boundaries between them. Knows no model."""
