"""The goldens in ``oracles/`` are what torch and transformers compute today, where they are installed.

Each script is run in a copy of the folder, by this Python or by the one that ORACLE_PYTHON names, and what it makes is
compared with what is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ORACLES = Path(__file__).parent / "oracles"
SCRIPTS = (  # the later ones read what the earlier ones make
    *("make_llava", "make_llm", "make_experts", "make_vision", "make_qwen", "make_onevision", "make_whisper"),
    *("make_processors", "make_vocoder"),
    *("make_generated", "make_whole_generated", "make_composed", "make_training", "make_peft"),
)
PYTHON = os.environ.get("ORACLE_PYTHON", sys.executable)


def is_there() -> bool:
    """Whether that Python has torch and transformers."""
    asked = [PYTHON, "-c", "import torch, transformers, PIL, peft"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_the_goldens_are_what_transformers_computes(tmp_path: Path) -> None:
    if not is_there():
        pytest.skip("neither this Python nor ORACLE_PYTHON has torch and transformers")
    made = tmp_path / "oracles"
    shutil.copytree(ORACLES, made)
    for kept in [*made.rglob("*.npz"), *made.rglob("*.safetensors")]:
        if kept.name != "composed_export.npz":  # its script needs folders that mmjax has exported
            kept.unlink()
    for script in SCRIPTS:
        ran = subprocess.run([PYTHON, made / f"{script}.py"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{script}: {ran.stderr[-2000:]}"
    values, weights = (sorted(ORACLES.rglob(pattern)) for pattern in ("*.npz", "*.safetensors"))
    assert len(values) + len(weights) > len(SCRIPTS)
    for file in weights:
        assert (made / file.relative_to(ORACLES)).read_bytes() == file.read_bytes(), file
    for file in values:
        same(np.load(file), np.load(made / file.relative_to(ORACLES)), str(file))
    kept, fresh = (json.loads((folder / "processors" / "dialogues.json").read_text()) for folder in (ORACLES, made))
    assert {**fresh, "versions": kept["versions"]} == kept


def same(kept: Mapping[str, np.ndarray], fresh: Mapping[str, np.ndarray], name: str) -> None:
    assert kept.keys() == fresh.keys(), name
    for key, value in numbers(kept):
        largest = float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind == "f" else 0.0
        # The gradient of a key's bias is 0 but for rounding, and has no largest value to speak of.
        # In training rounding then moves the bias itself.
        moved = 2e-3 if "training" in name and key.endswith("k_proj.bias") else 0.0
        bound = 2e-5 * largest + 1e-7 + moved
        np.testing.assert_allclose(fresh[key], value, rtol=0, atol=bound, err_msg=f"{name}: {key}")


def numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """What is no text, such as versions."""
    return ((key, value) for key, value in found.items() if value.dtype.kind in "biuf")
