"""Cases for the parity of a tiny model: any layout against the dense reference, with the product's own machinery.

What `mmjax.parity` does for a user's configuration is done here for cases that share their shapes and the reference's
runs, and compared leaf by leaf.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import marks
import numpy as np

from mmjax.assembly import assembly
from mmjax.assembly.assembly import assemble
from mmjax.assembly.compiled_runs import NO_RUNS
from mmjax.assembly.model import splits_of
from mmjax.assembly.parts import Assembly
from mmjax.checkpoint import CheckpointConfig
from mmjax.data.config import DataConfig, PackingConfig
from mmjax.data.packing import Packer
from mmjax.data.types import Microbatch
from mmjax.mesh.config import WorldConfig
from mmjax.mesh.layout import Layout, cell_count
from mmjax.mesh.world import World
from mmjax.models.callbacks import Callbacks
from mmjax.models.config import CallbacksConfig, lora_name, projector_name
from mmjax.models.dit.config import DiTConfig
from mmjax.models.families import kind_of
from mmjax.models.graph import MultimodalModel, multimodal
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.lora.config import LoraConfig
from mmjax.models.mmdit.config import MMDiTConfig
from mmjax.models.nodes import Node
from mmjax.models.projector.config import ProjectorConfig
from mmjax.models.unet.config import UNetConfig
from mmjax.models.vit.config import ViTConfig
from mmjax.optimizer_config import OptimizerConfig
from mmjax.parity import product
from mmjax.parity.compare import Expected, Leaves, Run, difference, module_of, norm, of_kind
from mmjax.parity.dense import run_reference
from mmjax.parity.product import logical_leaves
from mmjax.parity.samples import LENGTH, TEXT, Maker, Steps, buckets
from mmjax.pipeline import zero
from mmjax.pipeline.config import OffloadConfig
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import deferred_bytes, residual_bytes
from mmjax.pipeline.place import InputShapes
from mmjax.pipeline.walker import Signature
from mmjax.recipe import LoraSpec, ModelSpec, ModuleSpec, ProjectorSpec, Recipe, TrainConfig
from mmjax.schedule.graph import StageGraph
from mmjax.schedule.ops import Schedule
from mmjax.schedule.schedules import make_schedule
from mmjax.schedule.simulate import simulate
from mmjax.schedule.validate import validate

__all__ = ["LENGTH", "Expected", "Leaves", "Run", "difference", "logical_leaves", "module_of", "of_kind", "signed"]

DEVICES, SEED, STEPS = 8, 3, 3
VOCAB, PAD = 37, 0  # odd: under tp=2 the vocabulary is padded
PATCH, MERGE = 2, 2
VIT = ViTConfig(layers=2, width=16, heads=2, mlp=24, patch=PATCH, channels=1, merge=MERGE, grid=6)
DECODER = DecoderConfig(layers=3, width=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=VOCAB)


# What families of language models differ in; the first group of layers has no window.
FAMILIES = {
    **dict(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, window=5, full_layers=1),
    **dict(rope_scaling="llama3", rope_factor=8.0, rope_context=64, rope_theta=100.0),
}
# Two local layers and a global one; a token sees its image beyond the window.
MASKED = {"mask": "gemma3", "window": 5, "full_every": 3, "layers": 4}
DIT = DiTConfig(layers=2, width=16, heads=2, mlp=24, patch=PATCH, channels=2, merge=MERGE, frequencies=3)
STREAMS = MMDiTConfig(layers=2, width=16, heads=2, mlp=24, patch=PATCH, channels=2, queries=2)
QUERIES = replace(DIT, merge=1, queries=2)
UNET = UNetConfig(
    width=12,
    channels=2,
    queries=2,
    canvases=((2, 4), (4, 4)),
    widths=(8, 16),
    heads_by_level=(2, 0),
    mid_heads=2,
    groups=2,
    norm_eps=1e-2,
)


def model_with(
    *,
    vision: Mapping[str, Any] | None = None,
    llm: Mapping[str, Any] | None = None,
    encoders: Mapping[str, Any] | None = None,
    generators: Mapping[str, Any] | None = None,
    projectors: Mapping[str, ProjectorConfig] | None = None,
    callbacks: Mapping[str, Callbacks] | None = None,
    loras: Mapping[str, LoraConfig] | None = None,
) -> MultimodalModel:
    """The tiny model with other settings and more modules."""
    vit, decoder = replace(VIT, **(vision or {})), replace(DECODER, **(llm or {}))
    projectors = {"vision": ProjectorConfig(hidden=20)} | dict(projectors or {})
    return multimodal({"vision": vit} | dict(encoders or {}), decoder, generators, projectors, callbacks, loras)


ADAPTERS = {
    "vision": LoraConfig(rank=2),
    "llm": LoraConfig(rank=3, alpha=4.5, targets=("attn/?", "mlp/down", "mlp/up")),
}
MODEL = model_with()
MODELS = {
    "plain": MODEL,
    "deep": model_with(llm={"layers": 5}),
    "tied": model_with(llm={"tied": True, "z_loss": 0.02}),
    "deep and tied": model_with(llm={"layers": 5, "tied": True}),
    "chunked": model_with(vision={"layers": 4}, llm={"layers": 6}),
    "chunked and tied": model_with(vision={"layers": 4}, llm={"layers": 6, "tied": True, "z_loss": 0.05}),
    "twelve": model_with(llm={"layers": 12}),
    "learned": model_with(vision={"positions": "learned2d", "activation": "quick_gelu"}),
    "injected": model_with(projectors={"vision": ProjectorConfig(hidden=20, inject=(0, 2))}),
    "levels": model_with(
        vision={"layers": 3}, projectors={"vision": ProjectorConfig(hidden=20, inject=(0, 2), levels=(0, 1))}
    ),
    "drawing": model_with(generators={"painter": DIT}, projectors={"painter": ProjectorConfig(hidden=12)}),
    "drawing, tied": model_with(llm={"tied": True}, generators={"painter": replace(DIT, loss_weight=0.3)}),
    "drawing twice": model_with(
        generators={"painter": DIT, "printer": replace(DIT, merge=1, loss_weight=2.0)},
        projectors={"painter": ProjectorConfig(hidden=12)},
    ),
    "drawing by a ddpm": model_with(
        generators={
            "painter": replace(
                DIT, process="ddpm", prediction="v", sampler="ddim", zero_snr=True, min_snr=5.0, drop_condition=0.5
            )
        }
    ),
    "drawing, guided": model_with(
        generators={
            "painter": replace(DIT, guidance=3.0, steps=5, shift=2.0),
            "printer": replace(DIT, merge=1, guidance=0.5, steps=3),
        },
        projectors={"painter": ProjectorConfig(hidden=12)},
    ),
    "drawing, queries": model_with(generators={"painter": QUERIES, "printer": replace(DIT, loss_weight=2.0)}),
    "drawing, streams": model_with(generators={"painter": STREAMS}),
    "drawing, references": model_with(
        generators={"painter": replace(STREAMS, references=2, guidance=2.0, steps=3, drop_condition=0.3)}
    ),
    "drawing, streams, chunked": model_with(
        llm={"layers": 4}, generators={"painter": replace(STREAMS, layers=4)}, loras={"painter": LoraConfig(rank=2)}
    ),
    "drawing, unet": model_with(generators={"painter": UNET}, projectors={"painter": ProjectorConfig(hidden=12)}),
    "drawing, chunked": model_with(llm={"layers": 4}, generators={"painter": replace(DIT, layers=4)}),
    "marked": model_with(callbacks={name: marks.functions(name) for name in marks.MARKS}),
    "families": model_with(llm=FAMILIES),
    "families, tied": model_with(llm={**FAMILIES, "tied": True, "layers": 4, "full_layers": 3, "rope_scaling": "yarn"}),
    "adapted": model_with(loras=ADAPTERS),
    "adapted, tied": model_with(llm={"tied": True, "z_loss": 0.02}, loras=ADAPTERS),
    "adapted, chunked": model_with(vision={"layers": 4}, llm={"layers": 6}, loras=ADAPTERS),
    "adapted, families": model_with(llm={**FAMILIES, "tied": True}, loras=ADAPTERS),
    "adapted, drawing": model_with(
        generators={"painter": DIT},
        projectors={"painter": ProjectorConfig(hidden=12)},
        loras={"painter": LoraConfig(rank=2, targets=("modulation/kernel", "attn/[qk]"))},
    ),
    "four heads": model_with(vision={"heads": 4}, llm={"kv_heads": 4, "tied": True}),
    "two": model_with(encoders={"depth": replace(VIT, layers=1)}),
    "masked": model_with(llm=MASKED),
    "masked, prefix": model_with(
        llm={"mask": "paligemma", "chunk": 7, "full_layers": 2, "tied": True}, generators={"painter": DIT}
    ),
}
PLACEHOLDERS = Maker.of(MODEL).placeholders


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and everything else that may differ between two runs.

    Attributes:
      vision, llm, painter: layouts; ``depth``, the second encoder of model "two", shares vision's, and ``printer``, the
        second generator of "drawing twice", has the LLM's.
      microbatches, schedule, inner, transport, route: of the pipeline.
      lowering: see ``TrainConfig``.
      buckets, one_bucket: encoder buckets, empty for one that holds the worst case; whether a step keeps to one.
      model: key of ``MODELS``.
      frozen, samples, text_only, clip_norm, weight_decay: of the training; of all fields the reference sees ``model``
        and these. The first ``text_only`` samples have no images.
      dtype, remat, unroll: of the programs.
      overlap: ``TrainConfig.overlap_grad_reduce``.
      frozen_dtype: what frozen modules are held in; "" is ``dtype``.
      stash: whether what the encoder keeps for its backward is in host memory meanwhile.
    """

    vision: Layout = field(default_factory=Layout)
    llm: Layout = field(default_factory=Layout)
    painter: Layout = field(default_factory=Layout)
    microbatches: int = 2
    schedule: str = "1f1b"
    inner: str = "1f1b"
    transport: str = "auto"
    route: str = "leader"
    lowering: str = "auto"
    buckets: tuple[tuple[int, int], ...] = ()
    one_bucket: bool = False
    model: str = "plain"
    frozen: tuple[str, ...] = ()
    samples: int = 13
    text_only: int = 0
    clip_norm: float = 0.0
    weight_decay: float = 0.0
    dtype: str = "float32"
    remat: str = "none"
    unroll: bool = False
    overlap: bool = False
    frozen_dtype: str = ""
    stash: bool = False

    @property
    def per(self) -> int:
        """Samples of a microbatch."""
        return math.ceil(self.samples / self.microbatches)

    def config(self) -> Recipe:
        """The case as a configuration."""
        model = MODELS[self.model]
        return Recipe(
            train=TrainConfig(
                steps=STEPS,
                global_batch=self.per * self.microbatches,
                microbatches=self.microbatches,
                schedule=self.schedule,
                inner=self.inner,
                lowering=self.lowering,
                seed=SEED,
                dtype=self.dtype,
                clip_norm=self.clip_norm,
                unroll=self.unroll,
                overlap_grad_reduce=self.overlap,
            ),
            world=WorldConfig(devices=DEVICES, platform="cpu", transport=self.transport, route=self.route),
            data=DataConfig(sequence_length=LENGTH),
            checkpoint=CheckpointConfig(),
            model=ModelSpec(nodes={name: self._node(name, node) for name, node in model.nodes.items()}),
            allow_code=True,
        )

    def _node(self, name: str, node: Node) -> ModuleSpec:
        """The settings of a node of the model."""
        model, by_part = MODELS[self.model], optimizers(self)
        is_encoder, is_generator = name in model.encoders, name in model.generators
        projector = node.projector and ProjectorSpec(settings=node.projector, optimizer=by_part[projector_name(name)])
        adapters = LoraSpec(settings=node.lora, optimizer=by_part.get(lora_name(name), OptimizerConfig()))
        return ModuleSpec(
            name=name,
            kind="vit" if is_encoder else kind_of(node.config),
            role="encoder" if is_encoder else "generator" if is_generator else "llm",
            settings=replace(node.config, remat=self.remat),
            layout=self.vision if is_encoder else self.painter if name == "painter" else self.llm,
            optimizer=by_part[name],
            projector=projector,
            lora=adapters,
            packing=PackingConfig(buckets=self.buckets if name != "llm" else ()),
            offload=OffloadConfig(activations=self.stash and name == "vision"),
            callbacks=marks.named(name) if node.callbacks.by_place else CallbacksConfig(),
        )


@cache
def step_samples(count: int, model: str = "plain", text_only: int = 0) -> Steps:
    """The samples of every step; the first ``text_only`` have no images."""
    maker = Maker.of(MODELS[model])
    kinds = [[TEXT if i < text_only else step + i for i in range(count)] for step in range(STEPS)]
    return tuple(
        tuple(maker.sample(np.random.default_rng((0, step, i)), kind) for i, kind in enumerate(chosen))
        for step, chosen in enumerate(kinds)
    )


def make_packer(case: Case, cells: int, *, lists: bool = True) -> Packer:
    """The packer of a case; what is scored or answered has no ``lists``."""
    specs = Maker.of(MODELS[case.model]).encoders
    rows = math.ceil(case.per / cells)
    return Packer(
        encoders={
            name: replace(spec, buckets=case.buckets or buckets(spec, rows, several=False), longest=0)
            for name, spec in specs.items()
        },
        sequence_length=LENGTH,
        microbatches=case.microbatches,
        cells=cells,
        pad=PAD,
        one_bucket=case.one_bucket,
        mask=MODELS[case.model].llm.mask,
    ).split_over(splits_of(case.config()), lists=lists and case.lowering != "single")


def optimizers(case: Case) -> dict[str, OptimizerConfig]:
    """AdamW by module. ``eps`` is large enough that the noise of elements without a gradient stays noise."""
    rates = {"vision": 2e-3, "vision_projector": 5e-3, "depth": 1e-3, "depth_projector": 3e-3, "llm": 1e-3}
    rates |= {"painter": 3e-3, "painter_projector": 4e-3, "printer": 2e-3, "printer_projector": 5e-3}
    if case.model == "drawing, unet":  # a deeper network, whose next gradient depends more on an update's rounding
        rates["painter"] = 5e-4
    # Large, since A has no gradient before B has moved; B's updates are all of it, so they must be no noise either.
    rates |= {"vision_lora": 0.03, "llm_lora": 0.03, "painter_lora": 0.02}
    return {
        module: OptimizerConfig(
            learning_rate=rate,
            schedule="linear",
            final_learning_rate=1e-3,
            weight_decay=case.weight_decay,
            eps=1e-2 if module.endswith("_lora") else 1e-4,
            frozen=module in case.frozen,
            frozen_dtype=case.frozen_dtype,
        )
        for module, rate in rates.items()
        if module in MODELS[case.model].modules
    }


@cache
def world() -> World:
    """All devices."""
    return World.create(WorldConfig(devices=DEVICES, platform="cpu"), [Layout(dp=DEVICES)])


# An assembly's programs are thousands of memory mappings, of which Linux allows a process 65 530.
@lru_cache(maxsize=6)
def _assembled(case: Case, small: int) -> Assembly:
    """A case placed and traced; ``small`` is what ``zero.SMALL`` was then."""
    config = case.config()
    # A configuration that trains nothing is refused; the executors take it, and are tested with it.
    legal = not set(config.model.optimizers) <= set(case.frozen)
    with contextlib.nullcontext() if legal else mock.patch.object(assembly, "validate_recipe"):
        return assemble(config, make_packer(case, cell_count(config.model.layouts.values())))


def _parts(case: Case) -> Assembly:
    """The parts of a case with an executor of its own.

    Cases with the same stages share what is placed, traced and compiled: a program per op is the same in every schedule
    that splits no backward, and for any number of microbatches of a size.
    """
    lanes = max(layout.lanes for layout in case.config().model.layouts.values())
    plain = "zb-h1" if "zb-h1" in (case.schedule, case.inner) else "1f1b"
    if case.schedule == "nested":
        order = {"schedule": "nested", "inner": plain}
    else:
        order = {"schedule": plain if lanes == 1 else "gpipe", "inner": "1f1b"}
    count = max(2, lanes)
    base = replace(case, **order, microbatches=count, samples=count * case.per - 1, text_only=0, stash=False)
    shared = _assembled(base, zero.SMALL)
    if not isinstance(shared.executor, Executor):
        shared = _assembled(case, zero.SMALL)
        return replace(shared, executor=copy.copy(shared.executor))
    costs = shared.placed.nominal_costs(next(iter(shared.shapes.values())))
    stashing = [name for name, node in case.config().model.nodes.items() if node.offload.activations]
    stages = (replace(node, stash=node.module in stashing) for node in shared.placed.graph.stages)
    graph = replace(shared.placed.graph, stages=tuple(stages))
    schedule = make_schedule(case.schedule, graph, case.microbatches, costs, inner=case.inner)
    held = (shared.placed, shared.shapes.values(), schedule.graph)
    return replace(
        shared,
        schedule=schedule,
        report=validate(schedule, residual_bytes(*held), deferred_bytes(*held)),
        planned=simulate(schedule, costs),
        executor=rescheduled(shared.executor, schedule),
    )


def rescheduled(executor: Executor, schedule: Schedule) -> Executor:
    """Another executor with the same programs, and nothing of what the given one holds."""
    other = copy.copy(executor)
    assert _unstashed(schedule.graph) == _unstashed(executor.schedule.graph), "other programs"
    other.schedule, other.states, other.sums = schedule, {}, {}
    other._run = type(executor.walker)(other)
    return other


def _unstashed(graph: StageGraph) -> StageGraph:
    """The graph without its copies of what waits, which are no programs."""
    return replace(graph, stages=tuple(replace(node, stash=False) for node in graph.stages))


class Session(product.Session):
    """A case ready to run; see ``_parts`` for what sessions share."""

    def __init__(self, case: Case):
        self.case, self.recipe, self.parts = case, case.config(), _parts(case)
        self.placed, self.schedule, self.executor = self.parts.placed, self.parts.schedule, self.parts.executor
        packer = make_packer(case, self.placed.cells)
        samples = step_samples(case.samples, case.model, case.text_only)
        self.batches = [packer.step(i, chosen) for i, chosen in enumerate(samples)]


def signed(part: Microbatch) -> tuple[Signature, InputShapes]:
    """The buckets of a microbatch and its inputs, a pair for ``Executor.step``."""
    return NO_RUNS.signed([part])[0]


def run(case: Case) -> Run:
    """``STEPS`` steps of a case."""
    return Session(case).start().run()


@cache
def initial_parameters(model: str) -> Leaves:
    """The product's own initialisation on one device, by logical name without ``params/``."""
    case = Case(model=model)
    return product.initial_parameters(case.config(), make_packer(case, 1))


@cache
def _expected(
    model: str, frozen: tuple[str, ...], samples: int, text_only: int, clip_norm: float, weight_decay: float
) -> Expected:
    configs = optimizers(Case(model=model, frozen=frozen, weight_decay=weight_decay))
    steps = step_samples(samples, model, text_only)
    return run_reference(MODELS[model], configs, initial_parameters(model), steps, clip_norm)


def expected(case: Case) -> Expected:
    """The reference's run of a case; layouts, schedules and microbatches make no difference to it."""
    return _expected(case.model, case.frozen, case.samples, case.text_only, case.clip_norm, case.weight_decay)


def assert_close(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], tolerance: float, what: str) -> None:
    """‖got − want‖ ≤ tolerance · ‖want‖ per module; per leaf with a tenth of the module's norm added, for noise."""
    assert got.keys() == want.keys(), f"{what}: other leaves: {sorted(got.keys() ^ want.keys())}"
    gap = difference(got, want)
    for module in {module_of(name) for name in want}:
        names = [name for name in want if module_of(name) == module]
        whole, off = norm([want[n] for n in names]), norm([gap[n] for n in names])
        assert off <= tolerance * whole, f"{what} of {module}: off by {off / max(whole, 1e-30):.2e}"
        for n in names:
            limit = tolerance * (norm([want[n]]) + 0.1 * whole)
            assert norm([gap[n]]) <= limit, f"{what} of {n}: off by {norm([gap[n]]):.2e} of {norm([want[n]]):.2e}"
