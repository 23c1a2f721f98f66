"""`mmjax.train` with an infinity in a pixel: of step 3, microbatch 1, in the rows that process 1 reads.

Closing takes longer than the others would wait: a process that reports the value has to end with its own status.
"""

import sys
import time

import numpy as np

from mmjax import jax_compat
from mmjax.checkpoint import Checkpointer
from mmjax.config.flags import run_command
from mmjax.data.loader import StepMaker
from mmjax.train.__main__ import main

plain = StepMaker.__call__


def spoilt(self, step):
    batch = plain(self, step)
    if step == 2 and jax_compat.process_index() == 1:
        patches = batch.microbatches[1].inputs["vision"]["patches"]
        held = patches if isinstance(patches, np.ndarray) else patches.local_rows
        held[tuple(axis[0] for axis in np.nonzero(held))] = np.inf
    return batch


StepMaker.__call__ = spoilt
Checkpointer.close = lambda self: time.sleep(20)
if __name__ == "__main__":
    sys.exit(run_command(main))
