"""Batches from other hosts: servers that prepare steps on request, and the loader that asks them (ADR 27)."""
