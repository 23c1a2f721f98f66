"""Autoencoders with their parameters: read from folders of diffusers, computed on devices, written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from mmjax.configurable import ConfigError, require
from mmjax.models.autoencoder import layers
from mmjax.models.autoencoder.config import AutoencoderConfig
from mmjax.models.autoencoder.parameters import MODULE, slice_of
from mmjax.models.autoencoder.tiles import Tiles
from mmjax.models.autoencoder.weights import rows, settings, to_config
from mmjax.models.parameters import Leaf, Tree, join_logical, split_logical
from mmjax.weights.folder import DIFFUSERS_STEM, WeightsFolder
from mmjax.weights.parameters import FolderParameters, find_leaves
from mmjax.weights.table import Entry, expand
from mmjax.weights.write import rewrite, write

DP = "dp"
"""The mesh axis of devices that share pictures."""


class Latents(NamedTuple):
    """Normal distributions of latents on the host, fp32 ``[B, h, w, Z]``, not yet as a generator sees them.

    Attributes:
      mean: their means.
      log_variance: the logarithms of their variances.
    """

    mean: Float[np.ndarray, "B h w Z"]
    log_variance: Float[np.ndarray, "B h w Z"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Autoencoder:
    """An autoencoder with its parameters.

    Attributes:
      config: its settings.
      params: its parameters in fp32, as ``slice_of(config)`` has them.
      source: the folder that it was read from, whose files ``write`` keeps; ``None`` for a new one.
      tile: the side of tiles in pixels of the layer at hand, by which layers are computed one after another; 0
        computes whole pictures. Results are equal but for rounding.
      mesh: the devices that share whole pictures, where their number divides that of pictures; ``None`` for one.
    """

    config: AutoencoderConfig
    params: Tree
    source: FolderParameters | None = None
    tile: int = 0
    mesh: jax.sharding.Mesh | None = None

    def __post_init__(self) -> None:
        legal = self.tile >= 0 and self.tile % 2 == 0
        require(legal, "tile", self.tile, "must be an even number of pixels, such as 512, or 0 for whole pictures")

    @classmethod
    def new(cls, config: AutoencoderConfig, seed: int = 0) -> Autoencoder:
        """A new autoencoder; its parameters depend on the settings and the seed alone."""
        params = jax.jit(slice_of(config).initialise)(jax.random.key(seed))
        return cls(config=config, params=params)

    @classmethod
    def read(cls, path: str) -> Autoencoder:
        """Reads a folder of diffusers, such as ``vae/`` of a pipeline's.

        Raises:
          ConfigError: it is no folder of an autoencoder that mmjax computes; one line that names file or key.
        """
        folder = WeightsFolder.open(path)
        try:
            config = settings(folder.config)
            shapes = {name.removeprefix(f"{MODULE}/"): leaf.logical_shape for name, leaf in _leaves(config).items()}
            source = FolderParameters(folder=folder, places=find_leaves(folder, MODULE, _entries(config), shapes))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        placed = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = {
            name: jax.ShapeDtypeStruct(leaf.logical_shape, jnp.float32, sharding=placed)
            for name, leaf in _leaves(config).items()
        }
        return cls(config=config, params=_joined(config, source.read(targets)), source=source)

    def write(self, out: Path, files: Mapping[str, bytes] | None = None) -> int:
        """Writes a folder that diffusers reads; returns the number of tensors.

        Keys, dtypes and other files are those of the folder that was read; a new one has float32.

        Args:
          out: the directory to make, which appears when it is complete.
          files: contents of further files by name.

        Raises:
          ConfigError: diffusers has no class with these settings.
          OSError: ``out`` is a directory with files, or cannot be written.
        """
        leaves = {name: np.asarray(leaf) for name, leaf in self.leaves().items()}

        def read(names: Collection[str]) -> dict[str, np.ndarray]:
            return {name: leaves[name if name.startswith(f"{MODULE}/") else f"{MODULE}/{name}"] for name in names}

        if self.source:
            return rewrite(self.source.folder, self.source.places, read, out, files=files)
        config = to_config(self.config)
        return write(config, _entries(self.config), read, out, files=files, stem=DIFFUSERS_STEM)

    def leaves(self) -> dict[str, jax.Array]:
        """The parameters by name, such as "autoencoder/encoder/conv_in/kernel"."""
        return split_logical(jax.tree.leaves(slice_of(self.config).leaves()), jax.tree.leaves(self.params))

    @cached_property
    def identity(self) -> str:
        """A digest of settings and parameters, 16 hexadecimal digits; it does not depend on the folder or on tiles."""
        known = asdict(replace(self.config, preset=""))
        digest = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8)
        for name, leaf in sorted(self.leaves().items()):
            digest.update(f"{name} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()

    def spread(self, devices: Sequence[Any]) -> Autoencoder:
        """The same autoencoder on several devices, which share pictures and have all parameters each."""
        mesh = jax.sharding.Mesh(np.array(devices), (DP,))
        params = jax.device_put(self.params, NamedSharding(mesh, PartitionSpec()))
        return replace(self, params=params, mesh=mesh)

    def encode(self, pictures: Float[np.ndarray, "B H W C"]) -> Latents:
        """The latents of pictures in -1 to 1.

        Raises:
          ConfigError: they have another number of channels, or sides that ``config.factor`` does not divide.
        """
        shape, c = pictures.shape, self.config
        legal = shape[1] % c.factor == 0 and shape[2] % c.factor == 0 and shape[3] == c.channels
        require(legal, "pictures", shape, f"must be [B, H, W, {c.channels}], H and W multiples of {c.factor}")
        return Latents(*map(np.asarray, self._run(layers.encode, pictures)))

    def decode(self, latents: Float[np.ndarray, "B h w Z"]) -> Float[np.ndarray, "B H W C"]:
        """Pictures of latents as ``encode`` gives them, about -1 to 1."""
        return np.asarray(self._run(layers.decode, latents))

    def pictures(self, latents: Float[np.ndarray, "B h w Z"]) -> Float[np.ndarray, "B H W C"]:
        """Pictures of latents as a generator makes them, about -1 to 1."""
        return self.decode(np.asarray(layers.from_generator(self.config, np.asarray(latents, np.float32))))

    def latents(self, pictures: Float[np.ndarray, "B H W C"]) -> Float[np.ndarray, "B h w Z"]:
        """The means of the latents of pictures, as a generator sees them. Raises ``ConfigError`` as ``encode`` does."""
        return np.asarray(layers.to_generator(self.config, self.encode(pictures).mean))

    def _run(self, function: Any, values: np.ndarray) -> Any:
        x: Any = np.asarray(values, np.float32)
        if self.tile:
            return function(self.config, self.params, x, Tiles(self.tile))
        if self.mesh and len(x) % self.mesh.size == 0:
            x = jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(DP)))
        return _compiled(function, self.config)(self.params, x)


def _compiled(function: Any, config: AutoencoderConfig) -> Any:
    key = function, config
    if key not in _COMPILED:
        _COMPILED[key] = jax.jit(partial(_on_whole, function, config))
    return _COMPILED[key]


_COMPILED: dict[Any, Any] = {}


def _on_whole(function: Any, config: AutoencoderConfig, params: Tree, x: jax.Array) -> Any:
    return function(config, params, x, layers.WHOLE)


def _leaves(config: AutoencoderConfig) -> dict[str, Leaf]:
    return {name: leaf for leaf in jax.tree.leaves(slice_of(config).leaves()) for name in leaf.names}


def _entries(config: AutoencoderConfig) -> tuple[Entry, ...]:
    return expand(rows(config), 0)


def _joined(config: AutoencoderConfig, named: Mapping[str, jax.Array]) -> Tree:
    tree = slice_of(config).leaves()
    return jax.tree.unflatten(jax.tree.structure(tree), join_logical(jax.tree.leaves(tree), named))
