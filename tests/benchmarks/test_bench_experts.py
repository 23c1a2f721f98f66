"""The programs of ``bench experts``."""

from __future__ import annotations

import jax
import numpy as np

from benchmarks import experts


def test_experts_of_one_another_are_the_dense_layer(monkeypatch):
    """Experts that are slices of the dense layer's hidden units, all of which compute every token, are its sum."""
    monkeypatch.setattr(experts, "TOKENS", 12)
    monkeypatch.setattr(experts, "WIDTH", 6)
    case = experts.Case(experts=4, per_token=4, fullest=1.0)
    dense = experts._weights((), hidden=8)
    gate, up = (dense[name].reshape(6, 4, 2).swapaxes(0, 1) for name in ("gate", "up"))
    sliced = {"gate": gate, "up": up, "down": dense["down"].reshape(4, 2, 6)}
    x_ND = jax.random.normal(jax.random.key(1), (12, 6))
    y_ND = experts._forward(experts._experts)(sliced, x_ND, x_ND, case.choices())
    want_ND = experts._forward(experts._dense)(dense, x_ND, x_ND, None)
    np.testing.assert_allclose(4 * y_ND, want_ND, rtol=1e-5, atol=1e-6)


def test_loads_are_as_unequal_as_a_case_says(monkeypatch):
    monkeypatch.setattr(experts, "TOKENS", 20_000)
    case = experts.Case(experts=8, per_token=2, fullest=1.5)
    choices = np.asarray(case.choices())
    assert np.all(choices[:, 0] != choices[:, 1])
    loads = np.bincount(choices.ravel(), minlength=8)
    assert 1.3 < loads.max() / loads.mean() < 1.55
