"""`bench gpu`: the driver with sections that end in every way, kept results, the profile's tables, and CPU in small.

The last tests are marked: they need a GPU, and `make gpu` runs them there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from mmjax.bench import __main__ as bench
from mmjax.bench.gpu import attention, digits, driver, kept, marked, parity, trace, vlm
from mmjax.bench.gpu.driver import Driver
from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.sections import MEMORY, SECTIONS, Section
from mmjax.config import config_of_values
from mmjax.configurable import ConfigError
from mmjax.mesh.world import World

REPOSITORY = Path(__file__).parents[2]


def section(name: str, seconds: float = 20.0, needs: tuple[str, ...] = ()) -> Section:
    return Section(name=name, where=f"gpu_sections:{name}", seconds=seconds, doc="One.", needs=needs)


@pytest.fixture
def own_sections(monkeypatch) -> None:
    """The processes of sections find `gpu_sections`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


# ---- the driver ------------------------------------------------------------------------------------------------------


def test_a_section_that_fails_dies_or_hangs_stops_no_other_and_keeps_what_it_had(tmp_path, own_sections, monkeypatch):
    monkeypatch.setattr(driver, "KILL_SECONDS", 0.2)
    run = Driver(tmp_path, small=False, seconds=60.0)
    lacking = section("right", needs=("no_such_package",))
    order = [section("fails"), section("dies"), section("hangs", 2.0), lacking, section("wrong", 40.0)]
    seen = []
    for name, found in run.run(order, section("machine")):
        seen.append(name)
        written = json.loads((tmp_path / "results.json").read_text())
        assert (written["machine"] if name == "machine" else written["sections"][name]) == kept_form(found)
    assert seen == ["machine", "fails", "dies", "hangs", "right", "wrong"]
    found = run.results["sections"]
    assert {name: own["status"] for name, own in found.items()} == {
        "fails": "failed",
        "dies": "failed: SIGSEGV",
        "hangs": "out of time",
        "right": "left out",
        "wrong": "wrong",
    }
    assert found["fails"]["error"] == "RuntimeError: out of memory"
    assert [found[name]["before"] for name in ("fails", "dies", "hangs")] == [1, 2, 3]
    assert found["right"]["missing"] == ["no_such_package"]
    assert run.results["machine"]["device"] == "a card"
    assert "and a long tail" in (tmp_path / "log.txt").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "results.json"]


def kept_form(values: dict) -> dict:
    """As JSON gives it back."""
    from mmjax.bench.gpu.job import plain

    return json.loads(json.dumps(plain(values)))


@pytest.mark.long
def test_time_is_set_aside_for_later_sections_and_the_deadline_is_kept(tmp_path, own_sections, monkeypatch):
    monkeypatch.setattr(driver, "KILL_SECONDS", 0.2)
    run = Driver(tmp_path, small=False, seconds=8.0)
    start = time.monotonic()
    found = dict(run.run([section("hangs", 2.0), section("right", 3.0)], section("machine", 1.0)))
    assert time.monotonic() - start < 10
    assert found["hangs"]["limit"] <= 5.0  # 8 s, of which 3 are the next one's
    assert found["right"]["status"] == "ok" and found["right"]["nothing"] is None
    late = Driver(tmp_path, small=True, seconds=0.0)
    assert {own["status"] for _, own in late.run([section("right")], section("machine"))} == {"out of time"}


def test_without_an_accelerator_only_small_shapes_are_run(tmp_path, own_sections):
    with pytest.raises(ConfigError, match=r"finds no accelerator here \(cpu\); add --small"):
        list(Driver(tmp_path, small=False, seconds=30.0).run([], section("cpu")))
    assert [name for name, _ in Driver(tmp_path, small=True, seconds=30.0).run([], section("cpu"))] == ["cpu"]


def test_memory_is_never_managed_memory(monkeypatch):
    monkeypatch.setenv("TF_FORCE_UNIFIED_MEMORY", "1")
    monkeypatch.setenv(MEMORY, "1.5")
    given = driver.environment({"A": "b"})
    assert "TF_FORCE_UNIFIED_MEMORY" not in given and MEMORY not in given and given["A"] == "b"
    monkeypatch.setenv(MEMORY, "0.5")
    assert driver.environment({})[MEMORY] == "0.5"
    assert all(float(own.environment.get(MEMORY, "0")) < 1 for own in SECTIONS)


def test_the_sections_together_fit_the_whole():
    (whole,) = (flag.default for flag in bench.BENCHES["gpu"].flags if flag.name == "seconds")
    assert whole == 540 and sum(own.seconds for own in SECTIONS) + 30 <= 540


def test_the_command_gives_a_row_for_each_section(tmp_path, monkeypatch, capsys):
    found = {"machine": {"status": "ok"}, "parity": {"status": "wrong", "checks": {"fp32": False}, "seconds": 3.2}}
    monkeypatch.setattr(Driver, "run", lambda self, sections: iter(found.items()))
    assert bench.main(["gpu", f"--out={tmp_path}", "--only=parity", "--json"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["case"] == "parity: wrong in 3 s: fp32" and not rows[1]["ok"] and rows[0]["ok"]
    for flags, message in (("--only=parrity", "did you mean 'parity'"), ("--seconds=0", "must be at least 1")):
        with pytest.raises(SystemExit):
            bench.main(["gpu", flags])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "python"), [((), "python3"), (("PYTHON=/opt/py/bin/python",), "/opt/py/bin/python")])
def test_make_gpu_takes_the_machines_own_python_and_makes_no_environment(given, python):
    command = ["make", "-n", "gpu", *given]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "OUT", "MAKEFLAGS")}
    said = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True).stdout
    assert f"{python} -m mmjax.bench gpu --out=runs/gpu" in said and "venv" not in said


# ---- kept results ----------------------------------------------------------------------------------------------------


def test_digests_tell_how_far_leaves_are_apart():
    rng = np.random.default_rng(0)
    leaves = {f"llm/{i}": rng.standard_normal((40, 30)) for i in range(4)}
    other = {name: leaf + 1e-3 * rng.standard_normal(leaf.shape) for name, leaf in leaves.items()}
    apart = kept.relative(kept.digests(other), kept.digests(leaves))
    assert 5e-4 < apart < 2e-3
    assert kept.relative(kept.digests(leaves), kept.digests(leaves)) == 0
    assert kept.relative(kept.digests(leaves), {}) == np.inf
    swapped = {**leaves, "llm/0": leaves["llm/1"], "llm/1": leaves["llm/0"]}
    assert kept.relative(kept.digests(swapped), kept.digests(leaves)) > 0.5
    broken = {**leaves, "llm/0": np.full((40, 30), np.nan)}
    assert kept.relative(kept.digests(broken), kept.digests(leaves)) == np.inf


KEEP = "what is trained has changed: python -m mmjax.bench gpu --keep"


def test_kept_results_are_of_the_configurations_and_samples_of_today():
    assert kept.kept()["parity"].keys() == parity.CASES.keys()
    for name, case in kept.kept()["parity"].items():
        config = config_of_values(case["config"])
        assert config == parity.small_config(parity.CASES[name]), KEEP
        assert parity.samples_of(config)[1] == case["samples"], KEEP
    assert config_of_values(kept.kept()["digits"]["config"]) == digits.trained_config(), KEEP
    assert len(kept.kept()["digits"]["losses"]) == digits.STEPS


@pytest.mark.slow
def test_a_cpu_gives_the_kept_results_in_fp32_and_bf16(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)  # as on a machine that lacks it
    job = Job(tmp_path / "parity.json", small=False)
    parity.run(job)
    assert len(job.values["checks"]) == 9 and all(job.values["checks"].values()), (KEEP, job.values)
    assert job.values["float32 highest"]["sees"]["gradient"] < 1e-5


@pytest.mark.slow
def test_the_first_steps_of_the_digits_have_the_kept_losses(tmp_path):
    job = Job(tmp_path / "digits.json", small=True)
    digits.run(job)
    assert all(job.values["checks"].values()), job.values


# ---- sections in small, on a CPU -------------------------------------------------------------------------------------


@pytest.mark.long
def test_attention_is_compared_and_what_is_not_here_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "SMALL", attention.SMALL[:1])
    job = Job(tmp_path / "attention.json", small=True)
    attention.run(job)
    assert all(job.values["checks"].values()) and len(job.values["checks"]) == 2  # dense and blockwise
    (own,) = job.values["cases"].values()
    assert own["blockwise"]["forward_gap"] == pytest.approx(own["xla"]["forward_gap"], rel=0.5)
    assert "error" in own["cudnn"] and "error" in own["tokamax"]
    causal = attention.Case(rows=2, length=12, heads=3, width=5, segments=2)
    assert causal.flops == 4 * 2 * 3 * 5 * 2 * (6 * 7 / 2)
    assert dataclasses.replace(causal, window=2).flops == 4 * 2 * 3 * 5 * 2 * (1 + 5 * 2)


@pytest.mark.long
def test_what_is_pulled_is_what_was_sent(tmp_path):
    """In a process of its own, as `bench gpu` runs it: JAX keeps a server until the end."""
    command = ["-m", "mmjax.bench.gpu.section_process", "mmjax.bench.gpu.pulls:run", "pulls.json", "60", "small"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, timeout=120)
    found = json.loads((tmp_path / "pulls.json").read_text())
    assert found["checks"] == {"float32 pulled": True, "bfloat16 pulled": True}
    assert all(rate > 0 for rate in found["gb_per_s"].values())


@pytest.mark.long
def test_a_step_is_timed_and_profiled_beside_its_memory(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    job = Job(tmp_path / "vlm.json", small=True)
    vlm._profile(job, *vlm._measure(job, 1))
    found = json.loads((tmp_path / "vlm.json").read_text())
    assert all(found["checks"].values())
    assert found["counts"]["llm_tokens"] == sum(map(sum, vlm.SMALL.texts)) + 8 * 16
    assert found["padding"] < 0.1
    assert found["estimated_bytes"]["total"] > found["estimated_bytes"]["optimizer"] > 0
    assert found["compiled_bytes"]["total"] > 0
    assert any("attention" in place for place in found["kernels"]["by_place"]), found["kernels"]
    assert (tmp_path / "vlm_profile.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_step_is_timed_by_op_and_by_module(tmp_path):
    job = Job(tmp_path / "vlm.json", small=True)
    vlm._time_ops(job, vlm.job_config(job, 2, **{"Train.lowering": "ops"}))
    assert {"llm", "vision"} <= job.values["seconds_by_module"].keys()
    assert job.values["ops"] > 10 and job.values["host_microseconds_per_op"] > 0
    assert {"B llm.0", "F vision.0", "update llm.0"} <= job.values["seconds_by_op"].keys()


def test_as_many_layers_as_fit():
    found = {2: 1000, 3: 1300}
    assert [vlm.layers_within(room, found) for room in (0, 999, 1000, 1299, 1300, 1e9)] == [1, 1, 2, 2, 3, 32]


def test_the_real_shapes_are_those_of_llava():
    job = Job(Path("unused"), small=False)
    config = vlm.job_config(job, 32)
    assert (
        config.model["llm"].settings.width,
        config.model["llm"].settings.mlp,
        config.model["llm"].settings.vocab,
        config.model["vision"].settings.width,
    ) == (
        *(4096, 11008, 32000),
        1024,
    )
    packed = [sum(text + 576 for text in texts) for texts in vlm.REAL.texts]
    assert all(0.97 < tokens / (2 * 2048) <= 1 for tokens in packed)


# ---- the profile -----------------------------------------------------------------------------------------------------

HLO = """
%inside (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.3 = f32[4]{0} add(%p, %p), metadata={op_name="jit(f)/transpose(jvp(x))/checkpoint/rematted_computation/add" source_file="/a/mmjax/models/layers.py" source_line=9}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %fusion.4 = f32[4]{0} fusion(%p), kind=kLoop, calls=%inside
  ROOT %fusion.1 = f32[4]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(f)/jit(main)/transpose(jvp(x))/mul" source_file="/a/mmjax/models/layers.py" source_line=7}
  %gemm.2 = bf16[4]{0} custom-call(%p), metadata={op_name="jit(f)/dot_general" stack_frame_id=2}
}

FileNames
1 "/lib/jax/_src/numpy.py"
2 "/a/mmjax/attention/reference.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=31 end_line=31 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""  # noqa: E501


def test_kernels_are_added_up_by_name_and_by_line_of_source():
    gpu = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}}
    stream = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 14, "args": {"name": "Stream #14(Compute)"}}
    host = {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}}
    kernel = {"ph": "X", "pid": 1, "tid": 14}
    events = [
        *(gpu, stream, host),
        kernel | {"name": "loop_fusion", "dur": 2e6, "args": {"hlo_op": "fusion.1"}},
        kernel | {"name": "fusion_1", "dur": 1e6, "args": {}},
        kernel | {"name": "fusion_4", "dur": 5e5, "args": {}},
        kernel | {"name": "nvjet", "dur": 4e6, "args": {"hlo_op": "gemm.2"}},
        kernel | {"name": "memcpy", "dur": 1e6, "args": {}},
        {"ph": "X", "pid": 1, "tid": 99, "name": "a module", "dur": 9e6, "args": {"hlo_op": "fusion.1"}},
        {"ph": "X", "pid": 2, "tid": 1, "name": "python", "dur": 9e6, "args": {}},
    ]
    found = trace.kernels_of(events, HLO)
    assert found["seconds"] == 8.5
    assert found["by_kernel"] == {"nvjet": 4.0, "loop_fusion": 2.0, "fusion_1": 1.0, "memcpy": 1.0, "fusion_4": 0.5}
    assert found["by_place"] == {
        "mmjax/attention/reference.py:31": 4.0,
        "backward mmjax/models/layers.py:7": 3.0,
        "other": 1.0,
        "again mmjax/models/layers.py:9": 0.5,
    }
    assert found["by_op"] == {"dot_general": 4.0, "backward mul": 3.0, "other": 1.0, "again add": 0.5}


# ---- on a GPU alone --------------------------------------------------------------------------------------------------


def test_files_with_marked_tests_are_found():
    assert Path(__file__) in marked.marked_files(REPOSITORY / "tests")


@pytest.mark.gpu
def test_a_gpu_gives_the_kept_results(tmp_path):
    job = Job(tmp_path / "parity.json", small=True)
    parity.run(job)
    assert all(job.values["checks"].values()), job.values


@pytest.mark.gpu
def test_a_gpu_has_a_known_peak_and_says_what_memory_it_used(tmp_path):
    job = Job(tmp_path / "vlm.json", small=True)
    vlm._measure(job, 2)
    assert 0 < job.values["mfu"] < 1
    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    assert 0 < job.values["peak_memory_bytes"] < limit


@pytest.mark.gpu
def test_a_started_gpu_without_the_flags_refuses_to_be_deterministic(monkeypatch):
    config = config_of_values(next(iter(kept.kept()["parity"].values()))["config"])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    with pytest.raises(ConfigError, match=re.escape("Train.deterministic=True: JAX started before mmjax")):
        World.create(config.world, config.model.layouts.values(), deterministic=True)
