"""Makes a configuration small, but keeps everything that its layouts may compute wrongly.

It keeps the layouts, the schedule, the number of microbatches, uneven splits of layers, heads per key/value head, the
set of sizes that tp divides, layers with experts, merge, positions, activation, biases, norms, windows shorter than
samples and layers without a window, tied embeddings, remat and frozen modules. Sizes that are small already stay. Where
the configuration sets the numbers of layers per stage, stages with more than the least number keep more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmjax.assembly.model import with_fitting_rates
from mmjax.configurable import ConfigError, gin_name
from mmjax.data.buckets import per_microbatch
from mmjax.data.sources.config import FOLDER, SourceConfig
from mmjax.mesh.layout import Layout, cell_count
from mmjax.models.config import LLM
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.nodes import spec_of
from mmjax.models.projector.config import ProjectorConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.parity.samples import BatchSizes, buckets, clip_buckets, longest, text_buckets
from mmjax.recipe import ModuleSpec, Recipe

SMALL = {
    **{"layers": 4, "width": 64, "hidden": 256, "vocab": 512, "window": 8},
    **{"patch": 4, "grid": 32, "mels": 16, "length": 64, "tiles": 2, "experts": 8, "groups": 4},
    **{"queries": 2, "canvas": 8},
}
"""Sizes that are no larger than these stay as they are."""
LEAST_RATE, LARGEST_RATE, LEAST_EPS, LARGEST_B1 = 1e-3, 2e-2, 1e-4, 0.5
_HEAD = 8


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A configuration that is quick to check.

    Attributes:
      recipe: the small configuration.
      sizes: rows and samples of its batches.
      changes: one line for each part of the run that is smaller now.
    """

    recipe: Recipe
    sizes: BatchSizes
    changes: tuple[str, ...]


def shrink(recipe: Recipe, steps: int, vocab: int, dtype: str = "float32") -> Shrunk:
    """Shrinks a configuration for a check of ``steps`` steps.

    The result runs on virtual CPU devices, with optimizers whose updates can be compared (see ``comparable``). It has
    the small ``recipe``, the ``sizes`` of its batches, and ``changes``, a line for each part that is smaller.

    Args:
      recipe: a legal configuration, as ``load_config(["run.gin"])`` gives it; the result's is legal too.
      steps: steps of the check.
      vocab: the tokenizer's vocabulary size, which an LLM has whose own is not set (0).
      dtype: dtype that the stages compute in, ``float32`` or ``bfloat16``.
    """
    layouts = recipe.model.layouts
    smaller = {name: _layout(recipe, name) for name in layouts}
    cells = cell_count(layouts.values())
    many_rows = dtype != "float32"
    sizes = BatchSizes.of(cells, recipe.train.microbatches, many=many_rows)
    tokens = longest(many=many_rows)
    before = recipe.model.llm.settings
    llm = _decoder(before, layouts, before.vocab or vocab)
    nodes = {
        name: replace(node, settings=llm if name == LLM else _around(node, layouts))
        for name, node in recipe.model.nodes.items()
    }
    stages = {
        name: list(
            zip(layouts[name].runs(node.settings.layers), smaller[name].runs(nodes[name].settings.layers), strict=True)
        )
        for name, node in recipe.model.nodes.items()
    }
    packed = bool(recipe.model.llm.packing.given)

    def buckets_of(node: ModuleSpec) -> tuple[tuple[int, int], ...]:
        several = len(node.packing.given) > 1
        if node.role == "encoder" and recipe.model.sources(node.name):
            return clip_buckets(sizes.per_cell, several=several)
        if node.makes_latents:
            (generator,) = recipe.model.targets(node.name)
            most = 1 + getattr(nodes[generator].settings, "references", 0)
            return buckets(node.module().medium, most * sizes.per_cell, several=several)
        if node.projector:
            return buckets(spec_of(node.module().medium, node.projector.settings), sizes.per_cell, several=several)
        return text_buckets(sizes.per_cell, tokens, several=several) * packed

    def shrunk(node: ModuleSpec) -> ModuleSpec:
        node = nodes[node.name]
        packing = replace(node.packing, buckets=per_microbatch(buckets_of(node), cells))
        if node.projector:
            projector = node.projector.settings
            moved = {
                "inject": _moved(projector.inject, stages[LLM]),
                "levels": _moved(projector.levels, stages[node.name]),
            }
            settings = _projector(projector, (node.layout, layouts[LLM]), **moved)
            node = replace(node, projector=replace(node.projector, settings=settings))
        return replace(node.at(smaller[node.name]), packing=packing)

    length = 2 * tokens if packed else tokens
    small = replace(
        recipe,
        train=replace(recipe.train, steps=steps, global_batch=sizes.per * sizes.microbatches, dtype=dtype),
        world=replace(recipe.world, platform="cpu", devices=0, warm_up=_warm_up(recipe)),
        data=recipe.data.with_settings(
            sequence_length=length,
            tokenizer="" if llm.vocab else recipe.data.settings.tokenizer,
            workers=0,
            servers=(),
        ),
        model=recipe.model.map(shrunk).with_optimizers(comparable(recipe.model.optimizers)),
        sources={name: _source(source) for name, source in recipe.data.sources.items()},
    )
    small = with_fitting_rates(small)
    return Shrunk(recipe=small, sizes=sizes, changes=tuple(_changes(recipe, small)))


def _warm_up(recipe: Recipe) -> str:
    """``World.warm_up`` of a check: "auto" becomes "on", as on accelerators; it costs little here."""
    return "on" if recipe.world.warm_up == "auto" else recipe.world.warm_up


def _source(source: SourceConfig) -> SourceConfig:
    """The dataset with a template that needs no folder: the samples of a check come from none."""
    return replace(source, template=SourceConfig.template) if source.template == FOLDER else source


def comparable(optimizers: Mapping[str, OptimizerConfig]) -> dict[str, OptimizerConfig]:
    """Copies of the optimizers, by module, whose updates stand out from fp32 rounding.

    Peak learning rates are from 2e-3 to 2e-2, in the same order as before, without warm-up. A large eps keeps the noise
    of elements without a gradient small, and with a small b1 gradients can be computed from the moments.

    optimizers: by module, such as ``recipe.model.optimizers``, with ``learning_rate`` above 0.
    """
    rates = sorted({optimizer.learning_rate for optimizer in optimizers.values()})
    raised = {rate: min(max(rate, LEAST_RATE * 2 ** (i + 1)), LARGEST_RATE) for i, rate in enumerate(rates)}
    return {name: _comparable(optimizer, raised[optimizer.learning_rate]) for name, optimizer in optimizers.items()}


def _comparable(optimizer: OptimizerConfig, rate: float) -> OptimizerConfig:
    return replace(
        optimizer,
        learning_rate=rate,
        final_learning_rate=max(LEAST_RATE, rate * optimizer.final_learning_rate / optimizer.learning_rate),
        warmup=0,
        eps=max(optimizer.eps, LEAST_EPS),
        b1=min(optimizer.b1, LARGEST_B1),
    )


# ---- modules ---------------------------------------------------------------------------------------------------------


def _around(node: ModuleSpec, layouts: Mapping[str, Layout]) -> Any:
    """Shrinks an encoder or a generator."""
    if node.speaks:
        return _decoder(node.settings, {**layouts, LLM: node.layout}, node.settings.vocab)
    return _encoder(node.settings, node.layout)


def _encoder(c: Any, layout: Layout) -> Any:
    """Shrinks an encoder or a generator of any family; ``SMALL`` limits the sizes that only some families have."""
    tp, sizes, fields = layout.tp, dict[str, Any](), {field.name for field in dataclasses.fields(c)}
    if c.width > SMALL["width"] and "heads" in fields:
        heads = _heads(c.heads, tp)
        sizes |= {"heads": heads, "width": _HEAD * max(heads, 2)}
        sizes |= {"rope": ()} if "rope" in fields else {}
    sizes |= {name: min(getattr(c, name), SMALL[name]) for name in fields & {"patch", "grid", "mels", "length"}}
    if sizes.get("length", 0) > 0 and sizes["length"] < c.length:
        sizes["length"] = _multiple(sizes["length"], c.merge)  # positions for an integer number of LLM tokens
    sizes |= {"mlp": _hidden(c.mlp, tp)} if "mlp" in fields else {}
    sizes |= _levels(c, tp) if "heads_by_level" in fields else {}
    sizes |= _encoder_levels(c) if "latent_channels" in fields else {}
    if "queries" in fields:
        sizes["queries"] = min(c.queries, _multiple(SMALL["queries"], layout.row_multiple))
    if "canvases" in fields:
        small = (tuple(min(side, SMALL["canvas"]) for side in canvas) for canvas in c.canvases)
        sizes["canvases"] = tuple(dict.fromkeys(small))
    layers = _layers(c.layers, layout)
    sizes |= _windows(c, layers) if "full_at" in fields else {}
    return replace(c, layers=layers, **sizes)


def _levels(c: Any, tp: int) -> dict[str, Any]:
    """Two levels of a block, with as many heads as tp divides, or an odd number where the larger module has one."""
    if max(c.widths) <= SMALL["width"]:
        return {}
    groups = _multiple(4, tp)
    sizes = {"groups": groups, "widths": (2 * groups, 4 * groups)[: len(c.widths)], "width": SMALL["width"]}
    of_levels = c.heads_by_level[: len(c.widths[:2])]
    heads = tuple(0 if not heads else 1 if heads % 2 else _multiple(2, tp) for heads in of_levels)
    mid = 1 if c.mid_heads % 2 else _multiple(2, tp)
    return {**sizes, "heads_by_level": heads, "mid_heads": mid, "blocks": 1, "transformer_blocks": 1}


def _encoder_levels(c: Any) -> dict[str, Any]:
    """Narrow levels of an encoder of latents, as many as before, so that pictures keep their sizes."""
    if max(c.widths) <= SMALL["width"]:
        return {}
    groups = min(c.groups, SMALL["groups"])
    widths = tuple((groups or 4) * (2 + number % 2) for number in range(len(c.widths)))
    return {"groups": groups, "widths": widths, "blocks": 1}


def _windows(c: Any, layers: int) -> dict[str, Any]:
    """Windows that cut media, some at their edges; layers without a window stay if the larger module has some."""
    moved = sorted({at * layers // c.layers for at in c.full_at})
    if len(c.full_at) < c.layers:
        moved = moved[max(0, len(moved) - layers + 1) :]
    return {"window": min(c.window, 2 * c.merge), "full_at": tuple(moved)}


def _projector(
    c: ProjectorConfig, layouts: tuple[Layout, Layout], *, inject: Sequence[int], levels: Sequence[int]
) -> ProjectorConfig:
    """Shrinks a projector.

    If its tokens enter single LLM layers, the LLM's tp divides its hidden width too. Of several injections into the
    same layer of the smaller LLM, only the last one stays.

    Args:
      c: the projector.
      layouts: layouts of its module and of the LLM.
      inject, levels: numbers of layers in the smaller LLM and module.
    """
    layout, llm = layouts
    hidden = _hidden(c.hidden, math.lcm(layout.tp, llm.tp if inject else 1))
    level_of = dict(zip(inject, levels or inject, strict=True))
    rising = tuple(sorted(level_of))
    levels = tuple(level_of[at] for at in rising) if levels else ()
    return replace(c, hidden=hidden, inject=rising, levels=levels, most_tiles=min(c.most_tiles, SMALL["tiles"]))


def _moved(layers: tuple[int, ...], stages: Sequence[tuple[range, range]]) -> tuple[int, ...]:
    """Each layer's counterpart in the same stage of the smaller module; ``stages``: (old, new) layers of each stage."""
    return tuple(new[min(old.index(at), len(new) - 1)] for at in layers for old, new in stages if at in old)


def _decoder(c: DecoderConfig, layouts: Mapping[str, Layout], vocab: int) -> DecoderConfig:
    tp = layouts[LLM].tp
    sizes: dict[str, Any] = {}
    if c.width > SMALL["width"]:
        kv_heads = _heads(c.kv_heads, tp)
        # A projector without a hidden width takes this one, so the encoders' tp must divide it too.
        width = _multiple(48, math.lcm(*(layout.tp for layout in layouts.values())))
        sizes = {"heads": kv_heads * (c.heads // c.kv_heads), "kv_heads": kv_heads, "width": width}
        sizes |= _latent(c) if c.kv_rank else {"head_dim": _head_dim(c)}
        sizes |= _global_heads(c, sizes["heads"], tp)
        if c.score_width:  # of scores that are hardly divided a softmax would make much of rounding errors
            sizes["score_width"] = max(c.score_width, 0.75 * _HEAD)
    if vocab > SMALL["vocab"]:
        sizes["vocab"] = _multiple(60, tp) if vocab % tp == 0 else _multiple(60, tp) + 1
    if c.delta_heads and "heads" in sizes:
        sizes |= _delta(c, tp)
    if c.rope_sections and "heads" in sizes:
        pairs, all_pairs = _HEAD // 2, sum(c.rope_sections)
        time, row = (pairs * section // all_pairs for section in c.rope_sections[:2])
        sizes["rope_sections"] = (time, row, pairs - time - row)
        if c.rope_interleaved:  # rows and columns have at most every third pair
            row, column = (pairs * section // all_pairs for section in c.rope_sections[1:])
            sizes["rope_sections"] = (pairs - row - column, row, column)
    layers = _layers(c.layers, layouts[LLM])
    if layers < c.layers and c.full_layers > 0:
        # If some layers had the window and some had not, that stays so if there are two layers or more.
        fewer = max(1, round(c.full_layers * layers / c.layers))
        sizes["full_layers"] = fewer if c.full_layers == c.layers else min(fewer, layers - 1)
    sizes |= {name: min(getattr(c, name), SMALL["window"]) for name in ("window", "chunk")}
    every = ("full_every", *(("attention_every",) if c.delta_heads else ()))
    sizes |= {name: layers for name in every if getattr(c, name) > layers > 1}
    sizes |= _experts(c, layers, layouts[LLM]) if c.experts else {}
    sizes |= {"per_layer_width": min(c.per_layer_width, _HEAD), "kv_shared_mlp": _hidden(c.kv_shared_mlp, tp)}
    small = replace(c, layers=layers, mlp=_hidden(c.mlp, tp), **{**sizes, "kv_shared_layers": 0, "kv_shared_mlp": 0})
    return replace(small, **_sharing(c, small, layouts[LLM]), kv_shared_mlp=sizes["kv_shared_mlp"])


def _sharing(c: DecoderConfig, small: DecoderConfig, layout: Layout) -> dict[str, int]:
    """The most layers that read keys of others, which the smaller stages allow; alternating kinds allow more."""
    if not c.kv_shared_layers or small.layers == c.layers:
        return {"kv_shared_layers": c.kv_shared_layers}
    layout = replace(layout, layers=_stage_layers(layout)) if layout.layers else layout
    every = {"full_every": 2} if small.full_every > 2 else {}
    for count in range(min(c.kv_shared_layers, small.layers - 1), 0, -1):
        with contextlib.suppress(ConfigError):
            replace(small, **every, kv_shared_layers=count).check(LLM, layout)
            return {**every, "kv_shared_layers": count}
    return {"kv_shared_layers": 0}


def _latent(c: DecoderConfig) -> dict[str, int]:
    """Latent attention whose widths all differ."""
    sizes = {"kv_rank": 12, "nope_head_dim": 6, "rope_head_dim": _HEAD, "v_head_dim": 5}
    return sizes | {"q_rank": 20 if c.q_rank else 0}


def _head_dim(c: DecoderConfig) -> int:
    """The width of a head with about ``_HEAD`` rotated components."""
    return _HEAD if c.rope_share == 1 or c.global_head_dim else math.ceil(_HEAD / c.rope_share)


def _global_heads(c: DecoderConfig, heads: int, tp: int) -> dict[str, int]:
    """Wider heads of layers without a window, and another number of key/value heads, where they have them."""
    sizes = {"global_head_dim": max(2 * _HEAD, math.ceil(_HEAD / c.rope_share))} if c.global_head_dim else {}
    if c.global_kv_heads:
        sizes["global_kv_heads"] = math.gcd(heads, tp if c.global_kv_heads % tp == 0 else c.global_kv_heads)
    return sizes


def _delta(c: DecoderConfig, tp: int) -> dict[str, Any]:
    """Delta layers whose widths differ; a key head with several value heads keeps two.

    What a token reads of few numbers is often near 0, and its norm would make much of rounding errors.
    """
    heads = _heads(c.delta_heads, tp)
    share = min(2, (c.delta_value_heads or c.delta_heads) // c.delta_heads)
    sizes = {"delta_heads": heads, "delta_value_heads": heads * share, "delta_key_dim": 6, "delta_value_dim": 5}
    return sizes | {"norm_eps": max(c.norm_eps, 1e-3)}


def _experts(c: DecoderConfig, layers: int, layout: Layout) -> dict[str, int]:
    """Fewer experts; a choice among some of them, and of groups, stays a choice."""
    sizes = {"expert_mlp": _hidden(c.expert_mlp, layout.tp), "dense_layers": min(c.dense_layers, layers - 1)}
    if c.experts <= SMALL["experts"]:
        return sizes
    groups = min(c.router_groups, SMALL["groups"])
    limit = min(c.router_group_limit, groups - (c.router_group_limit < c.router_groups))
    experts = _multiple(SMALL["experts"], math.lcm(groups, layout.ep))
    per_token = min(c.experts_per_token, max(1, experts // groups * limit // 2))
    shared = min(c.shared_experts, 2)
    sizes |= {"experts": experts, "experts_per_token": per_token, "shared_experts": shared}
    return sizes | {"router_groups": groups, "router_group_limit": limit}


def _layers(layers: int, layout: Layout) -> int:
    """Number of layers: one a stage, or two with at most two stages, plus the remainder of an uneven split."""
    stages = layout.stages
    if layers <= max(SMALL["layers"], stages):
        return layers
    if layout.layers:
        return sum(_stage_layers(layout))
    return stages * min(layers // stages, 2 if stages <= 2 else 1) + layers % stages


def _layout(recipe: Recipe, name: str) -> Layout:
    """The layout, with smaller numbers of layers by stage if it sets them and the module has fewer layers."""
    layout = recipe.model[name].layout
    before = recipe.model[name].settings.layers
    is_smaller = layout.layers and _layers(before, layout) < before
    return replace(layout, layers=_stage_layers(layout)) if is_smaller else layout


def _stage_layers(layout: Layout) -> tuple[int, ...]:
    """Smaller numbers of layers by stage: stages with more than the least number have one layer more."""
    least = min(layout.layers)
    base = min(least, 2 if layout.stages <= 2 else 1)
    return tuple(base + (count > least) for count in layout.layers)


def _heads(heads: int, tp: int) -> int:
    """Number of heads: one or two for each rank."""
    return tp * min(heads // tp, 2 if tp <= 2 else 1)


def _hidden(hidden: int, tp: int) -> int:
    return hidden if hidden <= SMALL["hidden"] else _multiple(40, tp)


def _multiple(least: int, factor: int) -> int:
    return -(-least // factor) * factor


# ---- what changed ----------------------------------------------------------------------------------------------------


def _changes(recipe: Recipe, small: Recipe) -> Iterator[str]:
    run_fields = {"global_batch", "sequence_length"}
    for (scope, before), (_, after) in zip(recipe.walk(), small.walk(), strict=True):
        if isinstance(before, OptimizerConfig):
            continue
        fields = [f.name for f in dataclasses.fields(before) if scope or f.name in run_fields]
        pairs = {name: (getattr(before, name), getattr(after, name)) for name in fields if name != "buckets"}
        changed = [f"{name} {old or 'open'} → {new}" for name, (old, new) in pairs.items() if old != new]
        if changed:
            yield f"{scope}/{gin_name(type(before))}: ".removeprefix("/") + ", ".join(changed)
