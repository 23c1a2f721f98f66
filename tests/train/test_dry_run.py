"""The dry run: figures that can be counted by hand, for devices that are not here, with nothing touched."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from trial_runs import REPOSITORY, write_tiny

from mmjax.assembly.assembly import assemble
from mmjax.config import load_config
from mmjax.eval.evaluator import Evaluator
from mmjax.schedule.dispatch import dispatch_table
from mmjax.train.__main__ import main
from mmjax.train.dry_run import count_kinds, dry_run, show_bytes

LARGE = """
Digits.images = (1, 1)
Data.sequence_length = 2048
Train.global_batch = 32
Train.microbatches = 8
Train.dtype = 'bfloat16'
llm/Decoder.preset = 'llama3-8b'
llm/Decoder.remat = 'full'
llm/Layout.tp = 8
llm/Layout.pp = 4
vision/ViT.preset = 'vit-h14'
vision/ViT.remat = 'full'
vision/Layout.tp = 4
vision/Layout.dp = 2
vision/Layout.rank_offset = 32
vision/Packing.buckets = ((4, 1024),)
llm/Packing.buckets = ()
"""


@pytest.mark.long
def test_more_devices_than_anybody_has_without_any_backend(tmp_path: Path) -> None:
    """An 8B model on 40 ranks in a process that never starts JAX's backend, and writes nothing."""
    (tmp_path / "large.gin").write_text(LARGE)
    script = (
        "import sys\n"
        "from mmjax.jax_compat import backends_are_initialized\n"
        "from mmjax.train.__main__ import main\n"
        "status = main(sys.argv[1:])\n"
        "print(status, backends_are_initialized())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--gin_file=large.gin", "--dry_run", "--json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=240, check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)},
    )  # fmt: skip
    line, status = done.stdout.splitlines()
    assert status == "0 False", done.stderr
    assert not (tmp_path / "runs").exists()
    found = json.loads(line)
    assert found["devices"] == 40
    stages = found["stages"]
    assert stages["llm.3"]["ranks"] == list(range(24, 32)) and stages["vision.0"]["ranks"] == list(range(32, 40))
    memory = {name: stage["memory"] for name, stage in stages.items()}
    # Eight layers over tp=8: attention 4096·(4096 + 1024 + 1024 + 4096), MLP 3·4096·14336, two norms that are whole.
    matrices = 8 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) // 8
    norms = 8 * 2 * 4096
    assert memory["llm.1"]["parameters"] == 2 * (matrices + norms)
    assert memory["llm.1"]["optimizer"] - 12 * (matrices + norms) in (4, 8)
    assert memory["llm.1"]["gradients"] == 4 * (matrices + norms)  # with dp=1 they take the memory of the sums
    assert memory["llm.0"]["parameters"] == 2 * (matrices + norms + 128256 * 4096 // 8)
    assert [stages[f"llm.{i}"]["in_flight"] for i in range(4)] == [4, 3, 2, 1]
    for name, stage in stages.items():
        kinds = {key: value for key, value in memory[name].items() if key not in ("total", "activations")}
        assert memory[name]["total"] == sum(kinds.values())
        assert stage["residual_bytes"] <= memory[name]["residuals"] + memory[name]["received"]
    assert found["most_loaded"]["memory"]["total"] == max(m["total"] for m in memory.values())
    assert (
        found["most_loaded"]["memory"]["total"] / 2
        < found["fullest"]["bytes"]
        <= max(m["total"] for m in memory.values())
    )
    assert found["programs"]["F"] == found["programs"]["B"] == 5 and found["bucket_combinations"] == 1
    assert 0 < found["planned_bubble"] < 1 and found["compile_seconds"][1] > found["compile_seconds"][0] > 1


def test_text_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main([f"--gin_file={write_tiny(tmp_path)}", "--dry_run", "--gin.World.devices=5", f"--run_dir={run}"]) == 0
    out = capsys.readouterr().out
    grid = [line.split() for line in out.splitlines()]
    assert ["rank", "0", "1", "2", "3", "4"] in grid
    assert ["llm.0", "t0", "t1", ".", ".", "."] in grid
    assert ["vision.0", ".", ".", "d0", "d1", "."] in grid
    assert "World.devices=5: no layout uses rank 4" in out  # advice as in training
    assert "most loaded: rank 0 (llm.0) with " in out
    assert "fullest moment: " in out and " host" not in out
    assert "planned bubble: " in out and "programs (" in out and " s for CPU devices where nothing is cached (" in out
    assert "GPUs: " not in out
    assert sorted(path.name for path in run.iterdir()) == ["layout.png", "timeline.png"]
    with Image.open(run / "layout.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or []}
    assert {(0x2F, 0x6D, 0xB5), (0xE0, 0x7B, 0x29)} <= colours  # both modules'


@pytest.mark.long
def test_on_gpus_one_line_has_their_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    recipe = load_config([write_tiny(tmp_path, World_platform="cuda", Train_eval_samples=0)])
    flags = "--xla_gpu_enable_triton_gemm=true --xla_gpu_dot_merger_threshold_mb=0"
    line = f"GPUs: 92 % of the memory, XLA_FLAGS={flags}"
    assert line in dry_run(recipe).describe().splitlines()


@pytest.mark.long
def test_senders_wait_between_processes_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def moves(processes: int, **settings: Any) -> list[str]:
        path = write_tiny(tmp_path, Train_eval_samples=0, **settings)
        assert main([f"--gin_file={path}", "--dry_run", f"--num_processes={processes}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["processes"] == processes
        parts = dry_run(load_config([path]), processes=processes).parts
        assert parts.planned.schedule == parts.schedule
        return [edge.kind for edge in parts.schedule.graph.edges]

    assert moves(2) == moves(1, World_platform="cuda") == ["async"]
    assert moves(2, World_platform="cuda") == ["rendezvous"]
    assert moves(2, World_platform="cuda", World_transport="device_put") == ["async"]
    path = write_tiny(tmp_path, World_platform="cuda", Train_eval_samples=0)
    assert "2 processes that wait for each other" in dry_run(load_config([path]), processes=2).describe()
    for count, message in (
        ("3", "--num_processes=3: must divide the 4 devices"),
        ("0", "--num_processes=0: must be 1"),
    ):
        with pytest.raises(SystemExit):
            main([f"--gin_file={path}", "--dry_run", f"--num_processes={count}"])
        assert message in capsys.readouterr().err
    monkeypatch.setenv("MMJAX_NUM_PROCESSES", "two")
    with pytest.raises(SystemExit):
        main([f"--gin_file={path}", "--dry_run"])
    assert "MMJAX_NUM_PROCESSES='two': must be an integer" in capsys.readouterr().err


@pytest.mark.long
def test_one_program_over_lanes_is_counted_as_one(tmp_path: Path) -> None:
    """Every device holds blocks that fit any stage: more than the program per op is counted to take."""
    layouts = {"llm/Layout_tp": 1, "llm/Layout_pp": 2, "vision/Layout_dp": 2, "vision/Layout_rank_offset": 0}
    many, one = (
        dry_run(load_config([write_tiny(tmp_path, **layouts, Train_eval_samples=0, Train_lowering=lowering)]))
        for lowering in ("ops", "single")
    )
    assert many.peak and not one.peak and one.programs == {"step": 1}
    assert one.most.optimizer >= max(held.optimizer for held in many.memory.values())
    assert one.most.total > many.most.total > 0
    rows = [line.split() for line in one.describe().splitlines()]
    assert sum(row[:2] == ["step", "0–1"] for row in rows) == 1
    assert not any(row[:1] == ["llm.0"] and len(row) > 3 for row in rows)
    said = one.as_json()
    assert said["fullest"] is None and said["most_loaded"]["memory"]["total"] == one.most.total
    # A stage is traced over its own axes too after it was over those of lanes.
    assert {name: held.temporaries > 0 for name, held in one.memory.items()} == dict.fromkeys(many.memory, True)


@pytest.mark.long
def test_activations_that_wait_are_counted_where_they_are(tmp_path: Path) -> None:
    """Of the four microbatches that a lane keeps, two are on its devices, and all on the host before the first B."""
    layouts = {"llm/Layout_tp": 1, "llm/Layout_pp": 2, "vision/Layout_dp": 1, "vision/Layout_lanes": 2}
    train = {"Train_schedule": "encoders-first", "Train_microbatches": 8, "Train_eval_samples": 0}
    changes = {**layouts, "vision/Layout_rank_offset": 0, **train}
    home, away = (
        dry_run(load_config([write_tiny(tmp_path, **changes, **{"vision/Offload_activations": stash})]))
        for stash in (False, True)
    )
    whole, part = (found.memory["vision.0"] for found in (home, away))
    assert (part.residuals, part.host, whole.host) == (whole.residuals // 2, whole.residuals, 0)
    assert home.peak and away.peak and home.peak.bytes - away.peak.bytes >= whole.residuals // 2
    assert " host" in away.describe() and away.as_json()["stages"]["vision.0"]["memory"]["host"] == part.host
    assert away.as_json()["stages"]["vision.0"]["in_flight"] == 8
    assert away.as_json()["stages"]["vision.0"]["residual_bytes"] == part.residuals


@pytest.mark.slow
def test_a_large_world_is_shown_in_groups_of_ranks() -> None:
    config = load_config(
        [REPOSITORY / "configs" / "digits_vlm.gin"],
        ["llm/Layout.dp=16", "vision/Layout.dp=32", "vision/Layout.rank_offset=64", "Train.global_batch=128"],
    )
    lines = dry_run(config).describe().splitlines()
    assert any("each column is 32 ranks" in line for line in lines)
    assert ["rank", "0", "32", "64"] in [line.split() for line in lines]
    assert ["llm.1", ".", "d0t0", "."] in [line.split() for line in lines]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"Train_eval_samples": 0}, marks=pytest.mark.slow),
        pytest.param({"llm/Layout_tp": 1, "vision/Layout_dp": 1}, marks=pytest.mark.slow),
    ],
)
def test_programs_are_those_of_the_run(tmp_path: Path, changes: dict) -> None:
    """Nothing is said of the time of compiling them for an accelerator, whose programs are tuned."""
    config = load_config([write_tiny(tmp_path, **changes)])
    parts = assemble(config)
    programs = parts.executor.programs()
    if config.train.eval_samples:
        programs = [*programs, *Evaluator(parts).predictor.programs()]
    found = dry_run(config)
    cuda = replace(found, recipe=replace(config, world=replace(config.world, platform="cuda")))
    assert cuda.compile_seconds is None and "compile time: unknown (" in cuda.describe()
    assert found.programs == count_kinds(programs)
    assert str(dispatch_table(parts.schedule)) in found.describe()
    assert sum(found.programs.values()) == len({id(program) for program in programs})
    assert found.parts.planned.bubble == parts.planned.bubble and found.parts.report == parts.report


def test_json_is_for_dry_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([f"--gin_file={write_tiny(tmp_path)}", "--json"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: --json: only a dry run has it; add --dry_run or leave it out\n"


def test_bytes_for_people() -> None:
    sizes = (0, 1, 1023, 1024, 1 << 20, 3 << 29, 1023 << 30)
    assert [show_bytes(size) for size in sizes] == ["0", "1 B", "1023 B", "1 KiB", "1 MiB", "1.5 GiB", "1023 GiB"]


@pytest.mark.long
def test_how_evenly_ranks_of_cp_share_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(write_tiny(tmp_path, Data_sequence_length=128, Train_eval_samples=0))
    flags = [f"--gin_file={tiny}", "--dry_run", "--gin.llm/Layout.tp=1", "--gin.llm/Layout.cp=2"]
    found = {}
    for method in ("lpt", "contiguous"):
        assert main([*flags, f"--gin.llm/Layout.cp_tokens={method}", "--json"]) == 0
        found[method] = json.loads(capsys.readouterr().out)["cp_imbalance"]
    assert set(found["lpt"]) == {"llm"} and 1 <= found["lpt"]["llm"] < 1.05 < found["contiguous"]["llm"] <= 2
    assert main(flags) == 0
    said = f"llm: attention over 2 ranks of cp, fullest / mean {found['lpt']['llm']:.3f} (Layout.cp_tokens='lpt'"
    assert said in capsys.readouterr().out
