"""gin text to `Recipe`: what loads, what is refused and in which words, and the operative config's round trip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.config import (
    changed_values,
    config_of_values,
    config_that_fits,
    default_run_dir,
    differences,
    gin_reader,
    load_config,
    load_run_config,
    operative_config,
    require_devices,
    scopes_of,
)
from mmjax.config.types import Mismatch, convert, describe
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.config import DataConfig
from mmjax.data.tasks.digits.config import DigitsConfig
from mmjax.fields import example, fields_of
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import ModelConfig
from mmjax.recipe import Recipe, advise, validate

CONFIGS = Path(__file__).parents[2] / "configs"
# LLM on ranks 0-3, vision on ranks 4-7.
DISJOINT = ("llm/Layout.tp=2", "llm/Layout.pp=2", "vision/Layout.dp=4", "vision/Layout.rank_offset=4")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(files: list[Path], bindings: list[str]) -> str:
    """The message with which a configuration is refused: one line."""
    with pytest.raises(ConfigError) as error:
        load_config(files, bindings)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- what loads


def test_defaults_are_legal() -> None:
    config = load_config([])
    assert config.model.layouts == {"vision": Layout(), "llm": Layout()}
    assert set(config.model.optimizers) == {"vision", "vision_projector", "llm"}
    assert config.devices == 1


def test_scoped_and_unscoped_bindings(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "a.gin",
        "vision/Optimizer.learning_rate = 0.5\nOptimizer.learning_rate = 0.25\nOptimizer.weight_decay = 0.125\n"
        "Decoder.layers = 3\nllm/Layout.tp = 2\nLayout.rank_offset = 2\nllm/Layout.rank_offset = 0\n",
    )
    config = load_config([file])
    rates = {name: optimizer.learning_rate for name, optimizer in config.model.optimizers.items()}
    assert rates == {"vision": 0.5, "vision_projector": 0.25, "llm": 0.25}
    assert {optimizer.weight_decay for optimizer in config.model.optimizers.values()} == {0.125}
    assert config.model["llm"].settings.layers == 3
    assert config.model.layouts == {"vision": Layout(rank_offset=2), "llm": Layout(tp=2)}


def test_later_bindings_win(tmp_path: Path) -> None:
    first = write(tmp_path, "first.gin", "Train.steps = 1\nTrain.seed = 1\nTrain.steps = 2\n")
    second = write(tmp_path, "second.gin", "Train.seed = 3\n")
    train = load_config([first, second], ["Train.steps=4", "Train.steps=5"]).train
    assert (train.steps, train.seed) == (5, 3)
    assert load_config([second, first]).train.seed == 1


def test_includes_macros_and_blocks(tmp_path: Path) -> None:
    write(tmp_path, "parts/base.gin", "STEPS = 7\nTrain.steps = %STEPS\ninclude 'layout.gin'\n")
    layout = "llm/Layout:\n  tp = %DEGREE\n  pp = 2\nvision/Layout.rank_offset = 4\nDEGREE = 1\n"
    write(tmp_path, "parts/layout.gin", layout)
    main = write(tmp_path, "main.gin", "include 'parts/base.gin'\nDEGREE = 2  # replaces the included value\n")
    config = load_config([main])
    assert config.train.steps == 7
    assert config.model["llm"].layout == Layout(tp=2, pp=2)
    assert load_config([main], ["STEPS=9"]).train.steps == 9


def test_macros_inside_containers(tmp_path: Path) -> None:
    file = write(tmp_path, "a.gin", "WIDE = 32\nPAIR = (2, %WIDE)\nvision/Packing.buckets = [(1, %WIDE), %PAIR]\n")
    assert load_config([file]).model["vision"].packing.buckets == ((1, 32), (2, 32))


def test_includes_look_in_the_working_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "configs/base.gin", "Train.steps = 7\n")
    main = write(tmp_path, "elsewhere/main.gin", "include 'configs/base.gin'\n")
    monkeypatch.chdir(tmp_path)
    assert load_config([main]).train.steps == 7


def test_text_on_the_command_line_needs_no_quotes() -> None:
    config = load_config([], ["Train.schedule=gpipe", "Train.dtype='bfloat16'", "Data.tokenizer=2024", "Data.folder="])
    assert (config.train.schedule, config.train.dtype) == ("gpipe", "bfloat16")
    assert (config.data.settings.tokenizer, config.data.settings.folder) == ("2024", "")


def test_an_integer_is_a_number_and_a_list_a_tuple() -> None:
    config = load_config([], ["Train.clip_norm=2", "Digits.scale=[1, 2]"])
    assert (config.train.clip_norm, type(config.train.clip_norm)) == (2.0, float)
    assert config.data.task.scale == (1.0, 2.0)


def test_presets_are_defaults_that_any_binding_overrides() -> None:
    llm = load_config([], ["llm/Decoder.layers=5", "llm/Decoder.preset=llama3-8b"]).model["llm"].settings
    assert (llm.layers, llm.width, llm.kv_heads, llm.rope_theta) == (5, 4096, 8, 500000.0)
    both = ["Model.encoders={'left': 'vit', 'right': 'vit'}", "Data.image_encoder=left"]
    encoders = load_config([], [*both, "ViT.preset=vit-h14", "right/ViT.preset=tiny"]).model
    assert (encoders["left"].settings.width, encoders["right"].settings.width) == (1280, 64)


def test_several_encoders_have_scopes_of_their_own() -> None:
    names = ["Model.encoders={'image': 'vit', 'depth': 'vit'}", "Data.image_encoder=image"]
    config = load_config([], [*names, "depth/ViT.channels=3", "depth_projector/Optimizer.frozen=True", "ViT.patch=2"])
    media = {name: config.model[name].settings for name in config.model.encoders}
    assert {name: (c.channels, c.patch) for name, c in media.items()} == {"image": (1, 2), "depth": (3, 2)}
    frozen = {name: optimizer.frozen for name, optimizer in config.model.optimizers.items()}
    assert [name for name, is_frozen in frozen.items() if is_frozen] == ["depth_projector"]
    assert set(config.model.layouts) == {"image", "depth", "llm"}


def test_names_of_earlier_versions_give_an_equal_configuration(tmp_path: Path) -> None:
    want = load_config([], ["Digits.images=(1, 3)", "Digits.read=0.5", "Digits.curriculum=((0, 1),)"])
    old = write(tmp_path, "old.gin", "MOST = 3\nData.images = (1, %MOST)\nData:\n  read = 0.5\n")
    assert load_config([old], ["Data.curriculum=((0, 1),)"]) == want == config_of_values(changed_values(want))
    assert config_of_values({"Data.images": [1, 3], "Data.read": 0.5, "Data.curriculum": [[0, 1]]}) == want
    later = ["Digits.images=(1, 1)", "Data.images=(2, 2)"]
    assert load_config([old], later).data.task.images == (2, 2) and load_config([old], later[:1]).data.task.images == (
        1,
        1,
    )
    assert refusal([old], ["Data.digits=(0, 7)"]).startswith("Digits.digits=(0, 7): must ascend within 1 to 6")
    # A run directory's: every setting by its old name, also where no task needs them.
    sources = load_config([], ["Data.sources={'mine': 1.0}", "mine/Source.path=mine.json"])
    for config in (want, sources):
        write(tmp_path, "run/config.gin", text := old_text(config))
        assert "Digits" not in text and "\nData.level" in text and load_run_config(tmp_path / "run") == config
        assert differences(text, operative_config(config)) == {}
    other = operative_config(dataclasses.replace(want, task=dataclasses.replace(want.data.task, read=1.0)))
    assert differences(old_text(want), other) == {"Digits.read": ("0.5", "1.0")}
    newer = operative_config(want).replace("Model.edges = ()\n", "")
    assert differences(newer, operative_config(want)) == {}  # a setting that is newer than a run had its default
    assert differences(newer, operative_config(want).replace("edges = ()", "edges = ('a -> b',)")) == {
        "Model.edges": ("?", "('a -> b',)")
    }


def old_text(recipe: Recipe) -> str:
    """The operative config as earlier versions wrote it."""
    text = operative_config(dataclasses.replace(recipe, data=recipe.data.with_settings(sources={})))
    data = f"Data.sources = {recipe.data.settings.sources!r}\n"
    for newer in ("Digits.drawn_scale = 1\n", "Digits.say = 0.0\n"):  # than task settings
        text = text.replace(newer, "")
    return text.replace("Digits.", "Data.").replace("Data.sources = {}\n", data)


def test_a_tasks_settings_are_there_where_its_samples_are(tmp_path: Path) -> None:
    config = load_config([], ["Digits.images=(1, 1)"])
    assert config.data.task == DigitsConfig(images=(1, 1)) and "\nDigits.images = (1, 1)\n" in operative_config(config)
    folder = ["Digits.images=(1, 1)", "Data.task=folder", f"Data.folder={tmp_path}"]
    assert load_config([], folder).data.task is None and "Digits" not in operative_config(load_config([], folder))


def test_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    file = write(tmp_path, "a.gin", "STEPS = 3\nTrain.steps = %STEPS\nTrain.seed = 8\n")
    once = load_config([file], ["llm/Layout.tp=2", "vision/Layout.tp=2"])
    assert load_config([]) == load_config([])
    assert load_config([]).train.seed == 0
    assert load_config([file], ["llm/Layout.tp=2", "vision/Layout.tp=2"]) == once
    refusal([file], ["Train.seed=-1"])
    assert load_config([file]).train.seed == 8


# ---- what is refused: binding, then what the message must say (field and value; the fix)

WRONG = [
    # names
    ("Train.stepz=3", "Train.stepz=3: Train has no field 'stepz'", "did you mean 'steps'?"),
    ("Trian.steps=3", "Trian.steps=3: no configurable 'Trian'", "did you mean 'Train'?"),
    ("layout.tp=2", "layout.tp=2: no configurable 'layout'", "did you mean 'Layout'?"),
    ("visoin/Layout.tp=2", "visoin/Layout.tp=2: Layout has no scope 'visoin'", "did you mean 'vision'?"),
    ("vision_projector/Layout.tp=2", "Layout has no scope 'vision_projector'", "use 'vision' or 'llm'"),
    ("vision/Decoder.layers=2", "vision/Decoder.layers=2: Decoder has no scope 'vision'", "use 'llm'"),
    ("vision_project/Optimizer.b1=0.5", "Optimizer has no scope 'vision_project'", "did you mean 'vision_projector'?"),
    ("llm/Train.steps=3", "llm/Train.steps=3: Train has no scope 'llm'", "write Train.steps"),
    ("a/vision/Layout.tp=2", "a/vision/Layout.tp=2: Layout has no scope 'a/vision'", "did you mean 'vision'?"),
    ("llm/Decoder.preset=llama3_8b", "llm/Decoder.preset='llama3_8b'", "did you mean 'llama3-8b'?"),
    ("Model.encoders={'vision': 'vti'}", "Model.encoders['vision']='vti'", "vit"),
    ("Model.encoders={'llm': 'vit'}", "Model.encoders='llm'", "such as 'vision'"),
    ("Data.imges=(1, 1)", "Data.imges=(1, 1): Data has no field 'imges'", "did you mean 'Digits.images'?"),
    ("Digits.imges=(1, 1)", "Digits.imges=(1, 1): Digits has no field 'imges'", "did you mean 'images'?"),
    ("vision/Digits.images=(1, 1)", "Digits has no scope 'vision'", "write Digits.images"),
    ("Data.task=digts", "Data.task='digts'", "legal: 'digits', 'folder'"),
    ("Data.image_encoder=visoin", "Data.image_encoder='visoin'", "did you mean 'vision'?"),
    ("Train.schedule=1f1", "Train.schedule='1f1'", "did you mean '1f1b'?"),
    ("Train.schedule=zero", "Train.schedule='zero'", "legal: '1f1b', 'gpipe'"),
    ("Train.dtype=bf16", "Train.dtype='bf16'", "did you mean 'bfloat16'?"),
    ("Train.dtype=fp32", "Train.dtype='fp32'", "'float32'"),
    ("Train.sinks=('wandbb',)", "Train.sinks='wandbb'", "did you mean 'wandb'?"),
    ("vision/ViT.attention=cudn", "ViT.attention='cudn'", "did you mean 'cudnn'?"),
    ("vision/ViT.attention='cudnn'", "vision/ViT.attention='cudnn'", "use 'bfloat16' there, or 'auto'"),
    # types
    ("Train.steps=1.5", "Train.steps=1.5: must be an integer", "such as 1000"),
    ("Train.steps=1e3", "Train.steps=1000.0: must be an integer", "such as 1000"),
    ("Train.steps=True", "Train.steps=True: must be an integer", "such as 1000"),
    ("Train.steps='7'", "Train.steps='7': must be an integer", "such as 1000"),
    ("Train.steps=many", "Train.steps=many: must be an integer", "such as 1000"),
    ("Train.steps=None", "Train.steps=None: must be an integer", "such as 1000"),
    ("Train.clip_norm=False", "Train.clip_norm=False: must be a number", "such as 1.0"),
    ("llm/Optimizer.frozen=1", "llm/Optimizer.frozen=1: must be True or False", "such as False"),
    ("llm/Optimizer.frozen=true", "llm/Optimizer.frozen=true: must be True or False", "such as False"),
    ("Train.sinks=wandb", "Train.sinks=wandb: must be a tuple", "such as ('wandb',)"),
    ("Digits.images=(1, 2, 3)", "Digits.images=(1, 2, 3): must be a tuple of (an integer, an integer)", "as (2, 2)"),
    ("vision/Packing.buckets=(1, 2)", "vision/Packing.buckets=(1, 2): must be a tuple", "such as 2"),
    ("Model.encoders='vit'", "Model.encoders='vit': must be a dict", "such as {'vision': 'vit'}"),
    ("Train.profile_steps=3", "Train.profile_steps=3: must be a tuple", "such as (10, 12)"),
    ("Train.profile_steps=('a', 'b')", "Train.profile_steps=('a', 'b'): must be a tuple", "such as (10, 12)"),
    ("Train.debug_nans=1", "Train.debug_nans=1: must be True or False", "such as False"),
    ("Train.deterministic=yes", "Train.deterministic=yes: must be True or False", "such as False"),
    # ranges
    ("Train.profile_steps=(3,)", "Train.profile_steps=(3,): must be () or a pair", "such as (10, 12)"),
    ("Train.profile_steps=(0, 2)", "Train.profile_steps=(0, 2): must be", "such as (1, 3)"),
    ("Train.profile_steps=(3, 2)", "Train.profile_steps=(3, 2): must be", "such as (1, 3)"),
    ("Train.profile_steps=(1, 1001)", "Train.profile_steps=(1, 1001): must be", "1 to Train.steps (1000)"),
    ("Train.steps=0", "Train.steps=0: must be above 0", "such as 1"),
    ("Train.microbatches=-1", "Train.microbatches=-1: must be above 0", "such as 1"),
    ("Train.seed=-1", "Train.seed=-1: must be 0 or more", "such as 0"),
    ("Train.seed=4294967296", "Train.seed=4294967296: must be below 2**32", "such as 0"),
    ("Train.clip_norm=-0.5", "Train.clip_norm=-0.5: must be 0 or more", "such as 0"),
    ("Checkpoint.keep=0", "Checkpoint.keep=0", "such as 1"),
    ("World.devices=-1", "World.devices=-1", "set it to 0"),
    ("vision/Layout.tp=0", "vision/Layout.tp=0: must be at least 1", "set it to 1"),
    ("llm/Layout.rank_offset=-1", "llm/Layout.rank_offset=-1: must be at least 0", "set it to 0"),
    ("Layout.dp=0", "llm/Layout.dp=0: must be at least 1", "set it to 1"),
    ("llm/Decoder.layers=0", "llm/Decoder.layers=0: must be above 0", "such as 1"),
    # between dataclasses
    ("Train.microbatches=3", "Train.microbatches=3: must divide Train.global_batch (32)", "such as 4"),
    ("llm/Layout.tp=3", "llm/Layout.tp=3: must divide llm/Decoder.heads (4)", "use 2"),
    ("vision/Layout.tp=8", "vision/Layout.tp=8: must divide vision/ViT.heads (4)", "use 4"),
    ("llm/Layout.pp=5", "llm/Layout.pp=5: a stage needs a layer and there are 4", "use 4"),
    ("vision/Layout.pp=3", "vision/Layout.pp=3: a stage needs a layer and there are 2", "use 2"),
    ("vision/Layout.chunks=2", "vision/Layout.chunks=2: chunks interleave the stages of several", "set it to 1"),
    ("llm/Layout.cp_way='rings'", "llm/Layout.cp_way='rings': did you mean 'ring'?", "'gather', 'need', 'ring'"),
    ("llm/Layout.cp_tokens='exact'", "llm/Layout.cp_tokens='exact': legal", "'lpt', 'segments', 'zigzag'"),
    ("vision/Layout.ep=2", "vision/Layout.ep=2: the module has no experts", "set it to 1"),
    ("Optimizer.frozen=True", "llm/Optimizer.frozen=True: every module is frozen", "set it to False"),
    ("vision/Optimizer.warmup=1000", "vision/Optimizer.warmup=1000: must be below Train.steps (1000)", "such as 100"),
    ("Optimizer.warmup=2000", "vision/Optimizer.warmup=2000: must be below Train.steps (1000)", "such as 100"),
    ("World.devices=4", "World.devices=4: the layouts need 8 devices, not 4", "--gin.World.devices=8"),
    ("vision/Layout.rank_offset=2", "rank_offset=2: its ranks 2-5 and llm's ranks 0-3 share ranks 2-3", "use 0"),
]


@pytest.mark.parametrize(("binding", "field_and_value", "fix"), WRONG, ids=[binding for binding, _, _ in WRONG])
def test_refused(binding: str, field_and_value: str, fix: str) -> None:
    message = refusal([], [*DISJOINT, binding])
    assert field_and_value in message
    assert fix in message
    assert message.endswith(f"(--gin.{binding})")


def test_the_message_says_where_the_value_was_set(tmp_path: Path) -> None:
    file = write(tmp_path, "a.gin", "# a comment\n\nvision/Layout:\n  dp = 2\n  tp = 3\n")
    assert refusal([file], []) == f"vision/Layout.tp=3: must divide vision/ViT.heads (4); use 4 ({file}:5)"
    # What is wrong may be bound without a scope.
    file = write(tmp_path, "b.gin", "Layout.tp = 'two'\n")
    assert refusal([file], []) == f"Layout.tp='two': must be an integer, such as 1 ({file}:1)"


SYNTAX = [
    ("Train.schedule = gpipe", 1, "put the text in quotes, 'gpipe'"),
    ("Train.steps = 1\nTrain steps = 1", 2, "a line is such as vision/Layout.tp = 2"),
    ("Train.steps = 1 2", 1, "Expected newline"),
    ("Train.steps =", 1, "Unable to parse value"),
    ("Train.steps = @other()", 1, "@other is not supported; write a literal"),
    ("Digits.images = (1,\n", 1, "is a bracket or quote open?"),
    ("Train:\nsteps = 1", 2, "Expected indentation"),
    ("\nimport os", 2, "import os: a config imports nothing; delete the line"),
    ("include 3", 1, "Expected file path as string"),
]


@pytest.mark.parametrize(("text", "line", "fix"), SYNTAX, ids=[text for text, _, _ in SYNTAX])
def test_text_that_is_no_gin(text: str, line: int, fix: str, tmp_path: Path) -> None:
    file = write(tmp_path, "a.gin", text)
    message = refusal([file], [])
    assert message.startswith(f"{file}:{line}: ")
    assert fix in message


@pytest.mark.parametrize("line", ["Train.steps", "=3", "Train steps=3", "Train.steps=3\nTrain.seed=1"])
def test_bindings_that_are_none(line: str) -> None:
    assert refusal([], [line]).startswith("--gin.")


def test_a_macro_on_the_command_line_that_nothing_uses(tmp_path: Path) -> None:
    """Most likely a field whose class was forgotten."""
    file = write(tmp_path, "a.gin", "UNUSED = 3\nSTEPS = 4\nTrain.steps = %STEPS\n")
    assert load_config([file]).train.steps == 4
    message = refusal([file], ["steps=9"])
    assert message == "--gin.steps=9: no value is %steps; write 'STEPS', or a field with its class, such as Train.steps"


def test_a_flag_that_changes_nothing(tmp_path: Path) -> None:
    """A value without a scope is a default, and a file that sets every scope would silently win."""
    file = write(tmp_path, "a.gin", "vision/ViT.width = 32\nllm/Optimizer.b1 = 0.5\nOptimizer.learning_rate = 0.5\n")
    message = refusal([file], ["ViT.width=64"])
    fix = "write --gin.vision/ViT.width=64"
    assert message == f"--gin.ViT.width=64 changes nothing: vision/ViT.width is set ({file}:1); {fix}"
    config = load_config([file], ["Optimizer.b1=0.75", "Optimizer.learning_rate=0.25"])  # these do
    assert (config.model.optimizers["vision"].b1, config.model.optimizers["llm"].b1) == (0.75, 0.5)
    assert config.model.optimizers["llm"].learning_rate == 0.25


def test_the_config_of_a_run(tmp_path: Path) -> None:
    run, other = (
        tmp_path / "run",
        write(tmp_path, "other.gin", "llm/Layout.tp = 2\nvision/Layout.dp = 2\nTrain.seed = 7\n"),
    )
    config = load_config([], [*DISJOINT, "Train.seed=3", "World.devices=8"])
    write(run, "config.gin", operative_config(config))
    assert load_run_config(run) == config
    placed = load_run_config(run, [other], ["Train.steps=5"])
    assert placed.model.layouts == {"vision": Layout(dp=2), "llm": Layout(tp=2)}  # the file's, and none of the run's
    assert (placed.train.seed, placed.train.steps, placed.world.devices) == (3, 5, 0)
    with pytest.raises(ConfigError) as error:
        load_run_config(tmp_path / "rum")
    assert str(error.value).endswith(f"/rum' is no directory: name the directory of a run, such as '{run}'")


def test_a_nested_run_can_be_placed_anywhere(tmp_path: Path) -> None:
    run, lanes = tmp_path / "run", ["vision/Layout.lanes=2", "llm/Layout.pp=2"]
    nested = load_config([], [*lanes, "Train.schedule=nested", "Train.inner=zb-h1", "Train.microbatches=2"])
    write(run, "config.gin", operative_config(nested))
    assert load_run_config(run) == nested
    assert load_run_config(run, [write(tmp_path, "one.gin", "llm/Layout.tp = 1\n")]).devices == 1
    spread = write(tmp_path, "spread.gin", "llm/Layout.pp = 3\nvision/Layout.lanes = 3\n")
    assert load_run_config(run, [spread]).model["vision"].layout.lanes == 3
    whole = write(tmp_path, "whole.gin", "llm/Layout.pp = 2\nvision/Layout.lanes = 2\nTrain.schedule = 'nested'\n")
    assert load_run_config(run, [whole]).train.inner == "1f1b"


def test_code_that_a_file_names_needs_a_permission_that_no_file_gives(tmp_path: Path) -> None:
    text = "Data.sources = {'own': 1.0}\nown/Source.kind = 'none.such:Reader'\n"
    file = write(tmp_path, "own.gin", text)
    with pytest.raises(ConfigError, match=r"^own/Source\.kind='none\.such:Reader': names code .* --allow_code .*:2\)$"):
        load_config([file])
    config = load_config([file], allow_code=True)  # reading it imports nothing
    assert config.data.sources["own"].kind == "none.such:Reader" and config.allow_code
    run = write(tmp_path, "run/config.gin", operative_config(config)).parent
    with pytest.raises(ConfigError, match=r"^own/Source\.kind='none\.such:Reader': names code"):
        load_run_config(run)
    assert load_run_config(run, allow_code=True) == config
    assert load_run_config(run, [], ["own/Source.kind=parquet"]).data.sources["own"].kind == "parquet"
    with pytest.raises(ConfigError, match=r"^own/Source\.kind='none\.such:Reader': names code"):
        validate(dataclasses.replace(config, allow_code=False))


def test_missing_files(tmp_path: Path) -> None:
    write(tmp_path, "digits.gin", "")
    wrong = tmp_path / "digit.gin"
    assert refusal([wrong], []) == f"--gin_file={wrong}: no such file; did you mean '{tmp_path / 'digits.gin'}'?"
    nowhere = tmp_path / "none" / "a.gin"
    assert refusal([nowhere], []).startswith(f"--gin_file={nowhere}: no such file; there is no gin file in ")
    assert "that is a directory" in refusal([tmp_path], [])
    main = write(tmp_path, "main.gin", "Train.steps = 1\ninclude 'digit.gin'\n")
    expected = f"{main}:2: include 'digit.gin': no such file; did you mean '{tmp_path / 'digits.gin'}'?"
    assert refusal([main], []) == expected


def test_binary_file(tmp_path: Path) -> None:
    file = tmp_path / "a.gin"
    file.write_bytes(b"\xff\xfe\x00")
    assert refusal([file], []).startswith(f"--gin_file={file}: cannot be read as text")


def test_a_file_that_includes_itself(tmp_path: Path) -> None:
    write(tmp_path, "a.gin", "include 'b.gin'\n")
    b = write(tmp_path, "b.gin", "include 'a.gin'\n")
    message = refusal([tmp_path / "a.gin"], [])
    assert message == f"{b}:1: include 'a.gin': the file includes itself; remove one of the includes"
    # Twice beside each other is no circle.
    twice = write(tmp_path, "twice.gin", "include 'c.gin'\ninclude 'c.gin'\n")
    write(tmp_path, "c.gin", "Train.steps = 2\n")
    assert load_config([twice]).train.steps == 2


def test_macros_without_a_value(tmp_path: Path) -> None:
    file = write(tmp_path, "a.gin", "STEPS = 3\nTrain.steps = %STEP\n")
    expected = f"Train.steps=%STEP: macro 'STEP' has no value; did you mean 'STEPS'? ({file}:2)"
    assert refusal([file], []) == expected
    file = write(tmp_path, "b.gin", "Digits.images = (1, %MOST)\n")
    assert "macro 'MOST' has no value; define it with a line such as MOST = 1" in refusal([file], [])
    file = write(tmp_path, "c.gin", "A = %B\nB = (%A,)\nTrain.steps = %A\n")
    assert "is made of itself" in refusal([file], [])


def test_a_projector_name_is_taken() -> None:
    message = refusal([], ["Model.encoders={'vision': 'vit', 'vision_projector': 'vit'}"])
    assert message.startswith("Model.encoders='vision_projector': is the name of vision's projector; use another")


def test_no_encoder_for_the_images() -> None:
    message = "Data.image_encoder='vision': no encoder of the model takes images; add one to Model.encoders"
    assert refusal([], ["Model.encoders={}"]) == message


def test_ranks_that_share_key_and_value_heads() -> None:
    given = ["llm/Layout.tp=4", "llm/Layout.pp=1", "vision/Layout.dp=4"]
    assert load_config([], given).model["llm"].layout.tp == 4  # twice as many as there are such heads
    message = refusal([], [*given, "Decoder.width=48", "Decoder.heads=12", "Decoder.kv_heads=6"])
    assert message.startswith("llm/Layout.tp=4: must divide llm/Decoder.kv_heads (6); use 3")


def test_rings_of_ranks_that_share_tokens() -> None:
    message = refusal([], ["llm/Layout.overlap=True", "llm/Layout.sp=False"])
    assert message.startswith("llm/Layout.overlap=True: ranks that share no tokens exchange none; set it to False")
    message = refusal([], ["Train.lowering=single", "llm/Layout.overlap=True"])
    assert message.startswith("llm/Layout.overlap=True: Train.lowering='single' has no rings; set it to False")
    for way in ("need", "ring"):
        changes = ["Train.lowering=single", "llm/Layout.cp=2", f"llm/Layout.cp_way={way}", "vision/Layout.cp=2"]
        start = f"llm/Layout.cp_way={way!r}: under Train.lowering='single' ranks cannot send to one another"
        assert refusal([], changes).startswith(start)


def test_projector_width_and_tp() -> None:
    message = refusal([], ["vision/Layout.tp=4", "vision/Projector.hidden=6"])
    assert message.startswith("vision/Layout.tp=4: must divide vision/Projector.hidden (6); use 2")
    message = refusal([], ["vision/Layout.tp=4", "Decoder.width=66", "Decoder.heads=1", "Decoder.kv_heads=1"])
    assert message.startswith("vision/Layout.tp=4: must divide llm/Decoder.width (66); use 2")


def test_standard_deviations_are_those_of_a_projectors_layers() -> None:
    message = refusal([], ["vision/Projector.stds=(0.02,)"])
    fix = "must be a number above 0 for each of its layers, such as (0.02, 0.014), or ()"
    assert message.startswith(f"vision/Projector.stds=(0.02,): {fix}")
    message = refusal([], ["vision/Projector.kind='linear'", "vision/Projector.stds=(0.0,)"])
    assert "must be a number above 0 for each of its layers, such as (0.02,), or ()" in message
    config = load_config([], ["vision/Projector.stds=(0.02, 0.01)"])
    assert config.model["vision"].projector is not None
    assert config.model["vision"].projector.settings.stds == (0.02, 0.01)


# ---- which ranks may be shared


def layouts(vision: Layout, llm: Layout) -> list[str]:
    return [
        f"{module}/Layout.{field.name}={getattr(layout, field.name)}"
        for module, layout in (("vision", vision), ("llm", llm))
        for field in dataclasses.fields(layout)
    ]


@pytest.mark.parametrize(
    ("vision", "llm"),
    [
        (Layout(dp=8), Layout(tp=2, dp=4)),  # equal
        (Layout(dp=4, rank_offset=4), Layout(tp=2, pp=2)),  # disjoint
        (Layout(dp=4), Layout(tp=2, dp=2, pp=2)),  # the first stage
        (Layout(dp=2, rank_offset=2), Layout(tp=2, pp=2)),  # the last stage
        (Layout(dp=8), Layout(tp=2, dp=2, pp=3)),  # the first two stages
        (Layout(dp=4, pp=2), Layout(tp=2, dp=2)),  # the LLM is the encoder's first stage
    ],
)
def test_rank_sets_that_are_legal(vision: Layout, llm: Layout) -> None:
    config = load_config([], layouts(vision, llm))
    assert config.model.layouts == {"vision": vision, "llm": llm}


@pytest.mark.parametrize(
    ("vision", "llm", "shared", "use"),
    [
        (Layout(dp=4, rank_offset=2), Layout(tp=2, pp=2), "ranks 2-3", 0),
        (Layout(dp=3), Layout(tp=2, pp=2), "ranks 0-2", 4),  # one stage and a half
        (Layout(dp=2, rank_offset=1), Layout(tp=2, pp=2), "ranks 1-2", 2),  # two half stages: both neighbours are legal
        (Layout(), Layout(tp=2), "rank 0", 2),
        (Layout(dp=8), Layout(tp=2, dp=2, rank_offset=6), "ranks 6-7", 10),
    ],
)
def test_rank_sets_that_are_refused(vision: Layout, llm: Layout, shared: str, use: int) -> None:
    message = refusal([], layouts(vision, llm))
    assert message.startswith(f"vision/Layout.rank_offset={vision.rank_offset}: ")
    assert f" share {shared};" in message
    advised = int(message.partition(": use ")[2].partition(" ")[0])
    moved = dataclasses.replace(vision, rank_offset=advised)
    assert load_config([], layouts(moved, llm)).model["vision"].layout == moved
    assert advised == use or len({*moved.ranks, *llm.ranks}) <= len({*llm.ranks, *range(use, use + vision.size)})


def test_two_encoders_may_not_overlap_either() -> None:
    names = ["Model.encoders={'a': 'vit', 'b': 'vit'}", "Data.image_encoder=a"]
    ranks = ["a/Layout.dp=2", "b/Layout.dp=2", "b/Layout.rank_offset=1", "llm/Layout.rank_offset=3"]
    message = refusal([], names + ranks)
    assert message.startswith("a/Layout.rank_offset=0: its ranks 0-1 and b's ranks 1-2 share rank 1;")


# ---- devices


def test_the_config_that_fits_is_named(tmp_path: Path) -> None:
    eight = write(tmp_path, "eight.gin", "\n".join(DISJOINT) + "\n")
    ones = "llm/Layout.tp = 1\nllm/Layout.pp = 1\nvision/Layout.dp = 1\n"
    write(tmp_path, "five.gin", f"include 'eight.gin'\n{ones}")
    write(tmp_path, "four.gin", "llm/Layout.tp = 2\nllm/Layout.pp = 2\nvision/Layout.dp = 2\n")
    write(tmp_path, "part.gin", "Train.steps = 3\n")
    write(tmp_path, "broken.gin", "Layout.tp = \n")
    assert config_that_fits(8, [eight]) == (eight, 8)
    assert config_that_fits(7, [eight]) == (tmp_path / "five.gin", 5)
    assert config_that_fits(4, [eight]) == (tmp_path / "four.gin", 4)
    assert config_that_fits(1, [eight]) is None
    message = refusal([eight], ["World.devices=4"])
    assert f"use --gin.World.devices=8, or --gin_file={tmp_path / 'four.gin'} (needs 4)" in message
    with pytest.raises(ConfigError) as error:
        require_devices(load_config([eight]), 2, [eight])
    assert str(error.value) == (
        "World.devices=0: the layouts need 8 devices, not 2 (vision dp=4 on ranks 4-7; llm pp=2 tp=2 on ranks 0-3); "
        "use smaller layouts, or --gin.World.platform=cpu for 8 virtual devices"
    )
    require_devices(load_config([eight]), 8, [eight])


def test_advice_about_waste() -> None:
    assert advise(load_config([], [*DISJOINT])) == ()
    lines = advise(load_config([], [*DISJOINT, "Train.global_batch=12", "Train.microbatches=4", "World.devices=10"]))
    assert lines == (
        "Train.global_batch=12: microbatches of 3 rows are padded to 4, a multiple of all modules' dp; 16 wastes none",
        "World.devices=10: no layout uses ranks 8-9",
    )
    wide = ["llm/Layout.pp=2", "vision/Layout.dp=2", "Train.global_batch=4", "Train.schedule=three-phase"]
    (line,) = advise(load_config([], wide))
    assert line.startswith("Train.global_batch=4: microbatches of 1 rows are padded to 2")
    assert advise(load_config([], [*wide, "vision/Layout.microbatches=0"])) == ()
    copies = ["llm/Layout.pp=2", "llm/Layout.tp=2", "vision/Layout.copies=2", "vision/Layout.dp=2"]
    assert advise(load_config([], [*copies, "Train.schedule=three-phase"])) == ()
    assert advise(load_config([], copies)) == (
        "vision/Layout.copies=2: under Train.schedule='1f1b' all stages of the llm wait for each other at every op of "
        "vision; 'encoders-first' runs these one after another",
    )


# ---- the operative config

GOLDEN_TRAIN = """\
Train.steps = 3
Train.epochs = 0.0
Train.global_batch = 32
Train.microbatches = 4
Train.schedule = 'gpipe'
Train.inner = '1f1b'
Train.window = 0
Train.lowering = 'auto'
Train.seed = 0
Train.dtype = 'float32'
Train.unroll = 'auto'
Train.overlap_grad_reduce = 'auto'
Train.clip_norm = 1.0
Train.log_every = 10
Train.eval_every = 0
Train.patience = 0
Train.eval_samples = 180
Train.predictions = 12
Train.peak_tflops = 0.0
Train.sinks = ()
Train.profile_steps = ()
Train.max_skipped = 10
Train.debug_nans = False
Train.deterministic = False
"""
GOLDEN_LAYOUTS = """\
vision/Layout.dp = 4
vision/Layout.pp = 1
vision/Layout.chunks = 1
vision/Layout.lanes = 1
vision/Layout.copies = 1
vision/Layout.microbatches = 1
vision/Layout.cp = 1
vision/Layout.cp_way = 'gather'
vision/Layout.cp_tokens = 'lpt'
vision/Layout.tp = 1
vision/Layout.sp = True
vision/Layout.overlap = False
vision/Layout.ep = 1
vision/Layout.ep_way = 'ring'
vision/Layout.expert_tp = 0
vision/Layout.rank_offset = 4
vision/Layout.optimizer_instances = 1
vision/Layout.shard = 'states'
vision/Layout.gather = 'layer'
vision/Layout.layers = ()

llm/Layout.dp = 1
llm/Layout.pp = 2
llm/Layout.chunks = 1
llm/Layout.lanes = 1
llm/Layout.copies = 1
llm/Layout.microbatches = 1
llm/Layout.cp = 1
llm/Layout.cp_way = 'gather'
llm/Layout.cp_tokens = 'lpt'
llm/Layout.tp = 2
llm/Layout.sp = True
llm/Layout.overlap = False
llm/Layout.ep = 1
llm/Layout.ep_way = 'ring'
llm/Layout.expert_tp = 0
llm/Layout.rank_offset = 0
llm/Layout.optimizer_instances = 1
llm/Layout.shard = 'states'
llm/Layout.gather = 'layer'
llm/Layout.layers = ()
"""


def test_operative_config_is_what_it_was(tmp_path: Path) -> None:
    text = operative_config(load_config([], [*DISJOINT, "Train.schedule=gpipe", "Train.steps=3"]))
    head = "# Every setting of the run. Loading this file gives the same configuration."
    assert text.startswith(f"{head}\n\n{GOLDEN_TRAIN}")
    assert all(f"\n\n{layout.strip()}\n\n" in text for layout in GOLDEN_LAYOUTS.split("\n\n"))
    bound = [line.partition(".")[0] for line in text.splitlines() if "=" in line]
    assert list(dict.fromkeys(bound)) == [
        *("Train", "World", "Data", "Digits", "Checkpoint", "Model"),
        *("vision/ViT", "vision/Layout", "vision/Projector", "vision/Packing", "vision/Lora", "vision/Offload"),
        *("vision/Callbacks", "vision/Optimizer", "vision/Weights"),
        *("vision_projector/Optimizer", "vision_projector/Weights"),
        *("llm/Decoder", "llm/Layout", "llm/Packing", "llm/Lora", "llm/Offload", "llm/Callbacks"),
        *("llm/Optimizer", "llm/Weights"),
    ]


def round_trip(recipe: Recipe, folder: Path) -> Recipe:
    return load_config([write(folder, "config.gin", operative_config(recipe))])


def test_operative_config_loads_back(tmp_path: Path) -> None:
    bindings = [
        *(
            "Model.encoders={'image': 'vit', 'depth': 'vit'}",
            "Data.image_encoder=depth",
            "depth/ViT.preset=clip-vit-l14",
        ),
        *("llm/Decoder.preset=llama3-70b", "Decoder.layers=6", "image/Packing.buckets=((1, 64), (2, 64))"),
        *("Optimizer.learning_rate=1e-7", "image_projector/Optimizer.frozen=True", "Train.sinks=('wandb',)"),
        *("Train.profile_steps=(3, 5)", "Train.debug_nans=True", "Train.deterministic=True"),
        'Data.folder=it\'s a "folder" with \\ and ünïcode',
    ]
    config = load_config([], bindings)
    assert config.data.settings.folder == 'it\'s a "folder" with \\ and ünïcode'
    again = round_trip(config, tmp_path)
    assert again == config
    assert operative_config(again) == operative_config(config)


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(1e-12, 1e3),
    clip=st.floats(0, 1e300),
    folder=st.text(st.characters(exclude_categories=["Cs"])),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_value_survives_the_round_trip(
    rate: float, clip: float, folder: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = load_config([])
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, clip_norm=clip, seed=seed),
        data=config.data.with_settings(folder=folder),
        model=config.model.with_optimizers(
            {"llm": dataclasses.replace(config.model.llm.optimizer, learning_rate=rate)}
        ),
    )
    assert round_trip(config, tmp_path_factory.mktemp("round")) == config


def test_a_config_made_by_hand_is_checked(tmp_path: Path) -> None:
    config = load_config([], list(DISJOINT))
    validate(config)
    moved = dataclasses.replace(config, model=config.model.with_layouts({"vision": Layout(dp=4, rank_offset=1)}))
    with pytest.raises(ConfigError, match=r"^vision/Layout\.rank_offset=1: .* use 0$"):
        validate(moved)


def test_run_directories() -> None:
    assert default_run_dir(["configs/base.gin", "configs/digits_vlm.gin"]) == Path("runs/digits_vlm")
    assert default_run_dir(["runs/mine/config.gin"]) == Path("runs/mine")
    with pytest.raises(ConfigError, match=r"^--run_dir='': name a directory, or a config with --gin_file="):
        default_run_dir([])


# ---- fields and types


def test_every_field_is_a_type_that_gin_can_write_and_has_documentation() -> None:
    for cls in scopes_of(ModelConfig(), DataConfig()):
        for info in fields_of(cls).values():
            name = f"{gin_name(cls)}.{info.name}"
            assert convert(info.default, info.annotation) == info.default, name
            assert convert(info.example, info.annotation) == info.example, name
            assert info.doc.endswith("."), name


def test_docstrings_document_fields() -> None:
    docs = {name: info.doc for name, info in fields_of(Layout).items()}
    assert docs["tp"] == "tensor parallel degree."
    # A field's name inside another's sentence starts no entry: "... cross between devices: ...".
    assert fields_of(WorldConfig)["devices"].doc.startswith("number of devices; 0 means")
    ep = (
        "expert parallel degree: number of ranks that share a layer's experts and compute them for each other's tokens."
    )
    assert docs["ep"] == f"{ep} It divides dp * cp and takes no ranks of its own."


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, 1.0),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([(1, 2)], tuple[tuple[int, float], ...], ((1, 2.0),)),
        (None, int | None, None),
        (3, int | None, 3),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
    ],
)
def test_convert(value: object, annotation: Any, expected: object) -> None:
    assert repr(convert(value, annotation)) == repr(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (True, int, "must be an integer"),
        (True, float, "must be a number"),
        (1, bool, "must be True or False"),
        (1, str, "must be a string"),
        ("a", int | None, "must be an integer or None"),
        ((1, "a"), tuple[int, ...], "must be a tuple of items that are each an integer"),
        ((1,), tuple[int, int], "must be a tuple of (an integer, an integer)"),
        ({1: 1}, dict[str, int], "must be a dict from a string to an integer"),
    ],
)
def test_convert_refuses(value: object, annotation: Any, message: str) -> None:
    with pytest.raises(Mismatch) as error:
        convert(value, annotation)
    assert str(error.value) == message == f"must be {describe(annotation)}"
    assert convert(example(annotation), annotation) == example(annotation)


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.gin")))
def test_values_make_an_equal_configuration_without_gin(name, monkeypatch):
    config = load_config([CONFIGS / name])
    values = json.loads(json.dumps(changed_values(config)))
    monkeypatch.setattr(gin_reader, "_parser", None)  # nothing may be parsed
    assert config_of_values(values) == config


def test_values_are_checked_as_text_is():
    with pytest.raises(ConfigError, match=r"llm/Layout\.tp='2': must be an integer"):
        config_of_values({"llm/Layout.tp": "2"})
    with pytest.raises(ConfigError, match="'Train' is no key"):
        config_of_values({"Train": 2})


LAUGHS = "x0 = 1\n" + "\n".join(f"x{n + 1} = (%x{n}, %x{n})" for n in range(40)) + "\nTrain.steps = %x40"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Train.steps = " + "(" * 20_000 + "1" + ")" * 20_000, "a value is nested too deeply; take brackets away"),
        ("Train.steps = " + "[" * 20_000, "a value is nested too deeply"),
        ("Train.steps = " + "{1:" * 20_000 + "1" + "}" * 20_000, "a value is nested too deeply"),
        ("Train.steps = " + '"a" ' * 20_000, "more than 500 strings side by side; write one"),
        (LAUGHS, "its macros make more than 100000 values; write fewer"),
        ("# " + "a" * (1 << 22), "has more than 4194304 characters; name a gin file"),
    ],
)
def test_hostile_gin_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.gin").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        load_config([tmp_path / "own.gin"])
    assert "\n" not in str(error.value) and len(str(error.value)) < 700 and "own.gin" in str(error.value)
