"""`compare`: relative norms, frozen modules, numbers that are not finite, gradients recovered from moments."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from mmjax.optimizer_config import OptimizerConfig
from mmjax.parity.compare import Comparison, Expected, Run, compare, recovered_gradients, relative, relative_number
from mmjax.reference import TrainState, adamw_step, global_norm

MODULES = {"vision": OptimizerConfig(b1=0.5, eps=1e-4), "llm": OptimizerConfig(frozen=True)}
CLIP = 2.0


def array(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def expected(second: float = 1.0) -> Expected:
    """Two steps of two modules, the second frozen, with gradients made up; ``second`` multiplies those of step 2."""
    rng = np.random.default_rng(0)
    names = ("vision/a", "vision/b", "llm/c")
    state = TrainState(leaves={n: rng.normal(size=(3, 4)).astype(np.float32) for n in names})
    run = Expected(losses=[2.0, 1.5], norms=[], leaves=[], gradients=[])

    def keep() -> None:
        leaves = {f"params/{n}": leaf for n, leaf in state.leaves.items()}
        for n in names[:2]:
            leaves[f"adam_m/{n}"] = state.first.get(n, np.zeros((3, 4), np.float32))
            leaves[f"adam_v/{n}"] = state.second.get(n, np.zeros((3, 4), np.float32))
        run.leaves.append(leaves)

    keep()
    for factor in (1.0, second):
        gradients = {n: np.float32(factor) * rng.normal(size=(3, 4)).astype(np.float32) for n in names[:2]}
        state = adamw_step(state, gradients, MODULES, dict.fromkeys(MODULES, 1e-2), clip_norm=CLIP)
        run.gradients.append(gradients)
        run.norms.append({"vision": global_norm(gradients), "llm": 0.0})
        keep()
    return run


WANT = expected()


def spoilt(change: Callable[[Run], None], dtype: str = "float32") -> Comparison:
    """The comparison of a run that differs by `change`."""
    got = Run(losses=list(WANT.losses), norms=copy.deepcopy(WANT.norms), leaves=copy.deepcopy(WANT.leaves))
    change(got)
    return compare(got, WANT, MODULES, clip_norm=CLIP, dtype=dtype)


def test_the_same_run_is_equal() -> None:
    found = spoilt(lambda run: None)
    assert found.ok and found.first_off() is None
    assert found.largest("loss") == found.largest("update") == found.largest("moments") == 0
    assert 0 < found.largest("grad") < 1e-6  # moments are rounded


def test_a_step_is_compared_from_the_state_that_it_began_with() -> None:
    """A run that is off after its first step, and a reference that follows it: the second step is equal."""
    drift = np.float32(0.5)
    run = Run(losses=WANT.losses, norms=WANT.norms, leaves=copy.deepcopy(WANT.leaves))
    for leaves in run.leaves[1:]:
        leaves["params/vision/a"] = leaves["params/vision/a"] + drift
    following = dataclasses.replace(WANT, leaves=[*WANT.leaves[:2], run.leaves[2]], starts=run.leaves[:2])
    found = compare(run, following, MODULES, clip_norm=CLIP)
    assert found.first_off() == (1, ["vision update"]) and found.modules["vision"]["update"][1] == 0
    alone = compare(run, WANT, MODULES, clip_norm=CLIP)
    assert alone.modules["vision"]["update"][1] < 1e-4, "the drift is the same before and after"
    assert compare(run, dataclasses.replace(following, starts=()), MODULES, clip_norm=CLIP).largest("update") > 1


def test_bf16_has_wider_limits_and_one_for_single_leaves() -> None:
    near, far = (spoilt(set_leaf("adam_m/vision/a", 1, factor), "bfloat16") for factor in (1.04, 1.15))
    assert near.ok and near.quantities == ("grad", "update", "moments", "leaf")
    assert near.largest("leaf") == pytest.approx(0.04, rel=1e-3) and near.largest("leaf", "llm") == 0
    assert far.first_off() == (1, ["vision grad", "vision leaf"])
    assert "leaf" not in spoilt(lambda run: None).quantities


def test_gradients_come_back_unclipped() -> None:
    assert min(run["vision"] for run in WANT.norms) > CLIP
    for got, want in zip(recovered_gradients(WANT, MODULES, CLIP), WANT.gradients, strict=True):
        assert relative(got, want) < 1e-6


def test_a_gradient_far_smaller_than_the_moments_is_known_as_well_as_they_are() -> None:
    """The second step's gradient is 1e-4 of the first's: rounding of the moments is more than 2e-5 of it."""
    want = expected(second=1e-4)
    same = Run(losses=list(want.losses), norms=want.norms, leaves=copy.deepcopy(want.leaves))
    assert relative(recovered_gradients(same, MODULES, CLIP)[1], want.gradients[1]) > 2e-5
    assert compare(same, want, MODULES, clip_norm=CLIP).ok
    same.leaves[2]["adam_m/vision/a"] *= np.float32(1 + 1e-5)
    assert compare(same, want, MODULES, clip_norm=CLIP).first_off() == (2, ["vision grad"])


def set_leaf(name: str, step: int, factor: float) -> Callable[[Run], None]:
    """Multiplies a leaf of a state."""

    def change(run: Run) -> None:
        run.leaves[step][name] = run.leaves[step][name] * np.float32(factor)

    return change


def set_norm(module: str, step: int, factor: float) -> Callable[[Run], None]:
    """Multiplies a module's gradient norm."""
    return lambda run: run.norms[step].update({module: run.norms[step][module] * factor})


def set_loss(value: float) -> Callable[[Run], None]:
    """Replaces the second loss."""
    return lambda run: run.losses.__setitem__(1, value)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (set_loss(1.5 * (1 + 2e-5)), (2, ["loss"])),
        (set_loss(math.nan), (2, ["loss"])),
        (set_loss(math.inf), (2, ["loss"])),
        (set_norm("vision", 0, 1 + 2e-5), (1, ["vision grad"])),
        (set_norm("vision", 1, math.nan), (2, ["vision grad"])),
        (set_leaf("adam_m/vision/a", 1, 1 + 1e-4), (1, ["vision grad"])),
        (set_leaf("adam_v/vision/b", 2, 1 + 4e-4), (2, ["vision moments"])),
        (set_leaf("adam_v/vision/b", 2, math.nan), (2, ["vision moments"])),
        (set_leaf("params/vision/a", 2, 1 + 1e-4), (2, ["vision update"])),
        (set_leaf("params/vision/a", 2, math.nan), (2, ["vision update"])),
        (set_leaf("params/llm/c", 1, 1 + 1e-6), (1, ["llm update"])),  # frozen
        (set_leaf("params/vision/a", 0, 1 + 1e-6), (0, ["vision parameters"])),
        (lambda run: run.leaves[2].pop("adam_v/vision/a"), (2, ["vision moments"])),
    ],
)
def test_what_differs_is_named(change: Callable[[Run], None], first: tuple[int, list[str]]) -> None:
    found = spoilt(change)
    assert not found.ok
    assert found.first_off() == first


def test_a_frozen_module_that_moves_is_infinitely_off() -> None:
    assert spoilt(set_leaf("params/llm/c", 1, 1 + 1e-6)).largest("update", "llm") == math.inf


def test_a_gradient_where_there_is_none() -> None:
    found = spoilt(lambda run: run.norms[0].update(llm=1e-12))
    assert found.largest("grad", "llm") == math.inf and not found.ok


def test_relative_norms() -> None:
    one, two = {"a": array([3, 4]), "b": array([0])}, {"a": array([3, 4]), "b": array([0.5])}
    assert relative(one, one) == 0 and relative(two, one) == pytest.approx(0.1)
    assert relative({"a": np.zeros(2)}, {"a": np.zeros(2)}) == 0
    assert relative({"a": np.ones(2)}, {"a": np.zeros(2)}) == math.inf
    assert (
        relative({"a": np.ones(2)}, {"b": np.ones(2)})
        == relative({"a": np.ones(2)}, {"a": np.ones((2, 1))})
        == math.inf
    )
    assert relative({"a": array([np.nan])}, {"a": array([1])}) == math.inf
    assert relative({"a": array([np.inf])}, {"a": array([np.inf])}) == math.inf
    assert relative_number(math.inf, math.inf) == relative_number(math.nan, math.nan) == math.inf
    assert relative_number(1.5, 1.0) == 0.5 and relative_number(0.0, 0.0) == 0
