"""Autoencoders of pictures: latents of pictures, and pictures of latents. ``config`` and the weights import no JAX."""
