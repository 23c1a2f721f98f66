"""Runs a tiny model under any layout and by the dense reference, on the same samples from the same parameters.

The samples are what packing has to cope with: uneven images, several in a row, none at all, anywhere in the text; and
rows that stay empty, because the number of samples is odd.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from mmjax import reference
from mmjax.data.packing import Packer
from mmjax.data.types import EncoderSpec, Microbatch, Sample, StepBatch
from mmjax.mesh.layout import Layout, cell_count
from mmjax.mesh.world import World, WorldConfig
from mmjax.models.decoder import DecoderConfig
from mmjax.models.multimodal import Encoder, MultimodalModel
from mmjax.models.projector import ProjectorConfig
from mmjax.models.vit import ViTConfig
from mmjax.optimizer import OptimizerConfig
from mmjax.pipeline.build import PlacedModel, Settings
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.schedules import SCHEDULES
from mmjax.pipeline.straight import StraightExecutor
from mmjax.pipeline.validate import validate

Leaves = dict[str, np.ndarray]

DEVICES, SEED, STEPS, LENGTH = 8, 3, 3, 20
VOCAB, PAD = 37, 0  # odd: under tp=2 the vocabulary is padded
PLACEHOLDERS = {"vision": 36, "depth": 35}
PATCH, MERGE, ROW, LARGEST, IMAGES = 2, 2, 32, 16, 3  # an encoder row holds two of the largest images
VIT = ViTConfig(layers=2, width=16, heads=2, mlp=24, patch=PATCH, channels=1, merge=MERGE, grid=6)
DECODER = DecoderConfig(layers=3, width=24, heads=4, kv_heads=2, head_dim=8, mlp=40, vocab=VOCAB)

TEXT = 1  # the kind without images
# Of a sample: its length, and for each image where its placeholders start and its size in pixels. The reference
# compiles once per length and number of placeholders, so kinds share those.
KINDS: tuple[tuple[int, tuple[tuple[int, tuple[int, int]], ...]], ...] = (
    (16, ((5, (8, 8)),)),
    (9, ()),
    (20, ((0, (12, 4)), (18, (4, 8)))),
    (20, ((2, (4, 8)), (4, (8, 8)), (12, (4, 8)))),
    (16, ((0, (8, 8)),)),
    (20, ((4, (4, 8)), (11, (12, 4)))),
)


def model_with(*, vision: Mapping[str, Any] | None = None, llm: Mapping[str, Any] | None = None) -> MultimodalModel:
    """The tiny model with other settings."""
    vit, decoder = replace(VIT, **(vision or {})), replace(DECODER, **(llm or {}))
    return MultimodalModel(encoders={"vision": Encoder("vit", vit, ProjectorConfig(hidden=20))}, llm=decoder)


MODEL = model_with()
MODELS = {
    "plain": MODEL,
    "deep": model_with(llm={"layers": 5}),
    "tied": model_with(llm={"tied": True}),
    "deep and tied": model_with(llm={"layers": 5, "tied": True}),
    "learned": model_with(vision={"positions": "learned2d", "activation": "quick_gelu"}),
    "two": replace(MODEL, encoders={**MODEL.encoders, "depth": Encoder("vit", replace(VIT, layers=1))}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and everything else that may differ between two runs.

    Attributes:
      vision, llm: layouts; ``depth``, the second encoder of model "two", shares vision's.
      microbatches, schedule, transport, route: of the pipeline.
      one_program: whether to take the straight-line program; ``None`` takes it where a training run would.
      buckets, one_bucket: encoder buckets, empty for one that holds the worst case; whether a step keeps to one.
      model: key of ``MODELS``.
      frozen, samples, text_only, clip_norm, weight_decay: of the training; of all fields the reference sees ``model``
        and these. The first ``text_only`` samples have no images.
      dtype, remat: of the programs.
    """

    vision: Layout = field(default_factory=Layout)
    llm: Layout = field(default_factory=Layout)
    microbatches: int = 2
    schedule: str = "1f1b"
    transport: str = "auto"
    route: str = "leader"
    one_program: bool | None = None
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left behind.

    Attributes:
      losses: by step.
      norms: gradient norm of each module before clipping, by step.
      leaves: logical leaves with both moments, before the first step and after each.
    """

    losses: list[float]
    norms: list[dict[str, float]]
    leaves: list[Leaves]


# ---- samples ---------------------------------------------------------------------------------------------------------


def make_sample(rng: np.random.Generator, kind: int, encoders: Sequence[str] = ("vision",)) -> Sample:
    """A sample with random text, images (of each encoder in turn) and loss weights, some of them 0."""
    length, placed = KINDS[kind % len(KINDS)]
    tokens = rng.integers(0, min(PLACEHOLDERS.values()), length).astype(np.int32)
    weights = (rng.random(length) * (rng.random(length) < 0.8)).astype(np.float32)
    images: dict[str, tuple[np.ndarray, ...]] = dict.fromkeys(encoders, ())
    for i, (start, (height, width)) in enumerate(placed):
        encoder = encoders[i % len(encoders)]
        tokens[start : start + height * width // (PATCH * MERGE) ** 2] = PLACEHOLDERS[encoder]
        images[encoder] += (rng.normal(size=(height, width, 1)).astype(np.float32),)
    return Sample(
        tokens=tokens,
        loss_weights=weights,
        media=images,
        question="",
        answer="",
        prompt=length,
        media_tokens={encoder: PLACEHOLDERS[encoder] for encoder in encoders},
    )


@cache
def step_samples(
    count: int, encoders: tuple[str, ...] = ("vision",), text_only: int = 0
) -> tuple[tuple[Sample, ...], ...]:
    """The samples of every step; the first ``text_only`` have no images."""
    rng = np.random.default_rng(0)
    kinds = [[TEXT if i < text_only else step + i for i in range(count)] for step in range(STEPS)]
    return tuple(tuple(make_sample(rng, kind, encoders) for kind in chosen) for chosen in kinds)


def make_packer(case: Case, cells: int) -> Packer:
    """The packer of a case."""
    rows_per_cell = math.ceil(math.ceil(case.samples / case.microbatches) / cells)
    buckets = case.buckets or ((math.ceil(IMAGES * rows_per_cell / (ROW // LARGEST)), ROW),)
    spec = EncoderSpec(patch=PATCH, merge=MERGE, channels=1, buckets=buckets)
    return Packer(
        encoders=dict.fromkeys(MODELS[case.model].encoders, spec),
        sequence_length=LENGTH,
        microbatches=case.microbatches,
        cells=cells,
        pad=PAD,
        one_bucket=case.one_bucket,
    )


def signed(part: Microbatch) -> tuple[Any, Any]:
    """A microbatch as executors take it."""
    return tuple(sorted(part.bucket.items())), part.inputs


def optimizers(case: Case) -> dict[str, OptimizerConfig]:
    """AdamW by module. ``eps`` is large enough that the noise of elements without a gradient stays noise."""
    rates = {"vision": 2e-3, "vision_projector": 5e-3, "depth": 1e-3, "depth_projector": 3e-3, "llm": 1e-3}
    return {
        module: OptimizerConfig(
            learning_rate=rate,
            schedule="linear",
            final_learning_rate=1e-3,
            weight_decay=case.weight_decay,
            eps=1e-4,
            frozen=module in case.frozen,
        )
        for module, rate in rates.items()
        if module in MODELS[case.model].modules
    }


# ---- the product -----------------------------------------------------------------------------------------------------


@cache
def world() -> World:
    """All devices."""
    return World.create(WorldConfig(devices=DEVICES, platform="cpu"), [Layout()])


class Session:
    """A case ready to run: placed, traced and, once something runs, compiled.

    Attributes:
      case: what it was made from.
      placed, schedule, executor: the product's.
      batches: one per step.
    """

    def __init__(self, case: Case):
        self.case, model = case, MODELS[case.model]
        layouts = {**dict.fromkeys(model.encoders, case.vision), "llm": case.llm}
        packer = make_packer(case, cell_count(layouts.values()))
        samples = step_samples(case.samples, tuple(model.encoders), case.text_only)
        self.batches: list[StepBatch] = [packer.step(i, chosen) for i, chosen in enumerate(samples)]
        settings = Settings(
            optimizers=optimizers(case),
            total_steps=STEPS,
            dtype=case.dtype,
            clip_norm=case.clip_norm,
            transport=case.transport,
            route=case.route,
        )
        encoders = {
            name: replace(encoder, config=replace(encoder.config, remat=case.remat))
            for name, encoder in model.encoders.items()
        }
        model = replace(model, encoders=encoders, llm=replace(model.llm, remat=case.remat))
        self.placed = PlacedModel(model, layouts, world(), settings)
        shapes = dict(signed(part) for batch in self.batches for part in batch.microbatches)
        costs = self.placed.nominal_costs(next(iter(shapes.values())))
        self.schedule = SCHEDULES[case.schedule](self.placed.graph, case.microbatches, costs)
        validate(self.schedule)
        one_program = case.one_program
        if one_program is None:
            bounds = [self.schedule.bound(name) for name in self.placed.stages]
            one_program = self.placed.straight_line and max(bounds) == 1
        self.executor = (StraightExecutor if one_program else Executor)(self.placed, self.schedule, shapes)

    def start(self) -> Session:
        """Compiles and initialises."""
        self.executor.compile()
        self.executor.initialise(SEED)
        return self

    def step(self, index: int) -> tuple[float, dict[str, float]]:
        """Loss and gradient norms of one step."""
        batch = self.batches[index]
        return self.executor.step([signed(part) for part in batch.microbatches], batch.denominator).fetch()

    def leaves(self) -> Leaves:
        """Every logical leaf, on the host."""
        return logical_leaves(self.placed, self.executor.states)


def logical_leaves(placed: PlacedModel, states: Mapping[str, Any]) -> Leaves:
    """Logical leaves of all stages' states, on the host."""
    result: Leaves = {}
    for name, stage in placed.stages.items():
        for leaf, value in stage.state.to_logical(states[name]).items():
            assert leaf not in result, f"{leaf} is held by two stages"
            result[leaf] = np.asarray(value)
    return result


def run(case: Case) -> Run:
    """``STEPS`` steps of a case."""
    session = Session(case).start()
    result = Run(losses=[], norms=[], leaves=[session.leaves()])
    for index in range(STEPS):
        loss, norms = session.step(index)
        result.losses.append(loss)
        result.norms.append(norms)
        result.leaves.append(session.leaves())
    return result


# ---- the reference ---------------------------------------------------------------------------------------------------


@cache
def initial_parameters(model: str) -> Leaves:
    """The product's own initialisation on one device, by logical name without ``params/``."""
    graph, configs = MODELS[model], optimizers(Case(model=model))
    layouts = dict.fromkeys((*graph.encoders, "llm"), Layout())
    placed = PlacedModel(graph, layouts, world(), Settings(optimizers=configs, total_steps=1))
    key = jax.random.key(SEED)
    leaves = logical_leaves(placed, {name: stage.state.initialise(key) for name, stage in placed.stages.items()})
    return {name.removeprefix("params/"): leaf for name, leaf in leaves.items() if name.startswith("params/")}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the dense reference says, in the same terms as ``Run``, and the gradients before clipping of every step."""

    losses: list[float]
    norms: list[dict[str, float]]
    leaves: list[Leaves]
    gradients: list[Leaves]


@cache
def _expected(
    model: str, frozen: tuple[str, ...], samples: int, text_only: int, clip_norm: float, weight_decay: float
) -> Expected:
    case = Case(model=model, frozen=frozen, weight_decay=weight_decay)
    configs, state = optimizers(case), reference.TrainState(leaves=dict(initial_parameters(model)))
    result = Expected(losses=[], norms=[], leaves=[_named(state, configs)], gradients=[])
    for step, chosen in enumerate(step_samples(samples, tuple(MODELS[model].encoders), text_only)):
        out = reference.step_loss_and_gradients(state.leaves, MODELS[model], chosen)
        # Frozen ones are dropped here and not before the differentiation, so that it compiles once for all cases.
        gradients = {name: g for name, g in out.gradients.items() if module_of(name) not in frozen}
        rates = {module: reference.learning_rate(config, step, STEPS) for module, config in configs.items()}
        state = reference.adamw_step(state, gradients, configs, rates, clip_norm=clip_norm)
        result.losses.append(out.loss)
        result.norms.append({module: reference.global_norm(gradients, module) for module in configs})
        result.gradients.append(gradients)
        result.leaves.append(_named(state, configs))
    return result


def expected(case: Case) -> Expected:
    """The reference's run of a case; layouts, schedules and microbatches make no difference to it."""
    return _expected(case.model, case.frozen, case.samples, case.text_only, case.clip_norm, case.weight_decay)


def _named(state: reference.TrainState, configs: Mapping[str, OptimizerConfig]) -> Leaves:
    """The state under the names of checkpoint leaves; moments that do not exist yet are 0."""
    result = {f"params/{name}": np.asarray(leaf) for name, leaf in state.leaves.items()}
    for name, leaf in state.leaves.items():
        if not configs[module_of(name)].frozen:
            result[f"adam_m/{name}"] = np.asarray(state.first.get(name, np.zeros_like(leaf)))
            result[f"adam_v/{name}"] = np.asarray(state.second.get(name, np.zeros_like(leaf)))
    return result


# ---- comparison ------------------------------------------------------------------------------------------------------


def module_of(name: str) -> str:
    """Module of a logical leaf, with or without its kind in front."""
    first, _, rest = name.partition("/")
    return rest.split("/")[0] if first in ("params", "adam_m", "adam_v") else first


def of_kind(leaves: Mapping[str, np.ndarray], kind: str) -> Leaves:
    """Leaves of one kind, without it in their names."""
    return {name.removeprefix(f"{kind}/"): leaf for name, leaf in leaves.items() if name.startswith(f"{kind}/")}


def difference(after: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray]) -> Leaves:
    """Leaf by leaf, in float64."""
    return {name: after[name].astype(np.float64) - before[name].astype(np.float64) for name in after}


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Euclidean norm over all elements."""
    return float(np.sqrt(sum(float(np.sum(np.square(a.astype(np.float64)))) for a in arrays)))


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
