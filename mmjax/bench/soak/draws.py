"""Random configurations that `validate` accepts: tiny models, every other setting free.

A draw is a pure function of a seed and a number. A configuration that `load_config` refuses is drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmjax.bench.soak.models import FOLDER_LAYERS, Modules, draw_modules, from_folder, model_bindings
from mmjax.config import load_config
from mmjax.configurable import ConfigError
from mmjax.data.reorder import METHODS
from mmjax.data.sources.config import KINDS as SOURCES
from mmjax.data.tasks.digits.config import DRAW
from mmjax.mesh.config import ROUTES, TRANSPORTS
from mmjax.mesh.layout import CP_TOKENS, CP_WAYS, EP_WAYS, GATHERS, SHARDS
from mmjax.schedule.schedules import INNER, LANED, NESTING, OFFLOADING, SCHEDULES, SURROUNDING, WINDOWED

DEVICES = 8
TRIES = 400
ENDINGS = {"kill": 4, "interrupt": 2, "terminate": 3, "pause": 1}
"""Weights of the ways to stop a run: SIGKILL, Ctrl-C, SIGTERM, or SIGSTOP and SIGCONT after a while."""
LANED_GATHERS = ("pull", "pull", "step")
"""Ways to gather the parameters of modules with lanes."""
DRAWN = "pictures"
"""The kind of source whose pictures may be made of their captions."""
GROWING = "llava"
"""The kind of source whose data may grow."""
Bindings = tuple[str, ...]
_TARGETS = (("attn/q", "attn/v"), ("attn/?",), ("attn/*",), ("mlp/*", "attn/o"))
"""Weights with adapters."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A drawn run, and the events of its trial.

    Attributes:
      seed: the seed of the draw.
      number: the number of the draw.
      shared: bindings that both layouts share.
      layout: bindings of the run's layout.
      other_layout: bindings of another layout.
      steps: steps of the run.
      processes: number of processes that share the devices.
      data_server: whether a data server prepares the batches.
      stop_after: the step after which the run is stopped; 0 is before the first.
      ending: how it is stopped, one of ``ENDINGS``; after a pause it goes on.
      delay: seconds from that step to the ending.
      data_grow: whether records are added to its data before it is resumed.
      from_folder: whether its LLM starts from a folder of safetensors.
      restore_up_to: the run under the other layout starts from the newest checkpoint up to this step, or from the
        beginning where there is none.
      eval_elsewhere: whether it is evaluated under the other layout.
    """

    seed: int
    number: int
    shared: Bindings
    layout: Bindings
    other_layout: Bindings
    steps: int
    processes: int
    data_server: bool
    stop_after: int
    ending: str
    delay: float
    data_grow: bool
    from_folder: bool
    restore_up_to: int
    eval_elsewhere: bool


def make_draw(seed: int, number: int, data: Mapping[str, Path], folders: Sequence[Path] = ()) -> Draw:
    """Draws run `number` of a seed; the same arguments give the same draw.

    Args:
      seed: the seed.
      number: the number of the draw.
      data: paths of datasets, by `Source.kind`.
      folders: folders of safetensors that an LLM of `FOLDER_LAYERS` layers may start from.

    Raises:
      RuntimeError: no drawn configuration is accepted, which is a defect of this module.
    """
    rng = random.Random(f"{seed}/{number}")
    folder = random.Random(f"{seed}/{number}/folder").choice(folders) if folders else None
    for _ in range(TRIES):
        modules = draw_modules(rng)
        steps = rng.randint(3, 5)
        weights = folder if modules.layers["llm"] == FOLDER_LAYERS and rng.random() < 0.4 else None
        model = from_folder(model_bindings(rng, modules), weights) if weights else model_bindings(rng, modules)
        shared = (*model, *_data(rng, modules, data), *_run(rng, steps), *_training(rng, modules))
        layouts = list(_accepted(rng, modules, shared))
        if len(layouts) == 2:
            data_server, stop_after = rng.random() < 0.08, rng.randint(0, steps - 1)
            may_grow = stop_after and not data_server and f"{GROWING}/Source.kind={GROWING!r}" in shared
            data_grow = bool(may_grow) and rng.random() < 0.5
            return Draw(
                seed=seed,
                number=number,
                shared=shared,
                layout=layouts[0],
                other_layout=layouts[1],
                steps=steps,
                processes=2 if rng.random() < 0.08 else 1,
                data_server=data_server,
                stop_after=stop_after,
                ending=rng.choices([*ENDINGS], weights=[*ENDINGS.values()])[0],
                delay=rng.choice((0.0, rng.uniform(0, 2))),
                data_grow=data_grow,
                from_folder=weights is not None,
                restore_up_to=steps - 1 if data_grow else rng.choice((0, rng.randint(1, steps - 1))),
                eval_elsewhere=rng.random() < 0.5,
            )
    raise RuntimeError(f"draw {number} of seed {seed}: {TRIES} models without two legal layouts")


def _data(rng: random.Random, modules: Modules, data: Mapping[str, Path]) -> Iterator[str]:
    yield f"Data.workers={rng.choice((0, 0, 0, 1, 2))}"
    method = rng.choice(("none", *METHODS))
    yield f"Data.reorder={method!r}"
    yield from _buckets(rng, (*modules.media, "llm"), reordered=method != "none")
    sees, draws = "vision" in modules.encoders, "painter" in modules.generators
    if sees and not modules.generators and rng.random() < 0.4:
        yield from _sources(rng, data, rng.sample(SOURCES, rng.choice((1, 1, 2))))
    elif set(modules.generators) == {"painter"} and rng.random() < 0.5:
        yield from _sources(rng, data, (DRAWN, *(("llava",) if sees and rng.random() < 0.5 else ())))
        yield from (f"{DRAWN}/Source.draw=True", f"{DRAWN}/Source.drawn_size={rng.choice(((8, 8), (8, 16)))!r}")
    else:
        yield from _digits(rng, sees=sees, hears="audio" in modules.encoders, draws=draws)


def _buckets(rng: random.Random, names: Sequence[str], *, reordered: bool) -> Iterator[str]:
    """Several buckets for at most one module, seldom for two: a stage has a program for each combination of buckets.

    Microbatches of one bucket take the same time: with these alone there would be nothing to reorder.
    """
    most = 2 if rng.random() < 0.15 else 1
    several = rng.sample(names, min(len(names), most if reordered else rng.randint(0, most)))
    for name in names:
        yield f"{name}/Packing.buckets={rng.choice(('2', '3') if name in several else ('()', '1'))}"


def _digits(rng: random.Random, *, sees: bool, hears: bool, draws: bool) -> Iterator[str]:
    """Bindings of the digits task, with questions about images and sounds, and drawings."""
    least = 0 if sees and hears else 1
    yield f"Digits.images={(rng.choice((least, 1)), rng.choice((1, 2))) if sees else (0, 0)!r}"
    yield f"Digits.calls={(rng.choice((least, 1)), 1) if hears else (0, 0)!r}"
    yield f"Digits.digits={(1, rng.choice((1, 2)))!r}"
    yield f"Digits.scale={rng.choice(((1.0, 1.0), (0.8, 1.3)))!r}"
    yield f"Digits.turns={rng.choice((1, 1, 2))}"
    yield f"Digits.read={float(sees)}"
    yield f"Digits.count={rng.choice((0.0, 1.0)) * sees}"
    yield f"Digits.hear={float(hears)}"
    yield f"Digits.both={rng.choice((0.0, 1.0)) * (sees and hears)}"
    yield f"Digits.{DRAW}={float(draws)}"
    yield f"Digits.curriculum={rng.choice(('()', '((0, 1), (8, 2))'))}"
    # Some lengths are not divisible by cp. Samples fill the shortest rows: their buckets end where the rows do.
    yield f"Data.sequence_length={rng.choice((64, 96)) + 40 * hears + 40 * draws + rng.choice((0, 0, 1, 2))}"


def _sources(rng: random.Random, data: Mapping[str, Path], kinds: Sequence[str]) -> Iterator[str]:
    yield f"Data.sources={ {kind: rng.choice((1.0, 0.5)) for kind in kinds}!r}"
    for kind in kinds:
        yield f"{kind}/Source.kind={kind!r}"
        yield f"{kind}/Source.path={str(data[kind])!r}"
        yield f"{kind}/Source.template={rng.choice(('plain', 'vicuna', 'llama2', 'chatml'))!r}"
        yield f"{kind}/Source.system={rng.choice(('', 'be brief'))!r}"
        yield f"{kind}/Source.max_patches={rng.choice((16, 40))}"
        yield from (f"{kind}/Source.question='What is it?'",) if kind == DRAWN else ()
        yield f"{kind}/Source.cut={rng.random() < 0.5}"
        yield f"{kind}/Source.held_out={rng.choice((0, 4))}"
        if rng.random() < 0.5:
            yield from (f"{kind}/Source.mean=(0.5,)", f"{kind}/Source.std=(0.5,)")
        if rng.random() < 0.3:
            yield from (f"{kind}/Source.resize='fixed'", f"{kind}/Source.size=(16, 24)")
            yield f"{kind}/Source.fit={rng.choice(('pad', 'crop', 'stretch'))!r}"
    yield f"Data.sequence_length={rng.choice((192, 256))}"


def _run(rng: random.Random, steps: int) -> Iterator[str]:
    microbatches = rng.choice((1, 2, 2, 2, 3, 4))
    schedule = rng.choice(
        [*SCHEDULES, *NESTING]
    )  # nesting needs modules with lanes: half of the draws would be refused otherwise
    yield f"Train.steps={steps}"
    yield f"Train.microbatches={microbatches}"
    yield f"Train.global_batch={microbatches * rng.randint(1, 4)}"
    yield f"Train.schedule={schedule!r}"
    if schedule in SURROUNDING:
        yield f"Train.inner={rng.choice(INNER)!r}"
    if schedule in WINDOWED:
        yield f"Train.window={rng.randint(0, microbatches)}"
    yield f"Train.lowering={rng.choice(('auto', 'auto', 'ops', 'single'))!r}"
    yield f"Train.dtype={rng.choice(('float32',) * 4 + ('bfloat16',))!r}"
    yield f"Train.clip_norm={rng.choice((0.0, 1.0, 0.05))}"
    yield f"Train.seed={rng.choice((0, 7))}"
    yield f"Train.log_every={rng.choice((1, 25))}"
    yield f"Train.eval_every={rng.choice((0, 0, 0, 2))}"
    yield f"Train.eval_samples={rng.choice((0, 2, 3))}"
    yield f"Train.predictions={rng.choice((0, 2))}"
    yield f"Train.debug_nans={rng.random() < 0.05}"
    yield f"Train.deterministic={rng.random() < 0.1}"
    yield f"Checkpoint.every={rng.choice((0, 1, 1, 2, 3))}"
    yield f"Checkpoint.keep={rng.choice((1, 3))}"
    yield f"World.transport={rng.choice(TRANSPORTS)!r}"
    yield f"World.route={rng.choice(ROUTES)!r}"
    yield f"World.warm_up={rng.choice(('auto', 'auto', 'on'))!r}"


def _adapters(rng: random.Random, modules: Modules) -> Iterator[str]:
    """Adapters of some modules, each frozen more often than other modules are."""
    if rng.random() < 0.7:
        return
    for name in modules.layers:
        if rng.random() < 0.7:
            yield f"{name}/Lora.rank={rng.choice((1, 3, 4))}"
            yield f"{name}/Lora.alpha={rng.choice((1.0, 16.0))}"
            yield f"{name}/Lora.targets={rng.choice(_TARGETS)!r}"
            yield f"{name}/Optimizer.frozen={rng.random() < 0.7}"
            yield f"{name}_lora/Optimizer.frozen={rng.random() < 0.1}"


def _training(rng: random.Random, modules: Modules) -> Iterator[str]:
    yield f"Optimizer.learning_rate={rng.choice((0.003, 0.02))}"
    yield f"Optimizer.schedule={rng.choice(('constant', 'cosine', 'linear'))!r}"
    yield f"Optimizer.warmup={rng.choice((0, 1, 2))}"
    yield f"Optimizer.weight_decay={rng.choice((0.0, 0.1))}"
    yield f"Optimizer.ema={rng.choice((0.0, 0.0, 0.5))}"
    frozen_share = 0.25 if rng.random() < 0.5 else 0.0
    for name in modules.trained:
        yield f"{name}/Optimizer.frozen={rng.random() < frozen_share}"
    yield from _adapters(rng, modules)
    if rng.random() < 0.3:
        yield f"llm/Optimizer.rates={rng.choice(({'embed': 0.1}, {'layers/*/attn/*': 0.5, 'layers/*': 2.0}))!r}"
        yield f"Optimizer.layer_decay={rng.choice((1.0, 0.5, 0.9))}"
    yield f"Checkpoint.copy_frozen={rng.random() < 0.7}"
    yield f"Optimizer.frozen_dtype={rng.choice(('', '', 'float32', 'bfloat16', 'float16'))!r}"


def _accepted(rng: random.Random, modules: Modules, shared: Sequence[str]) -> Iterator[Bindings]:
    """Yields up to two different layouts that `load_config` accepts."""
    layouts: list[Bindings] = []
    has_delta = any(binding.startswith("llm/Decoder.delta_heads") for binding in shared)
    in_order = ("llm/Layout.cp_tokens='contiguous'",) if has_delta else ()
    for _ in range(30):
        layout = (*_layouts(rng, modules, shared), *in_order)
        try:
            load_config([], [*shared, *layout], allow_code=True)
        except ConfigError as error:
            if "\n" in str(error):
                raise RuntimeError(f"a refusal of several lines: {error}") from error
            continue
        if layout not in layouts:
            layouts.append(layout)
            yield layout
        if len(layouts) == 2:
            return


def _cp_degree(rng: random.Random) -> int:
    return rng.choice((1, 1, 1, 2, 2, 3, 4))


def _shared_tokens(rng: random.Random, name: str, cp: int) -> Iterator[str]:
    """Bindings of sequence parallelism and context parallelism of a module."""
    shared = rng.random() < 0.8
    yield from (f"{name}/Layout.sp={shared}", f"{name}/Layout.overlap={shared and rng.random() < 0.3}")
    yield f"{name}/Layout.cp={cp}"
    yield f"{name}/Layout.cp_way={rng.choice(CP_WAYS)!r}"
    yield f"{name}/Layout.cp_tokens={rng.choice(CP_TOKENS)!r}"
    yield from _shared_states(rng, name)


def _shared_states(rng: random.Random, name: str) -> Iterator[str]:
    """Bindings of sharded parameters and of expert parallelism; the LLM has experts in some draws alone."""
    yield f"{name}/Layout.shard={rng.choice(('states', *SHARDS))!r}"
    yield f"{name}/Layout.gather={rng.choice(GATHERS)!r}"
    if name == "llm":
        yield f"llm/Layout.ep={rng.choice((1, 1, 2, 2, 3))}"
        yield f"llm/Layout.ep_way={rng.choice(EP_WAYS)!r}"
        yield f"llm/Layout.expert_tp={rng.choice((0, 0, 1))}"


def _instances(rng: random.Random, dp: int) -> int:
    """Number of optimizer instances of dp ranks: mostly one, else any divisor of dp."""
    return rng.choice((1, rng.choice([n for n in range(1, dp + 1) if dp % n == 0])))


def _spread(rng: random.Random, modules: Modules, *, phased: bool) -> Iterator[str]:
    """Bindings of layouts in which encoders and generators have lanes over the ranks of the LLM; some have none."""
    pp, dp, tp = rng.choice((2, 2, 3)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    dp, cp = dp if pp * dp * tp <= DEVICES else 1, rng.choice((1, 1, 2))
    cp = cp if pp * dp * tp * cp <= DEVICES else 1
    chunks = 2 if pp * 2 <= modules.layers["llm"] and rng.random() < 0.5 else 1
    size = pp * dp * tp * cp
    yield from _shared_tokens(rng, "llm", cp)
    yield from (f"llm/Layout.pp={pp}", f"llm/Layout.dp={dp}", f"llm/Layout.tp={tp}", f"llm/Layout.chunks={chunks}")
    for name in (name for name in modules.layers if name != "llm"):
        lanes = rng.choice([n for n in range(2, size + 1) if size % n == 0])
        width = rng.choice([n for n in (1, 2) if size // lanes % n == 0])
        if rng.random() < 0.2:
            yield f"{name}/Layout.rank_offset={size}"
        else:
            parts = rng.choice([n for n in (1, 2) if size // lanes // width % n == 0])
            yield from (f"{name}/Layout.lanes={lanes}", f"{name}/Layout.tp={width}")
            yield from _shared_tokens(rng, name, parts)
            if shards := rng.random() < 0.6:  # other shards than those of states are for modules without lanes
                yield from (f"{name}/Layout.shard='parameters'", f"{name}/Layout.gather={rng.choice(LANED_GATHERS)!r}")
            yield f"{name}/Layout.dp={size // lanes // width // parts}"
            yield f"{name}/Offload.activations={rng.random() < 0.3}"
            is_idle_between = phased and not shards and name in modules.encoders
            yield f"{name}/Offload.parameters={is_idle_between and rng.random() < 0.5}"
            spanned = size // width // parts
            yield f"{name}/Layout.optimizer_instances={_instances(rng, spanned)}"
    yield f"Train.unroll={rng.random() < 0.3}"


def _replicated(rng: random.Random, modules: Modules) -> Iterator[str]:
    """Bindings of layouts in which every pipeline stage of the LLM has a copy of each encoder."""
    dp, tp = rng.choice((1, 2)), rng.choice((1, 1, 2))
    yield from ("llm/Layout.pp=2", f"llm/Layout.dp={dp}", f"llm/Layout.tp={tp}")
    for name in modules.encoders:
        width = rng.choice([n for n in (1, 2) if dp * tp % n == 0])
        yield from (f"{name}/Layout.copies=2", f"{name}/Layout.tp={width}", f"{name}/Layout.dp={dp * tp // width}")
    for name in modules.generators:
        yield f"{name}/Layout.rank_offset={rng.choice((0, 2 * dp * tp)) % DEVICES}"
    yield f"Train.unroll={rng.random() < 0.3}"


def _microbatches(rng: random.Random, modules: Modules, name: str, *, windowed: bool) -> Iterator[str]:
    """Bindings of an encoder whose op takes several microbatches of a window, or all."""
    if windowed and name in modules.encoders and rng.random() < 0.4:
        yield f"{name}/Layout.microbatches={rng.choice((0, 0, 2))}"


def _on_one_rank_set(rng: random.Random, modules: Modules, *, windowed: bool) -> Iterator[str]:
    """Bindings of layouts on the same ranks, each module with degrees and optimizer instances of its own."""
    size = rng.choice((4, 6, 8, 8))
    for name in modules.layers:
        pp = rng.choice((1, 1, 2)) if name == "llm" and modules.layers["llm"] > 1 else 1
        tp = rng.choice([n for n in (1, 1, 2, 4) if size // pp % n == 0])
        cp = rng.choice([n for n in (1, 1, 1, 2, 3) if size // pp // tp % n == 0])
        dp = size // pp // tp // cp
        yield from (f"{name}/Layout.dp={dp}", f"{name}/Layout.tp={tp}", f"{name}/Layout.pp={pp}")
        yield from _microbatches(rng, modules, name, windowed=windowed)
        yield from _shared_tokens(rng, name, cp)
        yield f"{name}/Layout.optimizer_instances={_instances(rng, dp)}"
    yield f"Train.unroll={rng.random() < 0.3}"


def _layouts(rng: random.Random, modules: Modules, shared: Sequence[str]) -> Iterator[str]:
    """Bindings of the modules' layouts.

    Modules are on ranks after one another, all from rank 0 on, or anywhere. Where the schedule has lanes, encoders and
    generators may be spread over the LLM's ranks; encoders may also be replicated on them.
    """
    phased = any(f"Train.schedule={name!r}" in shared for name in OFFLOADING)
    windowed = any(f"Train.schedule={name!r}" in shared for name in WINDOWED)
    if any(f"Train.schedule={name!r}" in shared for name in NESTING) or (
        rng.random() < 0.4 and any(f"Train.schedule={name!r}" in shared for name in LANED)
    ):
        yield from _spread(rng, modules, phased=phased)
        return
    if modules.encoders and rng.random() < 0.1:
        yield from _replicated(rng, modules)
        return
    if rng.random() < 0.25:
        yield from _on_one_rank_set(rng, modules, windowed=windowed)
        return
    style, end = rng.choice(("apart", "apart", "together", "together", "anywhere")), 0
    for name, layers in modules.layers.items():
        pp = rng.choice([pp for pp in (1, 1, 2, 3) if pp <= layers])
        chunks = 2 if pp > 1 and pp * 2 <= layers and rng.random() < 0.5 else 1
        dp, tp, cp = rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2)), _cp_degree(rng)
        offset = {"apart": end, "together": 0}.get(style, rng.randrange(DEVICES))
        size = dp * tp * pp * cp
        end += size
        if (end > DEVICES and style == "apart") or offset + size > DEVICES:
            dp, tp, pp, chunks, cp, offset = 1, 1, 1, 1, 1, min(offset, DEVICES - 1)
        yield from (f"{name}/Layout.dp={dp}", f"{name}/Layout.tp={tp}", f"{name}/Layout.pp={pp}")
        yield from _shared_tokens(rng, name, cp)
        yield from (f"{name}/Layout.chunks={chunks}", f"{name}/Layout.rank_offset={offset}")
        yield from _microbatches(rng, modules, name, windowed=windowed)
        yield f"{name}/Layout.optimizer_instances={_instances(rng, dp)}"
        yield f"{name}/Offload.optimizer={rng.random() < 0.1}"
        yield f"{name}/Offload.parameters={phased and name != 'llm' and rng.random() < 0.3}"
        yield f"{name}/Offload.activations={phased and name != 'llm' and rng.random() < 0.3}"
    yield f"Train.unroll={rng.random() < 0.3}"
