"""Profiles: measurements of a model on a device, as a small JSON file from which plans are made.

A profile holds times of short stages (`Trial`), their temporaries (`Compiled`), times of communication, figures of the
data, and the device and software of the measurement. It does not depend on the depth: it is valid for the same model
with any number of layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmjax.configurable import ConfigError
from mmjax.data.lengths import FIGURES
from mmjax.models.choices import AUTO
from mmjax.models.config import LLM
from mmjax.planner.json_values import fields, number, read_json, shown, whole_number
from mmjax.planner.work import StagePart

if TYPE_CHECKING:
    from mmjax.recipe import Recipe

FORMAT = "mmjax profile 2"
_MOST = 1_000_000_000
_IGNORED = ("preset", "layers", "inject", "levels")
"""Fields of modules that do not change a profile; no trial has modality tokens in later layers."""

Samples = tuple[tuple[float, float], ...]
"""Pairs of (bytes, seconds), by ascending bytes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The devices of a profile, all of one kind.

    Attributes:
      kind: name of the kind.
      platform: JAX platform, such as "cpu" or "gpu".
      count: number of devices.
      memory: bytes of each.
      processes: number of processes, which have equally many devices.
    """

    kind: str
    platform: str
    count: int
    memory: float
    processes: int = 1

    @property
    def shares_cores(self) -> bool:
        """Whether these are CPU devices that share the cores of their process; not with a process for each device."""
        return self.platform == "cpu" and (self.processes == 1 or self.processes < self.count)


@dataclass(frozen=True, kw_only=True)
class ProfiledStage:
    """A stage of a module by itself, and a figure of each of its programs.

    Attributes:
      module: name of the module.
      part: the stage's part of the module.
      tp: tp of the stage; its dp is 1.
      rows: rows of its input.
      width: positions of a row.
      forward: the figure of the forward.
      backward: the figure of the backward; 0 where there is none.
    """

    module: str
    part: StagePart
    tp: int
    rows: int
    width: int
    forward: float
    backward: float


class Trial(ProfiledStage):
    """A timed stage: seconds that each device works, from the call until the results are ready.

    For virtual devices, which share cores, the figure is each device's share of the processor time.
    """


class Compiled(ProfiledStage):
    """A compiled stage: bytes that a program needs on each device while it runs, beside arguments and results.

    See `Program.compiled_temporary_bytes`. Results of a backward do not count: sums are overwritten in place, and
    gradients of activations are sent to another stage.
    """


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measurements of a model on a device.

    Attributes:
      device: the devices of the measurement.
      jax: version of JAX.
      dtype: dtype of computation (`Train.dtype`).
      model: by part of the model, the fields of its configuration that determine times, as `model_of` gives them.
      data: by module name, figures of its samples or media: count, and mean, median, p90, p99 and most positions; and
        their average number in a sample (`per_sample`).
      trials: timed stages.
      compiled: temporaries of these stages and others.
      moves: times from one device to another.
      copies: times from a device to its host's memory; empty if it cannot copy there.
      gathers: by number of ranks, times of all-gathers by the bytes of all ranks together.
      reduces: by number of ranks, times of all-reduces by the bytes on each rank.
      all_to_alls: by number of ranks, times of all-to-alls by the bytes that each rank has; empty in older profiles.
      op: seconds that the host spends on an op beside the work of its devices.
      shared: the number of devices that work at a time: all if each has a processor of its own. It may be fractional if
        virtual devices share the cores of a host.
    """

    device: Device
    jax: str
    dtype: str
    model: Mapping[str, Mapping[str, Any]] = field(hash=False)
    data: Mapping[str, Mapping[str, float]] = field(hash=False)
    trials: tuple[Trial, ...]
    compiled: tuple[Compiled, ...]
    moves: Samples
    copies: Samples
    gathers: Mapping[int, Samples] = field(hash=False)
    reduces: Mapping[int, Samples] = field(hash=False)
    op: float
    shared: float
    all_to_alls: Mapping[int, Samples] = field(default_factory=dict, hash=False)

    @property
    def source(self) -> str:
        """One line that names the source of times and temporaries."""
        device = self.device
        unit = ", processor time" if device.shares_cores else ""
        processes = f" of {device.processes} processes" if device.processes > 1 else ""
        devices = f"{device.count} x {device.kind} ({device.platform}){processes}, jax {self.jax}"
        return f"measured on {devices}{unit}; temporaries of compiled programs"

    def tps(self, module: str) -> tuple[int, ...]:
        """Every tp with which module `module` was timed, ascending."""
        return tuple(sorted({trial.tp for trial in self.trials if trial.module == module}))

    def as_json(self) -> dict[str, Any]:
        """The profile as an object for `json.dumps`, with "format" and the attributes as keys; see `parse_profile`."""
        return {
            "format": FORMAT,
            "device": dataclasses.asdict(self.device),
            "jax": self.jax,
            "dtype": self.dtype,
            "model": {name: dict(sizes) for name, sizes in self.model.items()},
            "data": {name: dict(figures) for name, figures in self.data.items()},
            "trials": [_stage_json(stage) for stage in self.trials],
            "compiled": [_stage_json(stage) for stage in self.compiled],
            "moves": _samples_json(self.moves),
            "copies": _samples_json(self.copies),
            "gathers": {str(ranks): _samples_json(samples) for ranks, samples in self.gathers.items()},
            "reduces": {str(ranks): _samples_json(samples) for ranks, samples in self.reduces.items()},
            "all_to_alls": {str(ranks): _samples_json(samples) for ranks, samples in self.all_to_alls.items()},
            "op": self.op,
            "shared": self.shared,
        }


def _samples_json(samples: Samples) -> list[list[float]]:
    return [list(sample) for sample in samples]


def _stage_json(stage: ProfiledStage) -> dict[str, Any]:
    part = dataclasses.asdict(stage.part)
    values = {f.name: getattr(stage, f.name) for f in dataclasses.fields(stage) if f.name != "part"}
    return {"module": values.pop("module"), **part, **values}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_profile(profile: Profile, path: str | Path) -> None:
    """Writes a profile to a JSON file, completely or not at all; an existing file is replaced.

    profile: the measurements of a model, as `profile_of(recipe)` gives them.

    Raises:
      ConfigError: the file cannot be written.
    """
    path, text = Path(path), json.dumps(profile.as_json(), indent=1) + "\n"
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"--out={path}: cannot be written ({error.strerror}); name another file") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def require_writable(path: str | Path) -> None:
    """Requires that a profile can be written to the file `path`, and leaves nothing there; called before measuring.

    Raises:
      ConfigError: no file can be made there.
    """
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"--out={path}: is a directory; name a file, such as {path / 'profile.json'}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--out={path}: cannot be written ({error.strerror}); name another file") from None


def read_profile(path: str | Path, recipe: Recipe | None = None) -> Profile:
    """Reads the file of a profile, as `write_profile` writes it.

    recipe: a configuration whose model the profile has to be of; None takes any profile.

    Raises:
      ConfigError: the file cannot be read, is no profile, or is a profile of another model.
    """
    profile = parse_profile(read_json("--profile", path), f"--profile={path}")
    if recipe:
        require_same_model(profile, recipe, f"--profile={path}")
    return profile


def parse_profile(data: Any, where: str = "the profile") -> Profile:
    """The profile in parsed JSON.

    Args:
      data: a dict, as `Profile.as_json` gives it.
      where: begins messages, such as "--profile=h100.json".

    Raises:
      ConfigError: a field is unknown, missing, or not legal.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        actual = shown(data.get("format")) if isinstance(data, dict) and "format" in data else "none"
        raise ConfigError(f"{where}: is no profile of this version, format is {actual}; make one with mmjax.profile")
    try:
        return _profile(data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _profile(data: Any) -> Profile:
    values = fields(
        {"all_to_alls": {}, **data}, "", ("format", *(f.name for f in dataclasses.fields(Profile))), top="the profile"
    )
    device = fields(values["device"], "device", tuple(f.name for f in dataclasses.fields(Device)))
    kind, platform = (_text(f"device.{name}", device[name]) for name in ("kind", "platform"))
    count, processes = (whole_number(f"device.{name}", device[name], _MOST) for name in ("count", "processes"))
    if count % processes:
        raise ConfigError(f"device.processes={processes}: must divide device.count={count}")
    memory = number("device.memory", device["memory"], least=0)
    trials, compiled = (_list(name, values[name]) for name in ("trials", "compiled"))
    return Profile(
        device=Device(kind=kind, platform=platform, count=count, memory=memory, processes=processes),
        jax=_text("jax", values["jax"]),
        dtype=_text("dtype", values["dtype"]),
        model={name: _object(f"model.{name}", sizes) for name, sizes in _object("model", values["model"]).items()},
        data={name: _figures(f"data.{name}", figures) for name, figures in _object("data", values["data"]).items()},
        trials=tuple(Trial(**_stage(f"trials[{index}]", stage, timed=True)) for index, stage in enumerate(trials)),
        compiled=tuple(Compiled(**_stage(f"compiled[{index}]", stage)) for index, stage in enumerate(compiled)),
        moves=_samples("moves", values["moves"]),
        copies=_samples("copies", values["copies"]),
        gathers=_by_ranks("gathers", values["gathers"]),
        reduces=_by_ranks("reduces", values["reduces"]),
        all_to_alls=_by_ranks("all_to_alls", values["all_to_alls"]),
        op=number("op", values["op"], least=0),
        shared=number("shared", values["shared"], least=0, positive=True),
    )


def _stage(where: str, data: Any, *, timed: bool = False) -> dict[str, Any]:
    """The fields of a `Trial`, whose forward must take time, if `timed`, else of a `Compiled`."""
    sizes = ("layers", "tp", "rows", "width")
    values = fields(data, where, ("module", "first", "last", *sizes, "forward", "backward"))
    for name in ("first", "last"):
        if not isinstance(values[name], bool):
            raise ConfigError(f"{where}.{name}={shown(values[name])}: must be true or false")
    layers, tp, rows, width = (whole_number(f"{where}.{name}", values[name], _MOST) for name in sizes)
    return {
        "module": _text(f"{where}.module", values["module"]),
        "part": StagePart(layers=layers, first=values["first"], last=values["last"]),
        "tp": tp,
        "rows": rows,
        "width": width,
        "forward": number(f"{where}.forward", values["forward"], least=0, positive=timed),
        "backward": number(f"{where}.backward", values["backward"], least=0),
    }


def _samples(where: str, data: Any) -> Samples:
    samples = []
    if not isinstance(data, list):  # it is empty if there was one device
        raise ConfigError(f"{where}={shown(data)}: must be a list")
    for index, sample in enumerate(data):
        if not isinstance(sample, list) or len(sample) != 2:
            raise ConfigError(f"{where}[{index}]={shown(sample)}: must be [bytes, seconds]")
        samples.append(tuple(number(f"{where}[{index}]", value, least=0) for value in sample))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(samples)):
        raise ConfigError(f"{where}: the bytes must rise")
    return tuple(samples)


def _by_ranks(where: str, data: Any) -> dict[int, Samples]:
    table = _object(where, data)
    for key in table:
        if not key.isdecimal() or int(key) < 2:
            raise ConfigError(f'{where}: {shown(key)} is no number of ranks; use one of 2 or more, such as "2"')
    return {int(key): _samples(f"{where}.{key}", samples) for key, samples in table.items()}


def _figures(where: str, data: Any) -> dict[str, float]:
    values = fields(data, where, (*FIGURES, "per_sample"))
    return {name: number(f"{where}.{name}", value, least=0) for name, value in values.items()}


def _object(where: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}={shown(data)}: must be an object")
    return data


def _list(where: str, data: Any) -> list[Any]:
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{where}={shown(data)}: must be a list of one or more")
    return data


def _text(where: str, data: Any) -> str:
    if not isinstance(data, str) or not data:
        raise ConfigError(f"{where}={shown(data)}: must be a text")
    return data


# ---- the model of a profile ------------------------------------------------------------------------------------------


def model_of(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The fields that determine the times of stages, by part of the model: its settings by name, and "trained".

    Parts are modules, projectors and adapters: "llm", "vision", "vision_projector", "llm_lora". Values are as in JSON:
    a tuple is a list, and "trained" is a bool. Numbers of layers are not among them. An LLM whose `vocab` is 0 has
    "tokenizer" too. Such as {"llm": {"width": 64, …, "trained": True}}.

    recipe: the configuration, as `load_config(["run.gin"])` gives it.
    """
    parts = recipe.model.parts.items()
    sizes = {name: _sizes(part.settings) | {"trained": not part.optimizer.frozen} for name, part in parts}
    if not recipe.model[LLM].settings.vocab:
        sizes[LLM]["tokenizer"] = recipe.data.settings.tokenizer
    return sizes


def _sizes(module: Any) -> dict[str, Any]:
    sizes = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name not in _IGNORED}
    return json.loads(json.dumps(sizes))  # as in a file: a tuple becomes a list


def require_same_model(profile: Profile, recipe: Recipe, where: str = "the profile") -> None:
    """Requires that `profile` is of the configuration's model and dtype; returns nothing.

    Args:
      profile: the measurements of a model, as `read_profile(path)` gives them.
      recipe: the configuration.
      where: begins messages, such as "--profile=h100.json".

    Raises:
      ConfigError: it is a profile of another model; the message names the first difference.
    """
    remedy = "make another with mmjax.profile"
    if profile.dtype != recipe.train.dtype:
        raise ConfigError(
            f"{where}: is of Train.dtype={profile.dtype!r}, this run has {recipe.train.dtype!r}; {remedy}"
        )
    model = model_of(recipe)
    for name in (*model, *profile.model):
        if (name in model) != (name in profile.model):
            has = "has no module" if name in model else "has a module that is not in this model,"
            raise ConfigError(f"{where}: {has} {name!r}; {remedy}")
    for name, sizes in model.items():
        for key in (*sizes, *profile.model[name]):
            profiled, configured = profile.model[name].get(key), sizes.get(key)
            is_open = key == "remat" and configured == AUTO  # the plan takes what was profiled
            if profiled != configured and not is_open:
                difference = f"{name} has {key}={shown(profiled)} in it, {shown(configured)} in this run"
                raise ConfigError(f"{where}: is of another model: {difference}; {remedy}")
