"""``python -m mmjax.bench.faults.faulty FLAGS``: ``mmjax.train`` whose process 1 has a fault, once.

``MMJAX_FAULT`` in the environment is the fault's name in ``FAULTS``; ``MMJAX_FAULT_MARK`` is the path of a file that is
written when it happens. A run that starts when the file exists has no fault.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.mesh.spmd import Program
from mmjax.pipeline.executor import Executor
from mmjax.pipeline.walker import Walker
from mmjax.schedule.ops import Op
from mmjax.train.__main__ import main

FAULTY_PROCESS = 1
STEP = 10
"""The number of steps that are dispatched before the fault."""
SLOWNESS = 0.3
"""Extra seconds of each forward of the encoder on the devices of a slow process."""
_FOR_EVER = 10_000.0


def hang() -> None:
    """Changes this process so that in process 1, from a step after ``STEP`` on, the next op never returns.

    This and the other faults patch classes of mmjax for good; see ``MMJAX_FAULT_MARK`` above.
    """
    dispatch = Walker.dispatch

    def faulty_dispatch(self: Walker, op: Op) -> None:
        if _begun:
            time.sleep(_FOR_EVER)
        dispatch(self, op)

    _mark_steps()
    Walker.dispatch = faulty_dispatch


def slow() -> None:
    """Changes this process so that in process 1, after ``STEP`` steps, each forward of "vision" takes longer.

    ``SLOWNESS`` has the seconds.
    """
    call = Program.__call__

    def slow_call(self: Program, *args: Any) -> Any:
        if _begun and self.name == "F vision.0":
            params, inputs, carry = args
            return call(self, params, {**inputs, "patches": after_waiting(inputs["patches"], SLOWNESS)}, carry)
        return call(self, *args)

    _mark_steps()
    Program.__call__ = slow_call


def nan() -> None:
    """Changes this process so that in process 1, after ``STEP`` steps, a parameter becomes NaN, once."""
    original_step = Executor.step

    def step(self: Executor, *args: Any, **kwargs: Any) -> Any:
        if _happens():
            name = next(name for name, stage in self.placed.stages.items() if stage.submesh.local)
            first_leaf, *later_leaves = jax.tree.leaves(self.states[name]["master"])
            structure = jax.tree.structure(self.states[name]["master"])
            self.states[name]["master"] = jax.tree.unflatten(structure, [first_leaf + jnp.nan, *later_leaves])
        return original_step(self, *args, **kwargs)

    Executor.step = step


FAULTS: dict[str, Callable[[], None]] = {"hang": hang, "slow": slow, "nan": nan}
"""By name, the function that installs the fault in this process."""

_steps = 0
_begun = False


def _mark_steps() -> None:
    """Makes each step find out whether the fault has begun."""
    original_step = Executor.step

    def step(self: Executor, *args: Any, **kwargs: Any) -> Any:
        global _begun
        _begun = _begun or _happens()
        return original_step(self, *args, **kwargs)

    Executor.step = step


def _happens() -> bool:
    """Whether the fault happens at this step; true once, in one process."""
    global _steps
    _steps += 1
    mark = Path(os.environ["MMJAX_FAULT_MARK"])
    if jax_compat.process_index() != FAULTY_PROCESS or _steps <= STEP or mark.exists():
        return False
    mark.write_text(f"{time.time()}\n")
    return True


def after_waiting(x: jax.Array, seconds: float) -> jax.Array:
    """Returns `x`, a global array with a `NamedSharding`, after each device of this process has waited `seconds`."""

    def wait(part: Any) -> Any:
        time.sleep(seconds)
        return part

    assert isinstance(x.sharding, NamedSharding)
    mesh, spec = x.sharding.mesh, x.sharding.spec
    waiting = jax.shard_map(
        lambda part: jax.pure_callback(wait, part, part),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(waiting)(x)


if __name__ == "__main__":
    if name := os.environ.get("MMJAX_FAULT", ""):
        FAULTS[name]()
    sys.exit(run_command(main))
