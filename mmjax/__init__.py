"""Trains multimodal LLMs in JAX, each module under its own parallel layout on its own devices."""

__version__ = "0.1.0.dev0"
