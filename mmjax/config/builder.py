"""Builds the dataclasses of a `Recipe` from bindings: finds classes and scopes, checks names and types."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmjax.checkpoint.config import CheckpointConfig, WeightsConfig
from mmjax.config.gin_reader import Binding, RawText
from mmjax.config.processor import FREE, data_settings, grown_tables, source_settings
from mmjax.config.scopes import scopes_of
from mmjax.config.types import Mismatch, convert
from mmjax.configurable import ConfigError, gin_name, near_misses, preset_values, suggest
from mmjax.data.config import DataConfig, LatentsConfig, PackingConfig, VocoderConfig
from mmjax.data.origin import origin_class, task_class
from mmjax.data.sources.config import SourceConfig
from mmjax.data.spec import DataSpec
from mmjax.data.tasks.registry import MOVED
from mmjax.fields import FieldInfo, fields_of
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, CallbacksConfig, ModelConfig, family_setting, lora_name, projector_name
from mmjax.models.edges import EdgeConfig, EdgeSpec
from mmjax.models.families import FAMILIES, PROJECTOR, Family, Role, family_of
from mmjax.models.lora.config import LoraConfig
from mmjax.models.lora.names import with_native_names
from mmjax.models.lora.peft import adapter_settings
from mmjax.models.pretrained import find_pretrained, require_whole, stored_dtypes
from mmjax.models.scheduler_files import pipeline_settings
from mmjax.optimizer_config import HELD, OptimizerConfig
from mmjax.pipeline.config import OffloadConfig
from mmjax.recipe.model_spec import ModelSpec
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.specs import LoraSpec, ModuleSpec, ProjectorSpec
from mmjax.recipe.train_config import TrainConfig
from mmjax.user_code import names_code, require_allowed
from mmjax.weights.folder import WeightsFolder, read_config, read_extractor
from mmjax.weights.pipelines import Pipeline, module_folder

FIELD = re.compile(r"(\w+)\.(\w+)")
"""A setting's class and field: "Layout.tp"."""


class ConfigBuilder:
    """Builds the dataclasses from bindings. Remembers where each value was set, for messages.

    Args:
      bindings: all of a configuration, with macros looked up, see `read_bindings`; of two with one key the later wins.
      allow_code: whether the code of a user's own modules may be imported.

    Raises:
      ConfigError: a class or field is unknown, a value has the wrong type, or code is named that is not allowed.
    """

    def __init__(self, bindings: Sequence[Binding], *, allow_code: bool = False):
        self._bound: dict[str, dict[tuple[str, str], Binding]] = {}
        self._infos = {cls: fields_of(cls) for cls in scopes_of(ModelConfig(), DataConfig())}
        # A user's own modules and task bring settings, so their code is loaded before the other bindings are read.
        model = [binding for binding in bindings if binding.cls == "Model"]
        self._add(model)
        for cls in _user_classes(self._build(ModelConfig), allow_code=allow_code) if model else ():
            self._infos[cls] = fields_of(cls)
        task = [binding for binding in bindings if (binding.cls, binding.field) == ("Data", "task")]
        self._add(task)
        for cls in _user_task(self._values(DataConfig, "").get("task", ""), allow_code=allow_code):
            self._infos[cls] = fields_of(cls)
        self._add([binding for binding in bindings if binding.cls != "Model" and binding not in task])

    def _add(self, bindings: Iterable[Binding]) -> None:
        for binding in bindings:
            cls = self._check_name(binding)
            value = self._check_type(binding, self._infos[cls][binding.field])
            by_field = self._bound.setdefault(binding.cls, {})
            by_field[binding.scope, binding.field] = dataclasses.replace(binding, value=value)

    def recipe(self) -> Recipe:
        """Builds the `Recipe`. Each dataclass has checked itself; `validate` checks how they fit one another.

        Raises:
          ConfigError: a scope does not exist, a dataclass refuses a value, or a folder of weights does not fit.
        """
        model, data = self._build(ModelConfig), self._build(DataConfig)
        loras = {name: self._lora(name, family) for name, family in model.families}
        scopes = scopes_of(model, data, [name for name, lora in loras.items() if lora.rank])
        self._check_scopes(scopes)
        weights = {name: self._weights(name) for name in scopes[WeightsConfig]}
        folders = _Folders(model.weights, weights, without=[*model.generators, *map(projector_name, model.generators)])
        tokens = data_settings(self._values(DataConfig, ""), folders.of_settings(LLM), model.weights, weights)
        data = self._build(DataConfig, "", tokens)
        nodes = {
            name: self._node(model, name, kind, role, lora=loras[name], data=data, folders=folders)
            for name, kind, role in model.roles
        }
        image_folder = folders.of_settings(data.image_encoder) if data.image_encoder in weights else ""
        has_times = bool(nodes[LLM].settings.grid_setting)
        task_config = origin_class(data).Config
        return Recipe(
            model=ModelSpec(nodes=nodes, edges=self._edges(model), weights=model.weights),
            train=self._build(TrainConfig),
            world=self._build(WorldConfig),
            data=DataSpec(
                data,
                task=self._build(task_config) if task_config else None,
                sources={
                    name: self._source(name, data, image_folder, has_times=has_times) for name in scopes[SourceConfig]
                },
            ),
            checkpoint=self._build(CheckpointConfig),
        )

    def steps(self) -> int:
        """`Train.steps`; its default where it is not bound."""
        return self._build(TrainConfig).steps

    def located(self, error: ConfigError, scope: str = "") -> ConfigError:
        """Returns the error with the scope in front of its field and, at its end, the place where the field was set.

        Args:
          error: its message begins with a field, such as "Layout.tp=3: …"; another one is returned as it is.
          scope: the scope of that field, such as "vision"; "" where it has none, or the message names it.
        """
        message = str(error)
        setting = FIELD.match(message.removeprefix(f"{scope}/"))
        if setting and scope and not message.startswith(f"{scope}/"):
            message = f"{scope}/{message}"
        if not setting:
            scope, _, unscoped = message.partition("/")
            setting = FIELD.match(unscoped)
        bound = self._bound.get(setting[1], {}) if setting else {}
        binding = (bound.get((scope, setting[2])) or bound.get(("", setting[2]))) if setting else None
        return ConfigError(f"{message} ({binding.where})" if binding else message)

    def _node(
        self,
        model: ModelConfig,
        name: str,
        kind: str,
        role: Role,
        *,
        lora: LoraConfig,
        data: DataConfig,
        folders: _Folders,
    ) -> ModuleSpec:
        """A node of the model; folders of weights decide some of its settings."""
        family = family_of(family_setting(name, role), kind, role)
        settings = self._module(family, name, folders.of_settings(name), data)
        adapters = with_native_names(name, lora, family, settings, folders.of_settings(name))
        return ModuleSpec(
            name=name,
            kind=kind,
            role=role,
            settings=settings,
            layout=self._build(Layout, name),
            optimizer=self._optimizer(name, folders.of_parameters(name), family, settings),
            weights=folders.weights[name],
            projector=None if name not in model.media else self._projector(name, data, folders),
            lora=self._adapters(name, adapters, folders),
            packing=self._build(PackingConfig, name),
            latents=self._latents(model, name, folders) if role == "generator" else LatentsConfig(),
            vocoder=self._build(VocoderConfig, name) if role == "generator" else VocoderConfig(),
            offload=self._build(OffloadConfig, name),
            callbacks=self._build(CallbacksConfig, name),
        )

    def _weights(self, part: str) -> WeightsConfig:
        """The start of a part."""
        weights = self._build(WeightsConfig, part)
        try:
            Pipeline.find(weights.path)
        except ConfigError as error:
            raise self.located(error, part) from None
        return weights

    def _latents(self, model: ModelConfig, name: str, folders: _Folders) -> LatentsConfig:
        """The latents of a generator, with the autoencoder of its encoder of latents, or of its pipeline."""
        pipeline, sources = folders.weights[name].pipeline, [e.source for e in model.flows if e.target == name]
        paths = [folders.weights[source].path for source in sources if source in model.latent_encoders]
        folder = next(filter(None, paths), pipeline.autoencoder_folder if pipeline else "")
        return self._build(LatentsConfig, name, {"autoencoder": folder} if folder else {})

    def _edges(self, model: ModelConfig) -> tuple[EdgeSpec, ...]:
        """The edges of the model; () for a star without settings."""
        edges = tuple(dataclasses.replace(edge, settings=self._build(EdgeConfig, edge.name)) for edge in model.flows)
        return edges if model.edges or any(edge.settings != EdgeConfig() for edge in edges) else ()

    def _projector(self, name: str, data: DataConfig, folders: _Folders) -> ProjectorSpec:
        """The projector of a node."""
        part = projector_name(name)
        settings = self._module(PROJECTOR, name, folders.of_settings(part), data)
        optimizer = self._optimizer(part, folders.of_parameters(part), PROJECTOR, settings)
        return ProjectorSpec(settings=settings, optimizer=optimizer, weights=folders.weights[part])

    def _lora(self, name: str, family: Family) -> LoraConfig:
        """The adapters of a module; a folder of adapters decides some of their settings."""
        return self._build(LoraConfig, name, adapter_settings(name, self._values(LoraConfig, name), family))

    def _adapters(self, name: str, lora: LoraConfig, folders: _Folders) -> LoraSpec:
        """The adapters of a node, with their optimizer if there are any."""
        part = lora_name(name)
        if not lora.rank:
            return LoraSpec(settings=lora)
        return LoraSpec(settings=lora, optimizer=self._build(OptimizerConfig, part), weights=folders.weights[part])

    def _module(self, family: Family, name: str, folder: str, data: DataConfig) -> Any:
        """The settings of a module, or of its projector; its folder of weights decides some."""
        decided = self._from_folder(family, name, folder, data) if folder else {}
        return self._build(family.config, name, decided)

    def _from_folder(self, family: Family, name: str, folder: str, data: DataConfig) -> dict[str, Any]:
        """The fields that a folder of weights decides.

        {} if all fields are bound, as in a run directory: the run may have been moved away from the folder.
        """
        cls = family.config
        values = self._values(cls, name)
        if values.keys() >= self._infos[cls].keys():
            return {}
        module = projector_name(name) if family is PROJECTOR else name
        weights = self._build(WeightsConfig, module)
        try:
            folder_config = {**read_config(folder), "extractor": read_extractor(folder)}
            if not weights.path:
                require_whole(folder_config)
            decided = find_pretrained(family, folder_config, weights.layer).fields()
            decided |= grown_tables(decided, data) if module == LLM else {}
        except ConfigError as error:
            setting = weights.folder_setting(module)
            raise ConfigError(f"{setting}={folder!r}: {error}") from None
        proposed = {field.name for field in dataclasses.fields(cls) if "proposed" in field.metadata}
        for field in (decided.keys() & values.keys()) - proposed:
            if values[field] != decided[field] and not weights.init_from:
                fix = f"{folder} has {decided[field]!r}; leave the setting out"
                error = ConfigError(f"{name}/{gin_name(cls)}.{field}={values[field]!r}: {fix}")
                raise self.located(error)
        return decided if family is PROJECTOR else {**self._noise(name, family, weights.pipeline), **decided}

    def _noise(self, name: str, family: Family, pipeline: Pipeline | None) -> Mapping[str, Any]:
        """The settings of a generator's noise in its pipeline's folder; {} if another process of noise is bound."""
        if not pipeline:
            return {}
        try:
            read = pipeline_settings(pipeline)
        except ConfigError as error:
            fix = f"or name {pipeline.denoiser_folder} alone, and set its noise"
            raise ConfigError(f"{name}/Weights.path={pipeline.path!r}: {error}; {fix}") from None
        bound = self._values(family.config, name)
        return read if bound.get("process") in (None, read.get("process")) else {}

    def _optimizer(self, name: str, folder: str, family: Family, settings: Any) -> OptimizerConfig:
        """The optimizer of a module. A frozen module keeps the dtype of the tensors in its folder of weights."""
        optimizer = self._build(OptimizerConfig, name, {"frozen": True} if family.medium == "drawing" else {})
        if not (optimizer.frozen and folder) or "frozen_dtype" in self._values(OptimizerConfig, name):
            return optimizer
        dtype = stored_dtype(folder, family, settings)
        return dataclasses.replace(optimizer, frozen_dtype=dtype) if dtype else optimizer

    def _source(self, name: str, data: DataConfig, folder: str, *, has_times: bool) -> SourceConfig:
        """A dataset. The tokenizer's folder decides its template, the image encoder's folder its image rules.

        has_times: whether the LLM's positions have an axis of time.
        """
        values = self._values(SourceConfig, name)
        try:
            preset = preset_values(SourceConfig, str(values.get("preset", "")))
        except ConfigError as error:
            raise self.located(error, name) from None
        values = {**preset, **values}
        decided = source_settings(values, name, data.tokenizer, folder, has_times=has_times)
        for field in (field for field in decided if field in values and field not in FREE):
            if values[field] != decided[field]:
                fix = f"{folder} has {decided[field]!r}; leave the setting out, or set {name}/Source.resize too"
                raise self.located(ConfigError(f"{name}/Source.{field}={values[field]!r}: {fix}"))
        return self._build(SourceConfig, name, decided)

    def _build(self, cls: type[Any], scope: str = "", decided: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The settings of a class under a scope. Bound values override ``decided`` values, and these a preset's."""
        values = self._values(cls, scope)
        try:
            preset = preset_values(cls, str(values.get("preset", "")))
            return cls(**{**preset, **decided, **values})
        except ConfigError as error:
            raise self.located(error, scope) from None

    def _values(self, cls: type[Any], scope: str) -> dict[str, Any]:
        """The bound fields of a class under a scope."""
        bound = self._bound.get(gin_name(cls), {})
        values = {field: b.value for (bound_scope, field), b in bound.items() if not bound_scope}
        return values | {field: b.value for (bound_scope, field), b in bound.items() if bound_scope == scope != ""}

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
        """Refuses a flag without a scope that changes nothing, because every module has a value under its own scope."""
        bound = self._bound[binding.cls]
        scoped = [bound.get((scope, binding.field)) for scope in scopes]
        if binding.text is not None and scoped and scoped[0] and all(scoped):
            fix = f"write --gin.{scoped[0].key}={binding.text}"
            raise ConfigError(f"{binding.where} changes nothing: {scoped[0].key} is set ({scoped[0].where}); {fix}")


def stored_dtype(folder: str, family: Family, settings: Any) -> str:
    """The dtype of a module's tensors in a folder of safetensors, such as "bfloat16"; "" if the folder cannot be read.

    It is "float32", which holds the others exactly, where there are several, and for float64.

    Args:
      folder: the path; "" for none, which gives "".
      family: the module's family, such as ``FAMILIES["vit"]``.
      settings: of the family's class, such as ``ViTConfig``.
    """
    if not folder:
        return ""
    try:
        dtypes = stored_dtypes(WeightsFolder.open(folder), family, settings)
    except ConfigError:  # reading the tensors will report the error
        return ""
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(HELD) else HELD[0]


@dataclasses.dataclass(frozen=True)
class _Folders:
    """The folders of safetensors that settings and parameters come from.

    Attributes:
      whole: the folder of a whole model; "" for none.
      weights: the start of each part's parameters.
      without: parts that the whole model does not have.
    """

    whole: str
    weights: Mapping[str, WeightsConfig]
    without: Sequence[str]

    def of_parameters(self, part: str) -> str:
        """The folder of a part's parameters; "" for none."""
        return self.weights[part].folder("" if part in self.without else self.whole)

    def of_settings(self, part: str) -> str:
        """The folder of a part's settings, even if its parameters come from a run; "" for none."""
        return module_folder(self.weights[part].path) or ("" if part in self.without else self.whole)


def _user_classes(model: ModelConfig, *, allow_code: bool) -> Iterator[type[Any]]:
    """Yields the configurable classes of the user's own modules. Imports their code, if that is allowed."""
    for name, kind, role in model.roles:
        if names_code(kind):
            require_allowed(family_setting(name, role), kind, allowed=allow_code)
            yield family_of(family_setting(name, role), kind, role).config


def _user_task(task: str, *, allow_code: bool) -> Iterator[type[Any]]:
    """Yields the configurable class of the user's own task, if it has one. Imports its code, if that is allowed."""
    if names_code(task):
        require_allowed("Data.task", task, allowed=allow_code)
        if config := task_class(task).Config:
            yield config


def _hint(cls: type[Any], binding: Binding, legal: Sequence[str], adaptable: Iterable[str]) -> str:
    """The fix for a scope that a class does not have; ``adaptable`` are the modules that may have adapters."""
    for name in adaptable if legal else ():
        if binding.scope == lora_name(name):
            return f"{name} has no adapters; set {name}/Lora.rank, such as to 8"
    return suggest(binding.scope, legal) if legal else _without_scopes(cls, binding)


def _without_scopes(cls: type[Any], binding: Binding) -> str:
    """The fix for a scope of a class without scopes: a class of the whole run, or of a family that no module has."""
    for kind, family in FAMILIES.items():
        if family.config is cls:
            return f"add {binding.scope!r}: {kind!r} to Model.{family.roles[-1]}s"
    return f"it takes no scope; write {binding.cls}.{binding.field}"


def _shown(binding: Binding) -> str:
    value = binding.value.text if isinstance(binding.value, RawText) else repr(binding.value)
    return f"{binding.key}={value}"
