"""Latents of a sample's pictures by an encoder in the model: each picture is encoded whole, and alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from mmjax.models.autoencoder.layers import encode_whole, to_generator
from mmjax.reference.arithmetic import Leaves, module_of

if TYPE_CHECKING:
    from mmjax.data.types import Sample
    from mmjax.models.graph import MultimodalModel


def latent_encoders(model: MultimodalModel) -> dict[str, str]:
    """The encoder of the latents of each generator that has one in the model, by the generator's name."""
    return {edge.target: edge.source for edge in model.edges if edge.latents}


def with_latents(leaves: Leaves, model: MultimodalModel, sample: Sample) -> Sample:
    """The sample with latents in place of the noise with which they are drawn, and of the pictures of their encoder.

    Of the pictures that others are made from it has the means of latents. `leaves` are logical leaves by name; `model`
    is as `build_model(recipe, tokenizer)` gives it.
    """
    media, references = dict(sample.media), dict(sample.references)
    for generator, encoder in latent_encoders(model).items():
        pictures = iter(media.pop(encoder, ()))
        behind = references.get(generator) or ((),) * len(media.get(generator, ()))
        latents, followed = [], []
        for noise, of_medium in zip(media.get(generator, ()), behind, strict=True):
            mean, deviation = _distribution(leaves, model, encoder, next(pictures))
            latents.append(mean + deviation * noise)
            followed.append(tuple(_distribution(leaves, model, encoder, next(pictures))[0] for _ in of_medium))
        if latents:
            media[generator] = tuple(latents)
            references |= {generator: tuple(followed)} if generator in references else {}
    return dataclasses.replace(sample, media=media, references=references)


def _distribution(
    leaves: Leaves, model: MultimodalModel, encoder: str, picture: np.ndarray
) -> tuple[Float[np.ndarray, "h w Z"], Float[np.ndarray, "h w Z"]]:
    """Mean and deviation of a picture's latent, as a generator sees them."""
    c = model.nodes[encoder].config.autoencoder
    tree: dict[str, Any] = {}
    for name, leaf in ((name, leaf) for name, leaf in leaves.items() if module_of(name) == encoder):
        *path, last = name.split("/")[3:]  # behind "vae/layers/000"
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = jax.lax.stop_gradient(jnp.asarray(leaf))
    mean, log_variance = (part[0] for part in encode_whole(c, tree, jnp.asarray(picture[None])))
    scale = to_generator(c, jnp.ones_like(mean)) - to_generator(c, jnp.zeros_like(mean))
    return np.asarray(to_generator(c, mean)), np.asarray(jnp.exp(0.5 * log_variance) * scale)
