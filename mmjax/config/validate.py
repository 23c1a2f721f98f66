"""Checks between the parts of a `Config`. What concerns one dataclass alone is checked in its own `__post_init__`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from mmjax.attention.language import Rules
from mmjax.attention.settings import AUTO, LIBRARIES
from mmjax.checkpoint.config import WeightsConfig
from mmjax.config.best import check_best
from mmjax.config.exportable import export_advice
from mmjax.config.folder_alone import positions_of
from mmjax.config.idle import idle_lines
from mmjax.config.schema import DTYPES, Config
from mmjax.configurable import ConfigError, divides, gin_name, nearest_divisor, require
from mmjax.data.sources.config import FOLDER
from mmjax.mesh.layout import SPANNING, Layout, cell_count
from mmjax.models.config import LLM, lora_name, projector_name, require_layers
from mmjax.models.llama.config import DecoderConfig
from mmjax.own_code import import_named, require_allowed
from mmjax.pipeline.config import KINDS_AWAY, OffloadConfig
from mmjax.pipeline.single.lane_layout import lane_layout
from mmjax.schedule.schedules import LANED, NESTING, OFFLOADING, ONE_F_ONE_B, STASHING, WINDOWED

MOST_DEVICES = 1 << 16
"""Devices that layouts may need where `World.devices` names none."""
_SHARDED = ("heads", "kv_heads", "mlp", "width")


def validate(config: Config, *, trained: bool = True) -> None:
    """Checks everything that two parts of `config` must agree on, before any device is touched.

    Args:
      config: the configuration.
      trained: whether it is to be trained, so that something must not be frozen.

    Raises:
      ConfigError: one line that names the field, its value and a legal one.
    """
    _check_code(config)
    _check_modules(config)
    _check_mask(config)
    _check_templates(config)
    _check_callbacks(config)
    frozen = trained and all(optimizer.frozen for optimizer in config.optimizers.values())
    require(not frozen, f"{LLM}/Optimizer.frozen", True, "every module is frozen; set it to False for one of them")
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
    """Requires that samples have something to draw for every generator that is trained. Raises ConfigError."""
    drawn, settings = config.data.drawn(config.task), config.data.origin.settings(config.task)
    for name in config.model.generators:
        is_idle = name not in drawn and not config.optimizers[name].frozen
        ways = ["leave it out", f"set {name}/Optimizer.frozen to True"]
        ways += ["Digits.draw to 1.0"] if settings and not drawn else []
        fix = f"the data have no picture for {name!r} to draw, so it would learn nothing; {', or '.join(ways)}"
        require(not is_idle, "Model.generators", config.model.generators, fix)


def _check_code(config: Config) -> None:
    """Requires `allow_code` for settings that name code, before any of it is imported."""
    for scope, values in config.walk():
        for field in fields(values):
            if field.metadata.get("code"):
                name = f"{scope}/{gin_name(type(values))}.{field.name}".removeprefix("/")
                value = getattr(values, field.name)
                for one in value.values() if isinstance(value, dict) else (value,):
                    require_allowed(name, one, config.allow_code)


def _check_size(config: Config) -> None:
    """Refuses layouts larger than any cluster, before something is made for each of their ranks."""
    most = max(config.world.devices, MOST_DEVICES)
    for module, layout in config.layouts.items():
        if layout.end > most:
            degrees = {name: getattr(layout, name) for name in (*SPANNING, "rank_offset")}
            name = max(degrees, key=lambda name: degrees[name])
            fix = f"needs {layout.end} devices, more than {most}; use less, or name so many with World.devices"
            raise ConfigError(f"{module}/Layout.{name}={degrees[name]}: {fix}")


def advise(config: Config) -> tuple[str, ...]:
    """One line for each setting that was fitted to a flag, that wastes devices or rows, or that changes nothing."""
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


def check_devices(config: Config, found: int, other: tuple[Path, int] | None = None) -> None:
    """Requires that `found` devices are enough for the layouts; else the message names flags that fit.

    `other` is a gin file that fits, and how many devices it needs.

    Raises:
      ConfigError: the layouts need more devices.
    """
    if found >= config.devices:
        return
    fixes = [f"--gin.World.devices={config.devices}" if config.world.devices else "smaller layouts"]
    if config.world.platform != "cpu" and not config.world.devices:
        fixes.append(f"--gin.World.platform=cpu for {config.devices} virtual devices")
    if other:
        fixes.append(f"--gin_file={other[0]} (needs {other[1]})")
    wanted = "; ".join(f"{module} {layout.describe()}" for module, layout in config.layouts.items())
    need = f"World.devices={config.world.devices}: the layouts need {config.devices} devices, not {found} ({wanted})"
    raise ConfigError(f"{need}; use {', or '.join(fixes)}")


def _check_modules(config: Config) -> None:
    modules = config.modules
    media = ({name: modules[name].medium for name in own} for own in (config.model.encoders, config.model.generators))
    config.data.check_modules(config.task, *media)
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
        turned = getattr(modules[LLM], "rope_sections", ())
        require(not (projector.newline and turned), f"{name}/Projector.newline", projector.newline, fix)
    for name, other in itertools.permutations(config.model.media, 2):
        clash = name == projector_name(other)
        fix = f"is the name of {other}'s projector; use another, such as '{name}2'"
        require(not clash, f"Model.{'encoders' if name in config.model.encoders else 'generators'}", name, fix)
    for name, projector in config.projectors.items():
        most = modules[LLM].layers - 1
        legal = (0, most) if most else (0,)
        fix = f"the LLM has layers 0 to {most} ({_llm_field(config, 'layers')}={most + 1}); use {legal}"
        require(all(at <= most for at in projector.inject), f"{name}/Projector.inject", projector.inject, fix)
        most = modules[name].layers - 1
        fix = f"{name} has layers 0 to {most}; use numbers of these"
        require(all(at <= most for at in projector.levels), f"{name}/Projector.levels", projector.levels, fix)
    for name, other in itertools.permutations(modules, 2):
        field = f"Model.{'encoders' if name in config.model.encoders else 'generators'}"
        fix = f"is the name of {other}'s adapters; use another, such as '{name}2'"
        require(name != lora_name(other), field, name, fix)
    for name, adapters in ((name, lora_name(name)) for name in config.loras):
        path = config.weights.get(adapters, WeightsConfig()).path
        fix = f"name a folder of PEFT in {name}/Lora.path, or a run in {adapters}/Weights.init_from"
        require(not path, f"{adapters}/Weights.path", path, fix)


def _check_mask(config: Config) -> None:
    """Requires that the kinds of tokens in the LLM's mask are those of this model."""
    llm = config.modules[LLM]
    if isinstance(llm, DecoderConfig):
        field = _llm_field(config, "mask")
        Rules.parse(llm.mask, field).require_kinds(config.model.media, field, llm.mask)


def _check_templates(config: Config) -> None:
    for name, source in config.sources.items():
        fix = "Data.tokenizer='' names no folder with a chat template; set it, or name a template, such as 'chatml'"
        legal = source.template != FOLDER or bool(config.data.tokenizer)
        require(legal, f"{name}/Source.template", source.template, fix)


def _check_callbacks(config: Config) -> None:
    """Requires that callbacks can be imported, and that modules have what they are called behind."""
    for module, callbacks in config.callbacks.items():
        fix = f"the {LLM} has no projector; use {module}/Callbacks.after"
        require(module != LLM or not callbacks.projected, f"{module}/Callbacks.projected", callbacks.projected, fix)
        for name, value in callbacks.given.items():
            import_named(f"{module}/Callbacks.{name}", value)


def _check_degrees(module: str, layout: Layout, config: Config) -> None:
    require(layout.ep == 1, f"{module}/Layout.ep", layout.ep, "is not supported yet; set it to 1")
    require_layers(module, config.modules[module].layers, layout)
    sizes = sharded_sizes(config, module)
    legal = nearest_divisor(layout.tp, math.gcd(*sizes.values()))
    for name, size in sizes.items():
        # Of fewer key and value heads each rank takes one, and as many ranks take each of them.
        is_kv = isinstance(config.modules[module], DecoderConfig) and name.endswith(".kv_heads")
        repeated = is_kv and layout.tp % size == 0
        fix = f"must divide {name} ({size}); use {legal}"
        require(size % layout.tp == 0 or repeated, f"{module}/Layout.tp", layout.tp, fix)
    heads = getattr(config.modules[module], "heads", 0) // layout.tp
    fix = f"cp={layout.cp} does not divide the {heads} query heads of a tp rank; use 'gather' or 'ring'"
    legal = layout.cp == 1 or layout.cp_way != "all-to-all" or heads % layout.cp == 0
    require(legal, f"{module}/Layout.cp_way", layout.cp_way, fix)


def _check_attention(config: Config) -> None:
    """The kernels that a module asks for take the run's dtype, and run on its platform."""
    dtype, platform = config.train.dtype, config.world.platform
    for module, settings in config.modules.items():
        way, layout = getattr(settings, "attention", ""), config.layouts[module]
        name = f"{module}/{gin_name(type(settings))}.attention"
        if way not in LIBRARIES:
            fix = f"is for whole rows, and {module}/Layout.cp is {layout.cp}; set it to {AUTO!r} or 'blockwise'"
            require(layout.cp == 1 or way != "dense", name, way, fix)
            continue
        library = LIBRARIES[way]
        fix = f"with {module}/Layout.cp={layout.cp}, {library.name} needs Layout.cp_way="
        fix += f"{' or '.join(map(repr, library.cp_ways))}, not {layout.cp_way!r}; set one, or {name} to {AUTO!r}"
        require(layout.cp == 1 or layout.cp_way in library.cp_ways, name, way, fix)
        fix = f"or {AUTO!r}, which takes what there is"
        taken = " or ".join(repr(own) for own in DTYPES if own in library.dtypes)
        why = f"{library.name} does not compute in Train.dtype={dtype!r}; use {taken} there, {fix}"
        require(dtype in library.dtypes, name, way, why)
        why = f"{library.name} runs on {library.devices} and World.platform is {platform!r}; use 'cuda' there, {fix}"
        require(platform in ("", "cuda"), name, way, why)


def _check_lanes(config: Config) -> None:
    """Lanes are for encoders and generators, under schedules that know them, with a program for every op."""
    schedule = config.train.schedule
    for module, layout in ((m, own) for m, own in config.layouts.items() if own.lanes > 1):
        field = f"{module}/Layout.lanes"
        fix = f"the {LLM} is a pipeline, and lanes are for encoders and generators; set it to 1"
        require(module != LLM, field, layout.lanes, fix)
        fix = f"Train.schedule={schedule!r} has no place for lanes; set it to 1, or the schedule to {LANED[-1]!r}"
        require(schedule in LANED, field, layout.lanes, fix)
        fix = "Train.lowering='single' has no lanes; set it to 1, or Train.lowering to 'auto'"
        require(config.train.lowering != "single", field, layout.lanes, fix)
        fix = f"the parameters of lanes stay on their devices; set it to False, or {field} to 1"
        offload = config.offloads.get(module, OffloadConfig())
        require(not offload.parameters, f"{module}/Offload.parameters", True, fix)
    if schedule in NESTING:
        _check_nested(config)


def _check_copies(config: Config) -> None:
    """Copies are of encoders, one on each stage submesh of the LLM, with a program for every op."""
    llm = config.layouts[LLM]
    for module, layout in ((m, own) for m, own in config.layouts.items() if own.copies > 1):
        field = f"{module}/Layout.copies"
        fix = "copies are of encoders, whose features are computed several times and counted once; set it to 1"
        require(module in config.model.encoders, field, layout.copies, fix)
        fix = f"every pipeline stage of the {LLM} has a copy; set it to {llm.pp}, {LLM}/Layout.pp"
        require(layout.copies == llm.pp, field, layout.copies, fix)
        where = f"its {_ranks(layout.ranks)} are not the {_ranks(llm.ranks)} of the {LLM}"
        fix = f"{where}; give it the same rank_offset, and copies·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, field, layout.copies, fix)
        fix = "Train.lowering='single' has no copies; set it to 1, or Train.lowering to 'auto'"
        require(config.train.lowering != "single", field, layout.copies, fix)


def _check_nested(config: Config) -> None:
    """Some encoder or generator has lanes, and each that has them is on exactly the ranks of the LLM."""
    schedule, llm = config.train.schedule, config.layouts[LLM]
    others = [name for name in config.layouts if name != LLM]
    flat = f"has no module with lanes to nest; set Train.schedule to {ONE_F_ONE_B!r}"
    require(bool(others), "Train.schedule", schedule, flat)
    require(llm.pp > 1, "Train.schedule", schedule, f"has no pipeline to nest in; set {LLM}/Layout.pp above 1")
    lanes = {name: config.layouts[name].lanes for name in others}
    fix = f"Train.schedule={schedule!r} wants a module with lanes; set it to {llm.pp}, {LLM}/Layout.pp"
    require(max(lanes.values()) > 1, f"{others[0]}/Layout.lanes", 1, fix)
    for module in (name for name in others if lanes[name] > 1):
        layout = config.layouts[module]
        where = f"its {_ranks(layout.ranks)} are not the {_ranks(llm.ranks)} of the {LLM} that it is nested in"
        fix = f"{where}; give it the same rank_offset, and lanes·dp·cp·tp = {llm.size}"
        require(layout.ranks == llm.ranks, f"{module}/Layout.lanes", layout.lanes, fix)


def _llm_field(config: Config, name: str) -> str:
    """A setting of the LLM, such as "llm/Decoder.width"."""
    return f"{LLM}/{gin_name(type(config.modules[LLM]))}.{name}"


def sharded_sizes(config: Config, module: str) -> dict[str, int]:
    """The sizes of a module that tp has to divide, by field."""
    values = config.modules[module]
    prefix = f"{module}/{gin_name(type(values))}"
    sizes = {f"{prefix}.{name}": getattr(values, name) for name in _SHARDED if hasattr(values, name)}
    # The LLM's stages hold the parts of projectors that inject tokens into its layers.
    held = [name for name, p in config.projectors.items() if p.inject] if module == LLM else [module]
    for name in held:
        if config.projectors[name].kind == "linear":  # which tp does not split
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
        return  # these are compared when the steps are known, see `epochs.with_steps`
    for module, optimizer in config.optimizers.items():
        fix = f"must be below Train.steps ({steps}), such as {steps // 10}"
        require(optimizer.frozen or optimizer.warmup < steps, f"{module}/Optimizer.warmup", optimizer.warmup, fix)


def _check_ranks(config: Config) -> None:
    modules = [*(name for name in config.layouts if name != LLM), LLM]
    for one, other in itertools.combinations(modules, 2):
        mine, theirs = config.layouts[one], config.layouts[other]
        if not _compatible(mine, theirs):
            others = [layout for name, layout in config.layouts.items() if name != one]
            shared = range(max(mine.rank_offset, theirs.rank_offset), min(mine.end, theirs.end))
            raise ConfigError(
                f"{one}/Layout.rank_offset={mine.rank_offset}: its {_ranks(mine.ranks)} and {other}'s "
                f"{_ranks(theirs.ranks)} share {_ranks(shared)}; rank sets are equal, disjoint, or one is whole stages "
                f"of the other: use {_free_offset(mine, others)}"
            )


def _check_offload(config: Config) -> None:
    """Parameters and activations can be away only between the F and the B of an encoder that waits between them."""
    schedule, llm = config.train.schedule, config.layouts[LLM]
    for module in (module for module, offload in config.offloads.items() if offload.activations):
        _check_stash(config, module)
    for module in (module for module, offload in config.offloads.items() if offload.parameters):
        field, no = f"{module}/Offload.parameters", "set it to False"
        require(module != LLM, field, True, f"the {LLM}'s parameters are read all the time; {no}")
        fix = f"a generator runs between others' ops under every schedule; {no}"
        require(module not in config.model.generators, field, True, fix)
        fix = f"Train.schedule={schedule!r} leaves no time for it; {no}, or the schedule to {OFFLOADING[0]!r}"
        require(schedule in OFFLOADING, field, True, fix)
        shares = not set(config.layouts[module].ranks).isdisjoint(llm.ranks)
        fix = f"shares no rank with {LLM} and so has no phase of its own; {no}, or {module}/Layout.rank_offset to"
        require(shares or schedule not in WINDOWED, field, True, f"{fix} {llm.rank_offset}")


def _check_stash(config: Config, module: str) -> None:
    """What waits between F and B is that of encoders with lanes or a phase of their own."""
    schedule, layout, llm = config.train.schedule, config.layouts[module], config.layouts[LLM]
    field, no = f"{module}/Offload.activations", "set it to False"
    require(module != LLM, field, True, f"the {LLM}'s microbatches do not wait between forward and backward; {no}")
    generator = module in config.model.generators
    require(not generator, field, True, f"a generator's backward follows its forward at once; {no}")
    fix = f"Train.schedule={schedule!r} leaves no time for it; {no}, or the schedule to {STASHING[0]!r}"
    require(schedule in STASHING, field, True, fix)
    fix = f"without lanes it runs beside the {LLM} and keeps little; {no}, or {module}/Layout.lanes to {llm.pp}"
    require(layout.lanes > 1 or schedule not in NESTING, field, True, fix)
    fix = f"shares no rank with {LLM} and so has no phase of its own; {no}, or {module}/Layout.rank_offset to"
    shares = not set(layout.ranks).isdisjoint(llm.ranks)
    require(shares or schedule not in WINDOWED, field, True, f"{fix} {llm.rank_offset}")


def _check_one_program(config: Config) -> None:
    lane_layout(config.layouts)
    for module, layout in config.layouts.items():
        # XLA's permutations take all devices of a program, and its branches are of some.
        fix = "Train.lowering='single' has no rings; set it to False, or Train.lowering to 'auto'"
        require(not layout.overlap, f"{module}/Layout.overlap", layout.overlap, fix)
        fix = "under Train.lowering='single' ranks cannot send to one another; use 'gather', or Train.lowering='auto'"
        alone = layout.cp == 1 or layout.cp_way not in ("need", "ring")
        require(alone, f"{module}/Layout.cp_way", layout.cp_way, fix)
    fix = "keeps everything on its devices; set it to False, or Train.lowering to 'ops'"
    for module, offload in config.offloads.items():
        for name in KINDS_AWAY:
            require(not getattr(offload, name), f"{module}/Offload.{name}", True, f"Train.lowering='single' {fix}")


def _compatible(one: Layout, other: Layout) -> bool:
    """Equal or disjoint rank sets, or one a union of whole stages of the other."""
    apart = one.end <= other.rank_offset or other.end <= one.rank_offset
    return apart or _is_stages(one, other) or _is_stages(other, one)


def _is_stages(one: Layout, other: Layout) -> bool:
    """Whether the ranks of the first layout are those of whole stages of the second."""
    inside = other.rank_offset <= one.rank_offset and one.end <= other.end
    return inside and (one.rank_offset - other.rank_offset) % other.stage_size == 0 == one.size % other.stage_size


def _free_offset(layout: Layout, others: Sequence[Layout]) -> int:
    """The offset that makes `layout` compatible with all others: fewest devices first, then the nearest."""
    end = max(other.end for other in others)
    edges = {at for other in others for at in (*map(other.first_rank, range(other.pp)), other.end)}
    # Behind the others or before them, at the start of a stage of theirs, or with a stage of its own there.
    back = {0, layout.size, *(stage * layout.stage_size for stage in range(layout.pp))}
    moved = (replace(layout, rank_offset=edge - size) for edge in {0, *edges} for size in back if edge >= size)
    legal = {m.rank_offset for m in moved if all(_compatible(m, other) for other in others)}
    return min(legal, key=lambda at: (max(end, at + layout.size), abs(at - layout.rank_offset), at))


def _ranks(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if first == last:
        return f"rank {first}"
    contiguous = len(ranks) == last - first + 1
    return f"ranks {first}-{last}" if contiguous else "ranks " + ", ".join(map(str, ranks))
