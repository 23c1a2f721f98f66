"""Makes one frozen, checked `Recipe` from gin text, from values by key, or from a run directory.

    config = load_config(["digits_vlm"], ["Train.steps=100", "vision/Layout.dp=2"])

A scope is a module's name: `vision/Layout.tp`. The same field without a scope (`Optimizer.learning_rate`) is the
default of every module. `X.preset` makes a preset's values the defaults; any other binding of the field overrides it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.config.builder import FIELD, ConfigBuilder
from mmjax.config.gin_reader import Binding, read_bindings, resolve
from mmjax.config.shipped import CONFIGS, find_config
from mmjax.config.steps import fit_to_steps
from mmjax.configurable import ConfigError, near_misses
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.train_config import TrainConfig
from mmjax.recipe.validate import validate

_PLACEMENT = ("Layout", "Offload", "World")
_ORDER = ("schedule", "inner", "window", "lowering")
"""Fields of `Train` that belong to a placement: a schedule may want the layouts that it was made for."""
_ANY_LAYOUT_SCHEDULE = Binding(
    scope="", cls="Train", field="schedule", value="encoders-first", where="the placement's default"
)
"""The schedule of a placement that names none: it works with any layout. Prediction has an order of its own."""


def load_config(
    gin_files: Sequence[str | os.PathLike[str]], bindings: Sequence[str] = (), *, allow_code: bool = False
) -> Recipe:
    """Reads gin files and bindings ("vision/Layout.tp=2", later ones win) into a checked `Recipe`.

    Touches no device, runs nothing and keeps no state, so a notebook may call it again and again.

    Args:
      gin_files: paths, or names of mmjax's own such as "digits_vlm"; later ones override earlier ones.
      bindings: fields, as text; they override the files.
      allow_code: whether settings may name code of one's own (`Source.kind = 'package.module:Factory'`), which is run
        when the data is opened. Only for files that one trusts.

    Raises:
      ConfigError: anything is wrong; one line that names the field, its value and a legal one.
    """
    return _load_checked(
        read_bindings(gin_files, bindings), setting_files=gin_files, named_files=gin_files, allow_code=allow_code
    )


def config_of_values(values: Mapping[str, Any]) -> Recipe:
    """A checked `Recipe` from values by key, {"vision/Layout.tp": 2}; needs no gin text, and no gin-config.

    Lists count as tuples, so that JSON may hold the values; `changed_values` gives them.

    Raises:
      ConfigError: as `load_config`.
    """
    bindings = []
    for key, value in values.items():
        scope, _, name = key.rpartition("/")
        if not FIELD.fullmatch(name):
            raise ConfigError(f"{key}={value!r}: {key!r} is no key; write one such as vision/Layout.tp or Train.steps")
        cls, _, field = name.partition(".")
        bindings.append(Binding(scope=scope, cls=cls, field=field, value=value, where="values"))
    return _load_checked(resolve(bindings), setting_files=(), named_files=(), allow_code=False)


def load_run_config(
    run_dir: str | os.PathLike[str],
    gin_files: Sequence[str | os.PathLike[str]] = (),
    bindings: Sequence[str] = (),
    *,
    allow_code: bool = False,
) -> Recipe:
    """Loads the operative config of a run directory, with other layouts if gin files name some.

    Only layouts, `World` and the schedule are taken from `gin_files`, and they replace the run's: a run on eight
    devices and `digits_vlm_one_device` give the run's model on one device.

    Args:
      run_dir: the run's directory, such as "runs/digits_vlm".
      gin_files: paths, or names of mmjax's own.
      bindings: fields such as "vision/Layout.tp=2"; they override the run's and the files'.
      allow_code: whether settings may name code of one's own; needed again even if the run was trained with it.

    Raises:
      ConfigError: there is no run, or a file or binding is wrong.
    """
    path = Path(run_dir) / "config.gin"
    if not path.is_file():
        problem = "holds no config.gin" if Path(run_dir).is_dir() else "is no directory"
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} {problem}: name the directory of a run{_runs_beside(Path(run_dir))}"
        )
    run_bindings = read_bindings([path])
    if gin_files:
        placement = [b for b in read_bindings(gin_files) if _is_placement(b)]
        run_bindings = [*(b for b in run_bindings if not _is_placement(b)), _ANY_LAYOUT_SCHEDULE, *placement]
    return _load_checked(
        [*run_bindings, *read_bindings([], bindings)],
        setting_files=[path],
        named_files=gin_files,
        allow_code=allow_code,
    )


def _is_placement(binding: Binding) -> bool:
    """Whether a binding says where, or in which order, the model runs."""
    return binding.cls in _PLACEMENT or (binding.cls == "Train" and binding.field in _ORDER)


def _load_checked(
    bindings: Sequence[Binding],
    *,
    setting_files: Sequence[str | os.PathLike[str]],
    named_files: Sequence[str | os.PathLike[str]],
    allow_code: bool,
) -> Recipe:
    """Builds and checks a configuration.

    Args:
      bindings: its settings.
      setting_files: gin files that the settings come from, without flags.
      named_files: gin files that the user named, for messages.
      allow_code: see `load_config`.
    """
    bindings, fitted = fit_to_steps(bindings, lambda: _steps_in(setting_files, allow_code=allow_code))
    builder = ConfigBuilder(bindings, allow_code=allow_code)
    config = dataclasses.replace(builder.recipe(), allow_code=allow_code, fitted=fitted)
    try:
        require_devices(config, config.world.devices or config.devices, named_files)
        validate(config)
    except ConfigError as error:
        raise builder.located(error) from None
    return config


def _steps_in(gin_files: Sequence[str | os.PathLike[str]], *, allow_code: bool) -> int:
    """Returns `Train.steps` of gin files without flags."""
    try:
        return ConfigBuilder(read_bindings(gin_files), allow_code=allow_code).steps()
    except ConfigError:  # without flags the files are not a complete configuration
        return TrainConfig().steps


def _runs_beside(run_dir: Path) -> str:
    runs = sorted(path.parent for path in run_dir.parent.glob("*/config.gin")) if run_dir.parent.is_dir() else []
    near = near_misses(str(run_dir), map(str, runs)) or [str(run) for run in runs]
    return f", such as {near[0]!r}" if near else ""


def require_devices(recipe: Recipe, available: int, gin_files: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Requires that `available` devices are enough for the layouts.

    Args:
      recipe: the configuration, as `load_config(["digits_vlm"])` gives it.
      available: the number of devices.
      gin_files: the files that it was loaded from, for the message.

    Raises:
      ConfigError: they are not; the message names a flag, and a gin file beside the last of `gin_files`, that fit.
    """
    if available < recipe.devices:
        recipe.world.check_devices(recipe.model.layouts, available, config_that_fits(available, gin_files))


def config_that_fits(devices: int, gin_files: Sequence[str | os.PathLike[str]] = ()) -> tuple[Path, int] | None:
    """Finds the gin file that uses the most of `devices` devices.

    Searches the folder of the last of `gin_files`, or mmjax's own. Files without a layout are parts of other files and
    do not count.

    Returns:
      The file and its number of devices, such as (Path("digits_vlm_one_device"), 1); None if no file fits. A file of
      mmjax is named without folder and ending if the last of `gin_files` was, or if there is none.
    """
    file = find_config(gin_files[-1]) if gin_files else CONFIGS / "digits_vlm.gin"
    folder, by_name = file.parent, not gin_files or file != Path(gin_files[-1])
    best: tuple[Path, int] | None = None
    for path in sorted(folder.glob("*.gin")):
        try:
            bindings = read_bindings([path])
            needed = ConfigBuilder(bindings).recipe().devices
        except ConfigError:
            continue
        if any(b.cls == "Layout" for b in bindings) and needed <= devices and (best is None or needed > best[1]):
            best = (path.relative_to(CONFIGS).with_suffix("") if by_name else path), needed
    return best


def default_run_dir(gin_files: Sequence[str | os.PathLike[str]]) -> Path:
    """The run directory for gin files, `runs/<name of the last>`; for the config.gin of a run, that run's directory.

    It is Path("runs/digits_vlm") for ["digits_vlm"] and for ["configs/digits_vlm.gin"]. No directory is made.

    Raises:
      ConfigError: there is no gin file to take the name from.
    """
    if not gin_files:
        raise ConfigError("--run_dir='': name a directory, or a config with --gin_file=digits_vlm")
    last = Path(gin_files[-1])
    return last.parent if last.name == "config.gin" else Path("runs") / last.stem
