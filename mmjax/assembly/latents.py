"""Latents in a run: the media of a generator of latents, and the decoding of its drawings."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from mmjax.configurable import ConfigError, require
from mmjax.data.config import LatentsConfig
from mmjax.data.latents import Description, folder_of
from mmjax.data.types import BLANK, ENCODED, EncoderSpec, Sample
from mmjax.models.autoencoder.weights import settings as settings_of
from mmjax.recipe import Recipe
from mmjax.weights.folder import read_config

if TYPE_CHECKING:
    from mmjax.models.autoencoder.model import Autoencoder

Drawings = Mapping[str, tuple[np.ndarray, ...]]
"""Media [h, w, C] drawn for one sample, by generator; values in the range that is learned."""


def with_latents(spec: EncoderSpec, name: str, latents: LatentsConfig) -> EncoderSpec:
    """The spec of the generator ``name``; with latents it has their folder and factor.

    Raises:
      ConfigError: the folder of latents, or of their autoencoder, cannot be read, or has other channels.
    """
    if spec.latents == ENCODED or not (latents.path or latents.autoencoder):
        return spec
    try:
        if latents.path in ("", BLANK):
            config = settings_of(read_config(latents.autoencoder))
            folder, factor, channels = latents.path, config.factor, config.latent_channels
        else:
            found = folder_of(latents.path)
            description = Description.read(found)
            folder, factor, channels = str(found), description.factor, description.channels
    except ConfigError as error:
        raise ConfigError(f"{name}/Latents: {error}") from None
    fix = f"{name!r} makes {spec.channels} channels; set its channels to {channels}"
    require(channels == spec.channels, f"{name}/Latents.path", latents.path or latents.autoencoder, fix)
    return replace(spec, latents=folder, factor=factor)


def encoded_in_step(specs: Mapping[str, EncoderSpec], encoder: str, generator: str) -> dict[str, EncoderSpec]:
    """The specs of an encoder of latents, and of the generator whose pictures it encodes in the step, by name.

    Args:
      specs: specs by name, of at least these two.
      encoder: the encoder's name.
      generator: the generator's name.
    """
    of_encoder, of_generator = specs[encoder], specs[generator]
    pictures = replace(
        of_encoder,
        merge=of_generator.block,
        drawn=True,
        references=of_generator.references,
        bounded_by=f"{encoder}/{of_encoder.bounded_by}",
    )
    encoded = {"latents": ENCODED, "pictures": pictures, "encoder": encoder, "factor": of_encoder.patch}
    return {encoder: replace(of_encoder, encodes=generator), generator: replace(of_generator, **encoded)}


@dataclass(frozen=True)
class Decoders:
    """Makes pictures of the latents that generators draw.

    Attributes:
      folders: the folder of the autoencoder of each generator of latents, by its name; "" where it is not known.
      encoders: the module that makes latents in the step, by the generator's name; it has the pictures of samples.
    """

    folders: Mapping[str, str]
    encoders: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe) -> Decoders:
        """The decoders of a run's generators."""
        model = recipe.model
        encoders = {name: encoder for name in model.generators if (encoder := model.encoder_of(name))}
        latents = {name: node.latents for name, node in model.nodes.items()}
        names = [name for name in model if latents[name] != LatentsConfig() or name in encoders]
        return cls({name: latents[name].autoencoder for name in names}, encoders)

    def require_known(self) -> None:
        """Raises ``ConfigError`` unless the autoencoder of every generator of latents is known."""
        for name, folder in self.folders.items():
            fix = f"{name!r} makes latents; name the folder of their autoencoder, which makes pictures of them"
            require(bool(folder), f"{name}/Latents.autoencoder", folder, fix)

    def picture(self, name: str, medium: Float[np.ndarray, "h w Z"]) -> Float[np.ndarray, "H W C"]:
        """The picture of a drawing of the generator ``name``, about -1 to 1: a decoded latent, or the drawing itself.

        Raises:
          ConfigError: the folder of the autoencoder cannot be read.
        """
        if name not in self.folders:
            return medium
        return _autoencoder(self.folders[name]).pictures(medium[None])[0]

    def with_latents(self, sample: Sample) -> Sample:
        """A prompt with latents in place of the pixels of pictures that others are made from.

        Those that a module makes in the step stay.

        Raises:
          ConfigError: the folder of an autoencoder cannot be read.
        """

        def latents(name: str, pictures: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
            vae = _autoencoder(self.folders[name])
            return tuple(vae.latents(picture[None])[0] for picture in pictures)

        decoded = self.folders.keys() - self.encoders.keys()
        references = {
            name: tuple(latents(name, pictures) for pictures in of_media) if name in decoded else of_media
            for name, of_media in sample.references.items()
        }
        return replace(sample, references=references)

    def shown(
        self, samples: Sequence[Sample], drawings: Sequence[Drawings]
    ) -> tuple[list[Sample], list[dict[str, tuple[np.ndarray, ...]]]]:
        """Samples and drawings with pictures in place of latents; without an autoencoder these are left out.

        Args:
          samples: the samples.
          drawings: the drawings of each sample by generator; () for none.
        """
        unknown = {name for name, folder in self.folders.items() if not folder}

        def pictures(media: Drawings) -> dict[str, tuple[np.ndarray, ...]]:
            known = {name: arrays for name, arrays in media.items() if name not in unknown}
            return {name: tuple(self.picture(name, array) for array in arrays) for name, arrays in known.items()}

        def of_sample(sample: Sample) -> Sample:
            media, known = dict(sample.media), dict[str, tuple[np.ndarray, ...]]()
            for name, encoder in self.encoders.items():
                encoded, latents = media.pop(encoder, ()), media.pop(name, ())
                counts = [1 + len(of) for of in sample.references.get(name) or ((),) * len(latents)]
                firsts = [sum(counts[:number]) for number in range(len(counts))]
                known |= {name: tuple(encoded[first] for first in firsts)} if latents else {}
            return replace(sample, media={**pictures(media), **known})

        return [*map(of_sample, samples)], [*map(pictures, drawings)]


@functools.lru_cache(maxsize=2)
def _autoencoder(path: str) -> Autoencoder:
    from mmjax.models.autoencoder.model import Autoencoder

    return Autoencoder.read(path)


def usual_pixels(path: str) -> int:
    """The most pixels of a picture whose latent is in a folder, where each kept its shape; 0 where all have one size.

    Raises:
      ConfigError: there are no latents.
    """
    return int(Description.read(folder_of(path)).pictures.get("pixels", 0))


def usual_size(path: str) -> tuple[int, int] | None:
    """Height and width of all pictures whose latents are in a folder; ``None`` where each kept its shape.

    Raises:
      ConfigError: there are no latents.
    """
    stated = Description.read(folder_of(path)).pictures.get("size")
    return (int(stated[0]), int(stated[1])) if stated else None
