"""Three models on one device beside the dense reference's results of a CPU, in fp32 and in bf16.

The samples are those of ``mmjax.check``, which cover the cases of packing and masks that data have. In fp32, products
are computed in fp32 (``highest``); XLA's own choice for fp32 on a GPU is TF32, whose difference is noted beside it. In
bf16 the distance from the fp32 reference is compared with that of bf16 on a CPU.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from mmjax.assembly.model import build_model
from mmjax.bench.gpu.job import Job
from mmjax.bench.gpu.kept import Digests, digests, kept, of_module, relative, values_of
from mmjax.config import config_of_values, load_config
from mmjax.config.shipped import CONFIGS
from mmjax.data.loader import tokenizer_of
from mmjax.mesh.layout import Layout
from mmjax.mesh.world import World
from mmjax.parity.compare import difference, of_kind, recovered_gradients
from mmjax.parity.dense import run_reference
from mmjax.parity.product import Session, initial_parameters, sample_packer
from mmjax.parity.samples import BatchSizes, Maker, Samples
from mmjax.parity.shrink import shrink
from mmjax.pipeline.compile import compile_all
from mmjax.recipe import ModuleSpec, Recipe
from mmjax.schedule.schedules import ONE_F_ONE_B

CASES = {
    "sees": "digits_vlm_one_device.gin",
    "sees and hears": "digits_valm.gin",
    "sees, hears and draws": "digits_draw.gin",
}
STEPS = 3
LIMITS = {"loss": 1e-5, "norm": 1e-4, "gradient": 1e-4, "update": 1e-3}
"""Limits on relative differences in fp32: ten times those of ``mmjax.check`` where sums have another order."""
COARSE = 1.5
"""How many times as far from fp32 a GPU in bf16 may be as a CPU in bf16."""
WAYS = (("float32", "highest"), ("bfloat16", ""), ("float32", ""))
"""Compute dtype and precision of fp32 products; "" is XLA's choice."""


def run(job: Job) -> None:
    """Runs all cases in one precision after another; notes and checks their ``distances`` from the kept results.

    The programs of a precision are compiled side by side.
    """
    expected, results = kept()["parity"], dict[str, Any]()
    cases = dict(list(expected.items())[: 1 if job.small else None])
    ways = WAYS[: 2 if job.small else None]
    for dtype, precision in job.while_time(ways, lambda way: " ".join(way).strip(), reserve=1.2):
        way = f"{dtype} {precision}".strip()
        with matmul_precision(precision):
            sessions = {name: session(config_of_values(case["config"]), dtype) for name, case in cases.items()}
            compile_start = time.perf_counter()
            programs = [program for traced in sessions.values() for program in traced.executor.programs()]
            compile_all(programs, partial(_print_compiled, way))
            results[way] = {"compile_seconds": time.perf_counter() - compile_start}
            for name, traced in sessions.items():
                results[way][name] = distances(outcome(traced), expected[name]["results"])
                job.note(**{way: results[way]})
                _check(job, way, name, gaps=results[way][name], case=expected[name])


def _print_compiled(way: str, done: int, total: int, name: str) -> None:
    print(f"{way}: {done} of {total} compiled: {name}", flush=True)


def _check(job: Job, way: str, name: str, *, gaps: Mapping[str, float], case: Mapping[str, Any]) -> None:
    """Checks the distances of a case from its kept results, in a precision."""
    job.check(f"{name}: same samples", samples_of(config_of_values(case["config"]))[1] == case["samples"])
    if way == "float32 highest":
        job.check(f"{name}: {way}", all(gaps[quantity] <= limit for quantity, limit in LIMITS.items()))
    elif way == "bfloat16":
        job.note(cpu_bfloat16={**job.values.get("cpu_bfloat16", {}), name: case["bfloat16"]})
        limits = {quantity: COARSE * case["bfloat16"][quantity] + 1e-3 for quantity in LIMITS}
        job.check(f"{name}: {way}", all(gaps[quantity] <= limit for quantity, limit in limits.items()))


# ---- a run -----------------------------------------------------------------------------------------------------------


def samples_of(recipe: Recipe) -> tuple[Samples, int]:
    """The samples of a configuration, and a CRC-32 of the samples of all ``STEPS`` steps."""
    maker = Maker.of(build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media)))
    samples = Samples(maker=maker, sizes=BatchSizes.of(1, recipe.train.microbatches), seed=recipe.train.seed)
    steps = samples.steps(STEPS)
    arrays = (a for step in steps for s in step for a in (s.tokens, s.loss_weights, *sum(s.media.values(), ())))
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array).tobytes(), checksum)
    return samples, checksum


def session(recipe: Recipe, dtype: str, **train: Any) -> Session:
    """A traced run of ``STEPS`` steps on one device; nothing is compiled yet.

    Its batches are packed here, since a run's loader needs Grain.

    Args:
      recipe: its configuration.
      dtype: ``Train.dtype`` instead of the configured one.
      train: other fields of ``Train`` to change, such as ``lowering="ops"``.
    """
    recipe = replace(recipe, train=replace(recipe.train, dtype=dtype, **train))
    samples = samples_of(recipe)[0]
    traced = Session(recipe, sample_packer(recipe, tokenizer_of(recipe.data.settings, recipe.model.media), samples))
    traced.batches = [traced.parts.packer.step(index, chosen) for index, chosen in enumerate(samples.steps(STEPS))]
    for program in traced.executor.programs():
        program.lower()  # here, where the precision is set
    return traced


def outcome(traced: Session) -> dict[str, Any]:
    """Initialises and runs a session.

    Returns:
      "losses" of each step, "norms" of each step by module, and the ``Digests`` "gradient" of the first step's
      gradients and "update" of the change by all steps.
    """
    traced.executor.initialise(traced.recipe.train.seed)
    run = traced.run()
    gradients = recovered_gradients(run, traced.recipe.model.optimizers, traced.recipe.train.clip_norm)
    return _outcome(run.losses, run.norms, gradients[0], run.leaves)


def _outcome(
    losses: Sequence[float], norms: Sequence[Mapping[str, float]], first_gradients: Any, leaves: Any
) -> dict[str, Any]:
    before, after = (of_kind(leaves[place], "params") for place in (0, -1))
    return {
        "losses": list(map(float, losses)),
        "norms": [{module: float(value) for module, value in by_module.items()} for by_module in norms],
        "gradient": digests(first_gradients),
        "update": digests(difference(after, before)),
    }


def distances(got: Mapping[str, Any], want: Mapping[str, Any]) -> dict[str, Any]:
    """Relative differences of two results of ``outcome``.

    Returns:
      "loss" and "norm", the largest over steps; "gradient" and "update", the largest over modules; and of both
      "<name> by module" and "<name>, worst leaf", a leaf's name with its difference.
    """
    norms = [(a[module], b[module]) for a, b in zip(got["norms"], want["norms"], strict=True) for module in b]
    pairs = {"loss": list(zip(got["losses"], want["losses"], strict=True)), "norm": norms}
    gaps: dict[str, Any] = {
        quantity: max(abs(a - b) / abs(b) if b else abs(a) for a, b in values) for quantity, values in pairs.items()
    }
    for quantity in ("gradient", "update"):
        modules = sorted({name.partition("/")[0] for name in want[quantity]})
        by_module = {
            module: relative(of_module(got[quantity], module), of_module(want[quantity], module)) for module in modules
        }
        gaps |= {
            quantity: max(by_module.values()),
            f"{quantity} by module": by_module,
            f"{quantity}, worst leaf": _worst(got[quantity], want[quantity]),
        }
    return gaps


def _worst(got: Digests, want: Digests) -> list[Any]:
    """The name of the leaf that differs most, and its relative difference."""
    gaps = {name: relative({name: got.get(name, [0.0])}, {name: leaf}) for name, leaf in want.items() if leaf[0]}
    worst = max(gaps, key=lambda name: gaps[name])
    return [worst, gaps[worst]]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """A context in which fp32 products are traced with ``precision``, in all threads: "highest", or "" for XLA's."""
    before = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", precision or None)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


# ---- kept results ----------------------------------------------------------------------------------------------------


def expected() -> dict[str, Any]:
    """The kept results by case of ``CASES``.

    Each has "config", the configuration's values; "samples", their checksum; "results" of the reference, as
    ``outcome``'s; and "bfloat16", the ``distances`` of bf16 on this CPU from them.
    """
    return {name: _expected(small_config(file)) for name, file in CASES.items()}


def small_config(file: str) -> Recipe:
    """A shipped configuration, by its file's name in ``configs``, as ``mmjax.check`` shrinks it, on one device."""
    recipe = load_config([CONFIGS / file])
    alone = replace(recipe.train, schedule=ONE_F_ONE_B, inner=ONE_F_ONE_B)  # one device has nothing to nest
    recipe = replace(recipe, model=recipe.model.map(lambda node: node.at(Layout())), train=alone)
    small = shrink(recipe, STEPS, tokenizer_of(recipe.data.settings, recipe.model.media).vocab_size).recipe
    model = small.model.map(_with_one_bucket)  # one program
    return replace(small, model=model, world=replace(small.world, platform="", devices=1))


def _with_one_bucket(node: ModuleSpec) -> ModuleSpec:
    """The node with the largest of its buckets."""
    return replace(node, packing=replace(node.packing, buckets=node.packing.given[-1:]))


def _expected(recipe: Recipe) -> dict[str, Any]:
    samples, checksum = samples_of(recipe)
    packer = sample_packer(recipe, tokenizer_of(recipe.data.settings, recipe.model.media), samples)
    initial = initial_parameters(recipe, packer, World(jax.devices()[:1]))
    model = build_model(recipe, tokenizer_of(recipe.data.settings, recipe.model.media))
    steps, clip_norm = samples.steps(STEPS), recipe.train.clip_norm
    reference = run_reference(model, recipe.model.optimizers, initial, steps, clip_norm)
    results = _outcome(reference.losses, reference.norms, reference.gradients[0], reference.leaves)
    coarse = distances(outcome(session(recipe, "bfloat16")), results)
    return {
        "config": values_of(recipe),
        "samples": checksum,
        "results": results,
        "bfloat16": {quantity: coarse[quantity] for quantity in LIMITS},
    }
