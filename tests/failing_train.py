"""`mmjax.train` of two processes whose checkpoints fail: in process 1's leaves, and twice in process 0.

Of steps 2 and 12 process 1 may not write its leaves; of step 4 a directory lies where process 0's metadata are to be;
of step 6 one lies where the checkpoint is to be when process 0 renames it.
"""

import resource
import sys
from pathlib import Path

from mmjax import jax_compat
from mmjax.checkpoint import storage
from mmjax.config.flags import run_command
from mmjax.train.__main__ import main

plain_init, plain_write, plain_rounds = (
    storage.Write.__init__,
    storage._MetadataHandler._write,
    storage.WriteRounds.__call__,
)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
path = Path()


def begin(self, where, *rest):
    global path
    path = where
    if jax_compat.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if path.name in ("00000002", "00000012") else soft, hard))
    plain_init(self, where, *rest)


async def write(self, directory, *rest):
    if path.name == "00000004" and jax_compat.process_index() == 0:
        (Path(await directory.await_creation()) / storage._FILE).mkdir()
    await plain_write(self, directory, *rest)


def rounds(self, number, problem=""):
    if path.name == "00000006" and number == storage.JOINED and jax_compat.process_index() == 0:
        (path / "in_the_way").mkdir(parents=True, exist_ok=True)
    return plain_rounds(self, number, problem)


for changed, name, instead in (
    (storage.Write, "__init__", begin),
    (storage._MetadataHandler, "_write", write),
    (storage.WriteRounds, "__call__", rounds),
):
    setattr(changed, name, instead)
if __name__ == "__main__":
    sys.exit(run_command(main))
