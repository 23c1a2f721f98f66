"""The registry, presets, near-miss names and the shared checks."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax import configurable as module
from mmjax.configurable import (
    ConfigError,
    configurable,
    divides,
    from_preset,
    gin_name,
    near_misses,
    nearest_divisor,
    not_negative,
    one_of,
    positive,
    preset_values,
    registry,
    require,
    suggest,
)


@pytest.fixture(autouse=True)
def _clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))
    yield


def _engine() -> Any:
    @configurable("Engine")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Engine:
        presets: ClassVar[dict[str, dict[str, object]]] = {"small": {"size": 2, "speed": 3.0}, "large": {"size": 40}}

        preset: str = ""
        size: int = 1
        speed: float = 1.0

        def __post_init__(self) -> None:
            positive("Engine.size", self.size)

    return Engine


def test_registers_the_class_unchanged() -> None:
    engine = _engine()
    assert registry()["Engine"] is engine
    assert gin_name(engine) == "Engine"
    assert engine(size=3) == engine(size=3) != engine(size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine().size = 2


def test_registry_is_read_only() -> None:
    with pytest.raises(TypeError):
        registry()["Other"] = int  # pyright: ignore[reportIndexIssue]


def test_running_a_notebook_cell_again_replaces_the_class() -> None:
    first, second = _engine(), _engine()
    assert first is not second
    assert registry()["Engine"] is second


def test_another_class_with_the_name_is_refused() -> None:
    _engine()
    with pytest.raises(ValueError, match=r"configurable 'Engine' is .*Engine; choose another name"):

        @configurable("Engine")
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Motor:
            size: int = 1


def test_only_frozen_keyword_only_dataclasses() -> None:
    with pytest.raises(TypeError, match=r"frozen=True, kw_only=True"):
        configurable("A")(dataclasses.make_dataclass("A", [("x", int, 1)], kw_only=True))
    with pytest.raises(TypeError, match=r"frozen=True, kw_only=True"):
        configurable("A")(dataclasses.make_dataclass("A", [("x", int, 1)], frozen=True))
    with pytest.raises(TypeError, match="goes above"):
        configurable("A")(int)
    assert "A" not in registry()


def test_name_of_a_class_that_is_not_registered() -> None:
    with pytest.raises(KeyError, match="int is not a configurable"):
        gin_name(int)


def test_presets_are_defaults() -> None:
    engine = _engine()
    assert from_preset(engine, "small") == engine(preset="small", size=2, speed=3.0)
    assert from_preset(engine, "small", size=7) == engine(preset="small", size=7, speed=3.0)
    assert from_preset(engine, "") == engine()
    assert preset_values(engine, "large") == {"preset": "large", "size": 40}
    with pytest.raises(ConfigError) as error:
        from_preset(engine, "smal")
    assert str(error.value) == "Engine.preset='smal': did you mean 'small'? legal: 'small', 'large'"
    with pytest.raises(ConfigError, match=r"^Engine\.size=0: "):
        from_preset(engine, "small", size=0)


def test_near_misses() -> None:
    options = ["learning_rate", "final_learning_rate", "warmup", "Layout"]
    assert near_misses("learningrate", options)[0] == "learning_rate"
    assert near_misses("LAYOUT", options) == ["Layout"]
    assert near_misses("zzz", options) == []
    assert suggest("warmpu", options) == "did you mean 'warmup'?"
    assert suggest("zzz", ["a", "b"]) == "use 'a' or 'b'"
    assert suggest("zzz", options).startswith("use one of 'learning_rate', ")
    assert suggest("zzz", []) == "there is none to choose from"


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: require(False, "A.b", "x", "set it to 'y'"), "A.b='x': set it to 'y'"),
        (lambda: one_of("A.b", "cosin", ("cosine", "x")), "A.b='cosin': did you mean 'cosine'? legal: 'cosine', 'x'"),
        (lambda: one_of("A.b", "z", ("cosine",)), "A.b='z': legal: 'cosine'"),
        (
            lambda: one_of("A.b", "Fast", ("slow", "quick", "last"), meant={"fast": "quick"}),
            "A.b='Fast': did you mean 'quick'? legal: 'slow', 'quick', 'last'",
        ),
        (lambda: positive("A.b", 0), "A.b=0: must be above 0, such as 1"),
        (lambda: positive("A.b", float("nan")), "A.b=nan: must be above 0, such as 1"),
        (lambda: not_negative("A.b", -0.5), "A.b=-0.5: must be 0 or more, such as 0"),
        (lambda: not_negative("A.b", float("inf")), "A.b=inf: must be 0 or more, such as 0"),
        (lambda: divides("A.b", 3, 8, "C.d"), "A.b=3: must divide C.d (8), such as 4"),
        (lambda: divides("A.b", 0, 8, "C.d"), "A.b=0: must divide C.d (8), such as 1"),
    ],
)
def test_messages(check: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check()
    assert str(error.value) == message


def test_legal_values_pass() -> None:
    """Values at the very edge of what is legal are built as they were given; one beside each is refused."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Edges:
        any: int = 1
        name: str = "x"
        above: float = 1e-9
        least: float = 0.0
        part: int = 8

        def __post_init__(self) -> None:
            require(self.any == 1, "E.any", self.any, "set it to 1")
            one_of("E.name", self.name, ("w", "x"))
            positive("E.above", self.above)
            not_negative("E.least", self.least)
            divides("E.part", self.part, 8, "C.d")

    assert dataclasses.astuple(Edges()) == (1, "x", 1e-9, 0.0, 8)
    assert dataclasses.astuple(Edges(name="w", above=1e300, part=1)) == (1, "w", 1e300, 0.0, 1)
    wrong: dict[str, Any] = {"any": 2, "name": "", "above": 0.0, "least": -1e-9, "part": 16}
    for field, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"^E\.{field}={value!r}: "):
            Edges(**{field: value})


@given(st.integers(1, 300), st.integers(-5, 400))
def test_nearest_divisor(whole: int, value: int) -> None:
    found = nearest_divisor(value, whole)
    assert whole % found == 0
    assert all(abs(d - value) >= abs(found - value) for d in range(1, whole + 1) if whole % d == 0)


def test_imports_neither_jax_nor_gin() -> None:
    code = "import sys, mmjax.configurable; print(*sorted({'jax', 'numpy', 'gin'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
