"""Experts' mlps of parts of the tokens, by blocks and by interpreted kernels, against all experts for all tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.experts import grouped_blocks, grouped_kernels, mlp
from mmjax.models.experts.dispatch import TokenRows, sort_by_expert
from mmjax.models.experts.mlp import expert_mlps
from mmjax.models.taps import Summed

EXPERTS, PER_TOKEN, WIDTH, HIDDEN = 5, 2, 24, 20
PARTS = (40, 17)
"""Tokens of each part."""
Arrays = dict[str, Any]


def drawn() -> tuple[Arrays, list[jax.Array], list[jax.Array]]:
    """Parameters with features and factors of each part, the experts of each part, and gradients of results."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    shapes = {"gate": (EXPERTS, WIDTH, HIDDEN), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    arrays: Arrays = {name: normal(*shape) for name, shape in shapes.items()}
    arrays |= {f"h{part}": normal(tokens, WIDTH) for part, tokens in enumerate(PARTS)}
    arrays |= {f"weights{part}": normal(tokens, PER_TOKEN) for part, tokens in enumerate(PARTS)}
    experts = [jnp.asarray(np.argsort(rng.random((n, EXPERTS + 1)))[:, :PER_TOKEN]) for n in PARTS]  # the last is none
    return arrays, experts, [normal(tokens, WIDTH) for tokens in PARTS]


def densely(arrays: Arrays, experts: list[jax.Array], most: int | None) -> list[jax.Array]:
    results = list[jax.Array]()
    for part, chosen in enumerate(experts):
        h, p = arrays[f"h{part}"], arrays
        hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", h, p["gate"])) * jnp.einsum("nd,edf->nef", h, p["up"])
        order = np.argsort(np.asarray(chosen).reshape(-1), kind="stable")
        has_row = np.zeros(chosen.size, bool)
        has_row[order[:most]] = True
        factor = jax.nn.one_hot(chosen, EXPERTS) * (arrays[f"weights{part}"] * has_row.reshape(chosen.shape))[..., None]
        results.append(jnp.einsum("nef,efd,nke->nd", hidden, p["down"], factor))
    return results


def of_rows(arrays: Arrays, experts: list[jax.Array], most: int | None) -> list[jax.Array]:
    parts = [
        TokenRows(arrays[f"h{part}"], arrays[f"weights{part}"], sort_by_expert(chosen, EXPERTS, most or chosen.size))
        for part, chosen in enumerate(experts)
    ]
    return expert_mlps(arrays, parts)


def gradients_of(compute: Any, arrays: Arrays, experts: list[jax.Array], most: int | None, dys: list[jax.Array]) -> Any:
    def loss(arrays: Arrays) -> jax.Array:
        results = compute(arrays, experts, most)
        return sum((jnp.sum(y * dy) for y, dy in zip(results, dys, strict=True)), start=jnp.zeros(()))

    return jax.jit(jax.value_and_grad(loss))(arrays)


def close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), actual, expected)


@pytest.mark.long
@pytest.mark.parametrize("most", [None, 20], ids=["all rows", "some choices have no row"])
@pytest.mark.parametrize("ways", [grouped_blocks, grouped_kernels])
def test_values_and_gradients_are_those_of_all_experts(
    ways: ModuleType, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlp, "ways", lambda: ways)
    arrays, experts, dys = drawn()
    expected = gradients_of(densely, arrays, experts, most, dys)
    close(gradients_of(of_rows, arrays, experts, most, dys), expected)
    totals = {name: jnp.full(arrays[name].shape, 3.0) for name in ("gate", "up", "down")}
    summed = arrays | {name: Summed(weight=arrays[name], total=total) for name, total in totals.items()}
    value, gradients = gradients_of(of_rows, summed, experts, most, dys)
    gradients |= {name: gradients[name].total - total for name, total in totals.items()}
    close((value, gradients), expected)


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu_are_those_of_all_experts() -> None:
    arrays, experts, dys = drawn()
    with jax.default_matmul_precision("highest"):
        expected = gradients_of(densely, arrays, experts, None, dys)
        close(gradients_of(of_rows, arrays, experts, None, dys), expected)
