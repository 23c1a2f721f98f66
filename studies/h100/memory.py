"""The memory that a dry run counts for each program, against the program that XLA compiles for H100s; no times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmjax.bench.rows import Row
from mmjax.compile.forecast import FORECAST, Forecast, forecast
from mmjax.compile.programs import Programs
from mmjax.config import load_config
from studies.h100.report import CASES, GIN, STACKED, row_of

_FOUR = ("llm/Layout.pp=4", "Data.sequence_length=1024", "Train.global_batch=64", "Train.microbatches=8")
_TWICE = (*_FOUR, "llm/Layout.dp=2", "vision/Layout.rank_offset=8")
MADE_ON: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llava15.gin": (GIN, ()),
    "the same, stacked, all recomputed, 2,048 tokens": (GIN, (*STACKED, *CASES[0].bindings)),
    "Llama 3 70B, tp 8, 8,064 tokens, products kept": (
        GIN,
        (*CASES[1].bindings, "Train.unroll=True", "vision/ViT.remat='dots'", "llm/Decoder.remat='dots'"),
    ),
    "Vicuna-7B frozen with LoRA, dp 2": (
        GIN,
        (*_TWICE, "llm/Optimizer.frozen=True", "llm/Lora.rank=128", "llm/Lora.targets=('attn/*', 'mlp/*')"),
    ),
}
"""Configurations by which the estimates were made, (file, settings) by name."""
SHOWN_ON: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "a 13B, tp 2, dp 2, GQA of 8, products kept": (
        GIN,
        (
            *("llm/Decoder.layers=40", "llm/Decoder.width=5120", "llm/Decoder.heads=40", "llm/Decoder.kv_heads=8"),
            *("llm/Decoder.mlp=13824", "llm/Layout.pp=4", "llm/Layout.tp=2", "llm/Layout.dp=2"),
            *("vision/Layout.rank_offset=16", "Data.sequence_length=2048", "llm/Packing.buckets=()"),
            *("llm/Decoder.remat='dots'", "Train.global_batch=32", "Train.microbatches=16"),
        ),
    ),
    "Vicuna-7B, cp 2, 8,192 tokens, all recomputed": (
        GIN,
        (
            *("llm/Layout.pp=4", "llm/Layout.cp=2", "vision/Layout.rank_offset=8", "Data.sequence_length=8192"),
            *("llm/Packing.buckets=()", "llm/Decoder.remat='full'", "Train.global_batch=8", "Train.microbatches=8"),
        ),
    ),
    "Vicuna-7B, zb-h1, W apart from B": (GIN, (*_FOUR, "vision/Layout.rank_offset=4", "Train.schedule='zb-h1'")),
    "Qwen3-8B, Qwen2-VL's encoder, dp 2, both trained": (
        GIN,
        (
            *("llm/Decoder.preset='qwen3-8b'", "vision/ViT.preset='qwen2-vl-7b'", "vision/ViT.layers=32"),
            *("vision/ViT.merge=2", "vision/Optimizer.frozen=False", "vision/Layout.dp=2", *_TWICE),
        ),
    ),
    "an encoder of sound and a generator of images beside Vicuna-7B's widths": (
        "configs/digits_draw.gin",
        (
            *("llm/Decoder.preset='vicuna-7b'", "llm/Decoder.layers=8", "llm/Decoder.kv_heads=32"),
            *("llm/Decoder.width=4096", "llm/Decoder.heads=32", "llm/Decoder.mlp=11008", "Train.dtype='bfloat16'"),
            *("audio/Whisper.width=1280", "audio/Whisper.heads=20", "audio/Whisper.mlp=5120", "audio/Whisper.layers=8"),
            *("painter/DiT.width=1152", "painter/DiT.heads=16", "painter/DiT.mlp=4608", "painter/DiT.layers=8"),
            *("vision/ViT.width=1024", "vision/ViT.heads=16", "vision/ViT.mlp=4096", "vision/ViT.layers=8"),
            *("Train.global_batch=256", "Train.eval_every=0"),
        ),
    ),
}
"""Configurations that were looked at afterwards."""


def forecasts(gin: str, bindings: tuple[str, ...]) -> Iterator[tuple[str, Forecast]]:
    """Kind and memory of each distinct program of a configuration that a dry run counts, compiled for H100s."""
    recipe = load_config([gin], list(bindings))
    programs = Programs(replace(recipe, train=replace(recipe.train, lowering="ops")))
    uses = {programs.compiler.key(use.program): use for use in programs.uses if use.kind in FORECAST}
    programs.compiler.all([use.program for use in uses.values()])
    for use in uses.values():
        if memory := forecast(programs, use):
            yield use.kind, memory


def rows() -> Iterator[Row]:
    """The largest error of each configuration and kind of program."""
    for name, configuration in {**MADE_ON, **SHOWN_ON}.items():
        for kind, forecasts in _by_kind(*configuration).items():
            worst = max(forecasts, key=lambda memory: abs(memory.error))
            yield row_of(f"{name}: memory of {kind}, counted over compiled", 1 + worst.error, "ratio")


def table() -> str:
    """Markdown: how much more the dry run counts than is compiled, for each configuration and kind of program."""
    lines = [f"| | {' | '.join(FORECAST)} | largest compiled |", f"|---|{'---|' * (len(FORECAST) + 1)}"]
    for words, configurations in (("made on", MADE_ON), ("shown on", SHOWN_ON)):
        for name, configuration in configurations.items():
            by_kind = _by_kind(*configuration)
            most = max(memory.compiled for forecasts in by_kind.values() for memory in forecasts)
            cells = [_range([memory.error for memory in by_kind[kind]]) for kind in FORECAST]
            lines.append(f"| {words}: {name} | {' | '.join(cells)} | {most / 2**30:.1f} GiB |")
    return "\n".join(lines)


def _by_kind(gin: str, bindings: tuple[str, ...]) -> Mapping[str, list[Forecast]]:
    by_kind: dict[str, list[Forecast]] = defaultdict(list)
    for kind, memory in forecasts(gin, bindings):
        by_kind[kind].append(memory)
    return by_kind


def _range(errors: list[float]) -> str:
    """Least and greatest error in per cent, "-4.2 to +0.1 %"."""
    if not errors:
        return ""
    least, most = (f"{100 * error:+.1f}" for error in (min(errors), max(errors)))
    return f"{least} %" if least == most else f"{least} to {most} %"
