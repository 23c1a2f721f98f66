"""The gain of an encoder that has a cp of its own beside an LLM with long rows: programs, and a step by a roofline.

Three encoders beside one LLM on the same devices. *Inherited, copied*: Megatron-LM's ranks of cp all encode the same
images. *Inherited, split*: they share each image's patches. *Own*: cp and tp are 1, and as many lanes as the LLM has
ranks of tp and cp encode different microbatches. Figures are of a device and a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mmjax.bench.rows import Row
from studies.h100.report import Stage, collectives, programs, row_of

PATCHES = 1024
"""Of an image, each a token of the LLM (studies/nvidia/model.py)."""
MODEL = (
    *("Digits.scale=(56.0, 56.0)", "vision/ViT.grid=32", "vision/ViT.layers=40", "vision/ViT.width=1408"),
    *("vision/ViT.heads=16", "vision/ViT.mlp=5632", "vision/ViT.class_token=False", "vision/Optimizer.frozen=False"),
    *("llm/Decoder.remat='none'", "llm/Layout.pp=1", "Train.schedule='1f1b'", "Train.microbatches=2"),
)
"""The encoder of 1B parameters before Vicuna-7B, both trained."""


@dataclass(frozen=True)
class Encoder:
    """Forward and backward of an encoder on a device.

    Attributes:
      stage: its programs.
      lanes: microbatches that are encoded side by side.
    """

    stage: Stage
    lanes: int = 1

    @property
    def seconds(self) -> float:
        """Predicted, a microbatch."""
        return self.stage.seconds[0] / self.lanes

    @property
    def flops(self) -> float:
        """Compiled, a microbatch."""
        return sum(sum(work.flops.values()) for work in self.stage.both()) / self.lanes

    @property
    def bytes(self) -> float:
        """Read and written by the compiled programs, a microbatch."""
        return sum(work.bytes for work in self.stage.both()) / self.lanes

    @property
    def sent(self) -> float:
        """Bytes of collectives of the compiled programs, a microbatch."""
        return sum(size for _, size in collectives(self.stage).values()) / self.lanes


@dataclass(frozen=True)
class LongRows:
    """A run with long rows.

    Attributes:
      tokens: of a row; three quarters are of images.
      rows: of a microbatch.
      cp: of the LLM, beside tp of two.
      dp: of the LLM.
      published: the gain of an own layout, as a ratio: Karnati et al., Table A3, 1B+7B; for rows of 8,192 tokens the
        most of BigMac, Figure 11(a), whose LLM has experts.
    """

    tokens: int
    rows: int
    cp: int
    dp: int
    published: float
    tp: int = 2

    @property
    def ranks(self) -> int:
        """Devices, which both modules share."""
        return self.tp * self.cp * self.dp

    def _stage(self, name: str, *bindings: str) -> Stage:
        images = self.rows * self.tokens * 3 // 4 // PATCHES
        shapes = (f"llm/Packing.buckets=(({self.rows}, {self.tokens}),)", f"vision/Packing.buckets=(({images}, 1024),)")
        sizes = (f"Data.sequence_length={self.tokens}", f"Train.global_batch={2 * self.rows}", *shapes)
        llm = (f"llm/Layout.tp={self.tp}", f"llm/Layout.dp={self.dp}")
        return Stage.with_settings((*MODEL, *sizes, *llm, *bindings), name)

    @cached_property
    def encoders(self) -> dict[str, Encoder]:
        """The encoder's forward and backward by way."""
        llm, cudnn = f"llm/Layout.cp={self.cp}", "vision/ViT.attention='cudnn'"
        apart, dp = f"vision/Layout.rank_offset={self.ranks}", f"vision/Layout.dp={self.dp}"
        tp = f"vision/Layout.tp={self.tp}"
        return {
            # A rank of the copies does what one does that has no cp.
            "inherited, copied": Encoder(self._stage("vision.0", llm, apart, dp, tp, cudnn)),
            "inherited, split": Encoder(self._stage("vision.0", llm, apart, dp, tp, f"vision/Layout.cp={self.cp}")),
            "own": Encoder(self._stage("vision.0", llm, apart, dp, cudnn), lanes=self.tp * self.cp),
        }

    @cached_property
    def llm(self) -> float:
        """Seconds of the LLM's forward and backward by the programs, whose attention XLA computes by blocks."""
        return self._llm("gather").seconds[0]

    @cached_property
    def fused_llm(self) -> float:
        """The same where every rank has all tokens of some heads, so that attention is cuDNN's."""
        return self._llm("all-to-all").seconds[0]

    def _llm(self, way: str) -> Stage:
        layout = (f"llm/Layout.cp={self.cp}", f"llm/Layout.cp_way={way!r}")
        return self._stage("llm.0", *layout, f"vision/Layout.rank_offset={self.ranks}")


CASES = (
    LongRows(tokens=8192, rows=2, cp=8, dp=2, published=1.45),
    LongRows(tokens=16384, rows=4, cp=2, dp=4, published=1.085),
    LongRows(tokens=32768, rows=2, cp=4, dp=2, published=1.203),
    LongRows(tokens=65536, rows=2, cp=8, dp=2, published=1.493),
)


def rows() -> Iterator[Row]:
    """For each case and encoder its work, and the step over the step with an own layout."""
    for case in CASES:
        words, own_seconds = f"1B+7B, {case.tokens:,} tokens, cp {case.cp}", case.encoders["own"].seconds
        for name, encoder in case.encoders.items():
            where = f"{words}, encoder {name}"
            yield row_of(f"{where}: F and B, predicted", encoder.seconds * 1e3, "ms")
            yield row_of(f"{where}: F and B, compiled", encoder.flops / 1e12, "TFLOP")
            yield row_of(f"{where}: F and B, compiled", encoder.bytes / 1e9, "GB")
            yield row_of(f"{where}: collectives of F and B, compiled", encoder.sent / 2**20, "MiB")
            for llm, took in (("by blocks", case.llm), ("cuDNN's", case.fused_llm)):
                ratio = (took + encoder.seconds) / (took + own_seconds)
                yield row_of(f"{where}: step over own, LLM's attention {llm}, predicted", ratio, "ratio")
        yield row_of(f"{words}: LLM, F and B by blocks, predicted", case.llm * 1e3, "ms")
        yield row_of(f"{words}: LLM, F and B by cuDNN, all-to-all, predicted", case.fused_llm * 1e3, "ms")
        yield row_of(f"{words}: step over own, published", case.published, "ratio")
        programs.cache_clear()


def tables() -> dict[str, str]:
    """The table of docs/h100.md."""
    lines = ["| LLM | encoder | TFLOP | GB | collectives, MiB | F + B, ms | step over own | published |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        first, own_seconds, llm = (
            f"{case.tokens:,}, cp {case.cp}",
            case.encoders["own"].seconds,
            (case.llm, case.fused_llm),
        )
        for name, encoder in case.encoders.items():
            cells = [f"{encoder.flops / 1e12:.1f}", f"{encoder.bytes / 1e9:.0f}", f"{encoder.sent / 2**20:,.0f}"]
            ratios = " to ".join(f"{(took + encoder.seconds) / (took + own_seconds):.2f}" for took in llm)
            shown = (ratios, f"{case.published:.2f}") if name != "own" else ("", "")
            lines.append("| " + " | ".join([first, name, *cells, f"{encoder.seconds * 1e3:.1f}", *shown]) + " |")
        lines.append(f"| {first} | (the LLM) | | | | {llm[0] * 1e3:,.0f} to {llm[1] * 1e3:,.0f} | | |")
        programs.cache_clear()
    return {"An encoder's own layout beside long rows": "\n".join(lines)}
