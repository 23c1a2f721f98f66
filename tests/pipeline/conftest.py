"""Fixtures of the pipeline's tests."""

from __future__ import annotations

import pytest

from mmjax.pipeline import zero


@pytest.fixture
def small_leaves_are_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small leaves would be repeated on every rank, and the models of tests have no others."""
    monkeypatch.setattr(zero, "SMALL", 1)
