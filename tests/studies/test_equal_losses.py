"""The study that trains: its runs are the paper's, its bound notices wrong routes, and finished runs are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import mmjax
from mmjax.bench.rows import Row
from mmjax.config import load_config
from studies.__main__ import main
from studies.parity import curves, report
from studies.parity.bound import compared, spread
from studies.parity.captions import InOrder
from studies.parity.controls import all_scaled, exchanged, half_scaled
from studies.parity.curves import Sweep
from studies.parity.runs import A7, A8, CONTROLS, GIN_FILE, RUNS, chosen, order_name

LAYOUTS = [run for run in RUNS.values() if run.group == "layout"]


def test_36_layouts_in_fp32_and_six_in_bf16() -> None:
    fp32 = [run for run in LAYOUTS if run.dtype == "float32"]
    assert len(fp32) == 36 and len(LAYOUTS) == 42
    assert [sum(run.trained is trained for run in fp32) for trained in (False, True)] == [20, 16]
    assert {run.steps for run in fp32} == {100} and {run.steps for run in LAYOUTS if run not in fp32} == {1000}
    assert len(A7) == 10 and len(A8) == 8


def test_a_module_has_four_ranks_of_its_own_or_all_eight() -> None:
    for run in LAYOUTS:
        if run.dtype == "bfloat16":
            continue
        apart = run.name.endswith("-noncolocated")
        assert {run.llm.ranks, run.vision.ranks} == {4 if apart else 8} and run.ranks == 8
        assert run.offset == 4 * apart
        names = run.name.replace("2dp2", "2_dp2").split("_")
        for degree in ("tp4", "pp4"):  # the name says what the LLM has
            if names[0].endswith(degree):
                assert getattr(run.llm, degree[:2]) == 4


@pytest.mark.parametrize("name", ["A7-tp2_dp2_llm_dp4_vision-colocated", "bfloat16-trained-noncolocated"])
def test_a_run_has_the_settings_of_table_a6(name: str) -> None:
    run = RUNS[name]
    recipe = load_config([GIN_FILE], run.bindings(), allow_code=True)
    assert recipe.train.global_batch == 96 and recipe.train.clip_norm == float(run.dtype == "bfloat16")
    optimizers = recipe.model.optimizers
    assert optimizers["vision"].frozen and optimizers["llm"].frozen is not run.trained
    projector = optimizers["vision_projector"]
    assert (projector.learning_rate, projector.final_learning_rate) == ((1e-4, 1e-5) if run.trained else (1e-3, 2e-5))
    assert (projector.schedule, projector.warmup, projector.weight_decay) == ("cosine", 60, 0.0)
    assert (projector.b1, projector.b2) == (0.9, 0.95)
    layouts = recipe.model.layouts
    assert (layouts["llm"].tp, layouts["llm"].dp) == ((4, 1) if run.trained else (2, 4))
    assert layouts["vision"].rank_offset == 4 * run.trained


def test_every_run_is_legal() -> None:
    for run in RUNS.values():
        mmjax.build(load_config([GIN_FILE], run.bindings(), allow_code=True))


def test_the_bound_is_three_spreads_of_runs_in_other_orders() -> None:
    assert spread([[1.0, 2.0], [1.0, 2.5], [1.25, 2.25]]) == 0.5 and spread([[1.0]]) == 0.0
    losses = {order_name("float32", order, trained=False): [1.0, 2.0 + order / 8] for order in range(3)}
    losses |= {
        "A7-tp4_both-colocated": [1.0, 2.7],
        "control-frozen-exchanged": [1.0, 2.9],
        "A8-tp4_both-colocated": [9],
    }
    right, wrong = compared(losses)
    assert right.bound == wrong.bound == 0.75
    assert right.within and not wrong.within
    assert right.largest == pytest.approx(0.7)
    losses["A7-tp4_both-colocated"] = [1.0]  # another number of steps is not comparable
    assert [pair.run.name for pair in compared(losses)] == ["control-frozen-exchanged"]


class Numbers:
    """Samples that are their index."""

    def meta(self, index: int) -> int:
        return index

    def sample(self, index: int, media: object, *, learned: bool) -> int:
        return index


def test_other_orders_have_the_same_samples_in_each_step() -> None:
    orders = [InOrder(Numbers(), key=("test", order), order=order, batch=8) for order in range(3)]  # type: ignore[arg-type]
    steps = [[[source.place(8 * step + i) for i in range(8)] for step in range(2)] for source in orders]
    assert steps[0] == [list(range(8)), list(range(8, 16))]
    assert all([sorted(step) for step in order] == steps[0] for order in steps)
    assert steps[1] != steps[0] != steps[2] != steps[1]
    assert orders[1].sample(11, {"vision"}) == orders[1].meta(11) == steps[1][1][3]


def test_controls_exchange_features_and_scale_gradients() -> None:
    import jax
    import jax.numpy as jnp

    x = jnp.arange(12, dtype=jnp.float32).reshape(4, 3, 1)
    np.testing.assert_array_equal(exchanged(None, x), x[jnp.array([1, 0, 2, 3])])  # type: ignore[arg-type]
    for control, factors in ((half_scaled, (2, 2, 1, 1)), (all_scaled, (2, 2, 2, 2))):
        value, pull = jax.vjp(lambda x, control=control: control(None, x), x)  # type: ignore[arg-type]
        np.testing.assert_array_equal(value, x)
        np.testing.assert_array_equal(pull(jnp.ones_like(x))[0][:, 0, 0], factors)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that were trained or checked; none really is."""
    names: list[str] = []

    def losses(self: Sweep, run: object, steps: int) -> dict[str, list[float]]:
        names.append(run.name)  # type: ignore[attr-defined]
        return {"losses": [1.0 / (i + 1) for i in range(steps)]}

    def differences(run: object, steps: int) -> dict[str, object]:
        names.append(f"check {run.name}")  # type: ignore[attr-defined]
        return {"ok": True, "loss": 1e-7, "grad": 2e-7, "update": 3e-7, "moments": 4e-7, "steps": steps}

    monkeypatch.setattr(Sweep, "_losses", losses)
    monkeypatch.setattr(Sweep, "_train_base", lambda self: None)
    monkeypatch.setattr(curves, "_differences", differences)
    return names


@pytest.mark.long
def test_finished_runs_are_not_run_again(canned: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["parity", "--curves", "--only=A7-tp4*,single-float32-frozen-*", "--steps=3", f"--out={tmp_path}"]
    assert main(command) == 0
    names = [run.name for run in chosen("single-float32-frozen-*,A7-tp4*")]
    checked = [f"check {name}" for name in names if name.startswith("A7")]
    assert canned == names + checked and len(names) == 9
    out = capsys.readouterr().out
    assert "1 of 9: single-float32-frozen-order0: loss 0.333333" in out
    assert "| A7-tp4_both-colocated | 4/1/2 | 4/1/2 | 3 | 0.0e+00 | 0.0e+00 | yes |" in out
    assert "| A7-tp4_both-colocated | 10 | 1.0e-07 | 2.0e-07 | 3.0e-07 | 4.0e-07 | yes |" in out
    assert (tmp_path / "curves.png").exists() and (tmp_path / "tables.md").exists()
    canned.clear()
    assert main(command) == 0 and not canned
    (tmp_path / f"{names[-1]}.json").unlink()
    assert main(command) == 0 and canned == names[-1:]
    canned.clear()
    assert main([*command[:3], "--steps=4", "--check=0", command[-1]]) == 0 and canned == names
    assert json.loads((tmp_path / f"{names[0]}.json").read_text())["steps"] == 4


def test_rows_are_runs() -> None:
    rows = list(report.rows())
    assert len(rows) == len(RUNS) and all(isinstance(row, Row) and row.unit == "ranks" for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity", "--steps=4"], "--steps=4: belongs to --curves; write python -m studies parity --curves"),
        (["--curves"], "--curves: is of the study 'parity' alone; write python -m studies parity --curves"),
        (["parity", "--curves", "--check=-1"], "--check=-1: must be 0 or more, such as 10"),
        (
            ["parity", "--curves", "--tables"],
            "--tables: --curves writes its results into --out=runs/parity; leave it out",
        ),
        (
            ["parity", "--curves", "--only=A7-tp4_both-colocatd"],
            "--only=A7-tp4_both-colocatd: no run has such a name; did you mean 'A7-tp4_both-colocated'?",
        ),
    ],
)
def test_a_wrong_command_is_one_line(
    canned: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and not canned
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.long
def test_layouts_are_within_the_bound_and_a_wrong_route_is_not(tmp_path: Path) -> None:
    """Four steps of the real runs, from new parameters."""
    recipes = {
        name: load_config([GIN_FILE], [*RUNS[name].bindings(), "Train.steps=4"], allow_code=True)
        for name in (
            *(order_name("float32", order, trained=True) for order in range(3)),
            *("A8-pp2_dp2_llm_tp2dp2_vis-colocated", "control-trained-exchanged"),
        )
    }
    losses = {name: mmjax.build(recipe).train(4, style="silent").losses for name, recipe in recipes.items()}
    right, wrong = sorted(compared(losses), key=lambda pair: pair.run.group == "control")
    assert right.run.group == "layout" and right.largest <= max(right.bound, 1e-6)
    assert wrong.largest > 100 * max(wrong.bound, 1e-6)


def test_controls_have_names() -> None:
    assert {run.control for run in RUNS.values()} == {"", *CONTROLS}
