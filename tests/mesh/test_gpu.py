"""The settings of GPUs: what is added to which environment, and the user's own stay. No GPU is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmjax.configurable import ConfigError
from mmjax.mesh import gpu

TRITON, MERGER = "--xla_gpu_enable_triton_gemm=false", "--xla_gpu_dot_merger_threshold_mb=0"
OFF = f"{TRITON} {MERGER}"
FRACTION = {"XLA_CLIENT_MEM_FRACTION": "0.92"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"XLA_FLAGS": OFF, **FRACTION}),
        ({"XLA_FLAGS": "--xla_dump_to=/a --xla_b=1"}, {"XLA_FLAGS": f"--xla_dump_to=/a --xla_b=1 {OFF}", **FRACTION}),
        ({"XLA_FLAGS": OFF}, FRACTION),
        ({"XLA_FLAGS": f"--xla_gpu_enable_triton_gemm=true {MERGER}"}, FRACTION),
        (
            {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm"},
            {"XLA_FLAGS": f"--xla_gpu_enable_triton_gemm {MERGER}", **FRACTION},
        ),
        (
            {"XLA_FLAGS": "--xla_gpu_dot_merger_threshold_mb=9"},
            {"XLA_FLAGS": f"--xla_gpu_dot_merger_threshold_mb=9 {TRITON}", **FRACTION},
        ),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, {"XLA_FLAGS": OFF}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_FLAGS": OFF}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"XLA_FLAGS": OFF}),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {"XLA_FLAGS": OFF, **FRACTION}),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "Platform"}, {"XLA_FLAGS": OFF}),
    ],
)
def test_what_is_missing_is_added_and_what_is_there_stays(given: dict[str, str], added: dict[str, str]) -> None:
    assert gpu.environment(given) == added
    assert gpu.environment(given | added) == {}, "once"


def test_deterministic_flags_are_in_force_also_where_others_were_given() -> None:
    given = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=4", **FRACTION}
    flags = f"{given['XLA_FLAGS']} --xla_gpu_autotune_level=0 {OFF}"
    assert gpu.environment(given, deterministic=True) == {"XLA_FLAGS": flags}
    assert gpu.environment({"XLA_FLAGS": flags, **FRACTION}, deterministic=True) == {}
    assert not gpu.missing_flags({"XLA_FLAGS": flags})


def test_flags_in_a_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text("--xla_b=1\n--xla_c=2\n")
    assert gpu.environment({"XLA_FLAGS": str(file), **FRACTION}) == {"XLA_FLAGS": f"--xla_b=1\n--xla_c=2 {OFF}"}


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 0.92),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, 0.5),
        ({"XLA_CLIENT_MEM_FRACTION": "1.5"}, 1.0),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, 1.0),
    ],
)
def test_the_share_of_the_memory(given: dict[str, str], share: float) -> None:
    assert gpu.memory_share(given) == share


@pytest.mark.parametrize("text", ["much", "0", "-1", "nan"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    message = f"XLA_CLIENT_MEM_FRACTION='{text}': must be a number above 0, such as 0.92"
    with pytest.raises(ConfigError, match=message):
        gpu.memory_share({"XLA_CLIENT_MEM_FRACTION": text})


def test_one_line_says_what_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.describe({}) == "GPUs: 75 % of the memory, no XLA_FLAGS"
    given = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true", "XLA_CLIENT_MEM_FRACTION": ".5"}
    assert gpu.describe(given) == "GPUs: 50 % of the memory, XLA_FLAGS=--xla_gpu_enable_triton_gemm=true"
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert gpu.describe_planned() == f"GPUs: 92 % of the memory, XLA_FLAGS={OFF}"
    assert gpu.describe_planned(deterministic=True).endswith("=" + " ".join((*gpu.DETERMINISTIC_FLAGS, MERGER)))
    assert "XLA_FLAGS" not in os.environ


def test_a_gpu_starts_where_it_is_named_or_there_with_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    named = {"cuda": True, "cuda,cpu": True, "rocm": True, "gpu": True, "cpu": False, "cpu,cuda": False, "tpu": False}
    assert {name: gpu.will_start(name) for name in named} == named
    for plugin in (False, True):
        for file in (False, True):
            monkeypatch.setattr(gpu, "find_spec", lambda name, plugin=plugin: plugin or None)
            monkeypatch.setattr(gpu, "_DEVICE_FILES", (__file__,) if file else ("/dev/none",))
            assert gpu.will_start() == (plugin and file)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not gpu.will_start()
