"""Each whole family, shrunk from the settings of a published model, trains as on one device: `mmjax.check`.

Each under context parallelism, with lanes in a nested schedule or in three phases, and over two processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmjax.config import load_config
from mmjax.parity import check

Bindings = tuple[str, ...]


def family(llm: str, tower: str, *more: str) -> Bindings:
    """The settings of a model whose parts have the settings of these presets."""
    return ("Model.encoders={'vision': 'vit'}", f"llm/Decoder.preset={llm!r}", f"vision/ViT.preset={tower!r}", *more)


def projector(**fields: object) -> Bindings:
    return tuple(f"vision/Projector.{name}={value!r}" for name, value in fields.items())


MERGER = {"hidden": 5120, "activation": "gelu_exact"}
INNER = projector(**MERGER, norm="layer", inject=(1, 2, 3), levels=(8, 16, 24))
SIGLIP = "siglip-so400m-14-224"
FAMILIES: dict[str, Bindings] = {
    "LLaVA-1.5": family("vicuna-7b", "clip-vit-l14-336", "vision/ViT.merge=1", *projector(hidden=4096)),
    "Qwen2-VL": family("qwen2-vl-7b", "qwen2-vl-7b", *projector(**MERGER, norm="layer")),
    "Qwen2.5-VL": family("qwen2.5-vl-7b", "qwen2.5-vl-7b", *projector(**MERGER, norm="rms")),
    "Qwen3-VL": family("qwen3-vl-8b", "qwen3-vl-8b", *INNER),
    "Qwen3-VL-MoE": family("qwen3-vl-30b-a3b", "qwen3-vl-8b", *INNER),
    "Qwen3.5": family("qwen3.5-9b", "qwen3-vl-8b", *projector(**MERGER, norm="layer")),
    "Qwen3.5-MoE": family("qwen3.5-35b-a3b", "qwen3-vl-8b", *projector(**MERGER, norm="layer")),
    "Gemma 3": family(
        *("gemma3-4b", "siglip-so400m-14-896", "vision/ViT.merge=4"),
        *projector(kind="linear", norm="rms_plus_one", pool=True, bias=False),
    ),
    "Gemma 4": family("gemma4-31b", "gemma4-31b", *projector(kind="linear", norm="rms_plain", pool=True, bias=False)),
    "Gemma 4 with experts": family(
        "gemma4-26b-a4b", "gemma4-31b", *projector(kind="linear", norm="rms_plain", pool=True, bias=False)
    ),
    "PaliGemma 2": family("paligemma2-3b", SIGLIP, "vision/ViT.merge=1", *projector(kind="linear")),
    "SmolLM3 behind SigLIP": family("smollm3-3b", SIGLIP, *projector(hidden=4096)),
}
STEP: Bindings = ("Train.microbatches=2", "Train.global_batch=8")
LAYOUTS: dict[str, Bindings] = {
    "cp": (
        *("llm/Layout.cp=2", "llm/Layout.tp=2", "llm/Layout.cp_tokens='contiguous'"),
        *("vision/Layout.cp=2", "vision/Layout.rank_offset=4"),
    ),
    "nested": (
        *("llm/Layout.pp=2", "llm/Layout.tp=2", "Train.schedule='nested'"),
        *("vision/Layout.lanes=2", "vision/Layout.tp=2"),
    ),
    "three phases": (
        *("llm/Layout.pp=2", "llm/Layout.tp=2", "Train.schedule='three-phase'", "Train.window=1"),
        "vision/Layout.dp=4",
    ),
}
PROCESSES: Bindings = ("llm/Layout.pp=2", "llm/Layout.dp=2", "vision/Layout.dp=2", "vision/Layout.rank_offset=4")
"""Two devices without work are in the second of two processes, with the tower's."""


def cases() -> list[tuple[str, str]]:
    """Every family under cp, and in turn nested and in three phases."""
    others = ("nested", "three phases")
    return [(name, way) for at, name in enumerate(FAMILIES) for way in ("cp", others[at % 2])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), cases())
def test_a_shrunk_family_trains_as_on_one_device(name: str, way: str) -> None:
    report = check(load_config([], [*FAMILIES[name], *STEP, *LAYOUTS[way]]), steps=2, style="silent")
    assert report and report.ok, report and report.numbers()


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_every_family_over_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All by the same processes; see ``several_checks``."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")
    given = {name: {"files": [], "bindings": [*own, *STEP, *PROCESSES]} for name, own in FAMILIES.items()}
    (tmp_path / "cases.json").write_text(json.dumps(given))
    flags: Sequence[str] = ("-n", "2", "--devices_per_process=4", "-m", "several_checks", str(tmp_path / "cases.json"))
    command = [sys.executable, "-m", "mmjax.launch", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=2600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line.removeprefix("[0] ")) for line in done.stdout.splitlines()]
    assert [report["name"] for report in found] == list(FAMILIES)
    assert all(report["ok"] is True for report in found), found
