"""The cost of dispatching a step op by op, over the compute of its ops.

Everything runs on one core: there nothing overlaps, so a step takes at least what its ops take, and the rest is the
runtime's. Three kinds of step are taken in turn, so that a noisy machine moves all of them:

* *step*: a training step as it is, until the new state and the loss are there;
* *alone*: the same step, but every compiled program is called when its arguments are ready and nothing else runs, and
  is waited for. Its time is the op's compute. It includes the call and the return, which a step hides behind other ops,
  so a step may even be shorter than its ops. A move's time is its copies and the work to start them; it counts in the
  boundary's share, and not as compute;
* *host*: the processor time of the dispatching thread, which never waits, by the kind of its work. What the clock
  takes is measured too, and subtracted. The *frees* of JAX's runtime lie between the lines of Python, where an array
  loses its last reference. They are the difference between a step and one that keeps the arguments of all programs and
  copies until it has ended.

Ratios and differences are taken within a round; the median over rounds counts. The same ratio of processor time, over
all threads, leaves out both the time of other processes on a busy machine and the moments in which the core idles.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from benchmarks.one_core import cores, run_on_one_core
from benchmarks.steps import Stepper
from mmjax import jax_compat
from mmjax.bench.rows import Row, at_most
from mmjax.mesh.spmd import Program
from mmjax.pipeline.awaiting import Awaiting
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.memory import residual_bytes
from mmjax.pipeline.walker import Walker
from mmjax.pipeline.watch import measured_residuals
from mmjax.schedule.ops import EDGE_KINDS, Op
from mmjax.schedule.validate import validate

CONFIGURATIONS = {"non-colocated": "digits_vlm.gin", "homogeneous": "digits_vlm_homogeneous.gin"}
"""Pipelined configurations by case."""
MOST_OVERHEAD = 1.10
"""Limit on the time of a step over the compute of its ops."""
MOST_BOUNDARY = 5.0
"""Limit on the percent of all ops' time that pack, move and unpack take."""
MOST_HOST = 60.0
"""Limit on the microseconds of the host's own work for an op."""
CALLS, INPUTS, MOVES, WAITING = "program calls", "copies of inputs", "copies of moves", "waiting"
FREES, OWN = "frees", "own"
HOST_PARTS = (CALLS, INPUTS, MOVES, WAITING, FREES, OWN)
"""Kinds of the host's work: the first five are JAX's, and waiting is what polling takes while the step ends."""


def bench_runtime(rounds: int) -> Iterator[Row]:
    """Yields the overhead of the pipelined configurations, on one core."""
    if cores() > 1:
        yield from run_on_one_core("runtime", rounds)
        return
    yield Row(bench="runtime", case="cores used", value=cores(), unit="")
    for case, config in CONFIGURATIONS.items():
        yield from _rows(case, Stepper(config), rounds)


def _rows(case: str, step: Stepper, rounds: int) -> Iterator[Row]:
    steps: list[float] = []
    alone: list[dict[str, float]] = []
    processor: list[float] = []
    host: list[dict[str, float]] = []
    for _ in range(rounds):
        start, used = time.perf_counter(), time.process_time()
        step()
        steps.append(time.perf_counter() - start)
        used = time.process_time() - used
        alone.append(alone_seconds(step))
        processor.append(used / _compute(alone_seconds(step, time.process_time)))
        host.append(host_seconds(step))
    ops = len(step.parts.schedule.ops)
    compute = [_compute(times) for times in alone]
    boundary = [sum(times.get(kind, 0.0) for kind in EDGE_KINDS) for times in alone]

    def row(quantity: str, values: Iterable[float], unit: str, most: float | None = None) -> Row:
        target = None if most is None else at_most(most)
        return Row(
            bench="runtime", case=f"{case}: {quantity}", value=statistics.median(values), unit=unit, target=target
        )

    yield row("step / compute of its ops", [a / b for a, b in zip(steps, compute, strict=True)], "ratio", MOST_OVERHEAD)
    yield row("the same in processor time", processor, "ratio")
    shares = [100 * part / sum(times.values()) for part, times in zip(boundary, alone, strict=True)]
    yield row("share of boundary ops", shares, "%", MOST_BOUNDARY)
    yield row("step", steps, "s")
    yield row("compute of its ops", compute, "s")
    yield row("ops", [ops], "")
    per_op = 1e6 / ops
    yield row("overhead per op", [(a - b) * per_op for a, b in zip(steps, compute, strict=True)], "µs")
    yield row("host time per op", [sum(times.values()) * per_op for times in host], "µs")
    yield row(
        "host time per op, outside of calls", [(sum(t.values()) - t[CALLS] - t[WAITING]) * per_op for t in host], "µs"
    )
    for part in HOST_PARTS:
        most = MOST_HOST if part == OWN else None
        yield row(f"host time per op, {part}", [times.get(part, 0.0) * per_op for times in host], "µs", most)
    waits = [(a - sum(times.values())) * per_op for a, times in zip(steps, host, strict=True)]
    yield row("waiting for compute per op", waits, "µs")
    for stage, (live, promised) in residuals(step).items():
        yield row(f"residuals of {stage}, live − promised", [live - promised], "bytes", 0)
        yield row(f"residuals of {stage}, promised − live", [promised - live], "bytes", 0)


def residuals(step: Stepper) -> dict[str, tuple[int, int]]:
    """By stage, the peak of residual bytes on a device during a step, and the peak that ``validate`` promises."""
    assert isinstance(step.executor, Executor)  # pipelined configurations only
    with measured_residuals(step.executor) as live:
        step.at_most_memory()
    residual_sizes = residual_bytes(step.parts.placed, step.parts.shapes.values())
    promised = validate(step.parts.schedule, residual_sizes).residual_bytes
    return {stage: (max(live[stage].values(), default=0), size) for stage, size in promised.items()}


def _compute(alone: dict[str, float]) -> float:
    """Seconds of compiled programs: all ops but moves."""
    return sum(seconds for kind, seconds in alone.items() if kind != "move")


def alone_seconds(step: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Seconds on ``clock`` of a step's ops, run one at a time, by kind (see the module's docstring)."""
    seconds: dict[str, float] = defaultdict(float)
    call, kinds = Program.__call__, ["prepare"]

    def call_alone(program: Program, *args: Any) -> Any:
        jax.block_until_ready(args)
        start = clock()
        out = jax.block_until_ready(call(program, *args))
        if kinds[-1] != "move":  # a move is timed as a whole
            seconds[kinds[-1]] += clock() - start
        return out

    def walk(walker: Walker, ops: Iterable[Op], awaiting: Awaiting | None = None) -> None:
        for op in ops:
            kinds.append(op.kind)
            carried = (op.edge, op.microbatch, op.backward)
            if op.kind == "move":
                jax.block_until_ready(walker.in_transit[carried])
            start = clock()
            walker.handlers[op.kind](op)
            if op.kind == "move":
                jax.block_until_ready(walker.in_transit[carried])
                seconds["move"] += clock() - start

    with _replaced(Program, "__call__", call_alone), _replaced(Walker, "walk", walk):
        step()
    return seconds


def host_seconds(step: Callable[[], None]) -> dict[str, float]:
    """Processor seconds of the dispatching thread in a step, by ``HOST_PARTS``; each second counts in one part.

    Takes two steps.
    """
    clock_seconds = _clock_seconds()
    seconds, keeping = _Host(clock_seconds), _Host(clock_seconds, kept=[])
    for host in (seconds, keeping):
        host.measure(step)
    frees = seconds.parts[OWN] - keeping.parts[OWN]
    return {**seconds.parts, FREES: frees, OWN: keeping.parts[OWN]}


def _clock_seconds() -> tuple[float, float]:
    """The seconds of the clock in a timed call itself, and in the one around it."""
    calls, host = 1000, _Host((0.0, 0.0))
    nothing = host.timed(CALLS, _nothing)

    def call_often() -> None:
        for _ in range(calls):
            nothing()

    host.timed(OWN, call_often)()
    return host.parts[CALLS] / calls, host.parts[OWN] / calls


def _nothing() -> None:
    pass


class _Host:
    """Measures the host's work in a step.

    Attributes:
      parts: seconds by kind of work.
    """

    def __init__(self, clock_seconds: tuple[float, float], kept: list[Any] | None = None):
        """``clock_seconds`` are of ``_clock_seconds``; a list ``kept`` gets all arguments, so that none is freed."""
        self.parts: dict[str, float] = defaultdict(float)
        self._clock_seconds, self._kept = clock_seconds, kept
        self._inner, self._kind = [0.0], ""

    def measure(self, step: Callable[[], None]) -> None:
        """Runs a step, and adds its seconds to ``parts``."""
        copies = [(jax, "device_put"), *((jax_compat, name) for name in ("host_array_on", "copies_on", "copy_on"))]
        with ExitStack() as stack:
            stack.enter_context(_replaced(Walker, "walk", lambda walker, *args: self._walk(walker, *args)))
            stack.enter_context(_replaced(Program, "__call__", self.timed(CALLS, Program.__call__)))
            stack.enter_context(_replaced(jax, "block_until_ready", self.timed(WAITING, jax.block_until_ready)))
            for owner, name in copies:
                stack.enter_context(_replaced(owner, name, self.timed(self._copies, getattr(owner, name))))
            self.timed(OWN, step)()

    def timed(self, part: str | Callable[[], str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds its seconds to a part, without those of timed functions that it calls."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._kept is not None:
                self._kept.append((args, kwargs))
            self._inner.append(0.0)
            start = time.thread_time()
            out = function(*args, **kwargs)
            spent = time.thread_time() - start
            inside, around = self._clock_seconds
            self.parts[part if isinstance(part, str) else part()] += spent - self._inner.pop() - inside
            self._inner[-1] += spent + around
            return out

        return call

    def _walk(self, walker: Walker, ops: Iterable[Op], awaiting: Awaiting | None = None) -> None:
        for op in ops:
            self._kind = op.kind
            walker.handlers[op.kind](op)
        self._kind = ""

    def _copies(self) -> str:
        return MOVES if self._kind in EDGE_KINDS else INPUTS


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which an attribute of a class or module is another function."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)
