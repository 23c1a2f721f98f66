"""Names the settings that change nothing in a configuration, each with the setting that switches it off.

A dataclass may have a method `idle`, which names the settings that others of its settings switch off. This module knows
how parts of a configuration switch off settings of one another. Defaults and values of a preset are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.config.schema import Config
from mmjax.config.types import fields_of
from mmjax.configurable import gin_name, preset_values
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM, lora_name, projector_name
from mmjax.schedule.schedules import NESTING, WINDOWED

Reasons = Mapping[str, str]
"""The reason why nothing reads a setting, by field of a dataclass."""


def idle_lines(config: Config) -> Iterator[str]:
    """Yields a line for each setting that changes nothing.

    A value that several modules share was set for all of them, so it is reported only if no module reads it.
    """
    places_of: dict[tuple[type[Any], str, str], list[tuple[str, str]]] = {}
    for scope, values in config.walk():
        cls, reasons = type(values), _reasons(config, scope, values)
        preset = preset_values(cls, getattr(values, "preset", ""))
        for name, info in fields_of(cls).items():
            value = getattr(values, name)
            if value not in (info.default, preset.get(name, info.default)):
                places_of.setdefault((cls, name, repr(value)), []).append((scope, reasons.get(name, "")))
    for (cls, name, value), places in places_of.items():
        if all(reason for _, reason in places):
            scope, reason = places[0]
            yield f"{scope}/{gin_name(cls)}.{name}={value} changes nothing: {reason}".removeprefix("/")


def _reasons(config: Config, scope: str, values: Any) -> Reasons:
    """The settings of one object that nothing reads."""
    if scope and _folder(config, scope):  # the settings come from a folder of weights
        return {}
    within = values.idle() if hasattr(values, "idle") else {}
    between = {
        "Train": _of_train,
        "World": _of_world,
        "Data": _of_data,
        "Checkpoint": _of_checkpoint,
        "Layout": _of_layout,
        "Optimizer": _of_optimizer,
        "Offload": _of_offload,
        "Source": _of_source,
    }
    find = between.get(gin_name(type(values)))
    return {**within, **(find(config, scope) if find else {})}


def _folder(config: Config, scope: str) -> str:
    """The folder of weights that settings of a module come from; "" for none."""
    return config.pretrained(scope) if scope in config.modules else ""


def _frozen(config: Config, module: str) -> bool:
    """Whether a module, its projector and its adapters are all frozen."""
    parts = (module, projector_name(module), lora_name(module))
    return all(config.optimizers[part].frozen for part in parts if part in config.optimizers)


def _of_train(config: Config, _: str) -> Reasons:
    train, reasons = config.train, dict[str, str]()
    if train.schedule not in NESTING:
        reasons["inner"] = f"Train.schedule={train.schedule!r} nests none; it belongs to {NESTING[0]!r}"
    if train.schedule not in WINDOWED:
        reasons["window"] = f"Train.schedule={train.schedule!r} has none; it belongs to {WINDOWED[0]!r}"
    if not train.eval_samples:
        reasons |= dict.fromkeys(("eval_every", "predictions"), "Train.eval_samples=0 skips evaluation")
    if config.world.platform == "cpu":
        reasons["deterministic"] = "the kernels of World.platform='cpu' repeat bit for bit in any case"
    return reasons


def _of_world(config: Config, _: str) -> Reasons:
    layouts, reasons = config.layouts.values(), dict[str, str]()
    if config.world.warm_up == "off":
        reasons["warm_up_seconds"] = "World.warm_up='off' tries nothing"
    if len({layout.ranks for layout in layouts}) == 1 == max(layout.pp for layout in layouts):
        reasons["transport"] = "all modules share their ranks, and nothing crosses to others"
        if max(layout.size for layout in layouts) == 1:
            reasons["route"] = "one device sends nothing"
    return reasons


def _of_data(config: Config, _: str) -> Reasons:
    data, reasons = config.data, dict[str, str]()
    if not data.workers:
        reasons["prefetch"] = "Data.workers=0 prepares batches in this process, one at a time"
    if data.servers and data.fallback == "error":
        reasons |= dict.fromkeys(("workers", "prefetch"), "Data.servers prepare the batches")
    if not data.servers:
        names = ("fallback", "patience", "token_file", "tls_ca")
        reasons |= dict.fromkeys(names, "there are no Data.servers")
    if data.sources:
        reasons |= dict.fromkeys(("task", "folder", "max_pixels"), "samples come from Data.sources")
    elif data.task != "folder":
        reasons |= dict.fromkeys(
            ("folder", "max_pixels"), f"Data.task={data.task!r} reads no folder; set it to 'folder'"
        )
        reasons["cache"] = f"Data.task={data.task!r} keeps no metadata"
        names = ("require_same", "max_broken")
        reasons |= dict.fromkeys(names, f"the samples of Data.task={data.task!r} are always the same, and whole")
    return reasons


def _of_checkpoint(config: Config, _: str) -> Reasons:
    starts = (config.init_from(module) or config.pretrained(module) for module in config.optimizers)
    frozen = (module for module, optimizer in config.optimizers.items() if optimizer.frozen)
    if any(start for start in starts) and any(True for _ in frozen):
        return {}
    return {"copy_frozen": "no frozen module starts with parameters of a folder"}


def _of_layout(config: Config, module: str) -> Reasons:
    layout: Layout = config.layouts[module]
    if layout.optimizer_instances > 1 and _frozen(config, module):
        return {"optimizer_instances": f"{module} is frozen, and has neither masters nor moments"}
    return {}


def _of_optimizer(config: Config, module: str) -> Reasons:
    projectors = map(projector_name, config.model.media)
    return {"layer_decay": "a projector has no layers"} if module in projectors else {}


def _of_offload(config: Config, module: str) -> Reasons:
    if not _frozen(config, module):
        return {}
    reasons = {"optimizer": f"{module} is frozen, and has neither masters nor moments"}
    if module != LLM:
        reasons["activations"] = f"{module} and its projector are frozen, and keep nothing for a backward"
    return reasons


def _of_source(config: Config, _: str) -> Reasons:
    media = {config.modules[name].medium for name in config.model.media}
    return {} if "recording" in media else {"max_seconds": "no encoder hears recordings"}
