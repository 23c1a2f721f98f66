"""Computes the planner's `Work` of a configuration: FLOPs and parameters by formula, bytes from traced stages.

Bytes are counted in traces of stages of one and two layers, with one row and with two, for the smallest and the largest
tp; the devices need not be here. Rows are as wide as their bucket, since padding is computed too.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.assembly.buckets import build_packer
from mmjax.assembly.model import build_model, split_of
from mmjax.assembly.packers import bucket_shapes, one_bucket
from mmjax.assembly.samples import open_source
from mmjax.attention.language import Rules
from mmjax.attention.mask import Mask
from mmjax.data.lengths import lengths_of
from mmjax.data.loader import tokenizer_of
from mmjax.data.mask_words import sample_words
from mmjax.data.packing import Packer
from mmjax.data.source import Source
from mmjax.data.types import SampleMeta
from mmjax.mesh.layout import EP_WAYS, Layout
from mmjax.mesh.spread import EXPERTS
from mmjax.models import flops
from mmjax.models.config import LLM, lora_name, projector_name
from mmjax.models.graph import MultimodalModel
from mmjax.models.module import Module
from mmjax.models.parameters import ModuleSlice
from mmjax.plan.traced import TracedLater, positions_of, trace_experts, trace_memory
from mmjax.planner.work import ExpertWork, ModuleWork, Real, Shares, StageMemory, Work
from mmjax.recipe import Recipe
from mmjax.recipe.device_defaults import with_remat

TPS = (1, 2, 4, 8)
SAMPLES = 512
"""How many samples are read to find the share of positions that is no padding; fewer in shorter runs."""


def read_work(
    recipe: Recipe,
    source: Source | None = None,
    *,
    options: Mapping[str, Sequence[str]] | None = None,
    fullest: float = 1.0,
    tps: Mapping[str, tuple[int, ...]] | None = None,
) -> Work:
    """The work of each module, in FLOPs and bytes, for a sample of the data of `recipe`; a plan needs it.

    `Work.modules` has a `ModuleWork` by module name ("vision", "llm"), sources before users. Bytes are traced when they
    are first read.

    Args:
      recipe: the run's configuration, as `load_config(["run.gin"])` gives it, with `Train.steps`; its layouts decide
        only how rows are packed.
      source: the run's training samples, as `open_source(recipe, split="train")` opens them; opened here if not given.
      options: values of `remat` that a plan may choose, by module, the fastest first, such as {"llm": ("dots",
        "full")}, for `Work.options`; in place of the recipe's `remat`. A module whose layers have no backward gets the
        first alone.
      fullest: rows of the fullest rank of ep over their mean, 1 or more.
      tps: the tp of each module to trace, such as {"llm": (1, 4)}; those of `legal_tps` unless given.

    Raises:
      ConfigError: a setting does not fit the data.
    """
    options = options or {}
    recipe = _in_narrow_rows(_with_option(recipe, options, 0))
    source = source or open_source(recipe, split="train")
    tokenizer = tokenizer_of(recipe.data.settings, recipe.model.media)
    packer = build_packer(recipe, tokenizer, one_bucket=one_bucket(recipe), source=source)
    model = build_model(recipe, tokenizer)
    padded = padded_rows(recipe, packer)
    legal = tps or {name: legal_tps(recipe, name) for name in recipe.model}
    widths = {name: width for name, (_, width) in padded.items()}
    gradients = {name: module_work(recipe, model, name, 1).trained.layer * _item(recipe) for name in model.nodes}
    looked_at = _looked_at(recipe)
    metas = packer.completed([source.meta(index) for index in looked_at])
    pairs = mask_pairs(model, packer, source, looked_at)
    real = real_work(recipe, model, metas, pairs)
    causal = sum(meta.tokens * (meta.tokens + 1) // 2 for meta in metas)
    shares = {mask: count / causal for mask, count in pairs.get(LLM, {}).items()}

    def works_of(recipe: Recipe, model: MultimodalModel) -> Callable[[str], ModuleWork]:
        traced = cache(partial(trace_memory, recipe, model, packer, legal, widths, gradients))

        def work_of(name: str) -> ModuleWork:
            rows, width = padded[name]
            work = module_work(recipe, model, name, width, shares if name == LLM else None)
            experts = traced_experts(recipe, model, packer, name, work, legal[name])
            experts = replace(experts, fullest=fullest) if experts else None
            memory = TracedLater(legal[name], lambda tp: traced()(name, tp))
            longest = longest_medium(model, packer, name)
            sizes = {"rows": rows / _samples(recipe), "longest": longest, "real": real[name]}
            return replace(work, memory=memory, experts=experts, **sizes)

        return work_of

    work_of = works_of(recipe, model)
    modules = {name: work_of(name) for name in model.nodes}
    works = {name: {values[0]: modules[name]} for name, values in options.items()}
    for number in range(1, max(map(len, options.values()), default=0)):
        leaner = _with_option(recipe, options, number)
        leaner_work_of = works_of(leaner, build_model(leaner, tokenizer))
        for name, values in options.items():
            if number < len(values) and modules[name].backward.layer:
                works[name][values[number]] = leaner_work_of(name)
    return Work(
        modules=modules,
        global_batch=recipe.train.global_batch,
        item=_item(recipe),
        options=works,
        joins_microbatches=recipe.train.lowering != "single",
        overlap_grad_reduce=recipe.train.overlap_grad_reduce,
    )


def _with_option(recipe: Recipe, options: Mapping[str, Sequence[str]], number: int) -> Recipe:
    """The recipe with each module's value of `remat` of this number, from 0, or its last."""
    for name, values in options.items():
        recipe = with_remat(recipe, [name], values[min(number, len(values) - 1)])
    return recipe


def _in_narrow_rows(recipe: Recipe) -> Recipe:
    """The recipe without wider rows for ranks of cp that take whole media, so that work does not depend on its cp."""
    segments = (name for name, layout in recipe.model.layouts.items() if layout.cp_tokens == "segments")
    layouts = {name: replace(recipe.model.layouts[name], cp_tokens="lpt") for name in segments}
    return replace(recipe, model=recipe.model.map(lambda node: node.at(layouts.get(node.name, node.layout))))


def longest_medium(model: MultimodalModel, packer: Packer, name: str) -> int:
    """Positions of the longest medium of a module; 0 where ranks of cp cannot have whole media.

    model, packer: as `build_model(recipe, tokenizer)` and `build_packer(recipe, tokenizer)` make them.
    """
    if name == LLM or model.nodes[name].module.in_order or not packer.worst:
        return 0
    return packer.encoders[name].prefix + packer.worst.patches.get(name, 0)


def padded_rows(recipe: Recipe, packer: Packer) -> dict[str, tuple[float, int]]:
    """Rows of a microbatch on all ranks and positions of a row, with the largest buckets, by module name.

    Of all combinations of buckets it is the one with the most positions: {"vision": (16, 1024), "llm": (8, 4096)}.

    Args:
      recipe: the run's configuration, which has the samples of a microbatch.
      packer: its packer, as `build_packer(recipe, tokenizer)` makes it.
    """
    shapes = max(bucket_shapes(packer, _samples(recipe)).values(), key=positions_of)
    result: dict[str, tuple[float, int]] = {}
    for module, inputs in shapes.items():
        rows, width = inputs["segments"].shape
        result[module] = (rows, width)
    return result


def _item(recipe: Recipe) -> int:
    """Bytes of a number in the dtype of the computation."""
    return 4 if recipe.train.dtype == "float32" else 2


def _samples(recipe: Recipe) -> int:
    """How many samples a microbatch has."""
    return recipe.train.global_batch // recipe.train.microbatches


def legal_tps(recipe: Recipe, module: str) -> tuple[int, ...]:
    """Every tp of 1, 2, 4 and 8, ascending, that divides the sizes of a module: (1, 2, 4). An encoder of latents has 1.

    Args:
      recipe: the run's configuration.
      module: the module's name, such as "llm".
    """
    if recipe.model[module].makes_latents:
        return (1,)
    sizes = recipe.model.sizes(module)
    common = math.gcd(*sizes.by_tp.values(), *sizes.by_expert_tp.values())
    return tuple(tp for tp in TPS if common % tp == 0)


# ---- FLOPs and parameters --------------------------------------------------------------------------------------------


def real_work(
    recipe: Recipe,
    model: MultimodalModel,
    metas: Sequence[SampleMeta],
    pairs: Mapping[str, flops.Pairs] | None = None,
) -> dict[str, Real]:
    """Positions and training FLOPs of a sample that are no padding, mean over the samples, by module name.

    The FLOPs of a projector and of adapters count as their module's.

    Args:
      recipe: the configuration, which says what is frozen.
      model: its model, as `build_model(recipe, tokenizer)` makes it.
      metas: one or more samples, such as `packer.completed([source.meta(0), source.meta(1)])`.
      pairs: by module name and mask, the pairs that it allows in these samples together, as `mask_pairs` gives them;
        without them lengths decide.
    """
    media = [name for name in recipe.model if name != LLM]
    lengths, frozen = lengths_of(metas, media), recipe.model.frozen
    counted = flops.training_flops(model, lengths, frozen, pairs)
    return {
        name: Real(
            positions=sum(segments) / len(metas),
            flops=sum(counted[part] for part in model.parts_of(name)) / len(metas),
        )
        for name, segments in lengths.items()
    }


def mask_pairs(
    model: MultimodalModel, packer: Packer, source: Source, indices: Sequence[int]
) -> dict[str, dict[Mask, int]]:
    """The pairs of tokens that the LLM's masks allow in some samples together, if its mask has rules in words.

    No media are opened.

    Args:
      model: the model, as `build_model(recipe, tokenizer)` makes it.
      packer: has the mask, as `build_packer(recipe, tokenizer)` makes it.
      source: the samples, as `open_source(recipe, split="train")` opens them.
      indices: numbers of the samples, from 0, such as range(8).

    Returns:
      {"llm": {mask: number of pairs}}; {} for a mask without rules, such as a causal one.
    """
    module, rules = model.nodes[LLM].module, Rules.parse(packer.mask)
    pairs_by_mask = Counter[Mask]()
    for index in indices if rules.kind == "words" else ():
        sample, length = source.sample(index, media=()), source.meta(index).tokens
        words = sample_words(rules, sample, source.meta(index).grids, packer.encoders)
        places = {"segments": np.ones(length, np.int32), "positions": np.arange(length, dtype=np.int32)}
        pairs_by_mask.update(
            flops.visible_pairs(module, {name: values[None] for name, values in (words | places).items()})
        )
    return {LLM: dict(pairs_by_mask)} if pairs_by_mask else {}


def _looked_at(recipe: Recipe) -> list[int]:
    """Numbers of up to `SAMPLES` samples, evenly spaced over the whole run."""
    every = recipe.train.steps * recipe.train.global_batch
    count = min(SAMPLES, every)
    return [number * every // count for number in range(count)]


def module_work(
    recipe: Recipe, model: MultimodalModel, name: str, width: int, shares: Mapping[Mask, float] | None = None
) -> ModuleWork:
    """The work of a module and its projector in rows of `width` positions, without memory.

    `rows` is 0, `memory` empty and `real` None: they are left for the caller to fill in.

    Args:
      recipe: the configuration.
      model: its model, as `build_model(recipe, tokenizer)` makes it.
      name: the module's name, such as "llm".
      width: positions of a row, such as 4096.
      shares: by mask, the pairs of tokens that it allows over those of a causal mask, such as 0.5, if lengths do not
        determine them; None where they do.
    """
    node = model.nodes[name]
    settings, frozen = node.config, recipe.model.frozen
    factors = {n: f - 1.0 for n, f in flops.training_factors(model, frozen).items()}
    trains = {n: float(n not in frozen) for n in model.parts_of(name)}
    sizes = _sizes(model, name, width, shares or {})
    forward, parameters = (sum(by_module.values(), start=Shares()) for by_module in sizes)
    backward, trained = (
        sum((shares_of.times(factor[n]) for n, shares_of in by_module.items()), start=Shares())
        for by_module, factor in zip(sizes, (factors, trains), strict=True)
    )
    has_logits = not node.medium or node.medium.codes > 0
    item = _item(recipe)
    keeps_logits = settings.remat in ("none", "dots") and item == 2  # as `models.head` does
    recompute = Shares(
        layer=forward.layer if settings.remat == "full" and factors[name] else 0.0,
        last=forward.last if node.module.losses and has_logits and factors[name] and not keeps_logits else 0.0,
    )
    head = settings.head_width + settings.value_width
    levels = len(model.levels(name))  # beside the features, at the latest from the last stage on
    carried = (1 + levels) * width * settings.width * item
    output_bytes = carried
    if node.ends:
        merge = node.module.patches_per_token
        output_bytes = width // merge * (model.token_width(name) + levels * node.module.merged_width) * item
    return ModuleWork(
        name=name,
        layers=settings.layers,
        model_width=settings.width,
        width=width,
        rows=0.0,
        forward=forward,
        backward=backward + recompute,
        parameters=parameters,
        trained=trained,
        frozen=max((_bytes(recipe.model.optimizers[n].frozen_dtype) for n in trains if n in frozen), default=0),
        averaged=any(recipe.model.optimizers[n].ema for n in trains if n not in frozen),
        recompute=recompute,
        # Ranks of tp share tokens: a gather and a scatter are as much as a sum. Backward gathers inputs once more.
        sums=(2, 5 if recompute.layer else 3),
        heads=(settings.heads, settings.kv_heads),
        # Rows of a condition are split by hand alone: its places have to be a multiple of the ranks.
        ring=0.0 if getattr(settings, "queries", 0) else width * settings.kv_heads * head * item,
        attention=2 * settings.heads * head * _pairs(node.module, width) / settings.layers,
        carried=carried,
        output_bytes=output_bytes,
        together=0 if recipe.train.lowering == "single" else node.module.patches_per_token,
        blended=node.medium.blended if node.medium else 1,
        after=tuple(edge.source for edge in model.into(name)),
        enters=tuple(layer for edge in model.out_of(name) for layer in edge.inject),
        experts=_expert_work(recipe, model, name, width) if settings.experts > 1 else None,
    )


def _expert_work(recipe: Recipe, model: MultimodalModel, name: str, width: int) -> ExpertWork:
    """The experts of a module in rows of `width` positions, adapters of experts included, without memory."""
    settings, frozen = model.nodes[name].config, recipe.model.frozen
    parameters = trained = 0.0
    for stage in model.stages(dict.fromkeys(model.nodes, Layout())):
        for part in (part for part in stage.slices if part.module in model.parts_of(name)):
            leaves = (leaf for leaf in jax.tree.leaves(part.leaves()) if EXPERTS in leaf.dims)
            count = sum(len(leaf.names) * math.prod(leaf.logical_shape) for leaf in leaves)
            parameters, trained = parameters + count, trained + count * (part.module not in frozen)
    per_layer = 1 / settings.layers
    return ExpertWork(
        count=settings.experts,
        per_token=settings.experts_per_token,
        parameters=parameters * per_layer,
        trained=trained * per_layer,
        forward=2 * parameters * per_layer * settings.experts_per_token / settings.experts * width,
        features=width * settings.width * _item(recipe),
        hidden=2 * width * settings.experts_per_token * settings.expert_width * _item(recipe),
        buffer=settings.expert_buffer,
        traced_ep=next(ep for ep in range(2, settings.experts + 1) if settings.experts % ep == 0),
    )


def traced_experts(
    recipe: Recipe, model: MultimodalModel, packer: Packer, name: str, work: ModuleWork, tps: Sequence[int]
) -> ExpertWork | None:
    """The experts of a module with the bytes that a device needs, which are traced when they are first read.

    None for a module without several experts.

    Args:
      recipe: the run's configuration, in which no `remat` is "auto".
      model: its model, as `build_model(recipe, tokenizer)` makes it.
      packer: its packer, as `build_packer(recipe, tokenizer)` makes it.
      name: the module's name, such as "llm".
      work: its work, as `module_work` gives it.
      tps: every tp that it may have.
    """
    experts = work.experts
    if experts is None:
        return None

    ep = experts.traced_ep

    def traced(layout: Layout) -> StageMemory:
        tp = layout.tp
        numbers = work.dense.trained.layer + experts.trained / layout.ep
        gradient = numbers * _item(recipe) / tp
        return trace_experts(recipe, model, packer, name, layout, width=work.width, gradient=gradient)

    @cache
    def divided(key: tuple[int, str]) -> StageMemory:
        return traced(Layout(tp=key[0], dp=ep, ep=ep, ep_way=key[1]))

    @cache
    def whole(tp: int) -> StageMemory:
        return traced(Layout(tp=tp, dp=ep, ep=ep, ep_way="all-to-all", expert_tp=1))

    tps_of_whole = [tp for tp in tps if tp > 1 and experts.count % (ep * tp) == 0]
    return replace(
        experts,
        memory=TracedLater(itertools.product(tps, EP_WAYS), divided),
        whole=TracedLater(tps_of_whole, whole),
    )


def _pairs(module: Module, width: int) -> int:
    """Keys that the tokens of a row see in all layers, if the row is one segment."""
    return int(split_of(module, Layout()).pairs({"segments": np.ones(width, np.int64)}).sum())


def _bytes(dtype: str) -> int:
    """Bytes of a number; 0 where no dtype is named."""
    return jnp.dtype(dtype).itemsize if dtype else 0


def _sizes(
    model: MultimodalModel, name: str, width: int, shares: Mapping[Mask, float]
) -> tuple[dict[str, Shares], dict[str, Shares]]:
    """Forward FLOPs of a row and numbers of parameters, of each part of a node."""
    module = model.nodes[name].module
    lengths = {name: [width - (module.medium.special if module.medium else 0)]}
    layers = module.config.layers
    model_1, model_2 = model, model.with_settings(name, layers=2 * layers)
    pairs = {name: {mask: round(share * width * (width + 1) / 2) for mask, share in shares.items()}}
    by_flops = flops.forward_flops(model_1, lengths, pairs), flops.forward_flops(model_2, lengths, pairs)
    by_parameters = flops.parameter_count(model_1), flops.parameter_count(model_2)
    # Products outside of layers are the head's in a module with a loss, and the stem's in others.
    stem_flops = 0 if module.losses else 2 * by_flops[0][name] - by_flops[1][name]
    stem = jax.tree.leaves(ModuleSlice(name, (), module.parts(first=True, last=False)).leaves())
    stem_parameters = sum(math.prod(leaf.logical_shape) for leaf in stem)
    return _split(model, name, *by_flops, stem_flops), _split(model, name, *by_parameters, stem_parameters)


def _split(
    model: MultimodalModel, name: str, counts_1: Mapping[str, int], counts_2: Mapping[str, int], stem: int
) -> dict[str, Shares]:
    """Counts of each part of a node by where they arise: from counts with its layers and with twice as many.

    Layers of several groups count their mean. ``stem`` of the ends' count is before the first layer.
    """
    node, projector = model.nodes[name], projector_name(name)
    layer = (counts_2[name] - counts_1[name]) / node.config.layers
    shares = {name: Shares(first=stem, layer=layer, last=2 * counts_1[name] - counts_2[name] - stem)}
    if node.lora.rank:
        adapters = lora_name(name)
        shares[adapters] = Shares(layer=counts_1[adapters] / node.config.layers)
    if node.projector:
        shares[projector] = Shares(last=counts_1[projector]) if node.ends else Shares(first=counts_1[projector])
    return shares
