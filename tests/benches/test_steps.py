"""Helpers that the benchmarks of whole steps share."""

from __future__ import annotations

import pytest

from mmjax.benches import steps
from mmjax.configurable import ConfigError


def test_configurations_are_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert steps.config_file("digits_vlm.gin").is_file()


def test_a_missing_configuration_is_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "CONFIGS", tmp_path)
    with pytest.raises(ConfigError, match=r"digits_vlm.gin: no such file; .* pip install -e a checkout$"):
        steps.config_file("digits_vlm.gin")
