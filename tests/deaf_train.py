"""`mmjax.train` of two processes, one of which is bad at sending: the environment's DEAF says how.

``slow``: process 1 takes 0.2 s more to take a gradient. ``hang``: it never gives an activation. ``fail``: that raises.
"""

import os
import sys
import time

from mmjax import jax_compat
from mmjax.config.flags import run_command
from mmjax.mesh.transfer import MovedTransfer
from mmjax.train.__main__ import main

plain = MovedTransfer.move
how = os.environ.get("DEAF", "")


def move(self, packed):
    if jax_compat.process_index() == 1:
        if how == "slow" and self.routing.name == "vision.0->llm.0 backward":
            time.sleep(0.2)
        if self.routing.name == "vision.0->llm.0 forward":
            if how == "hang":
                time.sleep(1000)
            if how == "fail":
                raise OSError("no route to host")
    return plain(self, packed)


MovedTransfer.move = move
if __name__ == "__main__":
    sys.exit(run_command(main))
