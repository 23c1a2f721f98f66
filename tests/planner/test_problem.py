"""A wrong problem file gives one line that names field, value and legal values, and never a traceback."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planner.models import MISSING, spoilt

from mmjax.configurable import ConfigError
from mmjax.plan import __main__ as plan
from mmjax.planner.problem import parse_problem, read_problem

SIZES = {"param_bytes": 8, "optimizer_bytes": 24, "activation_bytes": 2}
GOOD: dict[str, Any] = {
    "devices": 6,
    "global_batch": 8,
    "microbatch": 2,
    "memory": 64,
    "modules": {
        "llm": {"fwd": {"1": 2.0, "2": 1.25}, "bwd": {"1": 4, "2": 2.5}, **SIZES},
        "vision": {"fwd": {"1": 1.0}, "bwd": {"1": 0}, **SIZES},
    },
}


def test_a_problem_is_read_as_it_is_written() -> None:
    problem = parse_problem(GOOD)
    assert problem.modules["llm"].seconds == {1: 6.0, 2: 3.75}
    assert problem.modules["vision"].seconds == {1: 1.0}
    assert (problem.degrees, problem.llm_degrees) == ((1, 2, 4), (1, 2, 4))
    frozen = copy.deepcopy(GOOD)
    frozen["modules"]["vision"]["bwd"] = {}
    frozen["devices"] = 6.0
    assert parse_problem(frozen) == problem
    assert parse_problem(frozen).modules["vision"].backward == {1: 0.0}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("devices", 0, "devices=0: must be a whole number from 1 to 1000000"),
        ("devices", 2.5, "devices=2.5: must be a whole number"),
        ("devices", True, "devices=true: must be a whole number"),
        ("devices", "6", 'devices="6": must be a whole number'),
        ("devices", 10**200, "devices=1000000000"),
        ("devices", MISSING, "devices: is missing; an object here has devices, global_batch, microbatch"),
        ("global_batch", -4, "global_batch=-4: must be a whole number"),
        ("microbatch", 3, "microbatch=3: must divide global_batch (8), such as 2"),
        ("microbatch", 16, "microbatch=16: must divide global_batch (8), such as 8"),
        ("memory", 0, "memory=0: must be a number of 1 or more"),
        ("memory", None, "memory=null: must be a number of 1 or more"),
        ("memory", 1e400, "memory=inf: must be a number of 1 or more"),
        ("device", 6, "device: no such field; did you mean 'devices'?"),
        ("modules", {}, 'modules: has {}; give an object with "llm", the backbone'),
        ("modules", [], 'modules: has []; give an object with "llm"'),
        ("modules.llm", MISSING, "modules: has 'vision'; give an object with \"llm\""),
        ("modules.llm", 3, "modules.llm=3: must be an object with fwd, bwd"),
        ("modules.", {}, 'modules: a module is called ""'),
        ("modules.llm.fwd", {}, 'modules.llm.fwd={}: give seconds per sample for at least one tp, such as {"1": 0.01}'),
        ("modules.llm.fwd", 2.0, 'modules.llm.fwd=2.0: must be an object of seconds by tp, such as {"1": 0.01}'),
        ("modules.llm.fwd.0", 2.0, 'modules.llm.fwd: tp "0" must be a whole number of 1 or more, such as "8"'),
        ("modules.llm.fwd.two", 2.0, 'modules.llm.fwd: tp "two" must be a whole number'),
        ("modules.llm.fwd.1", 0, "modules.llm.fwd.1=0: must be a number above 0"),
        ("modules.llm.fwd.1", -1.5, "modules.llm.fwd.1=-1.5: must be a number above 0"),
        ("modules.llm.fwd.1", 1e-300, "modules.llm.fwd.1=1e-300: must be a number above 0"),
        ("modules.llm.fwd.4", 1.0, 'modules.llm.bwd: has no tp "4", which fwd has'),
        ("modules.llm.bwd.4", 1.0, 'modules.llm.fwd: has no tp "4", which bwd has'),
        ("modules.llm.bwd.1", -1, "modules.llm.bwd.1=-1: must be a number of 0 or more"),
        ("modules.llm.bwd", MISSING, "modules.llm.bwd: is missing; an object here has fwd, bwd, param_bytes"),
        ("modules.llm.param_bytes", "8 GB", 'modules.llm.param_bytes="8 GB": must be a number of 0 or more'),
        ("modules.vision.optimiser_bytes", 1, "modules.vision.optimiser_bytes: no such field; did you mean"),
        ("modules.vision.layers", 0, "modules.vision.layers=0: must be a whole number from 1 to 100000"),
        ("modules.vision.chunks", 0, "modules.vision.chunks=0: must be a whole number from 1 to 100000"),
        ("modules.vision.sent_bytes", 8, "modules.vision.sent_bytes: is read beside bandwidth, which is missing; give"),
        ("bandwidth", 0, "bandwidth=0: must be a number of 1 or more"),
        ("modules.vision.activation_bytes", MISSING, "modules.vision.activation_bytes: is missing"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line(path: str, value: Any, message: str) -> None:
    wrong = spoilt(GOOD, path, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        parse_problem(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON in line 1: Expecting value"),
        ("{\n'devices': 3}", "no JSON in line 2: Expecting property name"),
        ("[1, 2]", "the problem=[1, 2]: must be an object with devices"),
        ("[" * 200_000, "nested too deep"),
        ('{"devices": 4, "devices": 5}', '"devices" is there twice in one object; keep one'),
        ('{"devices": NaN}', "NaN is no JSON number"),
        ('{"devices": ' + "1" * 5000 + "}", "Exceeds the limit"),
        (b"\xff\xfe{}", "is no UTF-8 text; give a JSON file"),
    ],
)
def test_a_file_that_is_no_problem_is_one_line(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_problem(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "reason"), [("none.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_one_line(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--problem=.*: {reason}"):
        read_problem(tmp_path / name)


def test_the_command_prints_one_line_and_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(GOOD))
    program = (
        "import sys\n"
        "from mmjax.plan.__main__ import main\n"
        f"status = main(['--problem={path}', '--json'])\n"
        "assert not {'jax', 'cvxpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stdout.splitlines()
    output = json.loads(line)
    assert set(output) == {"objective", "modules"} and list(output["modules"]) == ["llm", "vision"]
    assert all(set(module) == {"devices", "tp", "dp", "pp"} for module in output["modules"].values())
    assert done.stderr == ""


def test_the_table_and_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(GOOD))
    assert plan.main([f"--problem={path}"]) == 0
    head, llm, vision, step, devices = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["devices", "tp", "dp", "pp"] and llm.startswith("llm ") and vision.startswith("vision ")
    assert step.startswith("a step takes ") and "at the pace of" in step and devices.endswith("of 6 devices are used")
    assert plan.main([f"--problem={path}", "--bound"]) == 0
    assert re.search(
        r"no plan takes less than [0-9.]+ s: this one takes at most [0-9.]+ % more", capsys.readouterr().out
    )
    path.write_text(json.dumps({**GOOD, "bandwidth": 4}))
    assert plan.main([f"--problem={path}"]) == 0
    assert re.search(r"at the pace of \w+, and [0-9.]+ s for its gradients and parameters", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        plan.main([f"--problem={path}", "--bound"])
    message = "--bound: is for problems without communication and chunks; leave it out, or bandwidth=4\n"
    assert message in capsys.readouterr().err
    path.write_text(json.dumps({**GOOD, "memory": 5}))
    assert plan.main([f"--problem={path}", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: modules.") and err.count("\n") == 1 and "make it fit: memory=" in err
    path.write_text(json.dumps({**GOOD, "memory": "5"}))
    for flags in ([f"--problem={path}"], ["--json"], ["--problem"]):
        with pytest.raises(SystemExit) as end:
            plan.main(flags)
        out, err = capsys.readouterr()
        assert end.value.code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
