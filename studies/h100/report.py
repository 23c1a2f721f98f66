"""The H100 programs of LLaVA-1.5's LLM and of a stage of Llama 3 70B, by way of attention; and the gain of overlap.

All figures are of compiled programs and a roofline; nothing has run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from mmjax.bench.rows import Row
from mmjax.compile.programs import Compiled, Programs
from mmjax.compile.rates import H100, Rates
from mmjax.compile.roofline import Work, logit_arrays, pair_arrays
from mmjax.compile.targets import TARGETS
from mmjax.config import load_config
from mmjax.planner.accelerators import H100 as DATASHEET

GIN = "configs/llava15.gin"
STACKED = (
    *("Train.unroll=False", "vision/ViT.remat='none'", "llm/Decoder.remat='full'"),
    *("Train.microbatches=96", "Train.schedule='1f1b'"),
)
"""One row a microbatch, backward in one, and in place of what a run on H100s would choose, so that tables stay."""
WAYS = ("dense", "blockwise", "cudnn", "tokamax")
TIMED = ("dense", "blockwise", "cudnn")
"""Ways whose FLOPs the program's text tells; of tokamax's kernels it tells none."""
A800 = Rates(products=190e12, products32=75e12, forward=160e12, backward=130e12, memory=1.75e12, link=150e9)
"""DistTrain's devices, assumed to reach the shares of their peaks that H100s are, and 150 of NVLink's 200 GB/s."""
CHUNKS = 4
"""Chunks of a collective of which the first cannot lie beside the product that it is for."""
GAINS = (
    "all collectives beside computations, over none",
    f"all but a first of {CHUNKS} chunks beside, over none",
    "all beside, over those that XLA has beside",
    "rings of `Layout.overlap` as compiled, over none",
)
"""What a gain is of, and over what."""
STEPCCL = {4: (1.10, 1.12), 8: (1.15, 1.17)}
"""Gains of iteration time by tp, least and greatest: one pipeline stage of an LLM (DistTrain, App. A.1, Figure 22)."""


@dataclass(frozen=True)
class Case:
    """A model whose stages are compiled.

    Attributes:
      name: in words.
      bindings: settings beyond ``GIN``'s.
      tokens: of a row; no other dimension is as large, so that arrays of all pairs are seen.
      rows: of a microbatch.
      vocab: columns of the head on a rank.
      inner, last: a stage inside of the LLM, and the one with the head.
    """

    name: str
    bindings: tuple[str, ...]
    tokens: int
    vocab: int
    inner: str
    last: str
    rows: int = 1


def _tensor_parallel(preset: str, layers: int, tp: int, tokens: int, *bindings: str) -> tuple[str, ...]:
    """Settings of three stages of some layers each, at tp; the encoder behind them."""
    sizes = (f"llm/Decoder.preset='{preset}'", f"llm/Decoder.layers={3 * layers}", f"Data.sequence_length={tokens}")
    layout = ("llm/Layout.pp=3", f"llm/Layout.tp={tp}", f"vision/Layout.rank_offset={3 * tp}")
    return (*sizes, *layout, "llm/Packing.buckets=()", "Train.global_batch=3", "Train.microbatches=3", *bindings)


CASES = (
    Case(
        "Vicuna-7B, tp 1, 2,048 tokens",
        ("Data.sequence_length=2048", "llm/Packing.buckets=()"),
        *(2048, 32000, "llm.1", "llm.6"),
    ),
    Case(
        "Llama 3 70B, tp 8, 8,064 tokens",
        _tensor_parallel("llama3-70b", 4, 8, 8064),
        *(8064, 128256 // 8, "llm.1", "llm.2"),
    ),
)


SETTINGS = {
    "stacked, all recomputed": ("Train.unroll=False", "llm/Decoder.remat='full'"),
    "stacked, products kept": ("Train.unroll=False", "llm/Decoder.remat='dots'"),
    "unrolled, all recomputed": ("Train.unroll=True", "llm/Decoder.remat='full'"),
    "unrolled, products kept": ("Train.unroll=True", "llm/Decoder.remat='dots'"),
}
"""How layers run and what is kept of them, by name; the last is what a run on GPUs chooses where it fits."""
SETTING_CASES = (
    CASES[0],
    replace(
        CASES[0],
        name="Vicuna-7B, tp 1, four rows of 2,048 tokens",
        bindings=(*CASES[0].bindings, "Train.global_batch=64", "Train.microbatches=16"),
        rows=4,
    ),
    replace(
        CASES[0],
        name="Vicuna-7B, tp 1, 8,192 tokens",
        bindings=("Data.sequence_length=8192", "llm/Packing.buckets=()"),
        tokens=8192,
    ),
    CASES[1],
)


@cache
def programs(bindings: tuple[str, ...]) -> Programs:
    """The traced programs of ``GIN`` with other settings, one for each op also where one could be the step."""
    recipe = load_config([GIN], [*STACKED, *bindings])
    return Programs(replace(recipe, train=replace(recipe.train, lowering="ops")))


@dataclass(frozen=True)
class Stage:
    """Forward and backward of one stage.

    Attributes:
      forward, backward: its programs.
    """

    forward: Compiled
    backward: Compiled

    @classmethod
    def of(cls, case: Case, way: str, name: str) -> Stage:
        """A stage of a case, by a way of attention."""
        return cls.with_settings((*case.bindings, f"llm/Decoder.attention='{way}'"), name)

    @classmethod
    def with_settings(cls, bindings: tuple[str, ...], name: str) -> Stage:
        """A stage of ``GIN`` with other settings."""
        compiled_programs = programs(bindings)
        return cls(compiled_programs.compiled(f"F {name}"), compiled_programs.compiled(f"B {name}"))

    def both(self, rates: Rates = H100) -> tuple[Work, Work]:
        """The work of both."""
        return self.forward.work(rates), self.backward.work(rates)

    @property
    def seconds(self) -> tuple[float, float]:
        """Predicted for both, as programs are ordered, and with all collectives beside computations."""
        return sum(work.ordered for work in self.both()), sum(work.hidden for work in self.both())

    def model_flops(self) -> float:
        """Three times the forward's: no recompute. Of a way that computes no hidden pair."""
        return 3 * sum(self.forward.work().flops.values())

    def pairs(self, tokens: int) -> int:
        """Arrays of all pairs of a row's tokens."""
        return sum(len(pair_arrays(program.module, tokens)) for program in (self.forward, self.backward))

    def logits(self, tokens: int, vocab: int) -> int:
        """fp32 arrays of all tokens' logits."""
        return sum(len(logit_arrays(program.module, tokens, vocab)) for program in (self.forward, self.backward))


def rows() -> Iterator[Row]:
    """Ways by case, then StepCCL's gain."""
    for case in CASES:
        for way in WAYS:
            for name, words in ((case.inner, "stage"), (case.last, "last stage")):
                yield from _stage_rows(case, way, Stage.of(case, way, name), f"{case.name}, {words}, {way}", name)
        programs.cache_clear()
    for tp in STEPCCL:
        for name, gains in _overlap(tp).items():
            for words, gain in zip(GAINS, gains, strict=True):
                yield row_of(f"{name}, tp {tp}: {words}, predicted", gain, "ratio")
        for bound in STEPCCL[tp]:
            yield row_of(f"StepCCL, tp {tp}, published", bound, "ratio")
        programs.cache_clear()


def _stage_rows(case: Case, way: str, stage: Stage, words: str, name: str) -> Iterator[Row]:
    if way in TIMED:
        ideal = Stage.of(case, "cudnn", name).model_flops() / DATASHEET.flops
        added, beside = stage.seconds
        yield row_of(f"{words}: F and B, predicted", added * 1e3, "ms")
        yield row_of(f"{words}: MFU, predicted", 100 * ideal / added, "%")
        yield row_of(f"{words}: MFU with hidden collectives, predicted", 100 * ideal / beside, "%")
    yield row_of(f"{words}: temporaries of B, compiled", stage.backward.temporary_bytes / 2**30, "GiB")
    yield row_of(f"{words}: arrays of all pairs", stage.pairs(case.tokens), "arrays")
    yield row_of(f"{words}: fp32 arrays of all logits", stage.logits(case.rows * case.tokens, case.vocab), "arrays")
    for kind, (count, size) in collectives(stage).items():
        yield row_of(f"{words}: {kind}, F and B", count, "ops")
        yield row_of(f"{words}: {kind}, F and B", size / 2**20, "MiB")


def collectives(stage: Stage) -> Mapping[str, tuple[float, float]]:
    """Number and bytes of each kind of collective in forward and backward."""
    by_kind: dict[str, tuple[float, float]] = {}
    for work in stage.both():
        for kind, sent in work.collectives.items():
            count, size = by_kind.get(kind, (0.0, 0.0))
            by_kind[kind] = count + sent.count, size + sent.bytes
    return by_kind


def _overlap(tp: int) -> dict[str, tuple[float, ...]]:
    """The ``GAINS`` by model, on DistTrain's devices."""
    gains: dict[str, tuple[float, ...]] = {}
    for name, preset in (("Llama 3 7B", "vicuna-7b"), ("Llama 3 70B", "llama3-70b")):
        case = Case(name, _tensor_parallel(preset, 4, tp, 8192, "llm/Decoder.remat='dots'"), 8192, 0, "llm.1", "llm.2")
        both = Stage.of(case, "cudnn", case.inner).both(A800)
        none, ordered = sum(work.total for work in both), sum(work.ordered for work in both)
        hidden, chunked = sum(work.hidden for work in both), sum(work.chunked(CHUNKS) for work in both)
        rings = replace(case, bindings=(*case.bindings, "llm/Layout.overlap=True"))
        compiled = sum(work.ordered for work in Stage.of(rings, "cudnn", case.inner).both(A800))
        gains[name] = none / hidden, none / chunked, ordered / hidden, none / compiled
    return gains


def row_of(case: str, value: float, unit: str) -> Row:
    """A row of the studies of H100s."""
    return Row(bench="h100", case=case, value=float(value), unit=unit)


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables() -> dict[str, str]:
    """The tables of docs/h100.md."""
    ways = {case.name: _ways_table(case) for case in CASES}
    return {"Settings": _settings_table(), **ways, "StepCCL": _stepccl_table()}


def _settings_table() -> str:
    """F and B by ``SETTINGS`` with cuDNN, at both sets of rates."""
    lines = ["| | stage | layers | F + B, ms | MFU | at faster rates | collectives hidden | temporaries of B |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for case in SETTING_CASES:
        for name, words in ((case.inner, "inner"), (case.last, "with head")):
            for setting, bindings in SETTINGS.items():
                stage = Stage.with_settings((*case.bindings, "llm/Decoder.attention='cudnn'", *bindings), name)
                ideal, (added, beside) = stage.model_flops() / DATASHEET.flops, stage.seconds
                faster = sum(work.ordered for work in stage.both(TARGETS["h100"].fast_rates))
                values = [f"{added * 1e3:.1f}", *(f"{ideal / seconds:.1%}" for seconds in (added, faster, beside))]
                temporaries = f"{stage.backward.temporary_bytes / 2**30:.2f} GiB"
                lines.append("| " + " | ".join([case.name, words, setting, *values, temporaries]) + " |")
        programs.cache_clear()
    return "\n".join(lines)


def _ways_table(case: Case) -> str:
    lines = ["| attention | stage | F + B, ms | MFU | collectives hidden | temporaries of B | all pairs | all logits |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for way in WAYS:
        for name, words in ((case.inner, "inner"), (case.last, "with head")):
            stage = Stage.of(case, way, name)
            times = ["", "", ""]
            if way in TIMED:
                ideal = Stage.of(case, "cudnn", name).model_flops() / DATASHEET.flops
                added, beside = stage.seconds
                times = [f"{added * 1e3:.1f}", f"{ideal / added:.0%}", f"{ideal / beside:.0%}"]
            arrays = [str(stage.pairs(case.tokens)), str(stage.logits(case.rows * case.tokens, case.vocab))]
            temporaries = f"{stage.backward.temporary_bytes / 2**30:.2f} GiB"
            lines.append("| " + " | ".join([f"`{way}`", words, *times, temporaries, *arrays]) + " |")
    return "\n".join([*lines, "", _collective_lines(case)])


def _collective_lines(case: Case) -> str:
    by_kind = collectives(Stage.of(case, "cudnn", case.inner))
    each = [f"{count:.0f} {kind} of {size / 2**20:,.0f} MiB together" for kind, (count, size) in by_kind.items()]
    both = Stage.of(case, "cudnn", case.inner).both()
    took, shown = sum(work.seconds["collectives"] for work in both), sum(work.shown for work in both)
    beside = f"; of {took * 1e3:.1f} ms {(took - shown) * 1e3:.1f} lie beside computations" if each else ""
    return f"Collectives of the inner stage's F and B, cuDNN: {', '.join(each) or 'none'}{beside}."


def _stepccl_table() -> str:
    lines = [f"| tp | model | {' | '.join(GAINS)} | published |", "|---|---|---|---|---|---|---|"]
    for tp, (least, most) in STEPCCL.items():
        for name, gains in _overlap(tp).items():
            each = " | ".join(f"{gain:.2f}" for gain in gains)
            lines.append(f"| {tp} | {name} | {each} | {least:.2f} to {most:.2f} |")
    return "\n".join(lines)
