"""Checks between the parts of a `Config`. Each dataclass checks its own fields in `__post_init__`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from mmjax.attention.settings import AUTO, LIBRARIES
from mmjax.checkpoint.config import WeightsConfig
from mmjax.config.best import check_best
from mmjax.config.exportable import export_advice
from mmjax.config.from_folder import positions_of
from mmjax.config.idle import idle_lines
from mmjax.config.schema import DTYPES, Config
from mmjax.configurable import ConfigError, divides, gin_name, nearest_divisor, require
from mmjax.data.sources.config import FOLDER
from mmjax.mesh.layout import SPANNING, Layout, cell_count
from mmjax.models.config import LLM, lora_name, projector_name, require_layers
from mmjax.pipeline.config import OFFLOAD_KINDS, OffloadConfig
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.schedule.schedules import LANED, NESTING, OFFLOADING, ONE_F_ONE_B, STASHING, WINDOWED
from mmjax.user_code import import_named, require_allowed

MOST_DEVICES = 1 << 16
"""The most devices that layouts may need if `World.devices` is not set."""
_SHARDED = ("heads", "kv_heads", "mlp", "width")
"""Fields of a module's settings whose sizes tp divides."""


def validate(config: Config, *, trained: bool = True) -> None:
    """Checks that the parts of `config` agree with one another, before any device is touched.

    Args:
      config: the configuration.
      trained: whether it will be trained, so that some module must not be frozen.

    Raises:
      ConfigError: one line that names the field, its value and a legal one.
    """
    _check_code(config)
    _check_modules(config)
    _check_mask(config)
    _check_templates(config)
    _check_callbacks(config)
    frozen = trained and all(optimizer.frozen for optimizer in config.optimizers.values())
    fix = "every module is frozen; set it to False for one of them"
    require(not frozen, f"{LLM}/Optimizer.frozen", value=True, fix=fix)
    for module, layout in config.layouts.items():
        _check_degrees(module, layout, config)
    _check_size(config)
    _check_attention(config)
    _check_batch(config)
    _check_warmup(config)
    check_best(config)
    _check_lanes(config)
    _check_copies(config)
    _check_ranks(config)
    _check_offload(config)
    if config.train.lowering == "single":
        _check_one_program(config)
    check_devices(config, config.world.devices or config.devices)


def require_targets(config: Config) -> None:
    """Requires that samples have something to draw for every trained generator. Raises ConfigError."""
    drawn, settings = config.data.drawn(config.task), config.data.origin.settings(config.task)
    for name in config.model.generators:
        is_idle = name not in drawn and not config.optimizers[name].frozen
        fixes = ["leave it out", f"set {name}/Optimizer.frozen to True"]
        fixes += ["Digits.draw to 1.0"] if settings and not drawn else []
        fix = f"the data have no picture for {name!r} to draw, so it would learn nothing; {', or '.join(fixes)}"
        require(not is_idle, "Model.generators", config.model.generators, fix)


def _check_code(config: Config) -> None:
    """Requires `allow_code` for settings that name code, before any of it is imported."""
    for scope, values in config.walk():
        for field in fields(values):
            if field.metadata.get("code"):
                name = f"{scope}/{gin_name(type(values))}.{field.name}".removeprefix("/")
                value = getattr(values, field.name)
                for item in value.values() if isinstance(value, dict) else (value,):
                    require_allowed(name, item, allowed=config.allow_code)


def _check_size(config: Config) -> None:
    """Refuses layouts larger than any cluster, before memory is allocated for each of their ranks."""
    most = max(config.world.devices, MOST_DEVICES)
    for module, layout in config.layouts.items():
        if layout.end > most:
            degrees = {name: getattr(layout, name) for name in (*SPANNING, "rank_offset")}
            name = max(degrees, key=lambda name: degrees[name])
            fix = f"needs {layout.end} devices, more than {most}; use less, or name so many with World.devices"
            raise ConfigError(f"{module}/Layout.{name}={degrees[name]}: {fix}")


def advise(config: Config) -> tuple[str, ...]:
    """A line for each setting that was changed to fit a flag, that wastes devices or rows, or that changes nothing."""
    lines = list(config.fitted)
    cells = cell_count(config.layouts.values())
    rows = config.train.global_batch // config.train.microbatches
    if rows % cells:
        padded = -(-rows // cells) * cells
        lines.append(
            f"Train.global_batch={config.train.global_batch}: microbatches of {rows} rows are padded to {padded}, "
            f"a multiple of all modules' dp; {padded * config.train.microbatches} wastes none"
        )
    for name, layout in config.layouts.items():
        if idle := -config.train.microbatches % layout.lanes:
            lines.append(
                f"{name}/Layout.lanes={layout.lanes}: {idle} lane(s) have a microbatch less than the others; "
                f"Train.microbatches={config.train.microbatches + idle} keeps all busy"
            )
        if layout.copies > 1 and config.train.schedule not in OFFLOADING:
            lines.append(
                f"{name}/Layout.copies={layout.copies}: under Train.schedule={config.train.schedule!r} all stages of "
                f"the {LLM} wait for each other at every op of {name}; {OFFLOADING[-1]!r} runs these one after another"
            )
    for name in config.loras:
        rank = config.lora(name).rank
        if rank and not config.optimizers[name].frozen:
            lines.append(
                f"{name}/Lora.rank={rank}: {name} is trained too; {name}/Optimizer.frozen=True trains adapters alone"
            )
    most, length = positions_of(config), config.data.sequence_length
    if 0 < most < length:
        lines.append(
            f"Data.sequence_length={length}: {config.pretrained(LLM)} was made for {most} tokens "
            f"(max_position_embeddings); longer samples are trained at positions that it does not know"
        )
    if config.data.new_tokens and config.optimizers[LLM].frozen:
        lines.append(f"{LLM}/Optimizer.frozen=True: rows of Data.new_tokens={config.data.new_tokens} are not trained")
    used = set(itertools.chain.from_iterable(layout.ranks for layout in config.layouts.values()))
    idle = sorted(set(range(config.world.devices or config.devices)) - used)
    if idle:
        lines.append(f"World.devices={config.world.devices}: no layout uses {_ranks(idle)}")
    return (*lines, *export_advice(config), *idle_lines(config))


def check_devices(config: Config, available: int, alternative: tuple[Path, int] | None = None) -> None:
    """Requires that the number of available devices is enough for the layouts.

    Args:
      config: the configuration.
      available: number of devices.
      alternative: a gin file that fits, and the number of devices that it needs; for the message.

    Raises:
      ConfigError: the layouts need more devices; the message names flags that fit.
    """
    if available >= config.devices:
        return
    fixes = [f"--gin.World.devices={config.devices}" if config.world.devices else "smaller layouts"]
    if config.world.platform != "cpu" and not config.world.devices:
        fixes.append(f"--gin.World.platform=cpu for {config.devices} virtual devices")
    if alternative:
        fixes.append(f"--gin_file={alternative[0]} (needs {alternative[1]})")
    layouts = "; ".join(f"{module} {layout.describe()}" for module, layout in config.layouts.items())
    problem = f"the layouts need {config.devices} devices, not {available} ({layouts})"
    raise ConfigError(f"World.devices={config.world.devices}: {problem}; use {', or '.join(fixes)}")


def _check_modules(config: Config) -> None:
    modules = config.modules
    encoder_media = {name: modules[name].medium for name in config.model.encoders}
    generator_media = {name: modules[name].medium for name in config.model.generators}
    config.data.check_modules(config.task, encoder_media, generator_media)
    for name in config.model.generators:
        field, fix = "Model.generators", f"is the name of an encoder; use another, such as '{name}2'"
        require(name not in config.model.encoders, field, name, fix)
        inject, fix = config.projectors[name].inject, "a generator takes what the LLM ends with; set it to ()"
        require(not inject, f"{name}/Projector.inject", inject, fix)
    for name, projector in config.projectors.items():
        fix = "belongs to the tiles of images that an encoder sees; set it to False"
        tiled = name in config.model.encoders and modules[name].medium == "image"
        require(tiled or not projector.newline, f"{name}/Projector.newline", projector.newline, fix)
        sections = _llm_field(config, "rope_sections")
        fix = f"is no token of an image's rows and columns, which {sections} counts; set one of both"
        has_sections = getattr(modules[LLM], "rope_sections", ())
        require(not (projector.newline and has_sections), f"{name}/Projector.newline", projector.newline, fix)
    for name, owner in itertools.permutations(config.model.media, 2):
        clash = name == projector_name(owner)
        fix = f"is the name of {owner}'s projector; use another, such as '{name}2'"
        require(not clash, f"Model.{'encoders' if name in config.model.encoders else 'generators'}", name, fix)
    for name, projector in config.projectors.items():
        most = modules[LLM].layers - 1
        legal = (0, most) if most else (0,)
        fix = f"the LLM has layers 0 to {most} ({_llm_field(config, 'layers')}={most + 1}); use {legal}"
        require(all(at <= most for at in projector.inject), f"{name}/Projector.inject", projector.inject, fix)
        most = modules[name].layers - 1
        fix = f"{name} has layers 0 to {most}; use numbers of these"
        require(all(at <= most for at in projector.levels), f"{name}/Projector.levels", projector.levels, fix)
    for name, owner in itertools.permutations(modules, 2):
        field = f"Model.{'encoders' if name in config.model.encoders else 'generators'}"
        fix = f"is the name of {owner}'s adapters; use another, such as '{name}2'"
        require(name != lora_name(owner), field, name, fix)
    for name, adapters in ((name, lora_name(name)) for name in config.loras):
        path = config.weights.get(adapters, WeightsConfig()).path
        fix = f"name a folder of PEFT in {name}/Lora.path, or a run in {adapters}/Weights.init_from"
        require(not path, f"{adapters}/Weights.path", path, fix)


def _check_mask(config: Config) -> None:
    """Requires that the LLM's mask names no kinds of tokens that the model does not have."""
    llm = config.modules[LLM]
    if hasattr(llm, "check_media"):
        llm.check_media(config.model.media, _llm_field(config, "mask"))


def _check_templates(config: Config) -> None:
    for name, source in config.sources.items():
        fix = "Data.tokenizer='' names no folder with a chat template; set it, or name a template, such as 'chatml'"
        legal = source.template != FOLDER or bool(config.data.tokenizer)
        require(legal, f"{name}/Source.template", source.template, fix)


def _check_callbacks(config: Config) -> None:
    """Requires that callbacks can be imported, and that a module with `projected` has a projector."""
    for module, callbacks in config.callbacks.items():
        fix = f"the {LLM} has no projector; use {module}/Callbacks.after"
        require(module != LLM or not callbacks.projected, f"{module}/Callbacks.projected", callbacks.projected, fix)
        for name, value in callbacks.names.items():
            import_named(f"{module}/Callbacks.{name}", value)


def _check_degrees(module: str, layout: Layout, config: Config) -> None:
    require(layout.ep == 1, f"{module}/Layout.ep", layout.ep, "is not supported yet; set it to 1")
    require_layers(module, config.modules[module].layers, layout)
    sizes = sharded_sizes(config, module)
    legal = nearest_divisor(layout.tp, math.gcd(*sizes.values()))
    replicable = getattr(config.modules[module], "replicable", ())
    for name, size in sizes.items():
        replicated = name.rpartition(".")[2] in replicable and layout.tp % size == 0
        fix = f"must divide {name} ({size}); use {legal}"
        require(size % layout.tp == 0 or replicated, f"{module}/Layout.tp", layout.tp, fix)
    heads = getattr(config.modules[module], "heads", 0) // layout.tp
    fix = f"cp={layout.cp} does not divide the {heads} query heads of a tp rank; use 'gather' or 'ring'"
    legal = layout.cp == 1 or layout.cp_way != "all-to-all" or heads % layout.cp == 0
    require(legal, f"{module}/Layout.cp_way", layout.cp_way, fix)


def _check_attention(config: Config) -> None:
    """Requires that the attention kernels of each module take the run's dtype and run on its platform."""
    dtype, platform = config.train.dtype, config.world.platform
    for module, settings in config.modules.items():
        kernel, layout = getattr(settings, "attention", ""), config.layouts[module]
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


def _check_lanes(config: Config) -> None:
    """Lanes are for encoders and generators, under schedules that know them, with a program for every op."""
    schedule = config.train.schedule
    for module, layout in ((name, layout) for name, layout in config.layouts.items() if layout.lanes > 1):
        field = f"{module}/Layout.lanes"
        fix = f"the {LLM} is a pipeline, and lanes are for encoders and generators; set it to 1"
        require(module != LLM, field, layout.lanes, fix)
        fix = f"Train.schedule={schedule!r} has no place for lanes; set it to 1, or the schedule to {LANED[-1]!r}"
        require(schedule in LANED, field, layout.lanes, fix)
        fix = "Train.lowering='single' has no lanes; set it to 1, or Train.lowering to 'auto'"
        require(config.train.lowering != "single", field, layout.lanes, fix)
        fix = f"the parameters of lanes stay on their devices; set it to False, or {field} to 1"
        offload = config.offloads.get(module, OffloadConfig())
        require(not offload.parameters, f"{module}/Offload.parameters", value=True, fix=fix)
    if schedule in NESTING:
        _check_nested(config)


def _check_copies(config: Config) -> None:
    """Copies are of encoders, one on each stage submesh of the LLM, with a program for every op."""
    llm = config.layouts[LLM]
    for module, layout in ((name, layout) for name, layout in config.layouts.items() if layout.copies > 1):
        field = f"{module}/Layout.copies"
        fix = "copies are of encoders, whose features are computed several times and counted once; set it to 1"
        require(module in config.model.encoders, field, layout.copies, fix)
        fix = f"every pipeline stage of the {LLM} has a copy; set it to {llm.pp}, {LLM}/Layout.pp"
        require(layout.copies == llm.pp, field, layout.copies, fix)
        ranks = f"its {_ranks(layout.ranks)} are not the {_ranks(llm.ranks)} of the {LLM}"
        fix = f"{ranks}; give it the same rank_offset, and copies·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, field, layout.copies, fix)
        fix = "Train.lowering='single' has no copies; set it to 1, or Train.lowering to 'auto'"
        require(config.train.lowering != "single", field, layout.copies, fix)


def _check_nested(config: Config) -> None:
    """At least one encoder or generator has lanes, and each with lanes has exactly the ranks of the LLM."""
    schedule, llm = config.train.schedule, config.layouts[LLM]
    media_modules = [name for name in config.layouts if name != LLM]
    fix_schedule = f"has no module with lanes to nest; set Train.schedule to {ONE_F_ONE_B!r}"
    require(bool(media_modules), "Train.schedule", schedule, fix_schedule)
    require(llm.pp > 1, "Train.schedule", schedule, f"has no pipeline to nest in; set {LLM}/Layout.pp above 1")
    lanes = {name: config.layouts[name].lanes for name in media_modules}
    fix = f"Train.schedule={schedule!r} wants a module with lanes; set it to {llm.pp}, {LLM}/Layout.pp"
    require(max(lanes.values()) > 1, f"{media_modules[0]}/Layout.lanes", 1, fix)
    for module in (name for name in media_modules if lanes[name] > 1):
        layout = config.layouts[module]
        ranks = f"its {_ranks(layout.ranks)} are not the {_ranks(llm.ranks)} of the {LLM} that it is nested in"
        fix = f"{ranks}; give it the same rank_offset, and lanes·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, f"{module}/Layout.lanes", layout.lanes, fix)


def _llm_field(config: Config, name: str) -> str:
    """A setting of the LLM, such as "llm/Decoder.width"."""
    return f"{LLM}/{gin_name(type(config.modules[LLM]))}.{name}"


def sharded_sizes(config: Config, module: str) -> dict[str, int]:
    """The sizes of a module that tp must divide, by setting."""
    values = config.modules[module]
    prefix = f"{module}/{gin_name(type(values))}"
    sizes = {f"{prefix}.{name}": getattr(values, name) for name in _SHARDED if hasattr(values, name)}
    # The LLM's stages hold the parts of projectors that inject tokens into its layers.
    projectors = [name for name, p in config.projectors.items() if p.inject] if module == LLM else [module]
    for name in projectors:
        if config.projectors[name].kind == "linear":  # tp does not split it
            continue
        hidden = config.projectors[name].hidden
        field = f"{name}/Projector.hidden" if hidden else _llm_field(config, "width")
        sizes[field] = hidden or config.modules[LLM].width
    return sizes


def _check_batch(config: Config) -> None:
    train = config.train
    divides("Train.microbatches", train.microbatches, train.global_batch, "Train.global_batch")


def _check_warmup(config: Config) -> None:
    steps = config.train.steps
    if config.train.epochs:
        return  # `epochs.with_steps` checks it once the number of steps is known
    for module, optimizer in config.optimizers.items():
        fix = f"must be below Train.steps ({steps}), such as {steps // 10}"
        require(optimizer.frozen or optimizer.warmup < steps, f"{module}/Optimizer.warmup", optimizer.warmup, fix)


def _check_ranks(config: Config) -> None:
    modules = [*(name for name in config.layouts if name != LLM), LLM]
    for first, second in itertools.combinations(modules, 2):
        a, b = config.layouts[first], config.layouts[second]
        if not _compatible(a, b):
            remaining = [layout for name, layout in config.layouts.items() if name != first]
            shared = range(max(a.rank_offset, b.rank_offset), min(a.end, b.end))
            raise ConfigError(
                f"{first}/Layout.rank_offset={a.rank_offset}: its {_ranks(a.ranks)} and {second}'s {_ranks(b.ranks)} "
                f"share {_ranks(shared)}; rank sets are equal, disjoint, or one is whole stages of the other: "
                f"use {_free_offset(a, remaining)}"
            )


def _check_offload(config: Config) -> None:
    """Parameters and activations can be offloaded only while an encoder waits between its F and its B."""
    schedule, llm = config.train.schedule, config.layouts[LLM]
    for module in (module for module, offload in config.offloads.items() if offload.activations):
        _check_stash(config, module)
    for module in (module for module, offload in config.offloads.items() if offload.parameters):
        field, no = f"{module}/Offload.parameters", "set it to False"
        fix = f"the {LLM}'s parameters are read all the time; {no}"
        require(module != LLM, field, value=True, fix=fix)
        fix = f"a generator runs between others' ops under every schedule; {no}"
        require(module not in config.model.generators, field, value=True, fix=fix)
        fix = f"Train.schedule={schedule!r} leaves no time for it; {no}, or the schedule to {OFFLOADING[0]!r}"
        require(schedule in OFFLOADING, field, value=True, fix=fix)
        shares = not set(config.layouts[module].ranks).isdisjoint(llm.ranks)
        fix = f"shares no rank with {LLM} and so has no phase of its own; {no}, or {module}/Layout.rank_offset to"
        require(shares or schedule not in WINDOWED, field, value=True, fix=f"{fix} {llm.rank_offset}")


def _check_stash(config: Config, module: str) -> None:
    """Activations can be offloaded only by encoders with lanes or a phase of their own."""
    schedule, layout, llm = config.train.schedule, config.layouts[module], config.layouts[LLM]
    field, no = f"{module}/Offload.activations", "set it to False"
    fix = f"the {LLM}'s microbatches do not wait between forward and backward; {no}"
    require(module != LLM, field, value=True, fix=fix)
    fix = f"a generator's backward follows its forward at once; {no}"
    require(module not in config.model.generators, field, value=True, fix=fix)
    fix = f"Train.schedule={schedule!r} leaves no time for it; {no}, or the schedule to {STASHING[0]!r}"
    require(schedule in STASHING, field, value=True, fix=fix)
    fix = f"without lanes it runs beside the {LLM} and keeps little; {no}, or {module}/Layout.lanes to {llm.pp}"
    require(layout.lanes > 1 or schedule not in NESTING, field, value=True, fix=fix)
    fix = f"shares no rank with {LLM} and so has no phase of its own; {no}, or {module}/Layout.rank_offset to"
    shares = not set(layout.ranks).isdisjoint(llm.ranks)
    require(shares or schedule not in WINDOWED, field, value=True, fix=f"{fix} {llm.rank_offset}")


def _check_one_program(config: Config) -> None:
    lane_layout(config.layouts)
    for module, layout in config.layouts.items():
        # XLA's permutations need all devices of a program; its branches run on some of them.
        fix = "Train.lowering='single' has no rings; set it to False, or Train.lowering to 'auto'"
        require(not layout.overlap, f"{module}/Layout.overlap", layout.overlap, fix)
        fix = "under Train.lowering='single' ranks cannot send to one another; use 'gather', or Train.lowering='auto'"
        sends = layout.cp > 1 and layout.cp_way in ("need", "ring")
        require(not sends, f"{module}/Layout.cp_way", layout.cp_way, fix)
    fix = "keeps everything on its devices; set it to False, or Train.lowering to 'ops'"
    for module, offload in config.offloads.items():
        for name in OFFLOAD_KINDS:
            field = f"{module}/Offload.{name}"
            require(not getattr(offload, name), field, value=True, fix=f"Train.lowering='single' {fix}")


def _compatible(a: Layout, b: Layout) -> bool:
    """Whether the rank sets are equal or disjoint, or one is a union of whole stages of the other."""
    disjoint = a.end <= b.rank_offset or b.end <= a.rank_offset
    return disjoint or _is_stages(a, b) or _is_stages(b, a)


def _is_stages(inner: Layout, outer: Layout) -> bool:
    """Whether the ranks of the first layout are whole stages of the second."""
    inside = outer.rank_offset <= inner.rank_offset and inner.end <= outer.end
    return inside and (inner.rank_offset - outer.rank_offset) % outer.stage_size == 0 == inner.size % outer.stage_size


def _free_offset(layout: Layout, fixed: Sequence[Layout]) -> int:
    """The offset that makes `layout` compatible with all fixed layouts: fewest devices first, then the nearest."""
    end = max(neighbour.end for neighbour in fixed)
    edges = {rank for neighbour in fixed for rank in (*map(neighbour.first_rank, range(neighbour.pp)), neighbour.end)}
    # An edge between stages of the fixed layouts is the layout's start, its end, or the start of one of its stages.
    back = {0, layout.size, *(stage * layout.stage_size for stage in range(layout.pp))}
    moved = (replace(layout, rank_offset=edge - size) for edge in {0, *edges} for size in back if edge >= size)
    legal = {m.rank_offset for m in moved if all(_compatible(m, neighbour) for neighbour in fixed)}
    return min(legal, key=lambda at: (max(end, at + layout.size), abs(at - layout.rank_offset), at))


def _ranks(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    contiguous = len(ranks) == last - first + 1
    return f"ranks {first}-{last}" if contiguous else "ranks " + ", ".join(map(str, ranks))
