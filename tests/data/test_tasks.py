"""Tasks by name: what an entry says is there, and what it says is all that the rest asks for."""

from __future__ import annotations

from typing import Any

import pytest

from mmjax.configurable import ConfigError
from mmjax.data.config import DataConfig
from mmjax.data.loader import make_source
from mmjax.data.tasks import registry
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.data.tasks.registry import SOURCES, TASKS, Task
from mmjax.data.types import EncoderSpec

SPECS = {"vision": EncoderSpec(patch=4)}


def opened(data: DataConfig, *args: Any, **keywords: Any) -> dict[str, Any]:
    return keywords


def test_what_entries_name_is_there() -> None:
    for task in (*TASKS.values(), SOURCES):
        assert callable(registry._named(task.home))
        read = task.read_drawing()
        assert (read is None) == (not task.reader) and (read is None or callable(read))


def test_settings_are_those_of_the_task() -> None:
    digits, settings = TASKS["digits"], DigitsConfig(turns=2)
    assert digits.settings(settings) is settings and digits.settings(None) == digits.settings(SOURCES) == DigitsConfig()
    assert TASKS["folder"].settings(settings) is None
    assert DataConfig().origin is digits and DataConfig(sources={"mine": 1.0}).origin is SOURCES


def test_an_entry_is_all_that_a_task_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "words", Task(home=f"{__name__}:opened", media=("image",), unit="word"))  # type: ignore[arg-type]
    samples: Any = make_source(DataConfig(task="words"), SPECS, seed=0, split="test")
    assert samples["split"] == "test" and samples["settings"] is None
    with pytest.raises(ConfigError, match=r"Data\.image_encoder='ear'.*'vision'"):
        make_source(DataConfig(task="words", image_encoder="ear"), SPECS, seed=0, split="test")
    with pytest.raises(ConfigError, match=r"Data\.task='word': did you mean 'words'\? legal: 'digits', 'folder', "):
        DataConfig(task="word")
