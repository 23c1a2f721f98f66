"""Experts beside a dense SwiGLU of equal active size, on one CPU device in fp32, forward and backward.

Tokens are sorted by expert, multiplied and added, as a layer does it; the router is left out. Each ratio is of the
processor's seconds, measured in turn, since other work on a machine changes its clock more than these.

Shapes: N tokens, D width, E experts, F hidden units, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.bench.rows import Row, at_most
from mmjax.models.experts.dispatch import TokenRows, sort_by_expert
from mmjax.models.experts.mlp import expert_mlps

TOKENS, WIDTH, HIDDEN = 4096, 1024, 3072
"""``HIDDEN`` units compute a token, with experts as without."""

Layer = Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Experts of a layer, and how unequal their loads are.

    Attributes:
      experts: number of experts.
      per_token: number of experts of a token.
      fullest: tokens of the fullest expert over the mean, about.
    """

    experts: int
    per_token: int
    fullest: float

    def __str__(self) -> str:
        return f"{self.per_token} of {self.experts} experts, fullest {self.fullest:g} times the mean"

    def choices(self) -> jax.Array:
        """Experts of each token ``[N, k]``, drawn without replacement."""
        shares = np.linspace(2 - self.fullest, self.fullest, self.experts)
        noise = np.random.default_rng(0).gumbel(size=(TOKENS, self.experts))
        return jnp.asarray(np.argsort(-np.log(shares) - noise, axis=1)[:, : self.per_token].astype(np.int32))


CASES = (
    Case(experts=8, per_token=2, fullest=1.0),
    Case(experts=8, per_token=2, fullest=1.5),
    Case(experts=128, per_token=8, fullest=1.0),
    Case(experts=128, per_token=8, fullest=1.5),
)
MOST = 1.3
"""The largest ratio with backward that is aimed at."""


def bench_experts(rounds: int) -> Iterator[Row]:
    """Yields for each case the seconds of experts over those of the dense layer, forward alone and with backward."""
    for case in CASES:
        dense = _weights(()), None
        experts = _weights((case.experts,), hidden=HIDDEN // case.per_token), case.choices()
        for name, of in (("forward", _forward), ("forward and backward", _forward_and_backward)):
            ratio = _ratio(rounds, of(_experts), experts, of(_dense), dense)
            target = at_most(MOST) if of is _forward_and_backward else None
            yield Row(
                bench="experts", case=f"{case}: {name}, experts / dense", value=ratio, unit="ratio", target=target
            )


def _weights(leading: tuple[int, ...], hidden: int = HIDDEN) -> dict[str, jax.Array]:
    shapes = {"gate": (WIDTH, hidden), "up": (WIDTH, hidden), "down": (hidden, WIDTH)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (*leading, *shape)) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _experts(p: dict[str, jax.Array], x_ND: jax.Array, choices_Nk: jax.Array) -> jax.Array:
    dispatch = sort_by_expert(choices_Nk, p["gate"].shape[0], choices_Nk.size)
    weights_Nk = jnp.full(choices_Nk.shape, 1 / choices_Nk.shape[1])
    return expert_mlps(p, [TokenRows(x_ND, weights_Nk, dispatch)])[0]


def _dense(p: dict[str, jax.Array], x_ND: jax.Array, choices_Nk: None) -> jax.Array:
    del choices_Nk
    return (jax.nn.silu(x_ND @ p["gate"]) * (x_ND @ p["up"])) @ p["down"]


def _forward(layer: Layer) -> Layer:
    return jax.jit(lambda p, x_ND, dy_ND, choices_Nk: layer(p, x_ND, choices_Nk))


def _forward_and_backward(layer: Layer) -> Layer:
    def run(p: dict[str, jax.Array], x_ND: jax.Array, dy_ND: jax.Array, choices_Nk: Any) -> Any:
        y_ND, vjp = jax.vjp(lambda p, x_ND: layer(p, x_ND, choices_Nk), p, x_ND)
        return y_ND, vjp(dy_ND)

    return jax.jit(run)


def _ratio(rounds: int, first: Layer, first_inputs: Any, second: Layer, second_inputs: Any) -> float:
    """The median processor seconds of the first over those of the second, run in turn."""
    x_ND, dy_ND = (jax.random.normal(jax.random.key(seed), (TOKENS, WIDTH)) for seed in (1, 2))
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for run, (p, choices), measured in zip((first, second), (first_inputs, second_inputs), seconds, strict=True):
            start = process_time()
            jax.block_until_ready(run(p, x_ND, dy_ND, choices))
            measured.append(process_time() - start)
    of_first, of_second = (median(measured[1:]) for measured in seconds)
    return of_first / of_second
