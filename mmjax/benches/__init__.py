"""Benchmarks by name. Each takes a number of rounds and yields rows; it imports what it measures when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from mmjax.benches.rows import Row
from mmjax.flags import Flag


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark.

    Attributes:
      where: "module:function".
      doc: one sentence for ``--help``.
      flags: beside those of every benchmark; their values are keyword arguments of the function.
      on_request: whether it runs only where it is named.
    """

    where: str
    doc: str
    flags: tuple[Flag, ...] = ()
    on_request: bool = False


BENCHES = {
    "layouts": Bench(
        where="mmjax.benches.layouts:bench_layouts",
        doc="Step times of the digits configurations over that of the one-device program.",
    ),
    "runtime": Bench(
        where="mmjax.benches.runtime:bench_runtime",
        doc="A pipelined step over the summed compute of its ops run alone, on one core, and where the rest goes.",
    ),
    "simulate": Bench(
        where="mmjax.benches.simulate:bench_simulate",
        doc="Simulated step times against real processes whose ops sleep for their modelled time.",
    ),
    "routes": Bench(
        where="mmjax.benches.routes:bench_routes",
        doc="Bytes on the busiest link of a boundary, leader against sliced, and how many routes it has; counted.",
    ),
    "schedules": Bench(
        where="mmjax.benches.schedules:bench_schedules",
        doc="Every schedule and the usual ways to place encoders on three workloads: simulated, and real processes.",
    ),
    "nested": Bench(
        where="mmjax.benches.nested.command:bench_nested",
        doc="BigMac's two models on 128 GPUs, nested and as its baselines: simulated; and real processes.",
        flags=(Flag(name="picture", doc="path of a picture of the microbatches in flight."),),
    ),
    "bf16": Bench(
        where="mmjax.benches.bf16:bench_bf16",
        doc="200 steps of three layouts in bf16 and of one device in fp32: how far their losses part.",
    ),
    "reorder": Bench(
        where="mmjax.benches.reorder:bench_reorder",
        doc="Reordering 1,920 skewed samples over 8 to 120 dp ranks: what it takes and, simulated, what it gains.",
    ),
    "lowerings": Bench(
        where="mmjax.benches.lowerings:bench_lowerings",
        doc="A pipeline as one program over the same as a program per op: step time, compile time and bytes.",
    ),
    "generate": Bench(
        where="mmjax.benches.generate:bench_generate",
        doc="New tokens a second with a cache of keys and values, beside computing every row again for each token.",
    ),
    "load": Bench(
        where="mmjax.benches.load:bench_load",
        doc="A language model of 2 GB in a folder of safetensors, read by two processes into eight devices' shards.",
        flags=(Flag(name="gigabytes", doc="of the folder, in temporary files.", default=2),),
    ),
    "data": Bench(
        where="mmjax.benches.data:bench_data",
        doc="What a consumer waits for a step of ten large images: made in its process, by workers, by a server.",
    ),
    "data-plans": Bench(
        where="mmjax.benches.data_plans:bench_data_plans",
        doc="Data plans of many steps of each digits configuration, in several numbers of buckets; about an hour.",
        flags=(Flag(name="steps", doc="Steps of each.", default=20_000),),
        on_request=True,
    ),
    "predictions": Bench(
        where="mmjax.benches.predictions:bench_predictions",
        doc="Step times of digits layouts as planned from a profile of this machine, beside measured ones.",
    ),
    "memory": Bench(
        where="mmjax.benches.memory:bench_memory",
        doc="Bytes of stages' devices as planned from compiled trials and from traces, beside compiled programs'.",
    ),
    "head": Bench(
        where="mmjax.benches.head:bench_head",
        doc="The LLM's loss by chunks of tokens beside the logits of all: compiled temporaries, and times.",
    ),
    "masks": Bench(
        where="mmjax.benches.masks:bench_masks",
        doc="Attention by blocks of tokens under masks, beside that of all pairs: compiled temporaries, and times.",
    ),
    "cp": Bench(
        where="mmjax.benches.cp:bench_cp",
        doc="Blocks of tokens over context-parallel ranks: the fullest rank's attention, counted and timed; bytes.",
    ),
    "plan": Bench(
        where="mmjax.benches.plan:bench_plan",
        doc="Planning MLLM-72B on 112 to 10,000 devices, and small problems: time and optimality.",
    ),
    "gpu": Bench(
        where="mmjax.benches.gpu.command:bench_gpu",
        doc="What one GPU says, in under nine minutes: parity, a step of real shapes, attention, PyTorch beside it.",
        flags=(
            Flag(name="out", doc="folder for results.json, log.txt and pictures.", default="runs/gpu"),
            Flag(name="only", doc="sections by name, with commas between them; all unless given."),
            Flag(name="small", doc="shapes for a CPU: tries the path, measures nothing.", default=False),
            Flag(name="seconds", doc="of everything; the sections share them.", default=540),
            Flag(name="keep", doc="computes the kept results again, on the CPU.", default=False),
        ),
        on_request=True,
    ),
    "soak": Bench(
        where="mmjax.benches.soak:bench_soak",
        doc="Configurations drawn at random: each trains, is stopped, resumes, trains alike under another layout, "
        "evaluates and exports, or is refused in one line.",
        flags=(
            Flag(name="minutes", doc="No draw starts later; 0 is no limit.", default=10),
            Flag(name="seed", doc="Of the draws.", default=0),
            Flag(name="first", doc="The number of the first draw.", default=0),
            Flag(name="draws", doc="How many; 0 is as many as there is time for.", default=0),
            Flag(name="jobs", doc="Draws at the same time.", default=2),
            Flag(name="out", doc="Folder of what failed draws leave behind.", default="runs/soak"),
        ),
        on_request=True,
    ),
    "faults": Bench(
        where="mmjax.benches.faults:bench_faults",
        doc="Faults in runs of several processes: seconds until each is named, steps that it costs, and losses after "
        "it beside those of a run without a fault.",
        flags=(
            Flag(name="processes", doc="Numbers of processes, with commas between them.", default="2,4"),
            Flag(name="only", doc="Faults by name, with commas between them; all unless given."),
            Flag(name="out", doc="Folder of what failed runs leave behind.", default="runs/faults"),
        ),
        on_request=True,
    ),
}
"""Every benchmark by name, in the order in which they run."""

MOVED = {"ablation": "distrain", "nvidia": "nvidia"}
"""The study of a checkout's folder `studies/` by the name of the benchmark that it once was."""


def run_bench(name: str, rounds: int, **own: str | int | bool) -> Iterator[Row]:
    """The rows of one benchmark, each as soon as it is known; ``own`` are the values of its flags.

    Raises:
      ConfigError: when something that the benchmark needs is not here.
    """
    module, _, function = BENCHES[name].where.partition(":")
    return getattr(importlib.import_module(module), function)(rounds, **own)
