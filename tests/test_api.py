"""The public names: each is there, documented, shown at work, and costs nothing until it is used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mmjax

REPOSITORY = Path(__file__).parents[1]
API = REPOSITORY / "docs" / "api.md"


@pytest.mark.parametrize("name", mmjax.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(mmjax, name)
    assert value.__name__ == name
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc and not doc.startswith(f"{name}("), "the docstring is missing, or dataclass made it up"
    if inspect.isclass(value):
        own = [member for key, member in vars(value).items() if inspect.isfunction(member) and not key.startswith("_")]
        assert all(member.__doc__ for member in own), [member.__name__ for member in own if not member.__doc__]


def test_the_page_names_exactly_the_public_names() -> None:
    headings = re.findall(r"^### `(\w+)`$", API.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(mmjax.__all__)
    for section in re.split(r"^### ", API.read_text(), flags=re.MULTILINE)[1:]:
        text, code = section.split("```python", 1)
        assert 1 <= len([line for line in text.splitlines()[1:] if line]) <= 3
        assert text.split("`")[1] in code or text.split("`")[1].endswith("Config"), f"no example: {text}"


def test_type_checkers_see_what_is_imported() -> None:
    """The imports under TYPE_CHECKING, `__all__` and the lazy table are one list."""
    tree = ast.parse(Path(mmjax.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    lazy = {name: home for home, names in mmjax._NAMES_OF.items() for name in names}
    assert imported == lazy
    assert sorted(lazy) == sorted(mmjax.__all__) and len(set(mmjax.__all__)) == len(mmjax.__all__)
    assert set(mmjax.__all__) <= set(dir(mmjax))


def test_importing_touches_nothing_until_a_name_is_used() -> None:
    program = (
        "import sys, mmjax\n"
        "heavy = {'jax', 'numpy', 'matplotlib', 'flax', 'grain', 'orbax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "dir(mmjax), mmjax.__version__\n"
        "assert not hasattr(mmjax, '__wrapped__') and not heavy & set(sys.modules)\n"
        "mmjax.simulate, mmjax.draw_timeline\n"
        "assert not {'jax', 'matplotlib'} & set(sys.modules)\n"
        "from mmjax import *\n"
        "from mmjax import jax_compat\n"
        "assert not jax_compat.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=REPOSITORY)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="module 'mmjax' has no attribute 'Layouts'; did you mean 'Layout'"):
        mmjax.Layouts  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'trainer'"):
        exec("from mmjax import trainer")


def test_a_configuration_changed_by_hand_is_checked_again() -> None:
    config = mmjax.load_config([REPOSITORY / "configs" / "digits_vlm.gin"])
    layouts = {**config.model.layouts, "llm": mmjax.Layout(tp=3)}
    with pytest.raises(mmjax.ConfigError, match=r"^llm/Layout\.tp=3: must divide llm/Decoder.heads \(4\); use 4"):
        mmjax.Trainer(replace(config, model=config.model.with_layouts(layouts)))


@pytest.mark.parametrize("part", ["before a run", pytest.param("all", marks=pytest.mark.slow)])
def test_the_examples_run(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order, as a reader would type them from the root of the repository."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    monkeypatch.chdir(tmp_path)
    page, scope = API.read_text(), {}
    until = page.index("## Runs") if part == "before a run" else len(page)
    for match in re.finditer(r"```python\n(.*?)```", page[:until], re.DOTALL):
        line = page[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], str(API), "exec"), scope)
    out = capsys.readouterr().out
    assert "did you mean 'tp'?" in out and "8 (2, 3)" in out
    assert scope["arrived"].sharding.device_set == set(scope["target"].mesh.devices.flat)
    made = {path.name for path in tmp_path.iterdir()}
    if part == "before a run":
        assert made == {"configs", "layout.png"}
        return
    assert made == {"configs", "layout.png", "timeline.png", "answers.png", "runs", "exported"}
    assert "parameters of step 4" in out
    assert (
        max(scope["timeline"].in_flight.values())
        == 3
        < mmjax.simulate(scope["other"], scope["costs"]).in_flight["llm.1"]
    )
