"""`mmjax.train` of two processes, of which process 1 goes wrong in step 3: the environment's STUCK says how.

``op``: a forward of vision.0 never ends. ``host``: it never dispatches one. ``late``: it compiles one again, slowly.
``slow``: from step 2 on its ranks take longer for each of them.
"""

import os
import sys
import time

from mmjax import jax_compat
from mmjax.bench.faults.faulty import after_waiting
from mmjax.config.flags import run_command
from mmjax.mesh.spmd import Program
from mmjax.pipeline.executor import Executor
from mmjax.train.__main__ import main

plain_call, plain_step, plain_lower = Program.__call__, Executor.step, Program.lower
how, steps = os.environ.get("STUCK", ""), 0


def step(self, microbatches, denominators):
    global steps
    steps += 1
    return plain_step(self, microbatches, denominators)


def call(self, *args):
    if jax_compat.process_index() == 1 and self.name == "F vision.0" and steps >= (2 if how == "slow" else 3):
        if how == "host":
            time.sleep(1000)
        if how in ("op", "slow"):
            params, inputs, carry = args
            args = params, {**inputs, "patches": after_waiting(inputs["patches"], 1000 if how == "op" else 0.3)}, carry
        if how == "late" and steps == 3:
            self._compiled = None
    return plain_call(self, *args)


def lower(self):
    if how == "late" and steps == 3:
        time.sleep(12)
    plain_lower(self)


Executor.step, Program.__call__, Program.lower = step, call, lower
if __name__ == "__main__":
    sys.exit(run_command(main))
