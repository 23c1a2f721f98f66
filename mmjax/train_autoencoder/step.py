"""The loss of an autoencoder and its training step."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from mmjax.models.autoencoder.layers import Gaussian, decode_whole, encode_whole
from mmjax.models.autoencoder.model import DP
from mmjax.models.parameters import Tree
from mmjax.optimizer import make_optimizer
from mmjax.train_autoencoder.batches import Batch
from mmjax.train_autoencoder.settings import Training


class State(NamedTuple):
    """Parameters and the optimizer's state after a number of steps."""

    params: Tree
    optimizer: optax.OptState


def divergence(latents: Gaussian) -> Float[Array, ""]:
    """The sum of the divergences of latents from a standard normal distribution (Kingma and Welling 2014, app. B)."""
    squares = jnp.square(latents.mean) + jnp.exp(latents.log_variance)
    return 0.5 * jnp.sum(squares - 1 - latents.log_variance)


def loss(training: Training, params: Tree, batch: Batch) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The mean error of a number of a picture, and ``training.divergence`` times the divergence.

    Both are sums over a picture's numbers in the paper (Rombach et al. 2022, app. G); here they are divided by the
    number of these, so that the weight means the same.

    Returns:
      The loss; and "error" and "divergence" for a number of a picture.
    """
    c = training.autoencoder
    latents = encode_whole(c, params, batch.pictures)
    decoded = decode_whole(c, params, latents.sample(batch.noise))
    error = jnp.mean(_errors(training, decoded - batch.pictures))
    apart = divergence(latents) / batch.pictures.size
    return error + training.divergence * apart, {"error": error, "divergence": apart}


def _errors(training: Training, differences: Array) -> Array:
    return jnp.abs(differences) if training.error == "l1" else jnp.square(differences)


class Steps:
    """The compiled steps of a training on some devices, which share each batch.

    Args:
      training: the settings.
      mesh: the devices, with the axis ``DP``, whose number divides the batch.
    """

    def __init__(self, training: Training, mesh: Mesh):
        self.training, self._mesh = training, mesh
        adam = make_optimizer(training.optimizer, training.steps, None)
        self._optimizer = optax.chain(optax.clip_by_global_norm(training.clip), adam)
        self._step = jax.jit(partial(_step, training, self._optimizer), donate_argnums=0)
        self._measure = jax.jit(partial(_measured, training))

    def begin(self, params: Tree) -> State:
        """The state before the first step."""
        return State(*(self.place(part) for part in (params, jax.jit(self._optimizer.init)(params))))

    def place(self, tree: Any) -> Any:
        """A tree of arrays on each device."""
        # Steps reuse the memory of their state, so it is no one else's.
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()), may_alias=False)

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        """The state after a step, and "loss", "error", "divergence" and "grad_norm" of it."""
        return self._step(state, self._shared(batch))

    def measure(self, params: Tree, pictures: Any) -> tuple[Array, Gaussian]:
        """The mean error of each picture, decoded from the mean of its latent, and the latents."""
        return self._measure(params, self._shared(pictures))

    def _shared(self, batch: Any) -> Any:
        return jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec(DP)))


def _step(
    training: Training, optimizer: optax.GradientTransformation, state: State, batch: Batch
) -> tuple[State, dict[str, Array]]:
    (value, parts), gradients = jax.value_and_grad(partial(loss, training), has_aux=True)(state.params, batch)
    updates, after = optimizer.update(gradients, state.optimizer, state.params)
    metrics = {"loss": value, **parts, "grad_norm": optax.tree.norm(gradients)}
    return State(optax.apply_updates(state.params, updates), after), metrics


def _measured(training: Training, params: Tree, pictures: Array) -> tuple[Array, Gaussian]:
    c = training.autoencoder
    latents = encode_whole(c, params, pictures)
    decoded = decode_whole(c, params, latents.mean)
    return jnp.mean(_errors(training, decoded - pictures), axis=(1, 2, 3)), latents
