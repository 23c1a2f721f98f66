"""`mmjax.train` of two processes whose evaluations fail: the first in process 1 alone, the second in both of them.

The first cannot read the held-out samples; the second has no memory in the middle of decoding.
"""

import sys
from itertools import count

from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.pipeline.predict import Predictor
from mmjax.train import scoring
from mmjax.train.__main__ import main

plain_held_out, plain_generate, number = scoring.held_out, Predictor.generate, count(1)
now = 0


def held_out(config, samples):
    global now
    now = next(number)
    if now == 1 and jax_compat.process_index() == 1:
        raise OSError("the disk has gone")
    return plain_held_out(config, samples)


def generate(self, *given):
    if now == 2:
        raise MemoryError("too large")
    return plain_generate(self, *given)


for changed, name, instead in ((scoring, "held_out", held_out), (Predictor, "generate", generate)):
    setattr(changed, name, instead)
if __name__ == "__main__":
    sys.exit(run_command(main))
