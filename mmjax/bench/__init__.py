"""Benchmarks by name. Each takes a number of rounds and yields rows.

A benchmark's module is imported when the benchmark runs. Most are in the folder `benchmarks/` of a checkout, beside
the package; a wheel has those of the package alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmjax.bench.rows import Row
from mmjax.flags import Flag

CHECKOUT = Path(__file__).resolve().parents[2]
"""The root of the checkout that holds this package; of an installed wheel, the folder of all packages."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A benchmark.

    Attributes:
      where: "module:function".
      doc: one sentence for ``--help``.
      flags: flags beside those of every benchmark; their values are keyword arguments of the function.
      on_request: whether it runs only where it is named.
    """

    where: str
    doc: str
    flags: tuple[Flag, ...] = ()
    on_request: bool = False

    @property
    def available(self) -> bool:
        """Whether the benchmark is part of the package, or of the checkout that holds the package."""
        return not self._of_checkout or _is_checkout()

    def function(self) -> Callable[..., Iterator[Row]]:
        """Imports the benchmark's function, which is called as ``function(rounds, **values)``, a value for each flag.

        May put the checkout at the front of ``sys.path``.
        """
        if self._of_checkout and str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))  # before other folders: `benchmarks` is a common name
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(module), function)

    @property
    def _of_checkout(self) -> bool:
        return self.where.startswith("benchmarks.")


BENCHES = {
    "layouts": Bench(
        where="benchmarks.layouts:bench_layouts",
        doc="Step times of the digits configurations over that of the one-device program.",
    ),
    "runtime": Bench(
        where="benchmarks.runtime:bench_runtime",
        doc="A pipelined step over the summed compute of its ops run alone, on one core, and where the rest goes.",
    ),
    "simulate": Bench(
        where="benchmarks.simulate:bench_simulate",
        doc="Simulated step times against real processes whose ops sleep for their modelled time.",
    ),
    "routes": Bench(
        where="benchmarks.routes:bench_routes",
        doc="Bytes on the busiest link of a boundary, leader against sliced, and how many routes it has; counted.",
    ),
    "schedules": Bench(
        where="benchmarks.schedules:bench_schedules",
        doc="Every schedule and the usual ways to place encoders on three workloads: simulated, and real processes.",
    ),
    "nested": Bench(
        where="benchmarks.nested.command:bench_nested",
        doc="BigMac's two models on 128 GPUs, nested and as its baselines: simulated; and real processes.",
        flags=(Flag(name="picture", doc="path of a picture of the microbatches in flight."),),
    ),
    "bf16": Bench(
        where="benchmarks.bf16:bench_bf16",
        doc="200 steps of three layouts in bf16 and of one device in fp32: how far their losses part.",
    ),
    "reorder": Bench(
        where="benchmarks.reorder:bench_reorder",
        doc="Reordering 1,920 skewed samples over 8 to 120 dp ranks: what it takes and, simulated, what it gains.",
    ),
    "lowerings": Bench(
        where="benchmarks.lowerings:bench_lowerings",
        doc="A pipeline as one program over the same as a program per op: step time, compile time and bytes.",
    ),
    "generate": Bench(
        where="benchmarks.generate:bench_generate",
        doc="New tokens a second with a cache of keys and values, beside computing every row again for each token.",
    ),
    "load": Bench(
        where="benchmarks.load:bench_load",
        doc="A language model of 2 GB in a folder of safetensors, read by two processes into eight devices' shards.",
        flags=(Flag(name="gigabytes", doc="of the folder, in temporary files.", default=2),),
    ),
    "data": Bench(
        where="benchmarks.data:bench_data",
        doc="What a consumer waits for a step of large images: made in its process, by workers, by a server.",
    ),
    "data-plans": Bench(
        where="benchmarks.data_plans:bench_data_plans",
        doc="Data plans of many steps of each digits configuration, in several numbers of buckets; about an hour.",
        flags=(Flag(name="steps", doc="Steps of each.", default=20_000),),
        on_request=True,
    ),
    "predictions": Bench(
        where="benchmarks.predictions:bench_predictions",
        doc="Step times of digits layouts as planned from a profile of this machine, beside measured ones.",
    ),
    "memory": Bench(
        where="benchmarks.memory:bench_memory",
        doc="Bytes of stages' devices as planned from compiled trials and from traces, beside compiled programs'.",
    ),
    "sharding": Bench(
        where="benchmarks.sharding:bench_sharding",
        doc="Bytes of a device by kind for each Layout.shard: counted, of live arrays, and of compiled programs; and "
        "steps of lanes that pull parameters beside those that gather together: eight processes.",
    ),
    "experts": Bench(
        where="benchmarks.experts:bench_experts",
        doc="Experts beside a dense SwiGLU of equal active size: processor seconds, forward and backward.",
    ),
    "head": Bench(
        where="benchmarks.head:bench_head",
        doc="The LLM's loss by chunks of tokens beside the logits of all: compiled temporaries, and times.",
    ),
    "masks": Bench(
        where="benchmarks.masks:bench_masks",
        doc="Attention by blocks of tokens under masks, beside that of all pairs: compiled temporaries, and times.",
    ),
    "cp": Bench(
        where="benchmarks.cp:bench_cp",
        doc="Blocks of tokens over context-parallel ranks: the fullest rank's attention, counted and timed; bytes.",
    ),
    "plan": Bench(
        where="benchmarks.plan:bench_plan",
        doc="Planning MLLM-72B on 112 to 10,000 devices, and small problems: time and optimality.",
    ),
    "peer": Bench(
        where="benchmarks.peer.command:bench_peer",
        doc="A training step beside PyTorch's and transformers', eager and compiled: the same weights, dialogues and "
        "losses, and where the time goes.",
        flags=(
            Flag(name="small", doc="shapes for a CPU: tries the path, measures nothing.", default=False),
            Flag(name="dtype", doc="of the computation, float32 or bfloat16.", default="float32"),
            Flag(name="threads", doc="cores of each process.", default=2),
            Flag(name="python", doc="a Python with torch and transformers; this one unless given."),
        ),
        on_request=True,
    ),
    "gpu": Bench(
        where="mmjax.bench.gpu.command:bench_gpu",
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
        where="mmjax.bench.soak:bench_soak",
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
    "sends": Bench(
        where="benchmarks.sends:bench_sends",
        doc="What it costs that senders wait for receivers: eight processes, simulated and replayed; and training over "
        "processes on CPUs, by transport.",
        flags=(Flag(name="processes", doc="Numbers of training's processes, with commas between.", default="2,4,8"),),
        on_request=True,
    ),
    "faults": Bench(
        where="mmjax.bench.faults:bench_faults",
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


def run_bench(name: str, rounds: int, **flags: str | int | bool) -> Iterator[Row]:
    """The rows of one benchmark, each as soon as it is known.

    Args:
      name: a key of ``BENCHES``, such as "soak".
      rounds: measurements of each case; some benchmarks ignore it.
      flags: a value for each of the benchmark's flags, by name; defaults are not filled in.

    Raises:
      ConfigError: a flag is wrong, or something that the benchmark needs is missing.
    """
    return BENCHES[name].function()(rounds, **flags)


def _is_checkout() -> bool:
    return (CHECKOUT / "benchmarks").is_dir() and (CHECKOUT / "pyproject.toml").is_file()
