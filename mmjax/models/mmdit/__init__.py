"""Double-stream diffusion transformers: generators of pictures with joint attention of condition and picture."""
