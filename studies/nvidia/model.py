"""The models of `tables` as the planner's work, and their runs as its candidates.

The paper names sizes but no shapes. Its first author's public benchmark has shapes and settings
(github.com/yashaswikarnati/Megatron-LM, benchmarks/mimo_throughput: configs/models and training.py, 2026). Sizes that
it lacks get the shape of a public model, or 48 layers as wide as the size needs. These are the same for all rows:

* A vision token is one patch of a picture of 1,024 (the benchmark; it also fits how Table A3's memory grows with them,
  at 34 bytes for each token, layer and unit of width: Korthikanti et al., "Reducing Activation Recomputation", §4.1).
* Encoders have no sequence parallelism and no fused kernels, and under an inherited cp every rank has all their tokens.
  LLMs have both.
* Gradients are summed in bfloat16 behind the last backward; states are sharded over dp and cp.
* An encoder is recomputed if it is larger than 1B (so the captions), and where a step would not fit otherwise. It then
  has a forward and no backward: the benchmark gives it inputs without gradients, and Megatron-LM's reentrant checkpoint
  computes no gradients if no input has one. Nothing that it computed is kept.
* A microbatch is one sample of each replica of the LLM (the benchmark; Table A3 prints it), and layers are cut into
  stages by their seconds ("LLM pipeline-layer balance", §4), an inherited encoder included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mmjax.mesh.layout import Layout
from mmjax.models.config import LLM
from mmjax.models.families import module_of
from mmjax.models.llama.config import DecoderConfig
from mmjax.models.module import Module
from mmjax.models.vit.config import ViTConfig
from mmjax.planner.accelerators import H100
from mmjax.planner.candidates import Candidate
from mmjax.planner.clock import Efficiency, PassSeconds
from mmjax.planner.estimate import Estimate
from mmjax.planner.needs import DeviceBytes
from mmjax.planner.work import ModuleWork, Shares, StageMemory, StagePart, Work
from mmjax.schedule.graph import EdgeNode
from mmjax.schedule.partition import backward_factor, cut
from studies.nvidia.clock import Inside, MegatronClock, Reached, streamed_apart, streamed_fused

VISION = "vision"
PICTURE = 1024
"""Patches, and vision tokens, of one picture."""
ITEM, GRADIENT = 2, 2
"""Bytes of a number, and of a sum of gradients. With 4 for the latter, weights, sums and states of 70B under tp 8 alone
would take 57 of the 61.5 GB that Table A2 prints, and leave no room for 23 GB of activations."""
FLASH = 2.5
"""A backward of attention as a multiple of its forward: it computes the scores again, so it has five products for two
(Dao et al., "FlashAttention", §3.1)."""
PLAIN, SPREAD = 10, 24
"""The parts of Korthikanti's 34 bytes that tp does not cut without sequence parallelism, and that it cuts."""


def _llm(layers: int, width: int, heads: int) -> DecoderConfig:
    """An LLM with as many key/value heads; its gated mlp of 8/3 widths has the FLOPs of a plain one of four."""
    return DecoderConfig(
        layers=layers, width=width, heads=heads, kv_heads=heads, mlp=round(8 * width / 3), vocab=128000
    )  # fmt: skip


def _vit(layers: int, width: int, heads: int = 16) -> ViTConfig:
    return ViTConfig(layers=layers, width=width, heads=heads, mlp=4 * width, patch=14, channels=3, merge=1)


LLMS = {
    "7B": _llm(32, 4096, 32),
    "14B": _llm(48, 5120, 40),
    "32B": _llm(64, 6144, 48),
    "70B": _llm(80, 8192, 64),
    "120B": DecoderConfig(layers=88, width=12288, heads=96, kv_heads=8, mlp=28672, vocab=32768),
}
"""Shapes of LLMs: those of the benchmark, and for 120B Mistral Large (123B)."""
ENCODERS = {
    "1B": _vit(40, 1408),
    "3B": _vit(48, 2304, 32),
    "6B": _vit(48, 3072, 24),
    "7.2B": _vit(48, 3520),
    "12B": _vit(60, 4096, 32),
}
"""Shapes of encoders: those of the benchmark, and 7.2B."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch.

    Attributes:
      encoder: name of the encoder.
      llm: name of the LLM.
      tokens: tokens of a sample.
      vision_tokens: how many of them are vision tokens.
      batch: samples of a step.
      recompute: whether the encoder is recomputed.
    """

    encoder: str
    llm: str
    tokens: int
    vision_tokens: int
    batch: int
    recompute: bool = False


def encoder_work(workload: Workload, layout: Layout) -> ModuleWork:
    """An encoder with its projector on the vision tokens of a sample, as one row."""
    vit, llm, tokens = ENCODERS[workload.encoder], LLMS[workload.llm], workload.vision_tokens
    pictures = [PICTURE] * (tokens // PICTURE)
    layer, stem = by_layer(lambda module: module.forward_flops(pictures), vit)
    layer_parameters, stem_parameters = by_layer(lambda module: module.parameters(), vit)
    projector = vit.width * llm.width + llm.width**2
    forward = Shares(first=stem, layer=layer, last=2 * tokens * projector)
    parameters = Shares(first=stem_parameters, layer=layer_parameters, last=projector)
    factor = 0.0 if workload.recompute else backward_factor(trained=True, trained_before=True)
    last = backward_factor(trained=True, trained_before=True) * forward.last
    backward = Shares(first=factor * forward.first, layer=factor * layer, last=last)
    run = (PLAIN + SPREAD / layout.tp) * tokens * vit.width
    memory = StageMemory(
        residuals=Shares(
            layer=0.0 if workload.recompute else run, last=ITEM * tokens * (vit.width + 2 * llm.width)
        ),
        temporary=Shares(layer=run if workload.recompute else 0.0),
    )  # fmt: skip
    return ModuleWork(
        name=VISION, layers=vit.layers, model_width=vit.width, width=tokens, rows=1.0, forward=forward,
        backward=backward, parameters=parameters, trained=parameters, sums=(2, 0 if workload.recompute else 2),
        carried=ITEM * tokens * vit.width, output_bytes=ITEM * tokens * llm.width, memory={layout.tp: memory},
    )  # fmt: skip


def llm_work(workload: Workload, layout: Layout) -> ModuleWork:
    """An LLM on a sample, with sequence parallelism: tp divides a layer's residuals and its output."""
    llm, tokens, tp = LLMS[workload.llm], workload.tokens, layout.tp
    layer, head = by_layer(lambda module: module.forward_flops([tokens]), llm)
    layer_parameters, ends = by_layer(lambda module: module.parameters(), llm)
    forward, table = Shares(layer=layer, last=head), llm.vocab * llm.width
    parameters = Shares(first=table, layer=layer_parameters, last=ends - table)
    factor = backward_factor(trained=True, trained_before=True)
    attention = 2.0 * tokens * (tokens + 1) * llm.width
    logits = 4 * tokens * llm.vocab / tp
    memory = StageMemory(
        residuals=Shares(layer=(PLAIN + SPREAD) * tokens * llm.width / tp, last=logits),
        temporary=Shares(last=logits),
    )
    heads = llm.width // llm.heads
    return ModuleWork(
        name=LLM, layers=llm.layers, model_width=llm.width, width=tokens, rows=1.0, forward=forward,
        backward=Shares(layer=factor * (layer - attention) + FLASH * attention, last=factor * head),
        parameters=parameters, trained=parameters,
        ring=2 * ITEM * tokens * llm.kv_heads * heads, attention=attention, heads=(llm.heads, llm.kv_heads),
        carried=ITEM * tokens * llm.width / tp, output_bytes=0.0, memory={tp: memory}, after=(VISION,),
    )  # fmt: skip


def by_layer(count: Callable[[Module], int], config: Any) -> tuple[float, float]:
    """The count of a layer, and of everything else, from counts with one layer and with two."""
    single, double = (float(count(module_of(replace(config, layers=layers)))) for layers in (1, 2))
    return double - single, 2 * single - double


def inside(workload: Workload, encoder: Layout, llm: Layout) -> dict[str, Inside]:
    """Work of both modules beside products, by name."""
    vit, decoder, vision_tokens, tokens = (
        ENCODERS[workload.encoder], LLMS[workload.llm], workload.vision_tokens, workload.tokens
    )  # fmt: skip
    scores, causal = 4.0 * PICTURE * vision_tokens * vit.width, 2.0 * tokens * (tokens + 1) * decoder.width
    ahead, back = streamed_apart(vision_tokens, vit.width, encoder.tp)
    layers, logits = streamed_fused(tokens, decoder.width, llm.tp), 2 * ITEM * tokens * decoder.vocab / llm.tp
    back, scored = (0.0, 0.0) if workload.recompute else (back, 2 * scores)
    return {
        VISION: Inside(attention=(scores, scored), streamed=(Shares(layer=ahead), Shares(layer=back))),
        LLM: Inside(
            attention=(causal, FLASH * causal),
            streamed=(Shares(layer=layers[0], last=logits), Shares(layer=layers[1], last=logits)),
        ),
    }


class MegatronEstimate(Estimate):
    """An estimate of Megatron-LM: states are sharded over dp and cp, and three phases pack the encoder's outputs."""

    def _shards(self, layout: Layout) -> int:
        return layout.dp * layout.cp // layout.optimizer_instances

    def _once(self, name: str, index: int, part: StagePart) -> dict[str, float]:
        """As in the base class, but the reduction of gradients overlaps with the last backward."""
        seconds = super()._once(name, index, part)
        return seconds | {"reduce": max(0.0, seconds["reduce"] - self.pass_seconds(name, part).backward)}

    def _exchange(self, name: str, part: StagePart, compute: PassSeconds) -> tuple[float, float]:
        """As in the base class, but the ring hides behind the seconds of attention, not behind its share of FLOPs."""
        module, layout = self.work.modules[name], self.candidate.layouts[name]
        if module.context(layout) == 1:
            return 0.0, 0.0
        assert isinstance(self.clock, MegatronClock)
        (rows, width), ranks = self.rows[name], layout.dp * module.context(layout)
        attention = self.clock.attention_pass(name, part, rows=rows / ranks, width=width, tp=layout.tp)
        share = module.attention * part.layers / module.forward.of(part)
        return super()._exchange(
            name, part, PassSeconds(forward=attention.forward / share, backward=attention.backward / share)
        )

    def _whole_rows(self, name: str, part: StagePart) -> tuple[float, float]:
        """No time: a rank of the LLM gets its part of a row, and an encoder's ranks have rows of their own."""
        return 0.0, 0.0

    def _crossing(self, edge: EdgeNode) -> float:
        """As in the base class, but ranks of cp get parts of rows from other modules too."""
        return super()._crossing(edge) / self._parts(edge)

    def _arriving(self, edge: EdgeNode) -> float:
        """Likewise."""
        return super()._arriving(edge) / self._parts(edge)

    def _parts(self, edge: EdgeNode) -> int:
        """Ranks that share the tokens of an edge from another module."""
        source, target = (self.graph.stage(name).module for name in (edge.src, edge.dst))
        return self._context(target) if source != target else 1

    def _exchanged(self, name: str) -> float:
        """Not counted, as other temporaries of attention are not."""
        return 0.0

    def balanced(self, *, inherited: bool) -> tuple[int, ...]:
        """Number of layers of each LLM stage that makes the longest stage as short as possible.

        inherited: whether the encoder is on the first stage.
        """
        layer, last = self._both(LLM, StagePart(layers=1)), self._both(LLM, StagePart(layers=1, last=True))
        seconds = [layer] * (self.work.modules[LLM].layers - 1) + [last]
        if inherited:
            seconds[0] += self._both(VISION, self.work.modules[VISION].whole)
        return tuple(map(len, cut(seconds, self.candidate.layouts[LLM].pp)))

    def _both(self, name: str, part: StagePart) -> float:
        """Seconds of forward and backward of a microbatch."""
        seconds = self.pass_seconds(name, part)
        return seconds.forward + seconds.backward

    def _device_bytes(self, stage: str) -> DeviceBytes:
        need = super()._device_bytes(stage)
        if not self.candidate.traits.phases or stage != f"{LLM}.0":
            return need
        layout, encoder = self.candidate.layouts[LLM], self.work.modules[VISION]
        packed = self.work.global_batch / layout.dp * encoder.output_bytes
        return replace(need, activations=need.activations + packed)


class PassesOnly(MegatronEstimate):
    """Forward and backward alone, as Table A3 times them: ops that run once a step take no time."""

    def _once(self, name: str, index: int, part: StagePart) -> dict[str, float]:
        return dict.fromkeys(("prepare", "reduce", "update"), 0.0)


ANY = Reached(products=0.5, attention=0.5, communication=0.5)
"""Any efficiencies, for memory, which does not depend on them."""
MODES = {"H": ("homogeneous", "1f1b"), "C": ("colocated", "three-phase"), "NC": ("non-colocated", "1f1b")}


def estimate(
    workload: Workload, mode: str, encoder: Layout, llm: Layout, reached: Reached, *, passes_only: bool = False
) -> MegatronEstimate:
    """The estimate of a workload in mode "H", "C" or "NC" on H100s; `passes_only`: of forwards and backwards alone."""
    workload = replace(workload, recompute=_recomputed(workload, mode, encoder, llm))
    return _estimate(workload, mode, encoder, llm, reached, PassesOnly if passes_only else MegatronEstimate)


@lru_cache(maxsize=1024)
def _recomputed(workload: Workload, mode: str, encoder: Layout, llm: Layout) -> bool:
    """Whether the encoder is recomputed."""
    if workload.encoder != "1B":
        return True
    plain = _estimate(workload, mode, encoder, llm, ANY, MegatronEstimate)
    return plain.most > H100.memory


def _estimate(
    workload: Workload,
    mode: str,
    encoder: Layout,
    llm: Layout,
    reached: Reached,
    estimate_type: type[MegatronEstimate],
) -> MegatronEstimate:
    name, schedule = MODES[mode]
    work = Work(
        modules={VISION: encoder_work(workload, encoder), LLM: llm_work(workload, llm)},
        global_batch=workload.batch, item=ITEM, gradient=GRADIENT,
    )  # fmt: skip
    llm = replace(llm, cp_way="ring")
    candidate = Candidate(
        mode=name, layouts={VISION: encoder, LLM: llm}, microbatches=workload.batch // llm.dp,
        schedule="1f1b" if llm.pp == 1 else schedule,
    )  # fmt: skip
    link = reached.communication
    clock = MegatronClock(
        work=work, accelerator=H100, attention=reached.attention, inside=inside(workload, encoder, llm),
        efficiency=Efficiency(compute=reached.products, link=link, network=link),
    )  # fmt: skip
    rows = {VISION: (float(llm.dp), workload.vision_tokens), LLM: (float(llm.dp), workload.tokens)}
    even = estimate_type(work=work, clock=clock, candidate=candidate, rows=rows)
    if llm.pp == 1:
        return even
    layouts = {VISION: encoder, LLM: replace(llm, layers=even.balanced(inherited=mode == "H"))}
    return replace(even, candidate=replace(candidate, layouts=layouts))
