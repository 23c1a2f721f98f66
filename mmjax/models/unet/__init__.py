"""UNets of latent diffusion: generators of pictures."""
