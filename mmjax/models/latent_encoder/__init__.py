"""The family of encoders of pictures that a generator learns to make as latents."""
