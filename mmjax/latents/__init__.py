"""``python -m mmjax.latents``: makes the latents of pictures ahead, for generators of latents."""
