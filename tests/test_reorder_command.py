"""`python -m mmjax.reorder`: the order that it prints, its summary, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmjax.reorder import main


@pytest.fixture
def costs(tmp_path) -> Path:
    path = tmp_path / "costs.json"
    pairs = [[float(f), 2.0 * f] for f in np.random.default_rng(0).lognormal(size=24)]
    path.write_text(json.dumps({"encoder": pairs, "llm": [1.0, 2.0]}))
    return path


def test_the_command_prints_one_line_of_json_and_never_imports_jax(costs):
    code = "import runpy, sys; sys.modules['jax'] = None; runpy.run_module('mmjax.reorder', run_name='__main__')"
    args = [f"--costs={costs}", "--dp=2", "--pp=3", "--microbatches=4", "--method=disttrain", "--json"]
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    ranks = json.loads(line)["ranks"]
    assert [[len(samples) for samples in rank] for rank in ranks] == [[3] * 4] * 2
    assert sorted(s for rank in ranks for samples in rank for s in samples) == list(range(24))


def test_the_summary_shows_every_method_and_its_bounds(costs, capsys):
    assert main([f"--costs={costs}", "--dp=2", "--pp=3", "--microbatches=4"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "24 samples, 2 dp ranks, 4 microbatches, 3 samples in each" and "makespan" in head
    table = {name: [float(v) for v in values[:2]] for name, *values in (row.split() for row in rows)}
    assert list(table) == ["none", "disttrain", "best", "bound"]
    assert table["bound"][1] <= table["best"][1] <= min(table["none"][1], table["disttrain"][1])


def test_a_nested_pipeline_is_ordered_by_units(costs, capsys):
    """Three lanes, and twelve microbatches of one sample a rank; the LLM's stages are all of --pp."""
    flags = [f"--costs={costs}", "--pp=3", "--dp=2", "--microbatches=12", "--schedule=nested", "--together"]
    assert main([*flags, "--inner=interleaved", "--chunks=2"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.endswith("12 microbatches, 1 samples in each, units of 3") and head.split()[-3:] == ["none", "/", "it"]
    table = {name: values for name, *values in (row.split() for row in rows)}
    spans = {name: float(values[1]) for name, values in table.items()}
    assert spans["bound"] <= spans["best"] <= min(spans["none"], spans["disttrain"])
    assert spans["none"] / spans["best"] == pytest.approx(float(table["best"][-2]), abs=1e-3)
    assert main([*flags, "--method=disttrain", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    forward = np.array(json.loads(costs.read_text())["encoder"])[:, 0]
    loads_UL = forward[np.array(ranks)[..., 0]].max(axis=0).reshape(4, 3)
    gaps = np.sort(loads_UL.max(axis=1))[::-1][1:] - np.sort(loads_UL.min(axis=1))[::-1][:-1]
    assert (gaps <= 0).all()  # by size: no unit's smallest microbatch is below the next unit's largest


PAIR = "give two numbers from 0 to 1e30, such as [1.0, 2.0]"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "is not JSON (Expecting property name enclosed in double quotes at column 2); write {"),
        ("[]", "holds a list; write {"),
        ('{"encoder": [[1, 2]], "llm": [1, 2], "lm": 3}', "'lm' is no key; use 'encoder', 'llm' and maybe 'generator'"),
        ('{"llm": [1, 2]}', "'encoder' is missing; write {"),
        ('{"encoder": [], "llm": [1, 2]}', "'encoder' is []; give a list with a [forward, backward] pair a sample"),
        ('{"encoder": [[1, 2], [1]], "llm": [1, 2]}', f"'encoder[1]' is [1]; {PAIR}"),
        ('{"encoder": [[1, -2]], "llm": [1, 2]}', f"'encoder[0]' is [1, -2]; {PAIR}"),
        ('{"encoder": [[1, NaN]], "llm": [1, 2]}', f"'encoder[0]' is [1, NaN]; {PAIR}"),
        ('{"encoder": [[1, true]], "llm": [1, 2]}', f"'encoder[0]' is [1, true]; {PAIR}"),
        ('{"encoder": [[1, 2]], "llm": 3}', f"'llm' is 3; {PAIR}"),
        (
            '{"encoder": [[1, 2]], "llm": [1, 2], "generator": [[1, 2], [1, 2]]}',
            "1 in 'encoder' and 2 in 'generator' are not the same samples; give each module one pair a sample",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, text, line):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        main([f"--costs={path}", "--microbatches=1"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: --costs={path}") and line in error


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--microbatches=5"], "--microbatches=5: must divide the 24 samples; use 4"),
        (["--microbatches=4", "--dp=4"], "--dp=4: must divide the 6 samples of a microbatch; use 3"),
        (["--microbatches=4", "--dp=0"], "--dp=0: must be at least 1"),
        (
            ["--microbatches=4", "--pp=1"],
            "--pp=1: leaves no stage for the LLM; use 2 or more, or less for the other modules",
        ),
        (["--microbatches=4", "--chunks=2"], "--chunks=2: is for --schedule=interleaved; set it to 1"),
        (
            ["--microbatches=4", "--inner=zb-h1"],
            "--inner=zb-h1: is for --schedule=three-phase or nested; set it to 1f1b",
        ),
        (["--microbatches=4", "--schedule=nested", "--inner=gpipe"], "--inner='gpipe'"),
        (
            ["--microbatches=4", "--schedule=nested", "--encoder_pp=2"],
            "--encoder_pp=2: a nested module is one stage on all of the --pp ranks; set it to 1",
        ),
        (["--microbatches=4", "--schedule=nested", "--chunks=2"], "--chunks=2: is for --schedule=interleaved; set"),
        (["--microbatches=4", "--method=bst"], "--method='bst': did you mean 'best'?"),
        (["--microbatches=4", "--schedule=1f1"], "--schedule='1f1': did you mean '1f1b'?"),
        ([], "--microbatches is missing: of a step; write --microbatches=MICROBATCHES"),
    ],
)
def test_a_wrong_flag_is_one_line(costs, capsys, flags, line):
    with pytest.raises(SystemExit) as end:
        main([f"--costs={costs}", *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and error.startswith(f"error: {line}")


def test_a_missing_file_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([f"--costs={tmp_path / 'none.json'}", "--microbatches=1"])
    assert (
        capsys.readouterr().err
        == f"error: --costs={tmp_path / 'none.json'}: no such file or directory; name a JSON file\n"
    )
