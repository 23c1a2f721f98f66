"""Names the settings that change nothing in a configuration, each with the setting that switches it off.

A dataclass may have a method `idle`, which names the settings that others of its settings switch off. This module knows
how parts of a configuration switch off settings of one another. Defaults and values of a preset are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmjax.configurable import gin_name, preset_values
from mmjax.fields import fields_of
from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.specs import ProjectorSpec

Reasons = Mapping[str, str]
"""The reason why nothing reads a setting, by field of a dataclass."""


def idle_lines(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each setting that changes nothing: "Data.prefetch=4 changes nothing: …".

    A value that several modules share was set for all of them, so it is reported only if no module reads it.
    """
    places_of: dict[tuple[type[Any], str, str], list[tuple[str, str]]] = {}
    for scope, values in recipe.walk():
        cls, reasons = type(values), _reasons(recipe, scope, values)
        preset = preset_values(cls, getattr(values, "preset", ""))
        for name, info in fields_of(cls).items():
            value = getattr(values, name)
            if value not in (info.default, preset.get(name, info.default)):
                places_of.setdefault((cls, name, repr(value)), []).append((scope, reasons.get(name, "")))
    for (cls, name, value), places in places_of.items():
        if all(reason for _, reason in places):
            scope, reason = places[0]
            yield f"{scope}/{gin_name(cls)}.{name}={value} changes nothing: {reason}".removeprefix("/")


def _reasons(recipe: Recipe, scope: str, values: Any) -> Reasons:
    """The settings of one object that nothing reads."""
    if scope and _folder(recipe, scope):  # the settings come from a folder of weights
        return {}
    within = values.idle() if hasattr(values, "idle") else {}
    between = {
        "Train": _of_train,
        "World": _of_world,
        "Data": _of_data,
        "Checkpoint": _of_checkpoint,
        "Layout": _of_layout,
        "Decoder": _of_decoder,
        "Optimizer": _of_optimizer,
        "Offload": _of_offload,
        "Source": _of_source,
    }
    find = between.get(gin_name(type(values)))
    return {**within, **(find(recipe, scope) if find else {})}


def _folder(recipe: Recipe, scope: str) -> str:
    """The folder of weights that settings of a module come from; "" for none."""
    return recipe.model.folder(scope) if scope in recipe.model.nodes else ""


def _frozen(recipe: Recipe, module: str) -> bool:
    """Whether a module, its projector and its adapters are all frozen."""
    return all(part.optimizer.frozen for part in recipe.model.parts_of(module).values())


def _of_train(recipe: Recipe, _: str) -> Reasons:
    on_cpu = recipe.world.platform == "cpu"
    return {"deterministic": "the kernels of World.platform='cpu' repeat bit for bit in any case"} if on_cpu else {}


def _of_world(recipe: Recipe, _: str) -> Reasons:
    layouts, reasons = recipe.model.layouts.values(), dict[str, str]()
    if len({layout.ranks for layout in layouts}) == 1 == max(layout.pp for layout in layouts):
        reasons["transport"] = "all modules share their ranks, and nothing crosses to others"
        if max(layout.size for layout in layouts) == 1:
            reasons["route"] = "one device sends nothing"
    return reasons


def _of_data(recipe: Recipe, _: str) -> Reasons:
    data, reasons = recipe.data.settings, dict[str, str]()
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


def _of_checkpoint(recipe: Recipe, _: str) -> Reasons:
    starts = (recipe.init_from(part) or recipe.model.folder(part) for part in recipe.model.parts)
    if any(start for start in starts) and recipe.model.frozen:
        return {}
    return {"copy_frozen": "no frozen module starts with parameters of a folder"}


def _of_layout(recipe: Recipe, module: str) -> Reasons:
    layout: Layout = recipe.model[module].layout
    reasons = {}
    if layout.tp == 1 or not recipe.model.sizes(module).experts:
        reasons["expert_tp"] = "no ranks of tp share experts"
    if not _frozen(recipe, module):
        return reasons
    if layout.optimizer_instances > 1 and layout.shard != "parameters":
        reasons["optimizer_instances"] = f"{module} is frozen, and has neither masters nor moments"
    if layout.shard == "gradients":
        reasons["shard"] = f"{module} is frozen, and has no gradients"
    return reasons


def _of_decoder(recipe: Recipe, module: str) -> Reasons:
    layout: Layout = recipe.model[module].layout
    if layout.ep > 1 and layout.ep_way == "all-to-all":
        return {}
    return {"expert_buffer": "no ranks send tokens to experts of others by Layout.ep_way='all-to-all'"}


def _of_optimizer(recipe: Recipe, module: str) -> Reasons:
    is_projector = isinstance(recipe.model.parts[module], ProjectorSpec)
    return {"layer_decay": "a projector has no layers"} if is_projector else {}


def _of_offload(recipe: Recipe, module: str) -> Reasons:
    if not _frozen(recipe, module):
        return {}
    reasons = {"optimizer": f"{module} is frozen, and has neither masters nor moments"}
    if module != LLM:
        reasons["activations"] = f"{module} and its projector are frozen, and keep nothing for a backward"
    return reasons


def _of_source(recipe: Recipe, _: str) -> Reasons:
    media = {recipe.model[name].settings.medium for name in recipe.model.media}
    reasons = {} if "recording" in media else {"max_seconds": "no encoder hears recordings"}
    if not any(getattr(recipe.model[name].settings, "references", 0) for name in recipe.model.generators):
        why = "no generator of the model makes pictures from others; set painter/MMDiT.references to 1"
        reasons |= dict.fromkeys(("reference_size", "reference_pixels"), why)
    if set(recipe.model.generators) <= set(recipe.model.talkers):
        reasons |= dict.fromkeys(("drawn_size", "drawn_pixels"), "no generator of the model makes pictures")
    elif all(recipe.model[name].latents.path for name in set(recipe.model.generators) - set(recipe.model.talkers)):
        sizes = ("drawn_size", "drawn_pixels", "reference_size", "reference_pixels")
        reasons |= dict.fromkeys(sizes, "latents have the sizes with which they were made")
    return reasons
