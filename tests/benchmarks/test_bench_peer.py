"""The benchmark ``peer``: its path with small sizes, and flags that are refused before anything starts."""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks.peer.command import EAGER, OURS, TARGETS
from benchmarks.peer.mmjax_process import by_kind
from benchmarks.peer.protocol import has_modules
from mmjax.bench import __main__ as bench

PYTHON = os.environ.get("ORACLE_PYTHON", sys.executable)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--threads=0", "--threads=0: must be 1 to "),
        ("--dtype=float16", "--dtype='float16': did you mean 'bfloat16'? legal: 'float32', 'bfloat16'"),
        ("--python=nowhere", "--python='nowhere': nowhere lacks torch or transformers; run `pip install -e '.[peer]'`"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(["peer", "--small", flag])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_kinds_of_operations_in_a_trace() -> None:
    names = ("dot.3", "ynn_fusion.7.clone", "copy.2", "add_select_fusion", "while.1")
    events = [{"ph": "X", "name": name, "dur": 1e6, "pid": 1, "tid": 1, "args": {"hlo_op": name}} for name in names]
    assert dict(by_kind(events)) == {"products": 2.0, "copy": 1.0, "add_select": 1.0}


@pytest.mark.long
def test_small_steps_have_the_losses_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    if not has_modules(PYTHON, ("torch", "transformers")):
        pytest.skip("neither this Python nor ORACLE_PYTHON has torch and transformers")
    assert bench.main(["peer", "--small", "--json", "--rounds=2", f"--python={PYTHON}"]) == 0
    rows = {row["case"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    for name in TARGETS:
        assert rows[f"losses of 4 steps beside {name}, relative"]["value"] <= 1e-5
        assert rows[f"speed of mmjax over {name}"]["value"] > 0
        assert rows[f"{name}: a step"]["value"] > 0
    assert f"{OURS}: products" in rows and f"{EAGER}: aten::mm" in rows
