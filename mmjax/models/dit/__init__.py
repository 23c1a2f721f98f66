"""Diffusion transformers: generators of pictures."""
