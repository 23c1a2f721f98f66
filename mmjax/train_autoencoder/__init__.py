"""``python -m mmjax.train_autoencoder``: trains an autoencoder of pictures, whose latents a generator makes."""
