"""``python -m mmjax.bench [NAME …] [--json]``: what the project claims about speed, measured again.

Every row is a ratio of two things measured in turn in one process: a noisy machine moves both. On CPU one process
never overlaps two submeshes: a pipelined step there shows overhead, not a pipeline's gain.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmjax.config.flags import Flag, one_line_errors, parse_flags
from mmjax.configurable import ConfigError, suggest

FLAGS = (
    Flag(name="json", doc="One JSON object a row instead of a table.", default=False),
    Flag(name="rounds", doc="Measurements of each case; the median counts.", default=15),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
      bench, case: what was measured.
      value, unit: the outcome.
      target: what it should not exceed; ``None`` where nothing is promised.
      ok: whether it is met; true without a target.
    """

    bench: str
    case: str
    value: float
    unit: str
    target: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the target is met."""
        return self.target is None or self.value <= self.target


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
    from mmjax.config import load_config
    from mmjax.data.loader import StepMaker, make_source
    from mmjax.run.assembly import assemble, encoder_specs, signed

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


BENCHES: dict[str, Callable[[int], Iterator[Row]]] = {"layouts": bench_layouts}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named benchmarks, or all; exit status 1 when a target is missed."""
    with one_line_errors():
        arguments = list(sys.argv[1:] if argv is None else argv)
        names = [a for a in arguments if not a.startswith("-")] or list(BENCHES)
        flags = parse_flags([a for a in arguments if a.startswith("-")], FLAGS, "python -m mmjax.bench [NAME …]")
        for name in names:
            if name not in BENCHES:
                raise ConfigError(f"benchmark {name!r}: there is none of this name; {suggest(name, BENCHES)}")
        rows = [row for name in names for row in BENCHES[name](int(flags.values["rounds"]))]
    for row in rows:
        print(json.dumps({**asdict(row), "ok": row.ok}) if flags.values["json"] else _line(row))
    return 0 if all(row.ok for row in rows) else 1


def _line(row: Row) -> str:
    target = "" if row.target is None else f"  target ≤ {row.target:g}  {'ok' if row.ok else 'MISSED'}"
    return f"{row.bench:10} {row.case:32} {row.value:10.4g} {row.unit}{target}"


if __name__ == "__main__":
    sys.exit(main())
