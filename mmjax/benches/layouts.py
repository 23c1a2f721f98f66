"""Step times of the digits configurations over that of the one-device program."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmjax.benches.rows import Row
from mmjax.config import load_config
from mmjax.data.loader import StepMaker, make_source
from mmjax.run.assembly import assemble, encoder_specs, signed


def bench_layouts(rounds: int) -> Iterator[Row]:
    """Step time of the digits configurations on virtual devices, over that of the one-device program."""
    steps = {name: _stepper(name) for name in ("one_device", "colocated", "homogeneous", "")}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    base = times["one_device"]
    yield Row(bench="layouts", case="one_device step", value=statistics.median(base), unit="s")
    for name in ("colocated", "homogeneous", ""):
        ratio = statistics.median(a / b for a, b in zip(times[name], base, strict=True))
        yield Row(bench="layouts", case=f"{name or 'non-colocated'} / one_device", value=ratio, unit="ratio")


def _stepper(name: str) -> Callable[[], Any]:
    """A function that runs one training step of a digits configuration and waits for it."""

    suffix = f"_{name}" if name else ""
    config = load_config([f"configs/digits_vlm{suffix}.gin"], ["World.devices=8", "Train.eval_samples=0"])
    parts = assemble(config)
    parts.executor.compile()
    parts.executor.initialise(config.train.seed)
    source = make_source(config.data, encoder_specs(config), seed=config.train.seed, split="train")
    batch = StepMaker(source=source, packer=parts.packer, global_batch=config.train.global_batch)(0)
    microbatches = [signed(m) for m in batch.microbatches]

    def step() -> Any:
        return parts.executor.step(microbatches, batch.denominator).fetch()

    step()
    return step
