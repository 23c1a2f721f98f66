"""Batches from other hosts: servers that prepare steps on request, and the loader that requests them (ADR 27)."""
