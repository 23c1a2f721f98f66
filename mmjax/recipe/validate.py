"""Checks between the parts of a `Recipe`. Each dataclass checks its own fields in `__post_init__`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mmjax.attention.settings import AUTO, LIBRARIES
from mmjax.configurable import ConfigError, divides, gin_name, nearest_divisor, require
from mmjax.data.sources.config import FOLDER
from mmjax.mesh.layout import SPANNING, Layout, cell_count
from mmjax.models.config import LLM, lora_name, require_layers
from mmjax.models.projector.config import ProjectorConfig
from mmjax.pipeline.config import OFFLOAD_KINDS
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.recipe.best import check_best
from mmjax.recipe.exportable import export_advice
from mmjax.recipe.graph import check_graph
from mmjax.recipe.idle import idle_lines
from mmjax.recipe.positions import positions_of
from mmjax.recipe.ranks import check_ranks, show_ranks
from mmjax.recipe.recipe import Recipe
from mmjax.recipe.specs import ModuleSpec
from mmjax.recipe.train_config import DTYPES
from mmjax.schedule.schedules import LANED, NESTING, OFFLOADING, ONE_F_ONE_B, STASHING, WINDOWED
from mmjax.user_code import import_named, require_allowed

MOST_DEVICES = 1 << 16
"""The most devices that layouts may need if `World.devices` is not set."""
_SHARDED = ("heads", "kv_heads", "mlp", "width")
"""Fields of a module's settings whose sizes tp divides."""


def validate(recipe: Recipe, *, trained: bool = True) -> None:
    """Checks that the parts of `recipe` agree with one another, before any device is touched.

    Args:
      recipe: the configuration.
      trained: whether it will be trained, so that some module must not be frozen.

    Raises:
      ConfigError: one line that names the field, its value and a legal one.
    """
    _check_code(recipe)
    _check_modules(recipe)
    _check_mask(recipe)
    _check_templates(recipe)
    _check_callbacks(recipe)
    frozen = trained and len(recipe.model.frozen) == len(recipe.model.parts)
    fix = "every module is frozen; set it to False for one of them"
    require(not frozen, f"{LLM}/Optimizer.frozen", value=True, fix=fix)
    for module, layout in recipe.model.layouts.items():
        _check_degrees(module, layout, recipe)
    _check_size(recipe)
    _check_attention(recipe)
    _check_batch(recipe)
    _check_warmup(recipe)
    check_best(recipe)
    _check_lanes(recipe)
    _check_copies(recipe)
    check_ranks(recipe)
    _check_offload(recipe)
    if recipe.train.lowering == "single":
        _check_one_program(recipe)
    check_devices(recipe, recipe.world.devices or recipe.devices)


def require_targets(recipe: Recipe) -> None:
    """Requires that samples have something to draw, or to speak, for every trained generator. Raises ConfigError."""
    drawn, spoken, drawing_fix = recipe.data.drawn, recipe.data.spoken, recipe.data.origin.drawing_fix
    for name in recipe.model.generators:
        speaks = name in recipe.model.talkers
        targets, lacking = (spoken, "codes") if speaks else (drawn, "picture")
        is_idle = name not in targets and not recipe.model.optimizers[name].frozen
        fixes = ["leave it out", f"set {name}/Optimizer.frozen to True"]
        fixes += [drawing_fix] if drawing_fix and not drawn and not speaks else []
        fixes += [f"Data.speaker to {name!r}"] if speaks and targets else []
        use = f"{lacking} for {name!r} to {'speak' if speaks else 'draw'}"
        fix = f"the data have no {use}, so it would learn nothing; {', or '.join(fixes)}"
        require(not is_idle, "Model.generators", recipe.model.config.generators, fix)


def _check_code(recipe: Recipe) -> None:
    """Requires `allow_code` for settings that name code, before any of it is imported."""
    for scope, values in recipe.walk():
        for field in fields(values):
            if field.metadata.get("code"):
                name = f"{scope}/{gin_name(type(values))}.{field.name}".removeprefix("/")
                value = getattr(values, field.name)
                for item in value.values() if isinstance(value, dict) else (value,):
                    require_allowed(name, item, allowed=recipe.allow_code)


def _check_size(recipe: Recipe) -> None:
    """Refuses layouts larger than any cluster, before memory is allocated for each of their ranks."""
    most = max(recipe.world.devices, MOST_DEVICES)
    for module, layout in recipe.model.layouts.items():
        if layout.end > most:
            degrees = {name: getattr(layout, name) for name in (*SPANNING, "rank_offset")}
            name = max(degrees, key=lambda name: degrees[name])
            fix = f"needs {layout.end} devices, more than {most}; use less, or name so many with World.devices"
            raise ConfigError(f"{module}/Layout.{name}={degrees[name]}: {fix}")


def advise(recipe: Recipe) -> tuple[str, ...]:
    """Lines about settings that were changed to fit a flag, that waste devices or rows, or that change nothing.

    And one where an export could not be one folder of a whole model. They are for people: "Train.global_batch=6: …".
    """
    lines = list(recipe.fitted)
    cells = cell_count(recipe.model.layouts.values())
    rows = recipe.train.global_batch // recipe.train.microbatches
    if rows % cells:
        padded = -(-rows // cells) * cells
        lines.append(
            f"Train.global_batch={recipe.train.global_batch}: microbatches of {rows} rows are padded to {padded}, "
            f"a multiple of all modules' dp; {padded * recipe.train.microbatches} wastes none"
        )
    for name, layout in recipe.model.layouts.items():
        if idle := -recipe.train.microbatches % layout.lanes:
            lines.append(
                f"{name}/Layout.lanes={layout.lanes}: {idle} lane(s) have a microbatch less than the others; "
                f"Train.microbatches={recipe.train.microbatches + idle} keeps all busy"
            )
        if layout.copies > 1 and recipe.train.schedule not in OFFLOADING:
            lines.append(
                f"{name}/Layout.copies={layout.copies}: under Train.schedule={recipe.train.schedule!r} all stages of "
                f"the {LLM} wait for each other at every op of {name}; {OFFLOADING[-1]!r} runs these one after another"
            )
    for name in recipe.model.adapted:
        rank = recipe.model[name].lora.settings.rank
        if not recipe.model[name].optimizer.frozen:
            lines.append(
                f"{name}/Lora.rank={rank}: {name} is trained too; {name}/Optimizer.frozen=True trains adapters alone"
            )
    most, length = positions_of(recipe), recipe.data.settings.sequence_length
    if 0 < most < length:
        lines.append(
            f"Data.sequence_length={length}: {recipe.model.folder(LLM)} was made for {most} tokens "
            f"(max_position_embeddings); longer samples are trained at positions that it does not know"
        )
    if recipe.data.settings.new_tokens and recipe.model.optimizers[LLM].frozen:
        lines.append(
            f"{LLM}/Optimizer.frozen=True: rows of Data.new_tokens={recipe.data.settings.new_tokens} are not trained"
        )
    used = set(itertools.chain.from_iterable(layout.ranks for layout in recipe.model.layouts.values()))
    idle = sorted(set(range(recipe.world.devices or recipe.devices)) - used)
    if idle:
        lines.append(f"World.devices={recipe.world.devices}: no layout uses {show_ranks(idle)}")
    return (*lines, *export_advice(recipe), *idle_lines(recipe))


def check_devices(recipe: Recipe, available: int, alternative: tuple[Path, int] | None = None) -> None:
    """Requires that the number of available devices is enough for the layouts.

    Args:
      recipe: the configuration.
      available: number of devices.
      alternative: a gin file that fits, and the number of devices that it needs; for the message.

    Raises:
      ConfigError: the layouts need more devices; the message names flags that fit.
    """
    if available >= recipe.devices:
        return
    fixes = [f"--gin.World.devices={recipe.devices}" if recipe.world.devices else "smaller layouts"]
    if recipe.world.platform != "cpu" and not recipe.world.devices:
        fixes.append(f"--gin.World.platform=cpu for {recipe.devices} virtual devices")
    if alternative:
        fixes.append(f"--gin_file={alternative[0]} (needs {alternative[1]})")
    layouts = "; ".join(f"{module} {layout.describe()}" for module, layout in recipe.model.layouts.items())
    problem = f"the layouts need {recipe.devices} devices, not {available} ({layouts})"
    raise ConfigError(f"World.devices={recipe.world.devices}: {problem}; use {', or '.join(fixes)}")


def _check_modules(recipe: Recipe) -> None:
    """The data have the encoders' and the generators' media, and projectors fit the modules that they connect."""
    check_graph(recipe)
    media = {name: node.settings.medium for name, node in recipe.model.nodes.items() if name in recipe.model.media}
    encoder_media, generator_media = (
        {name: media[name] for name in names if name in media}
        for names in (recipe.model.encoders, recipe.model.generators)
    )
    recipe.data.check_modules(encoder_media, generator_media)
    for name, projector in recipe.model.projectors.items():
        _check_projector(recipe, recipe.model[name], projector.settings)
    for name in recipe.model.adapted:
        adapters = lora_name(name)
        path = recipe.model[name].lora.weights.path
        fix = f"name a folder of PEFT in {name}/Lora.path, or a run in {adapters}/Weights.init_from"
        require(not path, f"{adapters}/Weights.path", path, fix)


def _check_projector(recipe: Recipe, node: ModuleSpec, projector: ProjectorConfig) -> None:
    """The layers that a projector's tokens enter exist, and rows of its tiles have a token where they may."""
    name, llm = node.name, recipe.model.llm.settings
    fix = "a generator takes what the LLM ends with; set it to ()"
    require(node.role == "encoder" or not projector.inject, f"{name}/Projector.inject", projector.inject, fix)
    fix = "belongs to the tiles of images that an encoder sees; set it to False"
    tiled = node.role == "encoder" and node.settings.medium == "image"
    require(tiled or not projector.newline, f"{name}/Projector.newline", projector.newline, fix)
    sections = _llm_field(recipe, "rope_sections")
    fix = f"is no token of an image's rows and columns, which {sections} counts; set one of both"
    has_sections = getattr(llm, "rope_sections", ())
    require(not (projector.newline and has_sections), f"{name}/Projector.newline", projector.newline, fix)
    most = llm.layers - 1
    legal = (0, most) if most else (0,)
    fix = f"the LLM has layers 0 to {most} ({_llm_field(recipe, 'layers')}={most + 1}); use {legal}"
    require(all(at <= most for at in projector.inject), f"{name}/Projector.inject", projector.inject, fix)
    most = node.settings.layers - 1
    fix = f"{name} has layers 0 to {most}; use numbers of these"
    require(all(at <= most for at in projector.levels), f"{name}/Projector.levels", projector.levels, fix)


def _check_mask(recipe: Recipe) -> None:
    """Requires that the LLM's mask names no kinds of tokens that the model does not have."""
    llm = recipe.model.llm.settings
    if hasattr(llm, "check_media"):
        llm.check_media(recipe.model.media, _llm_field(recipe, "mask"))


def _check_templates(recipe: Recipe) -> None:
    for name, source in recipe.data.sources.items():
        fix = "Data.tokenizer='' names no folder with a chat template; set it, or name a template, such as 'chatml'"
        legal = source.template != FOLDER or bool(recipe.data.settings.tokenizer)
        require(legal, f"{name}/Source.template", source.template, fix)


def _check_callbacks(recipe: Recipe) -> None:
    """Requires that callbacks can be imported, and that a module with `projected` has a projector."""
    for module, callbacks in ((name, node.callbacks) for name, node in recipe.model.nodes.items()):
        fix = f"the {LLM} has no projector; use {module}/Callbacks.after"
        require(module != LLM or not callbacks.projected, f"{module}/Callbacks.projected", callbacks.projected, fix)
        for name, value in callbacks.names.items():
            import_named(f"{module}/Callbacks.{name}", value)


def _check_degrees(module: str, layout: Layout, recipe: Recipe) -> None:
    require(layout.ep == 1, f"{module}/Layout.ep", layout.ep, "is not supported yet; set it to 1")
    require_layers(module, recipe.model[module].settings.layers, layout)
    sizes = sharded_sizes(recipe, module)
    legal = nearest_divisor(layout.tp, math.gcd(*sizes.values()))
    replicable = getattr(recipe.model[module].settings, "replicable", ())
    for name, size in sizes.items():
        replicated = name.rpartition(".")[2] in replicable and layout.tp % size == 0
        fix = f"must divide {name} ({size}); use {legal}"
        require(size % layout.tp == 0 or replicated, f"{module}/Layout.tp", layout.tp, fix)
    heads = getattr(recipe.model[module].settings, "heads", 0) // layout.tp
    fix = f"cp={layout.cp} does not divide the {heads} query heads of a tp rank; use 'gather' or 'ring'"
    legal = layout.cp == 1 or layout.cp_way != "all-to-all" or heads % layout.cp == 0
    require(legal, f"{module}/Layout.cp_way", layout.cp_way, fix)


def _check_attention(recipe: Recipe) -> None:
    """Requires that the attention kernels of each module take the run's dtype and run on its platform."""
    dtype, platform = recipe.train.dtype, recipe.world.platform
    for module, node in recipe.model.nodes.items():
        settings, layout = node.settings, node.layout
        kernel = getattr(settings, "attention", "")
        name = f"{module}/{gin_name(type(settings))}.attention"
        if kernel not in LIBRARIES:
            fix = f"is for whole rows, and {module}/Layout.cp is {layout.cp}; set it to {AUTO!r} or 'blockwise'"
            require(layout.cp == 1 or kernel != "dense", name, kernel, fix)
            continue
        library = LIBRARIES[kernel]
        fix = f"with {module}/Layout.cp={layout.cp}, {library.name} needs Layout.cp_way="
        fix += f"{' or '.join(map(repr, library.cp_ways))}, not {layout.cp_way!r}; set one, or {name} to {AUTO!r}"
        require(layout.cp == 1 or layout.cp_way in library.cp_ways, name, kernel, fix)
        fix = f"or {AUTO!r}, which takes what there is"
        dtypes = " or ".join(repr(name) for name in DTYPES if name in library.dtypes)
        problem = f"{library.name} does not compute in Train.dtype={dtype!r}; use {dtypes} there, {fix}"
        require(dtype in library.dtypes, name, kernel, problem)
        problem = (
            f"{library.name} runs on {library.devices} and World.platform is {platform!r}; use 'cuda' there, {fix}"
        )
        require(platform in ("", "cuda"), name, kernel, problem)


def _check_lanes(recipe: Recipe) -> None:
    """Lanes are for encoders and generators, under schedules that know them, with a program for every op."""
    schedule = recipe.train.schedule
    for module, layout in ((name, layout) for name, layout in recipe.model.layouts.items() if layout.lanes > 1):
        field = f"{module}/Layout.lanes"
        fix = f"the {LLM} is a pipeline, and lanes are for encoders and generators; set it to 1"
        require(module != LLM, field, layout.lanes, fix)
        fix = f"Train.schedule={schedule!r} has no place for lanes; set it to 1, or the schedule to {LANED[-1]!r}"
        require(schedule in LANED, field, layout.lanes, fix)
        fix = "Train.lowering='single' has no lanes; set it to 1, or Train.lowering to 'auto'"
        require(recipe.train.lowering != "single", field, layout.lanes, fix)
        fix = f"the parameters of lanes stay on their devices; set it to False, or {field} to 1"
        require(not recipe.model[module].offload.parameters, f"{module}/Offload.parameters", value=True, fix=fix)
    if schedule in NESTING:
        _check_nested(recipe)


def _check_copies(recipe: Recipe) -> None:
    """Copies are of encoders, one on each stage submesh of the LLM, with a program for every op."""
    llm = recipe.model.llm.layout
    for module, layout in ((name, layout) for name, layout in recipe.model.layouts.items() if layout.copies > 1):
        field = f"{module}/Layout.copies"
        fix = "copies are of encoders, whose features are computed several times and counted once; set it to 1"
        require(module in recipe.model.encoders, field, layout.copies, fix)
        fix = f"every pipeline stage of the {LLM} has a copy; set it to {llm.pp}, {LLM}/Layout.pp"
        require(layout.copies == llm.pp, field, layout.copies, fix)
        ranks = f"its {show_ranks(layout.ranks)} are not the {show_ranks(llm.ranks)} of the {LLM}"
        fix = f"{ranks}; give it the same rank_offset, and copies·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, field, layout.copies, fix)
        fix = "Train.lowering='single' has no copies; set it to 1, or Train.lowering to 'auto'"
        require(recipe.train.lowering != "single", field, layout.copies, fix)


def _check_nested(recipe: Recipe) -> None:
    """At least one encoder or generator has lanes, and each with lanes has exactly the ranks of the LLM."""
    schedule, llm = recipe.train.schedule, recipe.model.llm.layout
    media_modules = [name for name in recipe.model.layouts if name != LLM]
    fix_schedule = f"has no module with lanes to nest; set Train.schedule to {ONE_F_ONE_B!r}"
    require(bool(media_modules), "Train.schedule", schedule, fix_schedule)
    require(llm.pp > 1, "Train.schedule", schedule, f"has no pipeline to nest in; set {LLM}/Layout.pp above 1")
    lanes = {name: recipe.model[name].layout.lanes for name in media_modules}
    fix = f"Train.schedule={schedule!r} wants a module with lanes; set it to {llm.pp}, {LLM}/Layout.pp"
    require(max(lanes.values()) > 1, f"{media_modules[0]}/Layout.lanes", 1, fix)
    for module in (name for name in media_modules if lanes[name] > 1):
        layout = recipe.model[module].layout
        ranks = f"its {show_ranks(layout.ranks)} are not the {show_ranks(llm.ranks)} of the {LLM} that it is nested in"
        fix = f"{ranks}; give it the same rank_offset, and lanes·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, f"{module}/Layout.lanes", layout.lanes, fix)


def _llm_field(recipe: Recipe, name: str) -> str:
    """A setting of the LLM, such as "llm/Decoder.width"."""
    return f"{LLM}/{gin_name(type(recipe.model.llm.settings))}.{name}"


def sharded_sizes(recipe: Recipe, module: str) -> dict[str, int]:
    """The sizes of a module that tp must divide, by setting: {"llm/Decoder.heads": 32}.

    Args:
      recipe: the configuration.
      module: name of a node; sizes of its projector, or of projectors that inject into the LLM, are there too.
    """
    values = recipe.model[module].settings
    prefix = f"{module}/{gin_name(type(values))}"
    sizes = {f"{prefix}.{name}": getattr(values, name) for name in _SHARDED if hasattr(values, name)}
    # The LLM's stages hold the parts of projectors that inject tokens into its layers.
    for name, part in recipe.model.projectors.items():
        projector = part.settings
        is_here = bool(projector.inject) if module == LLM else name == module
        if not is_here or projector.kind == "linear":  # tp does not split it
            continue
        hidden = projector.hidden
        field = f"{name}/Projector.hidden" if hidden else _llm_field(recipe, "width")
        sizes[field] = hidden or recipe.model.llm.settings.width
    return sizes


def _check_batch(recipe: Recipe) -> None:
    train = recipe.train
    divides("Train.microbatches", train.microbatches, train.global_batch, "Train.global_batch")


def _check_warmup(recipe: Recipe) -> None:
    steps = recipe.train.steps
    if recipe.train.epochs:
        return  # `epochs.with_steps` checks it once the number of steps is known
    for module, optimizer in recipe.model.optimizers.items():
        fix = f"must be below Train.steps ({steps}), such as {steps // 10}"
        require(optimizer.frozen or optimizer.warmup < steps, f"{module}/Optimizer.warmup", optimizer.warmup, fix)


def _check_offload(recipe: Recipe) -> None:
    """Parameters and activations can be offloaded only while an encoder waits between its F and its B."""
    llm = recipe.model.llm.layout
    for module, node in recipe.model.nodes.items():
        if node.offload.activations:
            of_llm = f"the {LLM}'s microbatches do not wait between forward and backward"
            of_generator = "a generator's backward follows its forward at once"
            _check_wait(recipe, node, "activations", (of_llm, of_generator), STASHING)
            fix = f"without lanes it runs beside the {LLM} and keeps little; set it to False, or {module}/Layout.lanes"
            is_busy = node.layout.lanes > 1 or recipe.train.schedule not in NESTING
            require(is_busy, f"{module}/Offload.activations", value=True, fix=f"{fix} to {llm.pp}")
    for node in recipe.model.nodes.values():
        if node.offload.parameters:
            of_llm = f"the {LLM}'s parameters are read all the time"
            of_generator = "a generator runs between others' ops under every schedule"
            _check_wait(recipe, node, "parameters", (of_llm, of_generator), OFFLOADING)


def _check_wait(recipe: Recipe, node: ModuleSpec, kind: str, never: tuple[str, str], schedules: Sequence[str]) -> None:
    """Requires that a node waits under the schedule, so that something of it may be offloaded.

    Args:
      recipe: the configuration.
      node: the node.
      kind: the field of ``OffloadConfig`` that is set.
      never: the reasons why the LLM and generators do not wait.
      schedules: those under which encoders wait.
    """
    schedule, llm = recipe.train.schedule, recipe.model.llm.layout
    field, no = f"{node.name}/Offload.{kind}", "set it to False"
    for role, reason in zip(("llm", "generator"), never, strict=True):
        require(node.role != role, field, value=True, fix=f"{reason}; {no}")
    fix = f"Train.schedule={schedule!r} leaves no time for it; {no}, or the schedule to {schedules[0]!r}"
    require(schedule in schedules, field, value=True, fix=fix)
    shares = not set(node.layout.ranks).isdisjoint(llm.ranks)
    fix = f"shares no rank with {LLM} and so has no phase of its own; {no}, or {node.name}/Layout.rank_offset to"
    require(shares or schedule not in WINDOWED, field, value=True, fix=f"{fix} {llm.rank_offset}")


def _check_one_program(recipe: Recipe) -> None:
    lane_layout(recipe.model.layouts)
    for module, layout in recipe.model.layouts.items():
        # XLA's permutations need all devices of a program; its branches run on some of them.
        fix = "Train.lowering='single' has no rings; set it to False, or Train.lowering to 'auto'"
        require(not layout.overlap, f"{module}/Layout.overlap", layout.overlap, fix)
        fix = "under Train.lowering='single' ranks cannot send to one another; use 'gather', or Train.lowering='auto'"
        sends = layout.cp > 1 and layout.cp_way in ("need", "ring")
        require(not sends, f"{module}/Layout.cp_way", layout.cp_way, fix)
    fix = "keeps everything on its devices; set it to False, or Train.lowering to 'ops'"
    for module, node in recipe.model.nodes.items():
        for name in OFFLOAD_KINDS:
            field = f"{module}/Offload.{name}"
            require(not getattr(node.offload, name), field, value=True, fix=f"Train.lowering='single' {fix}")
