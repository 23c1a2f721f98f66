"""The benchmark command: names, rows as they come, exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from numpy import float64
from trial_runs import REPOSITORY

from mmjax.bench import BENCHES, Bench
from mmjax.bench import __main__ as bench
from mmjax.bench.rows import Row, at_least, at_most
from mmjax.flags import Flag

GOOD = Row(bench="one", case="a", value=1.25, unit="ratio", target=at_most(1.25))
FREE = Row(bench="one", case="b", value=7e-9, unit="s")
BAD = Row(bench="two", case="c", value=0.9, unit="share", target=at_least(0.95))


@pytest.fixture
def rows(monkeypatch) -> dict[str, list[Row]]:
    """Rows by benchmark instead of measurements."""
    table = {name: [] for name in BENCHES}
    monkeypatch.setattr(bench, "run_bench", lambda name, rounds, **own: iter(table[name]))
    return table


def test_bounds_hold_at_their_value_and_on_their_side():
    assert [at_most(2).met_by(x) for x in (1.9, 2, 2.1)] == [True, True, False]
    assert [at_least(2).met_by(x) for x in (1.9, 2, 2.1)] == [False, True, True]
    nan = float("nan")
    assert not at_most(2).met_by(nan) and not at_least(2).met_by(nan)
    assert FREE.ok and GOOD.ok and not BAD.ok
    assert json.dumps(replace(GOOD, value=float64(1.25)).as_json()) == json.dumps(GOOD.as_json())


@pytest.mark.parametrize("row", [GOOD, FREE, BAD])
def test_a_row_comes_back_from_json(row):
    data = json.loads(json.dumps(row.as_json()))
    assert set(data) == {"bench", "case", "value", "unit", "target", "ok", "bound"}
    assert Row.from_json(data) == row


def test_json_has_an_object_a_row_and_a_missed_target_an_exit_status(rows, capsys):
    rows["layouts"] = [GOOD, FREE]
    assert bench.main(["layouts", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [GOOD.as_json(), FREE.as_json()]
    rows["layouts"] = [BAD, GOOD]
    assert bench.main(["--json", "layouts"]) == 1
    (first, _) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {
        "bench": "two",
        "case": "c",
        "value": 0.9,
        "unit": "share",
        "target": 0.95,
        "ok": False,
        "bound": "≥",
    }


def test_the_table_names_what_is_missed(rows, capsys):
    rows["layouts"], rows["simulate"] = [GOOD], [BAD, FREE]
    assert bench.main([]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.split() == ["one", "a", "1.25", "ratio", "target", "≤", "1.25", "ok"]
    assert second.split() == ["two", "c", "0.9", "share", "target", "≥", "0.95", "MISSED"]
    assert third.split() == ["one", "b", "7e-09", "s"]


def test_rows_are_printed_as_they_come(monkeypatch, capsys):
    seen = []

    def run(name: str, rounds: int) -> Iterator[Row]:
        yield GOOD
        seen.append(capsys.readouterr().out)
        yield FREE

    monkeypatch.setattr(bench, "run_bench", run)
    assert bench.main(["layouts"]) == 0
    assert seen[0].startswith("one")


def test_names_run_in_the_order_given_and_rounds_reach_them(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "run_bench", lambda name, rounds: seen.append((name, rounds)) or iter(()))
    assert bench.main(["simulate", "--rounds", "4", "layouts"]) == 0
    assert seen == [("simulate", 4), ("layouts", 4)]


def test_help_has_a_sentence_for_every_benchmark(capsys):
    assert bench.main(["runtime", "--help"]) == 0
    out = capsys.readouterr().out
    for name, entry in BENCHES.items():
        assert f"  {name}{'*' if entry.on_request else ''} " in out
        assert entry.doc.split()[0] in out and entry.doc.endswith(".")
    assert "--rounds" in out and "--gin" not in out


def test_a_wheel_has_the_benchmarks_of_the_package_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mmjax.bench.CHECKOUT", tmp_path)
    monkeypatch.setattr(bench, "run_bench", lambda name, rounds, **flags: iter([GOOD]))
    (tmp_path / "benchmarks").mkdir()  # some other package's
    assert bench.main(["soak"]) == 0 and bench.main(["faults", "gpu"]) == 0
    capsys.readouterr()
    assert bench.main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "soak*" in out and "--processes" in out and "--picture" not in out
    assert "In a checkout of mmjax there are also bf16, cp, data, data-plans, experts, generate," in out
    for arguments, name in (["masks"], "masks"), ([], "layouts"):
        with pytest.raises(SystemExit) as end:
            bench.main(arguments)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1
        assert f"benchmark {name!r}: an installed package has no such benchmark, a checkout has" in error


@pytest.mark.long
def test_benchmarks_are_found_from_any_folder(tmp_path):
    code = "from mmjax.bench import BENCHES; print(all(bench.available for bench in BENCHES.values()))"
    code += "; print(BENCHES['routes'].function().__module__)"
    link = tmp_path / "site" / "mmjax"
    link.parent.mkdir()
    link.symlink_to(REPOSITORY / "mmjax")  # as an editable installation has the package alone
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(link.parent)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "benchmarks.routes"]


def test_a_benchmark_has_flags_of_its_own_and_may_run_on_request_alone(monkeypatch, capsys):
    own = Bench(where="a:b", doc="One.", flags=(Flag(name="minutes", doc="How long.", default=5),), on_request=True)
    monkeypatch.setattr(bench, "BENCHES", {"own": own, "other": Bench(where="a:b", doc="Two.")})
    seen = []
    monkeypatch.setattr(bench, "run_bench", lambda name, rounds, **own: seen.append((name, own)) or iter(()))
    assert bench.main(["own", "--minutes", "7", "other"]) == 0
    assert bench.main([]) == 0
    assert seen == [("own", {"minutes": 7}), ("other", {}), ("other", {})]
    assert bench.main(["--help"]) == 0
    assert "--minutes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["other", "--minutes=7"])
    assert "no flag --minutes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layots"], "error: benchmark 'layots': there is none of this name; did you mean 'layouts'?"),
        (
            ["ablation"],
            "error: benchmark 'ablation': it measures nothing and is a study now; run `python -m studies distrain` in "
            "a checkout of mmjax",
        ),
        (["layouts", "--jsn"], "error: --jsn: no flag --jsn; did you mean '--json'?"),
        (["layouts", "--rounds=0"], "error: --rounds=0: must be at least 1, such as 15"),
        (["layouts", "--rounds=two"], "error: --rounds=two: must be an integer"),
    ],
)
def test_a_wrong_command_is_one_line_before_anything_runs(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(bench, "run_bench", None)
    with pytest.raises(SystemExit) as end:
        bench.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1
