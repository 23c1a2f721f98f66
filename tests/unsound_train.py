"""`mmjax.train` of two processes whose state has a NaN before step 4 is saved: in a stage of process 1 alone."""

import sys

import jax
import jax.numpy as jnp

from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.train.__main__ import main
from mmjax.train.soundness import Soundness

plain = Soundness.require_finite


def require_finite(self, step):
    states = self._states()
    if step == 4 and jax_compat.process_index() == 1:
        states["vision.0"]["master"] = jax.tree.map(lambda leaf: leaf * jnp.nan, states["vision.0"]["master"])
    plain(self, step)


Soundness.require_finite = require_finite
if __name__ == "__main__":
    sys.exit(run_command(main))
