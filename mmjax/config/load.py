"""Makes one frozen `Config` of gin text: finds classes and scopes, and checks every value.

    config = load_config(["digits_vlm"], ["Train.steps=100", "vision/Layout.dp=2"])

A scope is a module's name: `vision/Layout.tp`. The same field without a scope (`Optimizer.learning_rate`) is the
default of every module. `X.preset` makes a preset's values the defaults; any other binding of the field overrides it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmjax.checkpoint.config import CheckpointConfig, WeightsConfig
from mmjax.config.gin_reader import MOVED, Binding, RawText, read_bindings, renamed, resolve
from mmjax.config.processor import DECIDED, data_settings, grown_tables, source_settings
from mmjax.config.schema import Config, TrainConfig, folder_setting, pretrained_folder, scopes_of
from mmjax.config.shipped import CONFIGS, find_config
from mmjax.config.steps import fit_to_steps
from mmjax.config.types import FieldInfo, Mismatch, convert, fields_of
from mmjax.config.validate import check_devices, validate
from mmjax.configurable import ConfigError, gin_name, near_misses, preset_values, suggest
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.processor.image_rules import FREE
from mmjax.data.sources.config import SourceConfig
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, CallbacksConfig, ModelConfig, lora_name, projector_name, setting_of
from mmjax.models.families import FAMILIES, PROJECTOR, Family, family_of
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.names import with_our_names
from mmjax.models.lora.peft import adapter_settings
from mmjax.models.pretrained import find_pretrained, require_whole, stored_dtypes
from mmjax.optimizer_config import HELD, OptimizerConfig
from mmjax.own_code import names_code, require_allowed
from mmjax.pipeline.config import OffloadConfig
from mmjax.weights.folder import WeightsFolder, read_config, read_extractor

_PLACEMENT = ("Layout", "Offload", "World")
_ORDER = ("schedule", "inner", "window", "lowering")
"""Fields of `Train` that belong to a placement: a schedule may want the layouts that it was made for."""
_SUITABLE = Binding(scope="", cls="Train", field="schedule", value="encoders-first", where="the placement's default")
"""A schedule for any layout, where a placement names none; prediction has an order of its own."""
_FIELD = re.compile(r"(\w+)\.(\w+)")


def load_config(
    gin_files: Sequence[str | os.PathLike[str]], bindings: Sequence[str] = (), *, allow_code: bool = False
) -> Config:
    """Reads gin files and bindings ("vision/Layout.tp=2", later ones win) into a checked `Config`.

    Touches no device, runs nothing and keeps no state, so a notebook may call it again and again.

    Args:
      gin_files: paths, or names of mmjax's own such as "digits_vlm"; later ones override earlier ones.
      bindings: fields, as text; they override the files.
      allow_code: whether settings may name code of one's own (`Source.kind = 'package.module:Factory'`), which is run
        when the data is opened. Only for files that one trusts.

    Raises:
      ConfigError: anything is wrong; one line that names the field, its value and a legal one.
    """
    return _checked(read_bindings(gin_files, bindings), gin_files, gin_files, allow_code)


def config_of_values(values: Mapping[str, Any]) -> Config:
    """A checked `Config` from values by key, {"vision/Layout.tp": 2}; needs no gin text, and no gin-config.

    Lists count as tuples, so that JSON may hold the values; `changed_values` gives them.

    Raises:
      ConfigError: as `load_config`.
    """
    bindings = []
    for key, value in values.items():
        scope, _, name = key.rpartition("/")
        if not _FIELD.fullmatch(name):
            raise ConfigError(f"{key}={value!r}: {key!r} is no key; write one such as vision/Layout.tp or Train.steps")
        cls, _, field = name.partition(".")
        bindings.append(Binding(scope=scope, cls=cls, field=field, value=value, where="values"))
    return _checked(resolve(bindings), (), (), allow_code=False)


def load_run_config(
    run_dir: str | os.PathLike[str],
    gin_files: Sequence[str | os.PathLike[str]] = (),
    bindings: Sequence[str] = (),
    *,
    allow_code: bool = False,
) -> Config:
    """The operative config of a run directory, on other devices where asked for.

    Only layouts, `World` and the schedule are taken from `gin_files`, and they replace the run's: a run on eight
    devices and `digits_vlm_one_device` give the run's model on one device. `bindings` change single fields.
    For `allow_code` see `load_config`; it is needed again even if the run was trained with it.

    Raises:
      ConfigError: there is no run, or anything is wrong with what was given.
    """
    path = Path(run_dir) / "config.gin"
    if not path.is_file():
        what = "holds no config.gin" if Path(run_dir).is_dir() else "is no directory"
        raise ConfigError(
            f"--run_dir={str(run_dir)!r} {what}: name the directory of a run{_runs_beside(Path(run_dir))}"
        )
    read = read_bindings([path])
    if gin_files:
        placed = [b for b in read_bindings(gin_files) if _placing(b)]
        read = [*(b for b in read if not _placing(b)), _SUITABLE, *placed]
    return _checked([*read, *read_bindings([], bindings)], [path], gin_files, allow_code)


def _placing(binding: Binding) -> bool:
    """Whether a binding says where, or in which order, the model runs."""
    return binding.cls in _PLACEMENT or (binding.cls == "Train" and binding.field in _ORDER)


def _checked(
    bindings: Sequence[Binding],
    read: Sequence[str | os.PathLike[str]],
    gin_files: Sequence[str | os.PathLike[str]],
    allow_code: bool,
) -> Config:
    """Loads a configuration. Settings come from the files in `read`; `gin_files` are the files that the user named."""
    bindings, fitted = fit_to_steps(bindings, lambda: _steps_in(read, allow_code))
    builder = _Builder(bindings, allow_code)
    config = dataclasses.replace(builder.config(), allow_code=allow_code, fitted=fitted)
    try:
        require_devices(config, config.world.devices or config.devices, gin_files)
        validate(config)
    except ConfigError as error:
        raise builder.located(error) from None
    return config


def _steps_in(gin_files: Sequence[str | os.PathLike[str]], allow_code: bool) -> int:
    """`Train.steps` of these files without flags."""
    try:
        return _Builder(read_bindings(gin_files), allow_code).steps()
    except ConfigError:  # without flags they are not whole
        return TrainConfig().steps


def _runs_beside(run_dir: Path) -> str:
    runs = sorted(path.parent for path in run_dir.parent.glob("*/config.gin")) if run_dir.parent.is_dir() else []
    near = near_misses(str(run_dir), map(str, runs)) or [str(run) for run in runs]
    return f", such as {near[0]!r}" if near else ""


def require_devices(config: Config, found: int, gin_files: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Requires that `found` devices are enough for the layouts.

    Raises:
      ConfigError: they are not; the message names the flag, and the gin file beside `gin_files`, that fit.
    """
    if found < config.devices:
        check_devices(config, found, config_that_fits(found, gin_files))


def config_that_fits(devices: int, gin_files: Sequence[str | os.PathLike[str]] = ()) -> tuple[Path, int] | None:
    """The gin file beside the last of `gin_files` (or among mmjax's) that uses most of `devices` devices, and how many.

    Files that name no layout are parts of other files and do not count. Those of mmjax are called by name where the
    given file was, too.
    """
    file = find_config(gin_files[-1]) if gin_files else CONFIGS / "digits_vlm.gin"
    folder, by_name = file.parent, not gin_files or file != Path(gin_files[-1])
    best: tuple[Path, int] | None = None
    for path in sorted(folder.glob("*.gin")):
        try:
            bindings = read_bindings([path])
            needed = _Builder(bindings).config().devices
        except ConfigError:
            continue
        if any(b.cls == "Layout" for b in bindings) and needed <= devices and (best is None or needed > best[1]):
            best = (path.relative_to(CONFIGS).with_suffix("") if by_name else path), needed
    return best


def operative_config(config: Config) -> str:
    """Gin text with every field of every module; loading it gives an equal `Config`."""
    blocks = ["# Every setting of the run. Loading this file gives the same configuration."]
    for scope, values in config.walk():
        head = f"{scope}/{gin_name(type(values))}" if scope else gin_name(type(values))
        lines = [f"{head}.{field.name} = {getattr(values, field.name)!r}" for field in dataclasses.fields(values)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def differences(before: str, after: str) -> dict[str, tuple[str, str]]:
    """The settings in which two operative configs differ, with both values; "?" for a missing one.

    Names of earlier versions appear under today's names. They are left out if today's run has no such setting.
    """
    old, new = (dict(line.split(" = ", 1) for line in text.splitlines() if " = " in line) for text in (before, after))
    old = {renamed(name): value for name, value in old.items() if renamed(name) in (name, *new)}
    both = {name: (old.get(name, "?"), new.get(name, "?")) for name in {**old, **new}}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def changed_values(config: Config) -> dict[str, Any]:
    """Every value that is not its field's default, by key; `config_of_values` makes an equal `Config` of them."""
    values: dict[str, Any] = {}
    for scope, own in config.walk():
        head = f"{scope}/{gin_name(type(own))}" if scope else gin_name(type(own))
        decided = DECIDED.get(type(own), ())  # without them a folder would decide
        for name, info in fields_of(type(own)).items():
            if (value := getattr(own, name)) != info.default or (name in decided and config.folders):
                values[f"{head}.{name}"] = value
    return values


def default_run_dir(gin_files: Sequence[str | os.PathLike[str]]) -> Path:
    """`runs/<name of the last gin file>`; for the operative config of a run, that run's directory.

    Raises:
      ConfigError: there is no gin file to take the name from.
    """
    if not gin_files:
        raise ConfigError("--run_dir='': name a directory, or a config with --gin_file=digits_vlm")
    last = Path(gin_files[-1])
    return last.parent if last.name == "config.gin" else Path("runs") / last.stem


class _Builder:
    """Builds the dataclasses from bindings. Knows where each value was set, for messages."""

    def __init__(self, bindings: Sequence[Binding], allow_code: bool = False):
        self._bound: dict[str, dict[tuple[str, str], Binding]] = {}
        self._infos = {cls: fields_of(cls) for cls in scopes_of(ModelConfig(), DataConfig())}
        model = [binding for binding in bindings if binding.cls == "Model"]
        self._add(model)
        # A user's own modules bring settings, so their code is loaded before the other bindings are read.
        for cls in _own_classes(self._build(ModelConfig), allow_code) if model else ():
            self._infos[cls] = fields_of(cls)
        self._add([binding for binding in bindings if binding.cls != "Model"])

    def _add(self, bindings: Iterable[Binding]) -> None:
        for binding in bindings:
            cls = self._check_name(binding)
            value = self._check_type(binding, self._infos[cls][binding.field])
            by_field = self._bound.setdefault(binding.cls, {})
            by_field[binding.scope, binding.field] = dataclasses.replace(binding, value=value)

    def config(self) -> Config:
        """The `Config`; each dataclass is checked by itself, and every scope is a known one."""
        model, data = self._build(ModelConfig), self._build(DataConfig)
        adapters = {n: adapter_settings(n, self._values(LoraConfig, n), family) for n, family in model.families}
        loras = {name: self._build(LoraConfig, name, given) for name, given in adapters.items()}
        scopes = scopes_of(model, data, [name for name, own in loras.items() if own.rank])
        self._check_scopes(scopes)
        weights = {name: self._build(WeightsConfig, name) for name in scopes[WeightsConfig]}
        # Settings come from the folder of a whole model also where a module's parameters are those of another run.
        folders = {
            name: pretrained_folder(model, dataclasses.replace(own, init_from=""), name)
            for name, own in weights.items()
        }
        tokens = data_settings(self._values(DataConfig, ""), folders[LLM], model.weights, weights)
        data = self._build(DataConfig, "", tokens)
        families = dict(model.families)
        modules = {name: self._module(family, name, folders[name], data) for name, family in families.items()}
        projectors = {name: self._module(PROJECTOR, name, folders[projector_name(name)], data) for name in model.media}
        settings = modules | {projector_name(name): own for name, own in projectors.items()}
        pictured = folders.get(data.image_encoder, "")
        return Config(
            train=self._build(TrainConfig),
            world=self._build(WorldConfig),
            data=data,
            task=self._build(data.origin.config) if data.origin.config else None,
            checkpoint=self._build(CheckpointConfig),
            model=model,
            modules=modules,
            callbacks={name: self._build(CallbacksConfig, name) for name in scopes[CallbacksConfig]},
            loras={
                name: with_our_names(name, own, families[name], modules[name], folders[name])
                for name, own in loras.items()
            },
            projectors=projectors,
            packing={name: self._build(PackingConfig, name) for name in scopes[PackingConfig]},
            layouts={name: self._build(Layout, name) for name in scopes[Layout]},
            optimizers={
                name: self._optimizer(
                    name,
                    pretrained_folder(model, weights[name], name),
                    families.get(name, PROJECTOR),
                    settings.get(name),
                )
                for name in scopes[OptimizerConfig]
            },
            offloads={name: self._build(OffloadConfig, name) for name in scopes[OffloadConfig]},
            sources={name: self._source(name, data, pictured) for name in scopes[SourceConfig]},
            weights=weights,
        )

    def steps(self) -> int:
        """The steps of the run."""
        return self._build(TrainConfig).steps

    def located(self, error: ConfigError, scope: str = "") -> ConfigError:
        """The error with the scope in front of its field and, at its end, the place where the field was set."""
        message = str(error)
        found = _FIELD.match(message.removeprefix(f"{scope}/"))
        if found and scope and not message.startswith(f"{scope}/"):
            message = f"{scope}/{message}"
        if not found:
            scope, _, rest = message.partition("/")
            found = _FIELD.match(rest)
        bound = self._bound.get(found[1], {}) if found else {}
        binding = (bound.get((scope, found[2])) or bound.get(("", found[2]))) if found else None
        return ConfigError(f"{message} ({binding.where})" if binding else message)

    def _module(self, family: Family, name: str, folder: str, data: DataConfig) -> Any:
        """Settings of a module, or of its projector; a folder of weights decides some."""
        given = self._from_folder(family, name, folder, data) if folder else {}
        return self._build(family.config, name, given)

    def _from_folder(self, family: Family, name: str, folder: str, data: DataConfig) -> dict[str, Any]:
        """The fields that a folder of weights decides; {} where all are bound, as in a run directory, whose run may
        have been moved away from the folder."""
        cls = family.config
        values = self._values(cls, name)
        if values.keys() >= self._infos[cls].keys():
            return {}
        module = projector_name(name) if family is PROJECTOR else name
        weights = self._build(WeightsConfig, module)
        try:
            theirs = {**read_config(folder), "extractor": read_extractor(folder)}
            if not weights.path:
                require_whole(theirs)
            given = find_pretrained(family, theirs, weights.layer).fields()
            given |= grown_tables(given, data) if module == LLM else {}
        except ConfigError as error:
            setting = folder_setting(weights, module)
            raise ConfigError(f"{setting}={folder!r}: {error}") from None
        proposed = {field.name for field in dataclasses.fields(cls) if "proposed" in field.metadata}
        for field in (given.keys() & values.keys()) - proposed:
            if values[field] != given[field] and not weights.init_from:
                fix = f"{folder} has {given[field]!r}; leave the setting out"
                error = ConfigError(f"{name}/{gin_name(cls)}.{field}={values[field]!r}: {fix}")
                raise self.located(error)
        return given

    def _optimizer(self, name: str, folder: str, family: Family, settings: Any) -> OptimizerConfig:
        """The optimizer of a module with these settings; a frozen one is held as its folder of weights, if it has one,
        holds it."""
        own = self._build(OptimizerConfig, name)
        if not (own.frozen and folder) or "frozen_dtype" in self._values(OptimizerConfig, name):
            return own
        try:
            dtypes = stored_dtypes(WeightsFolder.open(folder), family, settings)
        except ConfigError:  # what is wrong with the tensors is said where they are read
            return own
        # One dtype that holds all of them exactly; of float64, what there is.
        dtype = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(HELD) else HELD[0]
        return self._build(OptimizerConfig, name, {"frozen_dtype": dtype})

    def _source(self, name: str, data: DataConfig, folder: str) -> SourceConfig:
        """A dataset; the folder of the tokenizer decides its template, that of the image encoder its image rules."""
        values = self._values(SourceConfig, name)
        try:
            preset = preset_values(SourceConfig, str(values.get("preset", "")))
        except ConfigError as error:
            raise self.located(error, name) from None
        own = {**preset, **values}
        given = source_settings(own, name, data.tokenizer, folder)
        for field in (one for one in given if one in own and one not in FREE):
            if own[field] != given[field]:
                fix = f"{folder} has {given[field]!r}; leave the setting out, or set {name}/Source.resize too"
                raise self.located(ConfigError(f"{name}/Source.{field}={own[field]!r}: {fix}"))
        return self._build(SourceConfig, name, given)

    def _build(self, cls: type[Any], scope: str = "", given: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The settings of a class under a scope. What is bound overrides what is ``given``, and that a preset."""
        values = self._values(cls, scope)
        try:
            preset = preset_values(cls, str(values.get("preset", "")))
            return cls(**{**preset, **given, **values})
        except ConfigError as error:
            raise self.located(error, scope) from None

    def _values(self, cls: type[Any], scope: str) -> dict[str, Any]:
        """The bound fields of a class under a scope."""
        bound = self._bound.get(gin_name(cls), {})
        values = {field: b.value for (of, field), b in bound.items() if not of}
        return values | {field: b.value for (of, field), b in bound.items() if of and of == scope}

    def _check_name(self, binding: Binding) -> type[Any]:
        classes = {gin_name(cls): cls for cls in self._infos}
        if binding.cls not in classes:
            hint = suggest(binding.cls, classes)
            raise ConfigError(f"{_shown(binding)}: no configurable {binding.cls!r}; {hint} ({binding.where})")
        cls = classes[binding.cls]
        if binding.field not in self._infos[cls]:
            moved = {old.partition(".")[2]: new for old, new in MOVED.items() if old.startswith(f"{binding.cls}.")}
            (near,) = near_misses(binding.field, [*self._infos[cls], *moved])[:1] or [""]
            hint = f"did you mean {moved[near]!r}?" if near in moved else suggest(binding.field, self._infos[cls])
            unknown = f"{binding.cls} has no field {binding.field!r}"
            raise ConfigError(f"{_shown(binding)}: {unknown}; {hint} ({binding.where})")
        return cls

    def _check_type(self, binding: Binding, info: FieldInfo) -> Any:
        value = binding.value
        if info.annotation is str and binding.text is not None and not isinstance(value, str):
            value = RawText(binding.text)  # --gin.Data.folder=2024 means the text, without quotes
        try:
            return convert(value, info.annotation)
        except Mismatch as error:
            raise ConfigError(f"{_shown(binding)}: {error}, such as {info.example!r} ({binding.where})") from None

    def _check_scopes(self, scopes: Mapping[type[Any], tuple[str, ...]]) -> None:
        for cls, legal in scopes.items():
            for binding in self._bound.get(gin_name(cls), {}).values():
                if cls is SourceConfig and not legal:
                    name = binding.scope or "mine"
                    fix = f"no dataset is named; add Data.sources = {{{name!r}: 1.0}}"
                    raise ConfigError(f"{_shown(binding)}: {fix} ({binding.where})")
                if not binding.scope:
                    self._check_effect(binding, legal)
                    continue
                if binding.scope in legal:
                    continue
                hint = _hint(cls, binding, legal, scopes[LoraConfig])
                unknown = f"{binding.cls} has no scope {binding.scope!r}"
                raise ConfigError(f"{_shown(binding)}: {unknown}; {hint} ({binding.where})")

    def _check_effect(self, binding: Binding, scopes: Sequence[str]) -> None:
        """Refuses a flag that changes nothing: it has no scope, and every module has a value under its own scope."""
        bound = self._bound[binding.cls]
        own = [bound.get((scope, binding.field)) for scope in scopes]
        if binding.text is not None and own and own[0] and all(own):
            fix = f"write --gin.{own[0].key}={binding.text}"
            raise ConfigError(f"{binding.where} changes nothing: {own[0].key} is set ({own[0].where}); {fix}")


def _own_classes(model: ModelConfig, allow_code: bool) -> Iterator[type[Any]]:
    """Classes of settings of the modules that are the user's own; imports their code, where that is allowed."""
    for name, kind, place in model.placed:
        if names_code(kind):
            require_allowed(setting_of(name, place), kind, allow_code)
            yield family_of(setting_of(name, place), kind, place).config


def _hint(cls: type[Any], binding: Binding, legal: Sequence[str], adaptable: Iterable[str]) -> str:
    """The fix for a scope that is not among those of a class; ``adaptable`` are modules that may have adapters."""
    for name in adaptable if legal else ():
        if binding.scope == lora_name(name):
            return f"{name} has no adapters; set {name}/Lora.rank, such as to 8"
    return suggest(binding.scope, legal) if legal else _without_scopes(cls, binding)


def _without_scopes(cls: type[Any], binding: Binding) -> str:
    """The fix for a scope of a class that takes none: it is the run's own, or of a family that no module has."""
    for kind, family in FAMILIES.items():
        if family.config is cls:
            return f"add {binding.scope!r}: {kind!r} to Model.{family.place}s"
    return f"it takes no scope; write {binding.cls}.{binding.field}"


def _shown(binding: Binding) -> str:
    value = binding.value.text if isinstance(binding.value, RawText) else repr(binding.value)
    return f"{binding.key}={value}"
